"""Which rule follows the rows through which ATen operation, by the operation's name."""

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
from passes.rows import products, rules, stretches, views, windows
from passes.rows.rules import Rule, trailing


def _names(text: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(text.split(), rule)


RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, rules.pointwise),
    **dict.fromkeys(ALONG - {"select", "unbind", "unfold", "diagonal"}, rules.along),
    **dict.fromkeys(CASTS, rules.cast),
    **dict.fromkeys(VIEWS, views.view),
    **dict.fromkeys(PERMUTATIONS, views.permuted),
    **dict.fromkeys(EXPANSIONS, views.expanded),
    **dict.fromkeys(FACTORIES, rules.factory),
    **dict.fromkeys(PIECES | UNSAFE_PIECES, stretches.pieces),
    **dict.fromkeys(PRODUCTS, products.matmul),
    **_names("select unbind", views.picked),
    **_names("slice narrow", stretches.cut),
    **_names("repeat tile", views.repeated),
    **_names("cat concat", stretches.cat),
    **_names("sum mean", rules.reduction),
    **_names("linalg_vector_norm norm", rules.norm),
    **_names("layer_norm rms_norm native_layer_norm", trailing(lambda call: len(call.arguments["normalized_shape"]))),
    **_names("linear view_as_complex", trailing(lambda call: 1)),
    **_names("view_as_real one_hot", trailing(lambda call: 0)),
    **_names("conv1d conv2d conv3d", windows.convolution),
    **_names("conv_transpose1d conv_transpose2d conv_transpose3d", windows.transposed),
    **_names("avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d", windows.pool),
    "im2col": windows.unfolded,
    **_names("upsample_nearest1d upsample_nearest2d upsample_nearest3d", windows.nearest),
    **_names("upsample_linear1d upsample_bilinear2d upsample_trilinear3d", windows.linear),
    **_names("pixel_shuffle pixel_unshuffle", windows.shuffled),
    **_names("pad constant_pad_nd", windows.padded),
    **_names("slice_scatter select_scatter", stretches.written),
    "repeat_interleave": views.interleaved,
    "stack": rules.stack,
    "group_norm": rules.group_norm,
    "instance_norm": rules.instance_norm,
    "batch_norm": rules.batch_norm,
    "embedding": rules.embedding,
    "einsum": products.einsum,
    "scaled_dot_product_attention": products.attention,
}
