"""The plan: how the ranks are used and what stages they hold, as asked for or as tuned.

a schedule's text       its own placement
a name, "auto"          the tuner's choice among what is left open, within memory
"""

from dataclasses import dataclass, replace

from fxpipe.block_graph import BlockGraph, human_bytes
from fxpipe.schedule import Schedule
from fxpipe.staged import Staged
from fxpipe.tuning import Outcome
from passes.estimate import BlockTimes
from passes.placement.place import fold_notes, place_schedule
from passes.rehearsal.case import Case
from passes.tuner.candidates import Wishes
from passes.tuner.finals import finals
from passes.tuner.tune import NothingFits, Tuned

_USABLE = 0.95  # of a device's memory: kernels and the allocator need some more than is counted


@dataclass(frozen=True)
class Planned:
    """Stages on ranks for `microbatches` micro-batches of all pipelines together, and their blocks' times.

    `outcomes` are the tuner's candidates, the chosen one first; `limit_bytes` is what a rank may need; an order is
    to be searched for in `search_seconds`, the named one taken where that is None.
    """

    staged: Staged
    microbatches: int
    times: BlockTimes
    outcomes: tuple[Outcome, ...] = ()
    limit_bytes: int | None = None
    notes: tuple[str, ...] = ()
    search_seconds: float | None = None


def make_plan(case: Case, wishes: Wishes, device_bytes: int | None, budget_seconds: float) -> Planned:
    """The plan for a step that serves the wishes.

    Args:
        device_bytes: memory of the device planned for; a limit where the user gave none, unless nothing fits.
        budget_seconds: to search for orders of the best candidates, where the order is open.

    Raises:
        CompileError: the wishes exclude each other, or nothing fits into the user's memory limit.
    """
    if isinstance(wishes.schedule, Schedule):
        assert wishes.microbatches is not None
        times = BlockTimes.of(case.costs, -(-wishes.batch_size // wishes.microbatches))
        staged = place_schedule(case.graph, times, wishes.schedule, case.cluster)
        notes = (*fold_notes(case.graph, times, staged), *_empty(case.graph, staged))
        return Planned(staged, wishes.microbatches, times, limit_bytes=wishes.memory_limit_bytes, notes=notes)
    search = budget_seconds if wishes.schedule == "auto" else None
    wishes, tuned, notes = _tuned(case, wishes, device_bytes, search)
    staged, count = tuned.chosen.placed, tuned.chosen.microbatches
    times = BlockTimes.of(case.costs, -(-wishes.batch_size // count))
    notes = (*notes, *fold_notes(case.graph, times, staged), *_empty(case.graph, staged), *_runner_up(tuned))
    return Planned(staged, count, times, tuned.outcomes, wishes.memory_limit_bytes, notes, tuned.search_seconds)


def _tuned(
    case: Case, wishes: Wishes, device_bytes: int | None, budget_seconds: float | None
) -> tuple[Wishes, Tuned, tuple[str, ...]]:
    if wishes.memory_limit_bytes is not None or device_bytes is None:
        return wishes, finals(replace(case, limit_bytes=wishes.memory_limit_bytes), wishes, budget_seconds), ()
    limit = usable_bytes(device_bytes)
    within = replace(wishes, memory_limit_bytes=limit)
    try:
        return within, finals(replace(case, limit_bytes=limit), within, budget_seconds), ()
    except NothingFits:
        tuned = finals(replace(case, limit_bytes=None), wishes, budget_seconds)
        needed = human_bytes(tuned.chosen.peak_bytes or 0)
        note = f"a rank needs {needed}, more than the {human_bytes(device_bytes)} of a {case.cluster.device}"
        return wishes, tuned, (note,)


def usable_bytes(device_bytes: int) -> int:
    """What a plan may take of a device's memory."""
    return int(_USABLE * device_bytes)


def _empty(graph: BlockGraph, staged: Staged) -> tuple[str, ...]:
    empty = sum(not staged.blocks(stage) for stage in range(staged.num_stages))
    return (f"{empty} of {staged.num_stages} stages are empty: there are {len(graph.blocks)} blocks",) if empty else ()


def _runner_up(tuned: Tuned) -> tuple[str, ...]:
    """The best of the others, and why it lost."""
    others = [outcome for outcome in tuned.outcomes[1:] if outcome.why]
    return (f"next best of {len(tuned.outcomes)} ways: {others[0]}; {others[0].why}",) if others else ()
