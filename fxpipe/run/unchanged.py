"""Whether a model is still the one that was compiled: adapters that are put into it later would train nothing."""

from torch import nn

from fxpipe.errors import RunError


class Unchanged:
    """A model's parameters as they are now; looked at in every step, which takes a millisecond for a thousand."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._trained = model, _trained(model)

    def require(self) -> None:
        """Raises RunError where it has other parameters by now, or others that are trained."""
        now = _trained(self._model)
        if now != self._trained:
            other = sorted(n for n in now.keys() | self._trained.keys() if now.get(n) != self._trained.get(n))
            raise RunError(
                f"{len(other)} parameters of the model have come, gone, or are trained otherwise since it was compiled "
                f"({other[0]}, ...), as with adapters that were added later: no program knows them; put them in first, "
                "then compile"
            )


def _trained(model: nn.Module) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in model.named_parameters(remove_duplicate=False)}
