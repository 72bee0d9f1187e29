"""A clock of stages, through which samples or patches follow each other.

stage 0  |0|1|2|   |0|1|2|            a patch's next step begins when its prediction is back, and its column free
stage 1    |0|1|2|   |0|1|2|
"""

from bisect import bisect_right
from collections.abc import Callable
from operator import itemgetter

from fxpipe.sampling.links import Busy
from passes.sampling.cells import cells
from passes.sampling.stages import Stage, StageLine


def paced(
    line: StageLine, num_turns: int, num_steps: int, seconds: Callable[[Stage, int], float],
    hop: Callable[[Stage, int, str, int], Busy], shown: Callable[[Stage, int], Busy],
    on_bus: bool, follows: int,
) -> list[float]:  # fmt: skip
    """When each of some steps ends.

    Args:
        seconds: of a stage at a turn.
        hop: of a stage's value, at a turn, to a column.
        shown: the prediction of a turn, to all ranks.
        on_bus: whether what columns send each other is one after another.
        follows: so many turns, samples of one patch, begin the next step when their predictions are there; all turns
            when all are, where it is 0.
    """
    order, last = cells(line, num_turns), line.stages[-1].index
    crossing = {
        stage.index: [(value, c) for value in stage.returns for c in line.readers(value) if c != stage.column]
        for stage in line.stages
    }
    free = [0.0] * line.num_columns
    channels: dict[tuple[int, int], float] = {}
    bus: list[tuple[float, float]] = []
    begin, ends = [0.0] * num_turns, list[float]()

    def sent(channel: tuple[int, int], end: float, way: Busy) -> float:
        begin = max(end, channels.get(channel, 0.0))
        sent = _booked(bus, begin, way.seconds) if on_bus else begin + way.seconds
        channels[channel] = sent + way.latency
        return channels[channel]

    for _ in range(num_steps):
        posted = [*free]  # what comes in a step, where a column begins it
        arrived: dict[tuple[str, int, int], tuple[float, float]] = {}
        for cell in order:
            stage, turn = cell.stage, cell.turn
            start = max(free[stage.column], begin[turn] if stage.index == 0 else 0.0)
            come = [
                arrived[value, turn, stage.column] for value in stage.reads if (value, turn, stage.column) in arrived
            ]
            start = max([start + sum(taken for _, taken in come), *(there for there, _ in come)])
            free[stage.column] = end = start + seconds(stage, turn)
            for value, column in crossing[stage.index]:
                way, leaves = hop(stage, turn, value, column), max(end, posted[column])
                arrived[value, turn, column] = sent((stage.column, column), leaves, way), way.taken
                free[stage.column] += way.taken
            if stage.index == last:
                begin[turn] = sent((stage.column, -1), end, shown(stage, turn))
        ends.append(max(begin))
        for first in range(0, num_turns, follows or num_turns):
            of_patch = slice(first, first + (follows or num_turns))
            begin[of_patch] = [max(begin[of_patch])] * len(begin[of_patch])
        if not follows:
            free = [ends[-1]] * line.num_columns
    return ends


def _booked(bus: list[tuple[float, float]], begin: float, seconds: float) -> float:
    """The end of the first span of so many seconds in which the bus is free; not so from now on."""
    if not seconds:
        return begin
    place = bisect_right(bus, begin, key=itemgetter(1))
    while place < len(bus) and bus[place][0] < begin + seconds:
        begin = bus[place][1]
        place += 1
    start, stop = begin, begin + seconds
    if place and bus[place - 1][1] == start:  # spans without a gap are one
        place -= 1
        start, _ = bus.pop(place)
    bus.insert(place, (start, stop))
    return stop
