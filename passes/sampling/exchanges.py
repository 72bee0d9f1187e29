"""What patches exchange, as nodes of a patch graph; a form of the step lowers them to messages.

halo(x, dim, above, below, end, fill)   x between the rows of the patches above and below
gather(x)                               x of all patches
merged_moments(x, num_groups)           mean and variance of groups over all patches
total(x)                                the sum over all patches
to_heads(x, dim, bounds)                some heads of x of all patches: x of this patch for all its heads
to_rows(x, dim, bounds)                 the other way round
passed_on(x, hop)                       what the patch before this one, in a ring, has as x
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import fx

from passes.rows.layout import Rows


@dataclass(frozen=True)
class Exchange:
    """One exchange of all patches, the same in each one's graph: in `meta["exchange"]` of its node.

    `kind`: "halo", "gather", "moments", "sum", "prediction" (the gather of the result), "ulysses" (rows for heads, or
    heads for rows) or "ring". `value` is the captured value that is exchanged, `state` where its rows lie (of a sum:
    None); of a ring they are the keys, and what is exchanged is keys and values in one.
    """

    name: str
    kind: str
    value: fx.Node
    state: Rows | None

    @property
    def rows(self) -> Rows:
        """Of all but a sum."""
        assert self.state is not None
        return self.state

    @property
    def key(self) -> tuple[str, str]:
        return self.name, self.kind


def halo(value: Any, dim: int, above: int, below: int, end: int, fill: float | str) -> NoReturn:
    _not_lowered()


def gather(value: Any) -> NoReturn:
    _not_lowered()


def merged_moments(value: Any, num_groups: int) -> NoReturn:
    _not_lowered()


def total(value: Any) -> NoReturn:
    _not_lowered()


def to_heads(value: Any, dim: int, bounds: Sequence[int]) -> NoReturn:
    _not_lowered()


def to_rows(value: Any, dim: int, bounds: Sequence[int]) -> NoReturn:
    _not_lowered()


def passed_on(value: Any, hop: int) -> NoReturn:
    _not_lowered()


def _not_lowered() -> NoReturn:
    raise AssertionError("a patch graph is to be lowered to a form before it runs")
