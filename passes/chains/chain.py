"""A chain of blocks to cut into stages, each on some replicas: what is given, and what a cut costs.

    blocks     0  1  2  3  4  5  6  7          8 blocks, 4 devices
    stages    [0        3)[3          8)       boundaries (0, 3, 8)
    replicas   x x         x x                 replicas (2, 2): a micro-batch of 6 is 3 samples on every device

Model: DiffusionPipe (Tian et al., MLSys 2024), section 4.1. For a stage of blocks [i, j) on r devices, n samples each:

    period T0 = max(forward + backward, transfers of cut j both ways)
    sync T_S  = all-reduce of the stage's gradients
    objective "paper"           (M + 2S - 2) max T0 + max (T_S - own backward)
              "paper-clamped"   (M + 2S - 2) max T0 + max (0, T_S - own backward)
              "simulated"       (M - 1) max T0 + sum (forward + backward) + sum of transfers
                                + max (0, T_S - backward of the stages before it)

The first is the paper's bound; it is no bound where all differences are negative. The last follows a simulated 1F1B:
the stages before a stage still run when it is done, so their backward hides its all-reduce. It has max T0 where compute
alone would do but for slow links: there it is 0.70 to 1.35 of what a simulation gives, and 0.36 to 1.08 without.

A micro-batch is split over the replicas here. Replicas that take whole micro-batches in turn cost the same: r times as
many micro-batches, of a local batch each.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, isfinite
from typing import Literal, get_args

from fxpipe.cluster.links import Link
from fxpipe.errors import CompileError

Objective = Literal["simulated", "paper", "paper-clamped"]
SecondsOf = Callable[[int], tuple[Sequence[float], Sequence[float]]]


@dataclass(frozen=True)
class Chain:
    """L blocks in a line and the links between devices.

    `seconds(n)` gives forward and backward seconds of every block on n samples. A link given by number of replicas is
    that of a stage of so many devices; an all-reduce's bandwidth is gradient bytes over the seconds of the whole
    collective. One replica reduces nothing, unless `all_reduce` names a link for 1.
    """

    seconds: SecondsOf
    forward_bytes: tuple[float, ...]  # per sample, across the cut before each block, and after the last: L + 1
    backward_bytes: tuple[float, ...]  # the same, of gradients
    gradient_bytes: tuple[float, ...]  # of every block, to all-reduce
    saved_bytes: tuple[float, ...]  # of every block, per sample, from its forward to its backward
    state_bytes: tuple[float, ...]  # of every block: parameters, gradients, optimizer states
    p2p: Link | Mapping[int, Link]
    all_reduce: Link | Mapping[int, Link]

    def __post_init__(self) -> None:
        if not self.gradient_bytes:
            raise CompileError("a chain needs at least one block")
        for name, extra in _SIZES.items():
            values = getattr(self, name)
            if len(values) != self.num_blocks + extra:
                raise CompileError(
                    f"{name} has {len(values)} values for {self.num_blocks} blocks; give {self.num_blocks + extra}"
                )
            _require_finite(name, values)

    @property
    def num_blocks(self) -> int:
        return len(self.gradient_bytes)

    def block_seconds(self, num_samples: int) -> tuple[Sequence[float], Sequence[float]]:
        """`seconds`, checked: a finite number, not negative, for every block."""
        both = self.seconds(num_samples)
        for name, values in zip(("forward", "backward"), both, strict=True):
            if len(values) != self.num_blocks:
                raise CompileError(f"{name} seconds of {len(values)} blocks, but the chain has {self.num_blocks}")
            _require_finite(f"{name} seconds at {num_samples} samples", values)
        return both

    def links(self, replicas: int) -> tuple[Link, Link | None]:
        """The links of a stage of so many devices: to the next stage, and of its all-reduce (None: there is none)."""
        if replicas == 1 and not (isinstance(self.all_reduce, Mapping) and 1 in self.all_reduce):
            return _link("p2p", self.p2p, 1), None
        return _link("p2p", self.p2p, replicas), _link("all_reduce", self.all_reduce, replicas)


_SIZES = {"forward_bytes": 1, "backward_bytes": 1, "gradient_bytes": 0, "saved_bytes": 0, "state_bytes": 0}


def _link(name: str, given: Link | Mapping[int, Link], replicas: int) -> Link:
    if isinstance(given, Link):
        return given
    if replicas not in given:
        raise CompileError(
            f"{name} has no link for {replicas} replicas, only for {sorted(given)}; add one, or one Link"
        )
    return given[replicas]


def _require_finite(name: str, values: Sequence[float]) -> None:
    for block, value in enumerate(values):
        if not (isfinite(value) and value >= 0):
            raise CompileError(f"{name}: {value} at {block} must be finite and not negative")


def tabulated(table: Mapping[int, tuple[Sequence[float], Sequence[float]]]) -> SecondsOf:
    """A `seconds` that looks local batches up; any other than the table's is refused."""

    def seconds(num_samples: int) -> tuple[Sequence[float], Sequence[float]]:
        if num_samples not in table:
            raise CompileError(f"no seconds for a local batch of {num_samples}; the table has {sorted(table)}")
        return table[num_samples]

    return seconds


def local_batch(batch_size: int, num_microbatches: int, replicas: int) -> int:
    """Samples of the largest micro-batch on the device that gets most of it.

    Raises:
        CompileError: a micro-batch has fewer samples than the stage has devices, or a number is not positive.
    """
    if min(batch_size, num_microbatches, replicas) < 1:
        raise CompileError(
            f"batch_size={batch_size}, num_microbatches={num_microbatches} and replicas={replicas} must be positive"
        )
    microbatch = ceil(batch_size / num_microbatches)
    if batch_size < num_microbatches or replicas > microbatch:
        raise CompileError(
            f"{batch_size} samples in {num_microbatches} micro-batches are at most {microbatch} each, too few for "
            f"{replicas} replicas: every replica needs a sample; use fewer micro-batches, more stages or a larger batch"
        )
    return ceil(microbatch / replicas)


def check_objective(objective: str) -> None:
    if objective not in get_args(Objective):
        raise CompileError(f"unknown objective {objective!r}; choose one of {', '.join(get_args(Objective))}")


def check_stages(chain: Chain, num_stages: int) -> None:
    """There must be a block for every stage."""
    if num_stages < 1:
        raise CompileError(f"num_stages={num_stages} must be positive")
    if num_stages > chain.num_blocks:
        raise CompileError(
            f"{num_stages} stages need a block each, and the chain has {chain.num_blocks}; use at most "
            f"{chain.num_blocks} stages, or cut the backbone into more blocks"
        )


@dataclass(frozen=True)
class ChainPlan:
    """Stages and what they cost: stage s is blocks [boundaries[s], boundaries[s + 1]) on `replicas[s]` devices."""

    boundaries: tuple[int, ...]
    replicas: tuple[int, ...]
    num_microbatches: int
    objective: Objective
    seconds: float  # of one step, by the objective
    period_seconds: float  # max T0
    sync_seconds: float  # the objective's last term
    peak_bytes: tuple[float, ...]  # per rank of every stage: states, and activations of micro-batches in flight in 1F1B

    @property
    def num_stages(self) -> int:
        return len(self.replicas)

    def __str__(self) -> str:
        parts = zip(self.boundaries, self.boundaries[1:], self.replicas, strict=False)
        stages = " ".join(f"[{i}-{j - 1}]x{r}" for i, j, r in parts)
        return (
            f"{self.num_stages} stages, {self.num_microbatches} micro-batches: {self.seconds * 1e3:.1f} ms "
            f"({self.objective}), at most {max(self.peak_bytes) / 2**30:.1f} GiB a rank; {stages}"
        )
