"""Batch analysis: what micro-batches may run, what they must not, and that their parts are those of the whole batch.

Every accepted step is run: each value that a micro-batch computes must be the slice, which its layout names, of what
the whole batch computes, and the losses must add up.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxpipe.capture import Capture, capture
from fxpipe.capture.inputs import describe
from fxpipe.capture.model_call import ModelCall
from fxpipe.capture.sizes import concrete
from fxpipe.errors import CompileError
from passes.batch import BatchPlan, analyse
from passes.batch.follow import Follow
from passes.batch.layout import BatchLayout, Mixed
from tests.models import PEER_CASES, ZOO

TOLERANCE = 1e-12


class Step(nn.Module):
    """x [B, 4, 6], y [B, 4, 6], w [B] positive, ids [B, 4] below 10; `loss` is the text of a function of them."""

    def __init__(self, loss: str) -> None:
        super().__init__()
        self.loss = loss
        self.linear = nn.Linear(6, 6)
        self.table = nn.Embedding(10, 6)
        self.pool = nn.Parameter(torch.randn(1, 2, 6))
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.group = nn.GroupNorm(2, 4)
        self.norm = nn.BatchNorm1d(4).eval()
        self.register_buffer("alphas", torch.linspace(0.9, 0.1, 10))
        self.register_buffer("class_weights", torch.linspace(1, 2, 6))

    def forward(self, x: Tensor, y: Tensor, w: Tensor, ids: Tensor) -> Tensor:
        names = {**WORDS, "m": self, "x": x, "y": y, "w": w, "ids": ids}
        return eval(self.loss, names)  # type: ignore[no-any-return]

    def example_inputs(self, batch_size: int) -> tuple[Tensor, ...]:
        shape = (batch_size, 4)
        x, y = torch.randn(2, *shape, 6).double()
        return x, y, torch.rand(batch_size).double() + 0.1, torch.randint(10, shape)


def captured(model: nn.Module, batch_size: int = 3) -> tuple[Capture, BatchPlan]:
    example = model.example_inputs(batch_size)  # type: ignore[operator]
    args, kwargs = ((), example) if isinstance(example, dict) else (example, {})
    result = capture(ModelCall(model, *describe(model, args, kwargs, None)))
    return result, analyse(result, 2)


def step_of(loss: str) -> nn.Module:
    torch.manual_seed(0)
    return Step(loss).double()


def sliced(value: Any, layout: Any, batch_size: int, samples: slice) -> Any:
    if isinstance(layout, tuple):
        return tuple(sliced(v, part, batch_size, samples) for v, part in zip(value, layout, strict=True))
    if layout is None:
        return value
    parts = value.unflatten(layout.dim, (layout.outer, batch_size, layout.inner))
    index = (slice(None),) * (layout.dim + 1) + (samples,)
    return parts[index].flatten(layout.dim, layout.dim + 2)


def evaluate(cap: Capture, values: dict[str, Any], wanted: Callable[[str], bool], batch_size: int) -> dict[str, Any]:
    """All wanted nodes' values, sizes being functions of the batch size."""
    for node in cap.graph.nodes:
        if node.op != "call_function" or node.name in values or not wanted(node.name):
            continue
        if isinstance(node.meta["val"], torch.SymInt | torch.SymFloat | torch.SymBool):
            values[node.name] = concrete(node.meta["val"], batch_size)
            continue
        args, kwargs = fx.node.map_aggregate(
            (node.args, dict(node.kwargs)),
            lambda value: values[value.name] if isinstance(value, fx.Node) else concrete(value, batch_size),
        )
        values[node.name] = node.target(*args, **kwargs)
    return values


def whole_values(cap: Capture, model: nn.Module, batch_size: int) -> dict[str, Any]:
    state = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    example = model.example_inputs(batch_size)  # type: ignore[operator]
    args, kwargs = ((), example) if isinstance(example, dict) else (example, {})
    inputs, _ = cap.inputs.bind(args, kwargs)
    torch.manual_seed(1)
    given: dict[str, Any] = {}
    for node in cap.graph.find_nodes(op="placeholder"):
        if node.meta["kind"] == "input":
            given[node.name] = inputs[node.meta["input"]]
        elif node.meta["kind"] == "draw":
            given[node.name] = cap.draws[node.name].make(batch_size, torch.device("cpu"))
        elif node.meta["kind"] == "constant":
            given[node.name] = cap.constants[node.name]
        else:
            given[node.name] = state[cap.tensors[node.name]].detach()
    return evaluate(cap, given, lambda name: True, batch_size)


def check_micro_batches(
    cap: Capture, plan: BatchPlan, model: nn.Module, sizes: Sequence[int], values: bool = True
) -> None:
    """Run micro-batches of `sizes`: losses add up, and with `values` each batched value is its slice of the whole's."""
    batch_size, start, total = sum(sizes), 0, 0.0
    whole = whole_values(cap, model, batch_size)
    for size in sizes:
        samples = slice(start, start + size)
        placeholders = {n.name for n in cap.graph.find_nodes(op="placeholder")}
        given = (placeholders | set(plan.whole_batch)) & set(plan.layouts)
        micro = {name: sliced(whole[name], plan.layouts[name], batch_size, samples) for name in given}
        micro = evaluate(cap, micro, plan.layouts.__contains__, size)
        total += float(micro[cap.result.name]) * (size / batch_size if plan.loss_scale == "mean" else 1)
        start += size
        for name, layout in plan.layouts.items() if values else ():
            if isinstance(layout, BatchLayout) or (isinstance(layout, tuple) and None not in layout):
                expected = sliced(whole[name], layout, batch_size, samples)
                torch.testing.assert_close(micro[name], expected, rtol=TOLERANCE, atol=TOLERANCE, msg=name)
    assert total == pytest.approx(float(whole[cap.result.name]), rel=TOLERANCE)


def scaled(m: "Step", x: Tensor) -> Tensor:
    return m.linear(x).square()


def take_rows(m: "Step", x: Tensor, ids: Tensor) -> Tensor:
    return m.linear(x)[torch.arange(x.shape[0]), ids.argmax(-1)]


def take_points(m: "Step", x: Tensor, ids: Tensor) -> Tensor:
    """As point clouds look their neighbours up."""
    near = ids[..., None] + torch.arange(3)
    rows = torch.arange(x.shape[0]).view(-1, 1, 1).repeat(1, *near.shape[1:])
    return m.linear(x)[rows, near % 4] + m.linear(x)[torch.arange(x.shape[0])[:, None].expand(-1, 4), ids % 4, None]


def own_rows(m: "Step", x: Tensor, near: Tensor, step: int = 4) -> Tensor:
    """As point clouds and graphs number the points of all samples."""
    points, first = m.linear(x).reshape(-1, 6), torch.arange(x.shape[0])[:, None] * step
    rows = (first[..., None] + near).flatten()
    ends = torch.stack([(torch.arange(4).repeat(3) + first).view(-1), (first + torch.arange(12) // 3 % 4).view(-1)])
    sums = points.new_zeros(points.shape).index_add(0, ends[0], points[ends[1]] - points.index_select(0, ends[0]))
    more = torch.zeros_like(points).scatter_add(0, rows[:, None].expand(-1, 6), points[rows, :].square())
    return sums * more + points[torch.arange(0, points.shape[0], 4).repeat_interleave(4) + 1]


def put_entries(m: "Step", x: Tensor, ids: Tensor) -> Tensor:
    h, rows = m.linear(x), torch.arange(x.shape[0])
    h[rows, ids[:, 0]] = x[:, 0]
    h = h.index_put((rows[:, None], ids[:, 1:3]), x[:, 2:] * 2, accumulate=True)
    h[rows, ids[:, 3], ids[:, 3]] = 0.5
    return h + h[rows[:, None], ids]


def doubled(m: "Step", x: Tensor) -> Tensor:
    first, second = m.linear(torch.cat([x, x + 1])).chunk(2)
    return first + 3 * (second - first)


def in_place(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:, 1] = x[:, 0]
    out[:, :, 2:4] = x[:, :, :2]
    return out


# What a loss may be written with.
WORDS = {
    "F": F,
    "torch": torch,
    "scaled": scaled,
    "take_rows": take_rows,
    "take_points": take_points,
    "doubled": doubled,
    "put_entries": put_entries,
    "own_rows": own_rows,
    "in_place": in_place,
}

# name: (loss, scale, number of values from the whole batch)
STEPS: dict[str, tuple[str, str, int]] = {
    "mse": ("F.mse_loss(m.linear(x), y)", "mean", 0),
    "sum": ("scaled(m, x).sum()", "sum", 0),
    "l1_sum": ('F.l1_loss(m.linear(x), y, reduction="sum")', "sum", 0),
    "huber_smooth": ("F.huber_loss(m.linear(x), y) + F.smooth_l1_loss(m.linear(x), y)", "mean", 0),
    "none_mean_sum": ('F.mse_loss(m.linear(x), y, reduction="none").mean((1, 2)).sum()', "sum", 0),
    "flatten_mean_mean": ("scaled(m, x).flatten(1).mean(1).mean()", "mean", 0),
    "weighted_mean": ("(w * scaled(m, x).mean((1, 2))).mean()", "mean", 0),
    "weighted_sum_over_batch": ("(w * scaled(m, x).mean((1, 2))).sum() / x.shape[0]", "mean", 0),
    "weights_normalised": ("(w * scaled(m, x).mean((1, 2))).sum() / w.sum()", "sum", 1),
    "weights_like": (
        "((h := scaled(m, x).mean(2)) * w[:, None]).sum() / torch.where(w[:, None] > 0, torch.ones_like(h), 0).sum()",
        "sum",
        1,
    ),
    "weights_as_others_are": (
        "((h := scaled(m, x)) * (k := (ids > 3).type_as(h)[..., None].expand_as(h))).sum()"
        " / (k.view_as(h) + torch.empty_like(h).fill_(1.0)).reshape_as(h).sum()",
        "sum",
        1,
    ),
    "counted_in_bins": (
        "((h := scaled(m, x).mean((1, 2))).new_zeros(4).index_add(0, ids[:, 0] % 4, h)"
        " / h.new_zeros(4).index_add(0, ids[:, 0] % 4, h.new_ones(h.shape)).clamp(min=1)).sum()",
        "sum",
        1,
    ),
    "weights_softmax": ("(w.softmax(0) * scaled(m, x).mean((1, 2))).sum()", "sum", 1),
    "mean_times_batch": ("scaled(m, x).mean() * x.shape[0]", "sum", 0),
    "divided_before_sum": ("(scaled(m, x) / x.shape[0]).sum()", "mean", 0),
    "times_inverse_batch": ("scaled(m, x).sum() * (1 / x.shape[0])", "mean", 0),
    "mean_over_batch_first": ("(scaled(m, x).mean(0) * 2).sum()", "mean", 0),
    "dot": ("w @ scaled(m, x).mean((1, 2))", "sum", 0),
    "regularised_mean": ("scaled(m, x).mean() + 0.1 * m.linear.weight.square().sum()", "mean", 0),
    "regularised_sum": ("scaled(m, x).sum() + m.linear.weight.square().sum()", "sum", 1),
    "sum_and_constants": ("1 - (scaled(m, x).sum() + 2) * 3", "sum", 2),
    "mean_plus_sum": ("scaled(m, x).mean() - 0.5 * scaled(m, y).sum()", "sum", 1),
    "sum_plus_target_term": ("scaled(m, x).sum() + y.sum()", "sum", 0),
    "stacked_terms": ("torch.stack([scaled(m, x).mean(), scaled(m, y).mean()]).sum()", "mean", 0),
    "no_batch": ("m.linear.weight.square().mean()", "mean", 0),
    "cross_entropy": ("F.cross_entropy(m.linear(x).flatten(0, 1), ids.flatten() % 6)", "sum", 1),
    "cross_entropy_ignored": ("F.cross_entropy(m.linear(x).mT, ids % 6, m.class_weights, ignore_index=2)", "sum", 1),
    "cross_entropy_soft": ("F.cross_entropy(m.linear(x).mT, y.softmax(-1).mT)", "mean", 0),
    "cross_entropy_none": ('F.cross_entropy(m.linear(x).mT, ids % 6, reduction="none").mean()', "mean", 0),
    "nll_plus_mse": ("F.nll_loss(m.linear(x).mT.log_softmax(1), ids % 6) + F.mse_loss(m.linear(y), y)", "sum", 2),
    "bce": ("F.binary_cross_entropy_with_logits(m.linear(x), y.sigmoid())", "mean", 0),
    "cosine_embedding": ("F.cosine_embedding_loss(m.linear(x[:, 0]), y[:, 0], torch.ones_like(w))", "mean", 0),
    "cfg": ("F.mse_loss(doubled(m, x), y)", "mean", 0),
    "cfg_dropout": ("F.dropout(m.linear(torch.cat([x, y])), 0.5).square().mean()", "mean", 0),
    "tokens": ("F.mse_loss(m.linear(x.reshape(-1, 6)).view(-1, 4, 6), y)", "mean", 0),
    "token_dropout": ("F.dropout(m.linear(x.flatten(0, 1)), 0.5).square().mean()", "mean", 0),
    "repeated": (
        "(m.linear(x.repeat(2, 1, 1)) - torch.cat([y, x])).square().mean()"
        " + m.linear(x.repeat_interleave(3, 0)).unflatten(0, (-1, 3)).sum(1).square().mean()",
        "mean",
        0,
    ),
    "expanded": (
        "torch.cat([m.pool.expand(x.shape[0], -1, -1), m.linear(x)], 1).softmax(1).square().mean()",
        "mean",
        0,
    ),
    "pool_repeated": (
        "(m.pool.repeat(x.shape[0], 2, 1) * x"
        " + m.pool.repeat_interleave(x.shape[0], 0).repeat(1, 2, 1)).square().mean()",
        "mean",
        0,
    ),
    "permuted": ("m.linear(x.permute(1, 0, 2)).transpose(0, 1).sub(y).square().mean()", "mean", 0),
    "stacked_batch": ("m.linear(torch.stack([x, y], 1)).flatten(0, 1).square().mean()", "mean", 0),
    "unbound": ("sum(scaled(m, t).mean() for t in x.unbind(1))", "mean", 0),
    "split": ("torch.cat(m.linear(x).split([1, 3], 1)[::-1], 1).mul(y).sum()", "sum", 0),
    "attention": ("F.scaled_dot_product_attention(m.linear(x), y, m.linear(y)).sub(x).square().mean()", "mean", 0),
    "attention_masked": (
        "F.scaled_dot_product_attention(m.linear(x), y, y,"
        " attn_mask=(ids > 0)[:, None, :] | torch.eye(4, dtype=torch.bool)).square().mean()",
        "mean",
        0,
    ),
    "products_of_sums": (
        "torch.dot((h := m.linear(x).square().mean((0, 1))), m.class_weights)"
        ' + torch.einsum("i,ij,j->", m.class_weights, m.linear.weight, h)'
        ' + torch.einsum("ij->", torch.outer(h, m.class_weights))',
        "mean",
        0,
    ),
    "einsum": ('torch.einsum("bij,bkj,jl->bikl", m.linear(x), y, m.linear.weight).mean()', "mean", 0),
    "baddbmm": ("torch.baddbmm(m.linear(x) @ y.mT, m.linear(x), y.mT).square().mean()", "mean", 0),
    "norms": ("F.mse_loss(m.norm(F.instance_norm(m.conv(m.group(x)))), y)", "mean", 0),
    "modulated": (
        "F.conv1d(x.reshape(1, -1, 6), m.linear(y).reshape(-1, 4, 3), padding=1, groups=x.shape[0])"
        ".view(x.shape[0], -1).square().mean()",
        "mean",
        0,
    ),
    "rms_statistics": (
        "(F.rms_norm(m.linear(x), (6,)) - m.linear(x).var(-1, keepdim=True)).square().mean()",
        "mean",
        0,
    ),
    "spatial": ("F.interpolate(F.avg_pool1d(F.pad(m.linear(x), (1, 1)), 2), scale_factor=2.0).mean()", "mean", 0),
    "schedule": ("(m.alphas[ids[:, 0]][:, None, None] * scaled(m, x)).mean()", "mean", 0),
    "schedule_gathered": ("(m.alphas.gather(0, ids[:, 0])[:, None] * scaled(m, x)[:, 0]).mean()", "mean", 0),
    "embedding": ("F.mse_loss(m.linear(m.table(ids)), y)", "mean", 0),
    "pooled_rows": ("take_rows(m, x, ids % 4).square().mean()", "mean", 0),
    "neighbours": ("take_points(m, x, ids).square().mean()", "mean", 0),
    "pooled_pairs": ("take_rows(m, torch.cat([x, 2 * x]), torch.cat([ids, ids + 1]) % 4).square().mean()", "mean", 0),
    "pooled_tokens": ("take_rows(m, x.flatten(0, 1), ids.reshape(-1, 1)).square().mean()", "mean", 0),
    "own_rows": ("own_rows(m, x, torch.cdist(m.linear(x), x).topk(3)[1]).square().mean()", "mean", 0),
    "own_entries": ("put_entries(m, x, ids % 4).square().mean()", "mean", 0),
    "gathered": ("m.linear(x).gather(2, ids[..., None] % 6).square().mean()", "mean", 0),
    "in_place": ("F.mse_loss(in_place(m.linear(x)), y)", "mean", 0),
    "squeezed": ("m.linear(x).mean(1, keepdim=True).squeeze().square().mean()", "mean", 0),
    "composed": (
        "torch.tensordot(m.linear(x), m.linear.weight[:4], dims=([2], [1])).mean()"
        " + F.triplet_margin_loss(m.linear(x), x, y)",
        "mean",
        0,
    ),
    "fourier": ("torch.fft.rfft(m.linear(x), dim=-1).abs().mean()", "mean", 0),
    "rotary": (
        "(torch.view_as_complex(m.linear(x).unflatten(-1, (3, 2)))"
        " * torch.polar(torch.ones(3).double(), torch.arange(3).double())).abs().square().mean()",
        "mean",
        0,
    ),
    "sorted": ("(m.linear(x).topk(2, -1).values + x.cumsum(1)[..., :2]).square().mean()", "mean", 0),
    "shuffled_noise": ("F.mse_loss(m.linear(x), y[torch.randperm(x.shape[0])])", "mean", 1),
    "standardised_target": ("F.mse_loss(m.linear(x), (y - y.mean()) / y.std())", "mean", 2),
    "numbered": ("(torch.arange(x.shape[0])[:, None, None] * scaled(m, x)).mean()", "mean", 1),
    "flipped_target": ("F.mse_loss(m.linear(x), y.flip(0).roll(1, 0))", "mean", 1),
    "batch_as_value": ("(scaled(m, x).mean((1, 2)) * (w / x.shape[0])).sum()", "mean", 0),
    "nearest_targets": ("F.mse_loss(m.linear(x), y[torch.cdist(x.flatten(1), y.flatten(1)).argmin(1)])", "mean", 1),
    "noise_statistics": ("((n := torch.randn_like(x)) - n.mean(0) - m.linear(x)).square().mean()", "mean", 1),
}
# Values that stand for the whole batch's up to a factor, or up to an offset, until they are used.
_NOT_SLICES = {
    "divided_before_sum",
    "pooled_rows",
    "neighbours",
    "pooled_pairs",
    "pooled_tokens",
    "own_entries",
    "batch_as_value",
    "own_rows",
}

MIXES = "micro-batches would give another result than the whole batch"
REFUSED: dict[str, tuple[str, str]] = {
    "softmax_over_batch": ("m.linear(x).softmax(0).square().mean()", r"softmax.*dimension 0, the batch"),
    "contrastive": (
        "F.cross_entropy(m.linear(x[:, 0]) @ y[:, 0].T, torch.arange(x.shape[0]))",
        r"matmul.*multiplies samples of the batch with one another",
    ),
    "sums_by_each_other": (
        'torch.einsum("i,i->", (h := m.linear(x).mean((0, 1))), h)',
        r"einsum.*summed over the batch",
    ),
    "sums_by_samples": ("torch.outer(m.linear(x).mean((0, 1)), w).mean()", r"outer.*summed over the batch"),
    "gram": ("(m.linear(x[:, 0]).T @ x[:, 0]).square().mean()", r"square.*only sums and products"),
    "batch_norm": (
        "F.batch_norm(m.linear(x), None, None, training=True).mean()",
        r"batch_norm.*statistics of the whole batch.*GroupNorm",
    ),
    "group_norm_over_batch": (
        "F.group_norm(m.linear(x).transpose(0, 1), 1).mean()",
        r"group_norm.*dimension 1, the batch",
    ),
    "batch_statistics": ("(m.linear(x) - m.linear(x).mean(0)).square().mean()", r"sub.*summed over"),
    "std_over_batch": ("m.linear(x).std(0).mean()", r"std.*dimension 0, the batch"),
    "one_sample": ("scaled(m, x)[0].mean()", r"select.*dimension 0, the batch"),
    "some_samples": ("scaled(m, x)[1:].mean()", r"slice.*no multiple of the batch|picks some samples"),
    "shuffled": ("F.mse_loss(m.linear(x)[torch.randperm(x.shape[0])], y)", r"index.*by number"),
    "rows_of_others": ("own_rows(m, x, ids[..., None]).square().mean()", r"index.*by number"),
    "rows_of_a_shorter_table": ("own_rows(m, x, ids[..., None] % 2, 2).square().mean()", r"index.*by number"),
    "rows_by_repeated_number": (
        "m.linear(x).flatten(0, 1)[torch.arange(x.shape[0])[:, None].expand(-1, 4).reshape(-1)].square().mean()",
        r"index.*by number",
    ),
    "rows_by_interleaved_number": (
        "m.linear(x).flatten(0, 1)[torch.arange(x.shape[0]).repeat_interleave(4)].square().mean()",
        r"index.*by number",
    ),
    "rows_by_wrapped_number": (
        "own_rows(m, x.repeat(1, 64, 1), torch.arange(256).to(torch.int8)[:, None], 256).square().mean()",
        r"index.*by number",
    ),
    "frozen_shuffled": (
        "F.mse_loss(m.linear(x), m.table.weight.detach()[ids].flip(0))",
        r"flip.*dimension 0, the batch",
    ),
    "root_of_mean": ("F.mse_loss(m.linear(x), y).sqrt()", r"sqrt.*only sums and products"),
    "ratio_of_sums": ("scaled(m, x).sum() / m.linear(x).sum()", r"div.*only sums and products"),
    "distances": ("torch.pdist(m.linear(x).flatten(1)).mean()", r"pdist.*its part.*no rule"),
    "max_over_batch": ("scaled(m, x).max()", r"max.*dimension 0, the batch"),
    "transposed_add": ("(w[:, None] - m.linear(x).mean((1, 2))).square().mean()", r"different places"),
    "interleaved": ("(m.linear(x.repeat(2, 1, 1)) - y.repeat_interleave(2, 0)).square().mean()", r"different places"),
    "batch_in_channels": (
        "m.linear(x).view(4, -1, 6).sub(1).square().softmax(0).mean()",
        r"view.*parts of several samples",
    ),
    "size_as_value": ("(m.linear(x) * x.shape[0]).sigmoid().mean()", r"sigmoid.*not linear"),
    "size_plus_one": ("scaled(m, x).sum() / (x.shape[0] - 1)", r"div.*depends on the batch size"),
    "sum_squared_size": ("scaled(m, x).mean() / x.shape[0]", r"neither a mean nor a sum"),
    "teacher_targets": ("F.cross_entropy(m.linear(x).mT, m.table(ids).argmax(-1))", r"not ignore_index"),
    "counted_gradient": ("F.embedding(ids, m.table.weight, scale_grad_by_freq=True).mean()", r"scale_grad_by_freq"),
    "mask": ('F.mse_loss(m.linear(x), y, reduction="none").mean((1, 2)).median()', r"median.*the batch"),
    "per_sample_weights": ("F.linear(m.linear(x), y[:, 0]).mean()", r"linear.*write it as a batched"),
    "crossed_rows": (
        "m.linear(torch.cat([x, y]))[torch.arange(2 * x.shape[0]), ids[:, :2].flatten() % 4].square().mean()",
        r"index.*it looks samples up by number|different places",
    ),
    "shifted_rows": (
        "m.linear(torch.cat([x, y]))[torch.arange(2 * x.shape[0])[x.shape[0] :], ids[:, 0] % 4].square().mean()",
        r"index.*it looks samples up by number",
    ),
    "crossed_entries": (
        "m.linear(x).index_put((ids[:, 0] % 2, torch.arange(x.shape[0]) % 4), x[:, 0]).square().mean()",
        r"index_put.*it writes samples by number",
    ),
    "summed_at_numbers": (
        "x.new_zeros(3, 4, 6).index_put((ids[:, 0] % 3,), m.linear(x).sum(0), accumulate=True).mul(2).sum()",
        r"index_put.*it adds a sum over samples where samples' numbers say",
    ),
    "crossed_groups": (
        "F.conv1d(x.transpose(0, 1).reshape(1, -1, 6), m.linear(y).reshape(-1, 4, 3), groups=x.shape[0]).mean()",
        r"conv1d.*its groups are not those of the samples",
    ),
    "no_rule": ("torch.histc(m.linear(x)).mean()", r"histc.*no rule"),
    "part": ("torch.renorm(m.linear(x), 2, 1, 1.0).mean()", r"renorm.*its part aten.linalg_vector_norm.*the batch"),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_that_micro_batches_may_run(name: str) -> None:
    loss, scale, num_whole = STEPS[name]
    model = step_of(loss)
    cap, plan = captured(model)
    assert (plan.loss_scale, len(plan.whole_batch)) == (scale, num_whole)
    check_micro_batches(cap, plan, model, [2, 1, 3], values=name not in _NOT_SLICES)


@pytest.mark.parametrize("name", REFUSED)
def test_steps_that_micro_batches_would_change(name: str) -> None:
    loss, why = REFUSED[name]
    with pytest.raises(CompileError, match=why) as caught:
        captured(step_of(loss))
    assert MIXES in str(caught.value)
    assert "or pass microbatches=1" in str(caught.value)
    assert str(caught.value).startswith("module ")


def test_a_refusal_names_the_module() -> None:
    class Mixer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.softmax(0)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.mixer = nn.Linear(3, 3), Mixer()

        def forward(self, x: Tensor) -> Tensor:
            return self.mixer(self.first(x)).square().mean()

        def example_inputs(self, batch_size: int) -> tuple[Tensor]:
            return (torch.randn(batch_size, 3),)

    with pytest.raises(CompileError, match=r"module mixer: aten.softmax.int \(softmax\): .* the batch"):
        captured(Outer())


LAYOUTS: Mapping[str, tuple[str, dict[str, BatchLayout]]] = {
    "cfg": (STEPS["cfg"][0], {"cat": BatchLayout(0, 2, 1)}),
    "tokens": (
        STEPS["tokens"][0],
        {"reshape": BatchLayout(0, 1, 4), "linear": BatchLayout(0, 1, 4), "view": BatchLayout(0, 1, 1)},
    ),
    "permuted": (STEPS["permuted"][0], {"permute": BatchLayout(1, 1, 1), "transpose": BatchLayout(0, 1, 1)}),
    "stacked_batch": (STEPS["stacked_batch"][0], {"stack": BatchLayout(0, 1, 1), "flatten": BatchLayout(0, 1, 2)}),
    "token_dropout": (STEPS["token_dropout"][0], {"draw_0": BatchLayout(0, 1, 4)}),
    "cfg_dropout": (STEPS["cfg_dropout"][0], {"draw_0": BatchLayout(0, 2, 1)}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name: str) -> None:
    loss, expected = LAYOUTS[name]
    _, plan = captured(step_of(loss))
    assert {key: plan.layouts[key] for key in expected} == expected


def test_only_the_whole_batch_evaluates_what_it_alone_needs() -> None:
    cap, plan = captured(step_of(STEPS["nearest_targets"][0]))
    assert plan.whole_batch == ("index",)
    assert not {"cdist", "argmin"} & set(plan.layouts)
    assert {"cdist", "argmin"} <= {n.name for n in cap.graph.nodes}


def test_micro_batches_that_would_all_compute_the_same_are_refused() -> None:
    with pytest.raises(CompileError, match=r"select.*takes some samples.*every micro-batch would compute all of it"):
        captured(step_of("sum(scaled(m, x[i]).mean() for i in range(2))"))


def test_sizes_that_no_layout_fits_are_refused_at_once() -> None:
    """Half of a batch, behind draws that may be cut into samples in several ways: none of them helps."""
    model = step_of("m.linear(x + torch.rand(x.shape[0] * 4, 6).view(-1, 4, 6)).chunk(2)[0].mean()")
    follow = Follow(capture(ModelCall(model, *describe(model, model.example_inputs(4), {}, None))))  # type: ignore[operator]
    with pytest.raises(Mixed, match="no multiple of the batch size"):
        follow.run()
    assert not follow._tries


def test_a_capture_at_one_size_is_one_micro_batch() -> None:
    cap, _ = captured(step_of("scaled(m, x).mean()"))
    plan = analyse(replace(cap, batch=()), 2)
    assert not plan.divisible
    assert set(plan.layouts) == {n.name for n in cap.graph.nodes if n.op != "output"}


PEER_SAMPLE = ("dropout", "tied_parameters", "no_grad_encoder", "crossed_skips", "nested_inputs", "transposed_value")
MODELS = {name: {**ZOO, **PEER_CASES}[name] for name in ("uvit", "dit", *PEER_SAMPLE)}


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    model = MODELS[name](torch.float64)
    cap, plan = captured(model, 4)
    check_micro_batches(cap, plan, model, [1, 2])
