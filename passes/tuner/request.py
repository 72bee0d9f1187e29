"""What the user asked for, and what is left open."""

from collections.abc import Sequence
from dataclasses import dataclass

from fxpipe.plan.schedule import Schedule
from fxpipe.plan.staged import Run, runs_within, whole_stages


@dataclass(frozen=True)
class Request:
    """None leaves a choice open.

    `conditioning` is the probability of a self-conditioned backbone's first pass, None where there is none to leave
    out; `divisible` says that the batch may be cut. Orders are searched for in `budget_seconds` where the schedule is
    open. `recompute`: whole stages (True), nothing (False), or these runs of blocks and others where nothing fits
    otherwise. `fill` is one of `fxpipe.options.FILLS`, `shard` of `fxpipe.plan.staged.SHARDS`.
    `offload_optimizer`: the optimizer's states are on the host; None where they may be if nothing fits otherwise.
    """

    schedule: str | Schedule
    world_size: int
    batch_size: int
    data_parallel: int | None = None
    stages: int | None = None
    microbatches: int | None = None
    collocation: str | None = None
    recompute: bool | tuple[Run, ...] = ()
    memory_limit_bytes: int | None = None
    conditioning: float | None = None
    fill: str = "auto"
    budget_seconds: float = 2.0
    divisible: bool = True
    shard: str | None = None
    offload_optimizer: bool | None = None

    def runs(self, boundaries: Sequence[int]) -> tuple[Run, ...]:
        """The blocks of these stages that are computed again, whatever there is room for."""
        if isinstance(self.recompute, bool):
            return whole_stages(boundaries) if self.recompute else ()
        return runs_within(self.recompute, boundaries)

    @property
    def is_open(self) -> bool:
        """Whether the order is to be chosen."""
        return self.schedule == "auto"
