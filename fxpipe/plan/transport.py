"""What rank programs ask of a network: the protocol between a plan and whatever runs it.

Each directed pair of ranks is a channel: one sender, one receiver, first in first out, and sends never block. Both ends
take the order of a channel's messages from the same compiled list, so a message carries only its edge id.

    rank 0: send a (edge 4) | send b (edge 7)          channel 0 -> 1:  [4: a] [7: b]
    rank 1: recv edge 4 | recv edge 7 | wait 4 | wait 7

A step ends with `flush` on every rank; edge ids may repeat in the next step. Where messages cross from a step to the
next, it ends with `advance`: what was posted in one step is waited for in a later one, and the last ends with `flush`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch

if TYPE_CHECKING:
    from fxpipe.plan.lanes import SendOrder

T = TypeVar("T")
Channel = tuple[int, int]  # (source rank, destination rank)


@dataclass(frozen=True, slots=True)
class Pending(Generic[T]):
    """A receive that has been posted, or a sum over ranks that has been started.

    `wait` returns the tensor, contiguous, or the sums in the order given. It raises RunError when they cannot come: a
    rank failed, or the time is up.
    """

    wait: Callable[[], T]


class Transport(Protocol):
    """One rank's view of the network. `device` is where received tensors are wanted."""

    rank: int
    world_size: int
    device: torch.device

    def open_channels(self, channels: Mapping[Channel, int], groups: Sequence[tuple[int, ...]]) -> None:
        """Collective: makes channels, each with the bytes it carries in a step, and groups of ranks that reduce, ready
        in this order on every rank."""
        ...

    def begin_form(self, sends: "Callable[[], SendOrder]") -> None:
        """Before a form of a step: the order in which its messages can be sent, for who has to keep one."""
        ...

    def set_action(self, action: str) -> None:
        """Names what this rank does from now on, for errors; raises RunError when another rank has failed."""
        ...

    def send(self, tensor: torch.Tensor, dst: int, edge: int) -> None:
        """Sends a contiguous tensor; never blocks. The tensor is kept, and must not be changed, until `flush`, or the
        `advance` of the next step.

        The receive it meets was posted in the step of the same number.

        `edge` is the compile-time id of the message, unique within a step and below 2**21.
        """
        ...

    def recv(
        self, src: int, edge: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Pending[torch.Tensor]:
        """Posts the receive of the channel's next message; never blocks. Every posted receive must be waited for."""
        ...

    def all_reduce(self, tensors: list[torch.Tensor], ranks: tuple[int, ...], edge: int) -> Pending[list[torch.Tensor]]:
        """Starts to sum each tensor over `ranks`; never blocks. The tensors must not be used before the wait.

        All ranks of one group start their reductions and broadcasts in the same order.
        """
        ...

    def reduce_scatter(
        self, tensors: list[torch.Tensor], owners: tuple[int, ...], ranks: tuple[int, ...], edge: int
    ) -> Pending[list[torch.Tensor]]:
        """Starts to sum each tensor over `ranks` on its owner, one of them; never blocks. The wait gives this rank's
        sums, in the memory of its own tensors; none of them must be used before it.
        """
        ...

    def broadcast(
        self, tensors: list[torch.Tensor], owners: tuple[int, ...], ranks: tuple[int, ...], edge: int
    ) -> Pending[None]:
        """Starts to send each tensor's values from its owner to all `ranks`; never blocks. The wait writes them into
        the tensors that this rank does not own.
        """
        gathering = self.gather(tensors, owners, ranks, edge)

        @torch.no_grad()
        def wait() -> None:
            for tensor, values in zip(tensors, gathering.wait(), strict=True):
                if values.data_ptr() != tensor.data_ptr():  # ranks on one and the same model have nothing to copy
                    tensor.copy_(values)

        return Pending(wait)

    def gather(
        self, tensors: list[torch.Tensor], owners: tuple[int, ...], ranks: tuple[int, ...], edge: int
    ) -> Pending[list[torch.Tensor]]:
        """Starts to send each tensor's values from its owner to all `ranks`; never blocks. The wait gives this rank's
        own tensors as they are, and new ones in place of the others, of which only shape and type are asked.
        """
        ...

    def advance(self) -> None:
        """End of a step whose messages may still be on their way; those it sent in the step before are received.

        That is when every rank has begun to run this step, so that it seldom waits, and never for long.
        """
        ...

    def flush(self) -> None:
        """End of a step: returns once all this rank has sent is received; raises RunError on a left-over message."""
        ...

    def sent_bytes(self) -> dict[Channel, int]:
        """Bytes this rank has sent so far, per channel."""
        ...

    def abort(self, error: BaseException) -> None:
        """Tells every other rank that this one has failed: their waits raise RunError naming this rank, action, error.

        Only the first failure counts; a rank that fails because another did may call this too.
        """
        ...

    def broadcast_object(self, value: T) -> T:
        """Collective: on every rank the `value` that rank 0 gave, to be treated as read-only."""
        ...

    def gather_object(self, value: T) -> list[T] | None:
        """Collective: on rank 0 the values in rank order, to be treated as read-only; None elsewhere."""
        ...

    def all_gather(self, tensor: torch.Tensor, what: str) -> Pending[list[torch.Tensor]]:
        """Collective: starts to collect every rank's tensor of a few numbers, on the CPU, shaped alike; never blocks.

        A wait may come after other messages and collectives, but before the next `all_gather`; `what` names it in
        errors.
        """
        ...

    def copy_values(self, copies: Sequence[tuple[torch.Tensor, int, int]], what: str) -> None:
        """Collective: (tensor, source, destination), the same list on all ranks; its values there become those here.

        Where a rank is neither, the tensor does not count.
        """
        ...

    def close(self) -> None:
        """Leaves the network; the other ranks may go on as long as they need nothing from this one."""
        ...
