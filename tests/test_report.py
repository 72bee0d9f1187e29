"""The report: figures by hand, a page without network, and both colour schemes in a real browser where there is one."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import fxpipe
from fxpipe.plan.timeline import Event, Timeline
from fxpipe.plan.tuning import Outcome, frontier
from fxpipe.show.report.figures import (
    blocks_figure,
    busy_spans,
    frontier_figure,
    gaps,
    load_figure,
    memory_figure,
    timeline_figure,
    traffic_figure,
)
from tests.frozen_steps import SLOW, FrozenStep
from tests.unet import TinyUNet

pytest.importorskip("plotly", reason="reports are an extra")
pytest.importorskip("jinja2", reason="reports are an extra")

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-background-networking --disable-component-update --no-first-run "
    "--enable-logging=stderr --v=0 --window-size=1300,2000 --virtual-time-budget=20000 --dump-dom"
).split()


@pytest.fixture(scope="module")
def program() -> fxpipe.Program:
    return fxpipe.compile(TinyUNet("no_grad"), 2, batch_size=4, microbatches=2, schedule="wave")


@pytest.fixture(scope="module")
def page(program: fxpipe.Program, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return program.report(tmp_path_factory.mktemp("report") / "deep" / "report.html", memory_limit_bytes=9000)


def test_gaps() -> None:
    assert gaps([(1.0, 2.0), (3.0, 4.0)], 5.0) == [(0.0, 1.0), (2.0, 3.0), (4.0, 5.0)]
    assert gaps([(0.0, 2.0), (2.0, 5.0)], 5.0) == []
    assert gaps([], 2.0, 1.0) == [(1.0, 2.0)]


def test_waits_are_no_work() -> None:
    events = (Event(0, "0F0", "F", 0.0, 3.0), Event(0, "0F0", "wait", 0.0, 2.0, 1, 0), Event(0, "0B0", "B", 3.0, 4.0))
    timeline = Timeline(events, 1)
    assert [(e.action, span) for e, span in busy_spans(timeline, 0)] == [("0F0", (2.0, 3.0)), ("0B0", (3.0, 4.0))]
    bars = {trace["color"]: trace for trace in timeline_figure(timeline)["data"]}
    assert (bars["bubble"]["base"], bars["bubble"]["x"]) == ([0.0], [2000.0])
    assert bars["F"]["text"] == ["0F0"]


def test_every_rank_is_filled_by_work_and_bubbles(program: fxpipe.Program) -> None:
    timeline = program.simulate()
    total = [0.0, 0.0]
    for trace in load_figure(timeline)["data"]:
        total = [a + b for a, b in zip(total, trace["y"], strict=True)]
    assert total == pytest.approx([timeline.makespan_seconds * 1e3] * 2)
    drawn: dict[str, float] = {}
    for trace in timeline_figure(timeline)["data"]:
        for row, length in zip(trace["y"], trace["x"], strict=True):
            drawn[row] = drawn.get(row, 0.0) + length
    assert [drawn["rank 0"], drawn["rank 1"]] == pytest.approx(total)


def _blocks(program: fxpipe.Program) -> dict[str, Any]:
    return blocks_figure(program.plan, program.blocks, program.block_seconds)


def test_skips_within_and_across_ranks_are_told_apart(program: fxpipe.Program) -> None:
    names = [trace.get("name", "") for trace in _blocks(program)["data"]]
    assert "skip within a rank (2)" in names
    linear = fxpipe.compile(TinyUNet("no_grad"), 2, batch_size=4, microbatches=2, schedule="1f1b")
    names = [trace.get("name", "") for trace in _blocks(linear)["data"]]
    assert any(name.startswith("skip across ranks") for name in names)
    shown = [text for trace in _blocks(linear)["data"] for text in trace.get("text", [])]
    assert sorted(map(int, shown)) == list(range(len(linear.blocks.blocks)))


def test_traffic_by_channel_and_kind(program: fxpipe.Program) -> None:
    data = traffic_figure(program.traffic())["data"]
    assert {name for bars in data for name in bars["x"]} == {"0 → 1", "1 → 0"}
    scale = program.traffic().kinds["main"] / sum(data[0]["y"])
    assert sum(sum(bars["y"]) for bars in data) * scale == pytest.approx(program.traffic().total_bytes)


def test_memory_with_and_without_a_limit(program: fxpipe.Program) -> None:
    timeline = program.simulate()
    assert [trace["name"] for trace in memory_figure(timeline, None)["data"]] == ["rank 0", "rank 1"]
    *_, limit = memory_figure(timeline, 2**30)["data"]
    assert (limit["name"], limit["y"]) == ("limit", [1.0, 1.0])


@pytest.fixture(scope="module")
def frozen() -> fxpipe.Program:
    return fxpipe.compile(FrozenStep(), 2, batch_size=4, microbatches=2, data_parallel=1, cost_model=SLOW)


def test_frozen_work_is_coloured_by_component(frozen: fxpipe.Program, tmp_path: Path) -> None:
    names = [component.name for component in frozen.blocks.components]
    assert len(names) >= 2
    figures = Parts(frozen.report(tmp_path / "frozen.html"))
    for figure in ("timeline", "filled", "load"):
        drawn = {trace["name"]: trace["color"] for trace in figures[figure]["data"]}
        assert {name: drawn.get(f"frozen {name}") for name in names} == {n: f"frozen {i}" for i, n in enumerate(names)}
    seconds = frozen.simulate(filled=True).makespan_seconds
    assert figures["filled"]["layout"]["xaxis"]["range"][1] == pytest.approx(seconds * 1e3)


def outcome(seconds: float | None, wires: int | None, peak: int | None) -> Outcome:
    return Outcome(1, 2, "wave", 4, 4, True, False, 1e-3, seconds, peak, wires, "")


def test_the_frontier_is_what_no_other_way_beats_in_all() -> None:
    fast, lean, small = outcome(0.01, 90, 90), outcome(0.02, 10, 90), outcome(0.03, 90, 10)
    beaten, unknown = outcome(0.02, 20, 90), outcome(None, None, None)
    ways = [fast, beaten, small, unknown, lean]
    assert frontier(ways) == [fast, lean, small]
    drawn = {trace["name"]: trace["y"] for trace in frontier_figure(ways, None)["data"]}
    assert drawn == {"chosen": [10.0], "frontier": [30.0, 20.0], "another way is better in all": [20.0]}


class Parts(dict[str, Any]):
    """The figures a page holds, read back from it."""

    def __init__(self, page: Path) -> None:
        (line,) = re.findall(r"^const figures = (.*);$", page.read_text(encoding="utf-8"), re.MULTILINE)
        super().__init__(json.loads(line))


def test_a_page_is_complete_and_needs_no_network(page: Path, program: fxpipe.Program) -> None:
    text = page.read_text(encoding="utf-8")
    assert set(Parts(page)) == {"timeline", "filled", "load", "memory", "blocks", "traffic", "frontier"}
    assert all(f'<div id="{name}"' in text for name in Parts(page))
    markup = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", markup)
    assert "Plotly" in text
    assert "0F0" in markup
    assert "the limit of 8.8 KiB" in markup
    assert "{{" not in markup


def test_names_are_escaped(program: fxpipe.Program, tmp_path: Path) -> None:
    class Odd(TinyUNet):
        pass

    Odd.__name__ = "</script><b>"
    odd = fxpipe.compile(Odd(), 1, batch_size=2, microbatches=1)
    assert "</script><b>" not in odd.report(tmp_path / "odd.html").read_text(encoding="utf-8")


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
@pytest.mark.parametrize(("scheme", "setting"), [("dark", 0), ("light", 1)])
def test_a_browser_draws_it_without_complaint(page: Path, tmp_path: Path, scheme: str, setting: int) -> None:
    assert BROWSER is not None
    own = [f"--user-data-dir={tmp_path}", f"--blink-settings=preferredColorScheme={setting}", page.as_uri()]
    done = subprocess.run([BROWSER, *FLAGS, *own], capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr
    assert f'data-drawn="{scheme}"' in done.stdout
    assert done.stdout.count('class="main-svg"') >= len(Parts(page))
