"""Row analysis and patch graphs as text: what goes in, an arrow, what comes out; what is refused, and why."""

from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxpipe.models.backbones import prediction_of
from passes.rows import RowPlan, analyse
from passes.sampling.patch_graph import patch_graph
from passes.sampling.patches import patches_of
from passes.sampling.times import CALL, PATCH, STEP, binding_times
from tests.refusals import refusals
from tests.row_programs import row_programs

ARROW = "\n\n  |\n  v\n\n"
Golden = Callable[[str, str], None]


class Denoiser(nn.Module):
    """A level down and up, text and image in one attention, a norm, and something that no rule follows."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.norm = nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.GroupNorm(2, 4)
        self.qkv, self.up = nn.Linear(4, 12), nn.ConvTranspose2d(4, 2, 4, 2, 1)
        self.time, self.place = nn.Linear(4, 4), nn.Parameter(torch.randn(1, 20, 4))

    def forward(self, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        h = F.silu(self.norm(self.down(x))) + self.time(time)[:, :, None, None]
        tokens = h.flatten(2).transpose(1, 2) + self.place
        q, k, v = self.qkv(torch.cat([text, tokens], 1)).chunk(3, -1)
        tokens = tokens + F.scaled_dot_product_attention(q, k, v)[:, text.shape[1] :]
        h = tokens.transpose(1, 2).reshape(h.shape)
        return self.up(h + h.flip(2))  # type: ignore[no-any-return]


def example(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    shapes = {"x": (2, 2, 10, 8), "time": (2, 4), "text": (2, 3, 4)}
    return {name: torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}


def plan_of(model: nn.Module, call: dict[str, Any], rows: dict[str, int]) -> RowPlan:
    return row_programs(model, call, 1, sample=rows).rows


def listed(graph: torch.fx.Graph) -> str:
    """A graph's calls, with the shapes they give in the patch."""
    lines = []
    for node in graph.nodes:
        if node.op == "call_function":
            name = str(node.target) if isinstance(node.target, torch._ops.OpOverload) else node.target.__name__
            value = node.meta["val"]
            shapes = [list(v.shape) for v in (value if isinstance(value, list) else [value])]
            arguments = ", ".join(str(a) for a in node.args)
            lines.append(f"{node.name} {shapes[0]} = {name.removeprefix('aten.')}({arguments})")
    return "\n".join(lines)


def test_rows_and_patches(golden: Golden) -> None:
    plan = plan_of(Denoiser(), example(), {"x": 2})
    golden("passes/rows.txt", listed(plan.sized.graph) + ARROW + f"{plan}\n")
    first, *_ = patches_of(plan, [0, 2, 5])
    golden("passes/patch_graph.txt", listed(patch_graph(plan, first)) + "\n")


def test_a_rank_program_is_a_few_lines_of_messages(golden: Golden) -> None:
    programs = row_programs(Denoiser(), example(), [0, 2, 5], sample={"x": 2})
    golden("passes/fresh.txt", "\n".join(map(str, programs.programs[0].graph.nodes)) + f"\n\n{programs.traffic()}\n")


class Resnet(nn.Module):
    """A norm whose result is read around each row; `also` reads it, too, so that it is there without these rows."""

    def __init__(self, padding_mode: str = "zeros", also: bool = False) -> None:
        super().__init__()
        self.first, self.norm, self.scale, self.also = nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4), nn.Linear(4, 4), also
        self.conv = nn.Conv2d(4, 4, 5, padding=2, padding_mode=padding_mode)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        x = self.first(x)
        h = F.silu(self.norm(x) * self.scale(time)[:, :, None, None])
        return x + self.conv(h) + (h if self.also else 0)  # type: ignore[no-any-return]


def resnet_example(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {"x": torch.randn(2, 4, 7, 6, dtype=dtype), "time": torch.randn(2, 4, dtype=dtype)}


def test_a_norms_halo_travels_with_its_moments(golden: Golden) -> None:
    plan = plan_of(Resnet(), resnet_example(), {"x": 2})
    first, second = patches_of(plan, [0, 3, 7])
    golden(
        "passes/norms_halo.txt",
        ARROW.join(listed(patch_graph(plan, patch, exact=True)) for patch in (first, second)) + "\n",
    )
    also = plan_of(Resnet(also=True), resnet_example(), {"x": 2})
    names = [node.name for node in patch_graph(also, first, exact=True).nodes if "exchange" in node.meta]
    assert names == ["group_norm_moments", "conv2d_1_halo", "add_1_whole"]


@pytest.mark.parametrize("padding_mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("bounds", [(0, 3, 7), (0, 4, 7), (0, 3, 4, 7)])
def test_a_norms_halo_is_normalised_as_its_patch_does(padding_mode: str, bounds: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model, call = Resnet(padding_mode).double(), resnet_example(torch.float64)
    with torch.no_grad():
        wanted = model(**call)
    for found in row_programs(model, call, bounds, sample={"x": 2}).predict(**call):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_what_is_known_when() -> None:
    plan = plan_of(Denoiser(), example(), {"x": 2})
    times = binding_times(plan.sized, {"x": PATCH, "text": CALL, "time": STEP})
    by_module = {node.meta["path"]: times[node.name] for node in plan.sized.graph.nodes if node.op == "call_function"}
    assert (by_module["time"], by_module["down"], times["text"]) == (STEP, PATCH, CALL)
    assert times[plan.sized.result.name] == PATCH


@pytest.mark.parametrize("bounds", [(0, 1, 5), (0, 2, 3, 5), (0, 1, 2, 3, 4, 5), (0, 5)])
def test_it_predicts_the_same(bounds: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model, call = Denoiser().double(), example(torch.float64)
    with torch.no_grad():
        wanted = prediction_of(model(**call))
    for found in row_programs(model, call, bounds, sample={"x": 2}).predict(**call):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_the_model_stays_as_it_was() -> None:
    model = Denoiser().train()
    model.down.eval()
    row_programs(model, example(), 2, sample={"x": 2})
    assert (model.training, model.norm.training, model.down.training) == (True, True, False)
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_of_half_precision_are_exchanged_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm, x = nn.GroupNorm(2, 4).to(dtype), (100 + torch.randn(2, 4, 8, 8)).to(dtype)
    programs = row_programs(norm, {"input": x}, 2, sample={"input": 2})
    assert {m.dtype for m in programs.messages if m.kind == "moments"} == {torch.float32}
    torch.testing.assert_close(programs.predict(input=x)[0], norm(x).detach())


def test_one_trace_serves_every_batch_size() -> None:
    torch.manual_seed(0)
    model, call = Denoiser().double(), example(torch.float64)
    programs = row_programs(model, call, 2, sample={"x": 2})
    other = {name: torch.cat([value, value.flip(0), value[:1]]) for name, value in call.items()}
    with torch.no_grad():
        wanted = prediction_of(model(**other))
    torch.testing.assert_close(programs.of_samples(5).predict(**other)[0], wanted, rtol=1e-12, atol=1e-12)
    alone = row_programs(model, {name: value[:1] for name, value in call.items()}, 2, sample={"x": 2})
    torch.testing.assert_close(alone.of_samples(5).predict(**other)[0], wanted, rtol=1e-12, atol=1e-12)


def test_the_units_of_some_samples_are_those_of_others() -> None:
    known = plan_of(Denoiser(), example(), {"x": 2})
    capture, others = known.sized.capture, [None, known]
    alone, after = (analyse(capture, {"x": 2}, 3, other=other) for other in others)
    assert (str(after), after.units, after.coarsest) == (str(alone), alone.units, alone.coarsest)
    assert (after.units.each, "down" in str(after.coarsest)) == (2, True)


def test_a_value_and_a_number_are_of_two_kinds() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return x * scale + x * 0 + x * 1 + x * 2

    kinds = plan_of(Scaled(), {"x": torch.randn(2, 3, 8, 4), "scale": torch.ones(2, 1, 1, 1)}, {"x": 2}).kinds
    products = [kind for name, kind in kinds.items() if name.startswith("mul")]
    assert len(set(products)) == len(products) == 4


def test_what_would_need_all_rows_in_one_unit_is_gathered() -> None:
    torch.manual_seed(0)
    model, x = nn.Conv2d(2, 3, 8, stride=8).double(), torch.randn(2, 2, 8, 16, dtype=torch.float64)
    programs = row_programs(model, {"input": x}, 8, sample={"input": 2})
    assert [note.why for note in programs.rows.notes] == ["stride 8: one unit would have all rows"]
    torch.testing.assert_close(programs.predict(input=x)[7], model(x).detach(), rtol=1e-12, atol=1e-12)


def test_sdxl_sends_what_was_worked_out_by_hand() -> None:
    """At 1024, of one sample in float16: 32 keys and values, 39 convolutions with halos, 46 norms; of the input a rank
    has all rows.

    With one layer in each of the inmost transformers, where SDXL has ten that are alike.
    """
    with torch.device("meta"):
        model = diffusers.UNet2DConditionModel(
            sample_size=128, block_out_channels=(320, 640, 1280), transformer_layers_per_block=(1, 2, 1),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"), attention_head_dim=(5, 10, 20),
            cross_attention_dim=2048, addition_embed_type="text_time", addition_time_embed_dim=256,
            projection_class_embeddings_input_dim=2816, use_linear_projection=True,
        ).half()  # fmt: skip
        half = {"dtype": torch.float16}
        call = {
            "sample": torch.empty(1, 4, 128, 128, **half), "timestep": torch.tensor(1),
            "encoder_hidden_states": torch.empty(1, 77, 2048, **half),
            "added_cond_kwargs": {"text_embeds": torch.empty(1, 1280, **half), "time_ids": torch.empty(1, 6, **half)},
        }  # fmt: skip
    programs = row_programs(model, call, 2, sample={"sample": 2})
    assert (programs.rows.units.count, programs.rows.units.each, programs.rows.notes) == (32, 4, ())
    kinds = ("gather", "halo", "moments")
    assert [len({m.value for m in programs.messages if m.kind == kind}) for kind in kinds] == [32, 39, 46]
    sent = programs.traffic().kinds
    assert sent["gather"] == 136_314_880  # both have all in the end, each had a half
    assert sent["halo"] == 8_028_160  # over one border


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


class Strided(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.clone(memory_format=torch.contiguous_format).as_strided(x.shape, (160, 80, 8, 1))


X = {"x": torch.randn(2, 2, 10, 8)}
REFUSED: dict[str, Callable[[], object]] = {
    "more patches than units": lambda: row_programs(Denoiser(), example(), 6, sample={"x": 2}),
    "bounds": lambda: row_programs(Denoiser(), example(), [0, 2, 4], sample={"x": 2}),
    "unknown input": lambda: row_programs(Denoiser(), example(), 2, sample={"y": 2}),
    "no such dimension": lambda: row_programs(Denoiser(), example(), 2, sample={"x": 4}),
    "no rows named": lambda: row_programs(Denoiser(), example(), 2, sample={}),
    "rows unknown": lambda: row_programs(Noisy(), {"x": torch.randn(2, 10, 8)}, 2),
    "other rows": lambda: row_programs(Denoiser(), example(), 2, sample={"x": 2, "text": 1}),
    "strides": lambda: row_programs(Strided(), X, 2, sample={"x": 2}),
    "draws": lambda: row_programs(Noisy(), X, 2, sample={"x": 2}),
    "another call": lambda: row_programs(Denoiser(), example(), 2, sample={"x": 2}).predict(**X),
}


def test_refusals(golden: Golden) -> None:
    golden("passes/rows_refusals.txt", refusals(REFUSED))
