"""What a rank of patches beside each other holds over a step, operation by operation: what a patch is told or sends.

bucket of before    from the step's beginning to its last read; where it is moved on, to the end, as is its change
bucket of now       from where it is full to the end
what is told        until its bucket leaves, which is made of it; where sends are kept, that stays for two steps
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

import numpy as np

from passes.sampling.buckets import filled
from passes.sampling.lives import Exchanged, Ints
from passes.sampling.work import PatchWork, Told

_Channels = dict[tuple[int, bool], list[tuple[int, int]]]
"""By the other patch, moments apart, the numbers of exchanges, and bytes."""


class _Levels:
    """Bytes at every operation of a step."""

    def __init__(self, results: Ints) -> None:
        self.end = len(results) - 1
        self._results, self._changes, self._briefly = results, [0] * (len(results) + 1), [0] * len(results)

    def add(self, size: int, start: int, stop: int | None = None) -> None:
        """From one operation on, with another or to the end."""
        stop = self.end if stop is None else stop
        if start <= stop:
            self._changes[start] += size
            self._changes[stop + 1] -= size

    def add_briefly(self, size: int, at: int) -> None:
        """One after the other."""
        self._briefly[at] = max(self._briefly[at], size)

    @property
    def most(self) -> int:
        changes = np.array(self._changes[:-1], np.int64).cumsum()
        return int((self._results + changes + np.array(self._briefly, np.int64)).max(initial=0))


def keeping_bytes(work: PatchWork, patch: int) -> int:
    """The most beside weights and inputs, in an exact step, of a rank that keeps to its end what it has sent."""
    found, others = _Levels(work.levels(False)), iter(work.lives.exchanges)
    for item in work.items:
        if (told := item.told) is None:
            continue
        sent = sum(size for src, _, size in told.sent if src == patch)
        if item.name in work.apart:
            found.add(sent, work.lives.place(item.name))
            continue
        one = next(other for other in others if other.owner not in work.apart)
        if told.kind in ("gather", "sum", "prediction"):
            found.add(told.own_bytes if sent else 0, one.told_until + 1)
        else:
            found.add(sent, one.place)
    return found.most


def displaced_bytes(
    work: PatchWork, patch: int, crosses: Callable[[Told], bool], advance: bool, keeps_sent: bool
) -> int:
    """The most beside weights and inputs, in a step that reads these exchanges a step later."""
    found, places = _Levels(work.levels(True)), work.lives.exchanges
    told = [item.told for item in work.items if item.told]
    come, sent = _Channels(), _Channels()
    for number, one in enumerate(told):
        if not crosses(one):
            continue
        into, out = 0, 0
        for src, dst, size in one.sent:
            if dst == patch:
                come.setdefault((src, one.kind == "moments"), []).append((number, size))
                into += size
            elif src == patch:
                sent.setdefault((dst, one.kind == "moments"), []).append((number, size))
                out += size
        if advance and one.kind != "moments":  # one's own values of now and before, and what they have gone through
            own = out if one.kind == "halo" else one.own_bytes
            found.add(2 * own, 0)
            found.add_briefly(2 * own, places[number].place)
            found.add_briefly(into, places[number].read)
    for bucket, size, count, moments, full in _buckets(come, places, found.end):
        reads, moves = [places[number].read for number, _ in bucket], advance and not moments
        found.add(size * count, full)
        found.add(size * count * (1 + moves), 0, max(reads) - 1)
        found.add(size * count * moves, max(reads))
        for read in (min(reads), max(reads)):
            found.add_briefly(size * (count, 1)[moves], read)
    leaves = defaultdict[int, int](int)
    for bucket, size, count, _, full in _buckets(sent, places, found.end):
        for number, of_member in bucket:
            if told[number].kind == "halo":
                found.add(of_member * count, places[number].place, full)
            else:
                leaves[number] = max(leaves[number], full)
        copied = sum(of_member for number, of_member in bucket if places[number].is_view)
        found.add_briefly(copied + (size if len(bucket) > 1 and not keeps_sent else 0), full)
        if keeps_sent:
            found.add(size * count, 0)
            found.add(size * count, full)
    for number, leave in leaves.items():
        found.add(told[number].own_bytes, places[number].told_until + 1, leave)
    return found.most


def _buckets(
    channels: _Channels, places: list[Exchanged], end: int
) -> Iterator[tuple[list[tuple[int, int]], int, int, bool, int]]:
    """What leaves together, its bytes, on how many channels the same does, whether it is moments, and where it is full:
    the last of a channel leaves at the end."""
    alike = Counter((moments, tuple(members)) for (_, moments), members in channels.items())
    for (moments, members), count in alike.items():
        *full, late = filled(members, lambda member: member[1])
        for bucket in (*full, late):
            at = end if bucket is late else places[bucket[-1][0]].place
            yield bucket, sum(size for _, size in bucket), count, moments, at
