"""Patches beside each other, a rank each.

exact        their work by a clock: what all tell travels from then on, who reads it waits
displaced    what crosses leaves in buckets and is read a step later: who reads it waits where it is late

A group of samples begins a step when it has all groups' predictions: one with fewer samples, or on faster ranks, waits.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

from fxpipe.cluster import Cluster
from fxpipe.plan import displaced_ops
from fxpipe.sampling.case import SampleCase
from fxpipe.sampling.clocks import Buckets, Passed, Waits, begun, together
from fxpipe.sampling.crossing import displaced_bytes, keeping_bytes
from fxpipe.sampling.layout import Estimate, LayoutCosts, of_bytes
from fxpipe.sampling.planning import Choices, seen_patches
from passes.sampling.buckets import LEAST_BYTES, MOST_BYTES, PER_STEP, filled
from passes.sampling.work import Item, PatchWork, Told, received_bytes

_ALIKE = 3  # displaced steps that are clocked: the others take as long as the last of these


@dataclass(frozen=True)
class Pace:
    """Of a group's ranks beside each other: seconds `once` in a call, of each of its steps until the group has its own
    prediction; bytes that the busiest rank receives of the others in a step, that the fullest one holds, and of weights
    among these."""

    once: float
    steps: tuple[float, ...]
    received_bytes: int
    held_bytes: int
    weight_bytes: int


def estimated(case: SampleCase, made: Choices, cluster: Cluster, steps: int, speeds: Sequence[float] = ()) -> Estimate:
    """Of a call of so many steps, by the slowest copy; `speeds` are of all ranks."""
    grid, links, known = made.grid, case.links(cluster, made.grid), dict[object, Pace]()
    sizes = [stop - start for start, stop in grid.spans(case.num_samples)]

    def pace(group: int) -> Pace:
        size, own = sizes[group % grid.groups], tuple(speeds[group * grid.patches :][: grid.patches])
        if (size, own) not in known:
            shares = [other / size for other in sizes] if len({*sizes}) > 1 else ()
            known[size, own] = Beside(case, made, cluster, own, size, shares).pace(steps)
        return known[size, own]

    layout = LayoutCosts(case, made, cluster)
    results = [layout.result_bytes(size) for size in sizes]
    shown = links.of_groups(results)
    joined = layout.moving(sum(results)) if grid.groups > 1 else 0.0
    seconds, received, fresh = 0.0, sum(results) if made.watching else 0, 0.0
    for copy in range(grid.copies if speeds else 1):
        groups = [pace(copy * grid.groups + group) for group in range(grid.groups)]
        begun = [group.once for group in groups]
        for step in range(steps):
            before, ends = max(begun), [at + own.steps[step] for at, own in zip(begun, groups, strict=True)]
            begun = [at + joined for at in _with_others(ends, shown)]
            fresh = fresh if step else max(fresh, max(begun) - before)
        seconds = max(seconds, *begun, 0.0 if copy else layout.watched(begun[0], steps))  # the first one shows
        of_others = (own.received_bytes + sum(results) - size for own, size in zip(groups, results, strict=True))
        received = max(received, *of_others)
    fullest = max(known.values(), key=lambda one: one.held_bytes)
    weights, held = fullest.weight_bytes, fullest.held_bytes
    return Estimate(seconds, received, held, fresh, weights, held - weights)


def _with_others(ends: Sequence[float], shown: Sequence[float]) -> list[float]:
    """When every group has all predictions; its own ends then, and is so much later at all others."""
    there = [end + way for end, way in zip(ends, shown, strict=True)]
    *_, last = sorted(range(len(ends)), key=there.__getitem__)
    before = max((at for group, at in enumerate(there) if group != last), default=0.0)
    return [max(end, before if group == last else there[last]) for group, end in enumerate(ends)]


class Beside(LayoutCosts):
    """Patches of a group on ranks of these speeds, one for each; where all are equal, seen from those that say what all
    take."""

    def __init__(
        self, case: SampleCase, made: Choices, cluster: Cluster, speeds: Sequence[float] = (), size: int | None = None,
        shares: Sequence[float] = (),
    ) -> None:  # fmt: skip
        super().__init__(case, made, cluster, shares)
        self.size = size or self.size
        self.seen = seen_patches(made, speeds)
        self.speeds = dict(enumerate(speeds)) or dict.fromkeys(self.seen, 1.0)
        self.for_all = not speeds

    @cached_property
    def works(self) -> dict[int, PatchWork]:
        given = self.made.text_first, self.made.attention, self.for_all
        return {p: self.case.work(self.size, self.made.bounds, p, *given) for p in self.speeds}

    @cached_property
    def items(self) -> dict[int, list[Item]]:
        """Of every step, by patch seen."""
        once = self.case.once(self.size)

        def own(patch: int) -> list[Item]:
            speed, items = self.speeds[patch], self.works[patch].items
            return [_free(item) if item.name in once else at_speed(item, speed) for item in items]

        return {patch: own(patch) for patch in self.works}

    def together(
        self, items: Mapping[int, Sequence[Item]], waits: Waits, before: Passed | None = None,
        leaving: Mapping[int, Buckets] = MappingProxyType({}),
    ) -> Passed:  # fmt: skip
        """A step of all patches, of which those seen do these items."""
        return together([items[patch] for patch in self.seen], self.links, 0, waits, before, leaving)

    def least_seconds(self, steps: int, fresh: float) -> float:
        """Of a call, whatever kinds of attention exact steps have, or which layout, of which one takes `fresh` seconds
        at least."""
        attended = self.case.attention_seconds(self.size, self.grid.patches) if self.grid.patches > 1 else {}
        items = {
            patch: attending(own, {name: seconds / self.speeds[patch] for name, seconds in attended.items()})
            for patch, own in self.items.items()
        }
        exact = self.together(items, lambda told: True).seconds
        if self.made.how.mode == "exact":
            return steps * exact
        warm = min(self.made.how.warmup, steps)
        busy = sum(self.links.of_patches(told, 0).seconds for told in self.told)
        left = steps - warm  # what the last one sends nobody waits for
        return (
            (warm - 1) * min(exact, fresh)
            + exact
            + max(left * self.together(self.items, self.waits).seconds, (left - 1) * busy)
        )

    @cached_property
    def told(self) -> list[Told]:
        """The exchanges of a step."""
        return [item.told for item in next(iter(self.items.values())) if item.told and item.told.sent]

    def crosses(self, told: Told) -> bool:
        """Whether it is read a step later."""
        how = self.made.how
        if how.mode == "exact" or told.kind == "prediction" or not told.sent:
            return False
        return told.kind != "moments" or how.norms != "sync"

    def waits(self, told: Told) -> bool:
        return not self.crosses(told)

    def pace(self, steps: int) -> Pace:
        how, once, works = self.made.how, self.case.once(self.size), self.works
        first = max(
            sum(item.seconds for item in works[patch].items if item.name in once) / speed
            for patch, speed in self.speeds.items()
        )
        exact = self.together(self.items, lambda told: True).seconds
        weights = max(work.held_bytes(frozenset(work.owners.values()))[0] for work in works.values())
        held = weights + self.inputs_bytes() + self.case.kept_bytes(self.size) + max(map(self._most_bytes, works))
        received = received_bytes(self.told)
        if how.mode == "exact":
            return Pace(first, (exact,) * steps, received, held, weights)
        warm, crossing = min(how.warmup, steps), [self._crossing(patch) for patch in works]
        exact += max(sum(self._packed(told)) for told in crossing)
        seconds = (exact,) * warm + (*self._displaced(steps - warm),)
        return Pace(first, seconds, received, held, weights)

    def _displaced(self, steps: int) -> Iterator[float]:
        """Seconds of each of so many steps after an exact one; from the third on they are alike."""
        more = {patch: sum(self._copies(patch, self._crossing(patch))) / self.speeds[patch] for patch in self.works}
        leaving, passed, seconds = self._leaving(), begun(len(self.seen)), 0.0
        for step in range(steps):
            if step < _ALIKE:
                ends = tuple(end + more[patch] for end, patch in zip(passed.ends, self.seen, strict=True))
                following = self.together(self.items, self.waits, replace(passed, ends=ends), leaving)
                passed, seconds = following, following.seconds - passed.seconds
            yield seconds

    def _leaving(self) -> dict[int, Buckets]:
        """Of a step, by the number of the exchange after which they leave."""
        sent: dict[str, list[tuple[int, float, int]]] = {}
        for number, one in enumerate(self.told):
            if self._in_buckets(one):
                for channels, seconds, size in self.links.of_channels(one, 0):
                    sent.setdefault(channels, []).append((number, seconds, size))
        found: dict[int, list[tuple[int, float, int]]] = {}
        for members in sent.values():
            *full, late = filled(members, lambda member: member[-1])
            for bucket in full:
                found.setdefault(bucket[-1][0], []).extend(bucket)
            found.setdefault(len(self.told) - 1, []).extend(late)
        latency = max((self.links.of_patches(one, 0).latency for one in self.told), default=0.0)
        return {
            last: Buckets(sum(seconds for _, seconds, _ in bucket) + latency, tuple(number for number, *_ in bucket))
            for last, bucket in found.items()
        }

    def _crossing(self, patch: int) -> list[Told]:
        """What is read of this patch a step later."""
        return [item.told for item in self.works[patch].items if item.told and self._in_buckets(item.told)]

    def _in_buckets(self, told: Told) -> bool:
        return self.crosses(told) and (told.kind != "moments" or self.made.how.norms != "separate")

    def _most_bytes(self, patch: int) -> int:
        """Beside weights and inputs."""
        work, how, keeps_sent = self.works[patch], self.made.how, self.links.cluster.keeps_sent
        exact = keeping_bytes(work, patch) if keeps_sent else work.held_bytes(frozenset(work.owners.values()))[1]
        if how.mode == "exact":
            return exact
        return max(exact, displaced_bytes(work, patch, self._in_buckets, how.advance, keeps_sent))

    def _packed(self, crossing: Sequence[Told]) -> Iterator[float]:
        """Seconds to put what goes to every other patch into buckets, and to send these."""
        peers = self.grid.patches - 1
        of_moments = [told for told in crossing if told.kind == "moments"]
        size = sum(told.received_bytes for told in crossing if told.kind != "moments") / max(peers, 1)
        each = min(max(size // PER_STEP, LEAST_BYTES), MOST_BYTES)
        count = -int(-size // each)
        sending = self.links.overhead_seconds(2)  # and receiving
        yield peers * count * (self.moving(size / count) + sending) if count else 0.0
        yield peers * (self.moving(sum(told.own_bytes for told in of_moments)) + sending) if of_moments else 0.0

    def _copies(self, patch: int, crossing: Sequence[Told]) -> Iterator[float]:
        """Seconds of what this patch computes more in a displaced step than in an exact one."""
        packed, of_moments = self._packed(crossing)
        yield packed * (1 + self.made.how.advance) + of_moments  # of others' buckets, what has changed
        known: dict[tuple[str, int, tuple[int, ...]], float] = {}
        for told in crossing:
            sources = tuple(size for _, dst, size in told.sent if dst == patch)
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
        own = of_bytes(sum(sources) if told.kind == "halo" else told.own_bytes)
        edges += sum(self.own(by, *given) for by, *given in (
            (displaced_ops.flat, [own]), (displaced_ops.change, own, own), (displaced_ops.kept_going, own, own),
        ))  # fmt: skip
        others = map(of_bytes, sources)
        return edges + sum(self.own(displaced_ops.advanced, other, other, other[0]) for other in others)


def _free(item: Item) -> Item:
    return Item(item.name, 0.0, item.told, item.reads)


def at_speed(item: Item, speed: float) -> Item:
    """As a rank of this speed does it; what it tells travels as fast."""
    if speed == 1.0:
        return item
    told = item.told and replace(item.told, seconds=item.told.seconds / speed)
    return Item(item.name, item.seconds / speed, told, item.reads)


def attending(items: Sequence[Item], seconds: Mapping[str, float]) -> Sequence[Item]:
    """With layers of attention that take so long, and tell nothing."""
    left, dropped = dict(seconds), {place for place, item in enumerate(items) if item.name in seconds}
    return [
        Item(item.name, left.pop(item.name, 0.0))
        if place in dropped
        else item
        if dropped.isdisjoint(item.reads)
        else item._replace(reads=tuple(read for read in item.reads if read not in dropped))
        for place, item in enumerate(items)
    ]
