"""What the compiler says of its steps while it is at work."""

import time
from typing import Any

import pytest
from rich.console import Console

import fxpipe
from fxpipe.show import progress
from tests.toy_model import ToyStep


def test_steps_are_named_on_request(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FXPIPE_PROGRESS", "on")
    seen: list[str] = []
    fxpipe.compile(ToyStep(), 2, batch_size=4, schedule="1f1b", observe=lambda name, artefact: seen.append(name))
    out, said = capsys.readouterr()
    assert out == ""
    assert said.startswith("capturing the model\n")
    assert "tracing stages and writing rank programs\n" in said
    assert set(seen) >= {"capture", "plan", "programs"}


@pytest.mark.parametrize(("asked", "rank"), [("", "0"), ("off", "0"), ("on", "1")])
def test_nothing_is_said_unasked(
    asked: str, rank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FXPIPE_PROGRESS", asked)
    monkeypatch.setenv("RANK", rank)
    fxpipe.compile(ToyStep(), 2, batch_size=4, schedule="1f1b")
    assert capsys.readouterr() == ("", "")


def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    def console(**options: Any) -> Console:
        return Console(**options, force_terminal=True, width=80)

    monkeypatch.setattr(progress, "Console", console)
    monkeypatch.delenv("FXPIPE_PROGRESS", raising=False)


def test_what_is_soon_done_is_not_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    on_a_terminal(monkeypatch)
    with progress.progress():
        progress.followed(None)("capture", None)
    assert capsys.readouterr() == ("", "")


def test_a_terminal_shows_the_step_and_is_cleared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_a_terminal(monkeypatch)
    monkeypatch.setattr(progress, "DELAY_SECONDS", 0.0)
    with progress.progress(), progress.progress():
        progress.followed(None)("costs", None)
        time.sleep(0.3)
    out, said = capsys.readouterr()
    assert out == ""
    assert "planning" in said
    assert said.endswith("\x1b[2K")
