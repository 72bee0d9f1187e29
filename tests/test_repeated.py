"""What a call on tensors without data has given is made again: the same sizes, in the same memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fxpipe.plan.displaced_ops import unpack
from fxpipe.simulate.repeated import call_key, result_of

CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "new": (torch.mm, (torch.empty(4, 3, device="meta"), torch.empty(3, 2, device="meta"))),
    "a view": (torch.Tensor.t, (torch.empty(4, 3, device="meta")[1:],)),
    "views of one": (unpack, (torch.empty(10, device="meta"), [[2, 3], [4]])),
    "both": (lambda x: (x[:2], x + 1), (torch.empty(4, device="meta"),)),
}


@pytest.mark.parametrize("what", CALLS)
def test_results_are_made_again(what: str) -> None:
    call, args = CALLS[what]
    key, given = call_key(call, args, {})
    value = call(*args)
    assert call_key(call, args, {})[0] == key
    found = result_of(value, given, _own_bytes(value, given), 7)
    assert found is not None
    for again, one in zip(_tensors(found.again(given)), _tensors(value), strict=True):
        assert (again.shape, again.stride(), again.dtype) == (one.shape, one.stride(), one.dtype)
        assert [again.untyped_storage()._cdata == t.untyped_storage()._cdata for t in given] == [
            one.untyped_storage()._cdata == t.untyped_storage()._cdata for t in given
        ]


def test_what_cannot_be_made_again() -> None:
    """A view of either of two, another type of the same memory, two in new memory, and what leaves more behind."""
    x = torch.empty(4, device="meta")
    assert result_of(x[1:], [x, x.view(2, 2)], 0, 0) is None
    assert result_of(x.view(torch.int32), [x], 0, 0) is None
    assert result_of((x + 1).split(2), [x], 16, 16) is None
    assert result_of(x + 1, [x], 32, 32) is None
    assert result_of(4, [x], 0, 0) is None


def test_numbers_of_another_type_are_another_call() -> None:
    x = torch.empty(4, device="meta")
    assert call_key(torch.mul, (x, 2), {})[0] != call_key(torch.mul, (x, 2.0), {})[0]
    assert call_key(torch.mul, (x, 2), {})[0] != call_key(torch.mul, (x[::2], 2), {})[0]


def _tensors(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else [*value]


def _own_bytes(value: Any, given: list[torch.Tensor]) -> int:
    places = {tensor.untyped_storage()._cdata for tensor in given}
    return sum(t.untyped_storage().nbytes() for t in _tensors(value) if t.untyped_storage()._cdata not in places)
