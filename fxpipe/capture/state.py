"""What forward keeps in Python from one call to the next, which a graph does not: it has every call alike.

self.freqs = cos(arange(n))                            of constants alone: the graph computes it in every call
self.n += 1; self.mean = 0.9 * self.mean + h.mean()    refused, where the next call reads it
self.last = loss.detach()                              read by nobody in forward: said, and left as it was
"""

import reprlib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fxpipe.capture import private
from fxpipe.capture.evaluation import evaluated
from fxpipe.capture.holders import ABSENT, NOT_STATE, PLAIN, WEIGHTS, Holder, holders_of, is_opaque

_LIBRARY = "transformers."
"""Its modules note what they have installed at their first call, and compute alike in the next."""
_HOOKS = "torch.nn.utils."
"""Its hooks compute a module's weight before each of its calls: `weight_norm`, `spectral_norm`."""


@dataclass(frozen=True, eq=False)
class WrittenEntry:
    """An entry that forward gave another value; `ABSENT` is none.

    `is_read`: forward has read a tensor of what was there before.
    """

    holder: Holder
    key: Any
    before: Any
    after: Any
    is_read: bool = False

    @property
    def place(self) -> tuple[int, Any]:
        return id(self.holder.values), self.key

    def __str__(self) -> str:
        where = f"module {self.holder.owner or '(the model itself)'}"
        before = "new" if self.before is ABSENT else f"{_shown(self.before)} before"
        return f"{where}: forward sets its attribute {self.holder.name(self.key)!r}, {before}, to {_shown(self.after)}"


@contextmanager
def state_kept(model: nn.Module) -> Iterator[None]:
    """All of it, as it is; it is so again afterwards.

    Hooks that a first forward installs go with the attribute that says they are there: the next would add them twice.
    """
    holders, caches = holders_of(model)
    parts = [vars(module)[kind] for _, module in model.named_modules() for kind in WEIGHTS]
    holders += [Holder("", "", part, of_attributes=True) for part in parts]
    before = [holder.entries() for holder in holders]
    infos = [cache.cache_info() for cache in caches]
    try:
        yield
    finally:
        for holder, entries in zip(holders, before, strict=True):
            holder.restore(entries)
        for cache, info in zip(caches, infos, strict=True):
            if (cache.cache_info().currsize, cache.cache_info().misses) != (info.currsize, info.misses):
                cache.cache_clear()


@contextmanager
def state_written(model: nn.Module, inputs: Sequence[torch.Tensor], found: list[WrittenEntry]) -> Iterator[None]:
    """Leaves in `found` what the trace inside gives other values that may differ from call to call: numbers, and
    tensors made of the inputs, of trained weights, of random numbers or of what was kept before.

    Nothing of a module that also keeps a tensor made of constants: such numbers say what it has kept of them.
    """
    holders, _ = holders_of(model)
    before = [holder.entries() for holder in holders]
    yield
    found.clear()
    own = {id(weight) for weight in model.parameters()}
    changed = [
        WrittenEntry(holder, key, entries.get(key, ABSENT), now.get(key, ABSENT))
        for holder, entries in zip(holders, before, strict=True)
        for now in (holder.entries(),)
        for key in (*now, *(entries.keys() - now.keys()))
        if not (isinstance(key, str) and key in NOT_STATE)
        and _is_other(entries.get(key, ABSENT), now.get(key, ABSENT), own)
    ]
    if not changed:
        return
    replaced = [tensor for one in changed for tensor in _tensors(one.before)]
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    moves, read = private.moving_values([*inputs, *weights], replaced)
    caches = {one.holder.owner for one in changed if any(not moves(tensor) for tensor in _tensors(one.after))}
    for one in changed:
        if one.holder.owner in caches or _is_of(model, one, _LIBRARY):
            continue
        is_read = any(tensor is other for tensor in _tensors(one.before) for other in read)
        if is_read or not _is_hooks(model, one):
            found.append(replace(one, is_read=is_read))


@contextmanager
def carried_on(written: Sequence[WrittenEntry]) -> Iterator[None]:
    """Inside, state is as forward left it."""
    holders = {id(one.holder.values): one.holder for one in written}
    before = {key: holder.entries() for key, holder in holders.items()}
    try:
        for key, holder in holders.items():
            after = before[key] | {one.key: one.after for one in written if one.place[0] == key}
            holder.restore({name: value for name, value in after.items() if value is not ABSENT})
        yield
    finally:
        for key, holder in holders.items():
            holder.restore(before[key])


def warn_of_tensors(written: Sequence[WrittenEntry]) -> tuple[str, ...]:
    """What is told of those that forward does not read itself: somebody else may."""
    told = "which engines and samplers leave as it is; return what is read later from forward"
    kept = tuple(f"{one}, {told}" for one in written if _tensors(one.after))
    for text in kept:
        warnings.warn(text, stacklevel=2)
    return kept


def _shown(value: Any) -> str:
    if type(value) in PLAIN:
        return reprlib.repr(value)
    return "a tensor" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def _is_of(model: nn.Module, written: WrittenEntry, library: str) -> bool:
    return type(model.get_submodule(written.holder.owner)).__module__.startswith(library)


def _is_hooks(model: nn.Module, written: WrittenEntry) -> bool:
    hooks = model.get_submodule(written.holder.owner)._forward_pre_hooks.values()
    return any(type(h).__module__.startswith(_HOOKS) and _name_of(h) == written.key for h in hooks)


def _name_of(hook: Any) -> str | None:
    """Of the weight that a hook of torch's computes; those of pruning call it otherwise."""
    return getattr(hook, "name", None) or getattr(hook, "_tensor_name", None)


def _is_other(before: Any, after: Any, weights: set[int]) -> bool:
    """Whether a value is new, and no list of the model's own weights."""
    if _is_same(before, after):
        return False
    tensors = _tensors(after)
    return not tensors or any(id(tensor) not in weights for tensor in tensors)


def _is_same(before: Any, after: Any) -> bool:
    """Whether one value is another, or is made to be equal to it, as tables that are moved to where they are."""
    if before is after or (type(after) in PLAIN and type(before) is type(after) and before == after):
        return True
    if type(before) is type(after) and isinstance(after, list | tuple):
        return len(before) == len(after) and all(map(_is_same, before, after))
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor) or not private.is_plain(before):
        return False
    if (before.shape, before.dtype, before.device) != (after.shape, after.dtype, after.device):
        return False
    found = evaluated(after, {})
    if found is None or any(one is not before for one in found.read.values()):
        return False
    with private.outside_trace(), private.outside_fakes():
        return torch.equal(found.value, before.detach().cpu())


def _tensors(value: Any, depth: int = 4) -> list[torch.Tensor]:
    """In containers and objects, too."""
    if isinstance(value, torch.Tensor):
        return [value]
    if depth == 0 or is_opaque(value):
        return []
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else None
    inside = getattr(value, "__dict__", {}).values() if inside is None else inside
    return [tensor for one in inside for tensor in _tensors(one, depth - 1)]
