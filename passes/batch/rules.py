"""How an operation moves the samples of a batch: a few general rules over ATen's operations.

Most operations leave each sample's part where it is, up to a permutation of dimensions. Then the result's layout is
read off its shape: the one dimension that has the batch in its size. A rule only has to show that no two samples meet.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from passes.batch.layout import BatchLayout, Mixed, Result, Rule, RuleCall, State, batch_dims
from passes.operations import acted_dims


def moved(call: RuleCall, layout: BatchLayout) -> list[Result]:
    """The result of an operation that keeps samples apart and in order, wherever its shape says the batch went."""
    value = call.node.meta["val"]
    if isinstance(value, list | tuple):
        return [tuple(State(_placed(item, layout)) for item in value)]
    return [State(_placed(value, layout))]


def _placed(value: Any, layout: BatchLayout) -> BatchLayout | None:
    if value is None:
        return None
    dims = batch_dims(value)
    if len(dims) != 1:
        raise Mixed(f"its result has the batch in {len(dims)} dimensions, so it combines pairs of samples")
    ((dim, k),) = dims
    if k != layout.factor:
        raise Mixed(f"its result has {k} entries a sample in dimension {dim}, where {layout.factor} were expected")
    return layout.at(dim)


def no_batch_numbers(call: RuleCall, *allowed: str) -> None:
    if names := call.batch_numbers(allowed):
        raise Mixed(
            f"its argument {names[0]!r} is computed from the batch size",
            "divide by the batch size only after the sum over samples, or take the mean",
        )


def broadcast(shapes: Sequence[tuple[Sequence[Any], BatchLayout | None]]) -> BatchLayout:
    """The layout, counted from the end (negative dim), of values combined elementwise."""
    places = {layout.at(layout.dim - len(shape)) for shape, layout in shapes if layout is not None}
    if len(places) != 1:
        raise Mixed("its operands hold the batch in different places, so it combines different samples")
    (place,) = places
    for shape, layout in shapes:
        if layout is None and len(shape) >= -place.dim and shape[place.dim] != 1:
            raise Mixed("it combines the batch with another dimension of the same size")
    return place


def shapes_of(call: RuleCall, nodes: Sequence[fx.Node]) -> list[tuple[Sequence[Any], BatchLayout | None]]:
    return [(n.meta["val"].shape, call.layout(n)) for n in nodes]


def pointwise(call: RuleCall) -> list[Result]:
    no_batch_numbers(call)
    return moved(call, broadcast(shapes_of(call, call.operands)))


def aligned(call: RuleCall, nodes: Sequence[fx.Node]) -> BatchLayout:
    """The one layout of operands that are combined without broadcasting."""
    layouts = {call.layout(n) for n in nodes if n.meta["val"].ndim > 0}
    if len(layouts) != 1 or None in layouts or len({n.meta["val"].ndim for n in nodes} - {0}) != 1:
        raise Mixed("its operands hold the batch in different places, so it combines different samples")
    (layout,) = layouts
    assert layout is not None
    return layout


def along(call: RuleCall) -> list[Result]:
    """An operation that acts along the dimensions it names."""
    no_batch_numbers(call)
    layout = aligned(call, call.operands)
    ndim = max(n.meta["val"].ndim for n in call.operands)
    if layout.dim in acted_dims(call.arguments, ndim):
        raise Mixed(f"it acts along dimension {layout.dim}, the batch")
    return moved(call, layout)


def along_first(call: RuleCall) -> list[Result]:
    """An operation along dimensions of its first operand; the others are the same for every sample."""
    no_batch_numbers(call)
    first, *others = call.operands
    layout = call.layout(first)
    if layout is None or call.batched(others):
        raise Mixed("its settings differ from sample to sample")
    if layout.dim in acted_dims(call.arguments, first.meta["val"].ndim):
        raise Mixed(f"it acts along dimension {layout.dim}, the batch")
    return moved(call, layout)


def stack(call: RuleCall) -> list[Result]:
    return moved(call, aligned(call, call.operands))


def meshgrid(call: RuleCall) -> list[Result]:
    layouts = [call.layout(n) for n in call.batched()]
    if len(layouts) != 1 or layouts[0] is None:
        raise Mixed("it combines pairs of samples")
    return moved(call, layouts[0])


def cast(call: RuleCall) -> list[Result]:
    """Another type or device; a second operand only names the type."""
    layout = call.layout(call.operands[0])
    return [State()] if layout is None else moved(call, layout)


def structural(call: RuleCall) -> list[Result]:
    """Permutations of dimensions."""
    (node,) = call.operands
    layout = call.layout(node)
    assert layout is not None
    return moved(call, layout)


def trailing(count: Callable[[RuleCall, int], int], shared: Sequence[str] = ()) -> Rule:
    """An operation on the last `count` dimensions; `shared` operands hold the batch as the first operand does."""

    def rule(call: RuleCall) -> list[Result]:
        no_batch_numbers(call)
        first, *others = call.operands
        joined = [first, *(n for n in others if n in set(call.tensors(*shared)))]
        if call.batched([n for n in others if n not in joined]):
            raise Mixed("its weights differ from sample to sample", "write it as a batched matrix product")
        layout = aligned(call, joined)
        ndim = first.meta["val"].ndim
        if layout.dim >= ndim - count(call, ndim):
            raise Mixed(f"it combines the entries of dimension {layout.dim}, the batch")
        return moved(call, layout)

    return rule


def spatial(call: RuleCall, ndim: int) -> int:
    """How many of the last dimensions an operation is on, as its name says."""
    return int(next(c for c in call.name if c in "123"))


def batch_norm(call: RuleCall) -> list[Result]:
    if call.arguments["training"]:
        raise Mixed("batch normalisation in training uses statistics of the whole batch", "use GroupNorm, or .eval()")
    return trailing(lambda call, ndim: ndim - 1)(call)


def recurrent(call: RuleCall) -> list[Result]:
    """`lstm`, `gru`, `rnn`: along time; the batch is dimension 1 of states, and of the input unless `batch_first`."""
    no_batch_numbers(call)
    if "batch_sizes" in call.arguments:
        raise Mixed("it reads sequences packed by length", "pad the sequences, and mask what is beyond their ends")
    layout, states = call.layout(next(call.tensors("input"))), list(call.tensors("hx"))
    if layout is None or layout.dim != (0 if call.arguments["batch_first"] else 1):
        raise Mixed("it goes through the batch as through time", "pass batch_first=True, and [batch, time, ...]")
    if any(call.layout(state) != layout.at(1) for state in states) or call.batched(list(call.tensors("params"))):
        raise Mixed("its states hold the batch in another place than its input")
    return moved(call, layout)
