"""A store whose host may be stopped: torch's own waits for its answer without end, whatever its timeout."""

import threading
from collections.abc import Callable
from typing import Any

_NUM_LOOKS = 10


class Answering:
    """The methods of a c10d store, each of which raises RuntimeError unless it is answered within so many seconds; all
    do from then on, for the next would wait behind the one before. A while in which this process itself is held up
    counts as one look for the answer."""

    def __init__(self, store: Any, seconds: float) -> None:
        self._store, self._seconds, self._is_silent = store, seconds, False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._store, name)

        def call(*args: Any) -> Any:
            found: list[Any] = []

            def ask() -> None:
                try:
                    found.append(method(*args))
                except RuntimeError as error:
                    found.append(error)

            if not self._is_silent:
                asking = threading.Thread(target=ask, name="fxpipe store", daemon=True)
                asking.start()
                for _ in range(_NUM_LOOKS):
                    asking.join(self._seconds / _NUM_LOOKS)
                self._is_silent = not found
            if self._is_silent:
                raise RuntimeError(f"no answer for {self._seconds:g} s")
            if isinstance(found[0], RuntimeError):
                raise found[0]
            return found[0]

        return call
