"""A capture for any size of its inputs: the trace's symbols become numbers, as in a trace at that size.

    arange(s1//2), view(x, [s0, s1*s2, 8])     at 48 x 80     arange(24), view(x, [s0, 3840, 8])

It is compared with a trace at the call's own sizes before it is used, and holds where every decision that the trace met
is taken as it was (`free_sizes.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import zip_longest
from typing import Any

import sympy
import torch
from torch import fx

from fxpipe.capture import Capture, captured_from, private
from fxpipe.capture.autocasts import written_out
from fxpipe.capture.export import ResultOf, export_any_size
from fxpipe.capture.free_sizes import FreeSizes, Numbers
from fxpipe.capture.guards import Guard
from fxpipe.capture.inputs import Dims, InputSpec
from fxpipe.capture.known import Given, size_names
from fxpipe.capture.model_call import ModelCall
from fxpipe.capture.same import computation, same_constants
from fxpipe.capture.sizes import expression
from fxpipe.errors import CaptureError, CompileError

_MOST_NUMBERS = 32
"""As many as are left free: more are no lengths, but what forward reads one by one."""
_KINDS: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


@dataclass(frozen=True)
class Freed:
    """The sizes that a trace is to leave free: those of `wanted`, a dimension of some inputs, and of all others, or
    `only` these, as `why` says."""

    wanted: Mapping[str, int]
    only: Dims | None = None
    why: str | None = None


@dataclass(frozen=True, eq=False)
class AnySize:
    """`captured` with symbols for the sizes that `free` says; `fixed`: why others that were wanted are numbers.

    `of_all`: what is found of its graphs that holds at every size, as they are one program; it grows.
    """

    captured: Capture
    free: FreeSizes
    fixed: str | None = None
    of_all: dict[str, Any] = field(default_factory=dict)
    _likes: dict[int, Any] = field(default_factory=dict)

    def at(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Capture:
        """The capture for calls of this one's sizes; of its tensors only shapes and types are used.

        Raises:
            CompileError: the trace does not hold for it; says why.
        """
        here = self.captured.inputs.of_other_sizes(args, kwargs)
        if here.batch_size < self.captured.fewest:
            raise CompileError(f"forward has another form with {here.batch_size} samples")
        tensors, _ = here.bind(args, kwargs, shapes_alone=True)
        values = [
            guard.found(tensors) if guard.sizes or guard.holds(tensors) else None for guard in self.captured.guards
        ]
        try:
            return self._at(here, values)
        except CompileError as error:
            raise CompileError(f"{error}{f' ({self.fixed})' if self.fixed else ''}") from None

    def _at(self, inputs: InputSpec, values: Sequence[torch.Tensor | None]) -> Capture:
        """The capture for these sizes, and numbers that forward has read of inputs."""
        shapes: dict[str, tuple[int, ...]] = {leaf.name: leaf.shape for leaf in inputs.leaves if leaf.is_tensor}
        guards = list[Guard]()
        for guard, value in zip(self.captured.guards, values, strict=True):
            sizes = None if value is None else guard.sizes_of(value) if guard.sizes else {}
            if value is None or sizes is None:
                raise CompileError("forward reads other numbers of its inputs")
            guards.append(replace(guard, value=value, sizes=()))
            shapes |= sizes
        return replace(self._put(inputs, self.free.numbers(shapes)), guards=tuple(guards))

    def _put(self, inputs: InputSpec, numbers: Numbers) -> Capture:
        sizes = {one: number for one, number in numbers.items() if one not in self.captured.batch}
        size = inputs.batch_size  # at others it may be other numbers that hold
        graph = _with_numbers(self.captured.graph, sizes, self._likes)
        return replace(self.captured, graph=graph, inputs=inputs, fewest=size, most=size)

    def require_equal(self, other: Capture) -> None:
        """Raise CaptureError unless, at that capture's sizes, this is the same computation."""
        if len(self.captured.guards) != len(other.guards):
            raise CaptureError("forward reads other numbers of its inputs where sizes are free")
        try:
            same = self._at(other.inputs, [guard.value for guard in other.guards])
        except CompileError as error:
            raise CaptureError(str(error)) from None
        size = other.inputs.batch_size
        mine, theirs = (computation(one.graph, size, one.tensors, _scalars(one)) for one in (same, other))
        for one, two in zip_longest(mine, theirs):
            if one != two:
                raise CaptureError(f"forward is another one where sizes are free: {one}, where they are not {two}")
        if not same_constants(*(_but_scalars(one.constants) for one in (same, other))):
            raise CaptureError("forward makes other constants where sizes are free")


def capture_any_size(call: ModelCall, captured: Capture, result_of: ResultOf, sizes: Freed) -> AnySize:
    """Trace a call again, sizes free.

    Args:
        captured: of one that differs in sizes alone, its sizes numbers.

    Raises:
        CaptureError: forward allows no free sizes, or is another one where they are; says why.
    """
    if captured.draws:
        raise CaptureError("forward draws random numbers")
    any_batch = bool(captured.batch)
    numbers = _numbers_read(captured.guards, call.given)
    with torch.no_grad():
        exported = export_any_size(call, result_of, any_batch, numbers, sizes.only)
    placeholders = exported.graph.find_nodes(op="placeholder")
    kinds = exported.program.graph_signature.input_specs
    of_user = torch.export.graph_signature.InputKind.USER_INPUT
    values = [n.meta["val"] for n, spec in zip(placeholders, kinds, strict=True) if spec.kind is of_user]
    private.sizes.still_guarded(values)
    traced = captured_from(call.model, exported)
    traced = replace(traced, graph=written_out(traced.graph), inputs=call.inputs)
    traced_as = dict(zip(exported.inputs.tensor_names, values, strict=True))
    free = FreeSizes.of(traced_as, traced.batch)
    fixed = sizes.why
    for name, dim in sizes.wanted.items():
        if not free.shapes[name][dim].free_symbols and (sizes.only is None or dim in sizes.only.get(name, ())):
            place = private.sizes.place_of_number(traced_as[name], dim)
            fixed = f"forward makes dimension {dim} of its input {name} a number, {place}"
    if fixed is not None and free.bounds.keys() <= {*free.batch}:
        raise CaptureError(fixed)
    found = AnySize(traced, free, fixed)
    found.require_equal(captured)
    return found


def _scalars(captured: Capture) -> dict[fx.Node, str]:
    """Tensors that are one number, which forward has written somewhere: a constant, or made of a size."""
    known: dict[fx.Node, str] = {}
    for node in captured.graph.nodes:
        constant = captured.constants.get(node.name) if node.op == "placeholder" else None
        if constant is not None and _is_scalar(constant):
            known[node] = f"{constant.item()!r} {constant.dtype}"
        elif node.target is torch.ops.aten.scalar_tensor.default and type(node.args[0]) in _KINDS.values():
            known[node] = f"{node.args[0]!r} {node.meta['val'].dtype}"
    return known


def _but_scalars(constants: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: one for name, one in constants.items() if not _is_scalar(one)}


def _is_scalar(constant: torch.Tensor) -> bool:
    return not constant.ndim and not constant.is_meta


def _numbers_read(guards: Sequence[Guard], given: Given | None) -> dict[str, int]:
    """What forward reads of inputs that may be free sizes, by name."""
    found: dict[str, int] = {}
    for place, guard in enumerate(guards if given is not None else ()):
        value = guard.found(given.values) if guard.are_sizes and given is not None else None
        if value is not None:
            entries = zip(size_names(place, value), value.flatten().tolist(), strict=True)
            found |= {name: number for name, number in entries if name is not None}
    return found if len(found) <= _MOST_NUMBERS else {}


def _with_numbers(graph: fx.Graph, numbers: Numbers, likes: dict[int, Any]) -> fx.Graph:
    """The graph with these sizes; what only computed them is gone. `likes`: of its values by id; it grows."""
    put = {one: sympy.Integer(number) for one, number in numbers.items()}
    mode = next(private.mode_of(t) for n in graph.nodes if (t := private.first_tensor(n.meta.get("val"))) is not None)
    new, env, tensors = fx.Graph(), dict[fx.Node, Any](), dict[int, torch.Tensor]()

    def whole(size: Any) -> Any:
        return private.sizes.traced_number(mode, size, int) if isinstance(size, sympy.Basic) else size

    def number(value: Any) -> Any:
        kind = _KINDS[type(value)]
        expr = value.node.expr.xreplace(put)
        return private.sizes.traced_number(mode, expr, kind) if expr.free_symbols else kind(expr)

    @cache
    def sized(expr: Any) -> Any:
        found = expr.xreplace(put)
        return found if found.free_symbols else int(found)

    @cache
    def like(sizes: Sequence[Sequence[Any]], dtype: torch.dtype, device: torch.device, grad: bool) -> torch.Tensor:
        shape, stride = ([one if type(one) is int else whole(sized(one)) for one in of] for of in sizes)
        return private.sizes.traced_tensor(mode, shape, stride, dtype, device, grad)

    def tensor(value: torch.Tensor) -> torch.Tensor:
        if (key := id(value)) not in tensors:
            if key not in likes:
                both = (value.shape, value.stride())
                sizes = tuple([tuple([one if type(one) is int else expression(one) for one in of]) for of in both])
                likes[key] = sizes, value.dtype, value.device, value.requires_grad
            tensors[key] = like(*likes[key])
        return tensors[key]

    def leaf(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return env[value]
        if isinstance(value, list | tuple):
            return type(value)(map(leaf, value))
        if isinstance(value, torch.Tensor):
            return tensor(value)
        return number(value) if type(value) in _KINDS else value

    for node in graph.nodes:
        value = leaf(node.meta.get("val"))
        if node.op == "call_function" and isinstance(value, int | float | bool):
            env[node] = value
            continue
        args, kwargs = fx.node.map_aggregate((node.args, dict(node.kwargs)), leaf)
        env[node] = private.create_node(new, node.op, node.target, args, kwargs, node.name)
        env[node].meta.update({**node.meta, "val": value} if "val" in node.meta else node.meta)
    for node in reversed(new.nodes):  # what only gave sizes
        if node.op == "call_function" and not node.users and not node.is_impure():
            new.erase_node(node)
    for node in new.find_nodes(op="placeholder"):
        if not node.users and "input" in node.meta:
            new.erase_node(node)
    return new
