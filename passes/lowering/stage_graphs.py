"""Stage graphs: a unit's forward and its explicit backward, traced together on fake tensors and cut by `joint`.

Terms: a *tangent* is the gradient of the loss with respect to a returned value; *saved* values go from forward to
backward, *kept* values from backward_input to backward_weight. Values that cross the border of a unit are contiguous.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxpipe import private
from fxpipe.capture import Capture
from passes.lowering.joint import Joint, prepare
from passes.lowering.units import Unit, Value, at_batch


@dataclass(frozen=True)
class StageGraphs:
    """The graphs of one unit at one micro-batch size. State is read by `get_attr` under its original name.

    Input order: forward takes `reads`; backward takes saved, then a tangent per return that requires grad.
    Output order: forward gives (returns, saved); backward gives (input gradients, weight gradients);
    backward_input gives (input gradients, kept); backward_weight takes kept and gives (weight gradients,).
    `input_grads` names the reads, `weight_grads` the parameters, that a gradient is computed for; `state` holds all
    parameters, buffers and constants by name.
    """

    unit: Unit
    batch_size: int
    reads: tuple[Value, ...]
    returns: tuple[Value, ...]
    input_grads: tuple[str, ...]
    weight_grads: tuple[str, ...]
    state: Mapping[str, Value]
    forward: fx.Graph
    backward: fx.Graph | None
    backward_input: fx.Graph | None
    backward_weight: fx.Graph | None
    recompute: bool = False  # the backward makes the forward's values again

    @property
    def tangents(self) -> tuple[str, ...]:
        return tuple(v.name for v in self.returns if v.requires_grad)


class _MarkedInterpreter(fx.Interpreter):
    """Runs nodes marked no_grad or autocast as the model ran them."""

    def run_node(self, n: fx.Node) -> Any:
        with ExitStack() as stack:
            if n.meta.get("no_grad"):
                stack.enter_context(torch.no_grad())
            if "autocast" in n.meta:
                device, dtype, enabled = n.meta["autocast"]
                stack.enter_context(torch.autocast(device, dtype, enabled, cache_enabled=False))
            return super().run_node(n)


def trace_stage(
    capture: Capture,
    unit: Unit,
    batch_size: int,
    reads: Sequence[Value],
    device: torch.device,
    recompute: bool = False,
) -> StageGraphs:
    """Trace `unit` at `batch_size` samples, forward and backward together, and cut the trace.

    Args:
        reads: the values of `unit.reads`, in order, with `requires_grad` as their producer traced it.
    """
    joint = _trace(capture, unit, batch_size, reads, device)
    input_grads = tuple(v.name for v in reads if v.requires_grad) if joint.has_backward else ()
    forward, saved = joint.forward(recompute)
    split = bool(input_grads) and bool(joint.weight_grads)
    backward_input, kept = joint.backward_input(saved) if split else (None, [])
    return StageGraphs(
        unit,
        batch_size,
        tuple(reads),
        joint.returns,
        input_grads,
        joint.weight_grads,
        {state_name(capture, name): _state_value(capture, name) for name in unit.state},
        forward,
        joint.backward(saved) if joint.has_backward else None,
        backward_input,
        joint.backward_weight(kept) if split else None,
        recompute,
    )


def _trace(capture: Capture, unit: Unit, batch_size: int, reads: Sequence[Value], device: torch.device) -> "Joint":
    interpreter = _MarkedInterpreter(at_batch(capture, unit, batch_size, device))
    returned: list[torch.Tensor] = []
    weight_grads: list[str] = []
    names = [state_name(capture, name) for name in unit.state]

    def run(state: list[torch.Tensor], values: list[torch.Tensor]) -> tuple[Any, ...]:
        outputs = [_in_memory(out) for out in interpreter.run(*state, *values)]
        returned.extend(outputs)
        tangents = [torch.empty(o.shape, dtype=o.dtype, device=o.device) for o in outputs if o.requires_grad]
        inputs = [v for v in values if v.requires_grad]
        weights = [(n, t) for n, t in zip(names, state, strict=True) if t.requires_grad]
        targets = [*inputs, *(t for _, t in weights)]
        if not tangents or not targets:
            return outputs, [], [], []
        sources = [o for o in outputs if o.requires_grad]
        grads = torch.autograd.grad(sources, targets, tangents, allow_unused=True)
        # A read without influence still owes its producer a gradient: zeros.
        pairs = zip(grads[: len(inputs)], inputs, strict=True)
        of_inputs = [_in_memory(torch.zeros_like(v) if g is None else g) for g, v in pairs]
        of_weights = [(n, g) for (n, _), g in zip(weights, grads[len(inputs) :], strict=True) if g is not None]
        weight_grads.extend(n for n, _ in of_weights)
        return outputs, tangents, of_inputs, [_in_memory(g) for _, g in of_weights]

    parts: list[int] = []

    def flat(state: list[torch.Tensor], values: list[torch.Tensor]) -> list[torch.Tensor]:
        results = run(state, values)
        parts.extend(len(part) for part in results)
        return [tensor for part in results for tensor in part]

    with private.fake_mode() as mode:
        state = [_fake_state(capture.nodes[name], device) for name in unit.state]
        values = [torch.empty(v.shape, dtype=v.dtype, device=device).requires_grad_(v.requires_grad) for v in reads]
    with mode:
        graph = _functional(make_fx(flat)(state, values), state, values)
    borders = tuple(
        Value(n, tuple(o.shape), o.dtype, o.requires_grad) for n, o in zip(unit.returns, returned, strict=True)
    )
    return Joint(prepare(graph, names, reads, parts), borders, tuple(weight_grads))


def _in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous, conjugated and negated in fact: messages and sums take memory as it is."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def _functional(module: fx.GraphModule, state: list[torch.Tensor], values: list[torch.Tensor]) -> fx.Graph:
    """The trace without in-place writes, which some kernels' formulas make (circular padding, Fourier transforms).

    Cutting follows dataflow, and a write through a view is none.
    """
    if not any(private.is_mutable(node.target) for node in module.graph.nodes):
        return module.graph
    with torch.no_grad():
        graph = make_fx(torch.func.functionalize(module))(state, values).graph
    assert not any(private.is_mutable(node.target) for node in graph.nodes), "a stage graph writes in place"
    return graph


def state_name(capture: Capture, placeholder: str) -> str:
    """The attribute a stage graph reads for a state placeholder: its original name, or `_constants.<name>`."""
    return capture.tensors.get(placeholder, f"_constants.{placeholder}")


def _state_value(capture: Capture, placeholder: str) -> Value:
    node = capture.nodes[placeholder]
    value = node.meta["val"]
    return Value(state_name(capture, placeholder), tuple(value.shape), value.dtype, node.meta["requires_grad"])


def _fake_state(node: fx.Node, device: torch.device) -> torch.Tensor:
    value = node.meta["val"]
    fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return fake.requires_grad_(node.meta["requires_grad"])
