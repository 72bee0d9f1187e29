"""Averages of weights on a rank that trains a part of these: of what others train they have old values.

    rank 0   average.update_parameters(model)   layers.0: as it is      layers.6: as it was when rank 1 last brought it
    rank 0   average.module(x)                  refused, until engine.sync_model(average) has brought layers.6

So it is for torch's `AveragedModel` and diffusers' `EMAModel`, of which is known then what each average was made of, in
whatever order it was given, and for copies of the model by `copy.deepcopy`; what a script averages by itself goes
unseen.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.weak import WeakTensorKeyDictionary

from fxpipe.errors import RunError
from fxpipe.run.ownership import is_empty, is_outdated, outdate, renew, uses_as_is, watch_outdated

_wrapped = set[type]()
_averaged = WeakTensorKeyDictionary()  # average -> a reference to the parameter that it was last made of
_old_stored = WeakKeyDictionary[Any, list[bool]]()  # average -> which parameters were outdated as it stored them


def averaged_by(average: torch.Tensor) -> nn.Parameter | None:
    """The parameter of which it is an average, where that is known."""
    parameter = _averaged.get(average)
    return None if parameter is None else parameter()


def watch_averages() -> None:
    """From now on; of classes that have been imported."""
    _wrap(AveragedModel, update_parameters=_updated)
    _wrap(nn.Parameter, __deepcopy__=_deeply_copied, __reduce_ex__=_pickled)
    diffusers: Any = sys.modules.get("diffusers.training_utils")
    if diffusers is not None:
        _wrap(diffusers.EMAModel, step=_stepped, copy_to=_copied, state_dict=_told, store=_stored, restore=_restored)


def _wrap(kind: Any, **calls: Callable[..., Any]) -> None:
    for name, call in {} if kind in _wrapped else calls.items():
        original = getattr(kind, name)
        setattr(kind, name, wraps(original)(lambda self, *given, _o=original, _c=call, **k: _c(_o, self, *given, **k)))
    _wrapped.add(kind)


def _updated(original: Callable[..., Any], average: AveragedModel, model: nn.Module) -> None:
    averages = [*average.module.parameters()]
    _age(averages, [*model.parameters()], lambda: original(average, model))
    watch_outdated(average.module, averages)


def _deeply_copied(original: Callable[..., Any], parameter: nn.Parameter, memo: dict[int, Any]) -> Any:
    copied = original(parameter, memo)
    if is_outdated(parameter):
        outdate([copied])
    return copied


def _pickled(original: Callable[..., Any], parameter: nn.Parameter, protocol: Any) -> Any:
    if is_outdated(parameter) and not uses_as_is():
        raise RunError(
            f"a parameter {list(parameter.shape)} was trained on another rank, and is not here yet; before it is "
            "saved, call engine.sync_model() on every rank"
        )
    return original(parameter, protocol)


def _stepped(original: Callable[..., Any], average: Any, parameters: Any) -> None:
    given = [*(parameters.parameters() if isinstance(parameters, nn.Module) else parameters)]
    _age(average.shadow_params, given, lambda: original(average, given))


def _age(averages: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor], update: Callable[[], Any]) -> None:
    """What is made of an old value, or was, stays old."""
    were = [is_outdated(average) for average in averages]
    update()
    pairs = [*zip(averages, were, parameters, strict=False)]
    outdate(average for average, was, parameter in pairs if was or is_outdated(parameter))
    _averaged.update({average: ref(parameter) for average, _, parameter in pairs})


def _copied(original: Callable[..., Any], average: Any, parameters: Iterable[nn.Parameter]) -> None:
    given = [*parameters]
    _require_memory(given)
    original(average, given)
    pairs = [*zip(given, map(is_outdated, average.shadow_params), strict=False)]
    renew(parameter for parameter, is_old in pairs if not is_old)
    outdate(parameter for parameter, is_old in pairs if is_old)


def _require_memory(parameters: Sequence[nn.Parameter]) -> None:
    if elsewhere := sum(map(is_empty, parameters)):
        raise RunError(
            f"{elsewhere} parameters of {len(parameters)} are held by other ranks, and have no memory here; before an "
            "average is copied into them, call engine.sync_model(average) on every rank"
        )


def _stored(original: Callable[..., Any], average: Any, parameters: Iterable[nn.Parameter]) -> None:
    given = [*parameters]
    original(average, given)
    _old_stored[average] = [is_outdated(parameter) for parameter in given]


def _restored(original: Callable[..., Any], average: Any, parameters: Iterable[nn.Parameter]) -> None:
    given = [*parameters]
    _require_memory(given)
    original(average, given)
    pairs = [*zip(given, _old_stored.pop(average, [False] * len(given)), strict=False)]
    renew(parameter for parameter, was_old in pairs if not was_old)  # its version does not tell of writes into `data`
    outdate(parameter for parameter, was_old in pairs if was_old)


def _told(original: Callable[..., Any], average: Any) -> Any:
    old = sum(map(is_outdated, average.shadow_params))
    if old and not uses_as_is():
        raise RunError(
            f"{old} averages of {len(average.shadow_params)} are of parameters that other ranks train, and not here "
            "yet; before they are saved, call engine.sync_model(average) on every rank"
        )
    return original(average)
