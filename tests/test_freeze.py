"""Which operations train: by dataflow, on steps of a few lines and on whole models."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxpipe.capture import Capture
from fxpipe.errors import CompileError
from fxpipe.plan.block_graph_check import require
from passes.blocks import analyse
from passes.blocks.freeze import Freeze, freeze
from tests.captured import captured, zoo


class Step(nn.Module):
    """mse(trained(what `body` makes of x)), with a frozen layer, a frozen table and a buffer at hand."""

    def __init__(self, body: Callable[["Step", Tensor], Tensor]) -> None:
        super().__init__()
        self.body = body
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.trained = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4)
        self.register_buffer("table", torch.linspace(0, 1, 10))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return F.mse_loss(self.head(self.body(self, x) + 0 * self.table[t][:, None]), torch.zeros_like(x))

    def example_inputs(self, batch_size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(batch_size, 4), torch.randint(10, (batch_size,))


def classes(capture: Capture, split: Freeze) -> dict[str, str]:
    """Class of every operation, by its name."""
    frozen = dict.fromkeys(split.frozen, "frozen")
    found = dict.fromkeys(split.backbone, "backbone") | frozen | dict.fromkeys(split.local, "local")
    calls = [n.name for n in capture.graph.nodes if n.op == "call_function"]
    assert sorted(found) == sorted(calls)
    assert len(calls) == len(split.backbone) + len(split.frozen) + len(split.local)
    return found


def paths_of(capture: Capture) -> dict[str, str]:
    return {n.name: n.meta["path"] for n in capture.graph.nodes if n.op == "call_function"}


def split_of(body: Callable[[Step, Tensor], Tensor]) -> dict[str, str]:
    capture = captured(Step(body))
    return classes(capture, freeze(capture))


def test_glue_on_a_frozen_value_is_frozen_and_on_an_input_local() -> None:
    found = split_of(lambda s, x: (2 * s.frozen(x).sin()) * x.cos())
    assert (found["linear"], found["sin"], found["cos"]) == ("frozen", "frozen", "local")
    assert {found["mul"], found["mul_1"]} == {"frozen"}
    assert found["index"] == "local"


def test_detached_and_integer_values_made_of_trained_ones_are_backbone() -> None:
    def body(step: Step, x: Tensor) -> Tensor:
        y = step.trained(x)
        return y + y.detach().cos() + (y > 0).to(y.dtype)

    found = split_of(body)
    assert (found["detach"], found["cos"], found["gt"]) == ("backbone", "backbone", "backbone")


def test_sizes_are_local_whatever_they_are_sizes_of() -> None:
    found = split_of(lambda s, x: s.trained(x).reshape(x.shape[0] * 2, 2).sin().reshape(-1, 4))
    assert found["sin"] == "backbone"
    assert {kind for name, kind in found.items() if name.startswith("sym_size")} == {"local"}


def test_what_is_made_of_frozen_weights_alone_is_local() -> None:
    found = split_of(lambda s, x: x @ s.frozen.weight.sin().t() @ s.trained.weight.cos())
    assert (found["sin"], found["numpy_t" if "numpy_t" in found else "t"]) == ("local", "local")
    assert (found["matmul"], found["cos"]) == ("frozen", "backbone")


def test_a_large_product_is_frozen_even_without_weights() -> None:
    class Large(Step):
        def example_inputs(self, batch_size: int) -> tuple[Tensor, Tensor]:
            return torch.randn(batch_size, 512, 4), torch.randint(10, (batch_size,))

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            scores = x @ x.transpose(1, 2)
            small = x.transpose(1, 2)[:, :, :8] @ x[:, :8]
            return self.head(scores @ x).mean() + self.head(small).mean()

    capture = captured(Large(lambda s, x: x))
    found = classes(capture, freeze(capture))
    assert (found["matmul"], found["matmul_1"], found["matmul_2"]) == ("frozen", "local", "frozen")


@pytest.mark.parametrize("region", [torch.no_grad, torch.inference_mode])
def test_trainable_weights_read_without_grad_only_are_frozen(
    region: Callable[[], AbstractContextManager[None]],
) -> None:
    def body(step: Step, x: Tensor) -> Tensor:
        with region():
            return step.trained(x).sin()

    found = split_of(body)
    assert (found["linear"], found["sin"], found["mse_loss"]) == ("frozen", "frozen", "backbone")


def test_weights_read_with_and_without_grad_are_trained() -> None:
    def body(step: Step, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = step.trained(x).sin()
        return step.trained(x) - target

    assert split_of(body)["sin"] == "backbone"


def test_nothing_to_train_is_refused() -> None:
    capture = captured(Step(lambda s, x: x).requires_grad_(False))
    with pytest.raises(CompileError, match=r"0 trainable parameters.*nothing to train.*requires_grad_"):
        freeze(capture)


class TwoEncoders(nn.Module):
    """`b` reads half of what `a` makes, `a` then reads `b`: two components cannot hold it, three can."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)).requires_grad_(False)
        self.b = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        first = self.a[0](x)
        return self.head(self.a[1](self.b(first).sin()) + first).mean()

    def example_inputs(self, batch_size: int) -> tuple[Tensor]:
        return (torch.randn(batch_size, 4),)


def test_components_have_no_cycles() -> None:
    found = freeze(captured(TwoEncoders())).components
    assert [(c.name, c.depends) for c in found] == [("a", ()), ("b", ("a",)), ("a+", ("a", "b"))]
    assert "sin" in found[1].nodes


def test_stable_diffusion_has_two_frozen_components() -> None:
    capture = zoo("sd")
    split = freeze(capture)
    assert [(c.name, c.depends) for c in split.components] == [("vae", ()), ("text_encoder", ())]
    paths = paths_of(capture)
    assert {paths[n].partition(".")[0] for n in split.backbone} == {"unet", ""}
    found = classes(capture, split)
    noisy = next(n.args[0] for n in capture.graph.nodes if n.meta.get("path") == "unet.conv_in")
    assert isinstance(noisy, fx.Node)
    assert noisy.name in split.components[0].nodes
    assert {k for name, k in found.items() if paths[name] == "unet.time_proj"} == {"local"}


def test_controlnet_locks_the_encoder_half() -> None:
    capture = zoo("controlnet")
    split = freeze(capture)
    paths = paths_of(capture)
    assert {paths[n].split(".")[0] for n in split.frozen} == {"unet"}
    encoder = ("unet.conv_in", "unet.time_embedding", "unet.down_blocks", "unet.mid_block")
    assert not any(paths[n].startswith(encoder) for n in split.backbone)
    # In the decoder only the projections of text and time read nothing of the ControlNet.
    decoder = {paths[n].split(".")[-1] for n in split.frozen if paths[n].startswith("unet.up_blocks")}
    assert decoder <= {"to_k", "to_v", "attn2", "nonlinearity", "time_emb_proj", "0", "1"}


class LowRankStack(nn.Module):
    """Layers over an encoded text; only the third and fourth have adapters, so the first two are a frozen prefix."""

    def __init__(self) -> None:
        super().__init__()
        linear = lambda: nn.Linear(4, 4).requires_grad_(False)  # noqa: E731
        self.text, self.layers, self.to_k = linear(), nn.ModuleList(), nn.ModuleList()
        for _ in range(4):
            self.layers.append(linear())
            self.to_k.append(linear())
        self.down, self.up = (nn.ParameterList(torch.randn(4, 4) for _ in range(2)) for _ in range(2))

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        text = self.text(text).sin()
        for i, (layer, to_k) in enumerate(zip(self.layers, self.to_k, strict=True)):
            y = layer(x) if i < 2 else layer(x) + F.linear(F.linear(x, self.down[i - 2]), self.up[i - 2])
            x = (y + to_k(text)).tanh()
        return x.mean()

    def example_inputs(self, batch_size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(batch_size, 4), torch.randn(batch_size, 4)


def test_low_rank_adapters_leave_a_frozen_prefix() -> None:
    capture = captured(LowRankStack())
    split = freeze(capture)
    paths = paths_of(capture)
    assert {paths[n] for n in split.frozen} >= {
        "text",
        "layers.0",
        "layers.1",
        "layers.2",
        *(f"to_k.{i}" for i in range(4)),
    }
    assert "layers.3" in {paths[n] for n in split.backbone}


def test_light_frozen_work_joins_the_one_block_it_serves() -> None:
    capture = captured(LowRankStack())
    paths = paths_of(capture)
    seconds = {name: 0.01 if path.startswith("to_k") else 1.0 for name, path in paths.items()}
    graph = analyse(capture, seconds, 2)
    require(graph, capture)
    owners = {path: graph.owners[name] for name, path in paths.items() if path}
    assert [owners[f"to_k.{i}"] for i in range(3)] == ["to_k", "to_k", 0]
    assert owners["to_k.3"] == owners["layers.3"] > 0
    heavy = analyse(capture, dict.fromkeys(paths, 1.0), 4)
    assert any(paths[n] == "to_k.3" for c in heavy.components for n in c.nodes)
