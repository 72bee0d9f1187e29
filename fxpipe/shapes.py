"""Several shapes of batches, one model: a program for each, all with the same weights.

x [8, 4, 32, 32]     compiled first                         x [8, 4, 32, 48]    compiled when it comes, or refused
x [3, 4, 32, 32]     fewer samples: the same stages, on their ranks, with fewer or smaller micro-batches
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from fxpipe.capture.inputs import InputSpec
from fxpipe.capture.trees import flatten
from fxpipe.errors import CompileError

if TYPE_CHECKING:
    from fxpipe.program import Program


@dataclass
class Shapes:
    """Programs by the shapes of their batches.

    Args:
        smaller: the program for so many samples, from one for more; None where that cannot be.
        compiled: the program for other example inputs; `fixed` says that there are to be no such, nor smaller ones.
    """

    smaller: "Callable[[Program, int], Program | None]"
    compiled: "Callable[[Any], Program]"
    fixed: bool
    programs: "dict[str, Program]" = field(default_factory=dict)

    @property
    def first(self) -> "Program":
        return next(iter(self.programs.values()))

    def add(self, program: "Program") -> None:
        """One more."""
        sizes = {leaf.name: list(leaf.shape) for leaf in program.capture.inputs.leaves if leaf.is_tensor}
        batched = {leaf.name for leaf in program.capture.inputs.leaves if leaf.batched}
        size = program.plan.batch_size
        self.programs[_text({n: [size, *of[1:]] if n in batched else of for n, of in sizes.items()})] = program

    def key(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """A call's shapes as text; those of the first program where it differs in more than that."""
        sizes = _sizes(self.first.capture.inputs, args, kwargs)
        return next(iter(self.programs)) if sizes is None else _text(sizes)

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
        if self.fixed:
            known = "; ".join(self.programs)
            raise CompileError(
                f"a batch of {key}: compiled are batches of {known}; add one of these shapes to example_inputs, leave "
                "shapes='fixed' out to compile it when it comes, or drop the loader's last incomplete batch"
            )
        inputs = self.first.capture.inputs
        sizes = _sizes(inputs, args, kwargs) or {}
        for program in list(self.programs.values()):
            count = _fewer(program, sizes)
            made = self.smaller(program, count) if count else None
            if made is not None:
                return made
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
    batches = {tensors[leaf.name].shape[0] for leaf in leaves if leaf.batched and len(leaf.shape)}
    if not alike or len(batches) > 1 or 0 in batches:
        return None
    return {name: list(tensor.shape) for name, tensor in tensors.items()}


def _fewer(program: "Program", sizes: Mapping[str, Sequence[int]]) -> int | None:
    """The samples of a batch that differs from a program's in having fewer; None where it does not."""
    leaves = [leaf for leaf in program.capture.inputs.leaves if leaf.is_tensor]
    counts = {sizes[leaf.name][0] for leaf in leaves if leaf.batched}
    same = all(list(leaf.shape[leaf.batched :]) == list(sizes[leaf.name][leaf.batched :]) for leaf in leaves)
    (count,) = counts
    return count if same and count < program.plan.batch_size else None


def several(example_inputs: Any) -> list[Any]:
    """The batches of a list of them: of dicts, or of tuples. Whatever else is given is one batch."""
    if isinstance(example_inputs, list) and len(example_inputs) > 1:
        if any(all(isinstance(one, kind) for one in example_inputs) for kind in (Mapping, tuple)):
            return example_inputs
    return [example_inputs]
