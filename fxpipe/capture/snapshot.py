"""How a model is set, beside its weights: what has changed since it was captured may make another step of it.

model.eval(); step.kl_weight = 0.1; unet.set_adapter("b"); layer.merge(); a hook; dropout.p = 0; Config.scale = 2

Compared before every step, a millisecond for a thousand modules; whether it matters only another trace can tell.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from operator import is_
from typing import Any

import numpy
import torch
from torch import nn

from fxpipe.capture.holders import ABSENT, PLAIN, Holder, holders_of
from fxpipe.capture.weights import tensors_of

_OF_SAVES = (
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
    "_non_persistent_buffers_set",
)  # fmt: skip
_OWN = "fxpipe."  # hooks of engines compute nothing


class SameEntries:
    """Whether dicts have the entries that they had, in their order, told by where these lie in memory: where they do
    not, they may still be equal."""

    def __init__(self, dicts: Iterable[dict[Any, Any]]) -> None:
        found = [*dicts]
        self._empty, self._filled = [one for one in found if not one], [one for one in found if one]
        self._sizes, (self._keys, self._values) = [*map(len, self._filled)], map(list, self._now())

    def hold(self) -> bool:
        """In a millisecond for ten thousand dicts with twenty thousand entries, as no Python runs for each."""
        if any(self._empty) or [*map(len, self._filled)] != self._sizes:
            return False
        keys, values = self._now()
        return all(map(is_, keys, self._keys)) and all(map(is_, values, self._values))

    def _now(self) -> tuple[Iterator[Any], Iterator[Any]]:
        return chain.from_iterable(self._filled), chain.from_iterable(map(dict.values, self._filled))


class Snapshot:
    """Modules, modes, hooks and whatever else forward may read of a model in Python, as they are now; and the strides
    that its tensors had at the beginning."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.renew()
        self._first = self._dicts + self._others
        self.strides = {name: one.stride() for name, one in tensors_of(model).items()}

    def renew(self) -> None:
        """They are now as they should be."""
        holders = [one for one in holders_of(self._model)[0] if one.path not in _OF_SAVES]
        parts = [Holder(n, "", m._modules, of_attributes=True) for n, m in self._model.named_modules()]
        self._dicts: list[tuple[Holder, dict[Any, Any]]] = []
        self._others: list[tuple[Holder, dict[Any, Any]]] = []
        for one in (*holders, *parts):
            whole = isinstance(one.values, dict) and one.keys is None
            (self._dicts if whole else self._others).append((one, one.entries()))
        self._same = SameEntries(one.values for one, _ in self._dicts)
        self._around = self._around_now()
        self._kinds = [(name, module, type(module), vars(module)) for name, module in self._model.named_modules()]

    def _around_now(self) -> dict[str, Any]:
        return {"default dtype": torch.get_default_dtype(), "default device": torch.get_default_device()}

    @contextmanager
    def as_at_first(self) -> Iterator[None]:
        """Inside, modules have the entries that they had at the beginning, whatever has been renewed since."""
        now = [(holder, holder.entries()) for holder, _ in self._first]
        try:
            for holder, entries in self._first:
                holder.restore(entries)
            yield
        finally:
            for holder, entries in now:
                holder.restore(entries)

    def changes(self) -> list[str]:
        """What was set otherwise since then, in words."""
        now = self._around_now()
        some = self._others if self._same.hold() else self._dicts + self._others
        others = [
            n or "(the model itself)" for n, m, kind, own in self._kinds if type(m) is not kind or vars(m) is not own
        ]
        return [
            *(_told(one, key, old, new) for one, before in some for key, old, new in _changed(one, before)),
            *(f"the {n} was {old} and is {now[n]}" for n, old in self._around.items() if now[n] != old),
            *(f"module {name}: its class or its __dict__ is another one" for name in others),
        ]


def _changed(holder: Holder, before: dict[Any, Any]) -> list[tuple[Any, Any, Any]]:
    """Entries with their old and new values."""
    now = holder.values if holder.keys is None and isinstance(holder.values, dict) else holder.entries()
    found = [(key, old, now.get(key, ABSENT)) for key, old in before.items() if now.get(key, ABSENT) is not old]
    if len(now) != len(before) or found:
        found += [(key, ABSENT, new) for key, new in now.items() if key not in before]
    return [one for one in found if not _is_same(*one[1:])]


def _is_same(old: Any, new: Any) -> bool:
    if old is ABSENT:
        return str(getattr(new, "__module__", "")).startswith(_OWN)
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):  # with a history no graph reads it
        return old.grad_fn is not None and (old.shape, old.dtype) == (new.shape, new.dtype)
    return type(old) in PLAIN and type(old) is type(new) and bool(old == new)


def _told(holder: Holder, key: Any, old: Any, new: Any) -> str:
    was, now = _shown(old), _shown(new)
    changed = "has other values" if type(old) is type(new) is bytes else f"was {was} and is {now}"
    changed = f"is another {type(new).__name__}" if was == now else changed
    return f"module {holder.owner or '(the model itself)'}: {holder.name(key)} {changed}"


def _shown(value: Any) -> str:
    if value is ABSENT:
        return "not there"
    return repr(value) if type(value) in PLAIN or isinstance(value, numpy.generic) else f"a {type(value).__name__}"
