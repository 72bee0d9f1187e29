"""The files that all code in this process comes from: a stored capture holds as long as they are what they were.

/site-packages/torch/nn/functional.py    [198302, 1760000000000000000]     size and time of change
"""

import os
import sys
import sysconfig
import time
from collections.abc import Mapping
from functools import cache
from typing import Any

_INSTALLED = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib", "platstdlib")})
_WHEREVER = ("torch", "fxpipe", "passes", "cost_models")  # counted as installed where they run from their sources, too
_STARTED = time.time_ns()
_INSTALLED_HERE: dict[str, Any] = {}  # files of packages are asked for once: what was loaded from them stays as it is


@cache
def _is_installed(file: str) -> bool:
    return file.startswith(_INSTALLED)


def is_installed(module: str | None) -> bool:
    """Whether a module is of an installed package or of Python: built in, or from a file among those."""
    found = sys.modules.get(module or "")
    file = getattr(found, "__file__", None)
    if module is None or module == "__main__" or found is None:
        return False
    return file is None or module.partition(".")[0] in _WHEREVER or _is_installed(str(file))


def loaded_files() -> dict[str, Any] | None:
    """What every file is that a module was loaded from; None where one was changed since, or cannot be read."""
    files = {str(f) for module in list(sys.modules.values()) if isinstance(f := vars(module).get("__file__"), str)}
    states = {file: _known_state(file) for file in sorted(files)}
    # Changed since this process began: what is loaded may be what it was before.
    if not all(state is not None and state[1] <= _STARTED for state in states.values()):
        return None
    _INSTALLED_HERE.update((file, state) for file, state in states.items() if _is_installed(file))
    return states


def are_as_before(states: Mapping[str, Any]) -> bool:
    """Whether the files are what they were."""
    return bool(states) and all(_known_state(file) == state for file, state in states.items())


def _known_state(file: str) -> list[int] | None:
    return _INSTALLED_HERE.get(file) or _state(file)


def _state(file: str) -> list[int] | None:
    """Size and time of change; None where it cannot be read."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return [found.st_size, found.st_mtime_ns]
