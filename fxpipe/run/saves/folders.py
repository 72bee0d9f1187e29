"""Folders of a run's checkpoints: complete or without a name, the newest kept.

    run/step-200                        complete: it got its name when the last rank had written its part
    run/step-300
    run/step-400.partial-5f0c3a91       being written, or what a killed run has left

Ranks do not wait for each other: whoever finds all parts there names the folder.
"""

import re
import shutil
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from fxpipe.errors import RunError
from fxpipe.run.saves.parts import part_name, sync

_NAMED = re.compile(r"step-(\d+)(\.replaced)?")


def begin(directory: Path, step: int) -> Path:
    """A folder for the parts of all ranks; what killed runs have left is removed."""
    directory.mkdir(parents=True, exist_ok=True)
    for left in directory.glob("step-*.partial-*"):
        shutil.rmtree(left, ignore_errors=True)
    partial = directory / f"step-{step}.partial-{uuid4().hex[:8]}"
    partial.mkdir()
    return partial


def complete(partial: Path, num_ranks: int, keep: int) -> None:
    """Give the folder its name if all parts are there, once; then remove what is older than the last `keep`.

    One of the same step is replaced; those of later steps, of a run that was taken up again before them, are set aside.
    """
    if not all((partial / part_name(rank, num_ranks)).exists() for rank in range(num_ranks)):
        return
    try:
        (partial / "complete").touch(exist_ok=False)
    except (FileExistsError, FileNotFoundError):
        return  # another rank has found them all
    sync(partial)
    directory, named = partial.parent, final(partial)
    replaced = named.with_name(f"{named.name}.replaced")
    if named.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        named.rename(replaced)
    partial.rename(named)
    for later in checkpoints(directory):
        if _number(later) > _number(named):
            later.rename(later.with_name(f"{later.name}.aside-{uuid4().hex[:8]}"))
    sync(directory)
    shutil.rmtree(replaced, ignore_errors=True)
    for old in checkpoints(directory)[keep:]:
        shutil.rmtree(old, ignore_errors=True)


def discard(partial: Path) -> None:
    with suppress(OSError):
        shutil.rmtree(partial)


def final(partial: Path) -> Path:
    """The name it gets when it is complete."""
    return partial.with_name(partial.name.split(".")[0])


def checkpoints(directory: str | Path) -> list[Path]:
    """The complete checkpoints of a directory, the newest first; none where it is not there."""
    named = [path for path in Path(directory).glob("step-*") if _NAMED.fullmatch(path.name)]
    return sorted(named, key=lambda path: (-_number(path), path.name))


def candidates(directory: Path) -> list[Path]:
    """What to load, in this order: the directory itself where it holds parts, else its folders of steps.

    Raises:
        RunError: there is nothing.
    """
    if not directory.is_dir():
        raise RunError(f"{directory} is not there: give load() the directory that save() was given")
    if any(directory.glob("rank-*-of-*.safetensors")):
        return [directory]
    steps = checkpoints(directory)
    if not steps:
        raise RunError(f"{directory} has no complete checkpoint, a folder step-N: nothing was saved to its end")
    return steps


def _number(folder: Path) -> int:
    named = _NAMED.fullmatch(folder.name)
    assert named is not None
    return int(named[1])
