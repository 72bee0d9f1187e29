"""Columns of ranks, samples or patches one after the other through them: cells of the line, hops between them.

Of equal patches beside each other in a column the first one says what all take; where bounds are uneven, each is seen,
and values that cross and memory are those of the one with the most rows. Speeds are those of one group's ranks.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache, cached_property, partial

from torch import fx

from fxpipe.cluster import Cluster
from fxpipe.plan.sample_plan import IN_TURN
from fxpipe.remembered import remembered
from fxpipe.sampling.beside import at_speed
from fxpipe.sampling.case import SampleCase
from fxpipe.sampling.clocks import alone, together
from fxpipe.sampling.layout import Estimate, LayoutCosts
from fxpipe.sampling.links import Busy
from fxpipe.sampling.paced import paced
from fxpipe.sampling.planning import Choices, seen_patches
from passes.sampling.exchanges import Exchange
from passes.sampling.patches import even_bounds
from passes.sampling.stages import Stage
from passes.sampling.work import Item, PatchWork

_STEPS = 4
"""Of patches in turn that are paced: from the third on they are alike."""


class Columns(LayoutCosts):
    def __init__(self, case: SampleCase, made: Choices, cluster: Cluster, speeds: Sequence[float] = ()) -> None:
        super().__init__(case, made, cluster)
        assert made.spans is not None
        self.speeds = speeds or [1.0] * (self.grid.stages * self.grid.patches)
        alike = not speeds and made.bounds == even_bounds(made.bounds[-1], len(made.bounds) - 1)
        self.seen = (0,) if alike else seen_patches(made, self.speeds[: self.grid.patches])
        self.run = case.run_size(self.grid)
        self.num_runs = len(case.runs(*self.grid.spans(case.num_samples)[0]))
        self.line, self.column_names = case.columns(self.run, self.grid.stages, made.spans)
        self.in_turn = made.order == IN_TURN
        self.fresh_bounds = made.bounds[:: self.grid.turns]

    def works(self, turn: int, fresh: bool) -> dict[int, PatchWork]:
        """Of a turn: of a run, or of patches of one; by the places that say what all beside each other take."""
        return self.fresh_works if fresh or not self.in_turn else self.patch_works[turn // self.num_runs]

    def work(self, turn: int, fresh: bool) -> PatchWork:
        """Of the patch with the most rows."""
        return self._largest(self.works(turn, fresh))

    @cached_property
    def fresh_works(self) -> dict[int, PatchWork]:
        """Of the patches that say what all beside each other take."""
        given = False, self.made.attention, len(self.seen) < self.grid.patches
        return {patch: self.case.work(self.run, self.fresh_bounds, patch, *given) for patch in self.seen}

    @cached_property
    def fresh_work(self) -> PatchWork:
        return self._largest(self.fresh_works)

    def _largest(self, works: Mapping[int, PatchWork]) -> PatchWork:
        name = self.case.rows(self.run).sized.result.name
        return max(works.values(), key=lambda work: work.bytes_of(name))

    def speed(self, column: int, patch: int) -> float:
        return self.speeds[column * self.grid.patches + patch]

    @cached_property
    def patch_works(self) -> list[dict[int, PatchWork]]:
        """Of patches in turn, turn by turn."""
        count, work = self.grid.turns, partial(self.case.work, self.run, self.made.bounds)
        return [{place: work(place * count + turn, None, turns=count) for place in self.seen} for turn in range(count)]

    def items(self, work: PatchWork, stage: Stage) -> list[Item]:
        """A stage's alone; of patches in turn predictions are shown to all, not gathered."""

        def made() -> list[Item]:
            items, places = work.items, work.places(stage.nodes)
            if self.in_turn:
                places = [place for place in places if (one := items[place].told) is None or one.kind != "prediction"]
            return alone(items, places)

        return self.case.found_once(("items", work, stage, self.in_turn), made)

    @cached_property
    def firsts(self) -> dict[int, int]:
        """Of every column its first stage, by number."""
        return {stage.column: stage.index for stage in reversed(self.line.stages)}

    def seconds(self, stage: Stage, turn: int, fresh: bool) -> float:
        """Of a cell; a column's first one of a run also computes what is before the patch."""
        early = stage.index == self.firsts[stage.column] and turn < self.num_runs
        patch, later = turn // self.num_runs, self.in_turn and not fresh
        edges = (patch > 0) + (patch < self.grid.turns - 1) if later else 0
        return self._seconds(stage, tuple(self.works(turn, fresh).items()), early, later, edges)

    @remembered
    def _seconds(
        self, stage: Stage, beside: tuple[tuple[int, PatchWork], ...], early: bool, later: bool, edges: int
    ) -> float:
        """Of a cell that does this work beside others; `later`: in turn, so many `edges` being read by others."""
        column = stage.column
        each = [[at_speed(item, self.speed(column, p)) for item in self.items(one, stage)] for p, one in beside]
        taken = together(each, self.links, column, lambda told: True).seconds
        if later:
            kept = Counter((item.told.kind, item.told.own_bytes) for item in each[0] if item.told)
            more = sum(count * self._kept(*told, edges) for told, count in kept.items())
            taken += more / self.speed(column, 0)
        if early:
            names = self.column_names[column] & self.line.early - self.case.once(self.run)
            taken += max(_seconds_of(one, names) / self.speed(column, p) for p, one in beside)
        return taken

    def _kept(self, kind: str, own_bytes: int, edges: int) -> float:
        """Seconds of what a patch in turn does more than one beside others: of its edges others have copies."""
        if kind != "moments" or self.grid.turns == 1:
            return edges * self.moving(1) if kind == "halo" else 0.0
        return self.correction(own_bytes, len(self.made.bounds) - 1, (self.grid.turns + 1) // 2 * self.grid.patches)

    def ends(self, num_steps: int, fresh: bool) -> list[float]:
        turns, follows = self.num_runs * (1 if fresh else self.grid.turns), 0 if fresh else self.num_runs

        to_columns = cache(self.links.to_columns)

        def hop(stage: Stage, turn: int, value: str, column: int) -> Busy:
            return to_columns(stage.column, (column,), self.work(turn, fresh).bytes_of(value))

        def shown(stage: Stage, turn: int) -> Busy:
            result = self.work(turn, fresh).bytes_of(self.case.rows(self.run).sized.result.name)
            if self.in_turn:
                return self.links.to_all(stage.column, result, self.made.watching)
            others = [column for column in range(self.grid.stages) if column != stage.column]
            return self.links.to_columns(stage.column, others, self.result_bytes(self.run))

        known = dict[tuple[int, int], float]()

        def seconds(stage: Stage, turn: int) -> float:
            if (stage.index, turn) not in known:
                known[stage.index, turn] = self.seconds(stage, turn, fresh)
            return known[stage.index, turn]

        return paced(self.line, turns, num_steps, seconds, hop, shown, self.links.are_bus, follows)

    def estimate(self, steps: int) -> Estimate:
        once = self.case.once(self.run)
        first = max(
            _seconds_of(work, once & names) / self.speed(column, patch)
            for column, names in enumerate(self.column_names)
            for patch, work in self.fresh_works.items()
        )
        (exact,) = self.ends(1, fresh=True)
        if not self.in_turn:
            exact += self._joined()
            return self._estimate(self.watched(first + steps * exact, steps), self._received(True), exact)
        warm = min(self.made.how.warmup, steps)
        ends = self.ends(_STEPS, fresh=False)
        left = steps - warm
        later = ends[left - 1] if left <= len(ends) else ends[-1] + (left - len(ends)) * (ends[-1] - ends[-2])
        return self._estimate(first + warm * exact + (later if left else 0.0), self._received(False), exact)

    def _estimate(self, seconds: float, received: int, exact: float) -> Estimate:
        memory = self._memory()
        most, rest = (max(column[part] for column in memory) for part in (0, 1))
        return Estimate(seconds, received, max(map(sum, memory)), exact, most, rest)

    def _joined(self) -> float:
        """Seconds to bring the predictions of all runs, then of all groups, together."""
        size = self.result_bytes(self.case.num_samples)
        own = self.moving(size / self.grid.groups) if self.num_runs > 1 else 0.0
        if self.grid.groups == 1:
            return own
        of_groups = [self.result_bytes(stop - start) for start, stop in self.grid.spans(self.case.num_samples)]
        return own + max(self.links.of_groups(of_groups)) + self.moving(size)

    def _received(self, fresh: bool) -> int:
        """Of the rank that receives the most: hops, what patches beside it tell, predictions of others."""
        turns = range(self.num_runs * (1 if fresh else self.grid.turns))
        results, into = self.result_bytes(self.case.num_samples), Counter[tuple[int, int]]()
        of_group = self.result_bytes(self.size)
        for column in range(self.grid.stages):
            own = of_group if column == self.line.stages[-1].column else 0
            own = own // self.grid.patches if self.in_turn else own
            into.update({(column, patch): results - own for patch in range(self.grid.patches)})
        for works, times in Counter(tuple(self.works(turn, fresh).items()) for turn in turns).items():
            last = works[-1][1]
            for stage in self.line.stages:
                for patch in range(self.grid.patches):
                    work = dict(works).get(patch, last)
                    for value in stage.returns:
                        for column in self.line.readers(value):
                            into[column, patch] += times * work.bytes_of(value) if column != stage.column else 0
                if self.grid.patches > 1:
                    for told in (item.told for item in self.items(last, stage) if item.told):
                        for _, target, size in told.sent:
                            into[stage.column, target] += times * size
        return max(into.values())

    @property
    def memory_bytes(self) -> int:
        """Of the fullest rank."""
        return max(map(sum, self._memory()))

    def _memory(self) -> list[tuple[int, int]]:
        """Of every column, weights and the rest: in a step of all rows at once what the last run holds, and what is
        there of the others."""
        found, case, once = [], self.case, self.case.once(self.run)
        others, prediction = self.num_runs - 1, self.result_bytes(self.run)
        for column, names in enumerate(self.column_names):
            own = [stage for stage in self.line.stages if stage.column == column]
            made = frozenset[str]().union(*(stage.nodes for stage in own))
            read = frozenset(value for stage in own for value in stage.reads)
            returned = frozenset(value for stage in own for value in stage.returns)
            told, caches = self._kept_of(names)
            weights, alive = self.fresh_work.held_bytes(names, once, read - made, told | returned)
            is_last = column == self.line.stages[-1].column
            predicted = prediction * (others if is_last else self.num_runs)
            sent = self._num_kept * sum(map(self.fresh_work.bytes_of, returned))
            coming = others * sum(map(self.fresh_work.bytes_of, read)) + (0 if is_last else predicted)
            of_others = others * caches + sent + predicted
            of_others = of_others if self.in_turn else max(of_others, coming)
            known = case.kept_bytes(self.run, names, self.num_runs)
            found.append((weights, alive + of_others + known + self.inputs_bytes(names)))
        return found

    @property
    def _num_kept(self) -> int:
        """How often what a run sends is there beside it: of a step, of patches in turn of two, where sends are kept."""
        return self.num_runs * (1 + self.in_turn) - 1 if self.links.cluster.keeps_sent else 0

    def _kept_of(self, names: Collection[str]) -> tuple[frozenset[str], int]:
        """Of what patches in turn read of each other the values that it is made of, at the end of a stage; its bytes:
        of what is gathered once, of borders about one for every turn, of others every patch's."""
        if not self.in_turn or self.grid.turns == 1:
            return frozenset(), 0
        first, is_alone, size = self.work(0, fresh=False), self.grid.patches == 1, 0
        for node, kind, _ in _exchanged(first, names):
            own = first.sizes[node.all_input_nodes[0]] if kind == "halo" else 0
            times = {"gather": 1, "halo": self.grid.turns}.get(kind, len(self.made.bounds) - 1)
            size += (first.sizes[node] - own) * times
        told = _exchanged(first if is_alone else self.fresh_work, names)
        return frozenset(node.name if kind == "gather" and not is_alone else value for node, kind, value in told), size


def _exchanged(work: PatchWork, names: Collection[str]) -> Iterator[tuple[fx.Node, str, str]]:
    """Of these operations all exchanges but of the prediction, with what they are, and of which value."""
    for node in work.lives.exchanging:
        exchange: Exchange = node.meta["exchange"]
        if work.owners[node] in names and exchange.kind != "prediction":
            yield node, exchange.kind, exchange.value.name


def _seconds_of(work: PatchWork, names: Collection[str]) -> float:
    return sum(work.items[place].seconds for place in work.places(names))
