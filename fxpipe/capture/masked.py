"""What a mask chooses, computed at all places of the mask, so that no size depends on what the mask holds.

    a = index(x, [mask])           ->   a = where(mask, x, 0.8), of all places in one dimension
    mse_loss(a, index(y, [mask]))  ->   where(mask, mse_loss(a, b, none), 0).sum() / mask.sum()
    sum / index.shape[0]           ->   sum / mask.sum()
    index_put(y, [mask], f(a))     ->   where(mask, f(a), y)
    k, r = where(mask)
    index_add(y, 0, r, f(x[r]))    ->   y + where(mask, f(x of all places), 0).sum(0)

Between both, operations compute every place by itself; what goes through another is left as it was. What stands where
nothing is chosen gets no gradient, and gives none: an operation that may have no finite derivative, as a logarithm, is
given numbers there of which it has one.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxpipe.capture import private
from fxpipe.capture.same import alike
from fxpipe.capture.sizes import alike_sizes, expression
from fxpipe.capture.surroundings import LOW
from fxpipe.capture.views import shape_nodes

aten = torch.ops.aten


@dataclass(frozen=True)
class _Chosen:
    """Of a value: the mask, all its places in one dimension, and which dimension of the value that is; of the numbers
    of places, which of the mask's dimensions they are in."""

    mask: fx.Node
    flat: fx.Node
    dim: int
    place: int | None = None


class _Unknown(Exception):
    """Of an operation that may combine places."""


_MOVED = {
    "unsqueeze", "squeeze", "transpose", "permute", "t", "expand", "to", "_to_copy", "clone", "detach", "alias",
    "contiguous", "zeros_like", "ones_like", "full_like", "type_as", "getitem", "broadcast_tensors", "one_hot",
    "expand_as", "numpy_T", "mT", "stack",
}  # fmt: skip
_RESHAPED = {"view", "reshape", "flatten", "unflatten", "_unsafe_view"}
_ALONG = {
    "softmax", "log_softmax", "sum", "mean", "amax", "amin", "logsumexp", "var", "linalg_vector_norm", "cumsum", "cat",
    "split", "split_with_sizes", "chunk", "unbind", "select", "slice", "argmax", "argmin", "glu", "topk", "any", "all",
    "sort", "flip", "cosine_similarity",
}  # fmt: skip
_LAST: dict[str, Callable[[Any], float]] = {  # how many of the last dimensions are combined, by the second argument
    **dict.fromkeys(("layer_norm", "rms_norm"), len),
    **dict.fromkeys(("linear", "mm", "matmul"), lambda weight: 1 if weight.meta["val"].ndim < 3 else math.inf),
    "pad": lambda sizes: len(sizes) / 2,
}
_LOSSES = {"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits", "kl_div"}
_CLASS_LOSSES = ("cross_entropy_loss", "nll_loss_nd")
_COUNTED = {operator.mul: aten.mul.Tensor, operator.add: aten.add.Tensor, torch.sym_max: aten.clamp_min.default}
_STANDS = {
    "embedding": 0, "index": 0, "one_hot": 0, "gather": 0, "softmax": 1, "log_softmax": 1, "logsumexp": 1,
    **dict.fromkeys(_CLASS_LOSSES, 0),
}  # fmt: skip
_FINITE = _MOVED | _LOSSES - {"kl_div"} | {
    "add", "sub", "rsub", "mul", "neg", "abs", "relu", "gelu", "silu", "tanh", "sigmoid", "clamp", "where",
    "masked_fill", "eq", "ne", "lt", "le", "gt", "ge",
}  # fmt: skip
_CHOOSES: dict[str, Callable[[Any], list[Any]]] = {
    "index": lambda args: args[1],
    "masked_select": lambda args: [args[1]],
    "index_select": lambda args: [*[None] * (args[1] % args[0].meta["val"].ndim), args[2]],
}
_NONZERO = (aten.where.default, aten.nonzero_numpy.default, aten.nonzero.default)


def write_whole(graph: fx.Graph) -> fx.Node | None:
    """Make what masks choose that of all places, as far as operations leave them apart; returns the first that may
    combine them."""
    rewriter = _Rewriter(graph)
    for node in list(graph.nodes):
        if node.op == "call_function" and any(map(_is_of_values, [node, *node.all_input_nodes])):
            rewriter.visit(node)
    return rewriter.combines


class _Rewriter:
    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.new: dict[fx.Node, fx.Node] = {}  # of all places
        self.chosen: dict[fx.Node, _Chosen] = {}
        self.counts: dict[fx.Node, fx.Node] = {}  # numbers of places, as tensors
        self.masks: dict[Any, _Chosen] = {}  # by the symbol of their number
        self.node: fx.Node
        self.combines: fx.Node | None = None

    def visit(self, node: fx.Node) -> None:
        self.node = node
        try:
            with self.graph.inserting_before(node.next):
                result = self._result(node)
        except _Unknown:
            if self.combines is None and not self.chosen.keys().isdisjoint(node.all_input_nodes):
                self.combines = node
            return
        if result is not None and _is_of_values(node):
            self.new[node] = result
        elif result is not None:
            node.replace_all_uses_with(result)

    def _result(self, node: fx.Node) -> fx.Node | None:
        name, args = _name(node), node.args
        given = {one: self.chosen[one] for one in node.all_input_nodes if one in self.chosen}
        if not args:
            raise _Unknown
        if any(_is_of_values(one) and one not in given and one not in self.counts for one in node.all_input_nodes):
            self._number_of_place(node)
            return None
        by_place = args[0] not in given and all(one.place is not None for one in given.values())
        if name in _CHOOSES and by_place and _is_of_values(node):
            return self._whole(node, _CHOOSES[name](args), given)
        if name == "index" and args[0] not in given and (picked := _picked(args[1], args[0], given)):
            whole = self._whole(node, picked[:1], given)
            at = self._column(picked[1], args[0])
            return self._make(aten.select.int, self._make(aten.gather.default, whole, 1, at), 1, 0)
        if name == "sym_size":
            (one,) = given.values()
            self.counts[node] = self._make(aten.sum.default, one.flat)
            return self._make(aten.sym_size.int, one.flat, 0)
        if node.target in _COUNTED and not given:
            numbers = [self.counts.get(one, one) if isinstance(one, fx.Node) else one for one in args]
            self.counts[node] = self._make(_COUNTED[node.target], *sorted(numbers, key=lambda one: type(one) is int))
            return None
        if len({one.flat for one in given.values()}) > 1 or (not given and not node.all_input_nodes):
            raise _Unknown
        end = _ENDS.get(name)
        if end is not None and not (name in _CLASS_LOSSES and private.argument(node, "reduction") == 0):
            return end(self, node, given)
        if any(one.place is not None for one in given.values()):
            raise _Unknown
        if given and name in _LOSSES and (kind := private.argument(node, "reduction")) != 0:
            return self._reduced(self._each(node, given, reduction=0), given, [], kind == 2)
        if name in ("sum", "mean") and _acts(node, given):
            ((value, one),) = given.items()
            if private.argument(node, "dtype") is not None:
                raise _Unknown
            dims, keep = _dims(node) or [], bool(private.argument(node, "keepdim"))
            return self._reduced(self.new[value], {self.new[value]: one}, dims, name == "sum", keep)
        made = self._each(node, given)
        if _is_of_values(node):
            self.chosen[node] = self._of_result(node, made, given)
            if any(isinstance(one, float) and not math.isfinite(one) for one in node.args):
                return self._filled(self.chosen[node], made, 0)
        return made

    def _number_of_place(self, node: fx.Node) -> None:
        """One of the results of `where(mask)`, or the one column of `nonzero(mask)`, or how many there are."""
        source: Any = node.args[0] if node.args else None
        if getattr(source, "target", None) not in _NONZERO or _is_of_values(source.args[0]):
            raise _Unknown
        if node.target is operator.getitem:
            self._start(node, source.args[0], 0, cast(int, node.args[1]))
        elif _name(node) == "sym_size":
            self.counts[node] = self._make(aten.sum.default, self._make(aten.ne.Scalar, source.args[0], 0))
        elif _name(node) in _RESHAPED | {"squeeze"} and source.args[0].meta["val"].ndim == node.meta["val"].ndim == 1:
            self._start(node, source.args[0], 0, 0)
        else:
            raise _Unknown

    def _start(self, node: fx.Node, mask: fx.Node, dim: int, place: int | None = None) -> _Chosen:
        symbol = expression(next(size for size in node.meta["val"].shape if private.sizes.depends_on_values(size)))
        known = next((one for one in self.masks.values() if alike(one.mask, mask)), None)
        if known is None:
            flat = self._make(aten.reshape.default, mask, [-1])
            flat = flat if flat.meta["val"].dtype == torch.bool else self._make(aten.ne.Scalar, flat, 0)
            known = _Chosen(mask, flat, 0)
        if self.masks.setdefault(symbol, known) is not known:
            raise _Unknown
        self.chosen[node] = replace(self.masks[symbol], dim=dim, place=place)
        return self.chosen[node]

    def _whole(self, node: fx.Node, indices: Any, given: Mapping[fx.Node, _Chosen]) -> fx.Node:
        """What is chosen from a value, and the others with what has finite derivatives in their places."""
        source: Any = node.args[0]
        at, mask, dims = _indexed(indices, given)
        shape, ndim = mask.meta["val"].shape, source.meta["val"].ndim
        if not alike_sizes([shape[dim] for dim in dims], source.meta["val"].shape[at : at + len(dims)]):
            raise _Unknown
        order = [*range(at), *(at + dims.index(dim) for dim in sorted(dims)), *range(at + len(dims), ndim)]
        if order != sorted(order):
            source = self._make(aten.permute.default, source, order)
        for dim in sorted(set(range(len(shape))) - set(dims)):
            source = self._make(aten.unsqueeze.default, source, at + dim)
        if len(dims) < len(shape):
            sizes = [-1] * at + shape_nodes(self.graph, mask) + [-1] * (ndim - at - len(dims))
            source = self._make(aten.expand.default, source, sizes)
        sizes = shape_nodes(self.graph, source)
        source = self._make(aten.reshape.default, source, [*sizes[:at], -1, *sizes[at + len(shape) :]])
        return self._filled(self._start(node, mask, at), source, 0)

    def _filled(self, one: _Chosen, value: fx.Node, number: int) -> fx.Node:
        """A value that has finite derivatives where it is not chosen; `number` is for integers."""
        kind = value.meta["val"].dtype
        if kind.is_floating_point or kind.is_complex:
            return self._if_chosen(one, value, 0.5 + 0.3 / (1 + len(self.new)))
        return self._if_chosen(one, value, number) if kind != torch.bool else value

    def _if_chosen(self, one: _Chosen, value: fx.Node, other: Any) -> fx.Node:
        mask = self._trailing(one.flat, value.meta["val"].ndim - 1 - one.dim)
        return self._make(aten.where.ScalarOther, mask, value, other)

    def _trailing(self, mask: fx.Node, number: int) -> fx.Node:
        for _ in range(number):
            mask = self._make(aten.unsqueeze.default, mask, -1)
        return mask

    def _each(self, node: fx.Node, given: Mapping[fx.Node, _Chosen], **changed: Any) -> fx.Node:
        """The operation, of all places."""
        tags = getattr(node.target, "tags", ())
        is_pointwise = torch.Tag.pointwise in tags or bool(changed)
        by_count = any(one in self.counts for one in node.all_input_nodes)
        drawn = torch.Tag.nondeterministic_seeded in tags  # for every place another number
        if drawn or not (is_pointwise or (given and _keeps_apart(node, given))):
            raise _Unknown
        if by_count and not (is_pointwise or _name(node) in _RESHAPED):
            raise _Unknown

        number = _STANDS.get(_name(node), int(is_pointwise and _name(node) not in _FINITE) or None)

        def read(one: fx.Node) -> fx.Node:
            if is_pointwise and one in self.counts:
                return self.counts[one]
            whole = self.new.get(one, one)
            return whole if one not in given or number is None else self._filled(given[one], whole, number)

        return self._again(*fx.map_arg(_with(node, **changed), read))

    def _of_result(self, node: fx.Node, made: fx.Node, given: Mapping[fx.Node, _Chosen]) -> _Chosen:
        """Where the places are in a result: in one dimension, with as many entries before it."""
        ((first, one), *_) = given.items()
        found = set[int]()
        olds, news = (private.tensors_in(value.meta["val"]) for value in (node, made))
        for old, new in zip(olds, news, strict=True):
            at = [dim for dim, size in enumerate(old.shape) if private.sizes.depends_on_values(size)]
            if len(at) != 1 or self.masks.get(expression(old.shape[at[0]])) != replace(one, dim=0):
                raise _Unknown
            wanted = [*old.shape[: at[0]], one.flat.meta["val"].shape[0], *old.shape[at[0] + 1 :]]
            if _name(node) in _RESHAPED:
                before = (first.meta["val"].shape[: one.dim], old.shape[: at[0]])
                if len({math.prod(map(expression, sizes)) for sizes in before}) > 1:
                    raise _Unknown
            if not alike_sizes(wanted, new.shape):
                raise _Unknown
            found.add(at[0])
        if len(found) != 1:
            raise _Unknown
        return replace(one, dim=found.pop())

    def _reduced(
        self, value: fx.Node, given: Mapping[fx.Node, _Chosen], dims: Sequence[int], is_sum: bool, keep: bool = False
    ) -> fx.Node:
        """The sum or mean over what is chosen, and over other dimensions."""
        ndim = value.meta["val"].ndim
        behind, *others = {other.meta["val"].ndim - one.dim for other, one in given.items()}
        if others:
            raise _Unknown
        one = replace(next(iter(given.values())), dim=ndim - behind)
        value = self._if_chosen(one, self._cast(value, wide=True), 0)
        total = self._make(aten.sum.dim_IntList, value, list(dims), keep)
        if is_sum:
            return self._cast(total)
        number = self._make(aten.sum.default, one.flat)
        sizes = shape_nodes(self.graph, value)
        for dim in {dim % ndim for dim in dims or range(ndim)} - {one.dim}:
            number = self._make(aten.mul.Tensor, number, sizes[dim])
        return self._cast(self._make(aten.div.Tensor, total, number))

    def _put(self, node: fx.Node, given: Mapping[fx.Node, _Chosen]) -> fx.Node:
        """`index_put` and `masked_scatter`."""
        into, indices, value, *adds = node.args
        indices = indices if isinstance(indices, list | tuple) else [indices]
        if (picked := _picked(indices, into, given)) and not (adds and adds[0]):
            return self._put_picked(into, value, *picked)
        at, mask, dims = _indexed(indices, {key: one for key, one in given.items() if key is not value})
        one, ndim = given.get(value), mask.meta["val"].ndim  # type: ignore[arg-type]
        if one is None or into in given or one.dim != at or dims != [*range(ndim)] or not alike(one.mask, mask):
            raise _Unknown
        whole, below = self.new[value], into.meta["val"].shape  # type: ignore[index, union-attr]
        in_rows = _name(node) == "masked_scatter" and ndim < len(below)  # it repeats the mask for leading dimensions
        fits = whole.meta["val"].ndim == len(below) - ndim + 1 and not in_rows
        if not fits or not alike_sizes(mask.meta["val"].shape, below[at : at + ndim]):
            raise _Unknown
        sizes = shape_nodes(self.graph, whole)
        put = self._make(aten.reshape.default, whole, [*sizes[:at], *shape_nodes(self.graph, mask), *sizes[at + 1 :]])
        put = self._make(aten.add.Tensor, into, put) if adds and adds[0] else put
        return self._cast(self._make(aten.where.self, self._trailing(mask, len(below) - at - ndim), put, into))

    def _column(self, numbers: fx.Node, source: Any) -> fx.Node:
        """Numbers of entries of the last dimension, of all places, 0 where none is chosen, in one column."""
        filled = self._filled(self.chosen[numbers], self.new[numbers], 0)
        from_end = self._make(aten.add.Tensor, filled, source.meta["val"].shape[-1])
        filled = self._make(aten.where.self, self._make(aten.lt.Scalar, filled, 0), from_end, filled)
        return self._make(aten.unsqueeze.default, filled, 1)

    def _put_picked(self, into: Any, value: Any, mask: fx.Node, numbers: fx.Node) -> fx.Node:
        """`into[mask, numbers] = value`, of what the mask chooses or one number."""
        if into in self.chosen or (value.meta["val"].ndim and value not in self.chosen):
            raise _Unknown
        shape = [*shape_nodes(self.graph, mask), 1]
        at = self._make(aten.reshape.default, self._column(numbers, into), shape)
        value = self._make(aten.reshape.default, self.new[value], shape) if value in self.chosen else value
        kept = self._make(aten.gather.default, into, -1, at)
        value = self._make(aten.where.self, self._trailing(mask, 1), value, kept)
        return self._make(aten.scatter.src, into, -1, at, self._cast(value))

    def _add(self, node: fx.Node, given: Mapping[fx.Node, _Chosen]) -> fx.Node:
        into, dim, rows, value, *more = node.args
        one, row = given.get(value), given.get(rows)  # type: ignore[arg-type]
        if one is None or row is None or row.place is None or one.place is not None or more or node.kwargs:
            raise _Unknown
        shape, below = one.mask.meta["val"].shape, into.meta["val"].shape  # type: ignore[union-attr]
        dim = cast(int, dim) % len(below)
        if into in given or one.dim != dim or not alike_sizes([shape[row.place]], [below[dim]]):
            raise _Unknown
        added = self._if_chosen(one, self.new[value], 0)  # type: ignore[index]
        sizes = shape_nodes(self.graph, added)
        whole = [*sizes[:dim], *shape_nodes(self.graph, one.mask), *sizes[dim + 1 :]]
        added = self._make(aten.reshape.default, added, whole)
        if others := [dim + other for other in range(len(shape)) if other != row.place]:
            added = self._make(aten.sum.dim_IntList, added, others)
        return self._cast(self._make(aten.add.Tensor, into, added))

    def _entropy(self, node: fx.Node, given: Mapping[fx.Node, _Chosen]) -> fx.Node:
        """Places that are not chosen are those to ignore."""
        (logits, target, weight, reduction, ignored, *smoothing), _ = _with(node)
        if logits not in given or target not in given or target.meta["val"].ndim != 1:
            raise _Unknown
        labels = self._if_chosen(given[target], self.new[target], ignored)
        return self._again((self.new[logits], labels, weight, reduction, ignored, *smoothing), {})

    def _make(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new node, marked as the one that it is made for, in no autocast."""
        made = self.graph.call_function(target, args, kwargs)
        like = next(tensor for one in made.all_input_nodes for tensor in private.tensors_in(one.meta["val"]))
        marks = {key: value for key, value in self.node.meta.items() if key != "autocast"}
        try:
            made.meta = {**marks, "val": private.fake_result(target, args, kwargs, like)}
        except RuntimeError as error:  # of what holds of numbers alone, or of fewer places
            self.graph.erase_node(made)
            raise _Unknown from error
        return made

    def _again(self, args: Any, kwargs: Any) -> fx.Node:
        """The node's operation, in its autocast."""
        target = aten.reshape.default if self.node.target is aten.view.default else self.node.target  # other strides
        made = self._make(target, *args, **kwargs)
        pairs = zip(private.tensors_in(self.node.meta["val"]), private.tensors_in(made.meta["val"]), strict=True)
        cast = iter([new.to(old.dtype) for old, new in pairs])
        value = pytree.tree_map_only(torch.Tensor, lambda one: next(cast), made.meta["val"])
        made.meta = {**self.node.meta, "val": value}
        return made

    def _cast(self, value: fx.Node, wide: bool = False) -> fx.Node:
        """A value in the type of the node's result, or in that of its sums."""
        kind = self.node.meta["val"].dtype
        kind = torch.float32 if wide and kind in LOW else kind
        return value if value.meta["val"].dtype == kind else self._make(aten.to.dtype, value, kind)


_ENDS = {
    "index_put": _Rewriter._put,
    "masked_scatter": _Rewriter._put,
    "index_add": _Rewriter._add,
    **dict.fromkeys(_CLASS_LOSSES, _Rewriter._entropy),
}


def _name(node: fx.Node) -> str:
    return private.packet_name(node.target) or str(getattr(node.target, "__name__", ""))


def _with(node: fx.Node, **changed: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """All arguments, those by place and in order, and by name, some of them changed."""
    if not isinstance(node.target, torch._ops.OpOverload) or not (changed or _name(node) in _ENDS):
        return node.args, node.kwargs
    given = private.arguments(node) | changed
    found = [(one, given.get(one.name, one.default_value)) for one in node.target._schema.arguments]
    by_name = {one.name: value for one, value in found if one.kwarg_only}
    return [value for one, value in found if not one.kwarg_only], by_name


def _is_of_values(node: fx.Node) -> bool:
    return private.sizes.depends_on_values(node.meta.get("val"))


def _indexed(indices: Sequence[Any], given: Mapping[fx.Node, _Chosen]) -> tuple[int, fx.Node, list[int]]:
    """Where indices begin, the one mask that says what they choose, and the dimensions of it that they are of."""
    at = next(place for place, one in enumerate(indices) if one is not None)
    used = [one for one in indices if one is not None]
    if len(used) == 1 and used[0] not in given and used[0].meta["val"].dtype == torch.bool:
        return at, used[0], [*range(used[0].meta["val"].ndim)]
    places = [given[one] for one in used if one in given]
    dims = [one.place for one in places if one.place is not None]
    together = list(indices[at : at + len(used)]) == used
    if not (len({one.flat for one in places}) == 1 and len(set(dims)) == len(used) and together):
        raise _Unknown
    return at, places[0].mask, dims


def _picked(indices: Any, source: Any, given: Mapping[fx.Node, _Chosen]) -> tuple[fx.Node, fx.Node] | None:
    """Of `source[mask, numbers]`, a number of the last dimension for all that the mask chooses: both."""
    if len(indices) != 2 or indices[1] not in given or indices[0] is None:
        return None
    (mask, numbers), one = indices, given[indices[1]]
    shape, kind = mask.meta["val"].shape, mask.meta["val"].dtype
    fits = kind == torch.bool and one.place is None and numbers.meta["val"].ndim == 1 and alike(one.mask, mask)
    below = source.meta["val"].shape
    return (mask, numbers) if fits and len(below) == len(shape) + 1 and alike_sizes(shape, below[:-1]) else None


def _keeps_apart(node: fx.Node, given: Mapping[fx.Node, _Chosen]) -> bool:
    """Whether an operation that is not elementwise computes every place by itself."""
    name, first = _name(node), node.args[0]
    if name in _MOVED | _RESHAPED:
        return name != "squeeze" or len(node.args) > 1
    if name in _ALONG:
        return not _acts(node, given)
    if name == "gather" or name in _CLASS_LOSSES:
        both = list(node.args[:3:2] if name == "gather" else node.args[:2])
        rows = name == "gather" or node.args[1].meta["val"].ndim == 1  # type: ignore[union-attr]
        return rows and all(one in given for one in both) and not (name == "gather" and _acts(node, given))
    if name in ("embedding", "index"):  # of a table that is not chosen from
        return first not in given and len(node.all_input_nodes) == 2
    if name not in _LAST or first not in given or len(given) > 1 or private.argument(node, "eps") == 0:
        return False
    return bool(first.meta["val"].ndim - given[first].dim > _LAST[name](node.args[1]))  # type: ignore[union-attr, index]


def _dims(node: fx.Node) -> list[int] | None:
    """The dimensions that an operation is along, None for all."""
    defaults = {one.name: one.default_value for one in node.target._schema.arguments}  # type: ignore[union-attr]
    given = defaults | private.arguments(node)
    found = given.get("dim", given.get("dims"))
    return [found] if isinstance(found, int) else list(found) if found else None


def _acts(node: fx.Node, given: Mapping[fx.Node, _Chosen]) -> bool:
    """Whether an operation along dimensions is along that of the places."""
    dims = _dims(node)
    return bool(given) and (
        dims is None or any(one.dim in {dim % v.meta["val"].ndim for dim in dims} for v, one in given.items())
    )
