"""Which blocks of a rank are computed again, so that it has room: those that take least time, exactly.

    block                 0    1    2    3      on a rank whose order has 4 micro-batches in flight
    seconds               8    2    2    2
    saved, comes in     5, 1 6, 3 6, 3 6, 3     4 x 23 = 92
    again, each alone          x    x    x      4 x (5 + 3 + 3 + 3) + 6 = 62
    again, as one run          (---------)      4 x (5 + 3) + 18 = 50

minimise     the seconds of the blocks that are computed again
subject to   saved values of all micro-batches in flight, and what the largest run makes anew, fit; on every rank, at
             every point of its order

A value is saved, once, where a block that is not computed again keeps it for its backward, or where it comes into a run
of such blocks from outside. The program is one in zeros and ones, after Jain et al., "Checkmate" (MLSys 2020), section
4, for blocks of which each is computed again at most once, right before its run's backward: runs are segments of Chen
et al., "Training deep nets with sublinear memory cost" (2016), section 4, of any length.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import inf
from typing import Any

from fxpipe.plan.actions import Action
from fxpipe.plan.schedule import Schedule
from fxpipe.plan.staged import Run, Staged
from passes.case import Case

_PARTS = 50_000
"""Bytes and seconds are counted in so many parts of all there are: solvers of whole numbers want small ones."""
ROUGH, FINE = 0.05, 1.0
"""Deterministic seconds for one place, while plans are compared and for the best: 30 blocks are solved to the end in
half of the first, 108 of a U-Net on one rank to within 2 % of a step, in the second to within 0.5 %."""
_GAP = 0.03
"""Of the least seconds: roughly, what is nearer is not looked for."""

_MOST_TRIED = 4
"""Choices whose memory is counted in full: what the program leaves out, as temporaries, is that of the last one."""

Ordered = Callable[[Staged], tuple[Schedule, Sequence[int]]]
"""The order of stages, and what every rank needs in it."""


def fitting_runs(
    case: Case,
    staged: Staged,
    num_samples: int,
    ordered: Ordered,
    limit_bytes: int,
    effort: float = FINE,
) -> Staged | None:
    """The same stages with blocks computed again so that they fit, those that are now among them; None where none do.

    Args:
        num_samples: of a micro-batch.
        effort: `ROUGH`, for the first that fit, or `FINE`, for the best of some tried.
    """
    schedule, needed = ordered(staged)
    all_places = places(case, staged, schedule, num_samples)
    runs = [tuple(run for run in staged.recompute if place.has(run)) for place in all_places]
    always, best = tuple(runs), None
    for _ in range(_MOST_TRIED):
        before = tuple(runs)
        for number, place in enumerate(all_places):
            most = max(needed[rank] for rank in place.ranks)
            if most <= limit_bytes and runs[number] == always[number]:
                continue
            budget = limit_bytes - most + place.num_bytes(runs[number])
            found = _known_cheapest(place, budget, always[number], effort)
            if found is None:
                return best
            runs[number] = found
        if tuple(runs) == before:
            return best
        tried = replace(staged, recompute=tuple(sorted(run for of_place in runs for run in of_place)))
        needed = ordered(tried)[1]
        if max(needed) <= limit_bytes and (best is None or _seconds(case, tried) < _seconds(case, best)):
            best = tried
            if effort == ROUGH:
                return best
    return best


def least_again(
    case: Case, staged: Staged, sizes: Sequence[int], ordered: Ordered, limit_bytes: int
) -> Sequence[float] | None:
    """Of every stage seconds of a micro-batch's forward that are computed again, beside those that are now, if all is
    to fit; on no rank do runs take less in all. None where none fit.

    Args:
        sizes: samples of micro-batches, the largest first; seconds are of the smallest.
    """
    schedule, needed = ordered(staged)
    seconds, found = case.costs.at(sizes[-1]).forward_seconds, [0.0] * staged.num_stages
    for place in places(case, staged, schedule, sizes[0]):
        now = tuple(run for run in staged.recompute if place.has(run))
        most = max(needed[rank] for rank in place.ranks)
        if most > limit_bytes:
            shares = least_shares(place, limit_bytes - most + place.num_bytes(now), now)
            if shares is None:
                return None
            for block in (block for run in now for block in range(*run)):
                shares[block] -= 1
            for stage in range(staged.num_stages):
                found[stage] += sum(seconds[block] * shares.get(block, 0.0) for block in staged.blocks(stage))
    return found


def _seconds(case: Case, staged: Staged) -> float:
    seconds = case.costs.at(1).forward_seconds
    return sum(seconds[block] for run in staged.recompute for block in range(*run))


@dataclass(frozen=True)
class Held:
    """Values in the stage at `position` of a place: `maker` is its block there, None where it comes from elsewhere;
    `keepers` and `readers` are blocks, in order. `earlier` is the same memory in an earlier stage of the place."""

    position: int
    num_bytes: int
    maker: int | None
    keepers: tuple[int, ...]
    readers: tuple[int, ...]
    earlier: int | None


@dataclass(frozen=True)
class StagePlace:
    """Ranks that share stages, and what these hold. `flying` are numbers of micro-batches in flight, by stage."""

    ranks: tuple[int, ...]
    blocks: tuple[range, ...]
    held: tuple[Held, ...]
    seconds: tuple[float, ...]
    flying: tuple[tuple[int, ...], ...]

    def has(self, run: Run) -> bool:
        """Whether a run of blocks is in one of its stages."""
        return any(run[0] in of_stage for of_stage in self.blocks)

    def forward_seconds(self, runs: Sequence[Run]) -> float:
        return sum(self.seconds[block] for run in runs for block in range(*run))

    def num_bytes(self, runs: Sequence[Run]) -> int:
        """The most on a rank: what is saved, and what the largest of the runs makes anew."""
        run_of = {block: number for number, run in enumerate(runs) for block in range(*run)}
        saved = [_is_saved(held, run_of) for held in self.held]
        anew = [0] * len(runs)
        for held, is_saved in zip(self.held, saved, strict=True):
            if not is_saved and held.keepers:
                anew[run_of[held.keepers[0]]] += held.num_bytes
        alone = [s and not (h.earlier is not None and saved[h.earlier]) for h, s in zip(self.held, saved, strict=True)]
        most = max(
            sum(h.num_bytes * f[h.position] for h, s in zip(self.held, alone, strict=True) if s) for f in self.flying
        )
        return most + max(anew, default=0)


def _is_saved(held: Held, run_of: dict[int, int]) -> bool:
    maker = None if held.maker is None else run_of.get(held.maker)
    into = any(block in run_of and run_of[block] != maker for block in held.readers)
    return into or any(block not in run_of for block in held.keepers)


def places(case: Case, staged: Staged, schedule: Schedule, num_samples: int) -> list[StagePlace]:
    """Of all ranks; for micro-batches of so many samples."""
    groups: list[set[int]] = []
    for ranks in map(set, staged.stage_ranks):
        touched = [group for group in groups if group & ranks]
        groups = [group for group in groups if not group & ranks] + [ranks.union(*touched)]
    sizes = case.costs.values.sizes.at(num_samples)
    seconds = tuple(case.costs.at(num_samples).forward_seconds)
    found = []
    for group in groups:
        stages = [s for s, ranks in enumerate(staged.stage_ranks) if group & {*ranks} and staged.blocks(s)]
        if stages:
            flying = {of for rank in group for of in numbers_in_flight(schedule.ranks[rank], stages)}
            blocks = tuple(staged.blocks(stage) for stage in stages)
            held = tuple(_held(case, blocks, [int(size) for size in sizes]))
            found.append(StagePlace(tuple(sorted(group)), blocks, held, seconds, tuple(sorted(flying))))
    return found


def numbers_in_flight(actions: Sequence[Action], stages: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Numbers of micro-batches between their forward and the end of their backward, where none are more."""
    ends = {a.stage: "W" for a in actions if a.kind == "W"}
    now, last = dict.fromkeys(stages, 0), "B"
    for action in actions:
        if action.stage in now and action.kind in ("F", ends.get(action.stage, "I"), "B"):
            if action.kind != "F" and last == "F":
                yield tuple(now.values())
            now[action.stage] += 1 if action.kind == "F" else -1
            last = action.kind
    yield tuple(now.values())


def _held(case: Case, blocks: Sequence[range], sizes: Sequence[int]) -> list[Held]:
    values = case.costs.values
    known: dict[int, int] = {}
    found: list[Held] = []
    for position, of_stage in enumerate(blocks):
        keepers: dict[int, list[int]] = {}
        readers: dict[int, list[int]] = {}
        for by_value, of in ((keepers, values.kept), (readers, values.read)):
            for block in of_stage:
                for value in of[block]:
                    by_value.setdefault(value, []).append(block)
        alike: dict[tuple[object, ...], int] = {}
        for value in sorted({*keepers, *readers}):
            maker = values.maker[value]
            maker = maker if maker in of_stage else None
            how = maker, tuple(keepers.get(value, ())), tuple(readers.get(value, ())), known.get(value)
            if how in alike:
                found[alike[how]] = replace(found[alike[how]], num_bytes=found[alike[how]].num_bytes + sizes[value])
            else:
                alike[how] = len(found)
                found.append(Held(position, sizes[value], *how))
            known.setdefault(value, alike[how])
    return found


# -- the program


def _known_cheapest(
    place: StagePlace, budget_bytes: int, always: tuple[Run, ...], effort: float
) -> tuple[Run, ...] | None:
    """The same as `cheapest`, solved once for all budgets from what its answer needs to that it was asked for."""
    known = _answers(replace(place, ranks=()), always, effort)
    for needed, asked, runs in known:
        if needed <= budget_bytes <= asked:
            return runs
    runs = cheapest(place, budget_bytes, always, effort)
    known.append((-inf if runs is None else place.num_bytes(runs), budget_bytes, runs))
    return runs


@lru_cache(maxsize=256)
def _answers(
    place: StagePlace, always: tuple[Run, ...], effort: float
) -> list[tuple[float, int, tuple[Run, ...] | None]]:
    """Of one problem: bytes that they need, budgets they were asked for, and runs."""
    return []


def cheapest(
    place: StagePlace, budget_bytes: int, always: Sequence[Run] = (), effort: float = FINE
) -> tuple[Run, ...] | None:
    """The runs of a place that take least time and fit, with the blocks of `always`; None where none do."""
    program = _Program("SAT", place, budget_bytes, always)
    gap = 0.0 if effort == FINE else _GAP
    # a knapsack's bounds are those of its relaxation, which cuts and probing make no better: a third less time
    options = f"linearization_level: 2 cut_level: 0 cp_model_probing_level: 0 max_deterministic_time: {effort}"
    options += f" relative_gap_limit: {gap}"
    return program.runs if program.is_solved(f"num_workers: 1 {options}") else None


def least_shares(place: StagePlace, budget_bytes: int, always: Sequence[Run] = ()) -> dict[int, float] | None:
    """How much of every block is computed again in the linear program: in all they take no more time than what
    `cheapest` finds. None where that finds none."""
    program = _Program("GLOP", place, budget_bytes, always)
    return program.shares if program.is_solved() else None


class _Program:
    """Zeros and ones, for a solver of OR-tools by its name. For one that is linear they may be fractions: some 5 ms,
    where the whole program takes 100."""

    def __init__(self, solver: str, place: StagePlace, budget_bytes: int, always: Sequence[Run]) -> None:
        from ortools.linear_solver import pywraplp  # where memory decides

        self.solver: Any = pywraplp.Solver.CreateSolver(solver)
        self.place = place
        firsts = {of_stage[0] for of_stage in place.blocks}
        blocks = [block for of_stage in place.blocks for block in of_stage]
        self.again = {block: self.solver.BoolVar("") for block in blocks}
        self.joined = {b: self.solver.BoolVar("") for b in blocks if b not in firsts}  # in the run of the one before
        for block, is_joined in self.joined.items():
            self._at_least(0, (1, self.again[block]), (-1, is_joined))
            self._at_least(0, (1, self.again[block - 1]), (-1, is_joined))
        for block in (block for run in always for block in range(*run) if block in self.again):
            self._at_least(1, (1, self.again[block]))
        self.saved = [self._saved(held) for held in place.held]
        self._limit(budget_bytes)
        total, objective = sum(place.seconds[block] for block in blocks) or 1.0, self.solver.Objective()
        for block, again in self.again.items():
            objective.SetCoefficient(again, max(1, round(place.seconds[block] / total * _PARTS)))

    def is_solved(self, parameters: str = "") -> bool:
        """Whether there are runs that fit."""
        if parameters and not self.solver.SetSolverSpecificParametersAsString(parameters):
            raise ValueError(parameters)
        return self.solver.Solve() in (self.solver.OPTIMAL, self.solver.FEASIBLE)

    @property
    def shares(self) -> dict[int, float]:
        """How much of every block is computed again."""
        return {block: again.solution_value() for block, again in self.again.items()}

    @property
    def runs(self) -> tuple[Run, ...]:
        blocks = [block for block, share in self.shares.items() if share > 0.5]
        return tuple(_runs(blocks, {block for block, joined in self.joined.items() if joined.solution_value() > 0.5}))

    def _at_least(self, number: int, *terms: tuple[int, Any]) -> None:
        row = self.solver.Constraint(number, self.solver.infinity())
        for coefficient, variable in terms:
            row.SetCoefficient(variable, coefficient)

    def _saved(self, held: Held) -> Any:
        """Whether values are saved: unless all that keep them are computed again, and those of their readers that are
        so are in the run of their maker, as are the blocks between."""
        saved, again, last = self.solver.BoolVar(""), self.again, held.maker
        for block in held.keepers:
            self._at_least(1, (1, saved), (1, again[block]))
        for block in held.readers:
            if last is None:
                self._at_least(0, (1, saved), (-1, again[block]))
                continue
            self._at_least(0, (1, saved), (1, again[last]), (-1, again[block]))
            for between in range(last + 1, block + 1):
                self._at_least(0, (1, saved), (1, self.joined[between]), (-1, again[block]))
            last = block
        return saved

    def _limit(self, budget_bytes: int) -> None:
        """What is saved, and what the largest run makes anew, whatever the numbers in flight."""
        values, flying = self.place.held, self.place.flying
        unit = max(1, sum(held.num_bytes * max(f[held.position] for f in flying) for held in values) // _PARTS)
        sizes, alone = [-(-held.num_bytes // unit) for held in values], [*self.saved]
        for number, held in enumerate(values):
            if held.earlier is not None:
                alone[number] = self.solver.BoolVar("")
                self._at_least(0, (1, alone[number]), (1, self.saved[held.earlier]), (-1, self.saved[number]))
        anew = self._anew(sizes)
        for numbers in flying:
            row = self.solver.Constraint(-self.solver.infinity(), max(-1, budget_bytes // unit))
            row.SetCoefficient(anew, 1)
            for size, held, is_saved in zip(sizes, values, alone, strict=True):
                row.SetCoefficient(is_saved, size * numbers[held.position])

    def _anew(self, sizes: Sequence[int]) -> Any:
        """What the largest run makes anew: sums along runs."""
        made: dict[int, list[int]] = {}
        for number, held in enumerate(self.place.held):
            if held.keepers and held.maker is not None:
                made.setdefault(held.maker, []).append(number)
        largest = self.solver.IntVar(0, sum(sizes), "")
        for of_stage in self.place.blocks:
            before, most = None, 0
            for block in of_stage:
                here, own = self.solver.IntVar(0, sum(sizes), ""), made.get(block, ())
                total, terms = sum(sizes[n] for n in own), [(1, here), *((sizes[n], self.saved[n]) for n in own)]
                self._at_least(total, *terms)
                if before is not None:
                    self._at_least(total - most, *terms, (-1, before), (-most, self.joined[block]))
                self._at_least(0, (1, largest), (-1, here))
                before, most = here, most + total
        return largest


def _runs(blocks: Sequence[int], joined: set[int]) -> Iterator[Run]:
    start = None
    for block, following in pairwise([*blocks, -1]):
        start = block if start is None else start
        if following not in joined:
            yield start, block + 1
            start = None
