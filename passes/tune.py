"""Choose how to use the ranks: data parallel x stages x waves x micro-batches x collocation x recomputation.

    8 ranks, 32 samples   ->   8 pipelines of 1 rank      x 1, 2, 4 micro-batches
                               4 pipelines of 2 ranks     x line, wave (hard, soft), ...    x 1, 2, 4, 8 micro-batches
                               ...
                          ->   the one predicted fastest of those that fit, and why every other lost

Candidates are looked at in the order of a lower bound on their time, until no bound beats the best time found.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from fxpipe.block_costs import BlockCosts
from fxpipe.block_graph import BlockGraph, human_bytes
from fxpipe.cluster import Cluster
from fxpipe.errors import CompileError
from fxpipe.schedule import Schedule
from fxpipe.staged import Staged
from fxpipe.tuning import Outcome
from passes.estimate import BlockTimes, Estimate, estimate, stage_bytes
from passes.place import FOLDED, LOOPED, Shape, place, shape
from passes.room import peak_bytes
from passes.schedule import POLICIES

_LONG = 6  # micro-batches per stage beyond which a step is periodic, and its time a line through two shorter steps
_MOST_PER_RANK = 16  # micro-batches per rank of a pipeline: what more would save is below a sixteenth


@dataclass(frozen=True)
class Wishes:
    """What the user asked for; None leaves a choice open. `divisible`: whether the batch may be cut."""

    schedule: str
    world_size: int
    batch_size: int
    data_parallel: int | None = None
    stages: int | None = None
    microbatches: int | None = None
    collocation: str | None = None
    recompute: bool | None = None
    memory_limit_bytes: int | None = None
    divisible: bool = True


@dataclass(frozen=True)
class Candidate:
    """One way to use the ranks, for `microbatches` micro-batches of all pipelines together.

    `seconds` and `peak_bytes` are predicted for a step and for its fullest rank, `wire_bytes` for all ranks;
    None where the bound alone ruled it out. `why` says what it lost by; empty for the chosen one.
    """

    shape: Shape
    microbatches: int
    bound_seconds: float
    seconds: float | None = None
    peak_bytes: int | None = None
    wire_bytes: int | None = None
    staged: Staged | None = None
    why: str = ""

    @property
    def placed(self) -> Staged:
        """The stages of a candidate that was looked at."""
        assert self.staged is not None
        return self.staged

    @property
    def outcome(self) -> Outcome:
        shape = self.shape
        return Outcome(
            len(shape.pipelines), shape.places, shape.schedule, shape.stages, self.microbatches,
            self.staged.collocated if self.staged else shape.is_folded and shape.hard, shape.recompute,
            self.bound_seconds, self.seconds, self.peak_bytes, self.wire_bytes, self.why,
        )  # fmt: skip


@dataclass(frozen=True)
class Tuned:
    """The chosen candidate first, then the others, the fastest first."""

    ranked: tuple[Candidate, ...]
    num_evaluated: int

    @property
    def chosen(self) -> Candidate:
        return self.ranked[0]

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        return tuple(candidate.outcome for candidate in self.ranked)


def tune(graph: BlockGraph, costs: BlockCosts, cluster: Cluster, wishes: Wishes) -> Tuned:
    """The candidate predicted fastest of those that fit into the memory limit.

    Raises:
        CompileError: none fits; says which would need least.
    """
    best: Candidate | None = None
    looked_at, left = [], []
    for candidate in sorted(_candidates(costs, wishes), key=lambda c: c.bound_seconds):
        if best is not None and best.seconds is not None and candidate.bound_seconds >= best.seconds:
            left.append(candidate)
            continue
        for tried in _with_recomputation(graph, costs, cluster, wishes, candidate):
            looked_at.append(tried)
            fits = _fits(tried, wishes)
            if fits and (best is None or (tried.seconds or 0.0) < (best.seconds or 0.0)):
                best = tried
    if best is None:
        raise _nothing_fits(looked_at, wishes)
    others = [_told(c, best, wishes) for c in looked_at if c is not best]
    others += [replace(c, why=f"takes at least {_more(c.bound_seconds, best)}") for c in left]
    ranked = sorted(others, key=lambda c: c.seconds if c.seconds is not None else c.bound_seconds)
    return Tuned((best, *ranked), len(looked_at))


def _fits(candidate: Candidate, wishes: Wishes) -> bool:
    assert candidate.peak_bytes is not None
    return wishes.memory_limit_bytes is None or candidate.peak_bytes <= wishes.memory_limit_bytes


def _told(candidate: Candidate, best: Candidate, wishes: Wishes) -> Candidate:
    if not _fits(candidate, wishes):
        return replace(candidate, why=f"needs {human_bytes(candidate.peak_bytes or 0)} on a rank")
    return replace(candidate, why=f"{_more(candidate.seconds or 0.0, best)} longer")


def _more(seconds: float, best: Candidate) -> str:
    return f"{seconds / (best.seconds or 1.0) - 1:.1%}" if best.seconds else f"{seconds:.3g} s"


def _nothing_fits(looked_at: list[Candidate], wishes: Wishes) -> CompileError:
    if not looked_at:
        return CompileError(
            f"no way to use world_size={wishes.world_size} with data_parallel={wishes.data_parallel}, "
            f"stages={wishes.stages}, microbatches={wishes.microbatches}, {wishes.batch_size} samples; leave some open"
        )
    least = min(looked_at, key=lambda c: c.peak_bytes or 0)
    return CompileError(
        f"no plan fits into memory_limit={human_bytes(wishes.memory_limit_bytes or 0)} per rank: the least needed is "
        f"{human_bytes(least.peak_bytes or 0)} ({least.outcome}); use more ranks, smaller batches, or a higher limit"
    )


# -- what there is


def _candidates(costs: BlockCosts, wishes: Wishes) -> Iterator[Candidate]:
    counts = divisors(wishes.world_size)
    if wishes.data_parallel is not None and wishes.data_parallel not in counts:
        raise CompileError(
            f"data_parallel={wishes.data_parallel} does not divide world_size={wishes.world_size}; "
            "every pipeline has as many ranks"
        )
    for count in counts:
        if wishes.data_parallel in (None, count) and count <= wishes.batch_size:
            for found in shapes(wishes, count):
                for microbatches in _microbatches(wishes, count, found.places):
                    yield Candidate(found, microbatches, _bound(costs, wishes, found, microbatches))


def shapes(wishes: Wishes, data_parallel: int) -> Iterator[Shape]:
    """Every shape with so many pipelines."""
    places = wishes.world_size // data_parallel
    names = tuple(POLICIES) if wishes.schedule == "auto" else (wishes.schedule,)
    if places == 1:
        names = ("1f1b",) if wishes.schedule == "auto" else names
    for name in names:
        per_place = (2,) if name in (*FOLDED, *LOOPED) else (1, 2) if name == "zero-bubble" and places > 1 else (1,)
        for stages in {wishes.stages} if wishes.stages else {places * k for k in per_place}:
            for strided in {False, 1 < data_parallel < wishes.world_size}:
                try:
                    found = shape(name, wishes.world_size, stages, data_parallel, strided)
                except CompileError:
                    if wishes.schedule != "auto" and wishes.data_parallel is not None:
                        raise
                    continue
                wanted = wishes.collocation or ("" if wishes.schedule == "auto" else "hard")
                if not (found.is_folded and wanted == "soft"):
                    yield found
                if found.is_folded and places > 1 and wanted != "hard":
                    yield replace(found, hard=False)


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _microbatches(wishes: Wishes, data_parallel: int, places: int) -> list[int]:
    """Numbers of micro-batches over all pipelines: powers of two, and multiples of a pipeline's ranks."""
    if not wishes.divisible:
        return [1] if data_parallel == 1 and wishes.microbatches in (None, 1) else []
    if wishes.microbatches is not None:
        return [wishes.microbatches] if data_parallel <= wishes.microbatches <= wishes.batch_size else []
    most = min(wishes.batch_size // data_parallel, _MOST_PER_RANK * places)
    powers = {2**k for k in range(most.bit_length())}
    found = {m for m in powers | {places * k for k in (1, 2, 3, 4, 8)} if m <= most}
    return sorted(m * data_parallel for m in found)


def _bound(costs: BlockCosts, wishes: Wishes, found: Shape, microbatches: int) -> float:
    """No step of this shape is shorter: the busiest rank's work, and one micro-batch's way through the pipeline.

    On a line, stage s waits for the stages before it, forward and backward: with loads t, M t[s] + t[0] + ... + t[s-1].
    The partition that makes the largest of these least has t[s + 1] = t[s] (M - 1) / M.
    """
    count = len(found.pipelines)
    of_pipeline = -(-microbatches // count)
    times = costs.at(max(1, wishes.batch_size // microbatches))
    once = sum(times.forward_seconds) + sum(times.backward_seconds)
    frozen = sum(times.component_seconds)
    load = of_pipeline * once / found.places
    if found.stages == found.places > 1 and found.schedule != "zero-bubble":
        load = once / (1 - (1 - 1 / of_pipeline) ** found.places)
    return max(load + of_pipeline * frozen / found.places, once + frozen)


# -- what each takes


def _with_recomputation(
    graph: BlockGraph, costs: BlockCosts, cluster: Cluster, wishes: Wishes, candidate: Candidate
) -> Iterator[Candidate]:
    """The candidate, and where it does not fit, or the user wants it, recomputed."""
    plain = None
    if not wishes.recompute:
        plain = evaluate(graph, costs, cluster, wishes.batch_size, candidate)
        yield plain
    if wishes.recompute or (wishes.recompute is None and plain is not None and not _fits(plain, wishes)):
        recomputed = replace(candidate, shape=replace(candidate.shape, recompute=True))
        yield evaluate(graph, costs, cluster, wishes.batch_size, recomputed)


def evaluate(
    graph: BlockGraph, costs: BlockCosts, cluster: Cluster, batch_size: int, candidate: Candidate
) -> Candidate:
    """The candidate with its stages, time, memory and traffic."""
    num_samples = -(-batch_size // candidate.microbatches)
    times = block_times(costs, num_samples)
    staged = place(graph, times, candidate.shape, cluster)
    seconds, schedule = _seconds(
        lambda m: estimate(graph, times, staged, m, cluster, costs.trained_bytes), candidate, staged
    )
    return replace(
        candidate,
        seconds=seconds,
        peak_bytes=max(peak_bytes(costs, staged, schedule, num_samples)),
        wire_bytes=_wire_bytes(graph, costs, staged, batch_size),
        staged=staged,
    )


def block_times(costs: BlockCosts, num_samples: int) -> BlockTimes:
    times = costs.at(num_samples)
    return BlockTimes(times.forward_seconds, times.backward_seconds, times.component_seconds, num_samples)


def _seconds(simulated: Callable[[int], Estimate], candidate: Candidate, staged: Staged) -> tuple[float, Schedule]:
    """A long step is periodic: its time is that of a shorter one, and so much more for every further micro-batch."""
    count = len(candidate.shape.pipelines)
    of_pipeline = -(-candidate.microbatches // count)
    short = _LONG * candidate.shape.places
    if of_pipeline <= 2 * short:
        found = simulated(of_pipeline * count)
        return found.seconds, found.schedule
    first, second = simulated(short * count), simulated((short + candidate.shape.places) * count)
    each = (second.seconds - first.seconds) / candidate.shape.places
    return second.seconds + each * (of_pipeline - short - candidate.shape.places), second.schedule


def _wire_bytes(graph: BlockGraph, costs: BlockCosts, staged: Staged, batch_size: int) -> int:
    """Bytes all ranks send in a step: values and their gradients, and rings for the reductions."""
    ranks = staged.stage_ranks
    moved = sum(2 * size for (a, b), size in stage_bytes(graph, staged).items() if ranks[a] != ranks[b])
    reduced = sum(
        2 * (len(ranks[stage]) - 1) * sum(costs.trained_bytes[b] for b in staged.blocks(stage))
        for stage in range(staged.num_stages)
    )
    return moved * batch_size + reduced
