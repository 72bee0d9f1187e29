"""Which step of the compiler runs now, on stderr, for what takes longer than two seconds.

    capturing the model, 7 s

On a terminal alone, unless FXPIPE_PROGRESS says "on" (a line per step) or "off".
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

VARIABLE = "FXPIPE_PROGRESS"
DELAY_SECONDS = 2.0  # what is done sooner needs no word
_REFRESH_SECONDS = 0.5
_FIRST = "capturing the model"
_AFTER = {
    "capture": "following the batch through its operations",
    "batch": "cutting it into blocks",
    "blocks": "costing its blocks",
    "costs": "planning",
    "plan": "tracing stages and writing rank programs",
    "programs": "checking rank programs",
}
"""What runs after the step of this name."""


class Progress:
    """Says what runs now: on one line of a terminal, which it clears, or each step on a line of its own."""

    def __init__(self, write: Callable[[str], Any], one_line: bool, first: str = _FIRST) -> None:
        self._write, self._one_line = write, one_line
        self._now, self._since, self._said = first, time.monotonic(), ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="fxpipe progress")

    def after(self, name: str) -> None:
        """A step has ended."""
        self._now, self._since = _AFTER.get(name, f"after {name}"), time.monotonic()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()
        if self._one_line and self._said:
            self._write("\r\x1b[K")

    def _run(self) -> None:
        if self._ended.wait(DELAY_SECONDS):
            return
        while True:
            self._say(self._now)
            if self._ended.wait(_REFRESH_SECONDS):
                return

    def _say(self, now: str) -> None:
        if self._one_line:
            self._said = f"{now}, {time.monotonic() - self._since:.0f} s"
            self._write(f"\r\x1b[K{self._said}")
        elif now != self._said:
            self._said = now
            self._write(f"{now}\n")


_shown: ContextVar[Progress | None] = ContextVar("progress", default=None)


@contextmanager
def progress(first: str = _FIRST) -> Iterator[None]:
    """Show the steps of what runs inside, the `first` by its name; once, where one of these is inside another."""
    if _shown.get() is not None or not _is_wanted():
        yield
        return
    shown = Progress(_written, sys.stderr.isatty(), first)
    token = _shown.set(shown)
    shown.start()
    try:
        yield
    finally:
        _shown.reset(token)
        shown.stop()


def followed(observe: Callable[[str, Any], None] | None) -> Callable[[str, Any], None]:
    """`observe`, and the progress that is shown, told of every step."""

    def see(name: str, artefact: Any) -> None:
        if observe is not None:
            observe(name, artefact)
        if (shown := _shown.get()) is not None:
            shown.after(name)

    return see


def _is_wanted() -> bool:
    asked = os.environ.get(VARIABLE, "").lower()
    return asked == "on" or (asked != "off" and sys.stderr.isatty())


def _written(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
