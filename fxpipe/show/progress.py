"""Which step of the compiler runs now, on a terminal's stderr, for what takes longer than two seconds.

FXPIPE_PROGRESS says "on" (without a terminal a line per step) or "off"; of several ranks the first one shows it.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

VARIABLE = "FXPIPE_PROGRESS"
DELAY_SECONDS = 2.0  # what is done sooner needs no word
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

_shown: ContextVar[Callable[[str], None] | None] = ContextVar("progress", default=None)


@contextmanager
def progress() -> Iterator[None]:
    """Show the steps of what runs inside; once, where one of these is inside another."""
    console, asked = Console(stderr=True, highlight=False), os.environ.get(VARIABLE, "").lower()
    wanted = asked == "on" or (asked != "off" and console.is_terminal)
    if _shown.get() is not None or not wanted or os.environ.get("RANK", "0") != "0":
        yield
        return
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    bar = Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False)
    task = bar.add_task("", total=None)

    def show(step: str) -> None:
        bar.reset(task, description=step)
        if not console.is_terminal:
            console.print(step)

    token, started = _shown.set(show), threading.Timer(DELAY_SECONDS, bar.start)
    show(_FIRST)
    if console.is_terminal:
        started.start()
    try:
        yield
    finally:
        _shown.reset(token)
        started.cancel()
        if started.ident is not None:
            started.join()
            bar.stop()


def followed(observe: Callable[[str, Any], None] | None) -> Callable[[str, Any], None]:
    """`observe`, and the progress that is shown, told of every step."""

    def see(name: str, artefact: Any) -> None:
        if observe is not None:
            observe(name, artefact)
        if (show := _shown.get()) is not None:
            show(_AFTER.get(name, f"after {name}"))

    return see
