"""One step, simulated: the clock and the count of memory that every decision asks."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from fxpipe.plan.plan import Prediction
from fxpipe.plan.schedule import Schedule
from fxpipe.plan.staged import Staged
from fxpipe.simulate import Clock
from fxpipe.simulate import simulate as run
from fxpipe.simulate.op_lists import StepOps
from fxpipe.simulate.rank_memory import peak_bytes
from passes.case import Case
from passes.fill.ahead import Unfilled
from passes.step_ops import step_ops


@dataclass(frozen=True, eq=False)
class Simulated:
    """One form of a step, of all ranks."""

    schedule: Schedule
    clock: Clock
    wire_bytes: int

    @property
    def seconds(self) -> float:
        return self.clock.seconds

    @property
    def peak_bytes(self) -> int:
        """Of the fullest rank."""
        return self.clock.peak_bytes

    @property
    def prediction(self) -> Prediction:
        return Prediction.of(self.seconds, self.clock.idle_share, self.peak_bytes, self.wire_bytes)

    @property
    def training(self) -> Unfilled:
        """Its idle time, to be filled."""
        return Unfilled(self.schedule, self.seconds, self.clock.starts, self.clock.idle)


def simulated(case: Case, schedule: Schedule, ops: StepOps) -> Simulated:
    return Simulated(schedule, run(ops, case.cluster), ops.wire_bytes)


def simulate(case: Case, staged: Staged, schedule: Schedule, sizes: Sequence[int]) -> Simulated:
    return simulated(case, schedule, step_ops(case, staged, schedule, sizes))


def least_peaks(ops: StepOps) -> list[int]:
    """The most bytes that every rank holds at once, if messages took no time."""
    at_once = defaultdict[int, float](float)  # when messages have arrived
    return [
        peak_bytes(of_rank, sum(held.values()), [0.0] * sum(op.kind == "begin" for op in of_rank), at_once)
        for of_rank, held in zip(ops.ranks, ops.held, strict=True)
    ]
