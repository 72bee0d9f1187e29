"""Whether a model is still the one that was compiled: what is set otherwise later would change nothing of its programs.

unet.train(); step.note = 3         traced again: the same step, which goes on
step.kl_weight = 0.1                another one: refused, and told what it is
layer.weight = nn.Parameter(...)    the programs train the one before: refused
model.to(memory_format=...)         they are for weights that lie as they did: refused
step.sigma.fill_(2)                 a buffer that forward read as a number, or keeps a table of: refused
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn

from fxpipe.capture import private
from fxpipe.capture.known import Read
from fxpipe.capture.snapshot import SameEntries, Snapshot
from fxpipe.capture.weights import tensors_of
from fxpipe.errors import CaptureError, RunError
from fxpipe.run.ownership import as_is, is_empty, owners
from fxpipe.run.read_ahead import version

_log = logging.getLogger(__name__)
_AGAIN = "compile again: engines of one model share its weights, and its optimizer goes on (set step_index, too)"


class Unchanged:
    """Looked at before every step, which takes a millisecond for a thousand modules, in a step two or three.

    Args:
        used: the model's tensors that programs read, by all their names.
        settings: as the model was set when it was captured.
        read: what forwards, of every shape, have read as numbers, or keep what they make of.
        is_same: whether it is still captured as the same step.
    """

    def __init__(
        self,
        model: nn.Module,
        used: Mapping[str, torch.Tensor] | None = None,
        settings: Snapshot | None = None,
        is_same: Callable[[], bool] = lambda: True,
        read: Callable[[], Iterable[Read]] = tuple,
    ) -> None:
        self._model, self._settings, self._is_same, self._read = model, settings, is_same, read
        self._seen: dict[int, tuple[torch.Tensor, int]] = {}  # of what was read, and how often it was written
        self._trained = _trained(model)
        self._known: _Tensors | None = None
        self._used = {name: (tensor, tensor.dtype) for name, tensor in (used or {}).items()}
        self._first = {tensor: name for name, (tensor, _) in reversed(self._used.items())}

    def require(self) -> None:
        """Raises RunError where it has other parameters by now, others that are trained, or makes another step."""
        if self._known is None or not self._known.are_as_they_were():
            self._require_same_parameters()
            self._require_same_tensors()
            self._known = _Tensors(self._model)
        if private.all_modules_have_gradient_hooks():
            raise RunError("all modules have a backward hook, which steps do not run; change .grad after them")
        self._require_same_values()
        changes = [] if self._settings is None else self._settings.changes()
        if changes:
            self._require_same_step(changes)

    def _require_same_parameters(self) -> None:
        now = _trained(self._model)
        if now != self._trained:
            other = sorted(n for n in now.keys() | self._trained.keys() if now.get(n) != self._trained.get(n))
            raise RunError(
                f"{len(other)} parameters of the model have come, gone, or are trained otherwise since it was compiled "
                f"({other[0]}, ...), as with adapters that were added later, or layers that were frozen: no program "
                f"knows them; put them in first, then compile, or {_AGAIN}"
            )

    def _require_same_tensors(self) -> None:
        if not self._used:
            return
        held: dict[str, Any] = tensors_of(self._model)
        others = dict[str, str]()
        for name, (tensor, dtype) in self._used.items():
            now, first = held.get(name), self._first[tensor]
            further = name != first and isinstance(tensor, nn.Parameter)  # of buffers no capture tells which it reads
            if now is not tensor and further and self._settings is not None:  # forward may not read this one
                others[name] = f"{name} of the model, which was {first}, is another tensor"
                continue
            if now is not tensor:
                raise RunError(
                    f"{name} of the model is another tensor than the one that is trained or read since this engine was "
                    "made, as after load_state_dict(assign=True), or with a layer in another's place; copy values into "
                    f"the one that was there, under torch.no_grad(), or {_AGAIN}"
                )
            if self._settings is not None:
                require_strides(name, now, self._settings.strides)
            if now.dtype != dtype:
                raise RunError(f"{name} of the model was {dtype}, and is now {now.dtype}; {_AGAIN}")
            if now.requires_grad and private.has_gradient_hooks(now):
                raise RunError(f"parameter {name} has a gradient hook, which steps do not run; change .grad after them")
        if others:
            self._require_same_step([*others.values()])
            for name in others:  # which forward does not read
                del self._used[name]

    def _require_same_values(self) -> None:
        read = [(name, *one) for reads in self._read() for name, one in reads.items()]
        held = dict(self._model.named_buffers()) if read else {}
        for name, tensor, value in read:
            now = held.get(name, tensor)
            seen, times = self._seen.get(id(value), (None, 0))
            written = now.device.type == "cpu" or now is not seen or version(now) != times  # or by numpy
            if written and not torch.equal(now.detach().cpu(), value):
                raise RunError(
                    f"forward reads {name} as a number, or keeps what it makes of it, which was {value}; {_AGAIN}"
                )
            self._seen[id(value)] = now, version(now)

    def _require_same_step(self, changes: list[str]) -> None:
        told = changes[0] + (f", and {len(changes) - 1} more changes" if len(changes) > 1 else "")
        _log.warning(
            "%s: forward is traced again, to see whether that makes another step; what it does not read, and changes "
            "often, is better kept elsewhere",
            told,
        )
        try:
            with as_is():
                same = self._is_same()
        except CaptureError as error:
            raise RunError(
                f"{told}, since the model was compiled, and forward cannot be captured so: {error}"
            ) from None
        if not same:
            raise RunError(
                f"{told}, since the model was compiled, and forward computes something else so, which no program does; "
                f"put it back, give forward what changes as an input, or {_AGAIN}"
            )
        assert self._settings is not None
        self._settings.renew()


class _Tensors:
    """The modules and tensors of a model: which, of what type, how they lie, whether trained, without hooks."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [*model.modules()]
        self._holders = [*self._holders_now()]
        self._entries = SameEntries(self._holders)
        self._tensors = [*model.parameters(), *model.buffers()]
        self._kinds = self._kinds_now()

    def are_as_they_were(self) -> bool:
        """Told without their names, which takes a fifth of the time."""
        held = all(map(is_, self._holders_now(), self._holders)) and self._entries.hold()
        return held and self._kinds_now() == self._kinds and not private.have_gradient_hooks(self._tensors)

    def _holders_now(self) -> Iterator[dict[str, Any]]:
        return chain.from_iterable(map(attrgetter("_modules", "_parameters", "_buffers"), self._modules))

    def _kinds_now(self) -> list[Any]:
        return [*map(attrgetter("dtype", "requires_grad"), self._tensors), *map(torch.Tensor.stride, self._tensors)]


def require_strides(name: str, tensor: torch.Tensor, then: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse what does not lie in memory as it did when it was compiled: gradients of norms of what is computed with it
    would be wrong. What other ranks train, and had no memory here, may lie in order."""
    before = then.get(name, tensor.stride())
    if is_empty(tensor) or (owners(tensor) and tensor.is_contiguous()):
        return
    if any(size > 1 and one != other for size, one, other in zip(tensor.shape, tensor.stride(), before, strict=True)):
        raise RunError(
            f"{name} of the model lies otherwise in memory than when it was compiled, as after "
            f"model.to(memory_format=...): call that before, or {_AGAIN}"
        )


def _trained(model: nn.Module) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in model.named_parameters(remove_duplicate=False)}
