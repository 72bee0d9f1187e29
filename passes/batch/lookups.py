"""Lookups by number: tables indexed by each sample's numbers, samples indexed by fixed ones."""

from collections.abc import Sequence

import torch
from torch import fx

from passes.batch import own_rows
from passes.batch.layout import BatchLayout, Mixed, Result, RuleCall, State, batch_dims, factor, splits
from passes.batch.rules import aligned, along, broadcast, moved, no_batch_numbers, shapes_of
from passes.operations import acted_dims, dimension

_OWN_ROWS = (
    "give each sample's own rows: x[arange(B)[:, None], places], or, of a table [B*N, ...], arange(B)[:, None] * N + "
    "places that are below N whatever is given, as those of topk or `% N` are"
)


def embedding(call: RuleCall) -> list[Result]:
    if call.arguments["scale_grad_by_freq"]:
        raise Mixed("scale_grad_by_freq scales gradients by counts over the batch", "turn scale_grad_by_freq off")
    weight, indices = call.operands
    layout = call.layout(indices)
    if call.layout(weight) is not None or layout is None:
        raise Mixed("it looks samples up by number")
    return moved(call, layout)


def embedding_bag(call: RuleCall) -> list[Result]:
    raise Mixed("the lengths of its bags are numbers in a tensor", "sum the rows of an nn.Embedding of [batch, length]")


def gather(call: RuleCall) -> list[Result]:
    """A lookup along `dim`: entry by entry, unless the table is the same for every sample."""
    table, index = call.operands
    layout, dim = call.layout(index), dimension(call.arguments["dim"], max(table.meta["val"].ndim, 1))
    if call.layout(table) is None and layout is not None and layout.dim == dim:
        return moved(call, layout)
    return along(call)


def index_select(call: RuleCall) -> list[Result]:
    table, index = call.operands
    layout = call.layout(table)
    own = own_rows.are_of(call, index, layout, dimension(call.arguments["dim"], table.meta["val"].ndim))
    _no_counts(call, [table] if own else call.operands)
    if own:
        return moved(call, broadcast(shapes_of(call, [index])))
    if layout is None:
        return moved(call, call.layout(index) or BatchLayout(0))
    if call.layout(index) is not None or layout.dim in acted_dims(call.arguments, table.meta["val"].ndim):
        raise Mixed("it looks samples up by number")
    return moved(call, layout)


def index(call: RuleCall) -> list[Result]:
    """Advanced indexing: of a table by each sample's numbers, of each sample by fixed numbers, or both by arange(k*B),
    where samples have k rows each."""
    table, indices = call.operands[0], call.arguments["indices"]
    layout, used = call.layout(table), [n for n in indices if n is not None]
    if any(n.meta["val"].dtype in (torch.bool, torch.uint8) for n in used):
        raise Mixed("the size of its result depends on a mask's values", "use torch.where")
    at = indices[layout.dim] if layout is not None and layout.dim < len(indices) else None
    if at is not None and own_rows.are_of(call, at, layout, layout.dim):  # type: ignore[union-attr]
        _no_counts(call, [n for n in call.operands if n is not at])
        return moved(call, broadcast(shapes_of(call, used)))
    _no_counts(call, call.operands, "position")
    positions = [n for n in call.operands if call.states[n].form == "position"]  # type: ignore[union-attr]
    if positions != ([at] if at is not None else []) or (at and call.layout(at).at(0) != layout.at(0)):  # type: ignore[union-attr]
        raise Mixed("it looks samples up by number", _OWN_ROWS)
    if layout is None or at is not None:
        return moved(call, broadcast(shapes_of(call, used)))
    return moved(call, layout)


def _no_counts(call: RuleCall, nodes: Sequence[fx.Node], *allowed: str) -> None:
    if any(call.states[n].counts and call.states[n].form not in allowed for n in nodes):  # type: ignore[union-attr]
        raise Mixed("it looks samples up by number", _OWN_ROWS)


def index_put(call: RuleCall) -> list[Result]:
    table, indices = next(call.tensors("self")), call.arguments["indices"]
    (values,) = call.tensors("values")
    _no_counts(call, call.operands, "position")
    layout, used = call.layout(table), [n for n in indices if n is not None]
    if any(call.states[n].form == "position" for n in used):  # type: ignore[union-attr]
        return _put_by_sample(call, table, values)
    if layout is None or (layout.dim < len(indices) and indices[layout.dim] is not None) or call.batched(used):
        raise Mixed("it writes samples by number")
    first = next(i for i, n in enumerate(indices) if n is not None)
    written = table.meta["val"].ndim - len(used) + max(n.meta["val"].ndim for n in used)
    if call.layout(values) is not None:
        place = layout.dim if layout.dim < first else layout.dim - table.meta["val"].ndim + written
        if call.layout(values) != layout.at(place + values.meta["val"].ndim - written):
            raise Mixed("it writes one sample's values into another's")
    elif values.meta["val"].ndim and any(s != 1 for s in values.meta["val"].shape[: layout.dim + 1]):
        raise Mixed("it writes one sample's values into another's")
    return moved(call, layout)


def _put_by_sample(call: RuleCall, table: fx.Node, values: fx.Node) -> list[Result]:
    """`x[arange(B), i] = y`: every sample's own entries."""
    indices, layout = call.arguments["indices"], call.layout(table)
    positions = [n for n in call.operands if call.states[n].form == "position"]  # type: ignore[union-attr]
    if layout != BatchLayout(0) or positions != [indices[0]] or None in indices:
        raise Mixed("it writes samples by number")
    place = broadcast(shapes_of(call, indices))
    written = [0] * (max(n.meta["val"].ndim for n in indices) + table.meta["val"].ndim - len(indices))
    at = place.at(place.dim - (table.meta["val"].ndim - len(indices)))  # among the written entries, from the end
    if broadcast([([2] * len(written), at.at(at.dim + len(written))), *shapes_of(call, [values])]) != at:
        raise Mixed("it writes one sample's values into another's")
    return moved(call, layout)


def arange(call: RuleCall) -> list[Result]:
    """The numbers of the samples, or of their rows: drawn up on the whole batch, or counted within the micro-batch to
    index it."""
    numbers = {name: call.number(name) for name in ("start", "end", "step")}
    dims = batch_dims(call.node.meta["val"])
    if numbers["start"] in (None, 0) and numbers["step"] in (None, 1) and dims:
        return [State(layout, "position") for layout in splits(*dims[0])]
    if numbers["start"] in (None, 0) and dims == [(0, 1)] and factor(numbers["end"]) == numbers["step"]:
        return [State(BatchLayout(0), "row", rows=numbers["step"])]
    raise Mixed("it counts over the batch")


def bucketize(call: RuleCall) -> list[Result]:
    """`bucketize`, `searchsorted`: elementwise in the values; boundaries in one row, or a row for each of values."""
    values, (boundaries, *_) = next(call.tensors("self"), None), call.tensors("boundaries", "sorted_sequence")
    layout = call.layout(values) if values is not None else None
    by_row = boundaries.meta["val"].ndim > 1
    if layout is None or call.layout(boundaries) != (layout if by_row else None):
        raise Mixed("its boundaries are those of other samples")
    if by_row and layout.dim == boundaries.meta["val"].ndim - 1:
        raise Mixed("it looks samples up by number")
    return moved(call, layout)


def at_numbers(call: RuleCall) -> list[Result]:
    """`index_add`, `index_copy`, `index_fill`: writes at fixed numbers along another dimension than the batch."""
    no_batch_numbers(call)
    layout = aligned(call, list(call.tensors("self", "source")))
    if call.batched(list(call.tensors("index"))) or layout.dim in acted_dims(
        call.arguments, call.node.meta["val"].ndim
    ):
        raise Mixed("it writes samples by number")
    return moved(call, layout)


def select_scatter(call: RuleCall) -> list[Result]:
    no_batch_numbers(call)
    value, part = call.operands
    layout, dim = call.layout(value), dimension(call.arguments["dim"], value.meta["val"].ndim)
    if layout is None or layout.dim == dim or call.layout(part) != layout.at(layout.dim - int(layout.dim > dim)):
        raise Mixed("it writes one sample's values into another's")
    return moved(call, layout)


def slice_scatter(call: RuleCall) -> list[Result]:
    """A write into a slice: along the batch only of all of it, as in `x[:, 1] = y`."""
    value, part = call.operands
    layout, dim = call.layout(value), dimension(call.arguments["dim"], value.meta["val"].ndim)
    if layout is None or layout.dim != dim:
        return along(call)
    if call.layout(part) != layout or call.arguments["step"] != 1:
        raise Mixed("it writes some samples of the batch")
    return moved(call, layout)


def diagonal_scatter(call: RuleCall) -> list[Result]:
    """A write into a diagonal, which is the last dimension of what is written."""
    no_batch_numbers(call)
    value, part = call.operands
    layout, ndim = call.layout(value), value.meta["val"].ndim
    gone = acted_dims(call.arguments, ndim)
    if (
        layout is None
        or layout.dim in gone
        or call.layout(part) != layout.at(layout.dim - sum(d < layout.dim for d in gone))
    ):
        raise Mixed("it writes one sample's values into another's")
    return moved(call, layout)
