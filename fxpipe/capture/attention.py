"""Attention as it can be cut into samples: with dropout written out, so that its mask is a draw like any other; and
diffusers' sliced one, which takes some heads of some samples at a time to save memory, as one; torch's encoder, which
takes another path for padded samples, or in an autocast, is refused where it does.

scaled_dot_product_attention(q, k, v, dropout_p=0.1)   ->   dropout(softmax(q @ k^T * scale), 0.1) @ v
"""

import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx, nn

from fxpipe.capture import private
from fxpipe.capture.surroundings import LOW
from fxpipe.errors import CaptureError

aten = torch.ops.aten
_ATTENTION = aten.scaled_dot_product_attention.default


_SLICED = {"SlicedAttnProcessor": "AttnProcessor", "SlicedAttnAddedKVProcessor": "AttnAddedKVProcessor"}


@contextmanager
def whole_attention() -> Iterator[None]:
    """Inside, what `set_attention_slice` has set computes the same in one piece."""
    with ExitStack() as stack:
        processors = sys.modules.get("diffusers.models.attention_processor")
        for sliced, whole in _SLICED.items() if processors is not None else ():
            call = getattr(processors, whole).__call__  # of no attribute of its own
            stack.enter_context(private.replaced(getattr(processors, sliced), "__call__", call))
        yield


@contextmanager
def encoders_watched() -> Iterator[None]:
    """Raises CaptureError where torch's encoder would take a path that a trace does not: that of nested tensors, which
    leaves zeros in padded places or not by where the mask has its values, and its one kernel, whose type in an autocast
    is not that of its operations."""
    whole, layer = nn.TransformerEncoder.forward, nn.TransformerEncoderLayer.forward

    def checked(
        self: nn.TransformerEncoder,
        src: torch.Tensor,
        mask: torch.Tensor | None = None,
        src_key_padding_mask: torch.Tensor | None = None,
        is_causal: bool | None = None,
    ) -> torch.Tensor:
        if src_key_padding_mask is not None and mask is None and src.ndim == 3 and _may_nest(self, src):
            raise CaptureError(
                "nn.TransformerEncoder in evaluation, without gradients, returns zeros in padded places where all "
                "padding is at the end of samples, which it decides by the mask's values; set its use_nested_tensor = "
                "False, which leaves all other places as they are"
            )
        return whole(self, src, mask, src_key_padding_mask, is_causal)

    def checked_layer(self: nn.TransformerEncoderLayer, src: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        kind = src.device.type
        casts = torch.is_autocast_enabled(kind) and src.dtype != torch.get_autocast_dtype(kind)
        if casts and src.ndim == 3 and _is_one_kernel(self, src):
            raise CaptureError(
                "nn.TransformerEncoderLayer in evaluation, without gradients, gives another type in an autocast for "
                f"{kind} than its operations do; call torch.backends.mha.set_fastpath_enabled(False)"
            )
        return layer(self, src, *args, **kwargs)

    with (
        private.replaced(nn.TransformerEncoder, "forward", checked),
        private.replaced(nn.TransformerEncoderLayer, "forward", checked_layer),
    ):
        yield


def _may_nest(encoder: nn.TransformerEncoder, src: torch.Tensor) -> bool:
    """By all but the mask's values, as torch 2.13 decides it."""
    return getattr(encoder, "use_nested_tensor", False) and _is_fast(encoder.layers[0], src)


def _is_one_kernel(layer: nn.TransformerEncoderLayer, src: torch.Tensor) -> bool:
    own: Any = layer.self_attn
    plain = own.batch_first and own.in_proj_bias is not None and own._qkv_same_embed_dim and own.num_heads % 2 == 0
    hooked = any(module._forward_hooks or module._forward_pre_hooks for module in layer.modules())
    alike = layer.activation_relu_or_gelu and layer.norm1.eps == layer.norm2.eps
    return bool(plain and alike and not hooked and _is_fast(layer, src))


def _is_fast(layer: Any, src: torch.Tensor) -> bool:
    learns = torch.is_grad_enabled() and any(t.requires_grad for t in (src, *layer.parameters()))
    wanted = torch.backends.mha.get_fastpath_enabled() and not layer.training
    return wanted and not learns and not torch.is_autocast_enabled()


def expand_attention_dropout(graph: fx.Graph) -> None:
    """Write out every attention that drops weights, as torch's own reference computes it: half precision in float32."""
    for node in graph.find_nodes(op="call_function", target=_ATTENTION):
        given = private.arguments(node)
        if given.get("dropout_p", 0.0) > 0.0:
            with graph.inserting_before(node):
                node.replace_all_uses_with(_written_out(graph, node, **given))
            graph.erase_node(node)


def _written_out(
    graph: fx.Graph,
    node: fx.Node,
    query: fx.Node,
    key: fx.Node,
    value: fx.Node,
    attn_mask: fx.Node | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> fx.Node:
    shape = query.meta["val"].shape
    if not isinstance(shape[-2], int):
        why = "attention with dropout over samples is not supported"
        raise CaptureError(f"{private.where(node)}: {why}")

    dtype = node.meta["val"].dtype  # an autocast's, inside of one
    meta = {name: value for name, value in node.meta.items() if name != "autocast"}

    def add(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        new = graph.call_function(target, args, kwargs)
        new.meta = {**meta, "val": private.fake_result(target, args, kwargs, node.meta["val"])}
        return new

    def cast(value: fx.Node, wanted: torch.dtype) -> fx.Node:
        return value if value.meta["val"].dtype == wanted else add(aten.to.dtype, value, wanted)

    wide = torch.float32 if dtype in LOW else dtype
    query, key, value = (cast(cast(one, dtype), wide) for one in (query, key, value))
    is_cast = node.meta.get("autocast", (None, None, False))[2]
    if is_cast and attn_mask is not None and attn_mask.meta["val"].is_floating_point():
        attn_mask = cast(attn_mask, dtype)
    if enable_gqa:
        key, value = (
            add(aten.repeat_interleave.self_int, one, shape[-3] // one.meta["val"].shape[-3], -3)
            for one in (key, value)
        )
    transposed = add(aten.transpose.int, key, -2, -1)
    scaled = add(aten.mul.Tensor, query, shape[-1] ** -0.5 if scale is None else scale)
    scores = add(aten.matmul.default, scaled, transposed)
    masked = attn_mask is not None and attn_mask.meta["val"].dtype == torch.bool
    if is_causal:
        size = [shape[-2], key.meta["val"].shape[-2]]
        ones = add(aten.ones.default, size, dtype=torch.bool, device=node.meta["val"].device)
        attn_mask, masked = add(aten.tril.default, ones), True
    hidden = None
    if masked:
        hidden = add(aten.logical_not.default, attn_mask)
    elif attn_mask is not None:
        hidden, scores = add(aten.eq.Scalar, attn_mask, -math.inf), add(aten.add.Tensor, scores, attn_mask)
    if hidden is not None:
        scores = add(aten.masked_fill.Scalar, scores, hidden, -math.inf)
    weights = add(aten.softmax.int, scores, -1)
    if hidden is not None:  # a row that sees nothing has weight on nothing
        weights = add(aten.masked_fill.Scalar, weights, hidden, 0.0)
    return cast(add(aten.matmul.default, add(aten.dropout.default, weights, dropout_p, True), value), dtype)
