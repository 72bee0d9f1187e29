"""What would make a step faster: the same ops on another network, or with other seconds, simulated again; or other
plans, made for more memory or another number of micro-batches.

    network infinitely fast    links without latency, that need no time and no rank's
    frozen work free           frozen components take no time
    perfect balance            every rank computes for the mean of all ranks' times
    twice the memory           planned again
    one more micro-batch       planned again, the rest of the layout as it is
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from fxpipe.cluster import Cluster, Level
from fxpipe.cluster.links import Link
from fxpipe.errors import CompileError
from fxpipe.plan.explanation import Explanation, WhatIf, rivals
from fxpipe.plan.plan import Plan
from fxpipe.plan.timeline import kind_of
from fxpipe.simulate import simulate
from fxpipe.simulate.op_lists import Op, StepOps

FREE = Link("free", 1e30, 0.0)


@dataclass(frozen=True)
class Replanned:
    """How another plan for the same step is made."""

    plan: Callable[..., Plan]
    memory_limit_bytes: int | None


def explain(plan: Plan, ops: StepOps, cluster: Cluster, again: Replanned | None) -> Explanation:
    """The plan's own reasons and what would change them.

    Args:
        ops: of the form of the step that is run in a row.
        again: makes other plans, with fields of the request changed; None where nobody may.
    """
    seconds, busy = simulate(ops, cluster).seconds, [*map(_busy, ops.ranks)]
    found = [*_resimulated(ops, cluster, busy), *(_replanned(plan, again) if again is not None else ())]
    ordered = sorted(found, key=lambda what: (what.seconds is None, what.seconds))
    mean, most = sum(busy) / len(busy), max(busy)
    chosen = plan.summary().split("\n")[0]
    return Explanation(chosen, seconds, mean, most, tuple(ordered), rivals(plan.outcomes), len(plan.outcomes))


def _resimulated(ops: StepOps, cluster: Cluster, busy: Sequence[float]) -> Iterator[WhatIf]:
    free = Cluster(cluster.device, tuple(Level(level.size, FREE) for level in cluster.levels))
    sent = ops.wire_bytes
    yield _what("network infinitely fast", ops, free, "" if sent else "nothing is sent")
    free_ops = replace(ops, ranks=[[*_without_frozen(of_rank)] for of_rank in ops.ranks])
    yield _what("frozen work free", free_ops, cluster, "" if free_ops.ranks != ops.ranks else "none")
    yield _what("perfect balance", _balanced(ops, busy), cluster)


def _what(what: str, ops: StepOps, cluster: Cluster, why: str = "") -> WhatIf:
    return WhatIf(what, simulate(ops, cluster).seconds, why)


def _without_frozen(of_rank: Sequence[Op]) -> Iterator[Op]:
    """With frozen work that takes no time."""
    kind = ""
    for op in of_rank:
        kind = kind_of(op.action) if op.kind == "begin" else kind
        yield op._replace(seconds=0.0) if kind == "T" else op


def _balanced(ops: StepOps, busy: Sequence[float]) -> StepOps:
    """Every rank's work in the same time, the mean; what it does, and in which order, as before."""
    mean = sum(busy) / len(busy)
    ranks = [
        [op._replace(seconds=mean / of_rank * op.seconds) if of_rank else op for op in row]
        for row, of_rank in zip(ops.ranks, busy, strict=True)
    ]
    return replace(ops, ranks=ranks)


def _busy(of_rank: Sequence[Op]) -> float:
    return sum(op.seconds for op in of_rank)


def _replanned(plan: Plan, again: Replanned) -> Iterator[WhatIf]:
    """The same step planned for more; nothing is searched for longer than candidates take."""
    limit = again.memory_limit_bytes
    if limit is None:
        yield WhatIf("twice the memory", None, "nothing limits it")
    else:
        yield _planned("twice the memory", again, memory_limit_bytes=2 * limit)
    staged = plan.staged
    same = {"data_parallel": staged.replicas, "stages": staged.num_stages} if staged.world_size > 1 else {}
    yield _planned("one more micro-batch", again, microbatches=plan.num_microbatches + 1, **same)


def _planned(what: str, again: Replanned, **changes: int) -> WhatIf:
    try:
        plan = again.plan(**changes)
    except CompileError as error:
        return WhatIf(what, None, str(error).split("\n")[0])
    best = plan.best
    assert best is not None
    head = plan.summary().split("\n")[0].partition(" in ")[2]
    return WhatIf(what, best.seconds, f"as {head}")
