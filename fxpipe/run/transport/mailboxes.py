"""Mailboxes shared by rank threads: numbered messages per channel, one failure for all, and no silent standstill.

`put` appends to a channel and never waits, `post` numbers the next receive of a channel, `take` waits for the message
of that number, `fail` ends every wait with the first failure.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fxpipe.errors import RunError

MESSAGES, OBJECTS, NUMBERS = "messages", "objects", "numbers"
Address = tuple[int, int, object]  # source rank, destination rank; one of these or the ranks of a sum


@dataclass(frozen=True, slots=True)
class Mail:
    """A payload with the sender's step and the edge it belongs to."""

    step: int
    edge: int
    payload: Any


@dataclass
class _Mailbox:
    num_sent: int = 0
    num_posted: int = 0
    messages: dict[int, Mail] = field(default_factory=dict)  # by number, until taken


class Mailboxes:
    """All channels of one run. Every field is guarded by one condition, which is notified on every change."""

    def __init__(self, world_size: int, timeout_seconds: float) -> None:
        self.world_size, self.timeout_seconds = world_size, timeout_seconds
        self.failure: str | None = None
        self.cause: BaseException | None = None
        self._changed = threading.Condition()
        self._boxes: defaultdict[Address, _Mailbox] = defaultdict(_Mailbox)
        self._ended: set[int] = set()
        self._blocked: dict[int, tuple[str, Callable[[], bool]]] = {}  # rank -> what it waits for, whether it is there

    def begin(self) -> None:
        """All ranks run again; what is on its way stays there."""
        with self._changed:
            self._ended.clear()

    def put(self, address: Address, message: Mail) -> None:
        with self._changed:
            self.check()
            box = self._boxes[address]
            box.messages[box.num_sent] = message
            box.num_sent += 1
            self._changed.notify_all()

    def post(self, address: Address) -> int:
        with self._changed:
            self.check()
            box = self._boxes[address]
            box.num_posted += 1
            return box.num_posted - 1

    def take(self, address: Address, number: int, what: str) -> Mail:
        with self._changed:
            messages = self._boxes[address].messages
            self._block(address[1], what, lambda: number in messages)
            message = messages.pop(number)
            self._changed.notify_all()
            return message

    def check_received(self, rank: int, step: int) -> None:
        """Raises RunError when a message of this step, for this rank, was not taken; the next step's may be here."""
        with self._changed:
            for (src, dst, what), box in self._boxes.items():
                left = sorted(message.edge for message in box.messages.values() if message.step == step)
                if dst == rank and left and what == MESSAGES:
                    raise RunError(f"rank {rank} ends step {step} without receiving edges {left} from rank {src}")

    def wait_until_taken(self, rank: int) -> None:
        """Returns once every tensor this rank has sent is taken."""
        with self._changed:
            self._block(rank, "its messages to be received", lambda: not self._untaken(rank))

    def fail(self, failure: str, cause: BaseException | None) -> None:
        """Ends every wait with this failure, unless there is one already: the first is what the others follow from."""
        with self._changed:
            if self.failure is None:
                self.failure, self.cause = failure, cause
            self._changed.notify_all()

    def check(self) -> None:
        if self.failure is not None:
            raise RunError(self.failure)

    def end(self, rank: int) -> None:
        with self._changed:
            self._ended.add(rank)
            self._check_progress()
            self._changed.notify_all()

    def join(self, grace_seconds: float) -> None:
        """Waits for all ranks to end; after a failure only so long, since a thread that computes cannot be stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None or len(self._ended) == self.world_size)
            self._changed.wait_for(lambda: len(self._ended) == self.world_size, grace_seconds)

    def _block(self, rank: int, what: str, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self.timeout_seconds
        self._blocked[rank] = what, ready
        try:
            self._check_progress()
            while not ready():
                self.check()
                if time.monotonic() >= deadline:
                    raise RunError(f"waited {self.timeout_seconds:g} s for {what}")
                self._changed.wait(deadline - time.monotonic())
        finally:
            del self._blocked[rank]

    def _check_progress(self) -> None:
        """Fails at once, not by timeout, when no rank can go on: sends never wait, so nothing later could help."""
        running = [rank for rank in range(self.world_size) if rank not in self._ended]
        if running and all(rank in self._blocked and not self._blocked[rank][1]() for rank in running):
            waits = [f"rank {rank} waits for {self._blocked[rank][0]}" for rank in running]
            lost = [text for rank in range(self.world_size) for text in self._untaken(rank)]
            ended = [f"ranks that have ended: {sorted(self._ended)}"] if self._ended else []
            self.fail("no rank can go on: " + "; ".join(waits + lost + ended), None)

    def _untaken(self, rank: int) -> list[str]:
        return [
            f"edge {message.edge} from rank {src} to rank {dst} is not received"
            for (src, dst, what), box in self._boxes.items()
            for message in box.messages.values()
            if src == rank and what == MESSAGES
        ]
