"""What a list schedule's rule means for operations: what is urgent, and what else each waits for.

    in flight   1F2 after 1B0    a forward waits until its stage has few enough micro-batches in flight
    drain last  0B0 after 0F7    a backward waits for all forwards of its rank
    repeated    (blocks)         every rank keeps the order of one micro-batch's block, repeated

Nothing can deadlock: every added precedence of a micro-batch is on an earlier one, on the forward of one ("drain
last"), or along the starts of the blocks.
"""

from collections.abc import Iterator, Sequence
from graphlib import TopologicalSorter
from math import ceil, lcm

from fxpipe.plan.actions import Work
from passes.schedules.blocks import block_precedences
from passes.schedules.job_shop import JobShop, RankOrders
from passes.schedules.list_scheduler import ListScheduler
from passes.schedules.policies import OrderRule

Replicas = Sequence[tuple[int, ...]]
Also = dict[int, list[int]]


def rule_orders(shop: JobShop, rule: OrderRule, work: Work, replicas: Replicas) -> RankOrders | None:
    """The list schedule of a rule; None where memory stops it.

    Args:
        replicas: the ranks of every stage, which take its micro-batches in turn.
    """
    if rule.repeated:
        also = block_precedences(shop, lcm(*map(len, replicas)))
    elif rule.drain_last:
        also = _drain_last(shop)
    else:
        also = {} if rule.in_flight is None else _bound_in_flight(shop, rule, work, replicas)
    return ListScheduler(shop, _urgency(shop, rule, work), also).orders()


def _urgency(shop: JobShop, rule: OrderRule, work: Work) -> list[int]:
    """The place of every operation among all by what the rule calls urgent."""
    keys = list(_turns(shop, rule, work) if rule.pace is None else _due(shop, rule.pace))
    urgency = [0] * len(shop)
    for place, i in enumerate(sorted(range(len(shop)), key=keys.__getitem__)):
        urgency[i] = place
    return urgency


def _turns(shop: JobShop, rule: OrderRule, work: Work) -> Iterator[tuple[int | str, ...]]:
    """Frozen work, then kinds in the order of the rule.

    What is in flight is bounded, so a forward goes first whenever it is admitted (measured: up to 15 % shorter than
    backward first where ranks have several stages, the same order where they have one). Older groups of micro-batches
    go first, then the stage nearer to the end of the micro-batch, or within a group the opposite. A rank that is alone
    goes through stages as they are numbered, and back: so gradients are summed, and what they trained comes.
    """
    components: dict[int, list[int]] = {component: [] for component in range(work.num_components)}
    for source, target in sorted(work.component_edges):
        components[target].append(source)
    place = {component: k for k, component in enumerate(TopologicalSorter(components).static_order())}
    turn = {kind: k for k, kind in enumerate(rule.first)}
    turn["I"] = turn["B"]
    later = 1 if shop.num_ranks == 1 else -1
    group = shop.num_ranks if rule.grouped else 1
    for a in shop.actions:
        if a.kind == "T":
            yield -1, a.microbatch, place[a.stage], a.stage
        else:
            nearer = later * (a.stage if a.kind == "F" else -a.stage)
            yield turn[a.kind], a.microbatch // group, -nearer if group > 1 else nearer, a.stage, a.kind, a.microbatch


def _due(shop: JobShop, pace: float) -> Iterator[tuple[float, int]]:
    """Micro-batch m should end m x pace periods after the first, a period being the busiest rank's for one."""
    loads = [sum(shop.ticks[i] for i in mine) for mine in shop.on_rank]
    period = max(loads, default=0) / max(shop.num_microbatches, 1)
    tails = [0] * len(shop)  # within its own micro-batch
    for i in reversed(range(len(shop))):
        same = (u for u in shop.users[i] if shop.actions[u[0]].microbatch == shop.actions[i].microbatch)
        tails[i] = max((lag + shop.ticks[u] + tails[u] for u, lag in same), default=0)
    for tail, action in zip(tails, shop.actions, strict=True):
        yield action.microbatch * pace * period - tail, action.microbatch


def _drain_last(shop: JobShop) -> Also:
    """Of every stage the last forward on a rank ends after all before it."""
    last = {(shop.rank[i], a.stage): i for i, a in enumerate(shop.actions) if a.kind == "F"}
    of_rank: dict[int, list[int]] = {}
    for (rank, _), i in last.items():
        of_rank.setdefault(rank, []).append(i)
    return {i: of_rank[shop.rank[i]] for i, a in enumerate(shop.actions) if a.kind in "BI"}


def _bound_in_flight(shop: JobShop, rule: OrderRule, work: Work, replicas: Replicas) -> Also:
    """A forward waits until its stage has few enough micro-batches whose gradient (or, without one, whose use) is due.

    Weight gradients may lag behind their input gradient as far as the memory of the fullest rank admits.
    """
    size = len(shop) // shop.num_microbatches
    place = {(a.stage, a.kind): j for j, a in enumerate(shop.actions[:size])}
    found: Also = {}
    for stage, limit, weight_limit in _limits(rule, work, replicas):
        users = [b for a, b in work.edges if a == stage]
        ends = [(stage, kind) for kind in "BI"] if stage in work.backward else [(user, "F") for user in users]
        waits = [(end, limit) for end in ends] + [((stage, "W"), weight_limit)]
        for end, back in waits:
            for m in range(back, shop.num_microbatches) if end in place else ():
                found.setdefault(m * size + place[stage, "F"], []).append((m - back) * size + place[end])
    return found


def _limits(rule: OrderRule, work: Work, replicas: Replicas) -> Iterator[tuple[int, int, int]]:
    """(stage, micro-batches whose gradients may be due, micro-batches whose weight gradients may be due)."""
    limits = {stage: ceil((rule.in_flight or 1) * n) for stage, n in _one_f_one_b(work, replicas, rule.grouped).items()}
    on_ranks: dict[tuple[int, ...], list[int]] = {}
    for stage in work.stages:
        on_ranks.setdefault(replicas[stage], []).append(stage)
    held = {ranks: sum(limits[stage] for stage in stages) for ranks, stages in on_ranks.items()}
    for stage in work.stages:
        ranks = replicas[stage]
        slack = (max(held.values()) - held[ranks]) // len(on_ranks[ranks])
        yield stage, limits[stage] * len(ranks), (limits[stage] + slack) * len(ranks)


def _one_f_one_b(work: Work, replicas: Replicas, grouped: bool) -> dict[int, int]:
    """Micro-batches in flight per stage and replica: as in 1F1B the stages from it to the end of the pipeline.

    With groups of N = number of ranks: N, and on the first N stages what the ramp of the pipeline needs besides.
    """
    num_ranks = len({replicas[stage] for stage in work.stages})
    if num_ranks == 1:
        return dict.fromkeys(work.stages, 1)
    if grouped and num_ranks < len(work.stages):
        return {stage: num_ranks + max(0, num_ranks - place) for place, stage in enumerate(work.stages)}
    users: dict[int, set[int]] = {stage: set() for stage in work.stages}
    for source, target in work.edges:
        users[source].add(target)
    limits: dict[int, int] = {}
    for stage in TopologicalSorter(users).static_order():
        limits[stage] = 1 + max((limits[user] for user in users[stage]), default=0)
    return limits
