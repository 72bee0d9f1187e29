"""Operations as timed on the device at hand, one by one, at their own sizes; another model's seconds for the rest.

conv2d [2, 128, 8, 64]   0.9 ms          a roofline: 0.6 ms, as small patches reach less of the peak
layer_norm [2, 512, 256] 0.4 ms                      0.1 ms, as it is bound neither by FLOPs nor by memory

For predictions of programs that are made: `sampler.simulate(steps=50, cost_model=Timed())`. Every round runs every
operation once, so that between two runs of one the caches see others, as in a program.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch

from cost_models.calibrate import measured
from cost_models.timing import expected, now
from fxpipe.costs.model import CostModel, NodeSeconds
from fxpipe.costs.operations import Operation
from fxpipe.costs.table import CostTable

ROUNDS = 6  # of which the first warms up


class Timed(CostModel):
    """Args: base: of what is not timed; where left out the device's measured roofline."""

    def __init__(self, device: torch.device | str | None = None, base: CostModel | None = None) -> None:
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._base = base or measured(str(self._device))
        self._taken: dict[Operation, list[float]] = {}

    @property
    def memory_bytes(self) -> int | None:
        return self._base.memory_bytes

    def seconds(self, table: CostTable, num_samples: int) -> NodeSeconds:
        return self._base.seconds(table, num_samples)

    def moving_seconds(self, bytes_read: int, bytes_written: int) -> float:
        return self._base.moving_seconds(bytes_read, bytes_written)

    def chain_seconds(self, moved: Sequence[tuple[int, int]]) -> float:
        return self._base.chain_seconds(moved)

    def drawing_seconds(self, target: str, num_bytes: int) -> float:
        return self._base.drawing_seconds(target, num_bytes)

    def operation_seconds(self, operations: Sequence[Operation]) -> list[float | None]:
        """As measured; None of what cannot be run on made-up values."""
        new = dict.fromkeys(operation for operation in operations if operation not in self._taken)
        self._taken |= self._timed(list(new))
        return [expected(taken) if (taken := self._taken[operation]) else None for operation in operations]

    def time_again(self) -> None:
        """One more round of all that has been timed: called among measurements, the mean has their drift."""
        with torch.no_grad():
            for operation, taken in self._taken.items():
                if taken:
                    taken += self._run(operation)

    def _timed(self, operations: Sequence[Operation]) -> dict[Operation, list[float]]:
        taken: defaultdict[Operation, list[float]] = defaultdict(list)
        with torch.no_grad():
            for turn in range(ROUNDS):
                for operation in operations:
                    if turn == 0 or taken[operation]:
                        taken[operation] += self._run(operation)
        return {operation: taken[operation][1:] for operation in operations}

    def _run(self, operation: Operation) -> list[float]:
        try:
            run = operation.bound(self._device)
            started = now(self._device)
            run()
            return [now(self._device) - started]
        except (RuntimeError, IndexError, ValueError):  # values that are made up may not be what it takes
            return []
