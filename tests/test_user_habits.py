"""What scripts do around a model: attention in slices, a generator of their own, adapters that come late, arguments
that decorators and hooks look for by name."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import diffusers
import numpy
import pytest
import torch
from diffusers.models.attention_processor import Attention, SlicedAttnProcessor
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from fxpipe.errors import CaptureError, CompileError, RunError
from tests.unet import TinyUNet


class Attending(nn.Module):
    """Attention, to itself and to a text, over heads that a processor may take one by one."""

    def __init__(self, slice_size: int | None) -> None:
        super().__init__()
        processor = None if slice_size is None else SlicedAttnProcessor(slice_size)
        sizes = {"heads": 4, "dim_head": 2, "processor": processor}
        self.own = Attention(8, **sizes)  # type: ignore[no-untyped-call]
        self.other = Attention(8, cross_attention_dim=6, **sizes)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        x = x + self.own(x)
        return (x + self.other(x, encoder_hidden_states=text)).square().mean()

    def example_inputs(self, batch_size: int) -> tuple[Tensor, ...]:
        return torch.randn(batch_size, 5, 8, dtype=torch.float64), torch.randn(batch_size, 3, 6, dtype=torch.float64)


@pytest.mark.parametrize("slice_size", [1, 3])
def test_attention_in_slices_is_attention(slice_size: int) -> None:
    torch.manual_seed(0)
    model = Attending(slice_size).double()
    program = fxpipe.compile(model, 2, batch_size=4, schedule="1f1b")
    found = program.verify(*model.example_inputs(4))
    assert found.ok, found
    assert type(model.own.processor).__call__ is SlicedAttnProcessor.__call__
    assert SlicedAttnProcessor.__call__.__qualname__ == "SlicedAttnProcessor.__call__"


class Noisy(nn.Module):
    """Adds noise drawn by a generator: the model's own, or one made in forward."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.generator = torch.Generator().manual_seed(1) if own else None

    def forward(self, x: Tensor) -> Tensor:
        generator = self.generator or torch.Generator(x.device).manual_seed(1)
        noise = torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device)
        return self.last(torch.tanh(self.first(x + noise))).square().mean()

    def example_inputs(self, batch_size: int) -> tuple[Tensor]:
        return (torch.randn(batch_size, 4, dtype=torch.float64),)


def test_a_generator_of_the_models_own_is_seeded_by_the_engine() -> None:
    model = Noisy(own=True).double()
    with pytest.warns(UserWarning, match="the model holds a torch.Generator"):
        program = fxpipe.compile(model, 2, batch_size=4, schedule="1f1b", cache=False)
    (x,) = model.example_inputs(4)
    before = model.generator.get_state()  # type: ignore[union-attr]
    assert program.verify(x).ok
    assert program.run_local(x, seed=1).loss == program.run_local(x, seed=1).loss != program.run_local(x, seed=2).loss
    assert torch.equal(before, model.generator.get_state())  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore:the model holds a torch.Generator")
def test_a_generator_of_the_models_own_is_not_seeded_in_forward() -> None:
    model = Noisy(own=True).double()
    model.first.register_forward_pre_hook(lambda *_: model.generator.manual_seed(3) and None)  # type: ignore[union-attr]
    with pytest.raises(CaptureError, match=r"forward seeds a torch.Generator of the model"):
        fxpipe.compile(model, 2, batch_size=4, schedule="1f1b", cache=False)
    assert model.generator.initial_seed() == 1  # type: ignore[union-attr]


def test_a_generator_that_is_made_in_forward_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"a torch.Generator passed inside .* attribute of the model"):
        fxpipe.compile(Noisy(own=False).double(), 2, batch_size=4, schedule="1f1b")


class Sigmas(nn.Module):
    """A table's entries for the timesteps of samples, all in one lookup."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("table", torch.linspace(1000, 1, 50))
        self.register_buffer("sigmas", torch.linspace(1, 0, 50))

    def forward(self, x: Tensor) -> Tensor:
        times = self.table[torch.randint(50, (x.shape[0],), device=x.device)]
        sigma = self.sigmas[(self.table == times[:, None]).int().argmax(1)].to(x.dtype)[:, None]
        return self.last(torch.tanh(self.first(x * sigma))).square().mean()


def test_a_table_is_looked_up_for_all_samples_at_once() -> None:
    x = torch.randn(6, 4, dtype=torch.float64)
    program = fxpipe.compile(Sigmas().double(), 2, example_inputs=(x,), microbatches=3, schedule="1f1b")
    assert program.verify(x).ok


class Noising(Sigmas):
    def __init__(self) -> None:
        super().__init__()
        self.scheduler = diffusers.EulerDiscreteScheduler(num_train_timesteps=20)

    def forward(self, x: Tensor) -> Tensor:
        times = self.scheduler.timesteps[torch.randint(20, (x.shape[0],))]
        return super().forward(self.scheduler.add_noise(x, torch.randn_like(x), times))


def test_schedulers_that_look_up_sample_by_sample_are_told_how_to_do_so_for_all() -> None:
    with pytest.raises(CaptureError, match=r"euler_discrete.py.*argmax\(1\)\), or compute it before forward"):
        fxpipe.compile(Noising().double(), 2, example_inputs=(torch.randn(6, 4, dtype=torch.float64),))


class Counted(nn.Module):
    """Asks Python for the length of a batch, and for the largest entry of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x.reshape(len(x), -1))) * torch.rand(len(x), 1, dtype=x.dtype)
        h = h * torch.tensor([[0.5, 1, 2, 3]] * len(x)) + torch.tensor([0.5] * x.shape[0], dtype=x.dtype)[:, None]
        return self.last(h * max(torch.linspace(0, 2, 5))).square().mean()


def test_lengths_of_tensors_are_their_sizes() -> None:
    x = torch.randn(7, 2, 2, dtype=torch.float64)
    program = fxpipe.compile(Counted().double(), 2, example_inputs=(x,), microbatches=3, schedule="1f1b")
    assert program.verify(x).ok


class Unconditional(nn.Module):
    """Trains without its text, whose encoder gives the shape of zeros alone."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.first, self.last = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        nothing = torch.zeros_like(torch.cat([self.encoder(text), self.encoder(text)]))
        return self.last(torch.tanh(self.first(x)) + nothing.chunk(2)[0]).square().mean()


def test_what_is_read_for_its_shape_is_not_computed() -> None:
    inputs = {name: torch.randn(6, 4, dtype=torch.float64) for name in ("x", "text")}
    program = fxpipe.compile(Unconditional().double(), 2, example_inputs=inputs, microbatches=3, schedule="1f1b")
    assert program.verify(**inputs).ok
    assert not any("encoder" in name for rank in program.step.programs for name in rank.state)


def by_numpys_root(layer: nn.Module, x: Tensor) -> Tensor:
    """Normalised as EDM2's layers are (Karras et al., 2024, training/networks_edm2.py)."""
    norm = torch.linalg.vector_norm(x, dim=1, keepdim=True)
    scale = numpy.sqrt(norm.numel() / x.numel()) * numpy.arctan(x.shape[1] / norm.numel())
    return layer(x / torch.add(1e-4, norm, alpha=scale))  # type: ignore[no-any-return]


def in_strata(layer: nn.Module, x: Tensor) -> Tensor:
    starts = torch.linspace(0, 1, x.shape[0] + 1)[:-1] + torch.linspace(0.1, 1e3, x.shape[0])
    return layer(x) * (starts + torch.rand(x.shape[0]) / x.shape[0])[:, None]  # type: ignore[no-any-return]


def with_text(layer: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = layer(x)
    print(f"mean {y.mean():.3f}, {y.mean().item():.3f}, {y}")
    return y * float(f"{torch.ones(2)[1]:.1f}")


class Through(nn.Module):
    def __init__(self, middle: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.middle, self.first, self.last = middle, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.middle(self.last, torch.tanh(self.first(x))).square().mean()


@pytest.mark.parametrize("middle", [by_numpys_root, in_strata, with_text])
def test_numpy_and_text_are_given_free_sizes(middle: Callable[[nn.Module, Tensor], Tensor]) -> None:
    x = torch.randn(5, 4, dtype=torch.float64)
    program = fxpipe.compile(Through(middle).double(), 2, example_inputs=(x,), microbatches=2, schedule="1f1b")
    assert program.verify(x).ok


@pytest.mark.parametrize("form", ["{:d}", "{:4d}"])
def test_what_is_decided_by_a_text_of_a_size_holds_for_that_size(form: str) -> None:
    def looked_up(layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x) * {form.format(5): 3.0}.get(form.format(x.shape[0]), 1.0)  # type: ignore[no-any-return]

    x = torch.randn(5, 4, dtype=torch.float64)
    model = Through(looked_up).double()
    assert fxpipe.compile(model, 2, example_inputs=(x,), microbatches=1, schedule="1f1b").verify(x).ok
    with pytest.raises(CompileError, match="only batches of 5, in one micro-batch"):
        fxpipe.compile(model, 2, example_inputs=(x,), microbatches=2, schedule="1f1b")


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x))).view(-1, 3, 4).softmax(1).square().mean()


@pytest.mark.parametrize(
    ("count", "says"), [(1, "it puts rows of the batch into groups"), (3, "parts of several samples")]
)
def test_rows_that_are_grouped_are_told_to_be_samples(count: int, says: str) -> None:
    with pytest.raises(CompileError, match=says):
        fxpipe.compile(Grouped().double(), 2, example_inputs=(torch.randn(9, 4).double(),), microbatches=count)


class Video(Grouped):
    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        frames = self.first(x).view(len(t), -1, 4) * t[:, None, None]
        return self.last(frames.softmax(1)).square().mean()


@pytest.mark.parametrize("asked", [{"microbatches": 2}, {"microbatches": 2, "batch_size": 3}])
def test_frames_beside_samples_are_told_to_be_given_as_samples(asked: dict[str, int]) -> None:
    batch = torch.randn(12, 4), torch.rand(3)
    says = r"if x has 4 rows for every sample of t, .* give it as \[3, 4, \.\.\.\] and flatten it in forward$"
    with pytest.raises(CompileError, match=says):
        fxpipe.compile(Video(), 2, example_inputs=batch, schedule="1f1b", **asked)


class Autoencoder(Grouped):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        reached = self.last(torch.tanh(self.first(x)))
        return F.mse_loss(reached, target) if target is not x else (reached - x).abs().mean()


class ByValue(Grouped):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.last(torch.tanh(self.first(x))), target)


def test_one_tensor_for_two_inputs_is_refused_where_forward_may_tell() -> None:
    x, other = torch.randn(2, 4, 4).double()
    says = r"inputs x and target are one tensor, and forward compares by `is`, at .*test_user_habits.py:\d+, .*clone"
    with pytest.raises(CompileError, match=says):
        fxpipe.compile(Autoencoder().double(), 2, example_inputs=(x, x), schedule="1f1b")
    engine = fxpipe.compile(Autoencoder().double(), 2, example_inputs=(x, other), schedule="1f1b").local_engine()
    with pytest.raises(CompileError, match=says):
        engine.step((x, x))
    engine.step((x, x.clone()))
    assert fxpipe.compile(ByValue().double(), 2, example_inputs=(x, x), schedule="1f1b").verify(x, x).ok


def test_inputs_that_wait_for_a_gradient_are_refused() -> None:
    """On one device they get it, and so does what made them."""
    x, target = torch.randn(2, 4, 4).double()
    engine = fxpipe.compile(ByValue().double(), 2, example_inputs=(x, target), schedule="1f1b").local_engine()
    for waiting in (target.clone().requires_grad_(), nn.Linear(4, 4).double()(target)):
        with pytest.raises(CompileError, match=r"input target requires a gradient.*parameter of the model.*detach"):
            engine.step((x, waiting))
        engine.step((x, waiting.detach()))


class Adapter(nn.Module):
    """A layer and a low-rank one beside it, as PEFT puts it in its place."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.low = base_layer.requires_grad_(False), nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.low(x)  # type: ignore[no-any-return]


def test_adapters_that_come_after_compiling_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x).square().mean()  # type: ignore[no-any-return]

    x = torch.randn(4, 4, dtype=torch.float64)
    step = Step()
    engine = fxpipe.compile(step, 2, example_inputs=(x,), schedule="1f1b").local_engine()
    engine.step((x,))
    nn.Linear(2, 2)  # another model's layers are nobody's business
    engine.step((x,))
    step.model[2] = Adapter(model[2])  # type: ignore[arg-type]
    with pytest.raises(RunError, match=r"parameters of the model have come, gone.*as with adapters"):
        engine.step((x,))


class Quantised(nn.Module):
    """Takes channels as rows for its codebook: `contiguous` copies only where the layout before it asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = diffusers.VQModel(block_out_channels=(8,), norm_num_groups=4, num_vq_embeddings=12)

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.net(x, return_dict=False)[0], x)

    def example_inputs(self, batch_size: int) -> tuple[Tensor]:
        return (torch.randn(batch_size, 3, 8, 8, dtype=torch.float64),)


def test_a_view_that_another_ranks_layout_does_not_allow_is_a_copy() -> None:
    torch.manual_seed(0)
    model = Quantised().double()
    found = fxpipe.compile(model, 3, batch_size=6, schedule="gpipe", microbatches=2).verify(*model.example_inputs(6))
    assert found.ok, found


def scaled(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """As diffusers' decorators do, which scale adapters: the argument counts where it is given by name."""

    @wraps(forward)
    def around(*args: Any, **kwargs: Any) -> Tensor:
        return forward(*args, **kwargs) * (kwargs.get("about") or {}).get("scale", 1.0)

    return around


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)

    @scaled
    def forward(self, sample: Tensor, about: dict[str, float] | None = None) -> Tensor:
        return self.last(self.first(sample).sin())  # type: ignore[no-any-return]


def test_arguments_are_given_by_name_where_the_call_does(tmp_path: Path) -> None:
    model, x = Scaled().double(), torch.randn(2, 2, 9, 5, dtype=torch.float64)
    model.register_forward_pre_hook(lambda module, args, kwargs: (args, {**kwargs, "sample": kwargs["sample"] + 1}),
                                    with_kwargs=True)  # fmt: skip
    for scale in (1.0, 0.5):
        call = {"sample": x, "about": {"scale": scale}}
        sampler = fxpipe.compile_sampler(model, 2, example=call, sample={"sample": 2}, patches=2, cache=tmp_path)
        assert sampler.verify().ok, scale
        with torch.no_grad():
            assert torch.allclose(sampler.predict(**call), model(**call), rtol=0, atol=1e-12), scale


def test_arguments_by_place_are_another_capture_than_by_name(tmp_path: Path) -> None:
    class Step(Scaled):
        @scaled
        def forward(self, sample: Tensor, about: dict[str, float] | None = None) -> Tensor:
            return self.last(self.first(sample).sin()).square().mean()  # type: ignore[no-any-return]

    model, x, about = Step().double(), torch.randn(4, 2, 9, 5, dtype=torch.float64), {"scale": 0.5}
    by_name = fxpipe.compile(model, 2, example_inputs={"sample": x, "about": about}, cache=tmp_path)
    assert by_name.verify(sample=x, about=about).ok
    assert fxpipe.compile(model, 2, example_inputs=(x, about), cache=tmp_path).verify(x, about).ok


def test_what_torch_has_compiled_is_taken_as_the_model_it_is_made_of() -> None:
    """Under its own names, which begin with _orig_mod."""
    model = TinyUNet("no_grad").double()
    compiled = torch.compile(model)
    batch = model.example_inputs(4)
    program = fxpipe.compile(compiled, 2, example_inputs=batch)
    assert program.verify(**batch).ok
    engine = program.local_engine()
    engine.step(batch)
    assert engine.gather_state_dict().keys() == compiled.state_dict().keys()
    engine.close()


class Whole(nn.Module):
    """A block that is compiled whole, in place, and a function that forward compiles so."""

    def __init__(self, backend: Callable[..., Any]) -> None:
        super().__init__()
        self.block, self.last, self.backend = Scaled(), nn.Linear(5, 1), backend
        self.block.compile(fullgraph=True, backend=backend)

    def forward(self, x: Tensor) -> Tensor:
        squared = torch.compile(lambda x: self.last(x).square(), fullgraph=True, backend=self.backend)
        return squared(self.block(x)).mean()  # type: ignore[no-any-return]


def test_what_torch_must_compile_whole_is_taken_as_it_is() -> None:
    compiled = list[Any]()

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    model, x = Whole(backend).double(), torch.randn(4, 2, 9, 5, dtype=torch.float64)
    assert fxpipe.compile(model, 2, example_inputs=(x,), schedule="1f1b").verify(x).ok
    assert not compiled
    model(x)
    assert len(compiled) == 2


def _plain(x: Tensor) -> Tensor:
    first, gate = x.chunk(2, dim=-1)
    return first * gate.sigmoid()


_gated = torch.compile(_plain, backend="eager")


class Gated(nn.Module):
    """Calls a function that torch compiles at its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(_gated(self.first(x))).square().mean()  # type: ignore[no-any-return]


def test_what_torch_keeps_of_a_function_that_it_compiles_is_no_setting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = Gated().double(), torch.randn(4, 5, dtype=torch.float64)
    engine = fxpipe.compile(model, 2, example_inputs=(x,), schedule="1f1b", cache=tmp_path).local_engine()
    model(x)
    engine.step((x,))
    engine.close()
    assert not [one for one in caplog.records if one.name.startswith("fxpipe")]
    assert [*tmp_path.iterdir()]


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_functions_that_torch_scripts_are_taken_as_their_python() -> None:
    """Compiled, they have no gradients in a trace, nor a free batch size."""
    doubled = torch.jit.script(_plain)
    model, x = Gated().double(), torch.randn(6, 5, dtype=torch.float64)
    model.forward = lambda x: model.last(doubled(model.first(x))).square().mean()  # type: ignore[method-assign]
    assert fxpipe.compile(model, 2, example_inputs=(x,), schedule="1f1b", microbatches=3).verify(x).ok
    hidden = [torch.jit.script(nn.Linear(6, 6).double())]
    model.forward = lambda x: model.last(hidden[0](model.first(x))[:, :3]).square().mean()  # type: ignore[method-assign]
    with pytest.raises(CaptureError, match=r"a script of torch.jit hides its gradients .* Python"):
        fxpipe.compile(model, 2, example_inputs=(x,), schedule="1f1b")
