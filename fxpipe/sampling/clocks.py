"""Two clocks: of a patch's work, whose exchanges travel meanwhile, and of stages that follow each other."""

from collections.abc import Callable, Generator, Sequence

from fxpipe.sampling.links import Busy, Links
from passes.sampling.cells import cells
from passes.sampling.stages import Line, Stage
from passes.sampling.work import Item, Told

Waits = Callable[[Told], bool]


def clocked(items: Sequence[Item], links: Links, column: int, waits: Waits) -> tuple[float, float]:
    """When these items of a patch like all others end, and the seconds in which links are busy with what they tell."""
    (end,), busy = together([(items, 2)], links, column, waits)
    return end, busy


def together(
    patches: Sequence[tuple[Sequence[Item], int]], links: Links, column: int, waits: Waits
) -> tuple[Sequence[float], float]:
    """When each of some patches beside each other ends, and the seconds in which links are busy. Each is one of so many
    alike; their exchanges are the same, and are there for one when the last of the others has come to them; where these
    are all patches there are, those that come to them earlier send earlier."""
    walks, every = [_walked(items) for items, _ in patches], len(patches) == links.grid.patches
    at, free, busy = [next(walk) for walk in walks], [0.0] * len(walks), 0.0
    while (told := at[0][1]) is not None:
        way, clocks = links.of_patches(told, column), [clock for clock, _ in at]
        busy += way.seconds
        taken = way.taken_by_bytes  # many that nobody waits for are one message
        if waits(told):
            taken = way.taken
            for own, (_, count) in enumerate(patches):
                if every:
                    free[own] = _come(told, own, clocks, free[own], way)
                    continue
                others = (clock for place, clock in enumerate(clocks) if count > 1 or place != own)
                free[own] = max(free[own], *others) + way.until_there
        at = [walk.send((there, taken)) for walk, there in zip(walks, free, strict=True)]
    assert all(told is None for _, told in at), "patches tell each other different things"
    return [clock for clock, _ in at], busy


def _come(told: Told, own: int, clocks: Sequence[float], free: float, way: Busy) -> float:
    """When all is there that others tell one patch, which takes one message after the other."""
    sent = [(clocks[source], size) for source, target, size in told.sent if target == own and size]
    total, there = sum(size for _, size in sent), free
    for clock, size in sorted(sent):
        there = max(there, clock) + way.seconds * size / total
    return there + way.latency if sent else free


def _walked(items: Sequence[Item]) -> Generator[tuple[float, Told | None], tuple[float, float]]:
    """One patch's clock at everything that it tells, and at its end; answered by when that is there, and the seconds
    that sending it takes from what comes next."""
    clock = owed = 0.0
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
            told[place], taken = yield clock, item.told
            owed += taken
    yield clock, None


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
