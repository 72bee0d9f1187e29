"""The operations of a rank program that are not stage calls. Each is one line of the dumped program."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxpipe.plan.transport import Pending, T, Transport


def begin(transport: Transport, action: str) -> None:
    """Marks the start of a scheduled action, for errors, progress and traces."""
    transport.set_action(action)


def draw(random: Callable[[int], torch.Tensor], index: int) -> torch.Tensor:
    """The whole batch of random draw `index`; the same on every rank."""
    return random(index)


@dataclass(frozen=True)
class BatchRows:
    """An input of which a rank has some samples of the batch alone: row i of `tensor` is sample `samples[i]`."""

    tensor: torch.Tensor
    samples: Sequence[int]

    def slice(self, start: int, stop: int) -> torch.Tensor:
        """Samples [start, stop), which must be there."""
        first = bisect_left(self.samples, start)
        return self.tensor.narrow(0, first, stop - start).contiguous()


def slice_batch(
    value: torch.Tensor | BatchRows, dim: int, outer: int, inner: int, start: int, stop: int, batch_size: int
) -> torch.Tensor:
    """Samples [start, stop) of a value whose dimension `dim` is outer x batch x inner, contiguous."""
    if isinstance(value, BatchRows):
        return value.slice(start, stop)
    if outer == 1:
        return value.narrow(dim, start * inner, (stop - start) * inner).contiguous()
    parts: torch.Tensor = value.unflatten(dim, (outer, batch_size, inner)).narrow(dim + 1, start, stop - start)
    return parts.flatten(dim, dim + 2).contiguous()


def cat_batch(parts: Sequence[torch.Tensor], dim: int, outer: int, inner: int) -> torch.Tensor:
    """Samples of several values one after the other; each has outer x its samples x inner in dimension `dim`."""
    if outer == 1:
        return torch.cat(list(parts), dim)
    taken = [part.unflatten(dim, (outer, part.shape[dim] // (outer * inner), inner)) for part in parts]
    return torch.cat(taken, dim + 1).flatten(dim, dim + 2)


def take(carried: dict[str, T], name: str) -> T:
    """A value or receive of the step before, out of its store, so that it is freed after its last use."""
    return carried.pop(name)


def send(transport: Transport, value: torch.Tensor, dst: int, edge: int) -> None:
    """Send a value to rank `dst`; never blocks. Traced contiguous, it may not be for kernels that choose strides."""
    transport.send(value.contiguous(), dst, edge)


def recv(
    transport: Transport, src: int, edge: int, shape: Sequence[int], dtype: torch.dtype, device: str
) -> Pending[torch.Tensor]:
    """Post the receive of a message from rank `src`; does not block."""
    return transport.recv(src, edge, tuple(shape), dtype, torch.device(device))


def wait(pending: Pending[torch.Tensor]) -> torch.Tensor:
    """Block until a posted receive has arrived."""
    return pending.wait()


def all_reduce(
    transport: Transport, gradients: list[torch.Tensor], ranks: Sequence[int], edge: int
) -> Pending[list[torch.Tensor]]:
    """Start to sum these gradients over `ranks`, the replicas of a stage; does not block."""
    return transport.all_reduce(gradients, tuple(ranks), edge)


def reduce_scatter(
    transport: Transport, gradients: list[torch.Tensor], ranks: Sequence[int], edge: int, owners: Sequence[int]
) -> Pending[list[torch.Tensor]]:
    """Start to sum these gradients over `ranks`, each on its owner; does not block."""
    return transport.reduce_scatter(gradients, tuple(owners), tuple(ranks), edge)


def wait_reduced(pending: Pending[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Block until all ranks have given their gradients: the sums, equal to the last bit on all that have them."""
    return pending.wait()


def broadcast(
    transport: Transport, parameters: list[torch.Tensor], ranks: Sequence[int], edge: int, owners: Sequence[int]
) -> Pending[None]:
    """Start to bring the values that the owners of these parameters have to all `ranks`; does not block."""
    return transport.broadcast(parameters, tuple(owners), tuple(ranks), edge)


def wait_values(pending: Pending[None]) -> None:
    """Block until the parameters have their owners' values."""
    pending.wait()


def gather(
    transport: Transport, parameters: list[torch.Tensor], ranks: Sequence[int], edge: int, owners: Sequence[int]
) -> Pending[list[torch.Tensor]]:
    """Start to bring the values of parameters that are shared out over `ranks`; does not block."""
    return transport.gather(parameters, tuple(owners), tuple(ranks), edge)


def wait_gathered(pending: Pending[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Block until they are here: a stage's parameters, whole, freed after the last call that reads them."""
    return pending.wait()


COLLECTIVES = (all_reduce, reduce_scatter, broadcast, gather)
"""Those that ranks start together; their ranks and edge are the third and fourth argument."""
WAITS = (wait, wait_reduced, wait_values, wait_gathered)


def release(saved: list[Any]) -> None:
    """Empty a list whose items have been unpacked, so that each is freed after its last use."""
    saved.clear()


def constant(
    value: float, shape: Sequence[int], dtype: torch.dtype, device: str, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """A tensor filled with `value`: a loss's own gradient (the micro-batch's weight, times the scale of losses in
    float16), or a gradient nobody gave."""
    filled = torch.full(tuple(shape), value, dtype=dtype, device=device)
    return filled if scale is None else filled.mul_(scale)


def accumulate(total: list[torch.Tensor], new: list[torch.Tensor]) -> list[torch.Tensor]:
    """Weight gradients of one more micro-batch, added in place (each list owns its memory)."""
    if total:
        torch._foreach_add_(total, new)
    return total


def add_weighted(total: torch.Tensor | None, loss: torch.Tensor, weight: float) -> torch.Tensor:
    """The loss so far plus one micro-batch's loss times its weight."""
    return loss * weight if total is None else total + loss * weight


def add_numbers(total: torch.Tensor | None, numbers: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """The loss and the numbers beside it so far, float64, plus one micro-batch's, each times its weight."""
    pairs = zip(numbers, weights, strict=True)
    new = torch.stack([n.double() * w if w else torch.zeros_like(n, dtype=torch.float64) for n, w in pairs])
    return new if total is None else total + new


def number(total: torch.Tensor, index: int, dtype: torch.dtype) -> torch.Tensor:
    """One of the whole batch's numbers; the loss is the first."""
    return total[index].to(dtype)
