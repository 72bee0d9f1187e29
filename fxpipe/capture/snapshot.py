"""How a model is set, beside its weights: what has changed since it was captured may make another step of it.

model.eval(); step.kl_weight = 0.1; unet.set_adapter("b"); layer.merge(); a hook; dropout.p = 0; Config.scale = 2

Compared before every step, two milliseconds for a thousand modules; whether it matters only another trace can tell.
"""

from typing import Any

import torch
from torch import nn

from fxpipe.capture.holders import PLAIN, Holder, holders_of

_ABSENT = object()
_OF_SAVES = ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
_OWN = "fxpipe."  # hooks of engines compute nothing


class Snapshot:
    """Modules, modes, hooks and whatever else forward may read of a model in Python, as they are now."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.renew()

    def renew(self) -> None:
        """They are now as they should be."""
        holders = [one for one in holders_of(self._model)[0] if one.path not in _OF_SAVES]
        parts = [Holder(n, "", m._modules, of_attributes=True) for n, m in self._model.named_modules() if m._modules]
        self._before = [(holder, holder.entries()) for holder in (*holders, *parts)]

    def changes(self) -> list[str]:
        """What was set otherwise since then, in words."""
        some = [(one, before) for one, before in self._before if before or not _is_empty(one)]  # most have no hooks
        return [_told(one, key, old, new) for one, before in some for key, old, new in _changed(one, before)]


def _is_empty(holder: Holder) -> bool:
    return isinstance(holder.values, dict) and not holder.values


def _changed(holder: Holder, before: dict[Any, Any]) -> list[tuple[Any, Any, Any]]:
    """Entries with their old and new values."""
    now = holder.values if holder.keys is None and isinstance(holder.values, dict) else holder.entries()
    found = [(key, old, now.get(key, _ABSENT)) for key, old in before.items() if now.get(key, _ABSENT) is not old]
    if len(now) != len(before) or found:
        found += [(key, _ABSENT, new) for key, new in now.items() if key not in before]
    return [one for one in found if not _is_same(*one[1:])]


def _is_same(old: Any, new: Any) -> bool:
    if old is _ABSENT:
        return str(getattr(new, "__module__", "")).startswith(_OWN)
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):  # with a history no graph reads it
        return old.grad_fn is not None and (old.shape, old.dtype) == (new.shape, new.dtype)
    return type(old) in PLAIN and type(old) is type(new) and bool(old == new)


def _told(holder: Holder, key: Any, old: Any, new: Any) -> str:
    changed = "has other values" if type(old) is type(new) is bytes else f"was {_shown(old)} and is {_shown(new)}"
    return f"module {holder.owner or '(the model itself)'}: {holder.name(key)} {changed}"


def _shown(value: Any) -> str:
    if value is _ABSENT:
        return "not there"
    return repr(value) if type(value) in PLAIN else f"a {type(value).__name__}"
