"""What blocks hold: weights, inputs, and the values that wait for a backward, each with the blocks that want it.

weight up.weight   46 KB, trained     blocks 3, 7        tied: a stage with both holds it once
value 12           5.2 MB*s           made by block 1; kept by 1 and 2; read by 2
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import sympy

from fxpipe.costs.polynomials import Polynomials


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter, buffer or constant by its state's name, with the blocks and components (by index) that read it;
    `kind` is which of these it is, `gives` are the blocks in which a gradient of it arises."""

    name: str
    num_bytes: int
    num_elements: int
    trained: bool
    blocks: tuple[int, ...]
    components: tuple[int, ...]
    kind: str = "parameter"
    gives: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BatchValue:
    """A value of the whole batch that micro-batches take their samples of: bytes are those of its batch.

    `kind` is "input", "draw" (`target` is what draws it), or "whole": computed on the whole batch from others, those
    in `made_from`. `blocks` and `components` read it; none do where it is there for others alone. Samples are a view of
    it, or `copied`; `shared`: all read the same.
    """

    name: str
    num_bytes: sympy.Expr
    blocks: tuple[int, ...]
    components: tuple[int, ...]
    kind: Literal["input", "draw", "whole"] = "input"
    target: str = ""
    made_from: tuple[str, ...] = ()
    copied: bool = False
    shared: bool = False


@dataclass(frozen=True, eq=False)
class Values:
    """The tensors that wait for a backward or come from elsewhere, by number; no model inputs, no draws, no weights.

    `num_bytes` are expressions of the batch, `maker` is the block that makes a value (None: a frozen component, or
    whoever reads it). Of every block, `kept` are the values its backward reads, `read` those that come into it.
    """

    num_bytes: tuple[sympy.Expr, ...]
    maker: tuple[int | None, ...]
    kept: tuple[frozenset[int], ...]
    read: tuple[frozenset[int], ...]

    @cached_property
    def sizes(self) -> Polynomials:
        """`num_bytes`, to be evaluated."""
        return Polynomials(self.num_bytes)
