"""Whether a model is still the one that was compiled: adapters that are put into it later would train nothing.

Looked at again only after a module or parameter was registered somewhere in this process.
"""

from itertools import count
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from fxpipe.errors import RunError

_registrations = count()
_last = [next(_registrations)]


def _count(*_: Any) -> None:
    _last[0] = next(_registrations)


register_module_module_registration_hook(_count)
register_module_parameter_registration_hook(_count)


class Unchanged:
    """A model's parameters as they are now."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._trained, self._seen = model, _trained(model), _last[0]

    def require(self) -> None:
        """Raises RunError where it has other parameters by now, or others that are trained."""
        if self._seen == _last[0]:
            return
        now = _trained(self._model)
        if now != self._trained:
            other = sorted(
                name for name in now.keys() | self._trained.keys() if now.get(name) != self._trained.get(name)
            )
            raise RunError(
                f"{len(other)} parameters of the model have come, gone, or are trained otherwise since it was compiled "
                f"({other[0]}, ...), as with adapters that were added later: no program knows them; put them in first, "
                "then compile"
            )
        self._seen = _last[0]


def _trained(model: nn.Module) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in model.named_parameters(remove_duplicate=False)}
