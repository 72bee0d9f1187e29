"""What the compiler says of its steps while it is at work."""

import time

import pytest

import fxpipe
from fxpipe.show import progress
from fxpipe.show.progress import Progress
from tests.toy_model import ToyStep


def test_steps_are_named_on_request(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "DELAY_SECONDS", 0.0)
    monkeypatch.setattr(progress, "_REFRESH_SECONDS", 0.001)
    monkeypatch.setenv("FXPIPE_PROGRESS", "on")
    seen: list[str] = []
    fxpipe.compile(ToyStep(), 2, batch_size=4, schedule="1f1b", observe=lambda name, artefact: seen.append(name))
    out, said = capsys.readouterr()
    assert out == ""
    assert said.startswith("capturing the model\n")
    assert "tracing stages and writing rank programs\n" in said
    assert set(seen) >= {"capture", "plan", "programs"}


@pytest.mark.parametrize("asked", ["", "off"])
def test_nothing_is_said_unasked(
    asked: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "DELAY_SECONDS", 0.0)
    monkeypatch.setenv("FXPIPE_PROGRESS", asked)
    fxpipe.compile(ToyStep(), 2, batch_size=4, schedule="1f1b")
    assert capsys.readouterr() == ("", "")


def test_what_is_soon_done_is_not_named() -> None:
    said: list[str] = []
    shown = Progress(said.append, one_line=True)
    shown.start()
    shown.after("capture")
    shown.stop()
    assert said == []


def test_a_terminal_has_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "DELAY_SECONDS", 0.0)
    said: list[str] = []
    shown = Progress(said.append, one_line=True)
    shown.start()
    while not said:
        time.sleep(0.001)
    shown.stop()
    assert said[0] == "\r\x1b[Kcapturing the model, 0 s"
    assert said[-1] == "\r\x1b[K"
