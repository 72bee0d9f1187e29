"""What a training run says of itself, on one rank: a line that is kept up to date on a terminal, else a line every so
many steps.

    step 40/200  loss 0.1234  52.1 samples/s  153 ms a step (predicted 148 ms on CPU)  sent 1.2 MB a step  2.1 GiB
"""

import time
from typing import Any, Self

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from fxpipe.plan.block_graph import human_bytes
from fxpipe.plan.timeline import human_seconds
from fxpipe.run.engine_base import EngineBase

REFRESH_SECONDS = 0.25  # on a terminal; reading the loss waits for the device


class Live:
    """`live(loss)` after every step shows how the run goes; as a context, on a terminal, in one line. Ranks other than
    0 say nothing.

    Args:
        total: steps in all, counted as `engine.step_index` is.
        every: steps from a line to the next where there is no terminal.
    """

    def __init__(
        self, engine: EngineBase, total: int | None = None, every: int = 10, console: Console | None = None
    ) -> None:
        self._engine, self._total, self._every = engine, total, every
        self._console = console or Console(highlight=False)
        self._shows = engine.rank == 0
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._mark()
        self._shown = 0.0

    def __enter__(self) -> Self:
        if self._shows and self._console.is_terminal:
            columns = TextColumn("{task.description}"), BarColumn(bar_width=12), TimeElapsedColumn()
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("", total=self._total, completed=self._engine.step_index)
            self._bar.start()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, loss: torch.Tensor) -> None:
        """After a step; the loss is read only where it is shown."""
        index = self._engine.step_index
        if not self._shows:
            return
        if self._bar is not None and self._task is not None:
            last = index == self._total
            if last or time.monotonic() - self._shown >= REFRESH_SECONDS:
                self._shown = time.monotonic()
                self._bar.update(self._task, completed=index, description=self.line(loss))
                if last:
                    self._console.print(self._bar.tasks[0].description)
        elif index % self._every == 0 or index == self._total:
            self._console.print(self.line(loss), soft_wrap=True)

    def line(self, loss: torch.Tensor) -> str:
        """What is said now, of the steps since it was last said."""
        engine, before = self._engine, (self._start, self._steps, self._samples, self._sent)
        value = float(loss)
        self._mark()
        seconds, steps = self._start - before[0], max(1, self._steps - before[1])
        of_total = f"/{self._total}" if self._total is not None else ""
        words = [f"step {engine.step_index}{of_total}", f"loss {value:.6f}"]
        words.append(f"{(self._samples - before[2]) / seconds:.3g} samples/s")
        predicted = engine._plan.predicted
        told = f" (predicted {human_seconds(predicted.seconds)} on {predicted.device})" if predicted else ""
        words.append(f"{human_seconds(seconds / steps)} a step{told}")
        if sent := (self._sent - before[3]) // steps:
            words.append(f"sent {human_bytes(sent)} a step")
        return "  ".join([*words, human_bytes(memory_bytes(engine.device))])

    def _mark(self) -> None:
        engine = self._engine
        self._start, self._steps = time.monotonic(), engine.step_index
        self._samples, self._sent = engine.num_samples, engine.bytes_sent


def memory_bytes(device: torch.device) -> int:
    """What this process holds: on a GPU the most that its allocator has given, else the most that was resident."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
