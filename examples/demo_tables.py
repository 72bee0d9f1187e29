"""What the demo shows of a program: stages, schedule and traffic, for a terminal of 80 columns or more."""

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from fxpipe.plan.block_graph import BlockGraph
from fxpipe.plan.schedule_grid import grid
from fxpipe.program import Program

KINDS = {
    "main": "from a stage to the next",
    "skip": "from the U-Net's encoder to its decoder",
    "conditioning": "latents, text states, time: read by many stages",
    "gradient": "of all these, on the way back",
    "loss": "from the last stage to every rank",
}
FORWARD, BACKWARD = {"down": "#8fc1ff", "up": "#4a90e8"}, {"down": "#a8e39a", "up": "#55b455"}
INK, FROZEN = "#000000", "#000000 on #e8c34a"


def num_skips(blocks: BlockGraph) -> int:
    return sum(kind == "skip" for edge in blocks.edges for kind in edge.kinds)


def columns(*headers: str, right: tuple[int, ...] = ()) -> Table:
    """A table without lines; columns whose index is in `right` are aligned to the right."""
    table = Table(box=None, pad_edge=False, show_header=any(headers))
    for index, header in enumerate(headers):
        table.add_column(header, justify="right" if index in right else "left", no_wrap=True)
    return table


def stages(program: Program) -> Table:
    """A row per rank: where its stage on the way down begins, where the one on the way up, its share of the work."""
    plan = program.plan
    seconds = program.block_seconds
    table = columns("rank", "down: stage, begins at", "up: stage, begins at", "work", "")
    for rank in range(program.world_size):
        owned = [stage for stage, ranks in enumerate(plan.staged.stage_ranks) if rank in ranks]
        share = sum(seconds[b] for stage in owned for b in plan.staged.blocks(stage)) / sum(seconds)
        bar = Text("━" * round(share * program.world_size * 5), "cyan")
        table.add_row(str(rank), *(f"{stage:2} {_begin(program, stage)}" for stage in owned), f"{share:.1%}", bar)
    return table


def _begin(program: Program, stage: int) -> str:
    """The first module of a stage, cut to a readable depth."""
    blocks = program.plan.staged.blocks(stage)
    name = program.blocks.blocks[blocks[0]].name.split(" ")[0] if blocks else "(empty)"
    return ".".join(name.removeprefix("unet.").split(".")[:4])


def legend() -> Table:
    """What the schedule's picture is made of."""
    table = columns("", "", "")
    for way, other in (("down", ("T", FROZEN, " frozen work, all ranks")), ("up", ("·", "dim", " nothing to do"))):
        forward = Text.assemble(("3", f"{INK} on {FORWARD[way]}"), f"  forward on the way {way}")
        backward = Text.assemble(("3-", f"{INK} on {BACKWARD[way]}"), " its backward")
        table.add_row(forward, backward, Text.assemble(other[:2], other[2]))
    return table


def picture(program: Program, width: int) -> Iterator[Text]:
    """The schedule's grid at one character per unit of time, in bands of at most `width` characters."""
    lines = [line.split() for line in grid(program.schedule, width=1 << 20).splitlines() if line.startswith("rank")]
    rows = [list(_cells(program, int(rank), tokens)) for _, rank, *tokens in lines]
    label, num_units = len(f"rank {len(rows) - 1}") + 1, max(map(len, rows))
    num_bands = -(-num_units // (width - label))
    per_band = -(-num_units // num_bands)
    for band in range(num_bands):
        for rank, row in enumerate(rows):
            yield Text.assemble(f"rank {rank}".ljust(label), *row[band * per_band : (band + 1) * per_band])
        yield Text()


def _cells(program: Program, rank: int, tokens: list[str]) -> Iterator[tuple[str, str]]:
    """(character, style) of every unit of time, from a row of the grid: `0F1`, `15B3` and then `----`, `.`"""
    first_stage = str(next(s for s, ranks in enumerate(program.plan.staged.stage_ranks) if rank in ranks))
    style = ""
    for token in tokens:
        kind = next((letter for letter in token if letter.isalpha()), token[0])
        stage, _, microbatch = token.partition(kind)
        way = "down" if stage == first_stage else "up"
        if kind == ".":
            yield "·", "dim"
        elif kind == "T":
            yield "T", FROZEN
        elif kind == "-":
            yield "-", style
        else:
            style = f"{INK} on {(FORWARD if kind == 'F' else BACKWARD)[way]}"
            yield microbatch[-1], style


def traffic_matrix(program: Program) -> Table:
    """KiB per step, a row per sender and a column per receiver."""
    channels, ranks = program.traffic().channels, range(program.world_size)
    table = columns("KiB to", *map(str, ranks), right=tuple(range(1, program.world_size + 1)))
    for src in ranks:
        sizes = (channels.get((src, dst)) for dst in ranks)
        table.add_row(f"rank {src}", *(Text("·", "dim") if s is None else f"{s / 1024:,.0f}" for s in sizes))
    return table


def traffic_kinds(program: Program) -> Table:
    """Bytes per step of every kind of value."""
    table = columns("", "", "", right=(1,))
    sizes = program.traffic().kinds
    for kind, size in ((kind, sizes[kind]) for kind in KINDS):
        stay = f"all {num_skips(program.blocks)} skips stay on their rank: [bold]none crosses[/]"
        table.add_row(kind, f"{size:,} bytes", stay if kind == "skip" and not size else KINDS[kind])
    table.add_row("[bold]total", f"[bold]{program.traffic().total_bytes:,} bytes", "[bold]per training step")
    return table
