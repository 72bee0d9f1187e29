"""What the ranks of a launch must have alike: compared over all of them, so that a difference is told by name."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from fxpipe.errors import RunError
from fxpipe.plan.transport import T, Transport


@contextmanager
def told(transport: Transport) -> Iterator[None]:
    """An exception of this rank ends the others too."""
    try:
        yield
    except BaseException as error:
        transport.abort(error)
        raise


def agree(transport: Transport, parts: Mapping[str, Any]) -> None:
    """Raise RunError unless every rank has these values; names the first that differs."""
    values = everyones(transport, parts)
    for what in {what: None for of_rank in values for what in of_rank}:
        different = [rank for rank, other in enumerate(values) if other.get(what) != values[0].get(what)]
        if different:
            raise RunError(f"ranks {different} have another {what} than rank 0; give every rank the same one")


def agree_on_state(transport: Transport, state: Mapping[str, torch.Tensor]) -> None:
    """State that several ranks hold (frozen modules, tied parameters) must be the same on all of them."""
    sums = everyones(transport, {name: checksum(tensor) for name, tensor in state.items()})
    first: dict[str, tuple[int, Any]] = {}
    for rank, of_rank in enumerate(sums):
        for name, found in of_rank.items():
            other, expected = first.setdefault(name, (rank, found))
            if expected != found:
                raise RunError(
                    f"{name} differs between ranks {other} and {rank}; seed every process alike "
                    "before building the model, or load the same checkpoint on all"
                )


def checksum(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(data.numpy().data).hexdigest()


def everyones(transport: Transport, mine: T) -> list[T]:
    """Collective: what every rank has, in their order."""
    values = transport.broadcast_object(transport.gather_object(mine))
    assert values is not None
    return values
