"""Which processes of a launch are still there before they share a transport: one may die while it compiles.

rank 1   "alive 1", "alive 2", ...     ->   store        each second, from when it joins
         "left after ZeroDivisionError: ..."             when it ends; nothing more when it was killed
rank 0   waits for rank 1              <-   store        raises once that has left, or stands still
         "met"                         ->   store        from here on a watchdog sees to it
"""

import atexit
import itertools
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from fxpipe.errors import RunError

BEAT_SECONDS = 1.0
LOST_SECONDS = 15.0
"""A process that gives no sign for as long was killed, stopped or cut off."""


class Presence:
    """This process's signs of life, and what it sees of others'; `store` is a c10d store, which it may host."""

    def __init__(self, store: Any, rank: int, is_host: bool) -> None:
        self._store, self._rank, self._is_host = store, rank, is_host
        self._seen: dict[int, tuple[str, float]] = {}  # by rank: its last sign, and since when
        self._ended = threading.Event()
        self._store.set(f"beat/{rank}", "alive 0")
        self._thread = threading.Thread(target=self._beat, name="fxpipe presence", daemon=True)
        self._thread.start()
        atexit.register(self._leave)

    def await_ranks(
        self, ranks: Collection[int], there: Callable[[], Collection[int]], seconds: float, what: str
    ) -> list[int]:
        """Wait until these ranks are among those that are there; the ones that are not after so many seconds.

        Raises:
            RunError: one of them has left, or gives no sign of life.
        """
        deadline, pause = time.monotonic() + seconds, 0.01
        with self._host_seen():
            while (missing := [*{*ranks}.difference(there())]) and time.monotonic() < deadline:
                for rank in missing:
                    if (why := self._gone(rank)) and rank not in there():
                        raise RunError(f"rank {self._rank} waits for {what}, and rank {rank} {why}")
                time.sleep(pause)
                pause = min(2 * pause, BEAT_SECONDS)
        return missing

    def met(self) -> None:
        """All ranks have come."""
        self._end("met")

    def _gone(self, rank: int) -> str:
        """Why it will not come, if that is known."""
        sign = self._sign(rank)
        before, since = self._seen.get(rank, ("", 0.0))
        if sign != before:
            since = time.monotonic()
            self._seen[rank] = sign, since
        if sign.startswith("left"):
            return f"has {sign}"
        is_lost = sign.startswith("alive") and time.monotonic() - since > LOST_SECONDS
        return f"was lost: no sign of life for {LOST_SECONDS:g} s (killed, stopped or cut off)" if is_lost else ""

    def _sign(self, rank: int) -> str:
        key = f"beat/{rank}"
        return str(self._store.get(key).decode()) if self._store.check([key]) else ""

    @contextmanager
    def _host_seen(self) -> Iterator[None]:
        """Once the host is gone nothing more is written, of which torch would complain at length."""
        try:
            yield
        except RunError:
            raise
        except RuntimeError:
            self._ended.set()
            raise

    def _beat(self) -> None:
        with suppress(RuntimeError), self._host_seen():
            for count in itertools.count(1):
                if self._ended.wait(BEAT_SECONDS) or self._sign(0).startswith("left"):
                    break
                self._store.set(f"beat/{self._rank}", f"alive {count}")
        self._ended.set()

    def _leave(self) -> None:
        error = getattr(sys, "last_value", None)
        if self._end(f"left after {type(error).__name__}: {error}".splitlines()[0] if error else "left"):
            time.sleep(2 * BEAT_SECONDS if self._is_host else 0)  # the store ends with this process: others read why

    def _end(self, sign: str) -> bool:
        """The last sign, unless there was one."""
        if self._ended.is_set():
            return False
        self._ended.set()
        self._thread.join(BEAT_SECONDS)  # or it could write "alive" after it
        with suppress(RuntimeError):
            self._store.set(f"beat/{self._rank}", sign)
        return True
