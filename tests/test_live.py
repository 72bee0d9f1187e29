"""What a run says of itself, and traces of steps as they run beside the predicted ones."""

import io
import json
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

import fxpipe
from fxpipe.run.live import Live
from tests.distributed import run_processes
from tests.toy_model import frozen, toy

LINE = re.compile(
    r"step (\d+)/6  loss (\d\.\d{6})  [\d.e+]+ samples/s  [\d.]+ \S+ a step \(predicted [\d.]+ \S+ on A100-80GB\)  "
    r"sent [\d.]+ \S+ a step  [\d.]+ [GM]i?B"
)


def program() -> fxpipe.Program:
    torch.manual_seed(0)
    return fxpipe.compile(toy(), 2, batch_size=4, microbatches=2, schedule="1f1b", cost_model="A100-80GB")


def lines(*, terminal: bool, steps: int = 6) -> tuple[list[str], list[float]]:
    made, text = program(), io.StringIO()
    engine, batch = made.local_engine(), made.model.example_inputs(4)  # type: ignore[operator]
    optimizer = torch.optim.SGD(made.model.parameters(), lr=0.1)
    console = Console(file=text, force_terminal=terminal, width=200, highlight=False)
    with Live(engine, steps, every=2, console=console) as live:
        losses = [float(loss) for loss in engine.train([batch] * steps, optimizer, live=live)]
    return text.getvalue().splitlines(), losses


def test_without_a_terminal_there_is_a_line_every_so_many_steps() -> None:
    shown, losses = lines(terminal=False)
    found = [LINE.fullmatch(line) for line in shown]
    assert [match and int(match[1]) for match in found] == [2, 4, 6], shown
    assert [match and float(match[2]) for match in found] == pytest.approx([losses[i] for i in (1, 3, 5)], abs=1e-6)


def test_on_a_terminal_the_last_line_stays() -> None:
    shown, _ = lines(terminal=True)
    assert any(line.startswith("step 6/6  loss ") for line in shown) or "step 6/6" in "".join(shown)


def test_bytes_and_samples_are_counted() -> None:
    made = program()
    engine, batch = made.local_engine(), made.model.example_inputs(4)  # type: ignore[operator]
    for _ in range(3):
        engine.step(batch)
    assert engine.num_samples == 12
    assert engine.bytes_sent == 3 * made.traffic().total_bytes


def names_of(path: Path) -> dict[int, str]:
    events = json.loads(path.read_text())["traceEvents"]
    return {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}


def test_a_trace_has_both_steps(tmp_path: Path) -> None:
    made = fxpipe.compile(frozen(), 2, batch_size=4, microbatches=2, schedule="1f1b")
    engine, batch = made.local_engine(), made.model.example_inputs(4)  # type: ignore[operator]
    engine.step(batch)
    with engine.trace(tmp_path / "trace.json"):
        engine.step(batch)
    engine.step(batch)
    assert names_of(tmp_path / "trace.json") == {
        0: "rank 0", 1: "rank 1", 2: "rank 0, measured", 3: "rank 1, measured",
    }  # fmt: skip
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    actions = {group: [] for group in ("predicted", "measured")}  # type: dict[str, list[str]]
    for event in sorted(events, key=lambda event: event.get("ts", 0.0)):
        if event["ph"] == "X" and event["tid"] == 0 and event["cat"] in "FBT":
            actions["measured" if event["pid"] >= 2 else "predicted"].append(event["name"])
    assert sorted(actions["measured"]) == sorted(actions["predicted"])


def traced(folder: str) -> list[str]:
    made = program()
    engine, batch = made.engine(), made.model.example_inputs(4)  # type: ignore[operator]
    with engine.live(2, every=1) as live:
        live(engine.step(batch))
        with engine.trace(f"{folder}/trace.json"):
            live(engine.step(batch))
    engine.close()
    return sorted(path.name for path in Path(folder).iterdir())


def test_ranks_of_a_launch_write_one_trace(tmp_path: Path) -> None:
    assert run_processes(2, traced, str(tmp_path)) == [["trace.json"]] * 2 or (tmp_path / "trace.json").exists()
    assert list(names_of(tmp_path / "trace.json").values())[2:] == ["rank 0, measured", "rank 1, measured"]
