"""Two clocks: of a patch's work, whose exchanges travel meanwhile, and of stages that follow each other."""

from collections.abc import Callable, Sequence

from fxpipe.sampling.links import Busy, Links
from passes.sampling.cells import cells
from passes.sampling.stages import Line, Stage
from passes.sampling.work import Item, Told


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


def alone(items: Sequence[Item], places: Sequence[int]) -> list[Item]:
    """Some items alone; what they read of others is there."""
    now = {place: index for index, place in enumerate(places)}
    return [
        Item(items[p].name, items[p].seconds, items[p].told, tuple(now[r] for r in items[p].reads if r in now))
        for p in places
    ]


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
