"""A rank's part of a checkpoint: one safetensors file, which every reader of that format opens.

    rank-1-of-2.safetensors    model.layers.4.weight   optimizer.layers.4.weight.exp_avg   random.cpu   ...
                               metadata: what is no tensor, as JSON, and checksums of all of it

Nothing is pickled, so that a file from somebody else runs nothing. torch.distributed.checkpoint keeps its index as a
pickle; its storage in safetensors holds tensors alone, and does not tell a part that is missing or damaged.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fxpipe.errors import RunError
from fxpipe.run.agreement import checksum

_PAIRS = torch.complex128  # which the format does not have: pairs of float64


def part_name(rank: int, num_ranks: int) -> str:
    return f"rank-{rank}-of-{num_ranks}.safetensors"


def write_part(path: Path, tensors: Mapping[str, torch.Tensor], body: Mapping[str, Any]) -> None:
    """On the disk, whole, when the file has its name; OSError or SafetensorError where it cannot be.

    From then on another rank may find all parts, and give the folder another name.
    """
    packed = _packed(tensors)
    text = json.dumps({**body, "sums": {key: tensor_sum(tensor) for key, tensor in packed.items()}})
    unnamed = path.with_suffix(".unfinished")
    files = {key: torch.view_as_real(one) if one.dtype == _PAIRS else one for key, one in packed.items()}
    save_file(files, unnamed, {"fxpipe": text, "sha256": hashlib.sha256(text.encode()).hexdigest()})
    sync(unnamed)
    unnamed.rename(path)


def sync(path: Path) -> None:
    """What was written to a file, or which files are in a folder, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def tensor_sum(tensor: torch.Tensor) -> list[Any]:
    """Type, shape and checksum, as JSON gives them back."""
    return [str(tensor.dtype), *checksum(tensor)]


@dataclass(frozen=True, eq=False)
class SavedPart:
    """A part as it was written.

    Every method raises RunError where it is not that, naming the file.
    """

    path: Path

    @cached_property
    def body(self) -> dict[str, Any]:
        try:
            metadata = self._file.metadata() or {}
        except (OSError, SafetensorError) as error:
            raise RunError(f"{self.path.name} cannot be read: {error}") from error
        text = metadata.get("fxpipe", "")
        if hashlib.sha256(text.encode()).hexdigest() != metadata.get("sha256"):
            raise RunError(f"{self.path.name}: its values are not those that were written")
        found: dict[str, Any] = json.loads(text)
        return found

    @property
    def sums(self) -> dict[str, Any]:
        """Of its tensors, by key."""
        found: dict[str, Any] = self.body["sums"]
        return found

    def tensor(self, key: str) -> torch.Tensor:
        try:
            tensor: torch.Tensor = self._file.get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise RunError(f"{self.path.name}, {key} cannot be read: {error}") from error
        if self.sums[key][0] == str(_PAIRS):
            tensor = torch.view_as_complex(tensor.clone())  # the file is not aligned for such numbers
        if tensor_sum(tensor) != self.sums[key]:
            raise RunError(f"{self.path.name}: {key} is not what was written")
        return tensor.clone()  # out of the file, which may be removed

    def check(self) -> None:
        for key in self.sums:
            self.tensor(key)

    @cached_property
    def _file(self) -> Any:
        return safe_open(self.path, "pt")


def _packed(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """On the CPU, contiguous, none a view of another's memory: as the format wants them."""
    seen: set[int] = set()
    packed = {}
    for key, tensor in tensors.items():
        found = tensor.detach().cpu().contiguous()
        whole = found.untyped_storage().nbytes() == found.nbytes
        if not whole or found.data_ptr() in seen:
            found = found.clone()
        seen.add(found.data_ptr())
        packed[key] = found
    return packed
