"""What tells one captured graph from another: a hash of its operations, their arguments, and shapes.

add 'call_function' aten.add.Tensor (x, y) {} (s77, 64) torch.float32     ->     "5f2c0e91b7d34a18"
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxpipe.capture.randomness import Draw
from fxpipe.capture.updates import Update

_DIGITS = 16  # 64 bits: two graphs of one user that share them by chance are out of the question
_GPU = re.compile(r"(device\(type='\w+'), index=\d+")
MARKS = ("kind", "state", "input", "requires_grad", "no_grad", "autocast", "checkpoint", "output")


def graph_fingerprint(graph: fx.Graph) -> str:
    """Equal for graphs of equal nodes in equal order, in any process, on any of its GPUs; weights and inputs count by
    shape and type."""
    lines = (f"{n.name} {n.op} {n.target} {n.args} {n.kwargs} {_shape(n.meta.get('val'))}" for n in graph.nodes)
    return hashlib.sha256(_GPU.sub(r"\1", "\n".join(lines)).encode()).hexdigest()[:_DIGITS]


def step_fingerprint(graph: fx.Graph, draws: Mapping[str, Draw], updates: Sequence[Update] = ()) -> str:
    """Of all that a captured step computes: operations, where gradients flow, which state is read, what is drawn, and
    what is written."""
    text = [graph_fingerprint(graph), *_marks(graph)]
    text += [f"{name} {d.index} {draw_fingerprint(d)}" for name, d in sorted(draws.items())]
    for update in updates:
        text += [f"{update.name} {update.is_first} {graph_fingerprint(update.graph)}", *_marks(update.graph)]
    return hashlib.sha256("\n".join(text).encode()).hexdigest()[:_DIGITS]


def _marks(graph: fx.Graph) -> Iterator[str]:
    return (f"{n.name} {[(key, n.meta.get(key)) for key in MARKS]}" for n in graph.nodes)


def draw_fingerprint(draw: Draw) -> str:
    """Of what is drawn, and how."""
    return f"{draw.target} {graph_fingerprint(draw.graph)}"


def _shape(value: Any) -> str:
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
