"""What the tuner chooses from: every way to use the ranks that the user leaves open, with a lower bound on its time."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fxpipe.errors import CompileError
from fxpipe.plan.schedule import Schedule
from fxpipe.plan.staged import trains_alike
from passes.case import Case
from passes.placement.cascade import borders, first_pass, require_first_pass
from passes.placement.shape import Shape, shape
from passes.schedules.policies import LOOPED, PLAIN, POLICIES
from passes.tuner.bounds import compute_seconds
from passes.tuner.request import Request

_OVERLAPPED = (1, 4, 16)
"""Stages of a pipeline of one rank: gradients of the last ones are reduced while others compute, as DDP's buckets."""
_FEW = (2, 3, 4)
"""Stages that do not divide the ranks, and get replicas in uneven numbers."""
_MOST_PER_RANK = 16
"""Micro-batches per rank of a pipeline: what more would save is below a sixteenth of a step."""


@dataclass(frozen=True)
class Candidate:
    """One way to use the ranks: stages on ranks, `microbatches` of all pipelines together, and whether frozen work is
    done for the next batch; no step of it is shorter than `bound_seconds`."""

    shape: Shape
    microbatches: int
    ahead: bool
    bound_seconds: float


def candidates(case: Case, request: Request) -> Iterator[Candidate]:
    """All that the request leaves open.

    Raises:
        CompileError: what it asks for does not suit the model.
    """
    forms = _forms(case, request)
    levels = case.cluster.levels_of(case.world_size)
    ways = [*_ways(request, _names(case, request), levels > 1)]
    for found, microbatches in [way for way in ways if _is_sensible(case, request, way[0])] or ways:
        if found.is_uneven and microbatches < found.places:
            continue  # some replica would have nothing to do
        for ahead in forms:
            yield Candidate(found, microbatches, ahead, compute_seconds(case, found, microbatches, ahead))


def _is_sensible(case: Case, request: Request, found: Shape) -> bool:
    """Whether a shape is looked at where there are others."""
    if request.stages is None and request.is_open and found.stages > max(found.places, len(case.blocks) // 2):
        return False  # too few blocks to balance several stages per rank
    # some rank would have nothing to train, and others may share its samples
    return not (request.data_parallel is None and 1 < len(case.blocks) < found.places < request.batch_size)


def require_possible(request: Request) -> None:
    """Refuse what no model could be planned by, before anything is captured.

    Raises:
        CompileError: the schedule is unknown, or its stages, pipelines, ranks and micro-batches do not fit each other.
    """
    if not isinstance(request.schedule, str):
        return
    copies, count = request.data_parallel or 1, request.microbatches or 0
    if trains_alike(request.shard) and count % copies:
        raise CompileError(
            f"shard={request.shard!r} with microbatches={count}, data_parallel={copies}: replicas exchange them "
            f"together, for as many micro-batches each; give a multiple of {copies}, or shard='optimizer'"
        )
    automatic = tuple(name for name, policy in POLICIES.items() if policy.automatic)
    if not any(True for _ in _ways(request, automatic if request.is_open else (request.schedule,))):
        raise no_way(request)


def default_pipelines(schedule: str | Schedule, world_size: int, stages: int | None, shard: str | None) -> int | None:
    """Where the user leaves them out: None where the order is to be chosen; of a named one as many as have so many
    stages, where one pipeline cannot have fewer stages than ranks; else 1."""
    if schedule == "auto":
        return None
    policy = POLICIES.get(schedule) if isinstance(schedule, str) else None
    if policy is None or stages is None or (policy.uneven and not trains_alike(shard)):
        return 1
    count, rest = divmod(world_size * policy.stages_per_rank[0], stages)
    return 1 if rest or not count or world_size % count else count


def no_way(request: Request) -> CompileError:
    """Counts do not fit each other."""
    alike = f", where shard={request.shard!r} gives every replica as many micro-batches" * trains_alike(request.shard)
    return CompileError(
        f"no way to use world_size={request.world_size} with data_parallel={request.data_parallel}, "
        f"stages={request.stages}, microbatches={request.microbatches}, {request.batch_size} samples{alike}: pipelines "
        "divide the ranks, a pipeline's ranks its stages, and each has micro-batches of its own, of a sample or more; "
        "leave some open"
    )


def _forms(case: Case, request: Request) -> tuple[bool, ...]:
    if not case.frozen.names:
        return (False,)
    return {"auto": (False, True), "none": (False,)}.get(request.fill, (True,))


def _ways(request: Request, names: tuple[str, ...], strides: bool = False) -> Iterator[tuple[Shape, int]]:
    """Shapes of these orders, with numbers of micro-batches; those with `strides` too, where it matters which ranks
    are neighbours."""
    counts = divisors(request.world_size)
    if request.data_parallel is not None and request.data_parallel not in counts:
        raise CompileError(
            f"data_parallel={request.data_parallel} does not divide world_size={request.world_size}; "
            "every pipeline has as many ranks"
        )
    for count in counts:
        if request.data_parallel in (None, count) and count <= request.batch_size:
            for found in _shapes(request, count, names, strides):
                for microbatches in _microbatch_counts(request, count, found.places):
                    yield found, microbatches


def _names(case: Case, request: Request) -> tuple[str, ...]:
    """The named orders that suit the model."""
    if request.conditioning is not None:
        require_first_pass(case.graph, case.costs)
        if request.schedule not in ("auto", LOOPED):
            raise CompileError(
                f"schedule {request.schedule!r} does not keep both passes of a self-conditioned backbone together; "
                f"use 'auto' or {LOOPED!r}"
            )
        return (LOOPED,)
    if isinstance(request.schedule, str) and not request.is_open:
        return (request.schedule,)
    if first_pass(case.graph, case.costs):
        return (LOOPED,)  # both passes of a stage on its rank
    several = borders(case.graph, case.costs)
    return tuple(name for name, p in POLICIES.items() if p.automatic and (several or not p.reverses))


def _shapes(request: Request, data_parallel: int, names: tuple[str, ...], strides: bool) -> Iterator[Shape]:
    """Every shape with so many pipelines."""
    places = request.world_size // data_parallel
    if places == 1 and request.is_open and request.conditioning is None:
        names = (PLAIN,)
    for name in names:
        for stages in _stages(request, name, places, data_parallel):
            for strided in {False, strides and 1 < data_parallel < request.world_size}:
                try:
                    found = shape(name, request.world_size, stages, data_parallel, strided)
                except CompileError:
                    if not request.is_open and request.data_parallel is not None:
                        raise
                    continue
                if _may_share(found, request.shard) and not (found.is_uneven and strided):
                    yield from _collocated(request, found)


def _may_share(found: Shape, shard: str | None) -> bool:
    """Whether replicas of its stages, if there are any, may share this out."""
    return not (found.is_uneven and found.stages > 1 and trains_alike(shard))


def _stages(request: Request, name: str, places: int, data_parallel: int) -> list[int | None]:
    policy = POLICIES.get(name)
    if request.stages is not None or not request.is_open or policy is None:
        return [request.stages]
    per_place = policy.stages_per_rank
    if places == 1:
        per_place = tuple(k * parts for k in per_place for parts in _OVERLAPPED)
    few = [s for s in _FEW if s < places and places % s] if name == PLAIN and data_parallel == 1 else []
    return [*few, *(places * k for k in per_place)]


def _collocated(request: Request, found: Shape) -> Iterator[Shape]:
    """The shape with its skips on one rank each, with skips as balance wants them, or both."""
    if request.conditioning is not None:
        found = replace(found, conditioning=request.conditioning)
    wanted = request.collocation or ("" if request.is_open else "hard")
    both = found.is_folded and found.places > 1
    if not (both and wanted == "soft"):
        yield found
    if both and wanted != "hard":
        yield replace(found, hard=False)


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _microbatch_counts(request: Request, data_parallel: int, places: int) -> list[int]:
    """Numbers of micro-batches over all pipelines: powers of two, multiples of a pipeline's ranks, single samples."""
    if not request.divisible:
        return [1] if data_parallel == 1 and request.microbatches in (None, 1) else []
    if request.microbatches is not None:
        return [request.microbatches] if data_parallel <= request.microbatches <= request.batch_size else []
    most = min(request.batch_size // data_parallel, _MOST_PER_RANK * places)
    powers = {2**k for k in range(most.bit_length())}
    found = {m for m in powers | {places * k for k in (1, 2, 3, 4, 8)} | {most} if m <= most}
    return sorted(m * data_parallel for m in found)
