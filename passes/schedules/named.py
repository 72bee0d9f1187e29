"""Order the work of every rank, by the name of a schedule.

    stages 0 1 on ranks 0 1, micro-batches 0 1 2         rank 0: 0F0 0F1 0B0 0F2 0B1 0B2
    seconds of every F and B                       ->    rank 1: 1F0 1B0 1F1 1B1 1F2 1B2

What a name means is in `policies`; one list scheduler orders for all.
"""

from collections.abc import Sequence
from dataclasses import replace

from fxpipe.errors import CompileError
from fxpipe.plan.actions import Action, Work
from fxpipe.plan.schedule import Schedule
from passes.schedules.job_shop import JobShop, one_microbatch, repeated, run, within
from passes.schedules.policies import POLICIES
from passes.schedules.problem import Problem
from passes.schedules.replicas import with_reductions
from passes.schedules.rules import Replicas, rule_orders

_TICKS = 1_000_000  # of the longest action


def make_schedule(
    name: str,
    work: Work,
    stage_rank: Sequence[int | tuple[int, ...]],
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    *,
    frozen_seconds: Sequence[float] = (),
    frozen_ranks: Sequence[tuple[int, ...]] = (),
    world_size: int | None = None,
) -> Schedule:
    """The schedule `name` of `work`, for any stage graph, placement and number of micro-batches.

    `stage_rank`, `forward_seconds` and `backward_seconds` are per stage, `frozen_seconds` per component; I and W take
    half a backward each, and transfers none. A stage with several ranks has replicas, which take its micro-batches in
    turn and end with a gradient reduction. Frozen work comes first, on the ranks in turn, or with replicas on those
    that a micro-batch passes through; with `frozen_ranks`, per component, on those of these, or on any of these where
    it passes none.
    Raises CompileError for an unknown name.
    """
    if name not in POLICIES:
        raise CompileError(f"unknown schedule {name!r}; choose one of {', '.join(map(repr, POLICIES))}")
    rule = POLICIES[name].rule
    replicas = [ranks if isinstance(ranks, tuple) else (ranks,) for ranks in stage_rank]
    world_size = max(map(max, replicas)) + 1 if world_size is None else world_size
    frozen_ranks = tuple(frozen_ranks) if work.num_components else ()
    one = one_microbatch(work, work.input_grad & work.weight_grad if rule.split else frozenset())
    ticks = _ticks(one, forward_seconds, backward_seconds, frozen_seconds or [1.0] * work.num_components)
    inner = [[(need, 0) for need in needs] for needs in within(work, one)]
    # the replicas of a stage take their micro-batches in order; blocks have an order of their own
    turns = [[] if rule.repeated or a.kind == "T" else [(j, len(replicas[a.stage]))] for j, a in enumerate(one)]

    def rank(action: Action) -> int:
        return _rank(action, replicas, world_size, frozen_ranks)

    shop = repeated(one, work.num_microbatches, rank, world_size, ticks, inner, turns)
    orders = None
    if rule.capped:
        tries = (replace(rule, first=first) for first in ("FBW", "BFW"))
        found = [rule_orders(_capped(shop, work, replicas), tried, work, replicas) for tried in tries]
        orders = min((o for o in found if o is not None), key=lambda o: run(shop, o).ticks, default=None)
    orders = orders or rule_orders(shop, rule, work, replicas)
    assert orders is not None, "without limits of memory every list schedule ends"
    return with_reductions(shop.schedule(name, work.num_stages, orders), work)


def named_schedule(name: str, problem: Problem) -> Schedule:
    """The same of a problem, memory aside."""
    seconds, work = problem.seconds, problem.work
    return make_schedule(
        name, work, problem.stage_rank, seconds["F"], seconds["B"],
        frozen_seconds=seconds["T"] if work.num_components else (),
        frozen_ranks=problem.frozen_ranks, world_size=problem.num_ranks,
    )  # fmt: skip


def _capped(shop: JobShop, work: Work, replicas: Replicas) -> JobShop:
    """In the memory of 1F1B (Hanayo: Liu et al., "Harness Wave-like Pipeline Parallelism", SC 2023): with n stages a
    rank holds at most n x places activations, of whichever stages.

    That stops no chain of stages; what it stops goes without.
    """
    room = tuple(len({*replicas}) * sum(rank in ranks for ranks in replicas) for rank in range(shop.num_ranks))
    held = [a.stage in work.backward for a in shop.actions]
    taken = tuple(int(a.kind == "F" and of) for a, of in zip(shop.actions, held, strict=True))
    freed = tuple(int(a.kind in "BW" and of) for a, of in zip(shop.actions, held, strict=True))
    return replace(shop, taken=taken, freed=freed, limits=room)


def _rank(action: Action, replicas: Replicas, world_size: int, frozen_ranks: Sequence[tuple[int, ...]]) -> int:
    microbatch = action.microbatch
    if action.kind != "T":
        return replicas[action.stage][microbatch % len(replicas[action.stage])]
    most = max(map(len, replicas))
    allowed: Sequence[int] = frozen_ranks[action.stage] if frozen_ranks else range(world_size)
    if most == 1:
        return allowed[microbatch % len(allowed)]
    passed = sorted({ranks[microbatch % len(ranks)] for ranks in replicas} & {*allowed})
    return passed[microbatch // most % len(passed)] if passed else allowed[microbatch % len(allowed)]


def _ticks(
    one: Sequence[Action], forward: Sequence[float], backward: Sequence[float], frozen: Sequence[float]
) -> list[int]:
    """Durations in whole ticks: sums that are equal on paper must be equal here, or ties would fall by rounding."""
    unit = max([*forward, *backward, *frozen], default=0.0) / _TICKS or 1.0
    table = {"F": forward, "T": frozen, "B": backward}
    share = {"I": 0.5, "W": 0.5}
    return [max(1, round(share.get(a.kind, 1.0) * table.get(a.kind, backward)[a.stage] / unit)) for a in one]
