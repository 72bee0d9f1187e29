"""Which rule follows the batch through which ATen operation, by the operation's name."""

from passes.batch import additions, lookups, products, rules, sums, views
from passes.batch.layout import Rule, RuleCall
from passes.batch.rules import spatial, trailing
from passes.operations import (
    ALONG,
    CASTS,
    ELEMENTWISE,
    EXPANSIONS,
    FACTORIES,
    PERMUTATIONS,
    PIECES,
    PRODUCTS,
    UNSAFE_PIECES,
    VIEWS,
)


def _names(text: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(text.split(), rule)


def _pad_count(call: RuleCall, ndim: int) -> int:
    if call.name.startswith(("reflection", "replication", "_pad_circular")):
        return len(call.arguments.get("padding") or call.arguments["pad"]) // 2
    pad = call.number("pad")
    return max((i // 2 + 1 for i, p in enumerate(pad) if p != 0), default=0)


# Operations on the last one, two or three dimensions, as their names say.
_SPATIAL = """
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d
    upsample_trilinear3d upsample_bicubic2d _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa avg_pool1d avg_pool2d avg_pool3d
    max_pool1d max_pool2d max_pool3d max_pool2d_with_indices max_pool3d_with_indices adaptive_avg_pool1d
    adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
"""
_LOSSES = """
    mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div
    soft_margin_loss poisson_nll_loss hinge_embedding_loss margin_ranking_loss
"""

RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, rules.pointwise),
    **dict.fromkeys(CASTS, rules.cast),
    **dict.fromkeys(VIEWS, views.view),
    **dict.fromkeys(PERMUTATIONS, rules.structural),
    "view_as_real": rules.structural,
    **dict.fromkeys(FACTORIES, views.factory),
    **dict.fromkeys(EXPANSIONS, views.expand),
    **_names("repeat tile", views.repeat),
    **dict.fromkeys(PIECES | UNSAFE_PIECES, views.pieces),
    **_names("slice narrow", views.cut),
    **dict.fromkeys(PRODUCTS, products.matmul),
    **dict.fromkeys(ALONG, rules.along),
    **_names(_SPATIAL, trailing(spatial)),
    **_names("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d", products.convolution),
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
    **_names(
        "layer_norm rms_norm native_layer_norm", trailing(lambda call, ndim: len(call.arguments["normalized_shape"]))
    ),
    **_names(
        "avg_pool2d_backward avg_pool3d_backward max_pool2d_with_indices_backward max_pool3d_with_indices_backward",
        trailing(spatial, ("self", "indices")),
    ),
    **_names("max_unpool2d max_unpool3d", trailing(lambda call, ndim: spatial(call, ndim) + 1, ("indices",))),
    **_names("pixel_shuffle pixel_unshuffle", trailing(lambda call, ndim: 3)),
    **_names(
        "tril triu linalg_inv inverse linalg_det det linalg_cholesky cholesky linalg_matrix_exp linalg_qr trace "
        "linalg_pinv linalg_inv_ex linalg_cholesky_ex _linalg_det _linalg_eigh _linalg_svd _linalg_slogdet "
        "linalg_lu_factor_ex linalg_lu cholesky_inverse",
        trailing(lambda call, ndim: 2),
    ),
    **_names("linear view_as_complex diag_embed stft", trailing(lambda call, ndim: 1)),
    **_names("bilinear", trailing(lambda call, ndim: 1, ("input1", "input2"))),
    **_names(
        "_linalg_solve_ex linalg_solve_ex linalg_solve linalg_solve_triangular cholesky_solve linalg_lu_solve",
        products.solve,
    ),
    **_names("quantile nanquantile", rules.along_first),
    **_names("lstm gru rnn_tanh rnn_relu", rules.recurrent),
    **_names("one_hot", trailing(lambda call, ndim: 0)),
    **_names("index_copy index_fill index_reduce", lookups.at_numbers),
    **_names("index_add scatter_add scatter_reduce index_put", additions.added),
    **_names("sum mean", sums.reduce),
    **_names(_LOSSES, sums.loss),
    **_names("cross_entropy_loss nll_loss nll_loss_nd nll_loss2d", sums.class_loss),
    **_names("bucketize searchsorted", lookups.bucketize),
    "arange": lookups.arange,
    "batch_norm": rules.batch_norm,
    "broadcast_tensors": views.broadcast_tensors,
    "cat": views.cat,
    "concat": views.cat,
    "convolution_backward": products.convolution_backward,
    "diagonal_scatter": lookups.diagonal_scatter,
    "einsum": products.einsum,
    "embedding": lookups.embedding,
    "embedding_bag": lookups.embedding_bag,
    "embedding_dense_backward": additions.lookup_gradient,
    "gather": lookups.gather,
    "index": lookups.index,
    "index_select": lookups.index_select,
    "meshgrid": rules.meshgrid,
    "repeat_interleave": views.repeat_interleave,
    "cdist": products.cdist,
    "slice_scatter": lookups.slice_scatter,
    "select_scatter": lookups.select_scatter,
    "scaled_dot_product_attention": products.attention,
    "stack": rules.stack,
}
