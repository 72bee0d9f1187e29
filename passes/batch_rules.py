"""How an operation moves the samples of a batch: a few general rules over ATen's operations.

Most operations leave each sample's part where it is, up to a permutation of dimensions. Then the result's layout is
read off its shape: the one dimension that has the batch in its size. A rule only has to show that no two samples meet.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from passes.batch_layout import Call, Layout, Mixed, Result, State, batch_dims, dimension, factor, splits

Rule = Callable[[Call], list[Result]]
Labels = list[Any]


def moved(call: Call, layout: Layout) -> list[Result]:
    """The result of an operation that keeps samples apart and in order, wherever its shape says the batch went."""
    value = call.node.meta["val"]
    if isinstance(value, list | tuple):
        return [tuple(State(_placed(item, layout)) for item in value)]
    return [State(_placed(value, layout))]


def _placed(value: torch.Tensor, layout: Layout) -> Layout:
    dims = batch_dims(value)
    if len(dims) != 1:
        raise Mixed(f"its result has the batch in {len(dims)} dimensions, so it combines pairs of samples")
    ((dim, k),) = dims
    if k != layout.factor:
        raise Mixed(f"its result has {k} entries a sample in dimension {dim}, where {layout.factor} were expected")
    return layout.at(dim)


def no_batch_numbers(call: Call, *allowed: str) -> None:
    if names := call.batch_numbers(allowed):
        raise Mixed(
            f"its argument {names[0]!r} is computed from the batch size",
            "divide by the batch size only after the sum over samples, or take the mean",
        )


def broadcast(shapes: Sequence[tuple[Sequence[Any], Layout | None]]) -> Layout:
    """The layout, counted from the end (negative dim), of values combined elementwise."""
    places = {layout.at(layout.dim - len(shape)) for shape, layout in shapes if layout is not None}
    if len(places) != 1:
        raise Mixed("its operands hold the batch in different places, so it combines different samples")
    (place,) = places
    for shape, layout in shapes:
        if layout is None and len(shape) >= -place.dim and shape[place.dim] != 1:
            raise Mixed("it combines the batch with another dimension of the same size")
    return place


def shapes_of(call: Call, nodes: Sequence[fx.Node]) -> list[tuple[Sequence[Any], Layout | None]]:
    return [(n.meta["val"].shape, call.layout(n)) for n in nodes]


def pointwise(call: Call) -> list[Result]:
    no_batch_numbers(call)
    return moved(call, broadcast(shapes_of(call, call.operands)))


def aligned(call: Call, nodes: Sequence[fx.Node]) -> Layout:
    """The one layout of operands that are combined without broadcasting."""
    layouts = {call.layout(n) for n in nodes if n.meta["val"].ndim > 0}
    if len(layouts) != 1 or None in layouts or len({n.meta["val"].ndim for n in nodes} - {0}) != 1:
        raise Mixed("its operands hold the batch in different places, so it combines different samples")
    (layout,) = layouts
    assert layout is not None
    return layout


def acted_dims(call: Call, ndim: int) -> set[int]:
    given = next((call.arguments[n] for n in ("dim", "dims", "dimension") if call.arguments.get(n) is not None), None)
    if given is None or given == []:
        return set(range(ndim))
    return {dimension(d, ndim) for d in (given if isinstance(given, list | tuple) else [given])}


def along(call: Call) -> list[Result]:
    """An operation that acts along the dimensions it names."""
    no_batch_numbers(call)
    layout = aligned(call, call.operands)
    ndim = max(n.meta["val"].ndim for n in call.operands)
    if layout.dim in acted_dims(call, ndim):
        raise Mixed(f"it acts along dimension {layout.dim}, the batch")
    return moved(call, layout)


def stack(call: Call) -> list[Result]:
    return moved(call, aligned(call, call.operands))


def meshgrid(call: Call) -> list[Result]:
    (node,) = _only(call.batched())
    return moved(call, call.layout(node) or Layout(0))


def _only(nodes: list[fx.Node]) -> list[fx.Node]:
    if len(nodes) != 1:
        raise Mixed("it combines pairs of samples")
    return nodes


def cast(call: Call) -> list[Result]:
    """Another type or device; a second operand only names the type."""
    layout = call.layout(call.operands[0])
    return [State()] if layout is None else moved(call, layout)


def structural(call: Call) -> list[Result]:
    """Permutations of dimensions."""
    (node,) = call.operands
    layout = call.layout(node)
    assert layout is not None
    return moved(call, layout)


def trailing(count: Callable[[Call, int], int], shared: Sequence[str] = ()) -> Rule:
    """An operation on the last `count` dimensions; `shared` operands hold the batch as the first operand does."""

    def rule(call: Call) -> list[Result]:
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


def batch_norm(call: Call) -> list[Result]:
    if call.arguments["training"]:
        raise Mixed("batch normalisation in training uses statistics of the whole batch", "use GroupNorm, or .eval()")
    return trailing(lambda call, ndim: ndim - 1)(call)


def view(call: Call) -> list[Result]:
    """Same elements in the same order: the batch goes where as many entries lie before and after it."""
    node = call.operands[0]
    layout, shape = call.layout(node), node.meta["val"].shape
    if layout is None:
        raise Mixed("it gives a batch dimension to a value without one")
    before = math.prod(int(s) for s in shape[: layout.dim]) * layout.outer
    after = math.prod(int(s) for s in shape[layout.dim + 1 :]) * layout.inner
    out = call.node.meta["val"].shape
    ((dim, k),) = _one_batch_dim(call.node.meta["val"])
    outer, rest = divmod(before, math.prod(int(s) for s in out[:dim]))
    inner, rest2 = divmod(after, math.prod(int(s) for s in out[dim + 1 :]))
    if rest or rest2 or outer * inner != k:
        raise Mixed("its result puts parts of several samples into one")
    return [State(Layout(dim, outer, inner))]


def _one_batch_dim(value: torch.Tensor) -> list[tuple[int, int]]:
    dims = batch_dims(value)
    if len(dims) != 1:
        raise Mixed(f"its result has the batch in {len(dims)} dimensions")
    return dims


def uniform(call: Call) -> list[Result]:
    """A value that is constant along its batch dimension: any layout of it is right."""
    ((dim, k),) = _one_batch_dim(call.node.meta["val"])
    return [State(layout) for layout in splits(dim, k)]


def factory(call: Call) -> list[Result]:
    no_batch_numbers(call, "size")
    return uniform(call) if batch_dims(call.node.meta["val"]) else [State()]


def expand(call: Call) -> list[Result]:
    node = call.operands[0]
    layout, value = call.layout(node), node.meta["val"]
    if layout is None:
        return uniform(call)
    ((dim, _),) = _one_batch_dim(call.node.meta["val"])
    if dim - call.node.meta["val"].ndim != layout.dim - value.ndim:
        raise Mixed("it expands another dimension to the batch size")
    return moved(call, layout)


def broadcast_tensors(call: Call) -> list[Result]:
    return moved(call, broadcast(shapes_of(call, call.operands)))


def repeat(call: Call) -> list[Result]:
    """`repeat` and `tile`: entry j of a dimension of size n, repeated r times, is at j, n + j, 2n + j, ..."""
    node, out = call.operands[0], call.node.meta["val"]
    layout, shape = call.layout(node), [1] * (out.ndim - node.meta["val"].ndim) + list(node.meta["val"].shape)
    ((dim, k),) = _one_batch_dim(out)
    if layout is None:
        size = int(shape[dim])
        return [State(Layout(dim, s.outer, s.inner * size)) for s in splits(dim, k // size)]
    if layout.dim + out.ndim - node.meta["val"].ndim != dim:
        raise Mixed("it repeats another dimension by the batch size")
    return [State(Layout(dim, k // layout.inner, layout.inner))]


def repeat_interleave(call: Call) -> list[Result]:
    """Entry j repeated r times is at j*r, ..., j*r + r - 1."""
    node, out = call.operands[0], call.node.meta["val"]
    layout, dim = call.layout(node), call.arguments["dim"]
    if len(call.operands) != 1 or (dim is None and node.meta["val"].ndim != 1):
        raise Mixed("it repeats entries by numbers in a tensor, or of a flattened value", "name dim and a number")
    ((at, k),) = _one_batch_dim(out)
    if layout is None:
        size = int(node.meta["val"].shape[at])
        return [State(Layout(at, size * s.outer, s.inner)) for s in splits(at, k // size)]
    if layout.dim != at:
        raise Mixed("it repeats another dimension by the batch size")
    return [State(Layout(at, layout.outer, k // layout.outer))]


def cat(call: Call) -> list[Result]:
    no_batch_numbers(call)
    nodes = [n for n in call.operands if list(n.meta["val"].shape) != [0]]
    dim = dimension(call.arguments["dim"], nodes[0].meta["val"].ndim)
    layouts = [call.layout(n) for n in nodes]
    if not all(layout is not None and layout.dim == dim for layout in layouts):
        layout = aligned(call, nodes)
        return moved(call, layout)
    if len({layout.inner for layout in layouts if layout}) != 1:
        raise Mixed("it joins values that hold the batch in different orders")
    outer = sum(layout.outer for layout in layouts if layout)
    return moved(call, Layout(dim, outer, layouts[0].inner if layouts[0] else 1))


def pieces(call: Call) -> list[Result]:
    """`split`, `chunk`, ...: along the batch, pieces must be whole copies of it."""
    (node,) = call.operands
    layout, dim = call.layout(node), call.arguments.get("dim", 0)
    dim = dimension(dim, node.meta["val"].ndim)
    if layout is None or layout.dim != dim:
        return along(call)
    results = []
    for piece in call.node.meta["val"]:
        sizes = [k for d, k in batch_dims(piece) if d == dim]
        results.append(State(_whole_copies(layout, 0, sizes[0] if sizes else 0)))
    return [tuple(results)]


def cut(call: Call) -> list[Result]:
    """`slice` and `narrow`."""
    (node,) = call.operands
    layout, dim = call.layout(node), dimension(call.arguments["dim"], node.meta["val"].ndim)
    if layout is None or layout.dim != dim:
        return along(call)
    start = factor(call.number("start") or 0)
    if start is None or (start == 0 and call.number("start") not in (0, None)) or call.arguments.get("step", 1) != 1:
        raise Mixed("it picks some samples of the batch")
    sizes = [k for d, k in batch_dims(call.node.meta["val"]) if d == dim]
    return [State(_whole_copies(layout, start, sizes[0] if sizes else 0))]


def _whole_copies(layout: Layout, start: int, size: int) -> Layout:
    if size == 0 or size % layout.inner or start % layout.inner:
        raise Mixed("it picks some samples of the batch")
    return Layout(layout.dim, size // layout.inner, layout.inner)


def _matrix_labels(a: int, b: int) -> tuple[Labels, Labels, Labels]:
    lead_a: Labels = [("lead", j) for j in range(a - 2, 0, -1)]
    lead_b: Labels = [("lead", j) for j in range(b - 2, 0, -1)]
    first = [*lead_a, "n", "k"] if a > 1 else ["k"]
    second = [*lead_b, "k", "m"] if b > 1 else ["k"]
    out = max(lead_a, lead_b, key=len) + (["n"] if a > 1 else []) + (["m"] if b > 1 else [])
    return first, second, out


def contract(call: Call, terms: Sequence[tuple[fx.Node, Labels]], out: Labels) -> Layout | None:
    """The layout, counted from the end, of a product that sums over the labels not in `out`."""
    places = {(labels[at.dim], at.outer, at.inner) for node, labels in terms if (at := call.layout(node)) is not None}
    if not places:
        return None
    label, outer, inner = next(iter(places))
    if len(places) != 1 or label not in out:
        raise Mixed("it multiplies samples of the batch with one another")
    for node, labels in terms:
        if call.layout(node) is None and label in labels and node.meta["val"].shape[labels.index(label)] != 1:
            raise Mixed("it combines the batch with another dimension of the same size")
    return Layout(out.index(label) - len(out), outer, inner)


def matmul(call: Call) -> list[Result]:
    no_batch_numbers(call)
    *bias, a, b = call.operands
    first, second, out = _matrix_labels(a.meta["val"].ndim, b.meta["val"].ndim)
    layout = contract(call, [(a, first), (b, second)], out)
    shape = [2] * len(out)
    return moved(call, broadcast([*shapes_of(call, bias), *([(shape, layout.at(layout.dim + len(shape)))] if layout else [])]))


def einsum(call: Call) -> list[Result]:
    equation, nodes = call.arguments["equation"].replace(" ", ""), call.operands
    inputs, arrow, output = equation.partition("->")
    terms = inputs.split(",")
    if not arrow:
        letters = sorted(c for c in set(inputs) - set(",.") if inputs.count(c) == 1)
        output = ("..." if "..." in inputs else "") + "".join(letters)
    labels = [_einsum_labels(t, n.meta["val"].ndim - len(t.replace("...", ""))) for t, n in zip(terms, nodes, strict=True)]
    dots = max((sum(isinstance(x, tuple) for x in one) for one in labels), default=0)
    layout = contract(call, list(zip(nodes, labels, strict=True)), _einsum_labels(output, dots))
    assert layout is not None
    return moved(call, layout)


def _einsum_labels(term: str, dots: int) -> Labels:
    head, found, tail = term.partition("...")
    middle: Labels = [("lead", j) for j in range(dots, 0, -1)] if found else []
    return [*head, *middle, *tail]


def attention(call: Call) -> list[Result]:
    no_batch_numbers(call)
    query, key, value, *mask = call.operands
    lead: Labels = [("lead", j) for j in range(max(n.meta["val"].ndim for n in call.operands) - 2, 0, -1)]
    names = ["le", "se", "sv", "ls"]
    terms = [(n, [*lead, *two][-n.meta["val"].ndim :]) for n, two in zip([query, key, value, *mask], names, strict=False)]
    layout = contract(call, terms, [*lead, "v"])
    assert layout is not None
    if layout.dim == -1:
        raise Mixed("it attends over the batch")
    return moved(call, layout)


def embedding(call: Call) -> list[Result]:
    if call.arguments["scale_grad_by_freq"]:
        raise Mixed("scale_grad_by_freq scales gradients by counts over the batch", "turn scale_grad_by_freq off")
    weight, indices = call.operands
    layout = call.layout(indices)
    if call.layout(weight) is not None or layout is None:
        raise Mixed("it looks samples up by number")
    return moved(call, layout)


def gather(call: Call) -> list[Result]:
    """A lookup along `dim`: entry by entry, unless the table is the same for every sample."""
    table, index = call.operands
    layout, dim = call.layout(index), dimension(call.arguments["dim"], max(table.meta["val"].ndim, 1))
    if call.layout(table) is None and layout is not None and layout.dim == dim:
        return moved(call, layout)
    return along(call)


def index_select(call: Call) -> list[Result]:
    table, index = call.operands
    layout = call.layout(table)
    if layout is None:
        return moved(call, broadcast(shapes_of(call, [index])))
    if call.layout(index) is not None or layout.dim in acted_dims(call, table.meta["val"].ndim):
        raise Mixed("it looks samples up by number")
    return moved(call, layout)


def index(call: Call) -> list[Result]:
    """Advanced indexing: of a table by each sample's numbers, of each sample by fixed numbers, or both by arange(B)."""
    table, indices = call.operands[0], call.arguments["indices"]
    layout, used = call.layout(table), [n for n in indices if n is not None]
    if any(n.meta["val"].dtype in (torch.bool, torch.uint8) for n in used):
        raise Mixed("the size of its result depends on a mask's values", "use torch.where")
    at = indices[layout.dim] if layout is not None and layout.dim < len(indices) else None
    positions = [n for n in call.operands if call.states[n].form == "position"]  # type: ignore[union-attr]
    if positions != ([at] if at is not None else []) or (at is not None and layout is not None and layout.factor != 1):
        raise Mixed("it looks samples up by number")
    if layout is None or at is not None:
        return moved(call, broadcast(shapes_of(call, used)))
    return moved(call, layout)


def index_put(call: Call) -> list[Result]:
    table, indices = next(call.tensors("self")), call.arguments["indices"]
    (values,) = call.tensors("values")
    layout, used = call.layout(table), [n for n in indices if n is not None]
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


def recurrent(call: Call) -> list[Result]:
    if "batch_first" not in call.arguments:
        raise Mixed("it runs over a packed batch of sequences", "pad the sequences")
    data, *_ = call.operands
    layout, hidden = call.layout(data), list(call.tensors("hx"))
    if layout is None or layout.dim != (0 if call.arguments["batch_first"] else 1) or data.meta["val"].ndim != 3:
        raise Mixed("its sequence runs over the batch")
    if any(call.layout(h) != layout.at(1) for h in hidden) or call.batched(list(call.tensors("params"))):
        raise Mixed("its hidden state holds the batch elsewhere")
    return moved(call, layout)


def arange(call: Call) -> list[Result]:
    """The numbers of the samples: drawn up on the whole batch, or counted within the micro-batch to index it."""
    numbers = {name: call.number(name) for name in ("start", "end", "step")}
    value = call.node.meta["val"]
    if numbers["start"] in (None, 0) and numbers["step"] in (None, 1) and [(0, 1)] == batch_dims(value):
        return [State(Layout(0), "position")]
    raise Mixed("it counts over the batch")


def along_or_numbers(call: Call) -> list[Result]:
    """`bucketize`, `searchsorted`: elementwise in the values, whole in the boundaries."""
    values = next(call.tensors("self"), None)
    layout = call.layout(values) if values is not None else None
    if layout is None or call.batched(list(call.tensors("boundaries", "sorted_sequence"))):
        raise Mixed("its boundaries differ from sample to sample")
    return moved(call, layout)


def _names(text: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(text.split(), rule)


def _spatial(call: Call, ndim: int) -> int:
    return int(next(c for c in call.name if c in "123"))


def _pad_count(call: Call, ndim: int) -> int:
    if call.name.startswith(("reflection", "replication", "_pad_circular")):
        return len(call.arguments.get("padding") or call.arguments["pad"]) // 2
    pad = call.number("pad")
    return max((i // 2 + 1 for i, p in enumerate(pad) if p != 0), default=0)


def _normalized(call: Call, ndim: int) -> int:
    return len(call.arguments["normalized_shape"])


# Elementwise operations that ATen does not tag as such.
_ELEMENTWISE = (
    "contiguous clone detach alias alias_copy lift lift_fresh lift_fresh_copy zeros_like ones_like full_like empty_like "
    "fill masked_fill absolute arccos arccosh arcsin arcsinh arctan arctan2 arctanh divide multiply subtract negative fix "
    "floor_divide greater greater_equal less less_equal not_equal hardswish log_sigmoid complex polar real imag conj "
    "resolve_conj resolve_neg float_power square copy isclose isreal special_expit"
)

RULES: dict[str, Rule] = {
    **_names(_ELEMENTWISE, pointwise),
    **_names("to _to_copy type_as", cast),
    **_names("reshape view _unsafe_view flatten unflatten squeeze unsqueeze view_as reshape_as ravel", view),
    **_names("permute transpose t numpy_T mT mH adjoint movedim moveaxis swapaxes swapdims", structural),
    **_names("zeros ones full empty new_zeros new_ones new_full new_empty", factory),
    **_names("expand expand_as broadcast_to", expand),
    **_names("repeat tile", repeat),
    **_names("split split_with_sizes chunk tensor_split unsafe_split unsafe_chunk unsafe_split_with_sizes", pieces),
    **_names("slice narrow", cut),
    **_names("matmul mm bmm mv dot addmm baddbmm addmv", matmul),
    **_names(
        "softmax log_softmax _softmax _log_softmax cumsum cumprod cummax cummin logcumsumexp sort topk argsort kthvalue "
        "median nanmedian mode glu flip roll amax amin aminmax max min argmax argmin prod var std var_mean std_mean norm "
        "linalg_vector_norm frobenius_norm linalg_norm logsumexp all any count_nonzero nansum nanmean select unbind "
        "scatter scatter_add scatter_reduce select_scatter slice_scatter diff unfold linalg_cross fft_fft fft_ifft "
        "fft_rfft fft_irfft fft_hfft fft_ihfft fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_fft2 fft_ifft2 fft_rfft2 "
        "fft_irfft2 fft_fftshift fft_ifftshift cosine_similarity",
        along,
    ),
    **_names(
        "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d "
        "upsample_trilinear3d upsample_bicubic2d _upsample_nearest_exact1d _upsample_nearest_exact2d "
        "_upsample_nearest_exact3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa avg_pool1d avg_pool2d avg_pool3d "
        "max_pool1d max_pool2d max_pool3d max_pool2d_with_indices max_pool3d_with_indices adaptive_avg_pool1d "
        "adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d",
        trailing(_spatial),
    ),
    **_names(
        "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d",
        trailing(lambda call, ndim: _spatial(call, ndim) + 1),
    ),
    **_names(
        "group_norm instance_norm prelu channel_shuffle local_response_norm im2col col2im convolution",
        trailing(lambda call, ndim: ndim - 1),
    ),
    **_names("grid_sampler grid_sampler_2d grid_sampler_3d", trailing(lambda call, ndim: ndim - 1, ("grid",))),
    **_names(
        "pad constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d "
        "replication_pad3d _pad_circular",
        trailing(_pad_count),
    ),
    **_names("layer_norm rms_norm", trailing(_normalized)),
    **_names("pixel_shuffle pixel_unshuffle", trailing(lambda call, ndim: 3)),
    **_names(
        "tril triu linalg_inv inverse linalg_det det linalg_cholesky cholesky linalg_matrix_exp linalg_qr trace "
        "linalg_pinv matrix_exp",
        trailing(lambda call, ndim: 2),
    ),
    **_names("linear view_as_complex view_as_real", trailing(lambda call, ndim: 1)),
    **_names("one_hot", trailing(lambda call, ndim: 0)),
    **_names("lstm gru rnn_tanh rnn_relu", recurrent),
    **_names("bucketize searchsorted", along_or_numbers),
    "arange": arange,
    "batch_norm": batch_norm,
    "broadcast_tensors": broadcast_tensors,
    "cat": cat,
    "concat": cat,
    "einsum": einsum,
    "embedding": embedding,
    "gather": gather,
    "index": index,
    "index_put": index_put,
    "index_select": index_select,
    "meshgrid": meshgrid,
    "repeat_interleave": repeat_interleave,
    "scaled_dot_product_attention": attention,
    "stack": stack,
}
