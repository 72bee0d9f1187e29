"""Which blocks are computed again: the cheapest that fit, those that the model asks for; as exact as without."""

from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxpipe
from fxpipe.capture.stored import from_data, to_data
from fxpipe.compiler import requested
from fxpipe.plan.plan import Plan
from fxpipe.plan.staged import Run
from passes.tuner.recompute import Held, StagePlace, cheapest, least_shares
from tests.test_memory import IDLE_NETWORK, measured_peaks
from tests.test_tune import found


def own(block: int, num_bytes: int, position: int = 0) -> Held:
    """What a block alone keeps."""
    return Held(position, num_bytes, block, (block,), (), None)


LINE = StagePlace(
    (0,), (range(4),),
    (own(0, 5), own(1, 6), own(2, 6), own(3, 6), *(Held(0, 3, b - 1, (), (b,), None) for b in (1, 2, 3))),
    (8.0, 2.0, 3.0, 2.0), ((4,),),
)  # fmt: skip
"""That of the picture in `passes.tuner.recompute`."""
FOLDED = StagePlace(
    (0,), (range(3), range(3, 5)),
    (*(own(b, 3 + b) for b in range(3)), own(3, 4, 1), own(4, 2, 1), Held(0, 2, 0, (), (1, 2), None),
     Held(0, 2, 1, (1,), (2,), None), Held(1, 2, None, (3,), (3, 4), 5), Held(1, 3, 3, (), (4,), None)),
    (1.0, 2.0, 3.0, 4.0, 5.0), ((2, 1), (1, 2)),
)  # fmt: skip
"""Two stages on a rank, a skip between them."""


def all_runs(blocks: range) -> Iterator[tuple[Run, ...]]:
    """Every choice of a stage's blocks, in all runs."""
    for count in range(len(blocks) + 1):
        for chosen in combinations(blocks, count):
            borders = [block for block in chosen if block - 1 in chosen]
            for split in product((False, True), repeat=len(borders)):
                cut = {block for block, is_cut in zip(borders, split, strict=True) if is_cut}
                starts = [block for block in chosen if block - 1 not in chosen or block in cut]
                ends = [block + 1 for block in chosen if block + 1 not in chosen or block + 1 in cut]
                yield tuple(zip(starts, ends, strict=True))


@pytest.mark.parametrize("place", [LINE, FOLDED])
@pytest.mark.parametrize("part", [0.9, 0.7, 0.6, 0.5, 0.4, 0.2])
def test_the_cheapest_runs_are_found(place: StagePlace, part: float) -> None:
    budget = int(part * place.num_bytes(()))
    every = [tuple(run for of_stage in runs for run in of_stage) for runs in product(*map(all_runs, place.blocks))]
    best = min((place.forward_seconds(runs) for runs in every if place.num_bytes(runs) <= budget), default=None)
    runs, shares = cheapest(place, budget), least_shares(place, budget)
    if best is None:
        assert runs is None
    else:
        assert shares is not None
        assert 0.2 * best <= sum(place.seconds[block] * share for block, share in shares.items()) <= best
        assert runs is not None
        assert place.num_bytes(runs) <= budget
        assert place.forward_seconds(runs) == best


def test_the_picture() -> None:
    assert [LINE.num_bytes(runs) for runs in ((), ((1, 2), (2, 3), (3, 4)), ((1, 4),))] == [92, 62, 50]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "wave"])
@pytest.mark.parametrize("part", [0.2, 0.7])
def test_never_slower_than_whole_stages(schedule: str, part: float) -> None:
    asked: dict[str, Any] = {"schedule": schedule, "data_parallel": 1, "microbatches": 8, "fill": "none"}
    free, whole = found(2, 64, **asked).best, found(2, 64, recompute=True, **asked).best
    assert free.needs is not None
    assert whole.needs is not None
    limit = int(whole.needs + part * (free.needs - whole.needs))
    chosen = found(2, 64, memory_limit_bytes=limit, **asked).best
    assert chosen.needs is not None
    assert chosen.needs <= limit
    assert chosen.seconds is not None
    assert whole.seconds is not None
    assert chosen.seconds <= whole.seconds
    assert sum(map(len, (range(*run) for run in chosen.placed.recompute))) < len(whole.placed.stage_of_block)


class Residual(nn.Module):
    """Wide layers with dropout, a skip over the middle, a tied weight, a part without gradients; every second layer is
    checkpointed where that is asked for, as diffusers' models do."""

    def __init__(self, gradient_checkpointing: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Dropout(0.1), nn.Linear(32, 8)) for _ in range(6)
        )
        self.layers[4][0].weight = self.layers[1][0].weight
        self.gradient_checkpointing = gradient_checkpointing

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        skip = x
        for number, layer in enumerate(self.layers):
            if self.gradient_checkpointing and number % 2:
                x = x + checkpoint(layer, x, use_reentrant=False)
            else:
                x = x + layer(x)
            if number == 1:
                skip = x
            if number == 4:
                with torch.no_grad():
                    scale = x.std(-1, keepdim=True)
                x = (x + skip) / (1 + scale)
        return nn.functional.mse_loss(x, target)

    def example_inputs(self, batch_size: int) -> dict[str, Tensor]:
        return {name: torch.randn(batch_size, 16, 8, dtype=self.layers[0][0].weight.dtype) for name in ("x", "target")}


def test_what_the_model_checkpoints_is_computed_again() -> None:
    model, options = Residual(True).double(), {"batch_size": 6, "microbatches": 3, "schedule": "1f1b"}
    program = fxpipe.compile(model, 2, **options)
    step = requested(model, 2, **options).analysed()
    nodes, blocks = step.captured.nodes, step.graph.blocks
    again = [block for run in program.plan.staged.recompute for block in range(*run)]
    marked = {n: node.meta.get("checkpoint") for n, node in nodes.items()}
    assert {marked[name] for block in again for name in blocks[block].nodes} >= {0, 1, 2}
    assert all(any(marked[name] is not None for name in blocks[block].nodes) for block in again)
    assert any("as the model asks" in note for note in program.plan.notes)
    assert program.verify(**model.example_inputs(6)).ok
    stored = from_data(to_data(step.captured, model), step.captured.inputs, model)
    assert {n: node.meta.get("checkpoint") for n, node in stored.nodes.items()} == marked
    for told in (False, "auto"):
        assert not requested_plan(model, recompute=told, **options).staged.recompute
    assert requested_plan(model, recompute=True, **options).staged.recompute != program.plan.staged.recompute


def requested_plan(model: nn.Module, **options: Any) -> Plan:
    asked = requested(model, 2, **options)
    return asked.planned(asked.analysed())


@pytest.mark.parametrize("schedule", ["gpipe", "wave"])
def test_plans_within_a_limit_keep_what_they_promise(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact, and in the seconds and bytes of the plan, which are those of its program and of a run."""
    model, options = Residual(), {"batch_size": 48, "microbatches": 6, "schedule": schedule}
    free = requested_plan(model, **options)
    least = requested_plan(model, recompute=True, **options)
    assert free.peak_bytes is not None
    assert least.peak_bytes is not None
    limit = (free.peak_bytes + least.peak_bytes) // 2
    program = fxpipe.compile(model, 2, memory_limit=limit, **options)
    plan, predicted = program.plan, program.plan.predicted["step"]
    assert 0 < sum(stop - start for start, stop in plan.staged.recompute) <= plan.staged.boundaries[-1]
    assert Plan.parse(str(plan)) == plan
    timeline = program.simulate()
    assert predicted.seconds == pytest.approx(timeline.makespan_seconds, rel=0.01)
    assert predicted.peak_bytes == pytest.approx(max(timeline.peak_bytes), rel=0.02)
    assert predicted.peak_bytes <= limit
    at_once = program.simulate(cluster=IDLE_NETWORK, optimizer_bytes=0)
    measured = measured_peaks(program, model.example_inputs(48), monkeypatch)
    assert list(at_once.peak_bytes) == pytest.approx(measured, rel=0.1)
    precise = Residual().double()
    exact = fxpipe.compile(precise, 2, memory_limit=2 * limit, **options)
    assert exact.plan.staged.recompute
    assert exact.verify(**precise.example_inputs(48)).ok


def test_a_schedule_of_ones_own_recomputes_where_it_must() -> None:
    model, options = Residual().double(), {"batch_size": 8}
    schedule = str(fxpipe.compile(model, 2, schedule="gpipe", microbatches=4, **options).plan.step.text())
    free = requested_plan(model, schedule=schedule, **options)
    assert not free.staged.recompute
    assert free.peak_bytes is not None
    program = fxpipe.compile(model, 2, schedule=schedule, memory_limit=int(0.9 * free.peak_bytes), **options)
    assert program.plan.staged.recompute
    assert program.verify(**model.example_inputs(8)).ok
