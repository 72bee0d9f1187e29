"""Ways to need less memory with the same shape, where a step does not fit.

shared out       weights held by one replica of a stage each, gathered for its actions; sums of gradients, too
frozen weights   t5 (9 GiB) on every rank: 40 GiB, 40, 40, 40          on the last rank: 31 GiB, 31, 31, 40
stages           cut anew by what blocks hold, how often, and what every rank has left: 32 GiB, 32, 32, 32
recomputed       the blocks that take least time of all whose values leave enough room: `recompute`
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from fxpipe.plan.plan import microbatch_sizes
from fxpipe.plan.schedule import Schedule
from fxpipe.plan.staged import Run, Staged, runs_within, whole_stages
from fxpipe.simulate.op_lists import StepOps
from passes.case import Case
from passes.placement.frozen_ranks import frozen_ranks
from passes.tuner.candidates import Candidate
from passes.tuner.recompute import ROUGH, Ordered, fitting_runs
from passes.tuner.recut import cut_by_memory
from passes.tuner.simulate import least_peaks


@dataclass(frozen=True, slots=True)
class Needs:
    """The most bytes on a rank, and those of them that are frozen weights."""

    total: int
    frozen: int


Peaks = Callable[[Staged], tuple[Schedule, Sequence[Needs]]]
"""The order of stages, and what every rank needs in it."""


def thriftier_stages(
    case: Case, candidate: Candidate, staged: Staged, peaks: Peaks, limit_bytes: int
) -> Iterator[Staged]:
    """Other stages that need less memory, and the same: with frozen weights on some ranks only, cut anew. What messages
    in flight add is not known yet."""
    for tried in (staged, *_with_frozen_ranks(case, staged, peaks, limit_bytes)):
        if most(peaks(tried)[1]) > limit_bytes:
            anew = cut_by_memory(case, candidate, tried, totals(peaks), limit_bytes)
            yield from [] if anew is None else [anew]
        yield tried


def most(needed: Sequence[Needs]) -> int:
    """On the fullest rank."""
    return max(needs.total for needs in needed)


def needs_of(case: Case, staged: Staged, schedule: Schedule, ops: StepOps, ahead: bool) -> list[Needs]:
    """What every rank needs, if messages take no time; `ahead`: with the weights of the next batch's frozen work, and
    what that makes."""
    peaks, weights = least_peaks(ops), case.costs.component_bytes
    if ahead:
        made = made_bytes(case, staged, case.batch_size)
        may_run = [sum(w for c, w in enumerate(weights) if staged.may_run(c, rank)) for rank in range(len(peaks))]
        return [Needs(p + m + w, w) for p, m, w in zip(peaks, made, may_run, strict=True)]
    runs = ({action.stage for action in actions if action.kind == "T"} for actions in schedule.ranks)
    return [Needs(p, sum(weights[c] for c in of)) for p, of in zip(peaks, runs, strict=True)]


def made_bytes(case: Case, staged: Staged, batch_size: int) -> list[int]:
    """What frozen components make of a batch for every rank's stages."""
    stages_of: list[tuple[int, ...]] = [()] * staged.world_size
    for stage, ranks in enumerate(staged.stage_ranks):
        for rank in ranks:
            stages_of[rank] += (stage,)
    found = {}
    for mine in {*stages_of}:
        blocks = [block for stage in mine for block in staged.blocks(stage)]
        replicas = min((len(staged.stage_ranks[stage]) for stage in mine), default=1)
        found[mine] = case.costs.made_bytes(blocks, -(-batch_size // replicas)) if blocks else 0
    return [found[mine] for mine in stages_of]


# -- frozen weights


def _with_frozen_ranks(case: Case, staged: Staged, peaks: Peaks, limit_bytes: int) -> Iterator[Staged]:
    """Every component on the ranks that have room for it; nothing where some has room on none.

    Once beside all that is saved, once beside what is held where every block is recomputed. Where there is no room
    even then, it may be made: ever more components, the largest first, are at one place each, the last one first, on
    which the fewest micro-batches are in flight.
    """
    component_bytes = case.costs.component_bytes
    if not any(component_bytes):
        return
    alike = list(dict.fromkeys(staged.alike(rank) for rank in range(staged.world_size)))
    seconds = case.costs.at(1).component_seconds
    everywhere = frozenset(range(len(alike)))
    found = False
    for recompute in (staged.recompute, _every_block(case)):
        _, needed = peaks(replace(staged, recompute=recompute))
        room = [limit_bytes - max(needed[rank].total - needed[rank].frozen for rank in ranks) for ranks in alike]
        places = frozen_ranks(room, component_bytes, seconds)
        if places is not None and any(frozenset(of) != everywhere for of in places):
            found = True
            ranks = tuple(tuple(sorted(rank for place in of for rank in alike[place])) for of in places)
            yield replace(staged, frozen_ranks=ranks)
    if not found and len(alike) > 1:
        yield from _at_one_place(staged, alike, component_bytes)


def _at_one_place(staged: Staged, alike: Sequence[tuple[int, ...]], component_bytes: Sequence[int]) -> Iterator[Staged]:
    found = [tuple(range(staged.world_size))] * len(component_bytes)
    largest_first = sorted(range(len(component_bytes)), key=lambda c: -component_bytes[c])
    for number, component in enumerate(c for c in largest_first if component_bytes[c]):
        found[component] = alike[-1 - number % len(alike)]
        yield replace(staged, frozen_ranks=tuple(found))


def _every_block(case: Case) -> tuple[Run, ...]:
    return tuple((block, block + 1) for block in case.blocks)


# -- recomputation


def cut_for_recomputed(
    case: Case, candidate: Candidate, staged: Staged, peaks: Peaks, limit_bytes: int
) -> Iterator[Staged]:
    """Other stages, cut for room where every block is recomputed."""
    every = replace(staged, recompute=_every_block(case))
    anew = cut_by_memory(case, candidate, every, totals(peaks), limit_bytes)
    if anew is not None and anew.boundaries != staged.boundaries:
        yield replace(anew, recompute=runs_within(staged.recompute, anew.boundaries))


def recomputed_stages(
    case: Case, candidate: Candidate, staged: Staged, peaks: Peaks, limit_bytes: int, by_blocks: bool
) -> Iterator[Staged]:
    """With the cheapest blocks recomputed that leave enough room, roughly, if there may be such (`by_blocks`), and as a
    whole where there is room, too."""
    num_samples = microbatch_sizes(case.batch_size, candidate.microbatches)[0]
    found = fitting_runs(case, staged, num_samples, totals(peaks), limit_bytes, ROUGH) if by_blocks else None
    if found is not None:
        yield found
    whole = replace(staged, recompute=whole_stages(staged.boundaries))
    if whole != found and most(peaks(whole)[1]) <= limit_bytes:
        yield whole


def totals(peaks: Peaks) -> Ordered:
    """The same of frozen weights and all else together."""

    def ordered(staged: Staged) -> tuple[Schedule, list[int]]:
        schedule, needed = peaks(staged)
        return schedule, [needs.total for needs in needed]

    return ordered
