"""The plan: which rank runs which blocks, in which order, what that takes, and why. What it says is what runs.

    plan: 16 samples in 4 micro-batches of 4, 4 stages on 2 ranks (wave), skips collocated
      for 2xA100-80GB, costs of A100-80GB, step 6d1c04e88f0a
      stage  0 on rank 0: blocks 0-3  25.1%  unet.conv_in .. unet.down_blocks.0
      ...
      frozen 0 on all ranks: vae
      optimizer states shared out over replicas
      step: 1.23412 s, 3.1% idle, 37713412096 bytes a rank, 1203423 bytes on wires
      note: next best of 14 ways: ...
    schedule wave: 4 stages, 4 micro-batches
    rank 0: 0T0 0F0 0F1 3F0 ...

`Plan.parse` reads it back; `as_dict` and `from_dict` do it for JSON.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import ClassVar

from fxpipe.errors import CompileError
from fxpipe.plan.plan_lines import (
    Read,
    SavedPlan,
    on_ranks,
    ranks_in,
    read_line,
    read_stages,
    read_target,
    stage_lines,
    target_line,
    text_parts,
)
from fxpipe.plan.schedule import Schedule, counted
from fxpipe.plan.staged import PlannedCut, Staged
from fxpipe.plan.tuning import Outcome

FORMAT = 1
"""Of the files that plans are saved in."""


@dataclass(frozen=True)
class Prediction:
    """What one step takes: seconds, the idle share of ranks x seconds, bytes of the fullest rank and on all wires."""

    seconds: float
    idle: float
    peak_bytes: int
    wire_bytes: int

    @staticmethod
    def of(seconds: float, idle: float, peak_bytes: int, wire_bytes: int) -> "Prediction":
        """With as many digits as are printed."""
        return Prediction(float(f"{seconds:.6g}"), float(f"{idle:.3f}"), peak_bytes, wire_bytes)

    def __str__(self) -> str:
        return f"{self.seconds} s, {self.idle} idle, {self.peak_bytes} bytes a rank, {self.wire_bytes} bytes on wires"


_PREDICTION = re.compile(r"(\S+) s, (\S+) idle, (\d+) bytes a rank, (\d+) bytes on wires")


@dataclass(frozen=True)
class Plan(SavedPlan):
    """Stages on ranks, and the order of every form of the step.

    Args:
        fingerprint: of the costed step it was made for.
        cluster: the machines it was made for, as `fxpipe.compile` takes them.
        cost_model: likewise; one that has no name is "".
        batch_size: samples of a step.
        num_microbatches: into how many these go.
        cut: into how many blocks the step was to be cut, balanced for how many samples, and whether its batch may be.
        labels: of every stage its share of the work and the modules it begins and ends with.
        components: names of the frozen components.
        step: the order of a step that does its own frozen work.
        steady: the order of one that does the next batch's, on which it is faster; None where it is not.
        predicted: by form, "step" and "steady".
        notes: why it is so.
        outcomes: what else was considered; not part of the text.
    """

    KIND: ClassVar[str] = f"plan of format {FORMAT}"
    WRITER: ClassVar[str] = "`fxpipe tune --save`"
    FORM: ClassVar[Mapping[str, object]] = {"format": FORMAT}

    fingerprint: str
    cluster: str
    cost_model: str
    batch_size: int
    num_microbatches: int
    cut: PlannedCut
    staged: Staged
    labels: tuple[str, ...]
    components: tuple[str, ...]
    step: Schedule
    steady: Schedule | None = None
    predicted: Mapping[str, Prediction] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    outcomes: tuple[Outcome, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.num_microbatches <= self.batch_size:
            raise CompileError(
                f"{self.batch_size} samples cannot be cut into {self.num_microbatches} micro-batches; each needs one"
            )
        if len(held := self.staged.frozen_ranks) not in (0, len(self.components)):
            raise CompileError(f"there are ranks of {len(held)} frozen components, of {len(self.components)}")

    @property
    def microbatch_sizes(self) -> tuple[int, ...]:
        """Samples of every micro-batch."""
        return microbatch_sizes(self.batch_size, self.num_microbatches)

    @property
    def prologue(self) -> Schedule | None:
        """The frozen work of the first batch, alone."""
        return self.steady and self.steady.where(lambda action: action.is_piece)

    @property
    def epilogue(self) -> Schedule | None:
        """The training on the last batch, whose frozen work is done."""
        return self.steady and self.steady.where(lambda action: not action.is_piece)

    @property
    def best(self) -> Prediction | None:
        """What a step in a row of them takes."""
        return self.predicted.get("step" if self.steady is None else "steady")

    @property
    def peak_bytes(self) -> int | None:
        """What the fullest rank needs in any of its forms."""
        return max((prediction.peak_bytes for prediction in self.predicted.values()), default=None)

    def __str__(self) -> str:
        texts = [self.summary(), self.step.text()]
        return "\n".join(texts if self.steady is None else [*texts, f"steady {self.steady.text()}"])

    def summary(self) -> str:
        """All but the orders."""
        return "\n".join([_head(self), *(f"  {line}" for line in _lines(self))])

    @classmethod
    def _of_text(cls, text: str) -> "Plan":
        return _parse(text)


def microbatch_sizes(batch_size: int, microbatches: int) -> tuple[int, ...]:
    """Samples of every micro-batch, the larger ones first."""
    size, larger = divmod(batch_size, microbatches)
    return (size + 1,) * larger + (size,) * (microbatches - larger)


def microbatch_samples(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Of micro-batches of these sizes: each one's first sample, and before which it ends."""
    return list(pairwise(accumulate(sizes, initial=0)))


# -- text


def _head(plan: Plan) -> str:
    staged, sizes = plan.staged, sorted(set(plan.microbatch_sizes))
    return (
        f"plan: {plan.batch_size} samples in {counted(plan.num_microbatches, 'micro-batch', 'es')} of "
        f"{', '.join(map(str, sizes))}, {counted(staged.num_stages, 'stage')} on {counted(staged.world_size, 'rank')} "
        f"({staged.schedule}){', skips collocated' * staged.collocated}"
    )


def _lines(plan: Plan) -> Iterator[str]:
    staged = plan.staged
    yield target_line(plan, "step")
    yield from stage_lines(plan.staged, plan.labels)
    for number, name in enumerate(plan.components):
        where = on_ranks(staged.frozen_ranks[number]) if staged.frozen_ranks else "on all ranks"
        yield f"frozen {number} {where}: {name}"
    if staged.shard in SHARDED:
        yield SHARDED[staged.shard]
    if staged.offloaded:
        yield OFFLOADED
    if staged.prefetch != 1:
        yield f"receives posted {staged.prefetch} actions ahead"
    if staged.recompute:
        yield f"recomputed: {', '.join(f'blocks {start}-{stop - 1}' for start, stop in staged.recompute)}"
    for form, prediction in plan.predicted.items():
        yield f"{form}: {prediction}"
    for note in plan.notes:
        yield f"note: {note}"


SHARDED = {
    "optimizer": "optimizer states shared out over replicas",
    "gradients": "gradients of every micro-batch and optimizer states shared out over replicas",
    "weights": "weights and optimizer states shared out over replicas",
    "all": "weights, gradients of every micro-batch and optimizer states shared out over replicas",
}
OFFLOADED = "optimizer states on the host, which updates what is trained"
_HEAD = re.compile(
    r"plan: (\d+) samples in (\d+) micro-batch(?:es)? of [\d, ]+, \d+ stages? on (\d+) ranks? \((.*)\)"
    r"(, skips collocated)?"
)
_FROZEN = re.compile(r"frozen (\d+) on (all ranks|ranks? (?:[\d, ]+|none)): (.*)")
_PREFETCH = re.compile(r"receives posted (\d+) actions ahead")
_RUN = re.compile(r"blocks (\d+)-(\d+)")
_RUNS = re.compile(r"recomputed: blocks \d+-\d+(, blocks \d+-\d+)*")
_FORM = re.compile(r"(step|steady): (.*)")


def _parse(text: str) -> Plan:
    summary, orders = text_parts(text)
    read: Read = defaultdict(list)
    head = _HEAD.fullmatch(summary[0]) if summary else None
    if head is None or len(orders) not in (1, 2):
        raise CompileError(f"this is no plan's text: it begins with {text[:60]!r}; `print(plan)` gives one")
    for line in summary[1:]:
        _read(line.removeprefix("  "), read)
    cluster, cost_model, fingerprint, cut = read_target(read)
    frozen = read["frozen"]
    some = any(ranks is not None for ranks, _ in frozen)
    staged = Staged(
        *read_stages(read),
        head[4],
        bool(head[5]),
        int(head[3]),
        tuple(read["run"]),
        tuple((*range(int(head[3])),) if ranks is None else ranks for ranks, _ in frozen) if some else (),
        offloaded=bool(read["offloaded"]),
        prefetch=read["prefetch"][-1] if read["prefetch"] else 1,
    ).sharing(read["sharded"][-1] if read["sharded"] else "none")
    plan = Plan(
        fingerprint, cluster, cost_model, int(head[1]), int(head[2]), cut, staged,
        tuple(label for *_, label in read["stage"]), tuple(name for _, name in frozen),
        orders[0], orders[1] if len(orders) > 1 else None, dict(read["form"]), tuple(read["note"]),
    )  # fmt: skip
    if _head(plan) != summary[0]:
        raise CompileError(f"the plan begins {summary[0]!r}, its other lines say {_head(plan)!r}; make them agree")
    return plan


def _read(line: str, read: Read) -> None:
    """Add what a line of the summary says."""
    if read_line(line, read, "step"):
        return
    if found := _FROZEN.fullmatch(line):
        read["frozen"].append((None if found[2] == "all ranks" else ranks_in(found[2].split(" ", 1)[1]), found[3]))
    elif line in SHARDED.values():
        read["sharded"].append(next(name for name, of in SHARDED.items() if of == line))
    elif line == OFFLOADED:
        read["offloaded"].append(True)
    elif found := _PREFETCH.fullmatch(line):
        read["prefetch"].append(int(found[1]))
    elif _RUNS.fullmatch(line):
        read["run"] += [(int(start), int(stop) + 1) for start, stop in _RUN.findall(line)]
    elif (found := _FORM.fullmatch(line)) and (numbers := _PREDICTION.fullmatch(found[2])):
        seconds, idle, peak, wires = numbers.groups()
        read["form"].append((found[1], Prediction(float(seconds), float(idle), int(peak), int(wires))))
    else:
        raise CompileError(f"a plan has no line {line!r}; `print(plan)` shows what its lines look like")
