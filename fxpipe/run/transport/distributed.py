"""Ranks as processes: the transport over torch.distributed (gloo on CPUs, NCCL on GPUs).

On gloo all messages go through one process group, each with a tag of its own; NCCL has no tags, and communicators take
their place (`grouped`). No other folder imports torch.distributed.

Seen on torch 2.13's gloo, and relied on here:
- `isend` never blocks, whatever the size; data move when the receiver has posted, so a send waited for is received.
- Messages match by (pair, tag): tags up to 2**31 - 1, equal tags in order, different tags independent of each other.
- A message shorter than its buffer is taken without an error, a longer one ends the process: so the tag also carries a
  digest of shape and dtype, and what does not match is never received.
- A wait cannot be tried again: its timeout closes all pairs of the group. `abort` and `shutdown` of a group wake
  nobody; the timeout of another receive does, here and on the peers.
"""

import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from fxpipe.errors import FxpipeError, RunError
from fxpipe.plan.lanes import NUM_OWN, SendOrder
from fxpipe.plan.transport import Channel, Pending, T
from fxpipe.run.transport import MAX_EDGES, describe, message_tag, num_bytes
from fxpipe.run.transport.answering import Answering
from fxpipe.run.transport.collectives import Collectives
from fxpipe.run.transport.grouped import Coming, Grouped, Started, begun
from fxpipe.run.transport.launched import Launch
from fxpipe.run.transport.watchdog import Watchdog

COPIED_AT_ONCE = 64  # tensors: some hundred MB of a U-Net
STORE_SECONDS = 10.0  # the store may take to answer a heartbeat, and as long as a rank that is not lost
_ENDED = "with that this engine, or sampler, has ended: close() it, and go on with another, or in a new run"
_num_transports = itertools.count()  # made by this process: every transport has keys of its own in the store


_Sent = tuple[Started, torch.Tensor, int, str]
"""A send, its tensor, which must be there until it is waited for, the receiver, and what it is."""


class DistributedTransport(Collectives):
    """This process as one of the ranks that torchrun, or whoever set its variables, has started.

    `device`: the CPU when None; "cuda" without an index is the GPU of LOCAL_RANK. `timeout_seconds` bounds every wait
    for a message; a rank whose heartbeat stands still for `lost_after_seconds` counts as lost. A default process group
    is made when there is none, and is not ended by `close`: the next transport uses it again. Messages go through
    communicators on CUDA, and where `num_own` says how many of a rank's are of a single channel.
    """

    def __init__(
        self, device: torch.device | str | None = None, timeout_seconds: float = 300.0,
        heartbeat_seconds: float = 1.0, lost_after_seconds: float = 15.0, num_own: int | None = None,
    ) -> None:  # fmt: skip
        self.device, launch = _resolve(device), Launch.from_environment()
        self.rank, self.world_size = rank, world_size = launch.rank, launch.world_size
        self._timeout_seconds, self._timeout = timeout_seconds, timedelta(seconds=timeout_seconds)
        store = launch.store(f"{next(_num_transports)}", self._timeout)
        with _connecting(launch, timeout_seconds):
            launch.meet(store, self._timeout)
            if not dist.is_initialized():
                dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=self._timeout)
            self._control: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=self._timeout)
            self._data: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=self._timeout)
        self._groups: list[dist.ProcessGroup] = [self._control, self._data]
        self._grouped = None
        if self.device.type == "cuda" or num_own is not None:
            self._grouped = Grouped(rank, self.device, self._timeout, NUM_OWN if num_own is None else num_own)
        self._reducing = {}
        self._sends: list[_Sent] = []
        self._sends_before: list[_Sent] = []  # of the step before
        self._num_posted, self._open = 0, dict[int, str]()  # what each receive is of, until it is waited for
        self._sent_bytes: dict[Channel, int] = {}
        watched = store.clone()  # a connection of its own: calls on one connection wait for each other
        watched.set_timeout(timedelta(seconds=STORE_SECONDS))
        answering = Answering(watched, max(STORE_SECONDS, lost_after_seconds))
        host_rank = None if launch.launcher_hosts else 0
        self._watchdog = Watchdog(
            answering, rank, world_size, host_rank, self._interrupt, heartbeat_seconds, lost_after_seconds
        )
        self._watchdog.beat()
        with _connecting(launch, timeout_seconds):
            dist.barrier(self._control)
        self._watchdog.start()

    def open_channels(self, channels: Mapping[Channel, int], groups: Sequence[tuple[int, ...]]) -> None:
        """One process group per group of ranks that reduce; communicators for messages where they are needed."""
        for ranks in groups:
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            group = dist.new_group(list(ranks), backend=backend, timeout=self._timeout)  # collective over all ranks
            if self.rank in ranks:
                self._reducing[ranks] = group
                self._groups.append(group)
        if self._grouped is not None:
            with self._named(f"channels to open: {sorted(channels)}", None):
                self._grouped.open(channels)

    def begin_form(self, sends: Callable[[], SendOrder]) -> None:
        if self._grouped is not None:
            self._grouped.begin(sends)

    def set_action(self, action: str) -> None:
        if self._watchdog.failure is not None:
            raise RunError(f"{self._watchdog.failure}; {_ENDED}")
        if not self._groups:
            raise RunError(f"rank {self.rank} has left the others by close(): call that last, or compile again")
        self._watchdog.action = action
        self._sends = [send for send in self._sends if not send[0].is_completed()]  # which gloo tells of none

    def send(self, tensor: torch.Tensor, dst: int, edge: int) -> None:
        assert tensor.is_contiguous(), f"edge {edge}: the caller makes tensors contiguous"
        while self._sends and self._sends[0][0].is_completed():  # programs of samplers send much within an action
            del self._sends[0]
        tensor, shape = tensor.detach(), tuple(tensor.shape)
        what = f"{describe(edge, shape, tensor.dtype)} to be received by rank {dst}"
        with self._named(what, dst):
            tag = message_tag(edge, shape, tensor.dtype)
            if self._grouped is not None:
                work: Started = self._grouped.send(tensor, dst, edge, tag)
            else:
                work = begun(dist.isend(tensor, dst, group=self._data, tag=tag))
        self._sends.append((work, tensor, dst, what))
        channel = self.rank, dst
        self._sent_bytes[channel] = self._sent_bytes.get(channel, 0) + num_bytes(tensor)

    def recv(
        self, src: int, edge: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Pending[torch.Tensor]:
        what = f"{describe(edge, shape, dtype)} from rank {src}"
        with self._named(what, src):
            tag = message_tag(edge, shape, dtype)
            if self._grouped is not None:
                coming = self._grouped.recv(src, edge, shape, dtype, tag)
            else:
                buffer = torch.empty(shape, dtype=dtype, device=device)
                coming = Coming(begun(dist.irecv(buffer, src, group=self._data, tag=tag)), buffer)
        number, turn = self._num_posted, self._turn(edge)
        self._num_posted += 1
        self._open[number] = what

        def wait() -> torch.Tensor:
            turn()
            self._wait(coming, what, src)
            self._open.pop(number, None)
            return coming.tensor

        return Pending(wait)

    def advance(self) -> None:
        """Lets go of what was sent in the step before. Equal tags arrive in the order of their posts, of any steps."""
        self._turn(None)()
        self._await_sends(self._sends_before)
        self._sends_before, self._sends = self._sends, []

    def flush(self) -> None:
        assert not self._open, f"rank {self.rank} posted receives without waiting for them: {[*self._open.values()]}"
        self._turn(None)()
        self._await_sends(self._sends_before)
        self._await_sends(self._sends)
        if self._grouped is not None:
            self._grouped.retire()

    def sent_bytes(self) -> dict[Channel, int]:
        return dict(self._sent_bytes)

    def abort(self, error: BaseException) -> None:
        self._watchdog.report(error)

    def met(self, what: str) -> bool:
        """Collective, where it returns True: every rank has said this within the time after which a rank is lost. Those
        that say nothing may be in any wait."""
        return self._watchdog.met(what)

    def await_rank_zero(self, what: str, seconds: float) -> None:
        """Collective: returns when rank 0 is here, which may take longer than messages; `what` is said once."""
        start = time.monotonic()
        if self.rank == 0:
            self._watchdog.say(what)
        elif not self._watchdog.heard(what, [0], seconds):
            if time.monotonic() - start >= seconds:
                raise RunError(f"waited {seconds:g} s for {what}")
            raise RunError(self._watchdog.verdict(0) or f"lost rank 0 while waiting for {what}")

    def broadcast_object(self, value: T) -> T:
        values = [value]
        with self._named("an object from rank 0", 0):
            dist.broadcast_object_list(values, 0, group=self._control)
        return values[0]

    def gather_object(self, value: T) -> list[T] | None:
        values: list[T] | None = None if self.rank else [value] * self.world_size
        with self._named("the objects of all ranks at rank 0", 0 if self.rank else None):
            dist.gather_object(value, values, 0, group=self._control)
        return values

    def all_gather(self, tensor: torch.Tensor, what: str) -> Pending[list[torch.Tensor]]:
        found = [torch.empty_like(tensor) for _ in range(self.world_size)]
        with self._named(what, None):
            work = dist.all_gather(found, tensor, group=self._control, async_op=True)
        assert work is not None

        def wait() -> list[torch.Tensor]:
            with self._named(what, None):
                work.wait(self._timeout)
            return found

        return Pending(wait)

    def copy_values(self, copies: Sequence[tuple[torch.Tensor, int, int]], what: str) -> None:
        """Through the CPU, a window of tensors at a time, so that few are there twice."""
        for start in range(0, len(copies), COPIED_AT_ONCE):
            given, taken = list[tuple[dist.Work | None, int]](), list[tuple[torch.Tensor, torch.Tensor]]()
            held: dict[int, torch.Tensor] = {}  # by number: what is on its way
            window = [copy for copy in copies[start : start + COPIED_AT_ONCE] if copy[0].numel()]
            for tag, (tensor, src, dst) in enumerate(window):
                if src == self.rank:
                    held[tag] = tensor.detach().cpu().contiguous()
                    with self._named(what, dst):
                        given.append((dist.isend(held[tag], dst, group=self._control, tag=tag), dst))
                elif dst == self.rank:
                    held[tag] = torch.empty(tensor.shape, dtype=tensor.dtype)
                    taken.append((tensor, held[tag]))
                    with self._named(what, src):
                        given.append((dist.irecv(held[tag], src, group=self._control, tag=tag), src))
            for work, peer in given:
                assert work is not None
                with self._named(what, peer):
                    work.wait(self._timeout)
            for tensor, values in taken:
                with torch.no_grad():
                    tensor.copy_(values)

    def close(self) -> None:
        self._watchdog.close()
        if self._watchdog.failure is None:
            for group in [*self._groups, *(self._grouped.groups() if self._grouped is not None else ())]:
                dist.destroy_process_group(group)
            self._groups.clear()

    def _turn(self, edge: int | None) -> Callable[[], None]:
        """What to do before a wait for a message or a reduction of this form, or at the end of the form."""
        if self._grouped is None:
            return lambda: None
        start = self._grouped.turn(edge)

        def turn() -> None:
            with self._named("messages that are to be started", None):
                start()

        return turn

    def _await_sends(self, sends: list[_Sent]) -> None:
        for work, _, dst, what in sends:
            self._wait(work, what, dst)
        sends.clear()

    def _wait(self, work: Started, what: str, peer: int) -> None:
        """On NCCL this orders the current stream and returns; the group's own timeout then bounds the wait."""
        with self._named(what, peer):
            if self.device.type == "cuda":
                work.wait()
            else:
                work.wait(self._timeout)

    @contextmanager
    def _named(self, what: str, peer: int | None) -> Iterator[None]:
        """Turns a backend's error into what is behind it: the time, the peer, or a rank that the peer waited for."""
        start = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            if time.monotonic() - start >= self._timeout_seconds and self._watchdog.failure is None:
                raise RunError(f"waited {self._timeout_seconds:g} s for {what}{self._watchdog.elsewhere()}") from None
            failure = self._watchdog.verdict(peer)
            if failure is not None:
                raise RunError(failure) from None
            raise RunError(f"lost the connection while waiting for {what}: {error}") from error

    def _interrupt(self) -> None:
        """Wakes a main thread that is blocked on any peer: see the head of this file."""
        everyone = tuple(range(self.world_size))
        reducing = self._reducing.items() if self.device.type == "cpu" else ()
        of_channels = self._grouped.with_ranks() if self._grouped is not None and self.device.type == "cpu" else ()
        for ranks, group in [(everyone, self._data), (everyone, self._control), *reducing, *of_channels]:
            if len(ranks) < 2:
                continue
            peer = ranks[(ranks.index(self.rank) + 1) % len(ranks)]
            with suppress(RuntimeError):
                work = dist.irecv(torch.empty(1), peer, group=group, tag=MAX_EDGES * 1024 - 1)
                assert work is not None
                work.wait(timedelta(milliseconds=1))


@contextmanager
def _connecting(launch: Launch, seconds: float) -> Iterator[None]:
    try:
        yield
    except RunError:
        raise
    except RuntimeError as error:
        first, _, _ = str(error).partition("\n")
        raise RunError(
            f"rank {launch.rank} did not find all {launch.world_size} ranks within {seconds:g} s; see what the others "
            f"said: {first}"
        ) from None


def _resolve(device: torch.device | str | None) -> torch.device:
    """The device with its index; for a GPU, made current."""
    where = torch.device("cpu" if device is None else device)
    if where.type == "cpu":
        return where
    if where.type != "cuda" or not torch.cuda.is_available() or not dist.is_nccl_available():
        raise FxpipeError(f"device {where}: needs a CUDA build of torch with NCCL and a visible GPU; use device='cpu'")
    if where.index is None:
        where = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(where)
    return where
