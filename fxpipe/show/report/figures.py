"""The report's figures, as plain data for plotly.js: one function each, from a program's artefacts.

Colours are names of the page's palette ("forward", "rank 3", ...): the page turns them into light or dark ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fxpipe.plan.block_graph import BlockGraph, Edge, human_bytes
from fxpipe.plan.rank_program import KINDS as MESSAGE_KINDS
from fxpipe.plan.rank_program import Traffic
from fxpipe.plan.sample_quality import Quality
from fxpipe.plan.timeline import Event, Timeline, human_seconds
from fxpipe.plan.tuning import Outcome, frontier
from fxpipe.show.trace_format import NAMES

if TYPE_CHECKING:
    from fxpipe.plan.plan import Plan

Figure = dict[str, Any]
Span = tuple[float, float]
ROW, CHANNEL_ROW = 26, 18  # pixels
_ROUNDING = 120.0  # decibels


def timeline_figure(timeline: Timeline, components: Sequence[str] = ()) -> Figure:
    """All ranks against time, compute above channels and collectives; bubbles are drawn too.

    Frozen work is told apart by component: an action `2T5` or `2.0:3T4:8` is of `components[2]`.
    """
    names = _names(components)
    spans: dict[str, list[tuple[str, Span, str, str]]] = {}
    for rank in range(timeline.num_ranks):
        row, pieces = f"rank {rank}", busy_spans(timeline, rank)
        for event, piece in pieces:
            kind = _kind(event, names)
            text = f"{event.action} on rank {rank}: {names[kind]}"
            spans.setdefault(kind, []).append((row, piece, event.action, text))
        for gap in gaps([piece for _, piece in pieces], timeline.makespan_seconds):
            spans.setdefault("bubble", []).append((row, gap, "", f"rank {rank} waits"))
    for event in timeline.transfers:
        row, span = _channel((event.rank, event.peer)), (event.start_seconds, event.end_seconds)
        text = f"{event.label}, {human_bytes(event.num_bytes)}, after {event.action}"
        spans.setdefault("transfer", []).append((row, span, "", text))
    for event in timeline.collectives:
        row, span = _collectives(event.rank), (event.start_seconds, event.end_seconds)
        spans.setdefault(event.kind, []).append((row, span, "", f"{event.label}, issued in {event.action}"))
    rows = [f"rank {rank}" for rank in range(timeline.num_ranks)]
    channels = [_channel(channel) for channel in timeline.channel_bytes]
    channels += [_collectives(rank) for rank, num_bytes in enumerate(timeline.reduced_bytes) if num_bytes]
    order = [kind for kind in (*names, "bubble") if kind in spans]
    layout = {
        "barmode": "overlay",
        "bargap": 0.12,
        "height": 110 + ROW * len(rows) + CHANNEL_ROW * len(channels),
        "xaxis": {"title": {"text": "milliseconds"}, "range": [0, timeline.makespan_seconds * 1e3]},
        "yaxis": {"categoryorder": "array", "categoryarray": [*rows, *channels][::-1], "fixedrange": True},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"},
    }
    return {"data": [_bars(kind, names.get(kind, kind), spans[kind]) for kind in order], "layout": layout}


def _names(components: Sequence[str]) -> dict[str, str]:
    """What colours stand for: kinds of events, and frozen components by number."""
    return {**NAMES, **{f"frozen {i}": f"frozen {name}" for i, name in enumerate(components)}}


def _kind(event: Event, names: Mapping[str, str]) -> str:
    """The colour of an action: its letter, or the frozen component it is of."""
    frozen = f"frozen {re.split('[T.]', event.action)[0]}"
    return frozen if event.kind == "T" and frozen in names else event.kind


def _bars(kind: str, name: str, spans: Sequence[tuple[str, Span, str, str]]) -> Figure:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "color": kind,
        "y": [row for row, _, _, _ in spans],
        "base": [start * 1e3 for _, (start, _), _, _ in spans],
        "x": [(end - start) * 1e3 for _, (start, end), _, _ in spans],
        "text": [label for _, _, label, _ in spans],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "constraintext": "none",
        "hovertext": [f"{text}<br>{human_seconds(end - start)}" for _, (start, end), _, text in spans],
        "hoverinfo": "text",
    }


def busy_spans(timeline: Timeline, rank: int) -> list[tuple[Event, Span]]:
    """The stretches of each of a rank's actions in which it computes."""
    waits = [(e.start_seconds, e.end_seconds) for e in timeline.waits if e.rank == rank and e.seconds > 0]
    found = []
    for action in timeline.actions:
        if action.rank == rank:
            inside = [w for w in waits if action.start_seconds <= w[0] and w[1] <= action.end_seconds]
            pieces = gaps(inside, action.end_seconds, action.start_seconds)
            found += [(action, piece) for piece in pieces]
    return found


def gaps(spans: Iterable[Span], end: float, start: float = 0.0) -> list[Span]:
    """What non-overlapping spans leave of [start, end]."""
    found, free = [], start
    for first, last in sorted(spans):
        if first > free:
            found.append((free, first))
        free = max(free, last)
    return [*found, (free, end)] if end > free else found


def load_figure(timeline: Timeline, components: Sequence[str] = ()) -> Figure:
    """Seconds per rank by kind of action; what is missing to the whole step is idle. `components` as above."""
    names = _names(components)
    sums: dict[str, list[float]] = {}
    for rank in range(timeline.num_ranks):
        for event, (start, end) in busy_spans(timeline, rank):
            sums.setdefault(_kind(event, names), [0.0] * timeline.num_ranks)[rank] += (end - start) * 1e3
    sums["bubble"] = [(timeline.makespan_seconds - busy) * 1e3 for busy in timeline.busy_seconds]
    ranks = [f"rank {rank}" for rank in range(timeline.num_ranks)]
    data = [
        {"type": "bar", "name": names.get(kind, kind), "color": kind, "x": ranks, "y": sums[kind],
         "hovertemplate": "%{x}: %{y:.4g} ms"}
        for kind in (*names, "bubble") if kind in sums
    ]  # fmt: skip
    return {"data": data, "layout": {"barmode": "stack", "yaxis": {"title": {"text": "milliseconds"}}, "height": 320}}


def memory_figure(timeline: Timeline, limit_bytes: int | None) -> Figure:
    """Bytes per rank over time, and the limit."""
    scale, unit = _unit(max([*timeline.peak_bytes, limit_bytes or 0]))
    data: list[Figure] = []
    for memory in timeline.memory:
        parts = "<br>".join(f"{name} {human_bytes(size)}" for name, size in memory.at_peak.items())
        data.append(
            {
                "type": "scatter", "mode": "lines", "name": f"rank {memory.rank}", "color": f"rank {memory.rank}",
                "line": {"shape": "hv", "width": 1.5},
                "x": [seconds * 1e3 for seconds, _ in memory.points], "y": [size / scale for _, size in memory.points],
                "hovertemplate": f"rank {memory.rank}: %{{y:.4g}} {unit}<extra>peak {human_bytes(memory.peak_bytes)}"
                f"<br>{parts}</extra>",
            }
        )  # fmt: skip
    if limit_bytes is not None:
        span = [0, timeline.makespan_seconds * 1e3]
        level = [limit_bytes / scale] * 2
        data.append(
            {"type": "scatter", "mode": "lines", "name": "limit", "color": "limit", "x": span, "y": level,
             "line": {"dash": "dash"}, "hovertemplate": f"limit {human_bytes(limit_bytes)}<extra></extra>"}
        )  # fmt: skip
    axes = {"xaxis": {"title": {"text": "milliseconds"}}, "yaxis": {"title": {"text": unit}, "rangemode": "tozero"}}
    return {"data": data, "layout": {**axes, "height": 320}}


def _unit(size: float) -> tuple[float, str]:
    exponent = next((e for e in (3, 2, 1) if size >= 1024**e), 0)
    return 1024.0**exponent, ("B", "KiB", "MiB", "GiB")[exponent]


def blocks_figure(plan: Plan, graph: BlockGraph, seconds: Sequence[float]) -> Figure:
    """The blocks as a U: encoder down the left, decoder up the right, so that nested skips are level."""
    staged, blocks = plan.staged, graph.blocks
    skips = _skips(graph.edges)
    fold = sum(p + c for p, c in skips) / (2 * len(skips)) if skips else (len(blocks) - 1) / 2
    place = {b.index: _on_u(b.index, fold, len(blocks)) for b in blocks}
    rank = {b.index: staged.stage_ranks[staged.stage_of_block[b.index]] for b in blocks}
    data = [_line("main", [place[b.index] for b in blocks], "backbone", {"width": 2})]
    for name, crossing in (("skip within a rank", False), ("skip across ranks", True)):
        pairs = [(p, c) for p, c in skips if (rank[p] != rank[c]) == crossing]
        points = [xy for p, c in pairs for xy in (place[p], place[c], (None, None))]
        dash = {"width": 1.5, "dash": "dash" if crossing else "solid"}
        if pairs:
            data.append(_line("crossing" if crossing else "collocated", points, f"{name} ({len(pairs)})", dash))
            data.append(_skip_hover([(place[p], place[c], skips[p, c]) for p, c in pairs]))
    total = sum(seconds) or 1.0
    for stage in range(staged.num_stages):
        own = list(staged.blocks(stage))
        if own:
            owner = ", ".join(map(str, staged.stage_ranks[stage]))
            data.append(
                {
                    "type": "scatter", "mode": "markers+text", "name": f"stage {stage} on rank {owner}",
                    "color": f"rank {owner}", "x": [place[b][0] for b in own], "y": [place[b][1] for b in own],
                    "marker": {"size": 20, "symbol": "square"}, "text": [str(b) for b in own],
                    "hovertext": [
                        f"{blocks[b].name}<br>stage {stage} on rank {owner}<br>{seconds[b] / total:.1%} of "
                        "the backbone's time" for b in own
                    ],
                    "hoverinfo": "text",
                }
            )  # fmt: skip
    hidden = {"visible": False, "range": [-0.25, 1.25]}
    height = 160 + 22 * int(max(fold, len(blocks) - fold))
    return {"data": data, "layout": {"xaxis": hidden, "yaxis": {"visible": False}, "height": height}}


def _skips(edges: Iterable[Edge]) -> dict[tuple[int, int], Edge]:
    """Skips by (producer, consumer)."""
    return {
        (edge.producer, consumer): edge
        for edge in edges
        for consumer, kind in zip(edge.consumers, edge.kinds, strict=True)
        if kind == "skip" and isinstance(edge.producer, int) and isinstance(consumer, int)
    }


def _on_u(index: int, fold: float, num_blocks: int) -> tuple[float, float]:
    """Left arm, right arm, both of height one, and a round bottom where they meet."""
    away = abs(index - fold)
    bend = max(0.0, 1 - away / 3) ** 2 * 0.5
    arm = fold if index < fold else num_blocks - 1 - fold
    return (bend if index < fold else 1 - bend, away / max(arm, 1))


def _line(color: str, points: Sequence[tuple[float | None, float | None]], name: str, line: Figure) -> Figure:
    x, y = [x for x, _ in points], [y for _, y in points]
    return {"type": "scatter", "mode": "lines", "name": name, "color": color, "x": x, "y": y, "line": line,
            "hoverinfo": "skip"}  # fmt: skip


def _skip_hover(skips: Sequence[tuple[tuple[float, float], tuple[float, float], Edge]]) -> Figure:
    """Invisible points in the middle of the lines: lines themselves have no text."""
    middles = [((a[0] + b[0]) / 2, (a[1] + b[1]) / 2) for a, b, _ in skips]
    texts = [f"{edge.name}: {human_bytes(edge.bytes_per_sample)} per sample" for _, _, edge in skips]
    return {"type": "scatter", "mode": "markers", "color": "none", "showlegend": False, "hoverinfo": "text",
            "x": [x for x, _ in middles], "y": [y for _, y in middles], "hovertext": texts,
            "marker": {"size": 14, "opacity": 0}}  # fmt: skip


def traffic_figure(traffic: Traffic) -> Figure:
    """Bytes per channel by kind."""
    rows = traffic.by_channel_and_kind()
    scale, unit = _unit(max([0, *traffic.channels.values()]))
    names = [_channel(channel) for channel in sorted(rows)]
    data: list[Figure] = []
    for kind in MESSAGE_KINDS:
        if traffic.kinds[kind]:
            sizes = [rows[channel].get(kind, 0) / scale for channel in sorted(rows)]
            data.append({"type": "bar", "name": kind, "color": kind, "x": names, "y": sizes,
                         "hovertemplate": f"%{{x}}: %{{y:.4g}} {unit}"})  # fmt: skip
    layout = {"barmode": "relative", "yaxis": {"title": {"text": unit}}, "xaxis": {"type": "category"}, "height": 320}
    return {"data": data, "layout": layout}


def frontier_figure(outcomes: Sequence[Outcome], limit_bytes: int | None) -> Figure:
    """What the tuner predicted: a step's time against its bytes on wires; a point's size is the fullest rank's memory.

    Nothing is better than a way of the frontier in all three. The first outcome is the chosen one.
    """
    known = [o for o in outcomes if o.seconds is not None and o.peak_bytes is not None]
    chosen, best = outcomes[0], set(map(id, frontier(known)))
    most = max([limit_bytes or 0, *(o.peak_bytes or 0 for o in known)]) or 1
    groups = {
        "other": ("another way is better in all", [o for o in known if id(o) not in best]),
        "F": ("frontier", [o for o in known if id(o) in best and o is not chosen]),
        "crossing": ("chosen", [o for o in known if o is chosen]),
    }
    scale, unit = _unit(max([0, *(o.wire_bytes or 0 for o in known)]))
    data: list[Figure] = [
        {
            "type": "scatter", "mode": "markers", "name": name, "color": color,
            "x": [(o.wire_bytes or 0) / scale for o in group], "y": [(o.seconds or 0.0) * 1e3 for o in group],
            "marker": {
                "size": [6 + 22 * ((o.peak_bytes or 0) / most) ** 0.5 for o in group],
                "opacity": 0.45 if color == "other" else 0.9,
            },
            "hovertext": [
                f"{o}<br>{human_seconds(o.seconds or 0.0)}, {human_bytes(o.wire_bytes or 0)} on wires, "
                f"peak {human_bytes(o.peak_bytes or 0)}<br>{o.why or 'chosen'}" for o in group
            ],
            "hoverinfo": "text",
        }
        for color, (name, group) in groups.items() if group
    ]  # fmt: skip
    axes = {"xaxis": {"title": {"text": f"{unit} on wires"}, "rangemode": "tozero"},
            "yaxis": {"title": {"text": "milliseconds"}, "type": "log"}}  # fmt: skip
    return {"data": data, "layout": {**axes, "height": 360}}


def quality_figure(quality: Quality) -> Figure:
    """What was measured: nearness to one device's result against the predicted time of a call.

    Nothing that was measured is faster and nearer than a way of the frontier, which a line joins. What is nearer than
    rounding tells is drawn where that begins.
    """
    best = quality.frontier
    groups = {
        "other": ("another way is faster and nearer", [o for o in quality.ways if o not in best and not o.chosen]),
        "F": ("frontier", [o for o in best if not o.chosen]),
        "crossing": ("chosen", [o for o in quality.ways if o.chosen]),
    }
    data: list[Figure] = [
        {"type": "scatter", "mode": "lines", "name": "frontier", "color": "main", "showlegend": False,
         "x": [o.seconds * 1e3 for o in best], "y": [min(o.decibels, _ROUNDING) for o in best],
         "line": {"shape": "hv", "width": 1}, "hoverinfo": "skip"},
        *({"type": "scatter", "mode": "markers", "name": name, "color": color,
           "x": [o.seconds * 1e3 for o in group], "y": [min(o.decibels, _ROUNDING) for o in group],
           "marker": {"size": 11, "symbol": ["diamond" if o.exact else "circle" for o in group]},
           "hovertext": [str(o) for o in group], "hoverinfo": "text"}
          for color, (name, group) in groups.items() if group),
    ]  # fmt: skip
    axes = {"xaxis": {"title": {"text": f"milliseconds of a call of {quality.steps} steps, predicted"}},
            "yaxis": {"title": {"text": "PSNR to one device, dB"}}}  # fmt: skip
    return {"data": data, "layout": {**axes, "height": 360}}


def _channel(channel: tuple[int, int]) -> str:
    return f"{channel[0]} → {channel[1]}"


def _collectives(rank: int) -> str:
    return f"rank {rank} collectives"
