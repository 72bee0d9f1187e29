"""What the calls of a unit's graphs take in memory: what is kept, returned, and the most meanwhile.

A forward returns values and keeps some memory for the backward; a backward lets that go and makes gradients. What a
caller passes in belongs to the caller.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from fxpipe.plan.staged import Staged

UnitKey = tuple[str, int]
"""("F", stage) or ("T", component)."""


@dataclass(frozen=True)
class ForwardBytes:
    """A forward: the most during it, what it makes and keeps for the backward alone, the memory of what it returns.

    `returned` has, for every value given to others, a name of its memory and the bytes: values with one name share it,
    and one that is named like a value that was read lies in that one's memory. `kept` are the values read or returned
    that the backward keeps too.
    """

    most: int
    saved: int = 0
    returned: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    kept: frozenset[str] = frozenset()


@dataclass(frozen=True)
class BackwardBytes:
    """A backward or a part of one, the most during it beside what was held before.

    `gradients` are those of values read: memory by name, which may be that of the value's own incoming gradient, as for
    `ForwardBytes`. `weight_gradients` are made here. `saved` and `kept` are of what is still held after it: for the
    second part of a backward.
    """

    most: int
    gradients: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    weight_gradients: int = 0
    made: int = 0
    saved: int = 0
    kept: frozenset[str] = frozenset()


class CallBytes(Protocol):
    """The bytes of all calls of a placement's units."""

    def forward(self, unit: UnitKey, num_samples: int) -> ForwardBytes: ...

    def backward(self, unit: UnitKey, num_samples: int, part: str, given_up: frozenset[str]) -> BackwardBytes:
        """A whole backward ("B") or its parts ("I", "W"); `given_up` are kept values nobody else holds."""
        ...

    def layers(self, component: int, layers: tuple[int, int], num_samples: int) -> int:
        """The most during frozen layers, results included."""
        ...


class CallBytesOf(Protocol):
    """The calls of any placement."""

    def of(self, staged: Staged) -> CallBytes: ...
