"""The report: one HTML page that needs no network, for people who look at a plan before they run it."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from fxpipe.errors import CompileError
from fxpipe.plan.block_graph import human_bytes
from fxpipe.plan.sample_quality import Quality
from fxpipe.plan.schedule import counted
from fxpipe.plan.timeline import Timeline, human_seconds
from fxpipe.show.report import figures

if TYPE_CHECKING:
    from fxpipe.program import Program
    from fxpipe.sampler import Sampler

TEMPLATE = Path(__file__).parent / "template.html"
Tile = tuple[str, str, str]
"""Name, number, what to compare it with."""


def write_report(program: "Program", path: str | Path, memory_limit_bytes: int | None) -> Path:
    """Write the page; the file that was written.

    Args:
        memory_limit_bytes: of one rank, drawn beside its memory.

    Raises:
        CompileError: plotly or Jinja2 is missing.
    """
    return _written(path, lambda: page_data(program, memory_limit_bytes))


def write_sample_report(sampler: "Sampler", path: str | Path, steps: int, quality: Quality | None) -> Path:
    """Write the page of a sampler's first steps, and of its quality where that was measured; the file.

    Raises:
        CompileError: plotly or Jinja2 is missing.
    """
    return _written(path, lambda: sample_data(sampler, steps, quality))


def _written(path: str | Path, data: Callable[[], dict[str, Any]]) -> Path:
    try:
        from jinja2 import Environment, StrictUndefined
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped,unused-ignore]
    except ImportError as error:
        raise CompileError(f"reports need {error.name}: pip install 'fxpipe[report]'") from error
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    template = Environment(undefined=StrictUndefined, autoescape=True).from_string(TEMPLATE.read_text())
    page = template.render(plotly=get_plotlyjs(), **data())
    path.write_text(page, encoding="utf-8")
    return path


def page_data(program: "Program", memory_limit_bytes: int | None) -> dict[str, Any]:
    """What the template shows: texts, and figures as JSON that is safe inside a script element."""
    timeline, filled = program.simulate(), None if program.filled is None else program.simulate(filled=True)
    components = [component.name for component in program.blocks.components]
    drawn = {
        "timeline": figures.timeline_figure(timeline, components),
        "load": figures.load_figure(filled or timeline, components),
        "blocks": figures.blocks_figure(program.plan, program.blocks, program.block_seconds),
        "traffic": figures.traffic_figure(program.traffic()),
        "memory": figures.memory_figure(filled or timeline, memory_limit_bytes),
    }
    if filled is not None:
        drawn["filled"] = figures.timeline_figure(filled, components)
    if any(o.seconds is not None for o in program.plan.outcomes):
        drawn["frontier"] = figures.frontier_figure(program.plan.outcomes, memory_limit_bytes)
    tiles = _tiles(program, timeline, filled, memory_limit_bytes)
    return _page(program, program.model, program.plan.notes, tiles, drawn)


def sample_data(sampler: "Sampler", steps: int, quality: Quality | None) -> dict[str, Any]:
    """What the template shows of a sampler, which has no blocks."""
    timeline, form = sampler.simulate(steps), sampler.step.sequence(steps)[-1]
    drawn = {
        "timeline": figures.timeline_figure(timeline),
        "load": figures.load_figure(timeline),
        "traffic": figures.traffic_figure(sampler.traffic(form)),
        "memory": figures.memory_figure(timeline, None),
    }
    if quality is not None:
        drawn["quality"] = figures.quality_figure(quality)
    peak = max(timeline.peak_bytes)
    tiles = [
        (counted(steps, "step"), human_seconds(timeline.makespan_seconds), str(sampler.plan.how)),
        ("idle", f"{timeline.bubble_ratio:.1%}", f"of {timeline.num_ranks} ranks' time"),
        ("traffic", human_bytes(sampler.traffic(form).total_bytes), f"of a {form} step"),
        ("peak memory", human_bytes(peak), f"on rank {timeline.peak_bytes.index(peak)}"),
    ]
    return _page(sampler, sampler.denoiser.module, sampler.notes, tiles, drawn)


def _page(
    made: "Program | Sampler", model: nn.Module, notes: Sequence[str], tiles: list[Tile], drawn: dict[str, Any]
) -> dict[str, Any]:
    return {
        "title": type(model).__name__,
        "tiles": tiles,
        "figures": json.dumps(drawn).replace("</", "<\\/"),
        "names": list(drawn),
        "plan": "\n".join(line for line in made.plan.summary().splitlines() if not line.startswith("  note: ")),
        "notes": list(notes),
        "schedule": made.schedule.text(),
    }


def _tiles(program: "Program", first: Timeline, filled: Timeline | None, limit: int | None) -> list[Tile]:
    timeline, traffic = filled or first, program.traffic()
    unfilled = "" if filled is None else f"{human_seconds(first.makespan_seconds)} with the frozen work first"
    peak = max(timeline.peak_bytes)
    against = f"on rank {timeline.peak_bytes.index(peak)}"
    if limit is not None:
        against += f", {'over' if peak > limit else 'within'} the limit of {human_bytes(limit)}"
    return [
        ("step", human_seconds(timeline.makespan_seconds), unfilled),
        ("bubbles", f"{timeline.bubble_ratio:.1%}", f"of {timeline.num_ranks} ranks' time"),
        ("traffic", human_bytes(traffic.total_bytes), f"in {counted(len(traffic.messages), 'message')}"),
        ("peak memory", human_bytes(peak), against),
    ]
