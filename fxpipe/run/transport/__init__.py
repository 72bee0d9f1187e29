"""How tensors travel between ranks that are threads of one process; `fxpipe.plan.transport` is the protocol."""

import math
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fxpipe.errors import RunError
from fxpipe.plan.lanes import SendOrder
from fxpipe.plan.transport import Channel, Pending, T, Transport
from fxpipe.run.faults import place_of
from fxpipe.run.transport.mailboxes import MESSAGES, NUMBERS, OBJECTS, Mail, Mailboxes

MAX_EDGES = 2**21  # a tag has 31 bits: 21 of the edge, 10 of the digest
LOCAL_SECONDS = 86400.0  # that a rank waits for another of its process: a standstill is found at once
GRACE_SECONDS = 10.0  # how long a rank that computes may go on after another rank has failed


def failure_text(rank: int, action: str, error: BaseException) -> str:
    """The sentence by which every rank reports the rank that failed first."""
    parts = ["" if isinstance(error, RunError) else type(error).__name__, str(error)]
    place = place_of(error)
    return f"rank {rank} failed in {action}: {': '.join(filter(None, parts))}" + (f", in {place}" if place else "")


def describe(edge: int, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """A message in words: edge 7 float32[2, 3]."""
    return f"edge {edge} {str(dtype).removeprefix('torch.')}{list(shape)}"


def message_tag(edge: int, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    if not 0 <= edge < MAX_EDGES:
        raise RunError(f"message {edge} does not fit a tag: a step sends up to {MAX_EDGES}; use fewer micro-batches")
    return edge * 1024 + zlib.crc32(describe(edge, shape, dtype).encode()) % 1024


def num_bytes(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape) * tensor.element_size()


def owned(tensors: Sequence[torch.Tensor], owners: Sequence[int]) -> dict[int, list[torch.Tensor]]:
    """The tensors of every owner that there is, in order."""
    found: dict[int, list[torch.Tensor]] = {}
    for tensor, owner in zip(tensors, owners, strict=True):
        found.setdefault(owner, []).append(tensor)
    return found


class InProcessTransport(Transport):
    """A rank that is a thread of this process. Tensors are handed over without a copy: rank programs are functional, so
    no sender changes what it has sent, and no receiver what it has received."""

    def __init__(self, mail: Mailboxes, rank: int) -> None:
        self.rank, self.world_size, self.device = rank, mail.world_size, torch.device("cpu")
        self._step, self._mail, self._action = 0, mail, "start"
        self._open: set[tuple[int, int]] = set()  # (source, number) of receives posted and not waited for
        self._sent_bytes: dict[Channel, int] = {}

    def open_channels(self, channels: Mapping[Channel, int], groups: Sequence[tuple[int, ...]]) -> None:
        """Nothing to open: a mailbox is there when it is first used."""

    def begin_form(self, sends: Callable[[], SendOrder]) -> None:
        """Mailboxes have room for all messages, in any order."""

    def set_action(self, action: str) -> None:
        self._mail.check()
        self._action = action

    def send(self, tensor: torch.Tensor, dst: int, edge: int) -> None:
        assert tensor.is_contiguous(), f"edge {edge}: the caller makes tensors contiguous"
        self._put(dst, MESSAGES, Mail(self._step, edge, tensor.detach()))
        channel = self.rank, dst
        self._sent_bytes[channel] = self._sent_bytes.get(channel, 0) + num_bytes(tensor)

    def recv(
        self, src: int, edge: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Pending[torch.Tensor]:
        number, step = self._post(src, MESSAGES), self._step
        self._open.add((src, number))
        return Pending(lambda: self._received(src, number, step, describe(edge, tuple(shape), dtype)))

    def _received(self, src: int, number: int, step: int, expected: str) -> torch.Tensor:
        """Message `number` of a channel, if it is the expected one, of the step in which it was asked for."""
        message = self._take(src, number, MESSAGES, expected)
        tensor: torch.Tensor = message.payload
        found = describe(message.edge, tuple(tensor.shape), tensor.dtype)
        if found != expected or message.step != step:
            raise RunError(
                f"rank {self.rank} expects {expected} of step {step} from rank {src}, but the next message of "
                f"that channel is {found} of step {message.step}"
            )
        self._open.discard((src, number))
        return tensor

    def all_reduce(self, tensors: list[torch.Tensor], ranks: tuple[int, ...], edge: int) -> Pending[list[torch.Tensor]]:
        given = [tensor.detach() for tensor in tensors]
        numbers = self._give(dict.fromkeys(ranks, given), ranks, edge)

        def wait() -> list[torch.Tensor]:
            parts = dict(zip(numbers, self._given(numbers, ranks, edge, "gradients"), strict=True))
            parts[self.rank] = given
            # Every rank adds up what all have given, in the order of ranks.
            return [sum(of[1:], start=of[0]) for of in zip(*(parts[rank] for rank in ranks), strict=True)]

        return Pending(wait)

    def reduce_scatter(
        self, tensors: list[torch.Tensor], owners: tuple[int, ...], ranks: tuple[int, ...], edge: int
    ) -> Pending[list[torch.Tensor]]:
        of = owned(tensors, owners)
        numbers = self._give({rank: [tensor.detach() for tensor in of.get(rank, ())] for rank in ranks}, ranks, edge)
        sums = of.get(self.rank, [])

        def wait() -> list[torch.Tensor]:
            for given in self._given(numbers, ranks, edge, "gradients"):
                for total, tensor in zip(sums, given, strict=True):
                    total.add_(tensor)
            return sums

        return Pending(wait)

    def gather(
        self, tensors: list[torch.Tensor], owners: tuple[int, ...], ranks: tuple[int, ...], edge: int
    ) -> Pending[list[torch.Tensor]]:
        of = owned([tensor.detach() for tensor in tensors], owners)
        numbers = self._give(dict.fromkeys(ranks, of.get(self.rank, [])), ranks, edge)

        def wait() -> list[torch.Tensor]:
            found = dict(zip(numbers, self._given(numbers, ranks, edge, "parameters"), strict=True))
            left = {rank: iter(given) for rank, given in {**found, self.rank: of.get(self.rank, [])}.items()}
            return [next(left[owner]) for owner in owners]

        return Pending(wait)

    def _give(self, tensors: dict[int, list[torch.Tensor]], ranks: tuple[int, ...], edge: int) -> dict[int, int]:
        """To every other rank of a group its tensors; the numbers of what they give in turn."""
        assert self.rank in ranks, f"rank {self.rank} takes no part in what {ranks} do"
        others = [rank for rank in ranks if rank != self.rank]
        for rank in others:
            self._put(rank, ranks, Mail(self._step, edge, tensors[rank]))
        return {rank: self._post(rank, ranks) for rank in others}

    def _given(
        self, numbers: dict[int, int], ranks: tuple[int, ...], edge: int, what: str
    ) -> Iterator[list[torch.Tensor]]:
        """What the other ranks of a group have given, in order."""
        for rank, number in numbers.items():
            message = self._take(rank, number, ranks, f"the {what} of ranks {list(ranks)}")
            if message.edge != edge:
                raise RunError(
                    f"rank {self.rank} exchanges the {what} of ranks {list(ranks)} as edge {edge}, rank {rank} as edge "
                    f"{message.edge}"
                )
            yield message.payload

    def advance(self) -> None:
        self._mail.check()
        self._step += 1

    def flush(self) -> None:
        assert not self._open, f"rank {self.rank} posted receives without waiting for them: {sorted(self._open)}"
        self._mail.check_received(self.rank, self._step)
        self._mail.wait_until_taken(self.rank)
        self._step += 1

    def sent_bytes(self) -> dict[Channel, int]:
        return dict(self._sent_bytes)

    def abort(self, error: BaseException) -> None:
        self._mail.fail(failure_text(self.rank, self._action, error), error)

    def broadcast_object(self, value: T) -> T:
        if self.rank:
            received: T = self._take_object(0)
            return received
        for dst in range(1, self.world_size):
            self._put(dst, OBJECTS, Mail(self._step, 0, value))
        return value

    def gather_object(self, value: T) -> list[T] | None:
        if self.rank:
            self._put(0, OBJECTS, Mail(self._step, 0, value))
            return None
        return [value, *(self._take_object(src) for src in range(1, self.world_size))]

    def all_gather(self, tensor: torch.Tensor, what: str) -> Pending[list[torch.Tensor]]:
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        for dst in others:
            self._put(dst, NUMBERS, Mail(self._step, 0, tensor))
        posted = {src: self._post(src, NUMBERS) for src in others}

        def wait() -> list[torch.Tensor]:
            found = {src: self._take(src, number, NUMBERS, what).payload for src, number in posted.items()}
            return [tensor if rank == self.rank else found[rank] for rank in range(self.world_size)]

        return Pending(wait)

    def copy_values(self, copies: Sequence[tuple[torch.Tensor, int, int]], what: str) -> None:
        for tensor, src, dst in copies:
            if src == self.rank:
                self._put(dst, OBJECTS, Mail(self._step, 0, tensor.detach().clone()))
        for tensor, src, dst in copies:
            if dst == self.rank:
                with torch.no_grad():
                    tensor.copy_(self._take_object(src))

    def close(self) -> None:
        self._mail.end(self.rank)

    def _put(self, dst: int, kind: object, message: Mail) -> None:
        assert dst in range(self.world_size), f"rank {self.rank} cannot send to rank {dst}"
        assert dst != self.rank, f"rank {self.rank} cannot send to itself"
        self._mail.put((self.rank, dst, kind), message)

    def _post(self, src: int, kind: object) -> int:
        assert src in range(self.world_size), f"rank {self.rank} cannot receive from rank {src}"
        assert src != self.rank, f"rank {self.rank} cannot receive from itself"
        return self._mail.post((src, self.rank, kind))

    def _take(self, src: int, number: int, kind: object, what: str) -> Mail:
        return self._mail.take((src, self.rank, kind), number, f"{what} from rank {src}")

    def _take_object(self, src: int) -> Any:
        return self._take(src, self._post(src, OBJECTS), OBJECTS, "an object").payload


class RankThreads:
    """Ranks that are threads of this process, in one run after another; messages may cross from one to the next.

    After a failure every later run raises it again.
    """

    def __init__(self, world_size: int, timeout_seconds: float = LOCAL_SECONDS) -> None:
        self._mail = Mailboxes(world_size, timeout_seconds)
        self._transports = [InProcessTransport(self._mail, rank) for rank in range(world_size)]

    def run(self, fn: Callable[[Transport], T]) -> list[T]:
        """Runs `fn(transport)` in one thread per rank; the results in rank order. A rank alone runs in the caller's."""
        mail, results = self._mail, list[Any]([None] * len(self._transports))
        if len(self._transports) == 1:
            mail.begin()
            mail.check()
            return [self._run_alone(fn)]

        def body(transport: InProcessTransport) -> None:
            torch.set_num_threads(1)
            try:
                results[transport.rank] = fn(transport)
            except BaseException as error:
                transport.abort(error)
            finally:
                transport.close()

        num_threads = torch.get_num_threads()
        mail.begin()
        try:
            for transport in self._transports:
                name = f"fxpipe rank {transport.rank}"
                threading.Thread(target=body, args=(transport,), name=name, daemon=True).start()
            mail.join(GRACE_SECONDS)
        except BaseException as error:
            mail.fail(f"interrupted by {type(error).__name__}", error)
            raise
        finally:
            torch.set_num_threads(num_threads)  # a thread's setting is also the default of threads started later
        if mail.failure is not None:
            raise RunError(mail.failure) from mail.cause
        return results

    def _run_alone(self, fn: Callable[[Transport], T]) -> T:
        """Memory that other threads allocate goes back to the system more often: a step took 2 % more there."""
        (transport,) = self._transports
        try:
            return fn(transport)
        except Exception as error:
            transport.abort(error)
            raise RunError(self._mail.failure) from error
        finally:
            transport.close()


def run_ranks(world_size: int, fn: Callable[[Transport], T], timeout_seconds: float = LOCAL_SECONDS) -> list[T]:
    """Runs `fn(transport)` in one thread per rank; the results in rank order.

    The first rank to raise ends the others at their next action, send, receive or wait. Its exception is the cause of
    the RunError raised here, which names the rank and its action; what the others raise on the way out is dropped.
    Where there are several, each computes with one intra-op thread, so sums are added up as in a process with
    OMP_NUM_THREADS=1.
    """
    return RankThreads(world_size, timeout_seconds).run(fn)
