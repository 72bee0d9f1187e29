"""Plans of samplers: read back as they were written, and lowered without deciding anything."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import CompileError
from fxpipe.plan.sample_plan import SamplePlan
from fxpipe.sampler import Sampler


class Convolutions(nn.Module):
    """Two levels, so that a unit is of two rows."""

    def __init__(self, hidden: int = 4) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(2, hidden, 3, padding=1), nn.Conv2d(hidden, hidden, 3, 2, 1)
        self.up, self.last = nn.ConvTranspose2d(hidden, hidden, 4, 2, 1), nn.Conv2d(hidden, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.first(x).tanh()
        return self.last(kept + self.up(self.down(kept).tanh()))  # type: ignore[no-any-return]


X = torch.randn(2, 2, 16, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "rows": (4, {"cfg": 2, "patches": 2}),
    "uneven rows, displaced": (2, {"patches": (0, 3, 8), "mode": "displaced", "norms": "merged"}),
    "samples in turn": (4, {"stages": 2, "patches": 2, "cfg": 1, "fold": False}),
    "patches in turn": (2, {"stages": 2, "patches": [0, 1, 4, 8], "mode": "displaced", "warmup": 2}),
}


@cache
def model() -> nn.Module:
    torch.manual_seed(0)
    return Convolutions().double()


def compiled(world_size: int, given: nn.Module | None = None, x: Tensor = X, **how: Any) -> Sampler:
    return fxpipe.compile_sampler(given or model(), world_size, example={"x": x}, sample={"x": 2}, **how)


@cache
def sampler(layout: str) -> Sampler:
    world_size, how = LAYOUTS[layout]
    return compiled(world_size, **how)


def test_a_plan_is_text(golden: Callable[[str, str], None]) -> None:
    golden("sampling/plans.txt", "\n\n".join(str(sampler(layout).plan) for layout in LAYOUTS) + "\n")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_read_back_is_what_was_written_and_lowers_to_the_same(layout: str, tmp_path: Path) -> None:
    made, (world_size, _) = sampler(layout), LAYOUTS[layout]
    assert SamplePlan.parse(str(made.plan)) == made.plan == SamplePlan.load(made.plan.save(tmp_path / "plan.json"))
    again = compiled(world_size, plan=tmp_path / "plan.json")
    assert again.plan == made.plan
    assert again.schedule == made.schedule
    assert SamplePlan.load(again.dump(tmp_path) / "plan.txt") == made.plan
    for one, other in zip(again.step.programs, made.step.programs, strict=True):
        assert all(str(one.forms[name].graph) == str(form.graph) for name, form in other.forms.items())
    assert again.verify().ok


def test_calls_of_other_sizes_are_planned_in_its_mode() -> None:
    made = compiled(4, plan=sampler("rows").plan)
    torch.testing.assert_close(made.predict(x=X[:1, :, :12]), model()(X[:1, :, :12]).detach(), rtol=1e-10, atol=1e-10)


def test_the_order_of_a_step_names_stages_and_patches() -> None:
    orders = [[" ".join(map(str, rank)) for rank in sampler(layout).schedule.ranks] for layout in LAYOUTS]
    assert orders[0] == ["0F0", "0F1", "0F2", "0F3"]
    assert orders[2] == ["0F0 0F2", "0F1 0F3", "1F0 1F2", "1F1 1F3"]
    assert sampler("patches in turn").plan.grid.turns == 3


def test_a_report_is_one_page(tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="reports are an extra")
    text = sampler("patches in turn").report(tmp_path / "report.html", steps=3).read_text()
    assert "units 4-7" in text
    assert "of a displaced step" in text
    data = json.loads(re.search(r"^const figures = (.*);$", text, re.M)[1])  # type: ignore[index]
    assert sorted(data) == ["load", "memory", "timeline", "traffic"]
    assert {bar["name"] for bar in data["traffic"]["data"]} == {"main", "prediction"}
    assert {"forward", "bubble"} <= {bar["name"] for bar in data["timeline"]["data"]}


def edited(layout: str, before: str, after: str) -> SamplePlan:
    return SamplePlan.parse(str(sampler(layout).plan).replace(before, after))


def cut_at(block: int) -> SamplePlan:
    plan = sampler("patches in turn").plan
    first, _, last = plan.staged.boundaries
    return replace(plan, staged=replace(plan.staged, boundaries=(first, block, last)))


def without(layout: str, *path: str | int) -> SamplePlan:
    """A plan whose JSON lacks what is in a list."""
    whole = sampler(layout).plan.as_dict()
    inner: Any = whole
    for name in path:
        inner = inner[name]
    inner.clear()
    return SamplePlan.from_dict(whole)


REFUSED: dict[str, Callable[[], object]] = {
    "another model": lambda: compiled(4, Convolutions(6).double(), plan=sampler("rows").plan),
    "other sizes": lambda: compiled(4, x=X[:, :, :12], plan=sampler("rows").plan),
    "other ranks": lambda: compiled(2, plan=sampler("rows").plan),
    "patches beside it": lambda: compiled(2, patches=[0, 4, 8], plan=sampler("uneven rows, displaced").plan),
    "another order": lambda: compiled(4, plan=edited("rows", "rank 0: 0F0", "rank 0: 0F1")),
    "a gap": lambda: edited("uneven rows, displaced", "patch 1: units 3-7", "patch 1: units 4-7"),
    "no plan": lambda: SamplePlan.parse("schedule"),
    "a training plan": lambda: SamplePlan.from_dict(json.loads('{"format": 1}')),
    "bounds beyond the rows": lambda: compiled(2, patches=[0, 4, 9]),
    "bounds that fall": lambda: compiled(2, patches=[0, 5, 4, 8]),
    "bounds of another number of ranks": lambda: compiled(2, patches=[0, 2, 4, 8]),
    "a stage without blocks": lambda: compiled(2, plan=cut_at(0)),
    "other stages": lambda: compiled(2, plan=cut_at(1)),
    "another number of samples": lambda: compiled(4, plan=edited("rows", "plan: 2 samples", "plan: 4 samples")),
    "another number of blocks": lambda: compiled(2, plan=edited("patches in turn", "in 16 blocks", "in 17 blocks")),
    "unknown norms": lambda: edited("uneven rows, displaced", "norms merged", "norms mended"),
    "no fresh step": lambda: edited("uneven rows, displaced", "after 4 fresh", "after 0 fresh"),
    "norms of this step in turn": lambda: edited("patches in turn", "norms corrected", "norms sync"),
    "no bounds": lambda: without("rows", "bounds"),
    "a stage without ranks": lambda: without("patches in turn", "staged", "stage_ranks", 1),
    "no file": lambda: compiled(2, plan="no-such-plan.json"),
    "ranks none has": lambda: compiled(4, plan=replace(sampler("rows").plan, bounds=(0, 8))),
}


def test_refusals(golden: Callable[[str, str], None]) -> None:
    texts = []
    for name, call in REFUSED.items():
        with pytest.raises(CompileError) as refusal:
            call()
        texts.append(f"{name}: {refusal.value}")
    golden("sampling/plan_refusals.txt", "\n\n".join(texts) + "\n")
