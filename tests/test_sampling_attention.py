"""Attention with heads shared over ranks, or keys and values passed around: one device's prediction, in float64."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import CompileError
from fxpipe.plan.program_check import check_programs
from fxpipe.plan.row_ops import attend, join_chunks
from fxpipe.plan.sample_plan import EXACT, How, SamplePlan
from fxpipe.run.sampling import SampleRun
from fxpipe.sampling.attention import with_attention
from fxpipe.sampling.estimate import estimate
from fxpipe.sampling.planning import chosen
from tests.denoisers import KEYS, Case, noise, small
from tests.distributed import run_processes
from tests.row_programs import RowPrograms, row_programs
from tests.test_sampling_exact import CONDITIONS, FLOAT32_INSIDE, FLOAT32_ONLY, REFUSED, one_device, relative_error

KINDS = ("ulysses", "ring")
ROWS, COLUMNS, TEXT = 8, 3, 3


class Attending(nn.Module):
    """Two layers of attention over the rows of x, and of text where some is given; of keys there may be fewer heads."""

    def __init__(self, heads: int, key_heads: int, joint: bool = False, width: int = 4) -> None:
        super().__init__()
        self.heads, self.key_heads, self.joint, self.width = heads, key_heads, joint, width
        self.first, self.last = nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(6, 2, 1)
        self.text = nn.Linear(5, 6)
        sizes = (heads * width, key_heads * width, key_heads * width)
        self.inputs = nn.ModuleList(nn.ModuleList(nn.Linear(6, size) for size in sizes) for _ in range(2))
        self.outputs = nn.ModuleList(nn.Linear(heads * width, 6) for _ in range(2))

    def forward(self, x: Tensor, text: Tensor, mask: Tensor | None = None) -> Tensor:
        h = self.first(x)
        tokens, words = h.flatten(2).mT, self.text(text)
        for inputs, output in zip(self.inputs, self.outputs, strict=True):
            joined = torch.cat([words, tokens], 1) if self.joint else tokens
            q, k, v = (layer(joined).unflatten(2, (-1, self.width)).transpose(1, 2) for layer in inputs)  # type: ignore[union-attr]
            o = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=self.heads != self.key_heads)
            joined = joined + output(o.transpose(1, 2).flatten(2)).tanh()
            words, tokens = joined.split([TEXT, ROWS * COLUMNS], 1) if self.joint else (words, joined)
        return self.last(tokens.mT.unflatten(2, h.shape[2:]))  # type: ignore[no-any-return]


def call(heads: int = 5, key_heads: int | None = None, joint: bool = False, mask: Sequence[int] | None = None) -> Case:
    torch.manual_seed(0)
    model = Attending(heads, key_heads or heads, joint).double().eval()
    example = {"x": noise(2, 2, ROWS, COLUMNS), "text": noise(2, TEXT, 5)}
    return Case(model, example if mask is None else {**example, "mask": noise(*mask) > -1}, {"x": 2})


TOKENS = ROWS * COLUMNS
CALLS = {
    "5 heads": call(),
    "2 heads for 6": call(6, 2),
    "joint": call(4, joint=True),
    "keys masked": call(mask=(2, 1, 1, TOKENS)),
    "all masked": call(joint=True, mask=(2, 5, TEXT + TOKENS, TEXT + TOKENS)),
}


@cache
def of_rows(name: str) -> RowPrograms:
    given = CALLS[name]
    return row_programs(given.model, given.example, 2, sample=given.sample)


def by(kind: Any, whole: RowPrograms, patches: int | Sequence[int], **asked: Any) -> RowPrograms:
    """The same call with attention of this kind."""
    cut = whole.cut(patches)
    asked = {"how": EXACT, **asked}
    request = replace(cut.lowering.request, **asked, attention=kind)
    return replace(cut, lowering=replace(cut.lowering, request=request))


def uneven(count: int, patches: int) -> tuple[int, ...]:
    """Bounds of patches that have one unit but the last."""
    return (*range(patches), count)


def require_exact(programs: RowPrograms, given: Case, bound: float = 1e-10) -> None:
    positions = {message.edge: position for position, message in enumerate(programs.messages)}
    assert not check_programs(programs.programs, programs.messages, positions)
    found = programs.predict(**given.example)
    assert all(torch.equal(other, found[0]) for other in found[1:])
    assert relative_error(found[0], one_device(given)) <= bound


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CALLS)
def test_it_is_one_devices(name: str, kind: str) -> None:
    for patches in (2, 3, 4):
        for text in ("first", "all") if "joint" in name and patches == 3 else ("first",):
            programs = by(kind, of_rows(name), uneven(ROWS, patches), text=text)
            require_exact(programs, CALLS[name])
            plan = programs.step.plan
            assert SamplePlan.parse(str(plan)) == plan == SamplePlan.from_dict(plan.as_dict())
            why = {
                ("2 heads for 6", "ulysses"): "patches cannot share 2 heads" if patches > 2 else "",
                ("keys masked", "ring"): "it has a mask", ("all masked", "ring"): "it has a mask",
                ("joint", "ring"): "would be rounded differently" if text == "all" else "",
            }.get((name, kind), "")  # fmt: skip
            assert set(plan.attention) == {"gather" if why else kind}
            assert any(why in note for note in plan.notes) or not why


@pytest.mark.parametrize("key", [key for key in KEYS if key not in CONDITIONS and key not in REFUSED])
def test_a_backbone_is_one_devices(key: str) -> None:
    given = small(key, torch.float32 if key in FLOAT32_ONLY else torch.float64)
    bound = 1e-5 if key in FLOAT32_INSIDE | FLOAT32_ONLY else 1e-10
    whole = row_programs(given.model, given.example, 2, sample=given.sample)
    for kind in KINDS:
        for patches in range(2, min(4, whole.rows.units.count) + 1):
            programs = by(kind, whole, uneven(whole.rows.units.count, patches))
            if kind in programs.step.plan.attention:
                require_exact(programs, given, bound)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("key", ["pixart", "sd3", "flux", "sdxl"])
def test_a_pipeline_is_one_devices(key: str, kind: Any) -> None:
    from tests.test_sampler_pipelines import error, sample  # slow to import, and processes import this file
    from tests.tiny_pipelines import tiny

    pipe, asked = tiny(key)
    sampler = fxpipe.compile_sampler(pipe, 2, example=asked, cfg=1, patches=2, attention=kind)
    assert set(sampler.plan.attention) == {kind}
    assert error(sample(sampler.pipeline(), asked), sample(pipe, asked)) <= 1e-10


def rank_main(kind: str) -> float:
    """One rank's error; what it sends is as planned."""
    from fxpipe.run.transport.distributed import DistributedTransport

    given = CALLS["joint"]
    programs = by(kind, of_rows("joint"), (0, 1, 4, 8))
    transport = DistributedTransport()
    transport.open_channels(programs.channels, [])
    found = SampleRun(transport).predict(programs.bound()[transport.rank], programs.bind(**given.example))
    transport.close()
    sent = {channel: size for channel, size in transport.sent_bytes().items() if channel[0] == transport.rank}
    planned = programs.traffic().channels
    assert sent == {channel: size for channel, size in planned.items() if channel[0] == transport.rank}
    return relative_error(found, one_device(given))


@pytest.mark.parametrize("kind", KINDS)
def test_processes_are_one_device(kind: str) -> None:
    assert max(run_processes(3, rank_main, kind)) <= 1e-10


@pytest.mark.parametrize("patches", [2, 4])
def test_bytes(patches: int) -> None:
    """4 (N-1)/N^2 b L C e come to a rank by heads, 2 (N-1)/N b L C e in a ring, as where all is gathered."""
    given = call(heads=4)
    whole = row_programs(given.model, given.example, 2, sample=given.sample)
    all_rows = 2 * 2 * TOKENS * 16 * 8  # layers, samples, tokens, channels, float64
    kinds = {kind: by(kind, whole, patches).traffic() for kind in (*KINDS, "gather")}
    assert kinds["ulysses"].kinds["ulysses"] == 4 * (patches - 1) * all_rows // patches
    assert kinds["ring"].kinds["ring"] == kinds["gather"].kinds["gather"] == 2 * (patches - 1) * all_rows
    assert set(kinds["ring"].channels) >= {(patch, (patch + 1) % patches) for patch in range(patches)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stages", [None, 2])
def test_a_sampler_of_groups_and_stages(kind: Any, stages: int | None) -> None:
    given = CALLS["5 heads"]
    how: dict[str, Any] = {"cfg": 2, "stages": stages, "patches": 3, "attention": kind}
    sampler = fxpipe.compile_sampler(
        given.model, 6 * (stages or 1), example=given.example, sample=given.sample, fold=False, **how
    )
    assert sampler.plan.attention == (kind, kind)
    assert sampler.verify().ok
    assert relative_error(sampler.predict(**given.example), one_device(given)) <= 1e-10
    assert sampler.simulate(2).makespan_seconds > 0


def test_the_fastest_is_taken_layer_by_layer() -> None:
    programs = of_rows("5 heads").cut(4)
    case = programs.lowering.case(programs.traced, 2)
    made = chosen(case, programs.lowering.request)
    for links, latency in ((1e6, 1e-9), (1e12, 1e-3)):
        text = f'device = "A100-80GB"\n[[level]]\nsize = 4\nlink = "x"\nbandwidth_bytes_per_second = {links}\n'
        cluster = fxpipe.Cluster.parse(text + f"latency_seconds = {latency}\n")
        found = {
            kind: estimate(case, with_attention(case, made, kind, cluster), cluster, 5).seconds  # type: ignore[arg-type]
            for kind in ("auto", "gather", *KINDS)
        }
        assert found["auto"] == min(found.values())
        assert with_attention(case, made, "auto", cluster).attention[0] == ("ulysses" if latency < 1e-6 else "gather")


def test_displaced_steps_gather() -> None:
    plan = by("ring", of_rows("5 heads"), 2, how=How("displaced", 1, "corrected", True)).step.plan
    assert plan.attention == ()
    assert any("is for exact steps" in note for note in plan.notes)


def test_a_plan_with_other_kinds_is_lowered_or_refused() -> None:
    given = CALLS["2 heads for 6"]
    asked: dict[str, Any] = {"example": given.example, "sample": given.sample}
    plan = fxpipe.compile_sampler(given.model, 3, cfg=1, attention="gather", **asked).plan
    mixed = replace(plan, attention=("ring", "gather"))
    assert "attention: 1 ring, 1 gather" in str(mixed)
    again = fxpipe.compile_sampler(given.model, 3, plan=SamplePlan.parse(str(mixed)), **asked)
    assert relative_error(again.predict(**given.example), one_device(given)) <= 1e-10
    with pytest.raises(CompileError, match="3 patches cannot share 2 heads"):
        fxpipe.compile_sampler(given.model, 3, plan=replace(plan, attention=("ulysses", "gather")), **asked)
    with pytest.raises(CompileError, match="kinds of 1 layers of attention, the call has 2"):
        fxpipe.compile_sampler(given.model, 3, plan=replace(plan, attention=("ring",)), **asked)
    with pytest.raises(CompileError, match="attention='rings' is not known"):
        fxpipe.compile_sampler(given.model, 3, attention="rings", **asked)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("bounds", [(0, 7), (0, 1, 7), (0, 3, 4, 7)])
def test_chunks_join_to_the_whole(bounds: tuple[int, ...], dtype: torch.dtype) -> None:
    q, k, v = (noise(2, heads, n, 8).to(dtype) * 30 for heads, n in ((4, 5), (2, 7), (2, 7)))
    wanted = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), enable_gqa=True)
    parts = [attend(q, k[..., a:b, :], v[..., a:b, :], None) for a, b in pairwise(bounds)]
    found, sums = parts[0]
    for part in parts[1:]:
        found, sums = join_chunks(found, sums, *part)
    close = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-2, "atol": 0.1}
    torch.testing.assert_close(found.double(), wanted, **close)
