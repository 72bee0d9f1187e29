"""A step's inputs, bound by name: a call gives the same leaves in any mix of positional and keyword arguments."""

import enum
import inspect
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxpipe.capture import private
from fxpipe.capture.trees import flatten, placeable, unflatten
from fxpipe.errors import CompileError

Batch = Any  # a tensor, a tuple of positional arguments, or a mapping of keyword arguments
Dims = Mapping[str, Collection[int]]
"""Dimensions of tensors by name."""


def call_of(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The (args, kwargs) of the model's forward that a batch stands for."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, tuple | list) else ((batch,), {})


@dataclass(frozen=True)
class Leaf:
    """One leaf of the argument tree: a tensor input, or a constant that must keep its value.

    `shape` is the example's; dimension 0 is the batch where `batched`. Where a sample is `each` of its rows, one after
    the other, as the text of every frame of a video, it is that of the flat list: [batch, each, ...].
    """

    name: str
    is_tensor: bool
    batched: bool
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    constant: Any
    each: int = 1

    def by_sample(self, value: Any) -> Any:
        """A tensor as it is in the flat list; as it is where it has not so many rows to a sample."""
        several = self.each > 1 and isinstance(value, torch.Tensor) and value.ndim > 0
        return value.unflatten(0, (-1, self.each)) if several and not value.shape[0] % self.each else value


@dataclass(frozen=True)
class InputSpec:
    """How a call of the model becomes a flat list of tensors and back.

    A sample is a row of every batched input, or `rows` of them where forward cuts the batch into so many parts: sample
    s of B has the rows s, B + s, 2B + s, ..., and is [rows, ...] in the flat list.

    The first `num_placed` arguments were given by place, the others by name: what is around a forward may look for them
    there, as diffusers' decorators and hooks do.

    `same`: for every tensor the place of the first that is the same object, which forward may ask (`x is text`); not
    looked at where empty. `compares`: where forward's own code may ask that in a step, which is then to have no such.
    """

    leaves: tuple[Leaf, ...]
    tree: pytree.TreeSpec
    signature: inspect.Signature
    batch_size: int
    rows: int = 1
    num_placed: int = 0
    same: tuple[int, ...] = ()
    compares: str = ""

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know of them."""
        text = f"forward cuts the batch into {self.rows} parts: a sample is {self.rows} rows of the batch, one of each"
        return (text,)[: self.rows - 1]

    @property
    def grouped(self) -> str:
        """What to do should an input have several rows of every sample of another; empty where none can."""
        size = self.batch_size
        rows = {leaf.name: size if leaf.batched else leaf.shape[0] for leaf in self.leaves if leaf.shape}
        fewest = min(
            (name for name in rows if 1 < rows[name] and size % rows[name] == 0), key=rows.__getitem__, default=""
        )
        for name, count in rows.items():
            each, rest = divmod(count, rows.get(fewest, count))
            if each > 1 and not rest:
                return (
                    f"if {name} has {each} rows for every sample of {fewest}, as the frames of videos, give it as "
                    f"[{rows[fewest]}, {each}, ...] and flatten it in forward"
                )
        return ""

    def of_rows(self, rows: int) -> "InputSpec":
        """The same call with so many rows to a sample; CompileError where they do not divide the batch."""
        if self.batch_size % rows:
            raise CompileError(
                f"forward cuts the batch into {rows} parts, and a batch of {self.batch_size} has no {rows} alike: pass "
                f"a multiple of {rows}"
            )
        return replace(self, batch_size=self.batch_size // rows, rows=rows)

    @property
    def multiples(self) -> dict[str, int]:
        """Inputs without a batch that might have one all the same: those of several times its rows, and how many."""
        leaves = [leaf for leaf in self.leaves if leaf.shape and not leaf.batched]
        times = {leaf.name: divmod(leaf.shape[0], self.batch_size) for leaf in leaves}
        return {name: each for name, (each, rest) in times.items() if each > 1 and not rest}

    def with_each(self, names: Collection[str]) -> "InputSpec":
        """The same call, of whose `multiples` those with these names have a batch."""
        each = self.multiples

        def batched(leaf: Leaf) -> Leaf:
            if leaf.name not in names:
                return leaf
            shape = (self.batch_size, each[leaf.name], *leaf.shape[1:])
            return replace(leaf, batched=True, each=each[leaf.name], shape=shape)

        return replace(self, leaves=tuple(map(batched, self.leaves)))

    def of_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> "InputSpec":
        """The same call, its tensors of these shapes; CompileError where some have no several rows to a sample."""
        size = next(shapes[leaf.name][0] for leaf in self.leaves if leaf.batched and leaf.each == 1)

        def sized(leaf: Leaf) -> Leaf:
            shape = shapes.get(leaf.name, ())
            if leaf.each == 1:
                return replace(leaf, shape=shape)
            each, rest = divmod(shape[0], max(size, 1))
            if each < 2 or rest:
                raise CompileError(f"input {leaf.name} has {shape[0]} rows for {size} samples, not several for each")
            return replace(leaf, each=each, shape=(size, each, *shape[1:]))

        return replace(self, leaves=tuple(map(sized, self.leaves)), batch_size=size)

    def of_other_sizes(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "InputSpec":
        """For a call that differs in its tensors' sizes alone; CompileError for another."""
        named, tree = flatten(self.signature, args, kwargs, self.tree)
        if tree != self.tree:
            raise CompileError("it is another kind of call")
        shapes = {name: tuple(one.shape) for name, one in named.items() if isinstance(one, torch.Tensor)}
        num_dims = {leaf.name: len(leaf.shape) - (leaf.each > 1) for leaf in self.leaves if leaf.is_tensor}
        if {name: len(shape) for name, shape in shapes.items()} != num_dims:
            raise CompileError("its tensors are other ones")
        here = self.of_shapes(shapes)
        here.bind(args, kwargs, shapes_alone=True)
        return here

    def other_sizes(self, other: "InputSpec") -> Dims:
        """The dimensions, batch aside, of tensors by name that have another size there."""
        pairs = [(one, two) for one, two in zip(self.leaves, other.leaves, strict=True) if one.is_tensor]
        return {
            one.name: tuple(d for d in range(int(one.batched), len(one.shape)) if one.shape[d] != two.shape[d])
            for one, two in pairs
        }

    def flat(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """A call's tensors as they are in the flat list."""
        leaves = [leaf for leaf in self.leaves if leaf.is_tensor]
        return [leaf.by_sample(tensor) for leaf, tensor in zip(leaves, tensors, strict=True)]

    def shape_of(self, leaf: Leaf, size: int) -> tuple[int, ...]:
        """A leaf's in the flat list, with a batch of `size` samples."""
        if not leaf.batched:
            return leaf.shape
        return (size, *((self.rows,) if self.rows > 1 else ()), *leaf.shape[1:])

    @property
    def tensor_names(self) -> tuple[str, ...]:
        return tuple(leaf.name for leaf in self.leaves if leaf.is_tensor)

    @property
    def first_names(self) -> dict[str, str]:
        """Of every tensor that of the first that is the same object."""
        return {name: self.tensor_names[place] for name, place in zip(self.tensor_names, self.same, strict=False)}

    def require_apart(self, named: Mapping[str, Any]) -> None:
        """Refuse one tensor for two inputs, which are two in a step's graph, where forward may tell."""
        found = [named[name] for name in self.tensor_names] if self.compares else []
        for place, first in enumerate(same_objects(found)):
            if first < place:
                raise CompileError(
                    f"inputs {self.tensor_names[first]} and {self.tensor_names[place]} are one tensor, and forward "
                    f"compares by `is`, at {self.compares}, of which a step's graph knows nothing: give a copy "
                    "(clone()) to one of them, or both as one input"
                )

    def bind(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], shapes_alone: bool = False
    ) -> tuple[dict[str, torch.Tensor], int]:
        """Tensors by name and the batch size of this call; CompileError where it differs from what was captured.

        With `shapes_alone` tensors may be fake, or on the meta device.
        """
        named, tree = flatten(self.signature, args, kwargs, self.tree)
        if tree != self.tree:
            expected, given = [leaf.name for leaf in self.leaves], list(named)
            raise CompileError(f"inputs {given} are not the compiled ones, {expected}; pass the same arguments")
        if self.same and same_objects(named[leaf.name] for leaf in self.leaves if leaf.is_tensor) != self.same:
            raise CompileError("other inputs are one and the same tensor than in the compiled call; compile again")
        called = named
        named = {leaf.name: leaf.by_sample(called[leaf.name]) for leaf in self.leaves}
        for leaf in self.leaves:
            _check_leaf(leaf, named[leaf.name], shapes_alone)
        self.require_apart(called)
        tensors = {leaf.name: named[leaf.name] for leaf in self.leaves if leaf.is_tensor}
        sizes = {leaf.name: int(tensors[leaf.name].shape[0]) for leaf in self.leaves if leaf.batched}
        if len(set(sizes.values())) != 1:
            raise CompileError(
                f"inputs disagree on the batch size (are ragged): {sizes}; dimension 0 of each must be the batch"
            )
        size = next(iter(sizes.values()))
        if self.rows == 1:
            return tensors, size
        samples = self.of_batch(size)
        return {n: self._by_sample(t, samples) if n in sizes else t for n, t in tensors.items()}, samples

    def of_batch(self, size: int) -> int:
        """The samples of a batch of `size` rows."""
        if size % self.rows:
            raise CompileError(
                f"the batch has {size} rows, and forward cuts it into {self.rows} parts alike: pass a multiple of "
                f"{self.rows}"
            )
        return size // self.rows

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The (args, kwargs) of the model's own call from the tensor leaves, in order."""
        leaves = [leaf for leaf in self.leaves if leaf.is_tensor]
        called = [self._as_called(leaf, tensor) for leaf, tensor in zip(leaves, tensors, strict=True)]
        remaining = iter([called[place] for place in self.same] if self.same else called)
        values = [next(remaining) if leaf.is_tensor else leaf.constant for leaf in self.leaves]
        args, kwargs = unflatten(values, self.tree)
        by_name = dict(zip(placeable(self.signature)[self.num_placed :], args[self.num_placed :], strict=False))
        return args[: self.num_placed], by_name | kwargs

    def _by_sample(self, tensor: torch.Tensor, size: int) -> torch.Tensor:
        return tensor.view(self.rows, size, *tensor.shape[1:]).transpose(0, 1)

    def _as_called(self, leaf: Leaf, tensor: torch.Tensor) -> torch.Tensor:
        if leaf.each > 1:
            return tensor.flatten(0, 1)
        return tensor.transpose(0, 1).flatten(0, 1) if leaf.batched and self.rows > 1 else tensor


def _check_leaf(leaf: Leaf, value: Any, shapes_alone: bool) -> None:
    if not leaf.is_tensor:
        if not is_same(leaf.constant, value):
            got = f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            was = f"input {leaf.name} was compiled as {leaf.constant!r}"
            is_number = type(value) in (int, float) and type(leaf.constant) in (int, float)
            more = ", or compile with a tensor there, whose value may change" if is_number else ""
            if type(value) is type(leaf.constant) is str:
                more = (
                    ", or, where forward does not need it, as captions and paths, leave it out of batches (collate_fn)"
                )
            raise CompileError(f"{was}, called with {got}; compile again with it{more}")
        return
    if not isinstance(value, torch.Tensor):
        raise CompileError(f"input {leaf.name} must be a tensor, got {type(value).__name__}")
    if not shapes_alone and (value.is_meta or private.mode_of(value) is not None):
        raise CompileError(f"input {leaf.name} holds no values (it is fake, or on the meta device); a step needs some")
    _check_dense(leaf.name, value)
    skip = 1 if leaf.batched else 0
    same_rank = value.ndim == len(leaf.shape)
    if not same_rank or tuple(value.shape[skip:]) != leaf.shape[skip:] or value.dtype != leaf.dtype:
        want = ["batch", *leaf.shape[1:]] if leaf.batched else list(leaf.shape)
        want = [f"{leaf.each} * batch", *leaf.shape[2:]] if leaf.each > 1 else want
        got = f"{list(value.shape)} {value.dtype}"
        raise CompileError(f"input {leaf.name} must be {want} {leaf.dtype}, got {got}; recompile for other shapes")


def is_time(name: str) -> bool:
    """Whether an input of this name tells the step: timestep, sigma, t; others may differ between two calls of one."""
    last = name.rpartition(".")[2].lower()
    return bool(_TIME.search(last)) and (last == "time_cond" or not last.endswith(("_cond", "_ids")))


_TIME = re.compile(r"^(t|r|tau)$|time|sigma|noise_level|noise_label|(^|_)c_noise|(^|_|log)snr")
"""In a time's name."""


def is_same(a: Any, b: Any) -> bool:
    """Whether two inputs that are no tensors are one."""
    return type(a) is type(b) and bool(a == b)


def same_objects(tensors: Iterable[object]) -> tuple[int, ...]:
    """For every one the place of the first that is the same object."""
    first = dict[int, int]()
    return tuple(first.setdefault(id(one), place) for place, one in enumerate(tensors))


def signature_of(model: nn.Module) -> inspect.Signature:
    """Of its forward; of its class's, where one put in its place, as wrappers are, names no argument."""
    model = private.uncompiled(model)
    own = inspect.signature(model.forward)
    unnamed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if "forward" not in vars(model) or any(one.kind not in unnamed for one in own.parameters.values()):
        return own
    return inspect.signature(type(model).forward.__get__(model))


def describe(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], batch_size: int | None
) -> tuple[InputSpec, list[torch.Tensor]]:
    """The input spec of one example call, and its tensor leaves in order."""
    for path, part in model.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise CompileError(f"{path or 'the model'} is a script of torch.jit, which hides its forward; leave it out")
    signature = signature_of(model)
    named, tree = flatten(signature, args, kwargs)
    size = batch_size or _guess_batch(named)
    if not size:
        empty = {name: list(value.shape) for name, value in named.items() if isinstance(value, torch.Tensor)}
        raise CompileError(f"the example has no samples: {empty}; give at least one")
    leaves = []
    for name, value in named.items():
        tensor = isinstance(value, torch.Tensor)
        batched = tensor and value.ndim > 0 and value.shape[0] == size
        shape = tuple(value.shape) if tensor else ()
        if tensor:
            _check_dense(name, value)
        else:
            _check_constant(name, value)
        leaves.append(Leaf(name, tensor, batched, shape, value.dtype if tensor else None, None if tensor else value))
    if not any(leaf.batched for leaf in leaves):
        shapes = {leaf.name: leaf.shape for leaf in leaves if leaf.is_tensor}
        raise CompileError(f"no input has batch size {size} in dimension 0: {shapes}; pass batch_size=")
    spec = InputSpec(tuple(leaves), tree, signature, size, num_placed=_num_placed(signature, args))
    return spec, [v for v in named.values() if isinstance(v, torch.Tensor)]


def refuse_ragged(inputs: InputSpec) -> None:
    """Refuse lists of tensors that have rows of their own, as of one sample each.

    Raises:
        CompileError: there is one; names it.
    """
    lists: dict[str, dict[str, tuple[int, ...]]] = {}
    for leaf in inputs.leaves:
        of, _, place = leaf.name.rpartition(".")
        if place.isdigit() and leaf.shape:
            lists.setdefault(of, {})[leaf.name] = leaf.shape
    for of, shapes in lists.items():
        if len({shape[0] for shape in shapes.values()}) > 1:
            raise CompileError(
                f"input {of} is ragged: {shapes}; pad its tensors to one size and stack them as [batch, ...], with a "
                "mask, or pass batch_size= where they are no samples"
            )


def _num_placed(signature: inspect.Signature, args: Sequence[Any]) -> int:
    """How many arguments a call gives by place, those that have no names among them."""
    nameless = [p for p in signature.parameters.values() if p.kind is inspect.Parameter.POSITIONAL_ONLY]
    return max(len(args), len(nameless))


def _check_dense(name: str, value: torch.Tensor) -> None:
    if value.layout != torch.strided or value.is_quantized:
        kind = "quantized" if value.is_quantized else str(value.layout).removeprefix("torch.")
        raise CompileError(f"input {name} is a {kind} tensor; pass a dense one (to_dense(), dequantize(), padded)")


def _check_constant(name: str, value: Any) -> None:
    """A constant must be what it says: an object could hide tensors, or change unseen."""
    if isinstance(value, nn.Module) or not (isinstance(value, _CONSTANTS) or callable(value)):
        raise CompileError(
            f"input {name} is a {type(value).__name__}: an input must be a tensor, a plain value, or tuples, lists, "
            "mappings, dataclasses and other objects that are their attributes, of these, each object once"
        )


_CONSTANTS = (
    type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, torch.layout,
    torch.memory_format, torch.Size, range, slice,
)  # fmt: skip


def _guess_batch(named: Mapping[str, Any]) -> int:
    for value in named.values():
        if isinstance(value, torch.Tensor) and value.ndim > 0:
            return int(value.shape[0])
    for name, value in named.items():  # an array, of which it is better said what it is
        if not isinstance(value, torch.Tensor):
            _check_constant(name, value)
    raise CompileError("no example input is a tensor with a batch dimension; pass example_inputs=")
