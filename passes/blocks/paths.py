"""Module paths as people read them: `unet.down_blocks.0` is two steps, `unet` and `down_blocks.0`."""

import re
from collections.abc import Iterable, Sequence
from functools import cache


@cache
def parts(path: str) -> tuple[str, ...]:
    """A path's steps; the number of a list's member belongs to the list's name."""
    return tuple(re.findall(r"[^.]+(?:\.\d+(?=\.|$))?", path))


def common(a: Sequence[str], b: Sequence[str]) -> int:
    """How many leading steps are equal."""
    if a == b:
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def label(first: str, last: str, outside: Iterable[str]) -> str:
    """`unet.down_blocks.0 .. mid_block`: `first` to `last`, each as its largest module with nothing `outside` in it."""
    others = [parts(path) for path in outside]
    start, stop = (p[: max((common(p, o) for o in others), default=0) + 1] for p in (parts(first), parts(last)))
    shared = common(start, stop)
    if start == stop or not start or not stop[shared:]:
        return ".".join(start or stop)
    return f"{'.'.join(start)} .. {'.'.join(stop[shared:])}"
