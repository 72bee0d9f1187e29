"""What a device takes for the operations of a graph: one protocol, and the one way to ask it.

table, 8 samples    ->    forward          [2.1e-3, 4e-5, ...]     a number per node; a block, a stage, a graph
                          backward_input   [2.3e-3, 6e-5, ...]     of a rank program takes the sum over its nodes
                          backward_weight  [1.9e-3,    0, ...]
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
import sympy

from fxpipe.costs import NodeCost
from fxpipe.costs.operations import Operation
from fxpipe.costs.polynomials import Floats
from fxpipe.costs.table import CostTable
from fxpipe.errors import CompileError


@dataclass(frozen=True, eq=False, slots=True)
class NodeSeconds:
    """Seconds of every node, in the order of a table: the forward, and the gradients of activations (*input*) and of
    parameters (*weight*); `together` those of both in one graph, where that is not what they take apart."""

    forward: Floats
    backward_input: Floats
    backward_weight: Floats
    together: Floats | None = None

    @property
    def backward(self) -> Floats:
        """Of both parts in one graph."""
        return self.backward_input + self.backward_weight if self.together is None else self.together

    @property
    def both(self) -> Floats:
        """Of forward and backward."""
        return self.forward + self.backward


class CostModel(Protocol):
    """A device: what operations take on it, and the memory it has.

    A model of your own inherits from this, writes `seconds`, and the rest where it knows better:

        class MemoryBound(fxpipe.CostModel):  # a device that moves a terabyte a second, and computes for nothing
            def seconds(self, table, num_samples):
                n = table.counts(num_samples)
                all_bytes = n.bytes_read + n.bytes_written, n.backward_input_bytes, n.backward_weight_bytes
                return fxpipe.NodeSeconds(*(num_bytes / 1e12 for num_bytes in all_bytes))

        fxpipe.compile(model, world_size=8, cost_model=MemoryBound())
    """

    @property
    def memory_bytes(self) -> int | None:
        """Bytes of the device's memory, which limit plans; None where that is not known."""
        return None

    @abstractmethod
    def seconds(self, table: CostTable, num_samples: int) -> NodeSeconds:
        """Seconds of every node on `num_samples` samples. Time is not linear in counts: `table.counts` has them all.

        Raises:
            CompileError: the model knows the nodes of one graph, and `table.graph` is another.
        """
        ...

    def moving_seconds(self, bytes_read: int, bytes_written: int) -> float:
        """Seconds of a kernel that only moves memory, such as the sum of two gradients.

        By `seconds` of a table without a graph: a model that knows the nodes of one graph writes this, too.
        """
        moved = NodeCost(bytes_read=sympy.Integer(bytes_read), bytes_written=sympy.Integer(bytes_written))
        return float(node_seconds(self, CostTable.of([moved]), 1).forward[0])

    def chain_seconds(self, moved: Sequence[tuple[int, int]]) -> float:
        """Seconds of kernels that only move memory, each what the one before has made: bytes read and written."""
        return sum(self.moving_seconds(*kernel) for kernel in moved)

    def operation_seconds(self, operations: Sequence[Operation]) -> Sequence[float | None]:
        """Seconds of a patch's operations at their own sizes, where the model times them; None: by their counts."""
        return [None] * len(operations)

    def drawing_seconds(self, target: str, num_bytes: int) -> float:
        """Seconds to draw so many bytes of random numbers by an operation: on GPUs hardly any."""
        return 0.0


def node_seconds(model: CostModel, table: CostTable, num_samples: int) -> NodeSeconds:
    """A model's seconds, held against what seconds must be.

    Raises:
        CompileError: they are not a finite number from 0 on per node; names the first that is not.
    """
    found = model.seconds(table, num_samples)
    parts = [field.name for field in fields(NodeSeconds) if getattr(found, field.name, ...) is not None]
    return NodeSeconds(*(_checked(model, found, part, table, num_samples) for part in parts))


def _checked(model: CostModel, found: Any, part: str, table: CostTable, num_samples: int) -> Floats:
    where = f"cost_model {type(model).__name__}: seconds(table, {num_samples})"
    try:
        values = np.asarray(getattr(found, part), dtype=np.float64)
    except (AttributeError, TypeError, ValueError):
        raise CompileError(f"{where} is {found!r:.80}; return fxpipe.NodeSeconds of three arrays") from None
    if values.shape != (len(table),):
        raise CompileError(f"{where}.{part} has shape {values.shape}; return one number for each of {len(table)} nodes")
    wrong = np.flatnonzero(~((values >= 0) & (values < np.inf)))
    if len(wrong):
        name, value = list(table)[wrong[0]], values[wrong[0]]
        raise CompileError(f"{where}.{part} is {value} for {name!r}; seconds are finite, and 0 or more")
    return values
