"""What the code of a function names: globals, attributes, modules that it imports; what it must not ask for; and what
may tell a size that a trace leaves free from a plain number."""

import dis
import functools
import itertools
import types
from collections.abc import Iterator

from fxpipe.errors import FxpipeError

# What reads something outside the model: no digest can tell whether that is as before.
_OUTSIDE = ("os", "io", "time", "datetime", "pathlib", "socket", "subprocess", "sys", "importlib", "secrets", "uuid")
_OUTSIDE_CALLS = ("open", "eval", "exec", "compile", "globals", "vars", "input", "__import__")


class Unknowable(FxpipeError):
    """What forward may depend on cannot be told; says what."""


def is_outside(module: str) -> bool:
    """Whether a module reads what is not the model's."""
    return module.partition(".")[0] in _OUTSIDE


def names_in(code: types.CodeType) -> list[str]:
    """Every global and attribute that code names, that of functions inside too."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= dict.fromkeys(names_in(constant))
    return list(names)


@functools.lru_cache(4096)
def globals_in(code: types.CodeType) -> frozenset[str]:
    """Every global that code reads or writes, that of functions inside too; attributes of that name are none."""
    kinds = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL")
    return frozenset(one.argval for one in _instructions(code) if one.opname in kinds)


def _instructions(code: types.CodeType) -> Iterator[dis.Instruction]:
    """Those of functions inside, too."""
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _instructions(constant)


def knows_sizes(value: types.FunctionType) -> str:
    """Where a function is, if it compares by `is` what is no constant, catches errors, or names numpy, whose arrays
    have other types of free sizes than of numbers."""
    named = (getattr(value.__globals__.get(name), "__name__", "") for name in globals_in(value.__code__))
    if any(str(name).startswith("numpy") for name in named) or _may_know(value.__code__):
        return f"{value.__code__.co_filename}:{value.__code__.co_firstlineno}"
    return ""


def reads_anew(value: types.FunctionType) -> str:
    """Where a function is, if it names what may be another one whenever it is asked: clocks, the system's random
    numbers, files."""
    code, names = value.__code__, globals_in(value.__code__)
    found = [value.__globals__[name] for name in names if name in value.__globals__]
    of = {getattr(one, "__name__" if isinstance(one, types.ModuleType) else "__module__", None) for one in found}
    of |= {one.argval for one in _instructions(code) if one.opname == "IMPORT_NAME"}
    anew = not _ANEW.isdisjoint(of) or not _CALLED_ANEW.isdisjoint(names_in(code))
    return f"{code.co_filename}:{code.co_firstlineno}" if anew else ""


_ANEW = frozenset(("time", "datetime", "uuid", "secrets"))
_CALLED_ANEW = frozenset(("urandom", "SystemRandom", "open", "read_text", "read_bytes"))


def compares_by_is(value: types.FunctionType) -> str:
    """Where a function is, if it asks whether one of its values is another one."""
    return f"{value.__code__.co_filename}:{value.__code__.co_firstlineno}" if _compares(value.__code__) else ""


@functools.lru_cache(4096)
def _compares(code: types.CodeType) -> bool:
    names = [one.opname for one in _instructions(code)]
    known = ("LOAD_CONST", "LOAD_GLOBAL")
    return any(name == "IS_OP" and before not in known for before, name in itertools.pairwise(names))


@functools.lru_cache(4096)
def _may_know(code: types.CodeType) -> bool:
    handlers = 0
    for one in _instructions(code):
        if one.opname == "IMPORT_NAME" and one.argval.startswith("numpy"):
            return True
        handlers += {"PUSH_EXC_INFO": 1, "WITH_EXCEPT_START": -1}.get(one.opname, 0)
    return handlers > 0 or _compares(code)


def imported(value: types.FunctionType, where: str) -> list[str]:
    """The modules that a function imports itself, by all names they may have.

    Refuses code that reads what is neither the model nor a module: files, the environment, the clock.
    """
    package, names = value.__globals__.get("__package__") or "", list[str]()
    for one in _instructions(value.__code__):
        if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            found = value.__globals__.get(one.argval)
            if found is None and one.argval in _OUTSIDE_CALLS:
                raise Unknowable(f"{where} calls {one.argval}")
            if isinstance(found, types.ModuleType) and is_outside(found.__name__):
                raise Unknowable(f"{where} names the module {found.__name__}")
        if one.opname == "IMPORT_NAME":
            first = one.argval.partition(".")[0]
            if is_outside(first):
                raise Unknowable(f"{where} imports {one.argval}")
            names += [one.argval, first, f"{package}.{one.argval}"]
    return names
