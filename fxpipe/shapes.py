"""Several shapes of batches, one model: a program for each, all with the same weights.

x [8, 4, 32, 32]     compiled first                         x [8, 4, 32, 48]    compiled when it comes, or refused
x [3, 4, 32, 32]     the first one's, with fewer samples    x [9, 4, 32, 32]    more samples are another shape, too
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from fxpipe.capture.inputs import InputSpec, is_same
from fxpipe.capture.trees import flatten
from fxpipe.errors import CompileError

if TYPE_CHECKING:
    from fxpipe.program import Program


@dataclass
class Shapes:
    """Programs by the shapes of their batches; each takes fewer samples as well.

    Args:
        compiled: the program for other example inputs; `fixed` says that there are to be no such.
    """

    compiled: "Callable[[Any], Program]"
    fixed: bool
    programs: "dict[str, Program]" = field(default_factory=dict)

    @property
    def first(self) -> "Program":
        return next(iter(self.programs.values()))

    def add(self, program: "Program") -> None:
        """One more."""
        if self.programs and _kinds(program) != _kinds(self.first):
            raise CompileError(
                "example_inputs differ in more than their sizes, in their inputs, types or dimensions; compile a "
                "program for each: engines of one model share its weights"
            )
        sizes = {leaf.name: list(leaf.shape) for leaf in program.capture.inputs.leaves if leaf.is_tensor}
        batched = {leaf.name for leaf in program.capture.inputs.leaves if leaf.batched}
        size = program.plan.batch_size * program.capture.inputs.rows
        key = _text({n: [size, *of[1:]] if n in batched else of for n, of in sizes.items()})
        if key in self.programs:
            _require_alike(key, self.programs[key], program)
        self.programs[key] = program

    def key(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """The shapes, as text, of the program for a call, the call's own where there is none yet.

        Where a call differs from the first program's in more than shapes, it is that one, which tells so.
        """
        sizes = _sizes(self.first.capture.inputs, args, kwargs)
        if sizes is None:
            return next(iter(self.programs))
        counts = {key: _samples(program, sizes) for key, program in self.programs.items()}
        fitting = [key for key, count in counts.items() if count and self.programs[key].step.takes(count)]
        return min(fitting, key=lambda key: self.programs[key].plan.batch_size, default=_text(sizes))

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "Program":
        """The program for a call, made where it is not there yet; on a launch every rank asks.

        Raises:
            CompileError: other shapes than compiled ones are to be refused, or this one cannot be compiled.
        """
        key = self.key(args, kwargs)
        if key not in self.programs:
            self.programs[key] = self._made(key, args, kwargs)
        return self.programs[key]

    def _made(self, key: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "Program":
        inputs = self.first.capture.inputs
        if self.fixed:
            for program in self.programs.values():
                if count := _samples(program, _sizes(inputs, args, kwargs) or {}):
                    program.step.require_size(count)
            known = "; ".join(self.programs)
            raise CompileError(
                f"a batch of {key}: compiled are batches of {known}; add one of these shapes to example_inputs, or "
                "leave shapes='fixed' out to compile it when it comes"
            )
        if self.first.ranks in (None, (0,)):
            warnings.warn(
                f"a batch of {key} comes for the first time, and is compiled now; give one in example_inputs=[...] to "
                "have it compiled at the start, or shapes='fixed' to have it refused",
                stacklevel=2,
            )
        if args and kwargs:
            args, kwargs = (), inputs.signature.bind(*args, **kwargs).arguments
        return self.compiled(dict(kwargs) if kwargs else tuple(args))


def _text(sizes: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(f"{name} {list(size)}" for name, size in sizes.items())


def _sizes(inputs: InputSpec, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, list[int]] | None:
    """A call's shapes by input; None where it differs from the compiled one in more than these."""
    named, tree = flatten(inputs.signature, args, kwargs, inputs.tree)
    leaves = [leaf for leaf in inputs.leaves if leaf.is_tensor]
    tensors = {leaf.name: named[leaf.name] for leaf in leaves if isinstance(named.get(leaf.name), torch.Tensor)}
    if tree != inputs.tree or len(tensors) < len(leaves):
        return None
    alike = all(tensors[f.name].dtype == f.dtype and tensors[f.name].ndim == len(f.shape) for f in leaves)
    batches = {tensors[leaf.name].shape[0] for leaf in leaves if leaf.batched} if alike else {0}
    if len(batches) > 1 or 0 in batches:
        return None
    return {name: list(tensor.shape) for name, tensor in tensors.items()}


def _samples(program: "Program", sizes: Mapping[str, Sequence[int]]) -> int | None:
    """The samples of a batch that differs from a program's in their number at most; None where it does in more."""
    inputs = program.capture.inputs
    leaves = [leaf for leaf in inputs.leaves if leaf.is_tensor]
    alike = all(list(leaf.shape[leaf.batched :]) == list(sizes[leaf.name][leaf.batched :]) for leaf in leaves)
    counts = (inputs.of_batch(sizes[leaf.name][0]) for leaf in leaves if leaf.batched)
    return next(counts, program.plan.batch_size) if alike else None


def _kinds(program: "Program") -> dict[str, tuple[torch.dtype | None, int]]:
    """Types and numbers of dimensions by input."""
    return {leaf.name: (leaf.dtype, len(leaf.shape)) for leaf in program.capture.inputs.leaves if leaf.is_tensor}


def _require_alike(key: str, known: "Program", program: "Program") -> None:
    """Raises CompileError where one of two programs would never be found."""
    one, other = ({leaf.name: leaf.constant for leaf in p.capture.inputs.leaves} for p in (known, program))
    for name in {**one, **other}:
        if not is_same(one.get(name), other.get(name)):
            raise CompileError(
                f"two example_inputs of {key} differ in {name}, {one.get(name)!r} and {other.get(name)!r}, but the "
                "program for a batch is found by its shapes: compile a program for each; engines of one model share "
                "its weights"
            )


def several(example_inputs: Any) -> list[Any]:
    """The batches of a list of them: of dicts, or of tuples. Whatever else is given is one batch."""
    if isinstance(example_inputs, list) and example_inputs:
        if any(all(isinstance(one, kind) for one in example_inputs) for kind in (Mapping, tuple)):
            return example_inputs
    return [example_inputs]
