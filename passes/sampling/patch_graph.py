"""One patch's graph: its own rows of every value, and what it needs of the other patches as exchanges.

    captured                                  units 0:4 of 9, two rows each
    conv_in = conv2d(x, w, b, pad 1)          x_cut = cut_rows(x, 2, ...)               8 of 17 rows
                                              conv_in_halo = halo(x_cut, 2, 1, 1, ...)
                                              conv_in = conv2d(conv_in_halo, w, b, pad (0, 1))
    k = linear(tokens, w_k)                   k = linear(tokens, w_k)
    attention(q, k, v)                        k_whole = gather(k);  attention(q, k_whole, v_whole)

All patches have the same exchanges in the same order.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxpipe.errors import CompileError
from fxpipe.plan import row_ops
from passes.rows import RowPlan
from passes.rows.how import (
    Attended,
    CutRows,
    Found,
    Joined,
    Moments,
    Padded,
    Resized,
    Same,
    Shaped,
    Split,
    Summed,
    Whole,
    Window,
    Written,
)
from passes.rows.layout import Result, Rows, Slot, shape_of
from passes.rows.sized import Sized
from passes.sampling import attention, exchanges
from passes.sampling.attention import Shared
from passes.sampling.exchanges import Exchange
from passes.sampling.halos import early_halos
from passes.sampling.patch_writer import PatchWriter
from passes.sampling.patches import Patch

aten = torch.ops.aten


@dataclass(frozen=True)
class PatchPiece:
    """Of a patch's graph what one stage computes: `nodes`, and those of `early` that they need.

    `reads` are values of other stages, `returns` those that others read, in their order; the prediction is returned
    after them where it is made here, whole or `own_rows` of it. A patch that does not own what belongs to no row reads
    what is `shared`. `has_inputs`: of an input all rows are there.
    """

    nodes: frozenset[str]
    early: frozenset[str]
    reads: tuple[str, ...]
    returns: tuple[str, ...]
    shared: frozenset[str] = frozenset()
    own_rows: bool = False
    has_inputs: bool = False


def patch_graph(
    plan: RowPlan, patch: Patch, piece: PatchPiece | None = None, shared: frozenset[str] = frozenset(),
    attended: Shared | None = None, exact: bool = False,
) -> fx.Graph:  # fmt: skip
    """The graph of one patch: placeholders as captured, inputs whole; it returns the whole prediction.

    Of a piece: what it reads of other stages comes as further placeholders, of the kind "read"; it returns a tuple.
    A patch of all rows is the captured graph. One that does not own what belongs to no row has placeholders of the kind
    "read" for what of it is `shared`. Attention gathers keys and values unless `attended` says otherwise. Where all
    steps are `exact` norms' halos travel with their moments: in displaced ones that is 0.1 to 0.6 dB worse.

    `meta`: "val" as it is in this patch, "path", of exchanges "exchange", of what no patch changes "early".
    """
    plan = whole_plan(plan) if patch.is_whole else plan
    shared = shared if piece is None else piece.shared
    made = None if piece is None else piece.nodes | piece.early
    writer = PatchWriter(
        plan, patch, frozenset() if piece is None else piece.early, early_halos(plan, made) if exact else {},
        has_inputs=piece is None or piece.has_inputs, made=made,
    )  # fmt: skip
    for node in plan.sized.graph.nodes:
        if node.op == "placeholder":
            if made is None or any(user.name in made for user in node.users):
                writer.placeholder(node)
        elif (piece is not None and node.name in piece.reads) or (node.name in shared and not patch.owns):
            writer.read(node)
        elif node.op == "call_function" and (made is None or node.name in made):
            if attended is not None and attended.kinds.get(node.name, "gather") != "gather" and not patch.is_whole:
                attention.WAYS[attended.kinds[node.name]](writer, node, attended)
            else:
                _call(writer, node)
    if piece is None:
        writer.output(plan.sized.result)
    else:
        _return(writer, plan.sized, piece)
    told = piece is not None and piece.own_rows  # to later patches, whoever reads it here
    for node in reversed(writer.graph.nodes):
        if not node.users and node.op == "call_function" and not (told and "exchange" in node.meta):
            writer.graph.erase_node(node)
    return writer.graph


def _return(writer: PatchWriter, sized: Sized, piece: PatchPiece) -> None:
    made = [writer.here[sized.nodes[name]] for name in piece.returns]
    if sized.result.name in piece.nodes:
        own = writer.here[sized.result]
        made.append(own if piece.own_rows else writer.wanted(sized.result, None, "prediction"))
    writer.graph.output(tuple(made))


def attention_piece(plan: RowPlan, name: str) -> PatchPiece:
    """One layer of attention alone."""
    operands = plan.sized.nodes[name].all_input_nodes
    return PatchPiece(
        frozenset([name]), frozenset(), tuple(n.name for n in operands if n.op == "call_function"), (name,)
    )


def sum_graph(plan: RowPlan, patch: Patch, name: str, early: frozenset[str]) -> fx.Graph:
    """A patch's part of a sum over patches, of values of which it reads its own rows."""
    node = plan.sized.nodes[name]
    reads = tuple(operand.name for operand in node.all_input_nodes if operand.op == "call_function")
    piece = PatchPiece(frozenset([name]), early, tuple(read for read in reads if read not in early), (name,))
    graph = patch_graph(plan, patch, piece)
    (output,) = graph.find_nodes(op="output")
    (exchange,) = (node for node in graph.nodes if "exchange" in node.meta)
    output.args = ((exchange.args[0],),)
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    return graph


def whole_plan(plan: RowPlan) -> RowPlan:
    """The same graph with no rows followed: nothing is cut and nothing exchanged."""
    states: dict[str, Result] = {}
    for name, state in plan.states.items():
        states[name] = tuple(None for _ in state) if isinstance(state, tuple) else None
    return replace(plan, states=states, found={name: Found(states[name]) for name in plan.found})


def _call(writer: PatchWriter, node: fx.Node) -> None:
    found = writer.plan.found[node.name]
    call = writer.plan.calls[node.name]
    arguments = dict(call.arguments)
    for slot, operand in call.operands.items():
        state = writer.plan.state(operand)
        if isinstance(state, tuple):
            _put(arguments, slot, writer.here[operand])
        else:
            _put(arguments, slot, writer.wanted(operand, found.wants.get(slot, state)))
    if not isinstance(node.target, torch._ops.OpOverload):
        writer.emit(node, node.target, tuple(arguments.values()))
        return
    _WAYS[type(found.how)](writer, node, found.how, arguments)


def _put(arguments: dict[str, Any], slot: Slot, value: fx.Node) -> None:
    name, index = slot
    if index is None:
        arguments[name] = value
    else:
        arguments[name] = [*arguments[name][:index], value, *arguments[name][index + 1 :]]


def _same(writer: PatchWriter, node: fx.Node, how: Same, arguments: dict[str, Any]) -> None:
    writer.emit(node, node.target, {**arguments, **how.changes})


def _shaped(writer: PatchWriter, node: fx.Node, how: Shaped, arguments: dict[str, Any]) -> None:
    state = writer.plan.state(node)
    assert not isinstance(state, tuple)
    writer.emit(node, how.target, (next(iter(arguments.values())), writer.patch.shape(node, state)))


def _window(writer: PatchWriter, node: fx.Node, how: Window, arguments: dict[str, Any]) -> None:
    name, operand = next(iter(arguments.items()))
    value = node.all_input_nodes[0]
    rows = writer.plan.rows(value)
    if how.fill == "reflect":
        _require_reflected(writer.patch, node, how, rows)
    if value in writer.more_rows:
        operand = _with_border(writer, node, how, operand, rows)
    elif how.above or how.below or how.end:
        operand = _with_halo(writer, node, how, operand, value, how.fill)
    arguments = {**arguments, name: operand, **how.changes}
    if how.skip or how.target.__name__.startswith("conv_transpose"):
        _narrowed(writer, node, how.target, arguments, how.skip)
    else:
        writer.emit(node, how.target, arguments)


def _narrowed(writer: PatchWriter, node: fx.Node, target: Any, arguments: dict[str, Any], start: int) -> None:
    """The rows from `start` on of a call that has more of them than this patch."""
    state = writer.plan.rows(node)
    wider = writer.add(node, target, arguments, "wider")
    writer.emit(node, aten.narrow.default, (wider, state.dim, start, writer.patch.size(state)))


def _with_halo(
    writer: PatchWriter, node: fx.Node, how: Window, operand: fx.Node, value: fx.Node, fill: float | str
) -> fx.Node:
    """A captured value, or what it is here, with the rows around it that a window reads: of inputs there are all."""
    rows = writer.plan.rows(value)
    shape = writer.patch.shape(value, rows)
    shape[rows.dim] += _more_rows(writer.patch, how)
    if (whole := writer.all_rows(value)) is not None:
        (start, stop), total = writer.patch.span(rows), rows.size(writer.patch.count)
        above, below = _at_border(writer.patch, how, rows)
        first, last = start - how.above + above, min(total, stop + how.below)
        args = whole, rows.dim, [(0, 1, total, first, last - first)]
        own = writer.add(
            node, row_ops.cut_rows, args, "rows", [*shape[: rows.dim], last - first, *shape[rows.dim + 1 :]]
        )
        return writer.add(node, row_ops.with_halo, (own, [], [], rows.dim, above, below, fill), "halo", shape)
    found = writer.add(node, exchanges.halo, (operand, rows.dim, how.above, how.below, how.end, fill), "halo", shape)
    found.meta["exchange"] = Exchange(node.name, "halo", value, rows)
    return found


def _more_rows(patch: Patch, how: Window) -> int:
    return how.above + (how.end if patch.stop == patch.count else how.below)


def _at_border(patch: Patch, how: Window, rows: Rows) -> tuple[int, int]:
    """Rows that a window reads above and below the image."""
    (start, stop), total = patch.span(rows), rows.size(patch.count)
    return max(0, how.above - start), how.end if patch.stop == patch.count else max(0, stop + how.below - total)


def _with_border(writer: PatchWriter, node: fx.Node, how: Window, operand: fx.Node, rows: Rows) -> fx.Node:
    """What has its rows around it already, but at the image's border."""
    above, below = _at_border(writer.patch, how, rows)
    if not above and not below:
        return operand
    args = operand, rows.dim, above, below, how.fill
    return writer.add(node, row_ops.set_border, args, "border", operand.meta["val"].shape)


def _require_reflected(patch: Patch, node: fx.Node, how: Window, state: Rows) -> None:
    """Refuse a patch that does not see all the rows which are reflected at its border."""
    (start, stop), total = patch.span(state), state.size(patch.count)
    seen = min(total, stop + how.below) - max(0, start - how.above)
    wanted = max(how.above - start, how.end if stop == total else stop + how.below - total)
    if seen <= wanted:
        raise CompileError(
            f"module {node.meta.get('path') or '(the model itself)'}: {node.target} ({node.name}) reflects {wanted} "
            f"rows at the image's border, patch {patch.index} sees {seen}; use fewer or larger patches"
        )


def _moments(writer: PatchWriter, node: fx.Node, how: Moments, arguments: dict[str, Any]) -> None:
    wider = operand = arguments["input"]
    shape = (2, shape_of(node)[0], how.num_groups)
    if (early := writer.early_halos.get(node)) is not None:
        window = writer.plan.found[early.window.name].how
        assert isinstance(window, Window)
        wider = _with_halo(writer, early.window, window, operand, node.all_input_nodes[0], 0.0)
        writer.more_rows |= dict.fromkeys(early.between, _more_rows(writer.patch, window))
    wide = torch.promote_types(node.meta["val"].dtype, torch.float32)
    merged = writer.add(node, exchanges.merged_moments, (operand, how.num_groups), "moments", shape, wide)
    merged.meta["exchange"] = Exchange(node.name, "moments", node.all_input_nodes[0], writer.plan.rows(node))
    writer.emit(node, row_ops.normalise, (wider, merged, arguments["weight"], arguments["bias"], arguments["eps"]))


def _summed(writer: PatchWriter, node: fx.Node, how: Summed, arguments: dict[str, Any]) -> None:
    """Parts of half precision are float32, where their sum has room, but of products, which have no such option."""
    dtype = node.meta["val"].dtype
    of_part = wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
    if how.power != 1 or "dtype" not in arguments:
        of_part = dtype
    elif wide != dtype:
        arguments["dtype"] = wide
    part = writer.add(node, node.target, arguments, "part", dtype=of_part)
    if how.mean:
        state = writer.plan.rows(node.all_input_nodes[0])
        share = writer.patch.size(state) / state.size(writer.patch.count)
        part = writer.add(node, aten.mul.Tensor, (part, share), "share", dtype=of_part)
    if how.power != 1:
        part = writer.add(node, row_ops.power, (part, how.power), "power", dtype=wide)
        total = writer.add(node, exchanges.total, (part,), "total", dtype=wide)
        writer.emit(node, row_ops.root, (total, how.power, dtype))
    elif of_part != dtype:
        total = writer.add(node, exchanges.total, (part,), "total", dtype=wide)
        writer.emit(node, aten.to.dtype, (total, dtype))
    else:
        total = writer.emit(node, exchanges.total, (part,))
    total.meta["exchange"] = Exchange(node.name, "sum", node, None)


def _resized(writer: PatchWriter, node: fx.Node, how: Resized, arguments: dict[str, Any]) -> None:
    state, size = writer.plan.rows(node), list(shape_of(node)[2:])
    size[state.dim - 2] = writer.patch.size(writer.plan.rows(node.all_input_nodes[0])) * how.times
    arguments = {**arguments, **how.changes, how.name: size}
    if size[state.dim - 2] == writer.patch.size(state):
        writer.emit(node, node.target, arguments)
    else:
        _narrowed(writer, node, node.target, arguments, 0)


def _split(writer: PatchWriter, node: fx.Node, how: Split, arguments: dict[str, Any]) -> None:
    before, states = writer.plan.rows(node.all_input_nodes[0]), writer.plan.state(node)
    assert isinstance(states, tuple)
    sizes = []
    for state, whole in zip(states, node.meta["val"], strict=True):
        of_none = whole.shape[before.dim] if writer.patch.owns else 0
        sizes.append(of_none if state is None else writer.patch.size(state))
    writer.emit(node, aten.split_with_sizes.default, (next(iter(arguments.values())), sizes, before.dim))


def _cut(writer: PatchWriter, node: fx.Node, how: CutRows, arguments: dict[str, Any]) -> None:
    before, state = writer.plan.rows(node.all_input_nodes[0]), writer.plan.state(node)
    assert not isinstance(state, tuple)
    size = writer.patch.shape(node, state)[before.dim]
    start = writer.patch.local(before, how.start)
    writer.emit(node, aten.narrow.default, (next(iter(arguments.values())), before.dim, start, size))


def _written(writer: PatchWriter, node: fx.Node, how: Written, arguments: dict[str, Any]) -> None:
    into, rows = writer.plan.rows(node), writer.plan.rows(writer.plan.calls[node.name].arguments["src"])
    start = writer.patch.local(into, how.start)
    args = (arguments["self"], arguments["src"], into.dim, start, start + writer.patch.size(rows))
    writer.emit(node, aten.slice_scatter.default, args)


def _whole(writer: PatchWriter, node: fx.Node, how: Whole, arguments: dict[str, Any]) -> None:
    state = writer.plan.rows(node)
    writer.whole[node] = whole = writer.add(node, node.target, arguments, "whole")
    writer.emit(node, row_ops.cut_rows, (whole, state.dim, writer.patch.stretches(state)))


def _joined(writer: PatchWriter, node: fx.Node, how: Joined, arguments: dict[str, Any]) -> None:
    if not writer.patch.owns:
        rows = [operand for operand in node.all_input_nodes if writer.plan.state(operand) is not None]
        kept = {writer.here[operand] for operand in rows}
        name, values = next(iter(arguments.items()))
        arguments = {**arguments, name: [value for value in values if value in kept]}
    writer.emit(node, node.target, arguments)


def _padded(writer: PatchWriter, node: fx.Node, how: Padded, arguments: dict[str, Any]) -> None:
    writer.emit(node, node.target, arguments if writer.patch.owns else {**arguments, **how.without})


_WAYS: dict[type, Callable[[PatchWriter, fx.Node, Any, dict[str, Any]], None]] = {
    Same: _same, Shaped: _shaped, Window: _window, Moments: _moments, Summed: _summed, Resized: _resized,
    Joined: _joined, Padded: _padded, Split: _split, CutRows: _cut,
    Written: _written, Whole: _whole, Attended: _same,
}  # fmt: skip
