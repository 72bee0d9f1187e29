"""Which of a state's tensors go by parameters of a model, as averages of weights do.

    {"module.conv_in.weight": ...}   of AveragedModel(unet)            unet.conv_in.weight, ...
    [tensor, tensor, ...]            of EMAModel(unet.parameters())    likewise, in their order

They are those of the whole model, or of the one module, or of what is trained of it, that has parameters like them; a
plain value that is saved goes by the whole model alone.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import nn

from fxpipe.run.averages import averaged_by
from fxpipe.run.saves.run import state_of
from fxpipe.run.saves.values import encode, numbered

_Place = Mapping[str, nn.Parameter]
"""Parameters of a module, by all their names in it."""


class WeightNames:
    """By which names a model's parameters are found in states.

    A list with a tensor for each of `own`, the parameters that this rank trains, may be of these alone: it goes by no
    others.
    """

    def __init__(self, model: nn.Module, own: Iterable[nn.Parameter] = ()) -> None:
        self._model, self._whole = model, _Places([model])
        self._own = {str(number): parameter for number, parameter in enumerate(own)}
        self._parameters = _by_plain_name(model)
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}

    def parameter(self, name: str, tensor: torch.Tensor) -> nn.Parameter | None:
        """The one that a tensor of that name goes by."""
        found = self._parameters.get(_plain(name))
        return found if found is not None and _is_like(tensor, found) else None

    def of(self, items: list[Any], called: list[str]) -> list[str]:
        """The names of a list's or a mapping's items: those of parameters, or what they are called."""
        return self._of(items, called, self._everywhere)

    def of_whole(self, items: list[Any], called: list[str]) -> list[str]:
        """The same, where they go by the whole model, or what is trained of it, or by nothing."""
        return self._of(items, called, self._whole)

    def by_parameter(self, value: Any) -> dict[str, list[torch.Tensor]]:
        """The tensors of a state, themselves, by the names of parameters that they go by."""
        found: dict[str, list[torch.Tensor]] = {}

        def keep(key: str, name: str, tensor: torch.Tensor) -> str:
            if (parameter := self.parameter(name, tensor)) is not None:
                found.setdefault(self._names[id(parameter)], []).append(tensor)
            return key

        encode(state_of(value), "average", keep, self.of)
        return found

    def _averaged(self, tensors: list[torch.Tensor]) -> list[str]:
        """The names of what they are averages of; none where that is not known."""
        names = [self._names.get(id(averaged_by(tensor)), "") for tensor in tensors]
        return names if all(names) and len({*names}) == len(names) else []

    @cached_property
    def _everywhere(self) -> "_Places":
        return _Places(self._model.modules())

    def _of(self, items: list[Any], called: list[str], places: "_Places") -> list[str]:
        given = {_plain(name): item for name, item in zip(called, items, strict=True) if isinstance(item, torch.Tensor)}
        in_order = called == numbered(items)
        if not given or (in_order and len(given) < len(items)):
            return called
        if in_order and (names := self._averaged(items)):
            return names
        found = places.in_order(items) if in_order else places.by_name(given)
        most = max(map(_number, found), default=0)
        found = [place for place in found if _number(place) == most]
        found = [place for place in found if any(p.requires_grad for p in place.values())] or found
        if found and in_order and _are_like(items, self._own.values()):
            found.append(self._own)
        if len({tuple(_distinct(place)) for place in found}) != 1:  # none, or any of several
            return called
        if in_order:
            return [self._names[number] for number in _distinct(found[0])]
        full = {name: self._names[id(parameter)] for name, parameter in found[0].items()}
        return [full.get(_plain(name), name) for name in called]


class _Places:
    """Of modules, all their parameters and those of them that are trained."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._of_number: dict[int, list[_Place]] = defaultdict(list)
        self._of_first: dict[str, list[_Place]] = defaultdict(list)
        for module in modules:
            own = _by_plain_name(module)
            trained = {name: parameter for name, parameter in own.items() if parameter.requires_grad}
            for place in (own, trained) if 0 < len(trained) < len(own) else (own,) if own else ():
                self._of_number[_number(place)].append(place)
                self._of_first[next(iter(place))].append(place)

    def in_order(self, tensors: list[torch.Tensor]) -> list[_Place]:
        """Those with a parameter like each of the tensors, in their order."""
        found = self._of_number.get(len(tensors), [])
        return [place for place in found if _are_like(tensors, _distinct(place).values())]

    def by_name(self, given: Mapping[str, torch.Tensor]) -> list[_Place]:
        """Those whose parameters are all given, by one of their names."""
        found = [place for name in given for place in self._of_first.get(name, ())]
        return [place for place in found if _is_given(place, given)]


def _is_given(place: _Place, given: Mapping[str, torch.Tensor]) -> bool:
    present = {name: parameter for name, parameter in place.items() if name in given}
    return _number(present) == _number(place) and all(_is_like(given[name], p) for name, p in present.items())


def _distinct(place: _Place) -> dict[int, nn.Parameter]:
    return {id(parameter): parameter for parameter in place.values()}


def _number(place: _Place) -> int:
    return len(_distinct(place))


def _are_like(tensors: list[torch.Tensor], parameters: Collection[nn.Parameter]) -> bool:
    return len(tensors) == len(parameters) and all(map(_is_like, tensors, parameters))


def _is_like(tensor: torch.Tensor, parameter: nn.Parameter) -> bool:
    return tensor.shape == parameter.shape and tensor.is_floating_point() == parameter.is_floating_point()


def _by_plain_name(module: nn.Module) -> dict[str, nn.Parameter]:
    return {_plain(name): parameter for name, parameter in module.named_parameters(remove_duplicate=False)}


def _plain(name: str) -> str:
    """Without what wrappers call the module that they hold."""
    while (shorter := name.removeprefix("_orig_mod.").removeprefix("module.")) != name:
        name = shorter
    return name
