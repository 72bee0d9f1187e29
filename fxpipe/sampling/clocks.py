"""A clock of patches beside each other, whose exchanges travel while they work."""

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from types import MappingProxyType
from typing import NamedTuple

from fxpipe.sampling.links import Busy, Links
from passes.sampling.work import Item, Told

Waits = Callable[[Told], bool]
Ends = tuple[float, ...]


class Buckets(NamedTuple):
    """That leave at once: seconds until they are there, alone on their links, and the exchanges in them, by number."""

    until_there: float
    exchanges: tuple[int, ...]


@dataclass(frozen=True)
class Passed:
    """Patches beside each other after a step: when each ends, until when what has been sent to it is under way, and
    when what crosses is there, by the number of the exchange."""

    ends: tuple[float, ...]
    free: tuple[float, ...]
    there: tuple[Mapping[int, float], ...]

    @property
    def seconds(self) -> float:
        return max(self.ends)


def begun(num_patches: int) -> Passed:
    """Before the first step."""
    return Passed((0.0,) * num_patches, (0.0,) * num_patches, ({},) * num_patches)


def together(
    patches: Sequence[Sequence[Item]], links: Links, column: int, waits: Waits,
    before: Passed | None = None, leaving: Mapping[int, Buckets] = MappingProxyType({}),
) -> Passed:  # fmt: skip
    """A step of patches beside each other, after another one; a single one is like all others. All have the same
    exchanges. What nobody waits for leaves in buckets, after the exchange of that number, and is read a step later."""
    before = before or begun(len(patches))
    walks = [_walked(items, end) for items, end in zip(patches, before.ends, strict=True)]
    at, free, number = [next(walk) for walk in walks], before.free, 0
    there: list[dict[int, float]] = [{} for _ in patches]
    while (told := at[0][1]) is not None:
        way, clocks = links.of_patches(told, column), tuple(clock for clock, *_ in at)
        if waits(told):
            free = tuple(max(end, ready) for end, (*_, ready) in zip(free, at, strict=True))
            come, free = _come(told, clocks, free, way, links.are_bus)
            answers = [(end, way.taken) for end in come]
        else:  # many that nobody waits for are one message
            answers = [(of_before.get(number, 0.0), way.taken_by_bytes) for of_before in before.there]
        if number in leaving:
            free = tuple(max(end, *clocks) + leaving[number].until_there for end in free)
            for end, known in zip(free, there, strict=True):
                known |= dict.fromkeys(leaving[number].exchanges, end)
        at, number = [walk.send(answer) for walk, answer in zip(walks, answers, strict=True)], number + 1
    assert all(told is None for _, told, _ in at), "patches tell each other different things"
    return Passed(tuple(clock for clock, *_ in at), free, tuple(there))


def _come(told: Told, clocks: Ends, free: Ends, way: Busy, on_bus: bool) -> tuple[Ends, Ends]:
    """When all is there that others tell each patch, and until when its links are busy; `free`: since when it can be
    told something."""
    if len(clocks) == 1:
        there = (max(*free, *clocks) + way.until_there,)
        return there, there
    return (_on_bus if on_bus else _by_ports)(told, clocks, free, way)


def _by_ports(told: Told, clocks: Ends, free: Ends, way: Busy) -> tuple[Ends, Ends]:
    """A patch takes one message after the other, those that are sent first first, and sends all at once."""
    sent, taken = Counter[int](), Counter[int]()
    for source, target, size in told.sent:
        sent[source] += size
        taken[target] += size
    each = way.seconds / max(*sent.values(), *taken.values())
    there, left = {target: free[target] for target in taken}, dict[int, float]()
    for source, target, size in sorted(told.sent, key=lambda one: clocks[one[0]]):
        begin = max(free[target], clocks[source])
        left[target] = max(left.get(target, 0.0), begin + each * sent[source])
        there[target] = max(there[target], begin) + each * size
    come = tuple(max(there[own], left[own]) + way.latency if own in there else end for own, end in enumerate(free))
    return come, come


def _on_bus(told: Told, clocks: Ends, free: Ends, way: Busy) -> tuple[Ends, Ends]:
    """Patches that send at once share the bus; each sends one message to the others after another."""
    sizes, come = Counter[int](), [0.0] * len(free)
    for source, _, size in told.sent:
        sizes[source] += size
    begins = {source: max(clocks[source], free[source]) for source in sizes}
    for source, target, _ in told.sent:
        begins[source] = max(begins[source], free[target])
    sent = {source: (begins[source], way.seconds * size / sizes.total()) for source, size in sizes.items()}
    ends = {source: end + way.latency for source, end in _shared(sent).items()}
    for source, target, _ in told.sent:
        come[target] = max(come[target], ends[source])
    return tuple(come), tuple(ends.get(own, end) for own, end in enumerate(free))


def _shared(sent: Mapping[int, tuple[float, float]]) -> dict[int, float]:
    """When what begins then and takes so long alone ends, where all that is under way at once goes equally fast."""
    left, ends, now = {one: seconds for one, (_, seconds) in sent.items()}, dict[int, float](), 0.0
    while left:
        now = max(now, min(sent[one][0] for one in left))
        going = [one for one in left if sent[one][0] <= now]
        first = min(going, key=left.__getitem__)
        until = min((sent[one][0] for one in left if sent[one][0] > now), default=inf)
        if (end := now + left[first] * len(going)) <= until:
            until = ends[first] = end
        for one in going:
            left[one] -= (until - now) / len(going)
        if first in ends:
            del left[first]
        now = until
    return ends


def _walked(items: Sequence[Item], begin: float) -> Generator[tuple[float, Told | None, float], tuple[float, float]]:
    """One patch's clock at everything that it tells, and at its end, and since when it is ready for what it is told;
    answered by when that is there, and the seconds that sending it takes from what comes next."""
    clock, ready, owed = begin, begin, 0.0
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
        if item.reads:
            ready = clock
        if item.told is not None and item.told.sent:
            told[place], taken = yield clock, item.told, ready
            owed += taken
    yield clock, None, ready


def alone(items: Sequence[Item], places: Sequence[int]) -> list[Item]:
    """Some items alone; what they read of others is there."""
    now = {place: index for index, place in enumerate(places)}
    return [
        Item(items[p].name, items[p].seconds, items[p].told, tuple(now[r] for r in items[p].reads if r in now))
        for p in places
    ]
