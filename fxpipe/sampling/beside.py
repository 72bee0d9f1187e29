"""Patches beside each other, a rank each.

exact        one patch's work by a clock: what it tells travels from then on, who reads it waits
displaced    nobody waits, but the links must keep up: max(compute, transfers)

Ranks of a group are taken to work in step, as patches of one size do.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from fxpipe.cluster import Cluster
from fxpipe.plan import displaced_ops
from fxpipe.sampling.case import SampleCase
from fxpipe.sampling.clocks import clocked
from fxpipe.sampling.layout import Estimate, Layout, of_bytes
from fxpipe.sampling.planning import Choices
from passes.sampling.buckets import LEAST_BYTES, MOST_BYTES, PER_STEP
from passes.sampling.work import Item, PatchWork, Told


class Beside(Layout):
    """Seen from one patch, on a rank of this speed; from one with neighbours
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

    @cached_property
    def items(self) -> list[Item]:
        """Of every step, on this rank."""
        once = self.case.once(self.size)
        return [_free(item) if item.name in once else _at_speed(item, self.speed) for item in self.work.items]

    def least_seconds(self, steps: int) -> float:
        """Of a call, whatever kinds of attention exact steps have."""
        attended = self.case.attention_seconds(self.size, self.grid.patches) if self.grid.patches > 1 else {}
        items = attending(self.items, {name: s / self.speed for name, s in attended.items()})
        exact = clocked(items, self.links, 0, lambda told: True)[0]
        if self.made.how.mode == "exact":
            return steps * exact
        warm = min(self.made.how.warmup, steps)
        return warm * exact + (steps - warm) * max(
            clocked(self.items, self.links, 0, lambda told: not self.crosses(told))
        )

    def crosses(self, told: Told) -> bool:
        """Whether it is read a step later."""
        how = self.made.how
        if how.mode == "exact" or told.kind == "prediction" or not told.sent:
            return False
        return told.kind != "moments" or how.norms != "sync"

    def estimate(self, steps: int) -> Estimate:
        how, once, items = self.made.how, self.case.once(self.size), self.items
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
        packed, of_moments = self._packed(crossing)
        yield packed * (1 + self.made.how.advance) + of_moments  # of others' buckets, what has changed
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


def attending(items: Sequence[Item], seconds: Mapping[str, float]) -> list[Item]:
    """With layers of attention that take so long, and tell nothing."""
    left, dropped = dict(seconds), {place for place, item in enumerate(items) if item.name in seconds}
    return [
        Item(item.name, left.pop(item.name, 0.0))
        if place in dropped
        else replace(item, reads=tuple(read for read in item.reads if read not in dropped))
        for place, item in enumerate(items)
    ]
