"""The parts of a folder as one checkpoint, as a rank reads it."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from fxpipe.errors import RunError
from fxpipe.run.saves.parts import SavedPart, part_name
from fxpipe.run.saves.values import decode, tensor_keys


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """All parts, read by one rank of a layout. RunError where a part is missing, damaged, or of another checkpoint."""

    folder: Path
    rank: int
    layout: Mapping[str, Any]

    @cached_property
    def parts(self) -> list[SavedPart]:
        there = {path.name for path in self.folder.glob("rank-*-of-*.safetensors")}
        numbers = [re.fullmatch(r"rank-\d+-of-(\d+)\.safetensors", name) for name in sorted(there)]
        if not numbers or numbers[0] is None:
            raise RunError("no part is there")
        num_ranks = int(numbers[0][1])
        parts = [SavedPart(self.folder / part_name(rank, num_ranks)) for rank in range(num_ranks)]
        missing = [part.path.name for part in parts if part.path.name not in there]
        if missing:
            raise RunError(f"{', '.join(missing)} missing")
        if len({part.body["save"] for part in parts}) > 1:
            raise RunError("its parts were not written together")
        return parts

    @cached_property
    def by_key(self) -> dict[str, SavedPart]:
        """Which part has a tensor; the first of those that do."""
        return {key: part for part in reversed(self.parts) for key in part.sums}

    @cached_property
    def own(self) -> SavedPart:
        """Whose values this rank takes: its own of the same layout, or the first's."""
        return self.parts[self.rank if self._same_layout else 0]

    @property
    def _same_layout(self) -> bool:
        return bool(self.parts[0].body["layout"] == self.layout)

    def check(self) -> None:
        """Read this rank's share of the parts, and compare it with what was written."""
        for part in self.parts[self.rank :: self.layout["ranks"]]:
            part.check()

    def read(self, key: str) -> torch.Tensor:
        if key not in self.by_key:
            raise RunError(f"{key} is in no part")
        return self.by_key[key].tensor(key)

    def read_own(self, key: str) -> torch.Tensor:
        return self.own.tensor(key) if key in self.own.sums else self.read(key)

    def section(self, name: str) -> Any:
        """The state of a section. Where a rank is to take another's, all must have written the same."""
        if name != "random" and not self._same_layout:
            self._require_alike(name)
        return decode(self.own.body["sections"][name]["state"], self.read_own)

    def _require_alike(self, section: str) -> None:
        first, *others = self.parts
        for other in others:
            mine, theirs = (part.body["sections"].get(section, {}).get("state") for part in (first, other))
            both = [key for key in tensor_keys(mine) if key in first.sums and key in other.sums]
            if json.dumps(mine) != json.dumps(theirs) or any(first.sums[key] != other.sums[key] for key in both):
                raise RunError(
                    f"{section} was not the same in {first.path.name} and {other.path.name}, and does not go by the "
                    "names of parameters: load it into the layout that it was saved from"
                )
