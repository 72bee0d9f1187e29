"""A denoiser's call as one flat graph, of its own sizes or of any, and where the image's rows are in its inputs."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from fxpipe.analysis import Observe
from fxpipe.capture import private
from fxpipe.capture.any_size import AnySize, Freed
from fxpipe.capture.denoiser import CapturedCall, cached_call
from fxpipe.capture.export import of_one_batch
from fxpipe.capture.inputs import Dims, InputSpec, describe, same_objects
from fxpipe.capture.known import Given
from fxpipe.capture.model_call import ModelCall
from fxpipe.capture.settings import require_stateless
from fxpipe.capture.surroundings import Surroundings
from fxpipe.capture.trees import Returned
from fxpipe.errors import CompileError, FxpipeError
from fxpipe.sampling.step import Traced
from passes.batch import require_independent
from passes.rows.sized import at_batch_size, require_shapes

_log = logging.getLogger(__name__)

RowsOf = Callable[[nn.Module, Mapping[str, torch.Tensor]], Mapping[str, int]]
"""Which inputs of a module's call have rows, and in which dimension."""


SizesChoice = Literal["auto", "any"]


@dataclass(frozen=True)
class Tracing:
    """How calls become graphs: where their rows are, whether their sizes are free from the first call on, the folder
    that keeps captures. One of several processes `tells`."""

    rows_of: RowsOf
    sizes: SizesChoice
    cache: Path | None
    observe: Observe
    tells: bool = True

    def traced(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        free: bool = False,
        around: Surroundings | None = None,
    ) -> Traced:
        """The call as one flat graph, inside of an autocast `around` it; the module stays as it is. Where `free`, also
        with free sizes.

        A single sample is traced as two, or more where that is the length of another input, since a graph of one holds
        for one alone; as it is where that fails, or is something else. Where there is no graph for any number of
        samples, some inputs may have several rows to each; where samples mix, some may be tables of as many rows.
        Where sizes are free the graph is that with free sizes at the call's own, so that it is one program at all.

        Raises:
            CaptureError: the module cannot be captured as one graph.
            CompileError: where its rows are is not known.
        """
        inputs, tensors = _described(module, args, kwargs)
        found = self._found(ModelCall(module, inputs, tensors, around), free)
        if not isinstance(found.any_size, AnySize):
            return found
        try:
            return replace(self.resized(found, args, kwargs), any_size=found.any_size)
        except CompileError as error:  # nor does it hold at other sizes
            return replace(found, any_size=str(error))

    def _found(self, call: ModelCall, free: bool) -> Traced:
        module, inputs, tensors = call.model, call.inputs, call.examples
        if inputs.batch_size == 1:
            with suppress(FxpipeError):
                others = {leaf.shape[0] for leaf in inputs.leaves if leaf.shape and not leaf.batched}
                more = next(times for times in count(2) if times not in others)
                repeated_call = inputs.rebuild(_repeated(inputs, tensors, more))
                as_more, repeated_tensors = _described(module, *repeated_call, more)
                repeated = replace(call, inputs=as_more, examples=repeated_tensors)
                found = self._traced(repeated, free, may_read=False)
                if found.holds(1):
                    return found
        found = self._traced(call, free)
        if inputs.batch_size == 1 or found.captured.guards or (found.captured.batch and _is_independent(found)):
            return found
        if found.captured.batch:
            with suppress(FxpipeError), torch.inference_mode(False), _sampling(module):
                flat = ModelCall(module, inputs, inputs.flat(tensors))
                alone = of_one_batch(flat, lambda out: Returned.of(out).tensor(out))
                other = found if alone == inputs else self._traced(replace(call, inputs=alone), free)
                return other if _is_independent(other) else found
            return found
        for several in map(inputs.with_each, _several(inputs)):
            with suppress(FxpipeError):
                other = self._traced(replace(call, inputs=several), free)
                if _is_independent(other) and other.captured.inputs == several:
                    return other
        return found

    def freed(
        self,
        module: nn.Module,
        traced: Traced,
        others: Dims,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        around: Surroundings | None,
    ) -> AnySize | str:
        """A graph's call traced again with free sizes, as another such call needs it, whose tensors are on the devices:
        with all of them free, or where that fails only the `others`, those that differ."""
        captured, known = traced.captured, CapturedCall(traced.captured, traced.returned, None)
        other = captured.inputs.of_other_sizes(args, kwargs)
        tensors, _ = other.bind(args, kwargs, shapes_alone=True)
        reads = bool(captured.guards)  # numbers of this call, whose sizes they may go by
        with torch.inference_mode(False), _sampling(module):
            tensors = {name: one.clone() if one.is_inference() else one for name, one in tensors.items()}
            given, inputs = (_given(tensors, traced.rows), other) if reads else (None, captured.inputs)
            call = ModelCall(module, inputs, [tensors[name] for name in inputs.tensor_names], around, given)
            made = cached_call(call, Freed(traced.rows), self.cache, known).any_size
            if isinstance(made, str):
                made = cached_call(call, Freed(traced.rows, others, made), self.cache, known).any_size
        assert made is not None
        return made

    def resized(self, traced: Traced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
        """The graph with free sizes at another call's; CompileError where it does not hold for them."""
        assert isinstance(traced.any_size, AnySize)
        captured = traced.any_size.at(args, kwargs)
        require_shapes(sized := at_batch_size(captured, captured.inputs.batch_size))
        self.observe("capture", captured)
        return Traced(captured, traced.returned, traced.rows, of_all_sizes=traced.any_size.of_all, sized=sized)

    def _traced(self, call: ModelCall, free: bool, may_read: bool = True) -> Traced:
        module, inputs, tensors = call.model, call.inputs, call.examples
        named = self.rows_of(module, dict(zip(inputs.tensor_names, tensors, strict=True)))
        rows = {inputs.first_names.get(name, name): dim for name, dim in named.items()}
        require_stateless(module)
        if self.tells:
            _warn_of_training(module)
        with torch.inference_mode(False), _sampling(module):
            # No trace takes a tensor of inference_mode.
            known = inputs.flat([tensor.clone() if tensor.is_inference() else tensor for tensor in tensors])
            given = _given(dict(zip(inputs.tensor_names, known, strict=True)), rows) if may_read else None
            call = replace(call, examples=known, given=given)
            found = cached_call(call, Freed(rows) if free else None, self.cache)
        self.observe("capture", found.captured)
        return Traced(found.captured, found.returned, rows, found.any_size)


def _described(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], size: int | None = None
) -> tuple[InputSpec, list[torch.Tensor]]:
    """A call, in which forward may find two inputs to be one."""
    inputs, tensors = describe(module, args, kwargs, size)
    return replace(inputs, same=same_objects(tensors)), tensors


def _is_independent(traced: Traced) -> bool:
    with suppress(CompileError):
        require_independent(traced.captured)
        return True
    return False


def _given(tensors: Mapping[str, torch.Tensor], rows: Collection[str]) -> Given:
    """What a call's tensors hold, those that do; the image is another one at every step."""
    held = {n: one for n, one in tensors.items() if not one.is_meta and private.mode_of(one) is None}
    return Given(held, rows)


def _several(inputs: InputSpec) -> list[list[str]]:
    """Inputs that might have several rows to a sample, such as the text of every frame: all of them, or those of as
    many."""
    each = inputs.multiples
    alike = [[name for name in each if each[name] == number] for number in dict.fromkeys(each.values())]
    return [[*each], *alike] if len(alike) > 1 else alike


def repeated(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], times: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call of so many times the samples."""
    inputs, tensors = describe(module, args, kwargs, None)
    return inputs.rebuild(_repeated(inputs, tensors, times))


def _repeated(inputs: InputSpec, tensors: Sequence[torch.Tensor], times: int) -> list[torch.Tensor]:
    leaves = [leaf for leaf in inputs.leaves if leaf.is_tensor]
    return [torch.cat([t] * times) if leaf.batched else t for leaf, t in zip(leaves, tensors, strict=True)]


def _warn_of_training(model: nn.Module) -> None:
    """Say which modules would compute something else by the mode that they are in."""
    names = [name for name, module in model.named_modules() if module.training and _goes_by_mode(module)]
    if names:
        more = f" and {len(names) - 1} more modules" if len(names) > 1 else ""
        _log.warning(
            "%s%s: in training mode; sampling computes as after .eval(), which one device does only once it is called",
            names[0] or "the model itself",
            more,
        )
    for name, module in model.named_modules():
        if module.training and not (type(module).train is nn.Module.train and type(module).eval is nn.Module.eval):
            _log.warning(
                "%s: in training mode, which its own train() or eval() sets; neither is called: if they do more than "
                "set modes, call .eval() before compiling",
                name or "the model itself",
            )


def _goes_by_mode(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.batchnorm._NormBase):
        return module.track_running_stats
    return isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0


@contextmanager
def _sampling(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in eval and no parameter requires a gradient. Modes are set, not asked for: an `eval()` or
    `train()` of a module's own may refuse, or do what is not undone."""
    modes = {module: module.training for module in model.modules()}
    trained = [one for one in model.parameters() if one.requires_grad and not one.is_inference()]
    try:
        for module in modes:
            module.training = False
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
        for module, mode in modes.items():
            module.training = mode
