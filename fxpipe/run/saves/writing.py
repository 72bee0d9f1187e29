"""A part on its way to the disk, at once or while training goes on; what went wrong is told when it is asked for."""

import threading
from collections.abc import Callable
from pathlib import Path

from fxpipe.errors import RunError


class Writing:
    """Into `folder`, in a thread where `asynchronous`."""

    def __init__(self, folder: Path, write: Callable[[], None], asynchronous: bool) -> None:
        self.folder, self._write, self._fault = folder, write, ""
        self._thread = threading.Thread(target=self._body, name="fxpipe save") if asynchronous else None
        if self._thread is None:
            self._body()
        else:
            self._thread.start()

    def require(self) -> None:
        """Wait for the end of it. Raises RunError where it was not written."""
        if self._thread is not None:
            self._thread.join()
        if self._fault:
            raise RunError(self._fault)

    def _body(self) -> None:
        try:
            self._write()
        except Exception as error:
            self._fault = f"{type(error).__name__}: {error}"


def not_written(name: str) -> str:
    return (
        f"{name} was not written (checkpoints before it are as they were, and training can go on: make room, or give "
        "another directory, and save again)"
    )
