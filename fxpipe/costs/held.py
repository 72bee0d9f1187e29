"""A cost model of the user's own: every answer is held against what seconds are, before anything is planned by it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from fxpipe.costs.model import CostModel, NodeSeconds, node_seconds
from fxpipe.costs.operations import Operation
from fxpipe.costs.table import CostTable
from fxpipe.errors import CompileError


@dataclass(frozen=True, eq=False)
class CheckedCosts(CostModel):
    """The same answers.

    Raises:
        CompileError: one is no finite number from 0 on, or none for each; by all methods.
    """

    model: CostModel

    @property
    def memory_bytes(self) -> int | None:
        return self.model.memory_bytes

    def seconds(self, table: CostTable, num_samples: int) -> NodeSeconds:
        return node_seconds(self.model, table, num_samples)

    def moving_seconds(self, bytes_read: int, bytes_written: int) -> float:
        return self._held(self.model.moving_seconds(bytes_read, bytes_written), "moving_seconds")

    def chain_seconds(self, moved: Sequence[tuple[int, int]]) -> float:
        own = getattr(self.model, "chain_seconds", None)
        return super().chain_seconds(moved) if own is None else self._held(own(moved), "chain_seconds")

    def drawing_seconds(self, target: str, num_bytes: int) -> float:
        return self._held(self.model.drawing_seconds(target, num_bytes), "drawing_seconds")

    def operation_seconds(self, operations: Sequence[Operation]) -> Sequence[float | None]:
        own = getattr(self.model, "operation_seconds", None)
        if own is None:
            return super().operation_seconds(operations)
        found = own(operations)
        each = list(found) if isinstance(found, Iterable) else []
        if len(each) != len(operations):
            raise CompileError(
                f"cost_model {type(self.model).__name__}: operation_seconds is {found!r:.80}; return seconds or None "
                f"for each of {len(operations)} operations"
            )
        return [None if one is None else self._held(one, "operation_seconds") for one in each]

    def _held(self, found: Any, what: str) -> float:
        try:
            seconds = float(found)
        except (TypeError, ValueError, OverflowError):
            seconds = -1.0
        if not 0 <= seconds < inf or isinstance(found, str):
            name = type(self.model).__name__
            raise CompileError(f"cost_model {name}: {what} is {found!r:.80}; seconds are finite, and 0 or more")
        return seconds
