"""Ends a process when another rank has failed, was killed or is cut off, and names that rank.

    every rank, each second:   heartbeat "alive 41 2F0"  ->  store  ->  what the others wrote, and the first failure
    a rank raises              publishes "rank 2 failed in 2F0: ..."; the others read it at their next look
    a rank is killed           its heartbeat stands still; the first to see it publishes "rank 2 was lost, ..."
    the store is gone          whoever hosted it is
    SIGTERM                    a launcher that lost a rank ends the rest: they look who it was before they go

A thread does this, because the main thread may be blocked where neither Python nor a signal handler runs.
"""

import atexit
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

from fxpipe.run.transport import GRACE_SECONDS, failure_text

SUSPECT_TICKS = 4  # looks without a new heartbeat that count as lost once there is another sign: SIGTERM, a connection
_ANEW = "start all ranks anew, as torchrun --max-restarts does"
TERMINATED_TICKS = 6  # looks before a terminated rank goes


class Watchdog:
    """One rank's heartbeat and its view of the others'. `action` is what this rank does, as the others will report it.

    `store` is a c10d store, whose methods raise RuntimeError when it is out of reach. `host_rank` is the rank whose
    process hosts it, None when a launcher does. `interrupt` must make a blocked main thread raise. From the failure on,
    the process has GRACE_SECONDS to end by itself or to `close`.
    """

    def __init__(
        self, store: Any, rank: int, world_size: int, host_rank: int | None, interrupt: Callable[[], None],
        heartbeat_seconds: float, lost_after_seconds: float,
    ) -> None:  # fmt: skip
        self.action = "start"
        self.failure: str | None = None
        self.rank = rank
        self._store, self._host_rank, self._interrupt = store, host_rank, interrupt
        self._heartbeat_seconds = heartbeat_seconds
        self._lost_ticks = max(SUSPECT_TICKS, round(lost_after_seconds / heartbeat_seconds))
        self._others = [other for other in range(world_size) if other != rank]
        self._beats: dict[int, list[str]] = {}  # other rank -> state, count, action
        self._still_ticks = dict.fromkeys(self._others, 0)  # not seconds, which go on while this process is stopped
        self._num_beats = 0
        self._is_called = False  # as the handler of SIGTERM
        self._is_blind = False  # the store has ended in good order, and nobody can be watched any more
        self._failed, self._closed = threading.Event(), threading.Event()
        self._signals, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        self._thread = threading.Thread(target=self._watch, name="fxpipe watchdog", daemon=True)

    def beat(self, state: str = "alive") -> None:
        self._num_beats += 1
        self._store.set(f"beat/{self.rank}", f"{state} {self._num_beats} {self.action}")

    def start(self) -> None:
        """Starts watching; every rank must have written a first `beat` before any rank does."""
        self._excepthook, sys.excepthook = sys.excepthook, self._publish_uncaught
        self._takes_signals = (
            threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        )
        if self._takes_signals:  # a handler of the user's own stays, and decides, also one that is set later
            signal.signal(signal.SIGTERM, self._wait_for_the_next_look)
            # Written to at once, where a Python handler has to wait for a main thread that is blocked in C++.
            self._wakeup_fd = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        atexit.register(self.close)
        self._thread.start()

    def publish(self, failure: str) -> str:
        """Tells all ranks; returns the first failure that was published, which is the one that counts."""
        with suppress(RuntimeError):  # with the store gone every rank finds out by itself
            failure = self._store.compare_set("failure", "", failure).decode()
        return failure

    def report(self, error: BaseException, action: str | None = None) -> None:
        """Publishes that this rank has failed, unless another failed first."""
        if self.failure is None:
            self.failure = self.publish(failure_text(self.rank, action or self.action, error))
            self._failed.set()

    def met(self, what: str) -> bool:
        """Whether all ranks say this, each once, before one that stood still as long would count as lost."""
        self.say(what)
        return self.heard(what, self._others, self._lost_ticks * self._heartbeat_seconds)

    def say(self, what: str) -> None:
        """Once."""
        with suppress(RuntimeError):  # the store is gone: found out elsewhere
            self._store.set(f"said/{what}/{self.rank}", "")

    def heard(self, what: str, others: Sequence[int], seconds: float) -> bool:
        """Whether these ranks say this within so many seconds; False as soon as one has failed or left."""
        deadline = time.monotonic() + seconds
        with suppress(RuntimeError):
            while time.monotonic() < deadline and not self._failed.is_set():
                if self._store.check([f"said/{what}/{other}" for other in others]):
                    return True
                if any(self._beats.get(other, ["alive"])[0] == "left" for other in others):
                    break
                self._failed.wait(0.05)
        return False

    def verdict(self, peer: int | None) -> str | None:
        """After the connection to a rank, or to any, is lost: the failure behind it as soon as it is known, if any."""
        self._lost_ticks = SUSPECT_TICKS
        deadline = time.monotonic() + 2 * SUSPECT_TICKS * self._heartbeat_seconds + 5
        while time.monotonic() < deadline and not self._failed.wait(0.1):
            for other in self._others if peer is None else [peer]:
                if other in self._beats and self._beats[other][0] == "left":
                    self._failed.wait(2 * self._heartbeat_seconds)  # it told why before that, unseen as yet
                    left = self._beats[other][2]
                    why = f" {left}" if left.startswith("after ") else ""
                    return self.failure or f"rank {self.rank} in {self.action} needs rank {other}, which has left{why}"
        return self.failure

    def elsewhere(self) -> str:
        """Which other ranks do something else than this one, for who waits for them; empty where none is known to."""
        there = [(rank, beat[2]) for rank, beat in self._beats.items() if beat[0] == "alive" and beat[2] != self.action]
        found = [f"rank {rank} was last seen in {action}" for rank, action in there]
        return f" ({', '.join(found)})" if found else ""

    def close(self) -> None:
        """Stops watching and tells the others that this rank has left, in good order, or on its way out of an error."""
        if self._closed.is_set():
            return
        if (error := sys.exception()) is not None and self.failure is None:
            self.action = f"after {type(error).__name__}: {error}".splitlines()[0]
        self._closed.set()
        atexit.unregister(self.close)
        sys.excepthook = self._excepthook
        if self._takes_signals:
            signal.set_wakeup_fd(self._wakeup_fd)
            if self._decides():
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._wake.send(b"\0")
        self._thread.join()  # or it could write "alive" after "left"
        with suppress(RuntimeError):
            self.beat("left")
            if self.rank == self._host_rank:
                self._await_others()
        self._wake.close()
        self._signals.close()

    def _await_others(self) -> None:
        """The store ends with this process: gives the others the time to read in it why."""
        deadline = time.monotonic() + 2 * self._heartbeat_seconds + 1
        while time.monotonic() < deadline and not all(self._read()[other][0] == "left" for other in self._others):
            time.sleep(0.05)

    def _publish_uncaught(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        self.report(error)
        self._excepthook(kind, error, traceback)

    def _read(self) -> dict[int, list[str]]:
        values = self._store.multi_get([f"beat/{other}" for other in self._others])
        return {other: value.decode().split(" ", 2) for other, value in zip(self._others, values, strict=True)}

    def _watch(self) -> None:
        ticks_left = None  # a number once this process is being terminated
        while not self._closed.is_set() and not self._failed.is_set():
            failure = None if self._is_blind else self._look()
            if failure is None and ticks_left == 0:
                failure = self.publish(f"rank {self.rank} was ended by SIGTERM in {self.action}")
            if failure is not None:
                self._stop(failure)
                break
            received = self._sleep()
            if signal.SIGINT in received:
                self._interrupt()  # so that KeyboardInterrupt can be raised
            terminated = self._is_called or (signal.SIGTERM in received and self._decides())
            if terminated and ticks_left is None:
                ticks_left, self._lost_ticks = TERMINATED_TICKS, SUSPECT_TICKS
            elif ticks_left is not None:
                ticks_left -= 1
        if not self._closed.wait(GRACE_SECONDS):
            self._say(f"is ended, {GRACE_SECONDS:g} s after this, and without engine.close() since: {self.failure}")
            os._exit(1)

    def _wait_for_the_next_look(self, number: int, frame: FrameType | None) -> None:
        """The handler of SIGTERM, also where one that was set later calls it, or sets it again after the end."""
        self._is_called = True
        if self._closed.is_set():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def _decides(self) -> bool:
        """Whether SIGTERM still is for this one."""
        return signal.getsignal(signal.SIGTERM) == self._wait_for_the_next_look

    def _stop(self, failure: str) -> None:
        self._say(f"in {self.action} stops: {failure}")
        self.failure = failure
        self._failed.set()
        self._interrupt()

    def _say(self, what: str) -> None:
        print(f"fxpipe: rank {self.rank} {what}", file=sys.stderr, flush=True)

    def _sleep(self) -> bytes:
        """Until the next tick or signal; the signals that came."""
        ready, _, _ = select.select([self._signals], [], [], self._heartbeat_seconds)
        return self._signals.recv(64) if ready else b""

    def _look(self) -> str | None:
        """One exchange with the store: the failure that ends this rank, if there is one."""
        try:
            self.beat()
            if self._store.check(["failure"]):
                return str(self._store.get("failure").decode())
            beats = self._read()
        except RuntimeError as error:
            return self._store_lost(error)
        for rank, beat in beats.items():
            still = self._beats.get(rank) == beat and beat[0] == "alive"
            self._still_ticks[rank] = self._still_ticks[rank] + 1 if still else 0
        self._beats = beats
        for rank, num_ticks in self._still_ticks.items():
            if num_ticks >= self._lost_ticks:
                seconds = num_ticks * self._heartbeat_seconds
                return self.publish(
                    f"rank {rank} was lost, last seen in {beats[rank][2]}: no sign of life for {seconds:g} s "
                    f"(killed, stopped or cut off); {_ANEW}"
                )
        return None

    def _store_lost(self, error: RuntimeError) -> str | None:
        host = self._host_rank
        if host is None:
            return f"the launcher, which hosts the store, was lost, seen by rank {self.rank} in {self.action}: {error}"
        state, _, action = self._beats.get(host, ["alive", "0", "start"])
        self._is_blind = host == self.rank or state == "left"
        if self._is_blind:
            return None
        gone = "the store it hosts does not answer (killed or cut off)"
        return f"rank {host} was lost, last seen in {action}: {gone}; {_ANEW}"
