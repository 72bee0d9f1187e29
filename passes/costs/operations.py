"""The operations of a capture as every part that has one asks for them: what they touch, and their traces."""

import torch
from torch import fx

from fxpipe.capture import Capture
from fxpipe.capture.private import tensors_in, where
from fxpipe.costs.calls import Call, Gradient, call_of, in_a_row, operand_nodes
from fxpipe.errors import CompileError
from fxpipe.plan.block_graph import bytes_at
from fxpipe.remembered import remembered
from passes.costs.call_trace import CallTrace, Line, call_trace, gradient_paths
from passes.costs.local import STATE_KINDS

Place = tuple[fx.Node, int]
"""A tensor: a node and which of its results."""


class Facts:
    """Of a node: its tensors' bytes, the tensors it reads, the one that getitem shows."""

    __slots__ = ("is_state", "item", "lines", "operands", "requires_grad")

    def __init__(self, node: fx.Node) -> None:
        self.lines = [_line(tensor) for tensor in tensors_in(node.meta.get("val"))]
        self.is_state = node.op == "placeholder" and node.meta["kind"] in STATE_KINDS
        self.requires_grad: bool = node.meta.get("requires_grad", False)
        shows = node.op == "call_function" and bool(self.lines) and not isinstance(node.target, torch._ops.OpOverload)
        self.item = _item(node) if shows else None
        self.operands = operand_nodes(node) if node.op == "call_function" and not shows else []


class Operations:
    """All operations of a capture that runs on `device`, for one sample or for any larger number."""

    def __init__(self, capture: Capture, device: torch.device, one_sample: bool = False) -> None:
        self.capture, self._device = capture, device
        several = max(2, capture.inputs.batch_size) if capture.batch else capture.inputs.batch_size
        self.num_samples = 1 if one_sample else several

    @remembered
    def facts(self, node: fx.Node) -> Facts:
        return Facts(node)

    @remembered
    def trace(self, node: fx.Node, arrived: frozenset[int]) -> CallTrace:
        """Of an operation; the operands in `arrived` come from other units, and so lie in a row."""
        call = in_a_row(_call(node), arrived)
        try:
            return call_trace(call, node.meta.get("autocast"), self.num_samples, self._device)
        except (RuntimeError, IndexError, TypeError) as error:
            why = next(iter(str(error).splitlines()), "")
            raise CompileError(
                f"{where(node)}: {node.target}: torch does not run it, or its gradient, on tensors without values: "
                f"{why}; write it with other operations"
            ) from error

    def gradient_paths(self, node: fx.Node) -> tuple[frozenset[int], ...]:
        """Of every tensor of an operation, the operands that its gradient gets to."""
        return gradient_paths(_call(node), node.meta.get("autocast"), self.num_samples, self._device)


def _call(node: fx.Node) -> Call:
    """An operation's, differentiated where the step trains."""
    trains = node.meta["requires_grad"] and not node.meta.get("no_grad")
    wanted: dict[fx.Node, Gradient] = {
        n: "input" if trains and n.meta["requires_grad"] else "none" for n in node.all_input_nodes
    }
    return call_of(node, wanted)


def _item(node: fx.Node) -> Place:
    """What operator.getitem shows."""
    source, index = node.args
    assert isinstance(source, fx.Node), node.format_node()
    return source, len(tensors_in(source.meta["val"][:index]))


def _line(value: torch.Tensor) -> Line:
    """Bytes of a dense tensor."""
    two, three = bytes_at(value, 2), bytes_at(value, 3)
    return two - 2 * (three - two), three - two
