"""The tuner's answer as a plan, all of it: stages, the orders of every form of the step, what they take, and why.

"auto", a name     the fastest of what is left open, within memory
a schedule         its own placement
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from fxpipe.collector import held_collector
from fxpipe.costs.block_costs import BlockSeconds
from fxpipe.errors import CompileError
from fxpipe.plan.block_graph import human_bytes
from fxpipe.plan.explanation import rivals
from fxpipe.plan.plan import Plan, microbatch_sizes
from fxpipe.plan.plan_check import unlike_replicas
from fxpipe.plan.schedule import Schedule, counted
from fxpipe.plan.schedule_check import require
from fxpipe.plan.staged import PlannedCut, Staged
from fxpipe.plan.timeline import human_seconds
from passes.case import Case
from passes.placement.collocation import fold_notes
from passes.placement.place import place_schedule
from passes.placement.shape import Shape
from passes.step_ops import step_ops
from passes.tuner.candidates import Candidate, candidates
from passes.tuner.finals import EARLY, refined, scattered, searched, settled, shifted
from passes.tuner.orders import Orders
from passes.tuner.recompute import fitting_runs
from passes.tuner.request import Request
from passes.tuner.search import NothingFits, RankedTrials, search
from passes.tuner.simulate import Simulated, simulate
from passes.tuner.trial import Trial
from passes.tuner.trials import Trials

_USABLE = 0.95
"""Of a device's memory: kernels and the allocator need some more than is counted."""
_BUSY = 0.3
"""Of a step, on average over ranks: where they compute for less, a plan says so."""


def make_plan(case: Case, request: Request, device_bytes: int | None) -> Plan:
    """The plan for a step that serves the request.

    Args:
        device_bytes: memory of the device planned for; a limit where the user gave none, unless nothing fits.

    Raises:
        CompileError: what is asked for excludes itself, or nothing fits into the user's memory limit.
    """
    if isinstance(request.schedule, Schedule):
        return _thrifty(replace(case, limit_bytes=request.memory_limit_bytes), request)
    if request.memory_limit_bytes is not None or device_bytes is None:
        return _thrifty(replace(case, limit_bytes=request.memory_limit_bytes), request)
    try:
        return _thrifty(replace(case, limit_bytes=usable_bytes(device_bytes)), request)
    except NothingFits:
        plan = _tuned(replace(case, limit_bytes=None), request)
        needed = human_bytes(max(prediction.peak_bytes for prediction in plan.predicted.values()))
        device = f"{human_bytes(device_bytes)} of a {case.cluster.device}"
        return replace(plan, notes=(f"a rank needs {needed}, more than the {device}", *plan.notes))


def _thrifty(case: Case, request: Request) -> Plan:
    """With the optimizer's states on the host where nothing fits otherwise, and a device's memory is another."""
    make = _given if isinstance(request.schedule, Schedule) else _tuned
    try:
        return make(case, request)
    except NothingFits:
        if request.offload_optimizer is not None or case.cluster.is_host:
            raise
        plan = make(case, replace(request, offload_optimizer=True))
        limit = human_bytes(case.limit_bytes or 0)
        return replace(
            plan, notes=(f"optimizer states are on the host: with them nothing fits into {limit}", *plan.notes)
        )


def usable_bytes(device_bytes: int) -> int:
    """What a plan may take of a device's memory."""
    return int(_USABLE * device_bytes)


@held_collector()
def tuned(case: Case, request: Request) -> RankedTrials:
    """All ways to use the ranks that were looked at, the best first."""
    trials = Trials(case, request)
    found = refined(trials, search(trials, candidates(case, request)))
    if request.is_open:
        found = searched(trials, found, request.budget_seconds)
    return scattered(trials, shifted(trials, settled(trials, found)))


def _tuned(case: Case, request: Request) -> Plan:
    found = tuned(case, request)
    outcomes = tuple(trial.outcome for trial in found.ranked)
    notes = (found.best.method,) if found.best.method else ()
    for loser in rivals(outcomes)[:1]:
        notes = (*notes, f"next best of {len(outcomes)} ways: {loser}; {loser.why}")
    return replace(_plan(case, found.best, notes), outcomes=outcomes)


def _given(case: Case, request: Request) -> Plan:
    """An order of the user's own, and its training with the next batch's frozen work where that is faster."""
    schedule = request.schedule
    assert isinstance(schedule, Schedule)
    count = schedule.num_microbatches
    times = case.costs.at(microbatch_sizes(request.batch_size, count)[0])
    staged = place_schedule(case, times, schedule)
    staged = replace(staged, recompute=request.runs(staged.boundaries), offloaded=bool(request.offload_optimizer))
    staged = staged.sharing(_shard_of(request, schedule) if staged.replicas > 1 else "none").summed_for(count)
    require(schedule, case.work.of(staged, count), staged.world_size)
    for fault in unlike_replicas(schedule, staged):
        raise CompileError(fault)
    sizes = microbatch_sizes(request.batch_size, count)
    staged, step = _in_memory(case, request, staged, schedule, sizes)
    if not case.fits(step.peak_bytes):
        raise NothingFits(
            f"the schedule needs {human_bytes(step.peak_bytes)} on a rank, more than memory_limit="
            f"{human_bytes(case.limit_bytes or 0)}; use one with fewer micro-batches in flight, or a higher limit"
        )
    early = replace(staged, prefetch=EARLY)
    sooner = simulate(case, early, schedule, sizes)
    if sooner.seconds < step.seconds and case.fits(sooner.peak_bytes):
        staged, step = early, sooner
    shape = Shape(schedule.name, staged.num_stages, (tuple(range(staged.world_size)),))
    known = Trial(Candidate(shape, count, False, 0.0), 0.0, staged, simulated=step, done=True)
    plan = _plan(case, known, ())
    if request.fill == "none" or not case.frozen.names:
        return plan
    training = schedule.where(lambda action: action.kind != "T")
    ahead = Candidate(shape, count, True, 0.0)
    best = Trials(case, request).finished(Trial(ahead, 0.0, staged, True, None, training, is_thrifty=True))
    if best is None or best.simulated is None or (request.fill == "auto" and best.simulated.seconds >= step.seconds):
        return plan
    predicted = {**plan.predicted, "steady": best.simulated.prediction}
    return replace(plan, steady=best.simulated.schedule, predicted=predicted)


def _shard_of(request: Request, schedule: Schedule) -> str:
    """What is asked for; what the order says of gradients, where that is open."""
    return request.shard or ("gradients" if schedule.is_scattered else "optimizer")


def _in_memory(
    case: Case, request: Request, staged: Staged, schedule: Schedule, sizes: Sequence[int]
) -> tuple[Staged, Simulated]:
    """The stages of a schedule as asked; if they do not fit, the fastest of those that do: with blocks recomputed, with
    weights shared out over replicas, with both if nothing else does. The least of them where none fits."""

    def ordered(found: Staged) -> tuple[Schedule, Sequence[int]]:
        return schedule, simulate(case, found, schedule, sizes).clock.rank_bytes

    def recomputed(found: Staged) -> list[Staged]:
        if isinstance(request.recompute, bool) or case.limit_bytes is None:
            return []
        fitting = fitting_runs(case, found, sizes[0], ordered, case.limit_bytes)
        return [] if fitting is None else [fitting]

    def tried(ways: Sequence[Staged]) -> list[tuple[Staged, Simulated]]:
        return [(way, simulate(case, way, schedule, sizes)) for way in ways]

    found = tried([staged])
    if case.fits(found[0][1].peak_bytes):
        return found[0]
    shared = staged.sharing("all" if schedule.is_scattered else "weights")
    may_share = request.shard is None and staged.replicas > 1 and not [*unlike_replicas(schedule, shared)]
    found += tried([*recomputed(staged), *([shared] if may_share else [])])
    if may_share and not any(case.fits(step.peak_bytes) for _, step in found):
        found += tried(recomputed(shared))
    fitting = [way for way in found if case.fits(way[1].peak_bytes)]
    if fitting:
        return min(fitting, key=lambda way: way[1].seconds)
    return min(found, key=lambda way: way[1].peak_bytes)


def _plan(case: Case, best: Trial, notes: tuple[str, ...]) -> Plan:
    """The plan of the best trial; of one that does frozen work ahead also the order of a step that does its own."""
    staged, count = best.placed, best.candidate.microbatches
    assert best.simulated is not None
    sizes = microbatch_sizes(case.batch_size, count)
    step, steady = best.simulated, None
    if best.candidate.ahead:
        steady = best.simulated
        step = simulate(case, staged, Orders(case, staged, count, ahead=False).named(), sizes)
    forms = {"step": step} if steady is None else {"step": step, "steady": steady}
    times = case.costs.at(sizes[0])
    return Plan(
        fingerprint="", cluster=str(case.cluster), cost_model="",
        cut=PlannedCut(len(case.blocks), sizes[0], case.divisible),
        batch_size=case.batch_size, num_microbatches=count, staged=staged,
        labels=tuple(_labels(case, staged, times)), components=case.frozen.names,
        step=step.schedule, steady=None if steady is None else steady.schedule,
        predicted={form: simulated.prediction for form, simulated in forms.items()},
        notes=(*notes, *fold_notes(case.graph, times, staged), *_remarks(case, staged, step), *_waits(best.simulated)),
    )  # fmt: skip


def _labels(case: Case, staged: Staged, times: BlockSeconds) -> Iterator[str]:
    """Of every stage its share of the work, and the modules it begins and ends with."""
    total = sum(times.total) or 1.0
    for stage in range(staged.num_stages):
        blocks = staged.blocks(stage)
        names = [case.graph.blocks[block].name for block in blocks]
        span = "(empty)" if not names else names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
        yield f"{sum(times.total[block] for block in blocks) / total:5.1%}  {span}"


def _waits(step: Simulated) -> Iterator[str]:
    """Of ranks that mostly wait, how few would do."""
    busy = 1 - step.clock.idle_share
    if busy < _BUSY:
        few = counted(math.ceil(len(step.schedule.ranks) * busy), "rank")
        yield f"ranks wait for {1 - busy:.0%} of a step, and {few} that never wait would do: use fewer, or more samples"


def _remarks(case: Case, staged: Staged, step: Simulated) -> Iterator[str]:
    empty = sum(not staged.blocks(stage) for stage in range(staged.num_stages))
    if empty:
        yield f"{empty} of {staged.num_stages} stages are empty: there are {len(case.blocks)} blocks"
    held = [n for n, ranks in zip(case.frozen.names, staged.frozen_ranks, strict=False) if len(ranks) < case.world_size]
    if held:
        yield f"{', '.join(held)} only where there is room for its weights"
    if staged.offloaded:
        sizes = microbatch_sizes(case.batch_size, step.schedule.num_microbatches)
        here, there = (step_ops(case, replace(staged, offloaded=of), step.schedule, sizes) for of in (False, True))
        states = human_bytes(max(held["optimizer"] for held in here.held))
        seconds = human_seconds(max(of_rank[-1].seconds for of_rank in there.ranks))
        yield f"the host keeps {states} of optimizer states for the fullest rank; its update takes {seconds} of a step"
