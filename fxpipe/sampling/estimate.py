"""What a layout would take, without lowering it: seconds of a call, bytes of a step, memory of the fullest rank.

rows             one patch's work by a clock: what it tells travels from then on, who reads it waits    (`clocked`)
displaced rows   nobody waits, but the links must keep up: max(compute, transfers)
stages           cells of the line by their columns, hops between them                                  (`paced`)

Seconds of operations and bytes of messages are those of a patch's own graph (`passes.sampling.work`). Ranks of a group
are taken to work in step, as patches of one size do; where ranks have different speeds, the slowest patch counts, and
of stages beside each other the first. A channel has one message under way at a time.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import Any

import torch

from fxpipe.cluster import Cluster
from fxpipe.plan import displaced_ops, row_ops
from fxpipe.plan.sample_plan import IN_TURN
from fxpipe.sampling.case import SampleCase
from fxpipe.sampling.links import Busy, Links
from fxpipe.sampling.planning import Choices, patch_speeds
from fxpipe.sampling.seconds import own_seconds
from passes.sampling.buckets import LEAST_BYTES, MOST_BYTES, PER_STEP
from passes.sampling.cells import cells
from passes.sampling.stages import Line, Stage, line_of, num_blocks
from passes.sampling.work import Item, PatchWork, Told

_STEPS = 4
"""Of patches in turn that are paced: from the third on they are alike."""


@dataclass(frozen=True)
class Estimate:
    """Seconds of a call, bytes that the busiest rank receives in a steady step, bytes that the fullest one holds."""

    seconds: float
    wire_bytes: int
    memory_bytes: int


def estimate(case: SampleCase, made: Choices, cluster: Cluster, steps: int, speeds: Sequence[float] = ()) -> Estimate:
    """Of a call of so many steps on this cluster, whose ranks have these speeds; all the same where left out."""
    if made.spans is not None:
        return _Stages(case, made, cluster, speeds).estimate(steps)
    slowest = patch_speeds(speeds, made.grid)
    if not slowest:
        return _Rows(case, made, cluster).estimate(steps)
    each = [_Rows(case, made, cluster, speed, patch).estimate(steps) for patch, speed in enumerate(slowest)]
    return Estimate(*(max(numbers) for numbers in zip(*map(astuple, each), strict=True)))


def clocked(items: Sequence[Item], links: Links, column: int, waits: Callable[[Told], bool]) -> tuple[float, float]:
    """When these items end, and the seconds in which links are busy with what they tell."""
    clock = free = busy = owed = 0.0
    told: dict[int, float] = {}
    for place, item in enumerate(items):
        for read in item.reads:
            exchange = items[read].told
            assert exchange is not None
            there = max(clock, told.get(read, 0.0))
            owed = max(0.0, owed - (there - clock))
            clock = there + exchange.seconds
        if item.seconds:
            clock, owed = clock + item.seconds + owed, 0.0
        if item.told is not None and item.told.sent:
            way = links.of_patches(item.told, column)
            busy, owed = busy + way.seconds, owed + way.taken
            if waits(item.told):
                told[place] = free = max(free, clock) + way.until_there
    return clock, busy


def paced(
    line: Line, num_turns: int, num_steps: int, seconds: Callable[[Stage, int], float],
    hop: Callable[[Stage, int, str, int], Busy], shown: Callable[[Stage, int], float],
    follows: bool,
) -> list[float]:  # fmt: skip
    """When each of some steps ends.

    Args:
        seconds: of a stage at a turn.
        hop: of a stage's value, at a turn, to a column.
        shown: seconds until the prediction of a turn is on all ranks.
        follows: whether a turn's next step begins when its prediction is there, not those of all turns.
    """
    order = cells(line, num_turns)
    free = [0.0] * line.num_columns
    wires: dict[tuple[int, int], float] = {}
    begin, ends = [0.0] * num_turns, list[float]()
    for _ in range(num_steps):
        arrived: dict[tuple[str, int, int], tuple[float, float]] = {}
        for cell in order:
            stage, turn = cell.stage, cell.turn
            start = max(free[stage.column], begin[turn] if stage.index == 0 else 0.0)
            come = [
                arrived[value, turn, stage.column] for value in stage.reads if (value, turn, stage.column) in arrived
            ]
            start = max([start + sum(taken for _, taken in come), *(there for there, _ in come)])
            free[stage.column] = end = start + seconds(stage, turn)
            for value in stage.returns:
                for column in line.readers(value):
                    if column != stage.column:
                        way, wire = hop(stage, turn, value, column), (stage.column, column)
                        wires[wire] = max(wires.get(wire, 0.0), end) + way.until_there
                        arrived[value, turn, column] = wires[wire], way.taken
                        free[stage.column] += way.taken
            if stage == line.stages[-1]:
                begin[turn] = end + shown(stage, turn)
        ends.append(max(begin))
        if not follows:
            begin, free = [ends[-1]] * num_turns, [ends[-1]] * line.num_columns
    return ends


class _Layout:
    """What estimates of all layouts share."""

    def __init__(self, case: SampleCase, made: Choices, cluster: Cluster) -> None:
        self.case, self.made, self.grid = case, made, made.grid
        self.links = Links(cluster, self.grid)
        self.size = case.group_size(self.grid)

    def moving(self, num_bytes: float) -> float:
        """Seconds of a kernel that reads and writes so many bytes."""
        return self.case.cost_model.moving_seconds(int(num_bytes), int(num_bytes))

    def own(self, operation: Callable[..., Any], *arguments: Any) -> float:
        """Seconds of one of a patch's own operations."""
        return own_seconds(self.case.cost_model, operation, *arguments)

    def correction(self, own_bytes: int, num_patches: int, num_fresh: int) -> float:
        """Seconds by which moments that are corrected take longer than those that are merged."""
        if self.made.how.norms != "corrected":
            return 0.0
        part, counts = _of_bytes(own_bytes).view(2, 1, -1), [1] * num_patches
        parts, fresh = [part] * num_patches, [*range(num_fresh)]
        corrected = self.own(displaced_ops.corrected_moments, parts, parts[:num_fresh], fresh, counts)
        return corrected - self.own(row_ops.merge_moments, parts, counts)

    def inputs_bytes(self) -> int:
        """Of the whole call; those that tell whether conditions have changed are there twice."""
        likes, of_call = self.case.likes, self.case.of_call
        return sum(like.nbytes * (2 if name in of_call else 1) for name, like in likes.items())

    def result_bytes(self, num_samples: int) -> int:
        return int(self.case.rows(num_samples).sized.result.meta["val"].nbytes)


class _Rows(_Layout):
    """Patches beside each other, a rank each: seen from one of them, on a rank of this speed; from one with neighbours
    on both sides, where there is one and none is given."""

    def __init__(
        self, case: SampleCase, made: Choices, cluster: Cluster, speed: float = 1.0, patch: int | None = None
    ) -> None:
        super().__init__(case, made, cluster)
        self.speed = speed
        self.inner = min(1, max(self.grid.patches - 2, 0)) if patch is None else patch

    @cached_property
    def work(self) -> PatchWork:
        return self.case.work(self.size, self.made.bounds, self.inner, self.made.text_first, self.made.attention)

    def crosses(self, told: Told) -> bool:
        """Whether it is read a step later."""
        how = self.made.how
        if how.mode == "exact" or told.kind == "prediction" or not told.sent:
            return False
        return told.kind != "moments" or how.norms != "sync"

    def estimate(self, steps: int) -> Estimate:
        how, once = self.made.how, self.case.once(self.size)
        items = [_free(item) if item.name in once else _at_speed(item, self.speed) for item in self.work.items]
        first = sum(item.seconds for item in self.work.items if item.name in once) / self.speed
        last = self.links.of_groups(self.result_bytes(self.size))
        exact = clocked(items, self.links, 0, lambda told: True)[0] + last
        crossing = [item.told for item in items if item.told and self.crosses(item.told)]
        if how.norms == "separate":
            crossing = [told for told in crossing if told.kind != "moments"]
        inbound = sum(told.received_bytes for told in crossing)
        own = sum(told.own_bytes for told in crossing if told.kind != "moments")
        weights, alive = self.work.held_bytes(frozenset(self.work.owners.values()))
        received = sum(item.told.received_bytes for item in items if item.told)
        received += (self.grid.groups - 1) * self.result_bytes(self.size)
        if how.mode == "exact":
            memory = weights + alive + self.inputs_bytes() + self.case.kept_bytes(self.size)
            return Estimate(first + steps * exact, received, memory)
        compute, busy = clocked(items, self.links, 0, lambda told: not self.crosses(told))
        step = max(compute + last + sum(self._copies(crossing)) / self.speed, busy)
        warm = min(how.warmup, steps)
        exact += sum(self._packed(crossing))
        caches = inbound * (2 + how.advance) + 2 * own * how.advance
        memory = weights + alive + caches + self.inputs_bytes() + self.case.kept_bytes(self.size)
        return Estimate(first + warm * exact + (steps - warm) * step, received, memory)

    def _packed(self, crossing: Sequence[Told]) -> Iterator[float]:
        """Seconds to put what goes to every other patch into buckets."""
        peers = self.grid.patches - 1
        of_moments = [told for told in crossing if told.kind == "moments"]
        size = sum(told.received_bytes for told in crossing if told.kind != "moments") / max(peers, 1)
        each = min(max(size // PER_STEP, LEAST_BYTES), MOST_BYTES)
        count = -int(-size // each)
        yield peers * count * self.moving(size / count) if count else 0.0
        yield peers * self.moving(sum(told.own_bytes for told in of_moments)) if of_moments else 0.0

    def _copies(self, crossing: Sequence[Told]) -> Iterator[float]:
        """Seconds of what a displaced step computes more than an exact one."""
        yield from self._packed(crossing)
        known: dict[tuple[str, int, tuple[int, ...]], float] = {}
        for told in crossing:
            sources = tuple(size for _, dst, size in told.sent if dst == self.inner)
            key = told.kind, told.own_bytes, sources
            if key not in known:
                known[key] = self._copied(told, sources)
            yield known[key]

    def _copied(self, told: Told, sources: Sequence[int]) -> float:
        """Of one exchange, in which so many bytes come from the others."""
        edges = sum(map(self.moving, sources)) if told.kind == "halo" else 0.0
        if told.kind == "moments":
            return self.correction(told.own_bytes, self.grid.patches, 1)
        if not self.made.how.advance:
            return edges
        own = _of_bytes(sum(sources) if told.kind == "halo" else told.own_bytes)
        edges += self.own(displaced_ops.flat, [own]) + self.own(displaced_ops.kept_going, own, own, own)
        others = map(_of_bytes, sources)
        return edges + sum(self.own(displaced_ops.advanced, other, other, _of_bytes(4)[0]) for other in others)


class _Stages(_Layout):
    """Columns of ranks, samples or patches one after the other."""

    def __init__(self, case: SampleCase, made: Choices, cluster: Cluster, speeds: Sequence[float] = ()) -> None:
        super().__init__(case, made, cluster)
        assert made.spans is not None
        columns = range(self.grid.stages)
        self.speeds = [min(speeds[column * self.grid.patches :: self.grid.stages * self.grid.patches])
                       for column in columns] if speeds else [1.0] * len(columns)  # fmt: skip
        self.run = case.run_size(self.grid)
        self.num_runs = len(case.runs(*self.grid.spans(case.num_samples)[0]))
        self.line = line_of(case.blocks(self.run, num_blocks(self.grid.stages)), made.spans)
        self.in_turn = made.order == IN_TURN
        count = case.rows(self.run).units.count
        self.fresh_bounds = (0, count) if self.in_turn else made.bounds

    def work(self, turn: int, fresh: bool) -> PatchWork:
        """Of a turn: of a run, or of a patch of one."""
        return self.fresh_work if fresh or not self.in_turn else self.patch_works[turn // self.num_runs]

    @cached_property
    def fresh_work(self) -> PatchWork:
        return self.case.work(self.run, self.fresh_bounds, 0, False, self.made.attention)

    @cached_property
    def patch_works(self) -> list[PatchWork]:
        """Of patches in turn."""
        return [self.case.work(self.run, self.made.bounds, patch, None) for patch in range(len(self.made.bounds) - 1)]

    @cached_property
    def column_names(self) -> list[frozenset[str]]:
        """Of every column the operations of its stages, and those before the patch that they need."""
        stages = self.line.stages
        late = [frozenset[str]().union(*(s.nodes for s in stages if s.column == c)) for c in range(self.grid.stages)]
        return [names | self.case.needed(self.run, names, self.line.early) for names in late]

    def seconds(self, stage: Stage, turn: int, fresh: bool) -> float:
        """Of a cell; a column's first one of a run also computes what is before the patch."""
        work = self.work(turn, fresh)
        first = min(s.index for s in self.line.stages if s.column == stage.column)
        early = stage.index == first and turn < self.num_runs
        key = stage.index, work, early
        if key not in self._seconds:
            places = [place for place, item in enumerate(work.items) if item.name in stage.nodes]
            wait = fresh or not self.in_turn
            taken = clocked(_renumbered(work.items, places), self.links, stage.column, lambda told: wait)[0]
            if not wait:
                kept = Counter((told.kind, told.own_bytes) for place in places if (told := work.items[place].told))
                taken += sum(count * self._kept(*told) for told, count in kept.items())
            if early:
                names = self.column_names[stage.column] & self.line.early - self.case.once(self.run)
                taken += sum(item.seconds for item in work.items if item.name in names)
            self._seconds[key] = taken / self.speeds[stage.column]
        return self._seconds[key]

    def _kept(self, kind: str, own_bytes: int) -> float:
        """Seconds of what a patch in turn does more than one beside others."""
        if kind != "moments":
            return 0.0
        if own_bytes not in self._corrections:
            num = len(self.patch_works)
            self._corrections[own_bytes] = self.correction(own_bytes, num, (num + 1) // 2)
        return self._corrections[own_bytes]

    @cached_property
    def _corrections(self) -> dict[int, float]:
        return {}

    @cached_property
    def _seconds(self) -> dict[tuple[int, PatchWork, bool], float]:
        return {}

    def ends(self, num_steps: int, fresh: bool) -> list[float]:
        turns = self.num_runs * (1 if fresh or not self.in_turn else len(self.made.bounds) - 1)

        def hop(stage: Stage, turn: int, value: str, column: int) -> Busy:
            return self.links.between(stage.column, column, self.work(turn, fresh).bytes_of(value))

        def shown(stage: Stage, turn: int) -> float:
            result = self.work(turn, fresh).bytes_of(self.case.rows(self.run).sized.result.name)
            return self.links.to_all(stage.column, result)

        def seconds(stage: Stage, turn: int) -> float:
            return self.seconds(stage, turn, fresh)

        return paced(self.line, turns, num_steps, seconds, hop, shown, not fresh)

    def estimate(self, steps: int) -> Estimate:
        once = self.case.once(self.run)
        first = 0.0
        for names in self.column_names:
            kept = once & names
            first = max(first, sum(item.seconds for item in self.fresh_work.items if item.name in kept))
        (exact,) = self.ends(1, fresh=True)
        if not self.in_turn:
            return Estimate(first + steps * exact, self._received(True), self._memory())
        warm = min(self.made.how.warmup, steps)
        ends = self.ends(_STEPS, fresh=False)
        left = steps - warm
        later = ends[left - 1] if left <= len(ends) else ends[-1] + (left - len(ends)) * (ends[-1] - ends[-2])
        return Estimate(first + warm * exact + (later if left else 0.0), self._received(False), self._memory())

    def _received(self, fresh: bool) -> int:
        """Of the column that receives the most: hops, what patches beside it tell, the prediction."""
        turns = range(self.num_runs * (1 if fresh else len(self.made.bounds) - 1))
        into = [0] * self.grid.stages
        for turn in turns:
            work = self.work(turn, fresh)
            for stage in self.line.stages:
                for value in stage.returns:
                    for column in self.line.readers(value):
                        into[column] += work.bytes_of(value) if column != stage.column else 0
                if self.grid.patches > 1:
                    told = (item.told for item in work.items if item.told and item.name in stage.nodes)
                    into[stage.column] += sum(one.received_bytes for one in told)
        return max(into) + self.result_bytes(self.case.num_samples)

    def _memory(self) -> int:
        """Of the fullest column: weights, activations of the first turn, what crosses, what it keeps of all patches."""
        found = []
        for column in range(self.grid.stages):
            names = self.column_names[column]
            weights, alive = self.fresh_work.held_bytes(names)
            caches = 0
            if self.in_turn:
                work = self.patch_works[0]
                gathered = (n for n, owner in work.owners.items() if owner in names and "exchange" in n.meta)
                caches = sum(work.sizes[n] for n in gathered if n.meta["exchange"].kind == "gather")
            own = [stage for stage in self.line.stages if stage.column == column]
            crossing = dict.fromkeys(value for stage in own for value in (*stage.reads, *stage.returns))
            between = sum(map(self.fresh_work.bytes_of, crossing)) * (1 if self.in_turn else self.num_runs)
            found.append(weights + alive + between + caches * self.num_runs)
        return max(found) + self.inputs_bytes() + self.case.kept_bytes(self.run) * self.num_runs


def _of_bytes(num_bytes: int) -> torch.Tensor:
    """Any value of this size."""
    return torch.empty(max(num_bytes // 4, 1), device="meta")


def _free(item: Item) -> Item:
    return Item(item.name, 0.0, item.told, item.reads)


def _at_speed(item: Item, speed: float) -> Item:
    if speed == 1.0:
        return item
    told = item.told and replace(item.told, seconds=item.told.seconds / speed)
    return Item(item.name, item.seconds / speed, told, item.reads)


def _renumbered(items: Sequence[Item], places: Sequence[int]) -> list[Item]:
    """Some items alone; what they read of others is there."""
    now = {place: index for index, place in enumerate(places)}
    return [
        Item(items[p].name, items[p].seconds, items[p].told, tuple(now[r] for r in items[p].reads if r in now))
        for p in places
    ]
