"""FLOPs and bytes of graph nodes, forward and backward, as expressions of the batch symbol.

    %y = linear(%x, %w)   forward 2*s*64*64; backward the same again for the gradient of x, and again for that of w
    %z = view(%y)         nothing
    %a = add(%y, %y)      no FLOPs; y read once, a written

Products of matrices have formulas; composite operators without one are run and counted; pointwise operators and
reductions count no FLOPs, as in `torch.utils.flop_counter`, but their bytes. Bytes are the least a kernel moves: each
operand read once, each result written once. A backward part reads the outputs' gradients and the saved operands, and
writes its gradients; gradients of views are free. An operator whose FLOPs nobody counts is costed by its bytes alone,
and named in `NodeCost.uncosted`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import sympy
import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from cost_models.counted import EXTRA, UNKNOWN, Counted, Uncounted, count_flops, require_counted
from cost_models.formulas import FORMULAS, Formula, bound_arguments
from fxpipe.capture import private
from fxpipe.capture.reach import reached
from fxpipe.costs import COUNT_NAMES, NodeCost, OperationKind
from fxpipe.costs.calls import Call, Dim, Gradient, Operand, call_of
from fxpipe.costs.table import CostTable
from fxpipe.errors import CompileError

FREE = NodeCost()
_REMEMBERED_CALLS = 1 << 14  # a training step of Stable Diffusion 2.1 has 316 distinct ones

UNWRITTEN = frozenset({"_unsafe_view", "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty"})
SHAPE_ONLY = frozenset(
    "zeros_like ones_like full_like rand_like randn_like randint_like new_zeros new_ones new_full".split()
)
# None of them multiplies matrices: to run them to see that was two thirds of what SDXL's costs took at a new size.
WRITTEN = frozenset(
    f"aten::{n}" for n in "group_norm layer_norm rms_norm instance_norm upsample_nearest2d clip".split()
)
GATHERS = frozenset({"embedding", "index_select", "index", "_unsafe_index", "gather", "take"})


def cost_table(graph: fx.Graph) -> CostTable:
    """The cost of every node of a captured graph."""
    return CostTable({node.name: cost for node, cost in node_costs(graph.nodes).items()}, graph)


def node_costs(nodes: Iterable[fx.Node]) -> dict[fx.Node, NodeCost]:
    """The cost of every node.

    Input: nodes of a functional graph of ATen operators with `meta["val"]`, `meta["requires_grad"]` and, on
    placeholders, `meta["kind"]`.

    Raises:
        CompileError: a higher order operator, whose graph is hidden in it; names it.
    """
    activations: set[fx.Node] = set()
    return {node: _node_cost(node, activations) for node in nodes}


def _node_cost(node: fx.Node, activations: set[fx.Node]) -> NodeCost:
    if node.op != "call_function" or not private.tensors_in(node.meta.get("val")):
        return FREE
    if not isinstance(node.target, torch._ops.OpOverload):
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            raise CompileError(f"{node.target} ({node.name}) has no cost; inline it before costs are taken")
        return FREE  # getitem and the arithmetic of shapes
    differentiable = node.meta["requires_grad"]
    gradients = {n: _gradient(n, activations) if differentiable else "none" for n in node.all_input_nodes}
    return _call_cost(call_of(node, gradients), len(flop_registry))


def _gradient(node: fx.Node, activations: set[fx.Node]) -> Gradient:
    """What kind of gradient a node's value needs; `activations` remembers nodes that depend on the inputs."""
    if not node.meta["requires_grad"]:
        return "none"
    sources = reached([node], lambda source: source.all_input_nodes)
    if all(source not in activations and not _is_activation(source) for source in sources):
        return "weight"
    activations.add(node)
    return "input"


def _is_activation(node: fx.Node) -> bool:
    """An input, or of a size that depends on the batch; other nodes are what they are computed from."""
    if node.op == "placeholder":
        return node.meta["kind"] not in ("parameter", "buffer", "constant")
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape)


@lru_cache(maxsize=_REMEMBERED_CALLS)
def _call_cost(call: Call, num_registered: int) -> NodeCost:
    """The cost of a call; counted anew when somebody has registered a formula with torch meanwhile."""
    schema = call.target._schema
    formula = FORMULAS.get(schema.name)
    if formula is not None:
        return _with_bytes(call, _by_formula(call, formula), formula)
    if schema.name in WRITTEN:
        return _with_bytes(call, Counted(0, 0, 0, copies=True), None)
    packet = call.target._overloadpacket
    if private.is_composite(call.target) or packet in flop_registry or packet in EXTRA:
        counted = count_flops(call)
        moved = counted.copies or len({operand.device for operand in (*call.inputs, *call.outputs)}) > 1
        return _with_bytes(call, counted, None) if moved else FREE
    try:
        require_counted(call.target)
    except Uncounted:
        return _with_bytes(call, UNKNOWN, None)
    name = schema.name.partition("::")[2]
    if name in UNWRITTEN or all(r.alias_info and not r.alias_info.is_write for r in schema.returns):
        return FREE
    return _with_bytes(call, Counted(0, 0, 0, copies=True), None)


def _by_formula(call: Call, formula: Formula) -> Counted:
    arguments, out = bound_arguments(call), call.outputs[0]
    forward = formula.forward(arguments, out)
    gradients = [arguments[position].gradient for position in formula.operands]
    if formula.backward is None:
        return Counted(forward, forward * gradients.count("input"), forward * gradients.count("weight"), copies=True)
    backward = formula.backward(arguments, out)
    part = "input" if "input" in gradients else "weight" if "weight" in gradients else "none"
    return Counted(forward, backward if part == "input" else 0, backward if part == "weight" else 0, copies=True)


def _with_bytes(call: Call, flops: Counted, formula: Formula | None) -> NodeCost:
    name = call.target._schema.name.partition("::")[2]
    inputs, written = call.inputs, _num_bytes(call.outputs)
    read = _num_bytes(inputs)
    if name in SHAPE_ONLY:
        read = 0
    elif name in GATHERS:
        read = _num_bytes(inputs[1:]) + written
    gradients: tuple[Gradient, ...] = ("input", "weight")
    backward = []
    for part in gradients:
        wanted = [operand for operand in inputs if operand.gradient == part]
        saved = _saved(call, formula, part) if name not in GATHERS else inputs[1:]
        backward.append(written + _num_bytes(saved) + _num_bytes(wanted) if wanted else 0)
    counts = (flops.forward, flops.backward_input, flops.backward_weight, read, written, *backward)
    kind: OperationKind | None = None if flops.forward == 0 else formula.kind if formula else "matrix"
    dtype = call.outputs[0].dtype
    uncosted = frozenset() if flops.complete else frozenset([str(call.target)])
    fields = dict(zip(COUNT_NAMES, map(sympy.sympify, counts), strict=True))
    return NodeCost(**fields, dtype=dtype, kind=kind, uncosted=uncosted)


def _saved(call: Call, formula: Formula | None, part: Gradient) -> Iterable[Operand]:
    """What a backward part reads besides the outputs' gradients: for a product the *other* factors, else everything."""
    if formula is None or formula.backward is not None:
        return call.inputs
    arguments = bound_arguments(call)
    factors = [arguments[position] for position in formula.operands]
    wanted = [position for position, factor in enumerate(factors) if factor.gradient == part]
    others = [factor for i, factor in enumerate(factors) if any(i != position for position in wanted)]
    return {factor.index: factor for factor in others}.values()


def _num_bytes(tensors: Iterable[Operand]) -> Dim:
    sizes = [tensor.num_bytes for tensor in tensors]
    symbolic = [size for size in sizes if not isinstance(size, int)]
    number = sum(size for size in sizes if isinstance(size, int))
    return sympy.Add(number, *symbolic) if symbolic else number
