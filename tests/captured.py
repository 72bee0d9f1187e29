"""Captures that several tests look at, made once; and costs that depend on nothing but the operation."""

from functools import cache

import torch
from torch import nn

from fxpipe.capture import Capture, capture
from fxpipe.capture.inputs import describe
from tests.models import ZOO


def captured(model: nn.Module, batch_size: int = 6) -> Capture:
    """The capture of a model that makes its own example inputs."""
    inputs = model.example_inputs(batch_size)  # type: ignore[operator]
    args, kwargs = (inputs, {}) if isinstance(inputs, tuple) else ((), inputs)
    spec, examples = describe(model, args, kwargs, None)
    return capture(model, spec, examples)


@cache
def zoo(name: str) -> Capture:
    torch.manual_seed(0)
    return captured(ZOO[name]())


def work(graph: Capture) -> dict[str, float]:
    """One second for a product, a tenth for any other operation, nothing for a view."""
    return {node.name: _seconds(str(node.target)) for node in graph.graph.nodes if node.op == "call_function"}


def _seconds(target: str) -> float:
    if any(part in target for part in ("linear", "conv", "matmul", "attention")):
        return 1.0
    return 0.0 if any(part in target for part in ("view", "shape", "item", "transpose", "chunk", "size")) else 0.1
