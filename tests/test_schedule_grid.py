"""The coloured grid: the same text as the plain one, a colour per kind, bold every second micro-batch."""

from io import StringIO

import pytest
from rich.console import Console

from fxpipe.plan.schedule import Schedule
from fxpipe.plan.schedule_grid import STYLES, grid, painted
from passes.schedules.named import make_schedule
from passes.schedules.policies import POLICIES
from tests.test_schedule import chain


def made(name: str) -> Schedule:
    return make_schedule(name, chain(8, 5, 2), [0, 1, 2, 3, 3, 2, 1, 0], [1] * 8, [2] * 8)


def printed(schedule: Schedule, *, terminal: bool, width: int = 120) -> str:
    out = StringIO()
    colours = "standard" if terminal else None
    Console(file=out, force_terminal=terminal, width=width, color_system=colours).print(schedule)
    return out.getvalue()


@pytest.mark.parametrize("name", POLICIES)
def test_without_a_terminal_nothing_but_the_grid_is_printed(name: str) -> None:
    schedule = made(name)
    assert painted(grid(schedule)).plain == grid(schedule) == str(schedule)
    assert printed(schedule, terminal=False) == str(schedule) + "\n"
    assert "\x1b[" in printed(schedule, terminal=True)


def test_a_terminal_decides_the_width() -> None:
    lines = printed(made("wave"), terminal=False, width=60).splitlines()
    assert max(map(len, lines)) <= 60
    assert len(lines) > len(str(made("wave")).splitlines())


def test_a_cell_has_the_colour_of_its_kind_and_an_action_one_style_over_bands() -> None:
    text = painted(
        "schedule x: 1 stage, 2 micro-batches\ntime 0\nrank 0 0T0 0F1 0B1\ntime 3\nrank 0 ---   . 0I0 0W1 0R0 0R0:1"
    )
    styles = {text.plain[span.start : span.end]: str(span.style) for span in text.spans}
    assert styles["0T0"] == STYLES["T"]
    assert styles["0F1"] == STYLES["F"] + " bold"
    assert styles["---"] == styles["0B1"] == STYLES["B"] + " bold"
    assert styles["."] == "dim"
    assert (styles["0I0"], styles["0W1"], styles["0R0"]) == (STYLES["I"], STYLES["W"] + " bold", STYLES["R"])
    assert styles["0R0:1"] == STYLES["R"]
    assert len(set(STYLES.values())) == len(STYLES)


def test_the_text_of_a_schedule_is_painted_too() -> None:
    text = made("zb-h1").text()
    assert painted(text).plain == text
    assert any(str(span.style) == STYLES["W"] for span in painted(text).spans)
