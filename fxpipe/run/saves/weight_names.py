"""Which of a state's tensors go by parameters of a model, as averages of weights do.

    {"module.conv_in.weight": ...}   of AveragedModel(unet)            unet.conv_in.weight, ...
    [tensor, tensor, ...]            of EMAModel(unet.parameters())    likewise, in their order

They are those of the whole model, or of the one module, or of what is trained of it, that has parameters like them.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fxpipe.run.saves.run import state_of
from fxpipe.run.saves.values import encode, numbered


class WeightNames:
    """By which names a model's parameters are found in states.

    A list with a tensor for each of `own`, the parameters that this rank trains, may be of these alone: it goes by no
    others.
    """

    def __init__(self, model: nn.Module, own: Iterable[nn.Parameter] = ()) -> None:
        self._model, self._parameters = model, dict(model.named_parameters())
        self._own = {str(number): parameter for number, parameter in enumerate(own)}
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}

    def parameter(self, name: str, tensor: torch.Tensor) -> nn.Parameter | None:
        """The one that a tensor of that name goes by."""
        found = self._parameters.get(_plain(name))
        return found if found is not None and found.shape == tensor.shape else None

    def of(self, items: list[Any], called: list[str]) -> list[str]:
        """The names of a list's or a mapping's items: those of parameters, or what they are called."""
        given = {_plain(name): item for name, item in zip(called, items, strict=True) if isinstance(item, torch.Tensor)}
        in_order = called == numbered(items)
        found = [own for own in self._places() if _fits(own, given, in_order)] if given else []
        most = max(map(len, found), default=0)
        found = [own for own in found if len(own) == most]
        found = [own for own in found if any(p.requires_grad for p in own.values())] or found
        if found and in_order and _fits(self._own, given, in_order):
            found.append(self._own)
        if len({tuple(map(id, own.values())) for own in found}) != 1:  # none, or any of several
            return called
        names = [self._names[id(parameter)] for parameter in found[0].values()]
        full = dict(zip(found[0], names, strict=True))
        return names if in_order else [full.get(_plain(name), name) for name in called]

    def by_parameter(self, value: Any) -> dict[str, list[torch.Tensor]]:
        """The tensors of a state, themselves, by the names of parameters that they go by."""
        found: dict[str, list[torch.Tensor]] = {}

        def keep(key: str, name: str, tensor: torch.Tensor) -> str:
            if self.parameter(name, tensor) is not None:
                found.setdefault(_plain(name), []).append(tensor)
            return key

        encode(state_of(value), "average", keep, self.of)
        return found

    def _places(self) -> Iterator[Mapping[str, nn.Parameter]]:
        """The parameters of every module, and those of them that are trained."""
        for module in self._model.modules():
            own = dict(module.named_parameters())
            yield own
            yield {name: parameter for name, parameter in own.items() if parameter.requires_grad}


def _fits(own: Mapping[str, nn.Parameter], given: Mapping[str, torch.Tensor], in_order: bool) -> bool:
    """Whether the tensors are like these parameters: in their order, or those of their names."""
    if in_order:
        shapes = [parameter.shape for parameter in own.values()]
        return len(own) == len(given) and shapes == [tensor.shape for tensor in given.values()]
    return bool(own) and all(name in given and given[name].shape == p.shape for name, p in own.items())


def _plain(name: str) -> str:
    return name.removeprefix("_orig_mod.").removeprefix("module.")
