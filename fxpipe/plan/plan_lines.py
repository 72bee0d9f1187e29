"""What the texts and files of plans share, of training and of sampling: for what they hold, stages on ranks, notes.

  for 2xA100-80GB, costs of A100-80GB, step 6d1c04e88f0a in 24 blocks for 4 samples
  stage  0 on rank 0: blocks 0-3  25.1%  unet.conv_in .. unet.down_blocks.0
  note: next best of 14 ways: ...
schedule wave: 4 stages, 4 micro-batches
rank 0: 0T0 0F0 0F1 3F0 ...
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, Self

from fxpipe.errors import CompileError
from fxpipe.plan.plain import Readers, Writers, made_of, plain_of, value_of
from fxpipe.plan.schedule import Schedule
from fxpipe.plan.staged import PlannedCut, Staged

_CUT = r"(\d+) blocks for (\d+) samples(?: of (\d+) rows)?(, one micro-batch)?"
_FOR = r"for (.*), costs of (.*), {} (\S*) in " + _CUT
_STAGE = re.compile(r"stage +\d+ on ranks? ([\d, ]+|none): (?:blocks (\d+)-(\d+)|no blocks at (\d+))  (.*)")

Read = dict[str, list[Any]]
"""What lines have said, by their kind."""


def target_line(plan: "SavedPlan", what: str) -> str:
    """Clusters with links of their own are TOML, here in one line."""
    cluster = plan.cluster.strip().replace("\n", "\\n")
    return f"for {cluster}, costs of {plan.cost_model or 'a model of its own'}, {what} {plan.fingerprint} in {plan.cut}"


def stage_lines(staged: Staged, labels: Sequence[str]) -> Iterator[str]:
    for stage, label in enumerate(labels):
        blocks = staged.blocks(stage)
        span = f"blocks {blocks.start}-{blocks.stop - 1}" if blocks else f"no blocks at {blocks.start}"
        yield f"stage {stage:2} {on_ranks(staged.stage_ranks[stage])}: {span}  {label}"


def on_ranks(ranks: Sequence[int]) -> str:
    return f"on rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks)) or 'none'}"


def ranks_in(text: str) -> tuple[int, ...]:
    return () if text == "none" else tuple(map(int, text.split(", ")))


def text_parts(text: str) -> tuple[list[str], list[Schedule]]:
    """The lines before the orders, and the orders."""
    parts: list[list[str]] = [[]]
    for line in (line for line in text.strip("\n").split("\n") if line.strip()):
        if line.startswith(("schedule ", "steady schedule ")):
            parts.append([])
        parts[-1].append(line.removeprefix("steady "))
    return parts[0], [Schedule.parse("\n".join(lines)) for lines in parts[1:]]


def read_line(line: str, read: Read, what: str) -> bool:
    """Add what a line says, if it is one of these; `what` the plan is made for."""
    if line.startswith("note: "):
        read["note"].append(line.removeprefix("note: "))
    elif found := re.fullmatch(_FOR.format(what), line):
        cost_model = "" if found[2] == "a model of its own" else found[2]
        cut = PlannedCut(int(found[4]), int(found[5]), divisible=not found[7], rows=int(found[6] or 1))
        read["for"].append((found[1].replace("\\n", "\n"), cost_model, found[3], cut))
    elif found := _STAGE.fullmatch(line):
        start, stop = (int(found[2]), int(found[3]) + 1) if found[2] else (int(found[4]),) * 2
        if read["stage"] and start != (last := read["stage"][-1][2]):
            raise CompileError(f"{line!r} begins at block {start}; the stage before it ends before block {last}")
        read["stage"].append((ranks_in(found[1]), start, stop, found[5]))
    else:
        return False
    return True


def read_target(read: Read) -> tuple[str, str, str, PlannedCut]:
    """Cluster, cost model, fingerprint and cut."""
    if len(read["for"]) != 1 or not read["stage"]:
        raise CompileError("the plan's text lacks its second line or its stages; `print(plan)` gives all of it")
    found: tuple[str, str, str, PlannedCut] = read["for"][0]
    return found


def read_stages(read: Read) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Boundaries in blocks, and every stage's ranks."""
    starts = (start for _, start, _, _ in read["stage"])
    return (*starts, read["stage"][-1][2]), tuple(ranks for ranks, *_ in read["stage"])


# -- text, JSON data and files


class SavedPlan(ABC):
    """A plan, of training or of sampling, with a text that is read back, JSON data, and a file.

    `KIND` says what it is, `WRITER` what writes one, `FORM` what its data say of themselves.
    """

    KIND: ClassVar[str]
    WRITER: ClassVar[str]
    FORM: ClassVar[Mapping[str, object]]
    fingerprint: str
    cluster: str
    cost_model: str
    cut: PlannedCut
    staged: Staged
    labels: tuple[str, ...]
    step: Schedule

    def __post_init__(self) -> None:
        bounds, stages, labels = map(len, (self.staged.boundaries, self.staged.stage_ranks, self.labels))
        ranks = sum(map(bool, self.staged.stage_ranks))
        if not bounds - 1 == stages == ranks == labels > 0:
            raise CompileError(
                f"the plan has {bounds} boundaries, ranks of {ranks} stages and labels of {labels}; every stage has "
                "ranks and a label, and begins at a boundary, where the one before it ends"
            )
        for name in ("num_blocks", "num_samples", "rows"):
            if (count := getattr(self.cut, name)) < 1:
                raise CompileError(f"{name} of the plan's cut is {count}; give 1 or more")

    @classmethod
    @abstractmethod
    def _of_text(cls, text: str) -> Self: ...

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `str(plan)` back.

        Raises:
            CompileError: the text is no such plan's; names the line.
        """
        try:
            return cls._of_text(text)
        except CompileError:
            raise
        except (ValueError, ZeroDivisionError, IndexError) as error:
            raise CompileError(f"this plan's text has a number that is none: {error}") from None

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        own = {f.name: plain_of(getattr(self, f.name), _WRITERS) for f in fields(self)}  # type: ignore[arg-type]
        return {**own, **self.FORM}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """What `as_dict` gave.

        Raises:
            CompileError: the data are no such plan's.
        """
        try:
            if not isinstance(data, Mapping):
                raise CompileError(f"it is {data!r}")
            for name, value in cls.FORM.items():
                if data.get(name) != value:
                    raise CompileError(f"its {name} is {data.get(name)!r}")
            own = {name: value for name, value in data.items() if name not in cls.FORM}
            return made_of(cls, own, {**_READERS, cls: lambda data, where: cls.from_dict(data)})
        except CompileError as error:
            raise CompileError(f"this is no {cls.KIND}: {error}; {cls.WRITER} writes one") from None

    def save(self, path: str | Path) -> Path:
        """Write it as JSON."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.as_dict(), indent=1) + "\n")
        return path

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file that `save` wrote, or one with the text.

        Raises:
            CompileError: there is no such file, or it holds no such plan.
        """
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise CompileError(f"no plan in {path}: {error}; {cls.WRITER} writes one") from None
        try:
            return cls.from_dict(json.loads(text)) if text.lstrip().startswith("{") else cls.parse(text)
        except json.JSONDecodeError as error:
            raise CompileError(f"{path} is no JSON: {error}; {cls.WRITER} writes a plan") from None
        except CompileError as error:
            raise type(error)(f"{path}: {error}") from None


def _lines_of(schedule: Schedule) -> list[str]:
    return schedule.text().split("\n")


def _schedule_of(lines: object, where: str) -> Schedule:
    return Schedule.parse("\n".join(value_of(tuple[str, ...], lines, {}, where)))


_READERS: Readers = {Schedule: _schedule_of}
_WRITERS: Writers = {Schedule: _lines_of, SavedPlan: SavedPlan.as_dict}
