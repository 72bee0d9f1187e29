"""Patches beside each other, a rank each.

exact        their work by a clock: what all tell travels from then on, who reads it waits
displaced    nobody waits, but the links must keep up: max(compute, transfers)
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from fxpipe.cluster import Cluster
from fxpipe.plan import displaced_ops
from fxpipe.sampling.case import SampleCase
from fxpipe.sampling.clocks import clocked, together
from fxpipe.sampling.layout import Estimate, Layout, of_bytes
from fxpipe.sampling.planning import Choices, patches_seen
from passes.sampling.buckets import LEAST_BYTES, MOST_BYTES, PER_STEP
from passes.sampling.work import Item, PatchWork, Told


class Beside(Layout):
    """Patches on ranks of these speeds, one for each; where all are equal, seen from those that say what all take."""

    def __init__(self, case: SampleCase, made: Choices, cluster: Cluster, speeds: Sequence[float] = ()) -> None:
        super().__init__(case, made, cluster)
        self.seen = dict.fromkeys(range(len(speeds)), 1) or patches_seen(made)
        self.speeds = dict(enumerate(speeds)) or dict.fromkeys(self.seen, 1.0)

    @cached_property
    def works(self) -> dict[int, PatchWork]:
        made = self.made
        return {p: self.case.work(self.size, made.bounds, p, made.text_first, made.attention) for p in self.speeds}

    @cached_property
    def items(self) -> list[tuple[list[Item], int]]:
        """Of every step, on each rank, and how many ranks do so."""
        once = self.case.once(self.size)

        def own(patch: int) -> list[Item]:
            speed, items = self.speeds[patch], self.works[patch].items
            return [_free(item) if item.name in once else _at_speed(item, speed) for item in items]

        return [(own(patch), count) for patch, count in self.seen.items()]

    def least_seconds(self, steps: int) -> float:
        """Of a call, whatever kinds of attention exact steps have; from one patch."""
        attended = self.case.attention_seconds(self.size, self.grid.patches) if self.grid.patches > 1 else {}
        *_, speed = self.speeds.values()
        own, _ = self.items[-1]
        items = attending(own, {name: s / speed for name, s in attended.items()})
        exact = clocked(items, self.links, 0, lambda told: True)[0]
        if self.made.how.mode == "exact":
            return steps * exact
        warm = min(self.made.how.warmup, steps)
        return warm * exact + (steps - warm) * max(clocked(own, self.links, 0, lambda told: not self.crosses(told)))

    def crosses(self, told: Told) -> bool:
        """Whether it is read a step later."""
        how = self.made.how
        if how.mode == "exact" or told.kind == "prediction" or not told.sent:
            return False
        return told.kind != "moments" or how.norms != "sync"

    def estimate(self, steps: int) -> Estimate:
        how, once, works = self.made.how, self.case.once(self.size), self.works
        first = max(
            sum(item.seconds for item in works[patch].items if item.name in once) / speed
            for patch, speed in self.speeds.items()
        )
        last = self.links.of_groups(self.result_bytes(self.size))
        exact = max(together(self.items, self.links, 0, lambda told: True)[0]) + last
        held = max(sum(work.held_bytes(frozenset(work.owners.values()))) for work in works.values())
        received = sum(item.told.received_bytes for item in self.items[-1][0] if item.told)
        received += (self.grid.groups - 1) * self.result_bytes(self.size)
        memory = held + self.inputs_bytes() + self.case.kept_bytes(self.size)
        if how.mode == "exact":
            return Estimate(first + steps * exact, received, memory)
        computed, busy = together(self.items, self.links, 0, lambda told: not self.crosses(told))
        crossing = {patch: self._crossing(patch) for patch in works}
        copied = [sum(self._copies(patch, told)) / self.speeds[patch] for patch, told in crossing.items()]
        step = max(*(sum(both) + last for both in zip(computed, copied, strict=True)), busy)
        warm = min(how.warmup, steps)
        exact += max(sum(self._packed(told)) for told in crossing.values())
        caches = max(map(self._cached_bytes, crossing.values()))
        return Estimate(first + warm * exact + (steps - warm) * step, received, memory + caches)

    def _crossing(self, patch: int) -> list[Told]:
        """What is read of this patch a step later."""
        told = [item.told for item in self.works[patch].items if item.told and self.crosses(item.told)]
        return [one for one in told if one.kind != "moments" or self.made.how.norms != "separate"]

    def _cached_bytes(self, crossing: Sequence[Told]) -> int:
        """Of what others have told, and what of it is moved on."""
        advance = self.made.how.advance
        own = sum(told.own_bytes for told in crossing if told.kind != "moments")
        return sum(told.received_bytes for told in crossing) * (2 + advance) + 2 * own * advance

    def _packed(self, crossing: Sequence[Told]) -> Iterator[float]:
        """Seconds to put what goes to every other patch into buckets."""
        peers = self.grid.patches - 1
        of_moments = [told for told in crossing if told.kind == "moments"]
        size = sum(told.received_bytes for told in crossing if told.kind != "moments") / max(peers, 1)
        each = min(max(size // PER_STEP, LEAST_BYTES), MOST_BYTES)
        count = -int(-size // each)
        yield peers * count * self.moving(size / count) if count else 0.0
        yield peers * self.moving(sum(told.own_bytes for told in of_moments)) if of_moments else 0.0

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


def _at_speed(item: Item, speed: float) -> Item:
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
        else replace(item, reads=tuple(read for read in item.reads if read not in dropped))
        for place, item in enumerate(items)
    ]
