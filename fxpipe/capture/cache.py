"""Captures on disk, by the digest of what they were made from.

~/.cache/fxpipe/captures/3f..a9.json      line 1   the sha256 of line 2
                                          line 2   files (all code was loaded from these), capture (`stored.py`),
                                                   warnings that it gave, and gives again when it is read

An entry is JSON, names and numbers alone. It holds for a step with the same digest while the files are what they were;
one that does not, or that cannot be read, counts as missing and is written anew. Entries are replaced in one rename, so
that processes may share a folder; the least recently used go when all are too many bytes.
"""

import hashlib
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from fxpipe.capture import Capture, capture
from fxpipe.capture.code_names import Unknowable
from fxpipe.capture.expressions import Unwritable
from fxpipe.capture.files import are_as_before, loaded_files
from fxpipe.capture.model_call import ModelCall
from fxpipe.capture.model_digest import step_digest
from fxpipe.capture.stored import from_data, to_data
from fxpipe.capture.watch import refuse_outside
from fxpipe.capture.weights import check_weights
from fxpipe.errors import CompileError

VARIABLE = "FXPIPE_CACHE"  # a folder, or "off"
MOST_BYTES = 256 << 20  # of all entries: some hundred steps of the size of Stable Diffusion 2.1's, 2 MB each
_MOST_ENTRY_BYTES = 32 << 20
_OFF = ("", "0", "off", "no", "none", "false")
_HERE = Path(__file__).parent
_log = logging.getLogger(__name__)
T = TypeVar("T")


def cache_folder(given: bool | str | Path) -> Path | None:
    """The folder asked for: the one given, the environment's, the user's own; None where there is to be none."""
    if given is False:
        return None
    if isinstance(given, str | Path) and str(given):
        return Path(given).expanduser()
    if given is not True:
        raise CompileError(f"cache={given!r}; give True, False or a folder")
    named = os.environ.get(VARIABLE)
    if named is not None:
        return None if named.lower() in _OFF else Path(named).expanduser()
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "fxpipe" / "captures"


def cached_capture(call: ModelCall, folder: Path | None) -> Capture:
    """As `capture`, from the folder where it is there, and into it where it is not."""
    return cached(
        call, folder, (), lambda: capture(call),
        load=lambda data: from_data(data, call.inputs, call.model),
        write=lambda captured: to_data(captured, call.model),
    )  # fmt: skip


def cached(
    call: ModelCall, folder: Path | None, purpose: tuple[str, ...], make: Callable[[], T], load: Callable[[Any], T],
    write: Callable[[T], dict[str, Any]],
) -> T:  # fmt: skip
    """What `make` makes of a call, from the folder where it is there, and into it where it is not.

    Args:
        purpose: tells what is made from other things of the same call.
        load: what was made, from JSON data; any exception means that the data is none.
        write: what was made as JSON data; Unwritable where that has no word for it.
    """
    if folder is None:
        return make()
    check_weights(call.model)
    refuse_outside(call.model)
    around = () if call.surroundings is None else call.surroundings.digest
    try:
        devices = [example.device for example in call.examples]
        key = step_digest(call.model, call.inputs, devices, (*purpose, *around))
    except Unknowable as why:
        _log.info("capture is not cached: %s", why)
        return make()
    entry = folder / f"{key}.json"
    found = _read(entry, load)
    if found is None:
        told: list[str] = []
        with _warnings_noted(told):
            found = make()
        _write(entry, lambda: write(found), told)
    return found


@contextmanager
def _warnings_noted(told: list[str]) -> Iterator[None]:
    """Leaves in `told` what is warned of inside by this package; warnings are given on leaving."""
    caught: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            yield
    finally:
        for one in caught:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
    told += [str(one.message) for one in caught if Path(one.filename).is_relative_to(_HERE)]


def _read(entry: Path, load: Callable[[Any], T]) -> T | None:
    """What an entry says, if it can be read and holds."""
    try:
        if entry.stat().st_size > _MOST_ENTRY_BYTES:
            return None
        digest, _, text = entry.read_bytes().partition(b"\n")
        if hashlib.sha256(text).hexdigest().encode() != digest:
            raise ValueError("its digest is of something else")
        data = json.loads(text)
        if not are_as_before(data["files"]):
            _log.info("capture %s is of other code", entry)
            return None
        found, told = load(data["capture"]), list(map(str, data["warnings"]))
        os.utime(entry)
    except FileNotFoundError:
        return None
    except Exception as error:  # whatever is wrong with it, a fresh capture is right
        _log.info("capture %s cannot be read: %s: %s", entry, type(error).__name__, error)
        return None
    _log.info("capture is from %s", entry)
    for one in told:
        warnings.warn(one, stacklevel=2)
    return found


def _write(entry: Path, data_of: Callable[[], dict[str, Any]], told: Sequence[str]) -> None:
    files = loaded_files()
    if files is None:
        _log.info("capture is not cached: code was changed since this process began")
        return
    try:
        data: dict[str, Any] = {"files": files, "capture": data_of(), "warnings": told}
        text = json.dumps(data, separators=(",", ":")).encode()
        if len(text) > _MOST_ENTRY_BYTES:
            raise Unwritable(f"{len(text)} bytes")
        _replace(entry, hashlib.sha256(text).hexdigest().encode() + b"\n" + text)
        _make_room(entry.parent)
    except (Unwritable, OSError) as why:
        _log.info("capture is not cached: %s", why)


def _replace(entry: Path, content: bytes) -> None:
    """Write a file in one rename."""
    entry.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=entry.parent, suffix=".new")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(name, entry)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _make_room(folder: Path) -> None:
    """Remove what was not used for longest, until the rest is few enough bytes."""
    entries = []
    for path in folder.glob("*.json"):
        try:
            entries.append((path.stat().st_mtime_ns, path.stat().st_size, path))
        except FileNotFoundError:  # another process was faster
            continue
    total = sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries):
        if total <= MOST_BYTES:
            break
        path.unlink(missing_ok=True)
        total -= size
