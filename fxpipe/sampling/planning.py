"""The plan of a sampler's call: samples in groups, stages from blocks, patches of the rows, in which order.

choices   what is decided: groups, blocks of stages, bounds of patches    <- what was asked for, or a plan
planned   what follows from that, and the order of a steady step          -> SamplePlan
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise, zip_longest
from typing import Literal

from fxpipe.errors import CompileError
from fxpipe.plan.actions import Action
from fxpipe.plan.sample_grid import Grid, grid_for
from fxpipe.plan.sample_plan import IN_TURN, AttentionKind, How, SamplePlan
from fxpipe.plan.schedule import Schedule, counted
from fxpipe.plan.staged import PlannedCut, Staged
from fxpipe.sampling.case import SampleCase
from passes.sampling.cells import Cell, cells
from passes.sampling.patches import even_bounds, patches_of, require_units, shared_bounds
from passes.sampling.stages import LateBlocks, Stage, StageLine, StageSpan, line_of, num_blocks
from passes.sampling.text import Text, balanced_bounds

_ALL = Stage(0, 0, frozenset(), (), (), 0.0)


@dataclass(frozen=True)
class SampleRequest:
    """What a user has asked for, None where it is left open; `patches` may be bounds in units. The ranks are so many
    `copies` of fewer, and have these `speeds`; none where they are equal. So many more are `watching`."""

    world_size: int
    cfg: int | None
    stages: int | None
    fold: bool | None
    patches: int | Sequence[int] | None
    how: How
    text: Text = "first"
    attention: Literal["auto", "gather", "ulysses", "ring"] = "auto"
    copies: int = 1
    speeds: tuple[float, ...] = ()
    watching: int = 0

    @property
    def in_turn(self) -> bool:
        """Whether patches follow each other through stages; through a single one where there are no ranks beside it."""
        alone = self.world_size == self.copies * (self.cfg or 1)
        return self.how.mode == "displaced" and self.stages is not None and (self.stages > 1 or alone)

    @property
    def num_patches(self) -> int | None:
        return self.patches if isinstance(self.patches, int | None) else len(self.patches) - 1


@dataclass(frozen=True)
class Choices:
    """What a plan decides. `spans` are its stages, None where there is one without blocks of its own; `attention` is
    the kind of every layer of it, empty where nothing is exchanged or steps are displaced; the first steps are made by
    `warm`, an exact layout, where that is faster."""

    grid: Grid
    spans: tuple[StageSpan, ...] | None
    bounds: tuple[int, ...]
    text_first: bool
    order: str
    how: How
    attention: tuple[AttentionKind, ...] = ()
    notes: tuple[str, ...] = ()
    warm: "Choices | None" = None
    watching: int = 0


def chosen(case: SampleCase, request: SampleRequest) -> Choices:
    """What is decided for a call.

    Raises:
        CompileError: it cannot be cut as asked.
    """
    grid = grid_of(case, request)
    bounds, text_first = bounds_of(case, request, grid)
    if request.in_turn:
        grid = replace(grid, turns=(len(bounds) - 1) // grid.patches)
    order = IN_TURN if request.in_turn else "rows" if grid.stages == 1 else "samples in turn"
    spans = None
    if order != "rows":
        speeds = column_speeds(request.speeds, grid, bounds)
        spans = case.spans(case.run_size(grid), grid.stages, request.fold, speeds)
    return Choices(grid, spans, bounds, text_first, order, request.how, watching=request.watching)


def is_text_first(case: SampleCase, made: Choices) -> bool:
    """Whether its first patch may have the text alone, as is chosen, in every group."""
    sizes = {stop - start for start, stop in made.grid.spans(case.num_samples)}
    return made.text_first and all(case.first_has_text(size, made.bounds, made.attention) for size in sizes)


def choices_of(plan: SamplePlan) -> Choices:
    """What a plan has decided."""
    spans = None
    if plan.staged.schedule != "rows":
        ends = zip(plan.staged.boundaries, plan.staged.boundaries[1:], plan.columns, strict=False)
        spans = tuple((start, stop, column) for start, stop, column in ends)
    order, warm = plan.staged.schedule, None if plan.warm is None else choices_of(plan.warm)
    told = plan.how, plan.attention
    return Choices(plan.grid, spans, plan.bounds, plan.text_first, order, *told, warm=warm, watching=plan.watching)


def planned(case: SampleCase, made: Choices, cluster: str, priced: str) -> tuple[SamplePlan, StageLine | None]:
    """The plan with these choices, and its stages."""
    grid, size = made.grid, case.run_size(made.grid) if made.spans else case.num_samples
    cut = PlannedCut(num_blocks(grid.stages) if made.spans else 1, size)
    blocks = case.blocks(size, cut.num_blocks) if made.spans else None
    if blocks and made.spans and made.spans[-1][1] != len(blocks.blocks):
        raise CompileError(f"the plan ends at block {made.spans[-1][1]}, the call has {len(blocks.blocks)} blocks")
    for stage, (start, stop, _) in enumerate(made.spans or ()):
        if start >= stop:
            raise CompileError(f"stage {stage} of the plan has no blocks; give it some, or leave it out")
    line = line_of(blocks, made.spans) if blocks and made.spans else None
    rows = case.rows(case.group_size(grid))
    patches_of(rows, made.bounds)
    _require_turns(made)
    _require_watching(made)
    boundaries = (0, *(stop for _, stop, _ in made.spans)) if made.spans else (0, 1)
    ranks = [list(_ranks(grid, column)) for column in ([s.column for s in line.stages] if line else [0])]
    staged = Staged(boundaries, tuple(map(tuple, ranks)), made.order, False, grid.world_size)
    notes = (*case.traced.notes, *map(str, rows.notes), *made.notes)
    warm = None if made.warm is None else replace(planned(case, made.warm, cluster, priced)[0], notes=())
    plan = SamplePlan(
        case.fingerprint(blocks), cluster, priced, case.num_samples, grid.groups, grid.copies, cut, staged,
        tuple(_labels(blocks, made.spans)), rows.units.rows, rows.units.each, made.bounds,
        made.text_first, made.how, made.attention, _steady(case, made, line), notes, warm=warm,
        watching=made.watching,
    )  # fmt: skip
    return plan, line


def _require_turns(made: Choices) -> None:
    """Refuse patches that ranks cannot share."""
    count, beside = len(made.bounds) - 1, made.grid.patches
    if count % beside or (made.order != IN_TURN and count != beside):
        raise CompileError(
            f"the plan has {counted(count, 'patch', 'es')} for {counted(beside, 'rank')} beside each other "
            f"({made.order}); give every rank one, of {IN_TURN} as many as the others"
        )


def _require_watching(made: Choices) -> None:
    """Refuse ranks that cannot watch: copies of patches in turn send what they predict to none but their own ranks."""
    if made.watching < 0 or (made.watching and made.order == IN_TURN and made.grid.copies > 1):
        raise CompileError(
            f"the plan has {counted(made.watching, 'rank')} watching ({made.order}); they are none or more, and none "
            f"where there are copies of {IN_TURN}: leave them out"
        )


def line_for(case: SampleCase, plan: SamplePlan) -> StageLine | None:
    """A plan's stages; None where there is one without blocks of its own."""
    spans = choices_of(plan).spans
    return None if spans is None else line_of(case.blocks(plan.cut.num_samples, plan.cut.num_blocks), spans)


def request_of(plan: SamplePlan) -> SampleRequest:
    """For calls that a plan is not of: in its mode, with as many stages; groups and patches as are right for them."""
    staged = None if plan.staged.schedule == "rows" else plan.grid.stages
    fold = None if staged is None else plan.staged.num_stages > staged
    patches = plan.num_patches if plan.in_turn else None
    text: Text = "first" if plan.text_first else "all"
    ranks, how = plan.staged.world_size, replace(plan.how, fresh=())
    return SampleRequest(ranks, None, staged, fold, patches, how, text, watching=plan.watching)


def require_fresh(plan: SamplePlan | None, made: SamplePlan) -> None:
    """A plan holds for the call it was made for."""
    if plan is not None and plan.fingerprint != made.fingerprint:
        raise CompileError(
            f"the plan was made for call {plan.fingerprint} with {plan.num_samples} samples, this is call "
            f"{made.fingerprint} with {made.num_samples}: the model, the sizes of its inputs or the cost model "
            "have changed; make a new plan (leave plan out)"
        )
    for name in ("num_samples", "cut"):
        if plan is not None and getattr(plan, name) != getattr(made, name):
            raise CompileError(
                f"the plan says {name}={getattr(plan, name)!s}, this call has {getattr(made, name)!s}; make them agree"
            )


def is_of(plan: SamplePlan, case: SampleCase) -> bool:
    """Whether a plan was made for this call."""
    if plan.num_samples != case.num_samples or plan.cut.num_samples > case.num_samples:
        return False
    blocks = case.blocks(plan.cut.num_samples, plan.cut.num_blocks) if plan.staged.schedule != "rows" else None
    return plan.fingerprint == case.fingerprint(blocks)


def require_warm(plan: SamplePlan) -> None:
    """Refuse a plan for the first steps that cannot be one."""
    if (warm := plan.warm) is None:
        return
    if not plan.how.num_warm:
        raise CompileError(
            f"the plan has another one for its first steps, and no step for that to make: {plan.how}; leave that plan "
            "out, or have more fresh steps"
        )
    if warm.how.mode != "exact" or warm.staged.schedule != "rows" or warm.warm is not None:
        raise CompileError(
            f"the first steps are made by a plan that is exact and of one stage, this one is {warm.staged.schedule!r}, "
            f"{str(warm.how)!r}; give another, or leave it out"
        )
    if (warm.staged.world_size, warm.watching) != (plan.staged.world_size, plan.watching):
        raise CompileError(
            f"the first steps are made by {counted(warm.staged.world_size, 'rank')}, {warm.watching} watching, the "
            f"others by {plan.staged.world_size}, {plan.watching} watching; give a plan for the same ranks, or none"
        )


def require_equal(plan: SamplePlan, remade: SamplePlan) -> None:
    """Refuse a plan that says something else than what its stages and patches make of its call."""
    warm = None if plan.warm is None else replace(plan.warm, notes=(), expects=None, considered=())
    told = replace(plan, notes=remade.notes, expects=remade.expects, considered=remade.considered, warm=warm)
    if told != remade:
        lines = zip_longest(str(told).split("\n"), str(remade).split("\n"), fillvalue="nothing")
        own, its = told.as_dict(), remade.as_dict()
        data = ((f"{name}: {own[name]}", f"{name}: {its[name]}") for name in own)
        unlike = next(((a, b) for a, b in chain(lines, data) if a != b), None)
        if unlike is None:  # lists where tuples were
            return
        says, is_so = unlike
        raise CompileError(f"the plan says {says.strip()!r}, of its stages and patches it is {is_so.strip()!r}")


def grid_of(case: SampleCase, request: SampleRequest) -> Grid:
    """Of samples that need each other, as perturbed attention's halves do, one group; unless more are asked for."""
    asked = request.num_patches
    patches = None if request.in_turn else asked
    ranks = request.world_size // request.copies
    grid = grid_for(ranks, case.num_samples, request.cfg, patches, request.stages)
    apart = ranks // (request.stages or 1) <= case.num_samples
    if request.in_turn and request.cfg is None and asked and asked % grid.patches and apart:
        grid = grid_for(ranks, case.num_samples, None, 1, request.stages)
    grid = replace(grid, copies=request.copies)
    if grid.groups == 1 or case.dependent is None:
        return grid
    if request.cfg is not None or asked is not None:
        case.require_apart(grid.groups)
    return replace(grid_for(ranks, case.num_samples, 1, patches, request.stages), copies=request.copies)


def bounds_of(case: SampleCase, request: SampleRequest, grid: Grid) -> tuple[tuple[int, ...], bool]:
    """Of patches, in units, and whether the first one has the text; of those in turn, on each rank of a stage, twice as
    many as stages where that is left open."""
    size = case.group_size(grid)
    rows, given = case.rows(size), None
    if isinstance(request.patches, Sequence):
        given = tuple(request.patches)
        patches_of(rows, given)
    count = grid.patches
    if request.in_turn:
        count = request.num_patches or grid.patches * max(min(2 * grid.stages, rows.units.count // grid.patches), 1)
        if count % grid.patches:
            raise CompileError(
                f"{counted(count, 'patch', 'es')} in turn pass through stages of {grid.patches} ranks each, which all "
                f"have as many of them; use patches={count // grid.patches * grid.patches or grid.patches}"
            )
    require_units(rows, count)
    beside = grid.stages == 1 and not request.in_turn and count > 1
    if beside and request.text == "first" and case.has_text(size):
        if case.may_give_text(size):
            speeds = patch_speeds(request.speeds, grid)
            return given or balanced_bounds(rows, case.shared_text(size), case.node_seconds(size), count, speeds), True
    if request.speeds and not request.in_turn:
        return given or shared_bounds(rows.units.count, patch_speeds(request.speeds, grid)), False
    return given or even_bounds(rows.units.count, count), False


def patch_speeds(speeds: Sequence[float], grid: Grid) -> list[float]:
    """Of every patch the speed of the slowest rank that has it; none where ranks are equal."""
    return [min(speeds[patch :: grid.patches]) for patch in range(grid.patches)] if speeds else []


def column_speeds(speeds: Sequence[float], grid: Grid, bounds: Sequence[int]) -> tuple[float, ...]:
    """Of every column that of the rank that takes the longest for its rows, beside the fastest one; none where all are
    equal."""
    if not speeds:
        return ()
    rows = [(stop - start) * grid.patches / bounds[-1] for start, stop in pairwise(bounds[:: grid.turns])]
    by_rows = [speed / rows[rank % grid.patches] for rank, speed in enumerate(speeds)]
    firsts = [by_rows[patch :: grid.patches] for patch in range(grid.patches)]  # a rank of every column, group by group
    slowest = [*map(min, zip(*firsts, strict=True))]
    columns = [min(slowest[column :: grid.stages]) for column in range(grid.stages)]
    found = tuple(max(round(speed / max(columns), 3), 0.001) for speed in columns)
    return found if len({*found}) > 1 else ()


def seen_patches(made: Choices, speeds: Sequence[float] = ()) -> tuple[int, ...]:
    """For every patch the one whose work says what it takes: its own where these are their `speeds`; of equal ranks, of
    as many rows and as much text, one with neighbours on both sides where there is one."""
    if speeds:
        return tuple(range(len(speeds)))
    kinds = [(stop - start, made.text_first and not start) for start, stop in pairwise(made.bounds)]
    last = len(kinds) - 1
    first_of = {kinds[patch]: patch for patch in (last, 0, *range(last - 1, 0, -1))}
    return tuple(map(first_of.__getitem__, kinds))


def _ranks(grid: Grid, column: int) -> Iterator[int]:
    """A stage's, copy by copy, group by group, patch by patch."""
    for group in range(grid.copies * grid.groups):
        yield from (grid.rank(group, column, patch) for patch in range(grid.patches))


def _labels(blocks: LateBlocks | None, spans: Sequence[StageSpan] | None) -> Iterator[str]:
    """Of every stage its share of the work, and the modules it begins and ends with."""
    if blocks is None or spans is None:
        yield f"{1:5.1%}  (all)"
        return
    total = sum(blocks.seconds) or 1.0
    for start, stop, _ in spans:
        first, last = blocks.blocks[start].name, blocks.blocks[stop - 1].name
        span = first if stop - start == 1 else f"{first} .. {last}"
        yield f"{sum(blocks.seconds[start:stop]) / total:5.1%}  {span}"


def _steady(case: SampleCase, made: Choices, line: StageLine | None) -> Schedule:
    """The order of a step; a patch of samples that pass through stages together is its micro-batch."""
    grid, num_patches, num_runs = made.grid, len(made.bounds) - 1, 0
    ranks: list[tuple[Action, ...]] = []
    for start, stop in grid.spans(case.num_samples):
        runs = len(case.runs(start, stop)) if line else 1
        turns = [(run, patch) for patch in range(grid.turns) for run in range(num_runs, num_runs + runs)]
        order = cells(line, len(turns)) if line else [Cell(_ALL, 0)]
        for column in range(grid.stages):
            own = [(c.stage.index, *turns[c.turn]) for c in order if c.stage.column == column]
            for first in range(0, num_patches, grid.turns):
                ranks.append(tuple(Action(s, "F", run * num_patches + first + patch) for s, run, patch in own))
        num_runs += runs
    num_stages = len(line.stages) if line else 1
    return Schedule(made.order, num_stages, num_runs * num_patches, tuple(ranks) * grid.copies)
