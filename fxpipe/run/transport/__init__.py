"""How tensors travel between ranks: the protocol, and ranks as threads of one process.

Each directed pair of ranks is a channel: one sender, one receiver, first in first out, and sends never block. Both ends
take the order of a channel's messages from the same compiled list, so a message carries only its edge id.

    rank 0: send a (edge 4) | send b (edge 7)          channel 0 -> 1:  [4: a] [7: b]
    rank 1: recv edge 4 | recv edge 7 | wait 4 | wait 7

A step ends with `flush` on every rank; edge ids may repeat in the next step.
"""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from fxpipe.errors import RunError
from fxpipe.plan.transport import Channel, Pending, PendingReduction, Transport
from fxpipe.run.transport.mailboxes import Mail, Mailboxes

T = TypeVar("T")
GRACE_SECONDS = 10.0  # how long a rank that computes may go on after another rank has failed


def failure_text(rank: int, action: str, error: BaseException) -> str:
    """The sentence by which every rank reports the rank that failed first."""
    parts = ["" if isinstance(error, RunError) else type(error).__name__, str(error)]
    return f"rank {rank} failed in {action}: {': '.join(filter(None, parts))}"


def describe(edge: int, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """A message in words: edge 7 float32[2, 3]."""
    return f"edge {edge} {str(dtype).removeprefix('torch.')}{list(shape)}"


def num_bytes(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape) * tensor.element_size()


@dataclass(frozen=True, slots=True)
class _Receive:
    """A posted in-process receive: message `number` of the channel src -> transport.rank."""

    transport: "InProcessTransport"
    src: int
    number: int
    edge: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def wait(self) -> torch.Tensor:
        expected = describe(self.edge, self.shape, self.dtype)
        message = self.transport._take(self.src, self.number, False, expected)
        tensor: torch.Tensor = message.payload
        found = describe(message.edge, tuple(tensor.shape), tensor.dtype)
        if found != expected or message.step != self.transport.step:
            raise RunError(
                f"rank {self.transport.rank} expects {expected} of step {self.transport.step} from rank {self.src}, "
                f"but the next message of that channel is {found} of step {message.step}"
            )
        self.transport._open.discard((self.src, self.number))
        return tensor


@dataclass(frozen=True, slots=True)
class _Reduction:
    """A sum over rank threads: every rank adds up what all have given, in the order of ranks."""

    transport: "InProcessTransport"
    ranks: tuple[int, ...]
    edge: int

    def wait(self) -> list[torch.Tensor]:
        given = self.transport._gathered(self.ranks, self.edge)
        return [sum(parts[1:], start=parts[0]) for parts in zip(*given, strict=True)]


class InProcessTransport:
    """A rank that is a thread of this process. Tensors are handed over without a copy: rank programs are functional, so
    no sender changes what it has sent, and no receiver what it has received."""

    def __init__(self, mail: Mailboxes, rank: int) -> None:
        self.rank, self.world_size, self.device = rank, mail.world_size, torch.device("cpu")
        self.step, self._mail, self._action = 0, mail, "start"
        self._open: set[tuple[int, int]] = set()  # (source, number) of receives posted and not waited for
        self._sent_bytes: dict[Channel, int] = {}

    def open_channels(self, channels: list[Channel], groups: list[tuple[int, ...]]) -> None:
        """Nothing to open: a mailbox is there when it is first used."""

    def set_action(self, action: str) -> None:
        self._mail.check()
        self._action = action

    def send(self, tensor: torch.Tensor, dst: int, edge: int) -> None:
        assert tensor.is_contiguous(), f"edge {edge}: the caller makes tensors contiguous"
        self._put(dst, False, Mail(self.step, edge, tensor.detach()))
        channel = self.rank, dst
        self._sent_bytes[channel] = self._sent_bytes.get(channel, 0) + num_bytes(tensor)

    def recv(self, src: int, edge: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Pending:
        number = self._post(src, False)
        self._open.add((src, number))
        return _Receive(self, src, number, edge, tuple(shape), dtype)

    def all_reduce(self, tensors: list[torch.Tensor], ranks: tuple[int, ...], edge: int) -> PendingReduction:
        assert self.rank in ranks, f"rank {self.rank} reduces over {ranks}"
        self._mail.give((ranks, edge, self.step), self.rank, [tensor.detach() for tensor in tensors])
        return _Reduction(self, ranks, edge)

    def _gathered(self, ranks: tuple[int, ...], edge: int) -> list[list[torch.Tensor]]:
        given = self._mail.gather((ranks, edge, self.step), self.rank, f"the gradients of ranks {list(ranks)}")
        return [given[rank] for rank in ranks]

    def flush(self) -> None:
        assert not self._open, f"rank {self.rank} posted receives without waiting for them: {sorted(self._open)}"
        self._mail.check_received(self.rank, self.step)
        self._mail.wait_until_taken(self.rank)
        self.step += 1

    def sent_bytes(self) -> dict[Channel, int]:
        return dict(self._sent_bytes)

    def reset_sent_bytes(self) -> None:
        self._sent_bytes.clear()

    def abort(self, error: BaseException) -> None:
        self._mail.fail(failure_text(self.rank, self._action, error), error)

    def barrier(self) -> None:
        self.gather_object(None)
        self.broadcast_object(None)

    def broadcast_object(self, value: T, src: int = 0) -> T:
        if self.rank != src:
            received: T = self._take_object(src)
            return received
        for dst in range(self.world_size):
            if dst != src:
                self._put(dst, True, Mail(self.step, 0, value))
        return value

    def gather_object(self, value: T, dst: int = 0) -> list[T] | None:
        if self.rank != dst:
            self._put(dst, True, Mail(self.step, 0, value))
            return None
        return [value if src == dst else self._take_object(src) for src in range(self.world_size)]

    def close(self) -> None:
        self._mail.end(self.rank)

    def _put(self, dst: int, control: bool, message: Mail) -> None:
        assert dst in range(self.world_size), f"rank {self.rank} cannot send to rank {dst}"
        assert dst != self.rank, f"rank {self.rank} cannot send to itself"
        self._mail.put((self.rank, dst, control), message)

    def _post(self, src: int, control: bool) -> int:
        assert src in range(self.world_size), f"rank {self.rank} cannot receive from rank {src}"
        assert src != self.rank, f"rank {self.rank} cannot receive from itself"
        return self._mail.post((src, self.rank, control))

    def _take(self, src: int, number: int, control: bool, what: str) -> Mail:
        return self._mail.take((src, self.rank, control), number, f"{what} from rank {src}")

    def _take_object(self, src: int) -> Any:
        return self._take(src, self._post(src, True), True, "an object").payload


def run_ranks(world_size: int, fn: Callable[[Transport], T], timeout_seconds: float = 300.0) -> list[T]:
    """Runs `fn(transport)` in one thread per rank; the results in rank order.

    The first rank to raise ends the others at their next action, send, receive or wait. Its exception is the cause of
    the RunError raised here, which names the rank and its action; what the others raise on the way out is dropped.
    Every rank computes with one intra-op thread, so sums are added up as in a process with OMP_NUM_THREADS=1.
    """
    mail = Mailboxes(world_size, timeout_seconds)
    results: list[Any] = [None] * world_size

    def body(transport: InProcessTransport) -> None:
        torch.set_num_threads(1)
        try:
            results[transport.rank] = fn(transport)
        except BaseException as error:
            transport.abort(error)
        finally:
            transport.close()

    num_threads = torch.get_num_threads()
    try:
        for rank in range(world_size):
            transport = InProcessTransport(mail, rank)
            threading.Thread(target=body, args=(transport,), name=f"fxpipe rank {rank}", daemon=True).start()
        mail.join(GRACE_SECONDS)
    except BaseException as error:
        mail.fail(f"interrupted by {type(error).__name__}", error)
        raise
    finally:
        torch.set_num_threads(num_threads)  # a thread's setting is also the default of threads started later
    if mail.failure is not None:
        raise RunError(mail.failure) from mail.cause
    return results
