"""The plan of a sampler: which rank has which samples, stages and patches, and what a step reads of others.

    plan: 2 samples in 2 groups x 2 stages x 3 patches on 4 ranks (patches in turn)
      for 4xA100-80GB, costs of A100-80GB, call 6d1c04e88f0a in 16 blocks for 1 samples
      displaced after 4 fresh steps, norms corrected
      attention: 4 ulysses, 1 gather
      stage  0 on ranks 0, 2: blocks 0-7  50.2%  conv_in .. down_blocks.0
      stage  1 on ranks 1, 3: blocks 8-15  49.8%  mid_block .. conv_out
      rows: 32 in 8 units of 4
      patch 0: units 0-1 and the text
      ...
      expects: 50 steps in 1.774 s, 6.9 s on one rank; 12582912 bytes come to a rank in a step, 7123456789 are held
      considered: 2 x 6 groups of samples x patches: 1.9 s
    schedule patches in turn: 2 stages, 6 micro-batches
    rank 0: 0F0 0F1 0F2
    ...

A micro-batch is a patch of the samples that pass through stages together: of patch 0 of the first ones, patch 1, ...;
then those of the next ones. Where the first steps are faster another way, that plan follows. `SamplePlan.parse` reads
it back; `as_dict` and `from_dict` do it for JSON.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import ClassVar, Literal, get_args

from fxpipe.errors import CompileError
from fxpipe.plan.plan_lines import (
    Read,
    SavedPlan,
    read_line,
    read_stages,
    read_target,
    stage_lines,
    target_line,
    text_parts,
)
from fxpipe.plan.sample_grid import Grid
from fxpipe.plan.schedule import Schedule, counted
from fxpipe.plan.staged import PlannedCut, Staged

FORMAT = 3
"""Of the files that plans of samplers are saved in."""

IN_TURN = "patches in turn"
ORDERS = ("rows", "samples in turn", IN_TURN)
"""rows: one stage, patches beside each other. samples in turn: through stages, patches beside each other in each.
patches in turn: through stages, one after the other."""


Norms = Literal["corrected", "merged", "sync", "separate"]
"""The moments of a displaced group norm: the others' of the step before moved on as one's own have moved; as they were;
all of this step, waited for; one's own alone, which is not exact where nothing changes."""
AttentionKind = Literal["gather", "ulysses", "ring"]
"""Of a layer of attention: all keys and values come to a patch; heads are shared; chunks are passed around."""


@dataclass(frozen=True)
class How:
    """What a step reads of others: all of this step ("exact"), or after `warmup` such steps what was one before.

    `norms` and `advance` are as `fxpipe.compile_sampler` takes them. `fresh` are exchanges that are of this step in
    displaced ones, too, as "kind value": "halo conv2d_3", "gather linear_7"; for one kind of call alone.
    """

    mode: str
    warmup: int
    norms: str
    advance: bool
    fresh: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.mode not in ("exact", "displaced"):
            raise CompileError(f"mode={self.mode!r} is not known; use one of exact, displaced")
        if self.mode == "displaced" and self.norms not in get_args(Norms):
            raise CompileError(f"norms={self.norms!r} is not known; use one of {', '.join(get_args(Norms))}")
        if self.mode == "displaced" and self.warmup < 1:
            raise CompileError(f"warmup must be a positive integer, got {self.warmup}")

    @property
    def num_warm(self) -> int:
        """How many of the fresh steps another layout may make: not the last one, which leaves what is read later, nor
        the one before it where values are moved on by their change."""
        return 0 if self.mode == "exact" else max(self.warmup - (2 if self.advance else 1), 0)

    def __str__(self) -> str:
        if self.mode == "exact":
            return "all exchanges fresh"
        steps = f"displaced after {counted(self.warmup, 'fresh step')}"
        return f"{steps}, norms {self.norms}{', advanced' * self.advance}"


EXACT = How("exact", 0, "", False)


@dataclass(frozen=True)
class Expected:
    """What is predicted of a call of so many steps: its seconds, those of one rank, bytes that the busiest rank gets in
    a steady step, bytes that the fullest one holds. The call has the samples of so many `requests`."""

    steps: int
    seconds: float
    alone_seconds: float
    wire_bytes: int
    memory_bytes: int
    requests: int = 1

    @staticmethod
    def of(
        steps: int, seconds: float, alone_seconds: float, wire_bytes: int, memory_bytes: int, requests: int = 1
    ) -> "Expected":
        """With seconds to four digits, as they are printed."""
        rounded = float(f"{seconds:.4g}"), float(f"{alone_seconds:.4g}")
        return Expected(steps, *rounded, wire_bytes, memory_bytes, requests)

    def __str__(self) -> str:
        return (
            f"expects: {counted(self.steps, 'step')}{f' of {self.requests} requests' * (self.requests > 1)} in "
            f"{self.seconds:.4g} s, {self.alone_seconds:.4g} s on one rank; "
            f"{self.wire_bytes} bytes come to a rank in a step, {self.memory_bytes} are held"
        )


@dataclass(frozen=True)
class SamplePlan(SavedPlan):
    """Samples in groups, stages on ranks, patches between bounds.

    Args:
        fingerprint: of the call it was made for: its graph with these sizes, where rows are, the blocks it is cut into.
        cluster, cost_model: what it was made for; a cost model that has no name is "".
        num_samples: of the call; group by group as even as can be.
        copies: how often the groups are there, where fewer ranks than all are the fastest.
        watching: ranks after those of `staged` that compute nothing, where others are faster without them.
        cut: into how many blocks the call was to be cut, for how many samples.
        staged: blocks of every stage; its ranks group by group, patch by patch where these are beside each other.
        labels: of every stage its share of the work and the modules it begins and ends with.
        num_rows, unit_rows: of the image, and of a unit, the last of which may have fewer.
        bounds: of patches, in units.
        text_first: whether of text in one sequence with the rows the first patch alone has all.
        attention: the kind of exchange of every layer, in order; empty where there is none, or steps are displaced.
        step: the order of a steady step.
        notes: what is to be known of it.
        expects: what is predicted, None where nobody has asked.
        considered: other layouts, the next best first, and what they would take or why they cannot be.
        warm: the exact plan that the first fresh steps, `how.num_warm`, are made by; None where it is this one.
    """

    KIND: ClassVar[str] = f"plan of a sampler, format {FORMAT}"
    WRITER: ClassVar[str] = "`sampler.plan.save`"
    FORM: ClassVar[Mapping[str, object]] = {"format": FORMAT, "kind": "sampling"}

    fingerprint: str
    cluster: str
    cost_model: str
    num_samples: int
    groups: int
    copies: int
    cut: PlannedCut
    staged: Staged
    labels: tuple[str, ...]
    num_rows: int
    unit_rows: int
    bounds: tuple[int, ...]
    text_first: bool
    how: How
    attention: tuple[AttentionKind, ...]
    step: Schedule
    notes: tuple[str, ...] = ()
    expects: Expected | None = None
    considered: tuple[str, ...] = ()
    warm: "SamplePlan | None" = None
    watching: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_samples", "groups", "copies", "num_rows", "unit_rows"):
            if (count := getattr(self, name)) < 1:
                raise CompileError(f"{name} is {count}; give 1 or more")
        if self.num_patches < 1:
            raise CompileError(f"bounds are {list(self.bounds)}; give those of every patch, in units, from 0 on")
        if self.watching < 0:
            raise CompileError(f"watching is {self.watching}, no number of ranks")
        if self.in_turn and self.how.norms == "sync":
            raise CompileError("norms='sync' waits for patches that come later; use 'corrected' or 'merged' in turn")

    @property
    def world_size(self) -> int:
        return self.staged.world_size + self.watching

    @property
    def in_turn(self) -> bool:
        """Whether patches follow each other through stages."""
        return self.staged.schedule == IN_TURN

    @property
    def num_patches(self) -> int:
        return len(self.bounds) - 1

    @property
    def grid(self) -> Grid:
        """Groups, stages and patches on ranks."""
        patches = len(self.staged.stage_ranks[0]) // (self.copies * self.groups)  # beside each other
        if not patches:
            raise CompileError(
                f"stage 0 has ranks {list(self.staged.stage_ranks[0])} for {self.copies} x {self.groups} groups "
                "of samples; every group of every copy needs one, and all as many"
            )
        stages, turns = self.staged.world_size // (self.copies * self.groups * patches), self.num_patches // patches
        return Grid(self.groups, patches, stages, turns, self.copies)

    @property
    def columns(self) -> tuple[int, ...]:
        """Of every stage, which of a group's columns of ranks has it; a fold has two stages on one."""
        return tuple(ranks[0] // self.grid.patches for ranks in self.staged.stage_ranks)

    @property
    def layout(self) -> str:
        """In words."""
        copies = f" x {self.copies} copies" * (self.copies > 1)
        stages, patches = counted(self.staged.num_stages, "stage"), counted(self.num_patches, "patch", "es")
        return f"{counted(self.groups, 'group')} x {stages} x {patches}{copies}"

    def __str__(self) -> str:
        own = f"{self.summary()}\n{self.step.text()}"
        return own if self.warm is None else f"{own}\n{_WARM}\n{self.warm}"

    def summary(self) -> str:
        """All but the order."""
        return "\n".join([_head(self), *(f"  {line}" for line in _lines(self))])

    @classmethod
    def _of_text(cls, text: str) -> "SamplePlan":
        return _parse(text)


_WARM = "the first steps are made by this plan:"
_FIRST = re.compile(r"first \d+ steps?: ")


def _head(plan: SamplePlan) -> str:
    return (
        f"plan: {counted(plan.num_samples, 'sample')} in {plan.layout} on {counted(plan.staged.world_size, 'rank')}"
        f"{f', {plan.watching} more watching' * (plan.watching > 0)} ({plan.staged.schedule})"
    )


def _lines(plan: SamplePlan) -> Iterator[str]:
    yield target_line(plan, "call")
    yield str(plan.how)
    if plan.warm is not None:
        yield f"first {counted(plan.how.num_warm, 'step')}: {plan.warm.layout} ({plan.warm.staged.schedule})"
    if plan.how.fresh:
        yield "kept fresh: " + ", ".join(plan.how.fresh)
    if plan.attention:
        yield "attention: " + ", ".join(f"{len([*run])} {kind}" for kind, run in groupby(plan.attention))
    yield from stage_lines(plan.staged, plan.labels)
    yield f"rows: {plan.num_rows} in {counted(plan.bounds[-1], 'unit')} of {plan.unit_rows}"
    for patch, (start, stop) in enumerate(pairwise(plan.bounds)):
        yield f"patch {patch}: units {start}-{stop - 1}" + " and the text" * (plan.text_first and patch == 0)
    if plan.expects is not None:
        yield str(plan.expects)
    for other in plan.considered:
        yield f"considered: {other}"
    for note in plan.notes:
        yield f"note: {note}"


_HEAD = re.compile(
    r"plan: (\d+) samples? in (\d+) groups? x \d+ stages? x \d+ patch(?:es)?(?: x (\d+) copies)? on (\d+) ranks?"
    rf"(?:, (\d+) more watching)? \(({'|'.join(ORDERS)})\)"
)
_DISPLACED = re.compile(r"displaced after (\d+) fresh steps?, norms (\w+)(, advanced)?")
_FRESH = re.compile(r"kept fresh: (\w+ \w+(?:, \w+ \w+)*)")
_ROWS = re.compile(r"rows: (\d+) in \d+ units? of (\d+)")
_EXPECTS = re.compile(
    r"expects: (\d+) steps?(?: of (\d+) requests)? in ([\d.e+-]+) s, ([\d.e+-]+) s on one rank; "
    r"(\d+) bytes come to a rank in a step, (\d+) are held"
)
_ATTENTION = re.compile(r"attention: (\d+ (?:gather|ulysses|ring)(?:, \d+ (?:gather|ulysses|ring))*)")
_PATCH = re.compile(r"patch \d+: units (\d+)-(\d+)( and the text)?")


def _parse(text: str) -> SamplePlan:
    text, _, warm = text.partition(f"\n{_WARM}\n")
    summary, orders = text_parts(text)
    kinds = "for", "stage", "note", "how", "fresh", "attention", "rows", "patch", "expects", "considered"
    read: Read = {kind: [] for kind in kinds}
    head = _HEAD.fullmatch(summary[0]) if summary else None
    if head is None or len(orders) != 1:
        raise CompileError(
            f"this is no text of a sampler's plan: it begins with {text[:60]!r}; `print(plan)` gives one"
        )
    for line in summary[1:]:
        _read(line.removeprefix("  "), read)
    cluster, cost_model, fingerprint, cut = read_target(read)
    if not (len(read["how"]) == len(read["rows"]) == 1 and read["patch"]):
        raise CompileError(
            "the plan's text lacks its rows, its patches or its third line; `print(plan)` gives all of it"
        )
    num_rows, unit_rows = read["rows"][0]
    plan = SamplePlan(
        fingerprint, cluster, cost_model, int(head[1]), int(head[2]), int(head[3] or 1),
        cut, Staged(*read_stages(read), head[6], False, int(head[4])), tuple(label for *_, label in read["stage"]),
        num_rows, unit_rows, (0, *(stop for _, stop, _ in read["patch"])), read["patch"][0][2],
        replace(read["how"][0], fresh=next(iter(read["fresh"]), ())), next(iter(read["attention"]), ()),
        orders[0], tuple(read["note"]),
        next(iter(read["expects"]), None), tuple(read["considered"]), _parse(warm) if warm else None,
        int(head[5] or 0),
    )  # fmt: skip
    for says, line in zip([_head(plan), *(f"  {line}" for line in _lines(plan))], summary, strict=False):
        if says != line:
            raise CompileError(f"the plan has the line {line!r}, its other lines say {says!r}; make them agree")
    return plan


def _read(line: str, read: Read) -> None:
    """Add what a line of the summary says."""
    if read_line(line, read, "call"):
        return
    if line == str(EXACT):
        read["how"].append(EXACT)
    elif found := _DISPLACED.fullmatch(line):
        read["how"].append(How("displaced", int(found[1]), found[2], found[3] is not None))
    elif found := _FRESH.fullmatch(line):
        read["fresh"].append(tuple(found[1].split(", ")))
    elif found := _ATTENTION.fullmatch(line):
        runs = (run.split() for run in found[1].split(", "))
        read["attention"].append(tuple(kind for count, kind in runs for _ in range(int(count))))
    elif found := _ROWS.fullmatch(line):
        read["rows"].append((int(found[1]), int(found[2])))
    elif found := _PATCH.fullmatch(line):
        read["patch"].append((int(found[1]), int(found[2]) + 1, found[3] is not None))
    elif found := _EXPECTS.fullmatch(line):
        seconds, sizes = (float(found[3]), float(found[4])), (int(found[5]), int(found[6]))
        read["expects"].append(Expected(int(found[1]), *seconds, *sizes, int(found[2] or 1)))
    elif _FIRST.match(line):
        return  # of the plan that follows
    elif line.startswith("considered: "):
        read["considered"].append(line.removeprefix("considered: "))
    else:
        raise CompileError(f"a sampler's plan has no line {line!r}; `print(plan)` shows what its lines look like")
