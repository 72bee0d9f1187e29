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


def agree(transport: Transport, call: str, parts: Mapping[str, Any]) -> None:
    """Raise RunError unless every rank makes this call, with these values; names the first that differs.

    Where all agree, ranks exchange eight bytes each.
    """
    digest = hashlib.sha256(repr((call, parts)).encode()).digest()
    mine = torch.tensor([int.from_bytes(digest[:8], "little", signed=True)])
    numbers = transport.all_gather(mine, f"every rank to call {call}")
    if all(torch.equal(number, mine) for number in numbers):
        return
    values = everyones(transport, {"call": call, **parts})
    for what in {"call": None, **parts}:
        different = [rank for rank, other in enumerate(values) if other.get(what) != values[0].get(what)]
        if not different:
            continue
        if what == "call":
            there = ", ".join(f"rank {rank} calls {other['call']}" for rank, other in enumerate(values))
            raise RunError(f"{there}; call every method of an engine on every rank, in the same order")
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


def checksum(tensor: torch.Tensor) -> tuple[int, ...]:
    """Shape and a weighted sum of all words, computed where the tensor is; it tells apart what is not made to collide.

    Every word counts by the product of a weight of its row and one of its column, so that no exchange of values goes
    unseen.
    """
    flat = tensor.detach().contiguous().flatten()
    words = (torch.view_as_real(flat).flatten() if flat.is_complex() else flat).view(
        _WORDS[flat.dtype.to_real().itemsize]
    )
    whole = len(words) // _COLUMNS * _COLUMNS
    columns = _weights(_COLUMNS, words.device)
    sums = [(part * columns).sum(1) for part in words[:whole].view(-1, _COLUMNS).split(_ROWS)]
    sums.append((words[whole:] * columns[: len(words) - whole]).sum()[None])
    rows = torch.cat(sums)
    return (*tensor.shape, int((rows * _weights(len(rows), words.device)).sum()))


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COLUMNS, _ROWS = 4096, 256  # words of a row; rows at a time


def _weights(count: int, device: torch.device) -> torch.Tensor:
    """Odd numbers without a pattern: the first steps of a linear congruence, spread."""
    mixed = (torch.arange(1, count + 1, device=device) * -7046029254386353131) ^ 0x2545F4914F6CDD1D
    return (mixed ^ (mixed >> 29)) * -4658895280553007687 | 1


def everyones(transport: Transport, mine: T) -> list[T]:
    """Collective: what every rank gave, on every rank."""
    values = transport.broadcast_object(transport.gather_object(mine))
    assert values is not None
    return values
