"""Chrome traces of predictions and of real runs: valid, and with the same actions and messages."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fxpipe
from fxpipe.plan.timeline import Event, RankMemory, Timeline
from fxpipe.run.observe import Recording
from fxpipe.show.trace_format import trace_events, write_trace
from tests.unet import TinyUNet


@pytest.fixture(scope="module")
def program() -> fxpipe.Program:
    return fxpipe.compile(TinyUNet("no_grad"), 2, batch_size=4, microbatches=2, schedule="wave")


@pytest.fixture(scope="module")
def recorded(program: fxpipe.Program) -> Timeline:
    recording = Recording()
    engine = program.local_engine(observe=recording)
    engine.step(TinyUNet().example_inputs(4))
    first = recording.timeline()
    recording.clear()
    engine.step(TinyUNet().example_inputs(4))
    assert len(recording.timeline().events) == len(first.events)
    return recording.timeline()


def check_trace(events: list[dict[str, Any]]) -> None:
    """What viewers rely on: times, slices that nest on a thread, arrows with two ends inside a slice's thread."""
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        assert {"ph", "pid"} <= set(event)
        assert event["ph"] in "MXsfC"
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            slices.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in slices.values():
        ends: list[float] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while ends and ends[-1] <= start + 1e-6:
                ends.pop()
            assert not ends or end <= ends[-1] + 1e-6, "slices of one thread overlap without nesting"
            ends.append(end)
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    finishes = {event["id"]: event for event in events if event["ph"] == "f"}
    assert set(starts) == set(finishes)
    for edge, arrow in starts.items():
        assert arrow["ts"] <= finishes[edge]["ts"] + 1e-6
        for tip in (arrow, finishes[edge]):
            assert any(a - 1e-6 <= tip["ts"] <= b + 1e-6 for a, b in slices[tip["pid"], tip["tid"]])


def test_trace_of_a_prediction(program: fxpipe.Program, tmp_path: Path) -> None:
    path = program.trace(tmp_path / "deep" / "trace.json")
    events = json.loads(path.read_text())["traceEvents"]
    check_trace(events)
    assert sum(event["ph"] == "s" for event in events) == len(program.step.messages)
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {"rank 0", "rank 1"}
    assert any(event["ph"] == "C" for event in events)


def test_a_run_has_the_actions_and_messages_of_its_prediction(program: fxpipe.Program, recorded: Timeline) -> None:
    predicted = program.simulate()
    for rank in range(2):
        run = [(e.action, e.kind) for e in recorded.actions if e.rank == rank]
        assert run == [(e.action, e.kind) for e in predicted.actions if e.rank == rank]
    assert recorded.channel_bytes == predicted.channel_bytes == program.traffic().channels
    key = {(e.rank, e.peer, e.edge, e.action, e.num_bytes) for e in predicted.waits}
    assert {(e.rank, e.peer, e.edge, e.action, e.num_bytes) for e in recorded.waits} == key


def test_trace_of_a_run(recorded: Timeline, tmp_path: Path) -> None:
    events = json.loads(write_trace(recorded, tmp_path / "run.json").read_text())["traceEvents"]
    check_trace(events)
    assert 0 < recorded.makespan_seconds
    assert 0 <= recorded.bubble_ratio < 1


def test_observed_runs_compute_the_same(program: fxpipe.Program) -> None:
    batch = TinyUNet().example_inputs(4)
    plain, seen = program.local_engine(), program.local_engine(observe=Recording())
    assert torch.equal(plain.step(batch), seen.step(batch))


def test_events_of_a_trace() -> None:
    events = (
        Event(0, "0F0", "F", 0.0, 1.0),
        Event(0, "0F0", "transfer", 1.0, 3.0, 1, 7, 8, "h[0] main [2]"),
        Event(1, "1F0", "F", 0.0, 4.0),
        Event(1, "1F0", "wait", 0.0, 3.0, 0, 7, 8, "h[0] main [2]"),
    )
    found = trace_events(Timeline(events, 2, (RankMemory(0, ((0.0, 5),), {"state": 5}),)))
    check_trace(found)
    (arrow,) = (event for event in found if event["ph"] == "f")
    assert (arrow["pid"], arrow["tid"], arrow["ts"], arrow["bp"]) == (1, 0, 3e6, "e")
    (counter,) = (event for event in found if event["ph"] == "C")
    assert counter["args"] == {"bytes": 5}
