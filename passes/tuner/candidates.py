"""What the tuner chooses from: every way to use the ranks that the user leaves open, with a lower bound on its time."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fxpipe.block_graph import BlockGraph
from fxpipe.costs.block_costs import BlockCosts
from fxpipe.errors import CompileError
from fxpipe.schedule import Schedule
from fxpipe.staged import Staged
from fxpipe.tuning import Outcome
from passes.placement.cascade import borders, first_pass
from passes.placement.place import TWO_PER_RANK, Shape, shape
from passes.schedules.named import POLICIES

_OVERLAPPED = (1, 4)  # stages of a pipeline of one rank: the last one's gradients are reduced while others compute
_FEW = (2, 3, 4)  # stages that do not divide the ranks, and get replicas in uneven numbers
_MOST_PER_RANK = 16  # micro-batches per rank of a pipeline: what more would save is below a sixteenth


@dataclass(frozen=True)
class Wishes:
    """What the user asked for; None leaves a choice open.

    `conditioning` is the probability of a self-conditioned backbone's first pass, None where there is none to leave
    out; `filled` says that frozen work of the next batch goes into idle time, `divisible` that the batch may be cut.
    """

    schedule: str | Schedule
    world_size: int
    batch_size: int
    data_parallel: int | None = None
    stages: int | None = None
    microbatches: int | None = None
    collocation: str | None = None
    recompute: bool | None = None
    memory_limit_bytes: int | None = None
    conditioning: float | None = None
    filled: bool = False
    divisible: bool = True


@dataclass(frozen=True)
class Candidate:
    """One way to use the ranks, for `microbatches` micro-batches of all pipelines together.

    `estimated_seconds` of a step are a formula's, `seconds` simulated, as are `peak_bytes` of the fullest rank;
    `wire_bytes` are those of all ranks. None where an earlier number ruled it out. `why` says what it lost by; empty
    for the chosen one.
    """

    shape: Shape
    microbatches: int
    bound_seconds: float
    estimated_seconds: float | None = None
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
    def likely_seconds(self) -> float:
        """The best known of simulation, estimate and bound."""
        return self.seconds or self.estimated_seconds or self.bound_seconds

    @property
    def outcome(self) -> Outcome:
        shape = self.shape
        return Outcome(
            len(shape.pipelines), shape.places, shape.schedule, shape.stages, self.microbatches,
            self.staged.collocated if self.staged else shape.is_folded and shape.hard, shape.recompute,
            self.bound_seconds, self.seconds or self.estimated_seconds, self.peak_bytes, self.wire_bytes, self.why,
        )  # fmt: skip


_AUTOMATIC = ("gpipe", "1f1b", "interleaved", "wave", "zero-bubble")
"""The orders that are tried; for the one chosen a better one is looked for."""


def candidates(graph: BlockGraph, costs: BlockCosts, wishes: Wishes) -> Iterator[Candidate]:
    counts = divisors(wishes.world_size)
    if wishes.data_parallel is not None and wishes.data_parallel not in counts:
        raise CompileError(
            f"data_parallel={wishes.data_parallel} does not divide world_size={wishes.world_size}; "
            "every pipeline has as many ranks"
        )
    names = _names(graph, costs, wishes)
    free = wishes.stages is None and len(names) > 1
    for count in counts:
        if wishes.data_parallel in (None, count) and count <= wishes.batch_size:
            for found in shapes(wishes, count, names):
                if free and found.stages > max(found.places, costs.num_blocks // 2):
                    continue  # too few blocks to balance several stages per rank
                for microbatches in _microbatches(wishes, count, found.places):
                    if found.is_uneven and microbatches < found.places:
                        continue  # some replica would have nothing to do
                    yield Candidate(found, microbatches, _bound(costs, wishes, found, microbatches))


def _names(graph: BlockGraph, costs: BlockCosts, wishes: Wishes) -> tuple[str, ...]:
    """The named orders that suit the model."""
    passes = first_pass(graph, costs)
    if wishes.conditioning is not None:
        _check_passes(passes, wishes)
        return ("interleaved",)
    assert isinstance(wishes.schedule, str), "a schedule of the user's own has its placement"
    if wishes.schedule != "auto":
        return (wishes.schedule,)
    if passes:
        return ("interleaved",)  # both passes of a stage on its rank
    return (*_AUTOMATIC, *(("bidirectional",) if borders(graph, costs) else ()))


def _check_passes(passes: int, wishes: Wishes) -> None:
    if not passes:
        raise CompileError(
            "SelfConditioning wraps a step that calls its backbone once; its forward must call it twice, "
            "the first time under torch.no_grad()"
        )
    if wishes.schedule not in ("auto", "interleaved"):
        raise CompileError(
            f"schedule {wishes.schedule!r} does not keep both passes of a self-conditioned backbone together; "
            "use 'auto' or 'interleaved'"
        )


def shapes(wishes: Wishes, data_parallel: int, names: tuple[str, ...]) -> Iterator[Shape]:
    """Every shape with so many pipelines."""
    places = wishes.world_size // data_parallel
    if places == 1 and names != ("interleaved",):
        names = ("1f1b",) if wishes.schedule == "auto" else names
    for name in names:
        per_place = _stages_per_place(name, places)
        fixed = wishes.stages is not None or wishes.schedule != "auto"
        few = [s for s in _FEW if s < places and places % s] if name == "1f1b" and data_parallel == 1 else []
        for stages in [wishes.stages] if fixed else [*few, *(places * k for k in per_place)]:
            for strided in {False, 1 < data_parallel < wishes.world_size}:
                try:
                    found = shape(name, wishes.world_size, stages, data_parallel, strided)
                except CompileError:
                    if wishes.schedule != "auto" and wishes.data_parallel is not None:
                        raise
                    continue
                if found.is_uneven and strided:
                    continue
                if wishes.conditioning is not None:
                    found = replace(found, conditioning=wishes.conditioning)
                wanted = wishes.collocation or ("" if wishes.schedule == "auto" else "hard")
                if not (found.is_folded and wanted == "soft"):
                    yield found
                if found.is_folded and places > 1 and wanted != "hard":
                    yield replace(found, hard=False)


def _stages_per_place(name: str, places: int) -> tuple[int, ...]:
    if places == 1 and name != "interleaved":
        return _OVERLAPPED
    return (2,) if name in TWO_PER_RANK else (1, 2) if name == "zero-bubble" else (1,)


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
    if found.stages == found.places > 1 and not POLICIES[found.schedule].split:
        load = once / (1 - (1 - 1 / of_pipeline) ** found.places)
    if wishes.filled:
        load = max(load, of_pipeline * (once + frozen) / found.places)
    else:
        load += of_pipeline * frozen / found.places
    way = sum(times.forward_seconds) + sum(  # W is on nobody's way
        times.input_gradient_seconds if POLICIES[found.schedule].split else times.backward_seconds
    )
    return max(load, way)
