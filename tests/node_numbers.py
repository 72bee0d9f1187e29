"""What one operation costs and takes, as plain numbers."""

from dataclasses import dataclass
from types import SimpleNamespace

from fxpipe.capture.sizes import evaluate
from fxpipe.costs import COUNT_NAMES, NodeCost
from fxpipe.costs.model import CostModel, node_seconds
from fxpipe.costs.table import CostTable


def counts_of(cost: NodeCost, num_samples: int) -> SimpleNamespace:
    """Every count by its name: integers, evaluated one by one."""
    return SimpleNamespace(**{name: evaluate(getattr(cost, name), num_samples) for name in COUNT_NAMES})


@dataclass(frozen=True)
class Taken:
    """Seconds of one operation."""

    forward: float
    backward_input: float
    backward_weight: float

    @property
    def backward(self) -> float:
        return self.backward_input + self.backward_weight


def seconds_of(model: CostModel, cost: NodeCost, num_samples: int) -> Taken:
    found = node_seconds(model, CostTable.of([cost]), num_samples)
    return Taken(*(float(part[0]) for part in (found.forward, found.backward_input, found.backward_weight)))
