"""Seconds of a denoiser's operations, forward.

One of ATen's is a kernel by its FLOPs and bytes. One of a patch's own (`row_ops`, `displaced_ops`) is the kernels that
it is made of, each of which moves bytes: at small patches their number is what counts. A model that times operations is
asked for each first.
"""

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import count
from typing import Any, cast

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from cost_models.flops import node_costs
from fxpipe.costs.model import CostModel, node_seconds
from fxpipe.costs.operations import Operation
from fxpipe.costs.table import CostTable
from fxpipe.plan import displaced_ops, ops, row_ops
from passes.rows.layout import Rows
from passes.sampling import exchanges

_VIEWS = (operator.getitem, ops.slice_batch, row_ops.edge_rows, displaced_ops.unpack, displaced_ops.done,
          exchanges.passed_on)  # fmt: skip
_OWN = (row_ops.__name__, displaced_ops.__name__)
_META = torch.device("meta")


def operation_seconds(
    model: CostModel, nodes: Iterable[fx.Node], known: dict[object, float | None] | None = None
) -> dict[fx.Node, float]:
    """Of every operation, by its value in `meta["val"]`; those that are none of ATen's move bytes alone, or nothing.

    `known`: of equal calls by this model, None where they take no time; it grows.
    """
    number = defaultdict[object, int](count().__next__)  # of calls that are equal
    like = cache(lambda node: _like(node.meta.get("val")))
    calls = {n: number[_call(n, like)] for n in nodes if n.op == "call_function" and n.target not in _VIEWS}
    last = {place: node for node, place in calls.items()}
    known = {} if known is None else known
    new = {call: last[place] for call, place in number.items() if call not in known}
    found = _seconds(model, [*new.values()])
    known.update((call, found.get(node)) for call, node in new.items())
    taken = [known[call] for call in number]
    return {node: seconds for node, call in calls.items() if (seconds := taken[call]) is not None}


def _call(node: fx.Node, like: Callable[[fx.Node], object]) -> object:
    """An operation, its numbers, and what its tensors are like."""
    given = _plain(node.args, like), _plain(tuple(node.kwargs.items()), like)
    return node.target, *given, like(node), _num_parts(node)


def _num_parts(node: fx.Node) -> int:
    """Of what is gathered, those that are joined one by one: text, rows, or several runs of rows; else 0."""
    state: Rows | None = node.meta["exchange"].state if node.target is exchanges.gather else None
    return 0 if state is None or state.plain is not None else len(state.parts)


def _plain(value: Any, like: Callable[[fx.Node], object]) -> Any:
    if isinstance(value, fx.Node):
        return like(value)
    return tuple([_plain(item, like) for item in value]) if isinstance(value, list | tuple) else value


def _like(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    return tuple(map(_like, value)) if isinstance(value, list | tuple) else type(value)


def _seconds(model: CostModel, operations: Sequence[fx.Node]) -> dict[fx.Node, float]:
    found = _timed(model, operations)
    left = [node for node in operations if node not in found]
    stand_ins = {node: _attention(node) for node in left if node.target is row_ops.attend}
    of_aten = [*filter(_is_aten, left), *stand_ins.values()]
    for read in {operand for node in of_aten for operand in (node, *node.all_input_nodes)}:
        read.meta["requires_grad"] = False
    costs = node_costs(of_aten)
    found |= zip(costs, node_seconds(model, CostTable.of(costs.values()), 1).forward.tolist(), strict=True)
    found |= {node: found.pop(stand_in) for node, stand_in in stand_ins.items()}
    for node in operations:
        value = (node.args[1] if node.target is displaced_ops.put else node).meta.get("val")  # type: ignore[union-attr]
        if node in found:
            continue
        if node.target is exchanges.merged_moments:
            operand, num_groups = node.args
            found[node] = own_seconds(model, row_ops.moments, operand.meta["val"], num_groups)  # type: ignore[union-attr]
            found[node] += own_seconds(model, row_ops.merge_moments, [value, value], [1, 1])
        elif isinstance(value, torch.Tensor) and node.target is exchanges.halo and not isinstance(node.args[-1], str):
            borders = (0, _border_bytes(node, value)), (0, 0)
            found[node] = model.chain_seconds([*borders, (value.nbytes, value.nbytes)])
        elif isinstance(value, torch.Tensor) and (parts := _num_parts(node)):
            each = value.nbytes // parts
            found[node] = model.chain_seconds([(each, each)] * parts + [(value.nbytes, value.nbytes)])
        elif _is_own(node) and not node.kwargs and (operation := Operation.of_node(node)) is not None:
            found[node] = model.chain_seconds(_kernels(operation))
        elif isinstance(value, torch.Tensor):
            found[node] = model.moving_seconds(value.nbytes, value.nbytes)
    return found


def _border_bytes(node: fx.Node, value: torch.Tensor) -> int:
    """Of the rows that a patch at the image's border puts in place of a neighbour's: it is what the others wait for."""
    _, dim, above, below, end, _ = cast(tuple[Any, ...], node.args)
    return int(value.nbytes // value.shape[dim] * max(above, below, end))


def _attention(node: fx.Node) -> fx.Node:
    """Torch's own attention, which does what a chunk's does."""
    graph = fx.Graph()
    given = cast(tuple[fx.Node, ...], node.args[:3])
    operands = [graph.placeholder(operand.name) for operand in given]
    for operand, of_chunk in zip(operands, given, strict=True):
        operand.meta = dict(of_chunk.meta)
    stand_in = graph.call_function(torch.ops.aten.scaled_dot_product_attention.default, tuple(operands))
    stand_in.meta["val"] = node.meta["val"][0]
    return stand_in


def own_seconds(model: CostModel, operation: Callable[..., Any], *arguments: Any) -> float:
    """Of one of a patch's own operations on these arguments, tensors on any device."""
    return model.chain_seconds(_kernels(Operation.of(operation, *arguments)))


def _timed(model: CostModel, nodes: Iterable[fx.Node]) -> dict[fx.Node, float]:
    """Of the operations that the model times."""
    able = {node: Operation.of_node(node) for node in nodes if _is_aten(node) or _is_own(node)}
    known = {node: operation for node, operation in able.items() if operation is not None}
    taken = model.operation_seconds([*known.values()])
    return {node: seconds for node, seconds in zip(known, taken, strict=True) if seconds is not None}


def _is_aten(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload)


def _is_own(node: fx.Node) -> bool:
    return getattr(node.target, "__module__", "") in _OWN


@cache
def _kernels(operation: Operation) -> tuple[tuple[int, int], ...]:
    """Bytes that each kernel of one of a patch's own operations reads and writes."""
    run = operation.bound(_META)
    with _Counted() as counted, torch.no_grad():
        run()
    return tuple(counted.moved)


class _Counted(TorchDispatchMode):
    """Bytes read and written by every operation that is no view."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moved: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given, made = ([t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)] for tree in (args, result))
        if not func.is_view and made:
            self.moved.append((sum(t.nbytes for t in given), sum(t.nbytes for t in made)))
        return result
