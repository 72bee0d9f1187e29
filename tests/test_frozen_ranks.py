"""Frozen components too large for every rank: who holds their weights within a memory limit, and exact all the same."""

import os
import re
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from fxpipe.errors import CompileError
from passes.placement.frozen_ranks import frozen_ranks
from passes.schedules.named import make_schedule
from passes.schedules.policies import POLICIES
from passes.schedules.problem import Problem
from passes.schedules.synthesis import synthesise
from tests.distributed import run_processes
from tests.frozen_steps import SLOW
from tests.steps import needed_bytes
from tests.test_filled import ahead, assert_same, batches_of, one_device
from tests.test_schedule import chain

LARGE = "text.0.weight"


class LargeText(nn.Module):
    """A frozen text model of 1.8 MB, a small encoder, and a trained part of 0.4 MB with its gradients and averages."""

    def __init__(self, words: int = 450, width: int = 500, trained: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.text = nn.Sequential(nn.Linear(words, width), nn.GELU(), nn.Linear(width, trained))
        self.encoder = nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, trained))
        self.text.requires_grad_(False)
        self.encoder.requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(trained, trained) for _ in range(12))
        self.to(torch.float64)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        y, condition = self.encoder(x), self.text(words)
        y = y + 0.1 * torch.randn_like(y)
        for layer in self.layers:
            y = y + F.silu(layer(y) + condition)
        return y.square().mean()

    def example_inputs(self, batch_size: int) -> dict[str, Tensor]:
        sizes = {"x": 8, "words": self.text[0].in_features}
        return {name: torch.randn(batch_size, size, dtype=torch.float64) for name, size in sizes.items()}


def holders(program: fxpipe.Program) -> list[int]:
    """The ranks that hold the large weight, in a step and when they work ahead."""
    forms = (program.step, *(program.filled if program.filled else ()))
    return sorted({p.rank for form in forms for p in form.programs if LARGE in p.state})


@pytest.mark.parametrize(
    ("limit", "options"),
    [
        (2_000_000, {"schedule": "1f1b", "microbatches": 4}),
        (2_040_000, {"schedule": "wave", "microbatches": 4}),
        (2_040_000, {"schedule": "zb-v", "microbatches": 3, "fill": "idle"}),
        (2_040_000, {"schedule": "hanayo", "microbatches": 4, "fill": "after"}),
        (2_000_000, {"schedule": "1f1b", "microbatches": 4, "data_parallel": 2}),
        (2_040_000, {"schedule": "interleaved"}),
        (2_000_000, {"schedule": "gpipe", "fill": "none"}),
        (2_068_000, {}),
        (2_000_000, {}),
    ],
    ids=str,
)
def test_steps_within_a_limit_are_exact(limit: int, options: dict[str, Any]) -> None:
    """Every rank alike would need 2.07 MB or more, 1.95 MB of them for the frozen weights."""
    model = LargeText()
    batches = batches_of(model, 6)
    program = fxpipe.compile(model, 4, batch_size=6, cost_model=SLOW, memory_limit=limit, **options)
    assert program.plan.staged.frozen_ranks
    assert 0 < len(holders(program)) < 4
    assert max(program.simulate().peak_bytes) <= limit
    assert max(program.simulate(filled=True).peak_bytes) <= limit
    assert program.verify(**batches[0]).ok
    assert_same(ahead(program, batches), one_device(LargeText(), batches))
    assert "only where there is room for its weights" in str(program.plan)


def train_in_processes(limit: str) -> tuple[list[float], Mapping[str, Tensor], bool]:
    program = fxpipe.compile(LargeText(), 2, batch_size=6, cost_model=SLOW, memory_limit=int(limit), schedule="1f1b")
    trained = ahead(program, batches_of(LargeText(), 6))
    return trained.losses, trained.weights, int(os.environ["RANK"]) in holders(program)


def test_gloo_equals_threads_bit_for_bit() -> None:
    program = fxpipe.compile(LargeText(), 2, batch_size=6, cost_model=SLOW, memory_limit=2_050_000, schedule="1f1b")
    expected = ahead(program, batches_of(LargeText(), 6))
    held = []
    for losses, weights, holds in run_processes(2, train_in_processes, "2050000"):
        assert losses == expected.losses
        assert all(torch.equal(weight, expected.weights[name]) for name, weight in weights.items())
        held.append(holds)
    assert held == [False, True]


def test_stages_are_cut_by_memory_without_frozen_work() -> None:
    """A line's first rank holds most activations; where that is too much, it gets fewer blocks, and all else stays."""
    model, options = Wide(), {"batch_size": 8, "microbatches": 8, "schedule": "1f1b", "recompute": False}
    options |= {"offload_optimizer": True}
    free = fxpipe.compile(model, 4, cost_model=SLOW, **options)  # type: ignore[arg-type]
    limit = int(0.8 * max(free.simulate().peak_bytes))
    program = fxpipe.compile(model, 4, cost_model=SLOW, memory_limit=limit, **options)  # type: ignore[arg-type]
    assert program.plan.staged.boundaries[1] < free.plan.staged.boundaries[1]
    assert program.plan.staged.offloaded
    assert max(program.simulate().peak_bytes) <= limit
    assert program.verify(**model.example_inputs(8)).ok


@pytest.mark.parametrize(
    ("world_size", "schedule", "batch_size"), [(2, "1f1b", 12), (3, "wave", 12), (3, "wave", 64), (4, "auto", 64)]
)
def test_filled_steps_keep_to_the_limit_too(world_size: int, schedule: str, batch_size: int) -> None:
    """What frozen work makes for the next batch is most of what these need; plans know it roughly."""
    model = LargeText(words=40, width=50, trained=64)
    options: dict[str, Any] = {"batch_size": batch_size, "schedule": schedule, "cost_model": SLOW, "budget": 0.2}
    limit = max(fxpipe.compile(model, world_size, **options).simulate().peak_bytes)
    program = fxpipe.compile(model, world_size, memory_limit=limit, **options)
    peaks = *program.simulate().peak_bytes, *program.simulate(filled=True).peak_bytes
    assert max(peaks) <= limit


@pytest.mark.parametrize("limit", [1_565_695, 1_584_348, 1_630_381])
def test_a_higher_limit_is_no_harder(limit: int) -> None:
    """Plans count less than their programs need: the share that does is found from both sides."""
    model = LargeText(words=40, width=50, trained=64)
    program = fxpipe.compile(model, 3, batch_size=64, schedule="wave", cost_model=SLOW, budget=0.2, memory_limit=limit)
    assert needed_bytes(program) <= limit


class Wide(nn.Module):
    """A chain whose activations are far larger than its weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(16))
        self.to(torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x.square().mean()

    def example_inputs(self, batch_size: int) -> dict[str, Tensor]:
        return {"x": torch.randn(batch_size, 64, 4, dtype=torch.float64)}


def test_what_fits_nowhere_is_refused() -> None:
    """Not even alone on a rank, whatever is recomputed."""
    model = LargeText()
    weights = sum(p.nbytes for p in model.text.parameters())
    with pytest.raises(CompileError, match=r"no plan fits into memory_limit=.*use more ranks"):
        fxpipe.compile(model, 2, batch_size=2, cost_model=SLOW, memory_limit=weights - 1)


def test_with_room_for_all_every_rank_may_run_everything() -> None:
    assert fxpipe.compile(LargeText(), 4, batch_size=6, cost_model=SLOW).plan.staged.frozen_ranks == ()


def fits_somehow(room: Sequence[int], sizes: Sequence[int]) -> bool:
    """By trying every rank for every component."""
    for ranks in product(range(len(room)), repeat=len(sizes)):
        left = list(room)
        for rank, size in zip(ranks, sizes, strict=True):
            left[rank] -= size
        if min(left) >= 0:
            return True
    return False


small = st.integers(0, 12)


@given(st.lists(st.integers(-1, 20), min_size=1, max_size=4), st.lists(st.tuples(small, small), max_size=5))
def test_ranks_of_components(room: list[int], components: list[tuple[int, int]]) -> None:
    sizes, seconds = [size for size, _ in components], [time for _, time in components]
    found = frozen_ranks(room, sizes, seconds)
    assert (found is not None) == fits_somehow(room, sizes)
    if found is None:
        return
    left = list(room)
    for ranks, size in zip(found, sizes, strict=True):
        assert ranks
        assert list(ranks) == sorted({*ranks})
        for rank in ranks:
            left[rank] -= size
    assert min(left) >= 0
    for ranks, size in zip(found, sizes, strict=True):  # no room is left unused
        assert all(left[rank] < size for rank in {*range(len(room))} - {*ranks})


def test_more_ranks_go_to_what_takes_longest() -> None:
    assert frozen_ranks([4, 4, 4], [4, 4], [5.0, 1.0]) == ((0, 2), (1,))
    assert frozen_ranks([4, 4, 4], [4, 4], [1.0, 5.0]) == ((0,), (1, 2))


@pytest.mark.parametrize("name", POLICIES)
def test_frozen_actions_are_on_the_ranks_that_may_run_them(name: str) -> None:
    work = chain(4, 4, 2)
    schedule = make_schedule(
        name, work, [0, 1, 1, 0], [1.0] * 4, [2.0] * 4, frozen_seconds=[1.0] * 2, frozen_ranks=[(1,), (0, 1)]
    )
    on = {
        (a.stage, a.microbatch): rank for rank, actions in enumerate(schedule.ranks) for a in actions if a.kind == "T"
    }
    assert on == {(0, m): 1 for m in range(4)} | {(1, m): m % 2 for m in range(4)}


def test_replicas_leave_frozen_work_to_their_own_pipeline() -> None:
    schedule = make_schedule(
        "1f1b", chain(2, 4, 1), [(0, 2), (1, 3)], [1.0] * 2, [2.0] * 2, frozen_seconds=[1.0], frozen_ranks=[(1, 3)]
    )
    on = [[a.microbatch for a in actions if a.kind == "T"] for actions in schedule.ranks]
    assert on == [[], [0, 2], [], [1, 3]]


def test_searched_schedules_keep_to_them() -> None:
    kinds = {"F": [1.0, 1.0], "B": [2.0, 2.0], "T": [1.0, 0.5]}
    problem = Problem(chain(2, 4, 2), (0, 1), kinds, frozen_ranks=((1,), (0,)))
    found = synthesise(problem, 0.5)
    on = {(a.stage, rank) for rank, actions in enumerate(found.schedule.ranks) for a in actions if a.kind == "T"}
    assert on == {(0, 1), (1, 0)}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_more_than_all_ranks_hold_together_is_refused(world_size: int) -> None:
    """Though every rank would have room for what it trains."""
    model = LargeText()
    weights = sum(p.nbytes for p in model.text.parameters())
    limit = weights * (world_size + 1) // (2 * world_size) if world_size < 3 else weights * 9 // 10
    with pytest.raises(CompileError, match=r"no plan fits into memory_limit=.*least tried needs") as refused:
        fxpipe.compile(model, world_size, batch_size=6, cost_model=SLOW, memory_limit=limit)
    (needed,) = re.findall(r"least tried needs ([\d.]+) MiB", str(refused.value))
    assert float(needed) * 2**20 > 0.95 * limit


def test_an_order_given_by_hand_is_held_to_the_limit() -> None:
    given = make_schedule("1f1b", chain(2, 2), [0, 1], [1.0] * 2, [2.0] * 2)
    model, seen = Wide(), list[str]()
    options: dict[str, Any] = {"batch_size": 4, "schedule": given, "observe": lambda name, _: seen.append(name)}
    needed = max(fxpipe.compile(model, 2, **options).simulate().peak_bytes)
    fxpipe.compile(model, 2, memory_limit=needed, **options)
    seen.clear()
    with pytest.raises(CompileError, match=r"the schedule needs .* on a rank, more than memory_limit="):
        fxpipe.compile(model, 2, memory_limit=needed - 1, recompute=False, offload_optimizer=False, **options)
    assert seen == ["capture", "batch", "blocks", "costs"]
    recomputed = fxpipe.compile(model, 2, memory_limit=needed - 1, **options)
    assert recomputed.plan.staged.recompute
    assert max(recomputed.simulate().peak_bytes) < needed
