"""Memory of a rank over a step, from its ops and when they ran: what each takes and lets go, what waits to arrive.

wait h       +h                                    level after each op: what it takes and frees
run 1F0      +saved +out, the most: +temporaries   level during it: the most
send out     out goes once it has arrived          seen at the begin of a later action, as transports do
"""

from collections.abc import Iterator, Mapping, Sequence
from math import inf

from fxpipe.plan.timeline import RankMemory
from fxpipe.simulate.op_lists import Bytes, Op


def levels(
    ops: Sequence[Op], held_bytes: int, begins: Sequence[float], arrivals: Mapping[int, float] | None
) -> Iterator[tuple[int, int]]:
    """Bytes held during and after every op.

    Args:
        begins: when each of the rank's actions begins.
        arrivals: when messages have arrived, by edge; None where what is sent stays to the end.
    """
    level, now = held_bytes, 0.0
    pending: list[tuple[float, int]] = []
    began = iter(begins)
    for op in ops:
        if op.kind == "begin":
            now = next(began)
            if pending:
                level -= sum(size for arrival, size in pending if arrival <= now)
                pending = [item for item in pending if item[0] > now]
        memory = op.memory
        if memory is None:
            yield level, level
            continue
        most = memory.most
        start = level
        for _, size in memory.taken:
            level += size
        for _, size in memory.freed:
            level -= size
        for _, size, edges in memory.sent:
            arrival = inf if arrivals is None else max(arrivals[edge] for edge in edges)
            if arrival > now:
                pending.append((arrival, size))
                most = memory.most_kept
            else:
                level -= size
        yield max(start + most, level), level


def peak_bytes(
    ops: Sequence[Op], held_bytes: int, begins: Sequence[float], arrivals: Mapping[int, float] | None
) -> int:
    """The most that a rank holds at once."""
    return max((during for during, _ in levels(ops, held_bytes, begins, arrivals)), default=held_bytes)


def rank_memory(
    rank: int,
    ops: Sequence[Op],
    held: Mapping[str, int],
    op_seconds: Sequence[tuple[float, float]],
    arrivals: Mapping[int, float] | None,
) -> RankMemory:
    """The curve of one rank, and what its peak consists of; `op_seconds` are when its ops start and end."""
    begins = [start for op, (start, _) in zip(ops, op_seconds, strict=True) if op.kind == "begin"]
    found = list(levels(ops, sum(held.values()), begins, arrivals))
    points: list[tuple[float, int]] = []
    for (during, after), (start, end) in zip(found, op_seconds, strict=True):
        points += [(start, during), (end, after)]
    place = max(range(len(found)), key=lambda position: found[position][0])
    return RankMemory(rank, tuple(_changes(points)), _at(ops, held, begins, arrivals, place, found[place][0]))


def _at(
    ops: Sequence[Op],
    held: Mapping[str, int],
    begins: Sequence[float],
    arrivals: Mapping[int, float] | None,
    place: int,
    total: int,
) -> dict[str, int]:
    """Bytes by category before the op at `place`, and what is there for a moment in it."""
    before = [*ops[:place], ops[place]._replace(memory=None)]
    live: dict[str, int] = {}
    for category in dict.fromkeys([*held, *(name for op in before if op.memory for name, _ in op.memory.taken)]):
        own = [op._replace(memory=_only(category, op.memory)) for op in before]
        *_, (_, live[category]) = levels(own, held.get(category, 0), begins, arrivals)
    memory = ops[place].memory or Bytes()
    for category, size in memory.taken if sum(live.values()) < total else ():
        size = min(size, total - sum(live.values()))
        live[category] = live.get(category, 0) + size
    live["temporaries"] = total - sum(live.values())
    return {category: size for category, size in live.items() if size}


def _only(category: str, memory: Bytes | None) -> Bytes | None:
    if memory is None:
        return None
    taken, freed = (tuple(item for item in part if item[0] == category) for part in (memory.taken, memory.freed))
    return Bytes(taken, freed, tuple(item for item in memory.sent if item[0] == category))


def _changes(points: Sequence[tuple[float, int]]) -> Iterator[tuple[float, int]]:
    """The points at which the curve changes; of several at one time the largest."""
    now, before, most = -1.0, None, 0
    for position, (seconds, size) in enumerate(points):
        most = size if seconds != now else max(most, size)
        now = seconds
        if position + 1 < len(points) and points[position + 1][0] == seconds:
            continue
        last = position + 1 == len(points)
        if most != before or last:
            yield seconds, size if last else most
        before = most
