"""How a patch computes an operation on its own rows: what its graph calls instead of what was captured.

conv2d(x, w, padding=1)     Window(above=1, below=1, end=1)    conv2d(halo(x), w, padding=(0, 1))
group_norm(x, 4)            Moments(4)                         normalise(x, moments of all patches)
reshape(x, [B, H*W, C])     Shaped(reshape)                    reshape(x, [B, rows of the patch * W, C])
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from passes.rows.layout import Place, Result, Slot


@dataclass(frozen=True)
class Same:
    """The captured operation, some of its arguments changed."""

    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Shaped:
    """`target` of the first operand and the shape that the result has in the patch."""

    target: Any


@dataclass(frozen=True)
class Window:
    """Every row of the result reads rows around its own: the operand with `above` and `below` of the neighbours.

    At the image's borders these are `fill` (a number, "reflect" or "replicate"): `above` of them above, `end` below.
    `target` has the arguments of the captured operation, some changed so that it pads no rows itself; of its result the
    rows from `skip` on are kept.
    """

    above: int
    below: int
    end: int
    target: Any
    changes: Mapping[str, Any]
    fill: float | str = 0.0
    skip: int = 0

    def __str__(self) -> str:
        return f"halo {self.above} above, {self.below} below"


@dataclass(frozen=True)
class Moments:
    """A normalisation over groups of channels and all rows: `num_groups` of them."""

    num_groups: int

    def __str__(self) -> str:
        return "moments"


@dataclass(frozen=True)
class Summed:
    """Each patch's sum over its own rows, added up; a `mean` is weighted by the share of rows, of a norm the powers."""

    mean: bool = False
    power: float = 1

    def __str__(self) -> str:
        return "sum"


@dataclass(frozen=True)
class Resized:
    """The captured operation with argument `name` the size of its result: `times` rows for every row, as needed."""

    name: str
    times: int
    changes: Mapping[str, Any]


@dataclass(frozen=True)
class Joined:
    """Values one after the other along the rows; those without rows are a part of their own."""


@dataclass(frozen=True)
class Padded:
    """Entries that belong to no row before and after the rest; `without` are arguments for patches that have none."""

    without: Mapping[str, Any]


@dataclass(frozen=True)
class Split:
    """Several stretches of the rows' dimension, as the states of the results say."""


@dataclass(frozen=True)
class CutRows:
    """Entries [start, stop) of the rows' dimension, which lie between parts or within whole ones."""

    start: int


@dataclass(frozen=True)
class Written:
    """Values written over the entries of the rows' dimension from `start` on, which are whole parts."""

    start: int


@dataclass(frozen=True)
class Whole:
    """The captured operation on whole operands; of its result the patch goes on with its own share."""


@dataclass(frozen=True)
class Attended(Same):
    """Attention of a patch's queries to the keys and values of all patches, which are gathered, or as `passes.sampling`
    finds better."""


PatchHow = (
    Same | Shaped | Window | Moments | Summed | Resized | Joined | Padded | Split | CutRows | Written | Whole | Attended
)


@dataclass(frozen=True)
class Found:
    """What a rule says: where the rows lie in the result, how a patch computes it, which operands it wants otherwise.

    `wants`: a replicated operand cut to the patch's rows (`Rows`), or one with rows gathered whole (None).
    """

    state: Result
    how: PatchHow = field(default_factory=Same)
    wants: Mapping[Slot, Place] = field(default_factory=dict)
