"""Local search over paths: move one state after another as long as that helps, then restart from a changed path."""

import random
from collections.abc import Sequence

import numpy as np

from passes.placement.waves.layout import Key, WaveLayout
from passes.placement.waves.levels import Ints, Path

_NEAR = 6  # blocks a cut moves at once
_CHANGED = 6  # states changed to start again, at most
TRIALS = 1000  # states moved


def path_of(boundaries: Sequence[int]) -> Path:
    """The path of mirrored stages."""
    half = len(boundaries) // 2
    return tuple(zip(boundaries[: half + 1], boundaries[: half - 1 : -1], strict=True))


def boundaries_of(path: Path) -> tuple[int, ...]:
    """The positions between the stages: left ends inwards, then right ends outwards."""
    return (*(i for i, _ in path), *(j for _, j in path[-2::-1]))


def improve(layout: WaveLayout, start: Path, least: float) -> tuple[Key, Path]:
    """The best path found from `start`, and its key; ends early when no rank load is above `least` seconds."""
    chance = random.Random(0)
    key, path, trials = _descend(layout, layout.evaluate(start)[0], start, TRIALS)
    while trials > 0 and (key[0] > 0 or key[1] * layout.unit > least):
        changed = key, path
        for _ in range(chance.randint(1, _CHANGED)):
            at = chance.randrange(1, len(path))
            left, right = _states(changed[1], at, layout.num_blocks)
            pick = chance.randrange(len(left))
            changed = layout.best(changed[1], at, left[pick : pick + 1], right[pick : pick + 1]) or changed
            trials -= 1
        other_key, other, trials = _descend(layout, *changed, trials)
        key, path = min((key, path), (other_key, other))
    return key, path


def _descend(layout: WaveLayout, key: Key, path: Path, trials: int) -> tuple[Key, Path, int]:
    """Move one state after another as long as that helps; what is left of the trials."""
    still = 0
    while trials > 0 and still < len(path) - 1:
        at = 1 + trials % (len(path) - 1)
        found = layout.best(path, at, *_states(path, at))
        trials, still = trials - 1, still + 1
        if found is not None and found[0] < key:
            key, path, still = *found, 0
    return key, path, trials


def _states(path: Path, at: int, near: int = _NEAR) -> tuple[Ints, Ints]:
    """The states near the one at `at` and between its neighbours; the last one is empty."""
    (i0, j0), (i, j) = path[at - 1 : at + 1]
    if at == len(path) - 1:
        meet = np.arange(max(i0, i - near), min(j0, i + near) + 1)
        return meet, meet
    i1, j1 = path[at + 1]
    left = np.arange(max(i0, i - near), min(i1, i + near) + 1)
    right = np.arange(max(j1, j - near), min(j0, j + near) + 1)
    return np.repeat(left, len(right)), np.tile(right, len(left))
