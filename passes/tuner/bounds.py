"""Lower bounds to prune with: no step of a candidate is shorter.

compute      the busiest rank's work, and one micro-batch's way through the pipeline     before anything is placed
again        the forwards that memory makes ranks compute again
placed       the busiest rank's work, of stages on ranks; the busiest port's messages
reductions   the busiest port's sums of gradients, which go on beside them; those after the last of the gradients
frozen       what is idle, and the next batch's frozen work in it
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from fxpipe.cluster.network import Port
from fxpipe.plan.actions import Action
from fxpipe.plan.execution import ActionTimes
from fxpipe.plan.staged import Staged
from fxpipe.simulate.collectives import ring_ports
from passes.case import Case
from passes.placement.ports import message_seconds
from passes.placement.shape import Shape
from passes.schedules.policies import POLICIES
from passes.step_ops.seconds import ActionSeconds
from passes.step_ops.sharding import summing_stage
from passes.tuner.recompute import numbers_in_flight

_ROUNDING = 1e-9


def compute_seconds(case: Case, found: Shape, microbatches: int, ahead: bool, again_seconds: float = 0.0) -> float:
    """The busiest rank's work, and one micro-batch's way through the pipeline.

    `again_seconds` of a micro-batch's forwards are computed twice.

    On a line, stage s waits for the stages before it, forward and backward: with loads t, M t[s] + t[0] + ... + t[s-1].
    The partition that makes the largest of these least has t[s + 1] = t[s] (M - 1) / M. Loads count as far as blocks
    wait for each other: those of several backbones do not.
    """
    of_pipeline = -(-microbatches // len(found.pipelines))
    times = case.costs.at(max(1, case.batch_size // microbatches))
    splits = POLICIES[found.schedule].splits
    once = sum(times.total) + again_seconds
    load, frozen = of_pipeline * once / found.places, _frozen_seconds(case, found, microbatches, ahead)
    ramped, work = load, case.work.of_blocks
    if found.stages == found.places > 1 and not splits:
        chain = max(_chains(work.grad_edges, times.total))
        chain += max(0.0, again_seconds - (sum(times.total) - chain))  # as much as may be again in other blocks
        ramped = chain / (1 - (1 - 1 / of_pipeline) ** found.places)
    backward = times.input_gradient_seconds if splits else times.backward_seconds  # W is on nobody's way
    way = max(_chains(work.grad_edges, backward, _chains(work.edges, times.forward_seconds)))
    way += max(0.0, again_seconds - (sum(times.forward_seconds) + sum(backward) - way))
    return max(ramped, load + frozen, way)


@lru_cache(maxsize=1 << 10)
def _chains(
    pairs: frozenset[tuple[int, int]], seconds: tuple[float, ...], starts: tuple[float, ...] = ()
) -> tuple[float, ...]:
    """Of every block the longest chain that ends with it, of those that a start is known of; `pairs` (a, b), all
    ascending or all descending, say that b waits for a."""
    found = [*(starts or [0.0] * len(seconds))]
    before: list[list[int]] = [[] for _ in seconds]
    for first, then in pairs:
        before[then].append(first)
    down = any(first > then for first, then in pairs)
    for block in range(len(seconds))[:: -1 if down else 1]:
        found[block] = max([found[block], *(found[other] for other in before[block])]) + seconds[block]
    return tuple(found)


def _frozen_seconds(case: Case, found: Shape, microbatches: int, ahead: bool) -> float:
    """Of frozen work, for each rank of a pipeline, if all are busy with it for as long."""
    times = case.costs.at(max(1, case.batch_size // microbatches))
    frozen = -(-microbatches // len(found.pipelines)) * sum(times.component_seconds)
    if ahead:  # on as many samples at once as a pipeline has
        samples = -(-case.batch_size // len(found.pipelines))
        frozen = min(frozen, sum(map(sum, case.frozen.seconds_at(samples))))
    return frozen / found.places


def in_flight(ranks: Iterable[Sequence[Action]]) -> Counter[int]:
    """The most micro-batches between a forward and the last of their backward, of every stage on any of its ranks."""
    most = Counter[int]()
    for actions in ranks:
        trained = sorted({action.stage for action in actions if action.kind in "BIW"})
        highest = map(max, zip(*numbers_in_flight(actions, trained), strict=True))
        most |= Counter(dict(zip(trained, highest, strict=True)))
    return most


def placed_seconds(case: Case, staged: Staged, sizes: Sequence[int]) -> float:
    """The largest of the bounds that stages on ranks have, whatever the order, sums of gradients aside; `sizes` are
    samples of micro-batches."""
    port = message_seconds(case.graph, staged, sizes, case.cluster)
    return max(busiest_seconds(ActionSeconds(case, staged), sizes), port)


def busiest_seconds(seconds: ActionSeconds, sizes: Sequence[int]) -> float:
    """Of the rank with most to compute, frozen work aside: micro-batch m of stage s is that of its replica m modulo
    their number."""
    staged, busy = seconds.staged, [0.0] * seconds.staged.world_size
    shares: dict[int, list[dict[int, int]]] = {}  # by a number of replicas: of each, its micro-batches by their size
    for stage in (stage for stage in range(staged.num_stages) if staged.blocks(stage)):
        ranks = staged.stage_ranks[stage]
        if len(ranks) not in shares:
            shares[len(ranks)] = [Counter(sizes[turn :: len(ranks)]) for turn in range(len(ranks))]
        of = {size: sum(seconds.of(Action(stage, kind, 0), size) for kind in "FB") for size in {*sizes}}
        for rank, share in zip(ranks, shares[len(ranks)], strict=True):
            busy[rank] += sum(count * of[size] for size, count in share.items())
    return max(busy)


def reduction_seconds(case: Case, staged: Staged, num_microbatches: int) -> float:
    """Of the port, or the ranks, with most to do for sums of gradients, each of which has them for itself."""
    busy: dict[Port | tuple[int, ...], float] = {}
    turns = num_microbatches // staged.replicas if staged.scattered else 1
    for _, group, size in _summed(case, staged):
        seconds = _exchange_seconds(case, staged, group, size, turns)
        for use in _uses(case, group):
            busy[use] = busy.get(use, 0.0) + seconds
    return max(busy.values(), default=0.0)


def sums_are_hidden(case: Case, staged: Staged, num_microbatches: int) -> bool:
    """Whether a rank's backward of a micro-batch lasts as long as the sums of its gradients, each on one replica."""
    backward = sum(case.costs.at(case.batch_size // num_microbatches).backward_seconds)
    sums = reduction_seconds(case, staged.sharing("optimizer"), 1) / 2  # the other half brings what they train
    return sums <= backward * staged.replicas / case.world_size


def shares_may_slow(case: Case, staged: Staged, num_samples: int) -> bool:
    """Whether a step may be longer if each replica trains a share: few bytes are summed faster for all at once, and
    values may come later than the first micro-batch, of so many samples, wants them, or take from what it computes.
    """
    gather, seconds = case.cluster.all_gather_seconds, ActionSeconds(case, staged)
    arrives, free = dict[int, float](), dict[Port | tuple[int, ...], float]()
    for stage, group, size in _summed(case, staged):
        if case.cluster.all_reduce_seconds(group, size) < (2 - _ROUNDING) * gather(group, size):
            return True
        if case.cluster.ring_taken_seconds(group, group[0], size):
            return True
        uses = _uses(case, group)
        arrives[stage] = gather(group, size) + max(free.get(use, 0.0) for use in uses)
        free.update(dict.fromkeys(uses, arrives[stage]))
    first, *others = (stage for stage in range(staged.num_stages) if staged.blocks(stage))
    now = arrives.get(first, 0.0) + seconds.of(Action(first, "F", 0), num_samples)
    for stage in others:
        if arrives.get(stage, 0.0) > now:
            return True
        now += seconds.of(Action(stage, "F", 0), num_samples)
    return False


def _uses(case: Case, group: tuple[int, ...]) -> list[Port | tuple[int, ...]]:
    """What only one collective has at a time."""
    return [group, *ring_ports(case.cluster, group)]


def _summed(case: Case, staged: Staged) -> Iterator[tuple[int, tuple[int, ...], int]]:
    """Every stage with replicas, their ranks, and the bytes of gradients that they sum."""
    own = [0] * staged.num_stages
    for weight in (weight for weight in case.costs.weights if weight.trained):
        holding, giving = ({staged.stage_of_block[block] for block in of} for of in (weight.blocks, weight.gives))
        stage = summing_stage(holding, giving, staged.stage_ranks, staged.gathered)
        if stage is not None:
            own[stage] += weight.num_bytes
    for stage, (ranks, size) in enumerate(zip(staged.stage_ranks, own, strict=True)):
        if len(ranks) > 1 and size:
            yield stage, tuple(sorted(ranks)), size


def _exchange_seconds(case: Case, staged: Staged, ranks: Sequence[int], num_bytes: int, turns: int) -> float:
    """Of gradients over replicas in so many turns, and where they are sharded once of what is trained by them."""
    if staged.sharded:
        return (turns + 1) * case.cluster.all_gather_seconds(ranks, num_bytes)
    return case.cluster.all_reduce_seconds(ranks, num_bytes)


def ordered_seconds(case: Case, staged: Staged, timeline: ActionTimes) -> float:
    """Of one of equal pipelines that has all links for itself, with its reductions: those that share a rank or a port
    one by one.

    Args:
        timeline: of the pipeline.
    """
    return max([timeline.makespan_seconds, *_reduction_ends(case, staged, timeline)])


def _reduction_ends(case: Case, staged: Staged, timeline: ActionTimes) -> Iterator[float]:
    """When the gradients of every replicated stage are summed."""
    last: dict[int, float] = {}
    for action, end in timeline.end_seconds.items():
        if action.kind in "BW":
            last[action.stage] = max(end, last.get(action.stage, end))
    free: dict[int | Port, float] = {}
    summed = (each for each in _summed(case, staged) if each[0] in last)  # weights may be read without a gradient
    for stage, ranks, size in sorted(summed, key=lambda each: last[each[0]]):
        uses: tuple[int | Port, ...] = (*ranks, *ring_ports(case.cluster, ranks))
        start = max(last[stage], *(free.get(use, 0.0) for use in uses))
        scatter, whole = case.cluster.all_gather_seconds, case.cluster.all_reduce_seconds
        end = start + (scatter if staged.sharded else whole)(ranks, size)
        free.update(dict.fromkeys(uses, end))
        yield end


def filled_seconds(
    case: Case,
    groups: Iterable[tuple[Sequence[int], Sequence[int]]],
    seconds: float,
    idle_seconds: Sequence[float],
    room_bytes: float | None,
) -> float:
    """A step's training with the next batch's frozen work: what does not fit into idle time is shared out evenly over
    the ranks of a pipeline.

    Args:
        groups: ranks, and the samples whose frozen work they share.
        seconds: of the training.
        idle_seconds: of every rank, as far as frozen work may use them.
        room_bytes: what a rank has for an operation of frozen work.
    """
    tails = (
        (case.frozen.seconds_within(len(samples), room_bytes) - sum(idle_seconds[r] for r in ranks)) / len(ranks)
        for ranks, samples in groups
        if samples
    )
    return seconds + max(0.0, *tails)
