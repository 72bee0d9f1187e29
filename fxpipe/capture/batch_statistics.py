"""Running statistics of normalisations, which their operations write without saying so, written out.

y = batch_norm(x, w, b, mean, var, True, 0.1)     ->     y = batch_norm(x, w, b, None, None, True, 0.1)
                                                         lerp_(mean, mean(x, [0, 2, 3]), 0.1)
                                                         lerp_(var, var(x, [0, 2, 3], correction=1), 0.1)
"""

from typing import Any

import torch
from torch import fx

from fxpipe.capture import private

aten = torch.ops.aten
_NORMS = (aten.batch_norm.default, aten.instance_norm.default)  # of the same arguments


def write_out(graph: fx.Graph) -> None:
    """Rewrite those that use what their input holds."""
    for node in [node for node in graph.nodes if node.target in _NORMS]:
        x, weight, bias, mean, var, of_input, momentum, *others = node.args
        if mean is None or not of_input:
            continue
        node.args = (x, weight, bias, None, None, of_input, momentum, *others)
        is_batch = node.target is aten.batch_norm.default
        dims = [dim for dim in range(x.meta["val"].ndim) if dim != 1 and (dim or is_batch)]
        with graph.inserting_before(node.next):
            value = _made(node, aten.to.dtype, _made(node, aten.detach.default, x), mean.meta["val"].dtype)
            means = _made(node, aten.mean.dim, value, dims)
            variances = _made(node, aten.var.correction, value, dims, correction=1)
            for running, seen in ((mean, means), (var, variances)):
                whole = seen if is_batch else _made(node, aten.mean.dim, seen, [0])
                _made(node, aten.lerp_.Scalar, running, whole, momentum).meta["val"] = running.meta["val"]


def _made(norm: fx.Node, target: Any, of: fx.Node, *args: Any, **kwargs: Any) -> fx.Node:
    """A node that autograd does not see, in no autocast."""
    node = norm.graph.call_function(target, (of, *args), kwargs)
    marks = {key: value for key, value in norm.meta.items() if key != "autocast"}
    node.meta = {**marks, "no_grad": True, "val": private.fake_result(target, node.args, kwargs, of.meta["val"])}
    return node
