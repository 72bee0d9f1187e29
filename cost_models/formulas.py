"""FLOPs of the operators that multiply matrices, as `torch.utils.flop_counter` counts them: 2 per multiply-accumulate.

Everything is 2 * (elements) * (length of the sum behind each element); additions of a bias are not counted. Backward:
each operand's gradient is a product of the forward's size. Differences from torch's counter: the weight gradient of a
*grouped* convolution is not counted as a dense one, and matrix-vector products count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fxpipe.costs import OperationKind
from fxpipe.costs.calls import Call, Dim, Operand, product

Flops = Callable[[tuple[Any, ...], Operand], Dim]


@dataclass(frozen=True, slots=True)
class Formula:
    """`forward(arguments, first output)` and the positions of the operands that are multiplied.

    `backward` counts all gradients at once where a fused kernel computes them together; None: once `forward` for
    each operand that needs a gradient.
    """

    forward: Flops
    operands: tuple[int, ...] = (0, 1)
    backward: Flops | None = None
    kind: OperationKind = "matrix"


def bound_arguments(call: Call) -> tuple[Any, ...]:
    """The call's arguments by position, with keywords and defaults filled in from the operator's schema."""
    keywords = dict(call.kwargs)
    rest = call.target._schema.arguments[len(call.args) :]
    return (*call.args, *(keywords.get(argument.name, argument.default_value) for argument in rest))


def _product(position: int) -> Formula:
    """Of the matrices from this position on."""
    return Formula(lambda given, out: product((2, *out.sizes, given[position].sizes[-1])), (position, position + 1))


def _convolution(given: tuple[Any, ...], out: Operand) -> Dim:
    return product((2, *out.sizes, *given[1].sizes[1:]))


def _transposed_convolution(given: tuple[Any, ...], out: Operand) -> Dim:
    return product((2, *given[0].sizes, *given[1].sizes[1:]))


def _attention(arguments: tuple[Any, ...], out: Operand) -> Dim:
    """scores = q k, out = scores v; a causal mask halves neither, as in torch's counter."""
    query, key, value = arguments[:3]
    return product((2, *out.sizes[:-1], key.sizes[-2], query.sizes[-1] + value.sizes[-1]))


def _attention_backward(arguments: tuple[Any, ...], out: Operand) -> Dim:
    """The fused kernels' five products: scores again, grad of scores, of v, of q, of k."""
    query, key, value = arguments[:3]
    return product((2, *out.sizes[:-1], key.sizes[-2], 3 * query.sizes[-1] + 2 * value.sizes[-1]))


def _multi_head(query: Operand, key: Operand, value: Operand) -> Dim:
    width = query.sizes[-1]
    projections = (
        product((4, *query.sizes, width)) + product((2, *key.sizes, width)) + product((2, *value.sizes, width))
    )
    return projections + product((4, *query.sizes, key.sizes[-2]))


def _encoder_layer(arguments: tuple[Any, ...], out: Operand) -> Dim:
    source, hidden_weight = arguments[0], arguments[14]
    return _multi_head(source, source, source) + product((4, *source.sizes, hidden_weight.sizes[0]))


MATMUL, ADDMM = _product(0), _product(1)
CONVOLUTION = Formula(_convolution, kind="convolution")
TRANSPOSED = Formula(_transposed_convolution, kind="convolution")
ANY_CONVOLUTION = Formula(
    lambda given, out: (_transposed_convolution if given[6] else _convolution)(given, out), kind="convolution"
)
ATTENTION = Formula(_attention, (0, 1, 2), _attention_backward, "attention")

FORMULAS: dict[str, Formula] = {
    "aten::linear": Formula(lambda given, out: product((2, *given[0].sizes, *given[1].sizes[:-1]))),
    **dict.fromkeys(
        ("aten::matmul", "aten::mm", "aten::bmm", "aten::mv", "aten::dot", "aten::vdot", "aten::cdist"), MATMUL
    ),
    **dict.fromkeys(("aten::addmm", "aten::baddbmm", "aten::addmv"), ADDMM),
    "aten::addbmm": Formula(lambda given, out: product((2, *given[1].sizes, given[2].sizes[-1])), (1, 2)),
    "aten::bilinear": Formula(lambda given, out: product((2, *given[0].sizes[:-1], *given[2].sizes)), (0, 1, 2)),
    **dict.fromkeys(("aten::conv1d", "aten::conv2d", "aten::conv3d"), CONVOLUTION),
    **dict.fromkeys((f"aten::conv_transpose{n}" for n in ("1d", "2d", "3d")), TRANSPOSED),
    **dict.fromkeys(("aten::convolution", "aten::_convolution"), ANY_CONVOLUTION),
    "aten::scaled_dot_product_attention": ATTENTION,
    "aten::_scaled_dot_product_flash_attention": ATTENTION,
    "aten::_scaled_dot_product_flash_attention_for_cpu": ATTENTION,
    "aten::_scaled_dot_product_efficient_attention": ATTENTION,
    "aten::_scaled_dot_product_cudnn_attention": ATTENTION,
    "aten::_native_multi_head_attention": Formula(lambda given, out: _multi_head(*given[:3]), (), kind="attention"),
    "aten::_transformer_encoder_layer_fwd": Formula(_encoder_layer, ()),
}
