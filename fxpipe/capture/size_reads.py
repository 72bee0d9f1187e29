"""Sizes that a trace leaves free are no integers; code that looks at what they are would take another way, unseen.

isinstance(height, int)     True, as without a trace
tables[f"{height}"]         its text is that of one number: the size is this number from here on
"""

import builtins
import operator
import sys
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import sympy
import torch

from fxpipe.capture import private

_LIKE: dict[type, Any] = {torch.SymInt: 1, torch.SymFloat: 1.0, torch.SymBool: True}
_NOT_USERS = {*sys.stdlib_module_names, "torch", "sympy", "mpmath", "numpy", "fxpipe"} - {"__main__"}


@contextmanager
def sizes_read_plainly() -> Iterator[None]:
    """Inside, modules of models and of their libraries see free sizes as integers, and their text as a number's."""
    shadowed = [vars(one) for name, one in list(sys.modules.items()) if _of_users(name, one)]
    try:
        for names in shadowed:
            names["isinstance"] = _isinstance
        with ExitStack() as stack:
            for kind, read in ((torch.SymInt, operator.index), (torch.SymFloat, float)):
                stack.enter_context(private.replaced(kind, "__repr__", _text(vars(kind)["__repr__"], read)))
            yield
    finally:
        for names in shadowed:
            names.pop("isinstance", None)


def _of_users(name: str, module: Any) -> bool:
    known = isinstance(module, types.ModuleType) and name.partition(".")[0] not in _NOT_USERS
    return known and "isinstance" not in vars(module)


def _isinstance(value: Any, kinds: Any) -> bool:
    kind = type(value)
    return builtins.isinstance(value, kinds) or (kind in _LIKE and builtins.isinstance(_LIKE[kind], kinds))


def _text(original: Any, read: Any) -> Any:
    def text(size: Any) -> str:
        file = sys._getframe(1).f_code.co_filename
        ours = file.startswith((*private.FRAMEWORK, *sympy.__path__))
        return original(size) if ours else repr(read(size))

    return text
