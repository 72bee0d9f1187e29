"""What the ranks of a launch must have alike: compared over all of them, so that a difference is told by name."""

import functools
import hashlib
import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from fxpipe.errors import RunError
from fxpipe.plan.transport import T, Transport

Values = Mapping[str, Any]
_OF_SOME = (
    "give every rank the same one; what is made of all gradients needs these on every rank: data_parallel= as many as "
    "ranks, and shard='none'"
)
_WORD, _SENTENCE = 20, 400
"""Characters of a value that is told; digests are longer words, what was captured are longer texts."""
_ALIKE = "seed every process alike before building the model, or load the same checkpoint on all"


@contextmanager
def told(transport: Transport) -> Iterator[None]:
    """An exception of this rank ends the others too."""
    try:
        yield
    except BaseException as error:
        transport.abort(error)
        raise


def agree(transport: Transport, parts: Values, method: str = "", mine: int = 0, some: Values | None = None) -> int:
    """Raise RunError unless every rank has these values, in a call of the same method; names the first that differs.

    Where all agree, ranks exchange 24 bytes each, and it returns the bits that `mine` has on any of them. Values in
    `some` are compared among the ranks that have any.
    """
    told = torch.tensor([digest_of((method, parts)), mine, digest_of(some) if some else 0])
    what = f"every rank to call {method}; program.engine(timeout=...) waits longer" if method else "every rank's values"
    numbers = transport.all_gather(told, what).wait()
    digests, others, of_some = torch.stack(numbers).unbind(1)
    if len({*of_some.tolist()} - {0}) > 1:
        _refuse({rank: found for rank, found in enumerate(everyones(transport, some)) if found}, _OF_SOME)
    bits = int(functools.reduce(operator.or_, others.tolist()))
    if bool((digests == told[0]).all()):
        return bits
    values = everyones(transport, (method, parts))
    if len({called for called, _ in values}) > 1:
        calls = ", ".join(f"rank {rank} calls {called}" for rank, (called, _) in enumerate(values))
        raise RunError(f"{calls}; call every method of an engine on every rank, in the same order")
    _refuse(dict(enumerate(found for _, found in values)))
    return bits


def _refuse(values: Mapping[int, Values], remedy: str = "give every rank the same one") -> None:
    """Raises RunError that names the first of what ranks have otherwise than the first of them."""
    base, first = next(iter(values.items()))
    for what in {name: None for of_rank in values.values() for name in of_rank}:
        different = [rank for rank, of_rank in values.items() if repr(of_rank.get(what)) != repr(first.get(what))]
        if different:
            theirs, its = _shown(values[different[0]].get(what)), _shown(first.get(what))
            raise RunError(f"ranks {different} have another {what}{theirs} than rank {base}{its}; {remedy}")


def _shown(value: object) -> str:
    """Where it says something to a reader, as digests do not."""
    text = str(value) if isinstance(value, int | float | str) else ""
    is_short = 0 < len(text) < (_SENTENCE if " " in text else _WORD)
    return f" ({text})" if is_short else ""


def digest_of(values: object) -> int:
    """A number of 64 bits, the same in every process, that other values do not have."""
    return int.from_bytes(hashlib.sha256(repr(values).encode()).digest()[:8], "little", signed=True)


def agree_on_state(transport: Transport, state: Mapping[str, torch.Tensor], remedy: str = _ALIKE) -> None:
    """State that several ranks hold (frozen modules, tied parameters) must be the same on all of them."""
    sums = everyones(transport, {name: checksum(tensor) for name, tensor in state.items()})
    first: dict[str, tuple[int, Any]] = {}
    for rank, of_rank in enumerate(sums):
        for name, found in of_rank.items():
            other, expected = first.setdefault(name, (rank, found))
            if expected != found:
                raise RunError(f"{name} differs between ranks {other} and {rank}; {remedy}")


def sampled(tensor: torch.Tensor) -> torch.Tensor:
    """A thousand values of it, or a few more, by which two models that are not the same are told apart."""
    flat = tensor.detach().flatten()
    return flat[:: max(1, len(flat) // 1024)].clone()


def checksum(tensor: torch.Tensor) -> tuple[int, ...]:
    """Shape and a weighted sum of all words, computed where the tensor is; it tells apart what is not made to collide.

    A word counts by the product of a weight of its row and one of its column, so that no exchange of values, samples or
    rows goes unseen.
    """
    flat = tensor.detach().contiguous().flatten()[:, None]  # a single entry may have any stride
    data = (torch.view_as_real(flat) if flat.is_complex() else flat).view(torch.uint8).flatten()
    data = data.clone() if data.storage_offset() % 8 else data
    words = data[: len(data) // 8 * 8].view(torch.int64)
    whole = len(words) // _COLUMNS * _COLUMNS
    columns = _weights(_COLUMNS, data.device)
    rows = words[:whole].view(-1, _COLUMNS)
    products = torch.mv(rows, columns) if data.device.type == "cpu" else (rows * columns).sum(1)
    rest = [(part * columns[: len(part)]).sum()[None] for part in (words[whole:], data[8 * len(words) :])]
    sums = torch.cat([products, *rest])
    return (*tensor.shape, int((sums * _weights(len(sums), data.device)).sum()))


_COLUMNS = 4096  # words of a row


def _weights(count: int, device: torch.device) -> torch.Tensor:
    """Odd numbers without a pattern: the first steps of a linear congruence, spread."""
    mixed = (torch.arange(1, count + 1, device=device) * -7046029254386353131) ^ 0x2545F4914F6CDD1D
    return (mixed ^ (mixed >> 29)) * -4658895280553007687 | 1


def everyones(transport: Transport, mine: T) -> list[T]:
    """Collective: what every rank gave, on every rank."""
    values = transport.broadcast_object(transport.gather_object(mine))
    assert values is not None
    return values
