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
from passes.schedules.job_shop import JobShop, Orders, one_microbatch, repeated, repeated_needs, run, within
from passes.schedules.policies import POLICIES, Rule
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
    ranks = [_rank(a, replicas, world_size, frozen_ranks) for a in repeated(one, work.num_microbatches)]
    shop = _shop(work, one, ticks, ranks, world_size, None if rule.repeated else replicas)
    orders = _capped(shop, rule, work, replicas) if rule.capped else None
    orders = orders or rule_orders(shop, rule, work, replicas)
    assert orders is not None, "without limits of memory every list schedule ends"
    return with_reductions(shop.schedule(name, work.num_stages, orders), work)


def _capped(shop: JobShop, rule: Rule, work: Work, replicas: Replicas) -> Orders | None:
    """The shorter of "forward first" and "backward first" in the memory of 1F1B (Hanayo: Liu et al., "Harness Wave-like
    Pipeline Parallelism", SC 2023): with n stages a rank holds at most n x ranks activations, of whichever stages.

    None where that memory stops both, which it never does to a chain of stages, and where stages have replicas.
    """
    ranks = [replicas[stage][0] for stage in work.stages]
    if max(map(len, replicas)) > 1:
        return None
    room = tuple(len(set(ranks)) * ranks.count(rank) for rank in range(shop.num_ranks))
    holds = [a.stage in work.backward for a in shop.actions]
    taken = tuple(int(a.kind == "F" and held) for a, held in zip(shop.actions, holds, strict=True))
    freed = tuple(int(a.kind in "BW" and held) for a, held in zip(shop.actions, holds, strict=True))
    limited = replace(shop, taken=taken, freed=freed, limits=room)
    tried = (rule_orders(limited, replace(rule, capped=False, first=first), work, replicas) for first in ("FBW", "BFW"))
    return min((o for o in tried if o is not None), key=lambda o: run(shop, o).ticks, default=None)


def _shop(
    work: Work,
    one: Sequence[Action],
    ticks: Sequence[int],
    ranks: Sequence[int],
    world_size: int,
    turns: Replicas | None,
) -> JobShop:
    """The operations without delays and memory. The replicas `turns` of a stage take their micro-batches in order;
    where left out, blocks have an order of their own."""
    count, nothing = work.num_microbatches, (0,) * (len(one) * work.num_microbatches)
    inner = [[(need, 0) for need in needs] for needs in within(work, one)]
    earlier = [[(j, len(turns[a.stage]))] if turns and a.kind != "T" else [] for j, a in enumerate(one)]
    return JobShop(
        repeated(one, count), tuple(ranks), tuple(ticks) * count, repeated_needs(inner, earlier, count),
        nothing, nothing, None, world_size, count, False, 1.0,
    )  # fmt: skip


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
