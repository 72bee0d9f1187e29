"""Captures that several tests look at, made once; and costs that depend on nothing but the operation."""

from functools import cache

import torch
from torch import nn

from fxpipe.capture import Capture, capture
from fxpipe.capture.cache import cache_folder, cached_capture
from fxpipe.capture.inputs import InputSpec, describe
from fxpipe.capture.model_call import ModelCall
from tests.models import ZOO


def captured(model: nn.Module, batch_size: int = 6) -> Capture:
    """The capture of a model that makes its own example inputs."""
    return capture(ModelCall(model, *_call(model, batch_size)))


@cache
def zoo(name: str) -> Capture:
    """Made by one of the processes that run tests."""
    torch.manual_seed(0)
    model = ZOO[name]()
    return cached_capture(ModelCall(model, *_call(model, 6)), cache_folder(True))


def _call(model: nn.Module, batch_size: int) -> tuple[InputSpec, list[torch.Tensor]]:
    inputs = model.example_inputs(batch_size)  # type: ignore[operator]
    args, kwargs = (inputs, {}) if isinstance(inputs, tuple) else ((), inputs)
    return describe(model, args, kwargs, None)


def work(graph: Capture) -> dict[str, float]:
    """One second for a product, a tenth for any other operation, nothing for a view."""
    return {node.name: _seconds(str(node.target)) for node in graph.graph.nodes if node.op == "call_function"}


def _seconds(target: str) -> float:
    if any(part in target for part in ("linear", "conv", "matmul", "attention")):
        return 1.0
    return 0.0 if any(part in target for part in ("view", "shape", "item", "transpose", "chunk", "size")) else 0.1
