"""Stage graphs: a unit's forward and its explicit backward, recorded together on fake tensors and cut by `joint`.

Terms: a *tangent* is the gradient of the loss with respect to a returned value; *saved* values go from forward to
backward, *kept* values from backward_input to backward_weight. Values that cross the border of a unit are contiguous.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxpipe.capture import Capture, private
from fxpipe.errors import CompileError
from passes.lowering.borders import Border
from passes.lowering.joint import Recompute, StageGraphs, prepare
from passes.lowering.record import Recorder
from passes.lowering.units import Value, run_unit, state_name

NOTHING = Recompute()


def trace_stage(
    capture: Capture,
    border: Border,
    device: torch.device,
    recompute: Recompute = NOTHING,
    gathered: Sequence[str] = (),
) -> StageGraphs:
    """Record a unit, forward and backward together, and cut the record.

    Args:
        recompute: what the backward computes again.
        gathered: names of the weights that come as an input.

    Raises:
        CompileError: the graphs are not what the border promises to other ranks.
    """
    names = [state_name(capture, name) for name in border.unit.state]
    with private.fake_mode():
        state = [_fake_state(capture.nodes[name], device) for name in border.unit.state]
        reads = [_fake(value, device) for value in border.reads]
        recorder = Recorder(device)
        recorder.given("state", state)
        recorder.given("values", reads)
        with recorder:
            outputs = run_unit(capture, border.unit, border.batch_size, device, state, reads, recorder.begin)
            for index, name in enumerate(border.unit.returns):
                recorder.begin(name)
                outputs[index] = _in_memory(outputs[index])
            tangents, of_reads, of_state = _gradients(outputs, reads, state)
        _require_promised(border, outputs, [n for n, g in zip(names, of_state, strict=True) if g is not None])
        parts = outputs, tangents, of_reads, [gradient for gradient in of_state if gradient is not None]
        graph = _functional(recorder.returned(parts), device, state, reads)
    prepare(graph, names, border.reads)
    return StageGraphs(graph, border, recompute, gathered)


def _gradients(
    outputs: Sequence[torch.Tensor], reads: Sequence[torch.Tensor], state: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor | None]]:
    """(tangents, gradients of the reads that require one, and of all the state: None where none gets there)."""
    sources = [out for out in outputs if out.requires_grad]
    inputs = [read for read in reads if read.requires_grad]
    weights = [tensor for tensor in state if tensor.requires_grad]
    if not sources or not (inputs or weights):
        return [], [], [None] * len(state)
    tangents = [torch.empty(o.shape, dtype=o.dtype, device=o.device) for o in sources]
    grads = torch.autograd.grad(sources, [*inputs, *weights], tangents, allow_unused=True)
    # A read without influence still owes its producer a gradient: zeros.
    pairs = zip(grads[: len(inputs)], inputs, strict=True)
    of_reads = [_in_memory(torch.zeros_like(v) if g is None else g) for g, v in pairs]
    of_weights = iter([None if g is None else _in_memory(g) for g in grads[len(inputs) :]])
    return tangents, of_reads, [next(of_weights) if tensor.requires_grad else None for tensor in state]


def _require_promised(border: Border, outputs: Sequence[torch.Tensor], weight_grads: Sequence[str]) -> None:
    """Other ranks know this unit by its border alone."""
    pairs = zip(border.unit.returns, outputs, strict=True)
    returns = tuple(Value(name, tuple(out.shape), out.dtype, out.requires_grad) for name, out in pairs)
    if (returns, tuple(weight_grads)) != (border.returns, border.weight_grads):
        raise CompileError(
            f"{border.unit.name} returns {returns} and has gradients of {list(weight_grads)}; its capture promised "
            f"{border.returns} and {list(border.weight_grads)}; please report this"
        )


def _in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous, conjugated and negated in fact: messages and sums take memory as it is."""
    return tensor.resolve_conj().resolve_neg().contiguous()


class _Replay(fx.Interpreter):
    """Runs a recorded graph into another record, with the origins of its nodes."""

    def __init__(self, graph: fx.Graph, recorder: Recorder) -> None:
        super().__init__(torch.nn.Module(), graph=graph)
        self._recorder = recorder

    def run_node(self, n: fx.Node) -> Any:
        self._recorder.begin(n.meta.get("origin"))
        return super().run_node(n)


def _functional(
    graph: fx.Graph, device: torch.device, state: Sequence[torch.Tensor], reads: Sequence[torch.Tensor]
) -> fx.Graph:
    """The record without in-place writes, which some kernels' formulas make (circular padding, Fourier transforms).

    Cutting follows dataflow, and a write through a view is none.
    """
    if not any(private.is_mutable(node.target) for node in graph.nodes):
        return graph
    recorder = Recorder(device)
    recorder.given("state", state)
    recorder.given("values", reads)
    with torch.no_grad(), recorder:
        parts = torch.func.functionalize(_Replay(graph, recorder).run)(*state, *reads)
    found = recorder.returned(parts)
    assert not any(private.is_mutable(node.target) for node in found.nodes), "a stage graph writes in place"
    return found


def _fake(value: Value, device: torch.device) -> torch.Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device=device).requires_grad_(value.requires_grad)


def _fake_state(node: fx.Node, device: torch.device) -> torch.Tensor:
    value = node.meta["val"]
    fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return fake.requires_grad_(node.meta["requires_grad"])
