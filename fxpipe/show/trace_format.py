"""Timelines in the Chrome trace event format, for Perfetto and chrome://tracing.

    process rank 0   thread compute    |0F0   |0F1   |            an arrow from a send to the end of the wait for it
                     thread to rank 1     |h[0] main|             counters: bytes of memory over time
                     thread collectives        |all-reduce|
    process rank 0, measured           |0F0     |0F1  |           a recorded step beside the predicted one

Format: "Trace Event Format", Google, 2016; times are in microseconds.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fxpipe.plan.actions import KINDS
from fxpipe.plan.timeline import COLLECTIVES, Event, Timeline

COMPUTE = 0
NAMES = {**KINDS, "T": "frozen work", "end": "end of step", "wait": "wait", "transfer": "transfer", **COLLECTIVES}


def write_trace(timeline: Timeline, path: str | Path, measured: Timeline | None = None) -> Path:
    """Write the timeline as JSON, with a `measured` one as processes of its own; the file that was written."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    events = trace_events(timeline)
    if measured is not None:
        events += [_beside(event, timeline.num_ranks) for event in trace_events(measured)]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return path


def trace_events(timeline: Timeline) -> list[dict[str, Any]]:
    """The events as plain data."""
    return [*_names(timeline), *_actions(timeline), *_messages(timeline), *_collectives(timeline), *_counters(timeline)]


def _beside(event: dict[str, Any], num_ranks: int) -> dict[str, Any]:
    """An event of the measured step: after the predicted one's processes, and with arrows of its own."""
    moved = {**event, "pid": num_ranks + event["pid"]}
    if "id" in moved:
        moved["id"] = f"measured {moved['id']}"
    if event["name"] == "process_name":
        moved["args"] = {"name": f"{event['args']['name']}, measured"}
    if event["name"] == "process_sort_index":
        moved["args"] = {"sort_index": moved["pid"]}
    return moved


def _names(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for rank in range(timeline.num_ranks):
        yield _meta("process_name", rank, COMPUTE, name=f"rank {rank}")
        yield _meta("process_sort_index", rank, COMPUTE, sort_index=rank)
        yield _meta("thread_name", rank, COMPUTE, name="compute")
    for source, target in sorted({(event.rank, event.peer) for event in timeline.transfers}):
        yield _meta("thread_name", source, _thread(target), name=f"to rank {target}")
        yield _meta("thread_sort_index", source, _thread(target), sort_index=_thread(target))
    for rank in sorted({event.rank for event in timeline.collectives}):
        yield _meta("thread_name", rank, _thread(timeline.num_ranks), name="collectives")


def _meta(what: str, rank: int, thread: int, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": arguments}


def _thread(target: int) -> int:
    return 1 + target


def _actions(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for event in timeline.actions:
        yield _slice(event, event.action, COMPUTE, {"kind": NAMES.get(event.kind, event.action)})
    for event in timeline.waits:
        if event.seconds > 0:
            name = f"wait for rank {event.peer}" if event.peer >= 0 else "wait for a collective"
            yield _slice(event, name, COMPUTE, {"message": event.label, "bytes": event.num_bytes})


def _messages(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """A slice on the channel's thread, and an arrow from it to the end of the wait."""
    reads = {event.edge: event for event in timeline.waits}
    for event in timeline.transfers:
        arguments = {"bytes": event.num_bytes, "edge": event.edge, "action": event.action}
        yield _slice(event, event.label, _thread(event.peer), arguments)
        if event.edge in reads:
            flow = {"cat": "message", "name": "message", "id": event.edge}
            start = {"pid": event.rank, "tid": _thread(event.peer), "ts": event.start_seconds * 1e6}
            end = {"pid": event.peer, "tid": COMPUTE, "ts": reads[event.edge].end_seconds * 1e6}
            yield {"ph": "s", **flow, **start}
            yield {"ph": "f", "bp": "e", **flow, **end}


def _collectives(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for event in timeline.collectives:
        arguments = {"bytes": event.num_bytes, "edge": event.edge, "action": event.action}
        yield _slice(event, event.label, _thread(timeline.num_ranks), arguments)


def _counters(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for memory in timeline.memory:
        for seconds, size in memory.points:
            arguments = {"bytes": size}
            yield {"ph": "C", "name": "memory", "pid": memory.rank, "ts": seconds * 1e6, "args": arguments}


def _slice(event: Event, name: str, thread: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": event.kind,
        "pid": event.rank,
        "tid": thread,
        "ts": event.start_seconds * 1e6,
        "dur": event.seconds * 1e6,
        "args": arguments,
    }
