"""What tells one captured graph from another: a hash of its operations, their arguments, and shapes.

add 'call_function' aten.add.Tensor (x, y) {} (s77, 64) torch.float32     ->     "5f2c0e91b7d34a18"
"""

import hashlib
from typing import Any

import torch
from torch import fx

_DIGITS = 16  # 64 bits: two graphs of one user that share them by chance are out of the question


def graph_fingerprint(graph: fx.Graph) -> str:
    """Equal for graphs of equal nodes in equal order, in any process; weights and inputs count by shape and type."""
    lines = (f"{n.name} {n.op} {n.target} {n.args} {n.kwargs} {_shape(n.meta.get('val'))}" for n in graph.nodes)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:_DIGITS]


def _shape(value: Any) -> str:
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
