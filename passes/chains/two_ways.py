"""Plans for two backbones in opposite directions: who holds what, and what it costs."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

from fxpipe.errors import CompileError

BidirectionalObjective = Literal["paper", "paper-clamped"]


@dataclass(frozen=True)
class TwoWays:
    """One problem: the stages of either backbone, micro-batches of either, and devices of every group."""

    num_stages: int
    num_microbatches: tuple[int, int]  # down, up
    replicas: int

    @property
    def slots(self) -> int:
        """M: periods in which all stages work, were there no pipeline to fill; S / 2 rounded down."""
        down, up = self.num_microbatches
        return down + up - min(self.num_stages // 2, down, up)


@dataclass(frozen=True)
class BidirectionalPlan:
    """Device group k holds down stage k and up stage S - 1 - k, on `replicas` devices."""

    down: tuple[int, ...]  # S + 1 boundaries in the blocks of either backbone
    up: tuple[int, ...]
    layout: TwoWays
    objective: BidirectionalObjective
    seconds: float  # of one step, by the objective
    period_seconds: float  # max T0
    sync_seconds: float  # the objective's last term
    peak_bytes: tuple[float, ...]  # per rank of every group, 1F1B both ways: states, and activations in flight

    def __str__(self) -> str:
        layout = self.layout
        return (
            f"{layout.num_stages} stages x {layout.replicas} devices both ways, {layout.num_microbatches[0]} + "
            f"{layout.num_microbatches[1]} micro-batches: {self.seconds * 1e3:.1f} ms ({self.objective}), "
            f"at most {max(self.peak_bytes) / 2**30:.1f} GiB a rank; down {_runs(self.down)}, up {_runs(self.up)}"
        )


def _runs(boundaries: Sequence[int]) -> str:
    return " ".join(f"[{i}-{j - 1}]" for i, j in pairwise(boundaries))


def check_objective(objective: str) -> None:
    if objective not in get_args(BidirectionalObjective):
        raise CompileError(
            f"unknown objective {objective!r}; choose one of {', '.join(get_args(BidirectionalObjective))}"
        )
