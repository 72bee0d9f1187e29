"""Units: the pieces of the captured graph that ranks run, a stage of the backbone or a frozen component.

unit stage_1:   reads   sample_mix (edge), timesteps (input), draw_1 (draw)
                state   unet.mid.conv.weight, ...
                returns h_12 (read by stage 2), h_9 (read by stage 3)
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxpipe.capture import Capture, private
from fxpipe.capture.sizes import concrete
from fxpipe.plan.block_graph import is_size
from passes.costs.local import STATE_KINDS, with_local


@dataclass(frozen=True)
class CapturedUnit:
    """One piece of the capture.

    `reads` are the names of the values that come in with each micro-batch (model inputs, draws, whole-batch values and
    values of other units), `state` the placeholders of parameters, buffers and constants, `returns` the values that
    other units read, then the loss and outputs where they are made here.
    """

    name: str
    nodes: tuple[str, ...]
    reads: tuple[str, ...]
    state: tuple[str, ...]
    returns: tuple[str, ...]


@dataclass(frozen=True)
class Value:
    """Shape, type and whether a gradient flows through one value on a unit's border."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def make_units(
    capture: Capture, groups: Iterable[tuple[str, Collection[str]]], local: Collection[str], whole: Collection[str]
) -> tuple[CapturedUnit, ...]:
    """The unit of every named group of nodes.

    Args:
        groups: (unit name, its node names); together they hold every node that is neither local nor a size.
        local: cheap nodes that any unit recomputes for itself.
        whole: values computed once on the whole batch and read as slices.
    """
    stop, units = set(whole), []
    drafts = [(set(nodes), _draft(capture, name, set(nodes), set(local), stop)) for name, nodes in groups]
    for own, unit in drafts:
        others = {value for _, other in drafts if other is not unit for value in other.reads}
        returns = [n for n in unit.nodes if n in own and n in others and n not in stop]
        if capture.result.name in own:
            returns.append(capture.result.name)
        returns += [sink.name for sink in capture.outputs.values() if sink.name in own]
        assert all(isinstance(capture.nodes[n].meta["val"], torch.Tensor) for n in returns), (unit.name, returns)
        units.append(replace(unit, returns=tuple(returns)))
    return tuple(units)


def _draft(
    capture: Capture, name: str, own: Collection[str], local: Collection[str], whole: Collection[str]
) -> CapturedUnit:
    """A unit with the local nodes it recomputes and what it reads from outside; what it returns is still open."""
    ordered = with_local(capture, own, local, whole)
    made, reads, state = set(ordered), set[str](), set[str]()
    for argument in (n for name in ordered for n in capture.nodes[name].all_input_nodes):
        if argument.name not in made and not is_size(argument.meta["val"]):
            is_state = argument.op == "placeholder" and argument.meta["kind"] in STATE_KINDS
            (state if is_state else reads).add(argument.name)
    read, states = (tuple(sorted(names, key=capture.places.__getitem__)) for names in (reads, state))
    return CapturedUnit(name, tuple(ordered), read, states, ())


def state_name(capture: Capture, placeholder: str) -> str:
    """The attribute a stage graph reads for a state placeholder: its original name, or `_constants.<name>`."""
    return capture.tensors.get(placeholder, f"_constants.{placeholder}")


def run_unit(
    capture: Capture,
    unit: CapturedUnit,
    batch_size: int,
    device: torch.device,
    state: Sequence[torch.Tensor],
    reads: Sequence[torch.Tensor],
    before: Callable[[str], None] = lambda name: None,
) -> list[torch.Tensor]:
    """What a unit returns, its operations run as the model runs them: sizes are numbers, devices are `device`.

    Args:
        state, reads: the values of `unit.state` and `unit.reads`, in order.
        before: called with every operation's name before it runs.
    """
    by_name = capture.nodes
    given = zip((*unit.state, *unit.reads), (*state, *reads), strict=True)
    env: dict[fx.Node, Any] = {by_name[name]: tensor for name, tensor in given}
    place = _placer(env, batch_size, device)
    for name in unit.nodes:
        before(name)
        node = by_name[name]
        with _as_marked(node):
            env[node] = _run(node, place(node.args), place(node.kwargs))
    return [env[by_name[name]] for name in unit.returns]


def _run(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """The operation of a node. A view that only the strides of the trace allow is a copy: a unit's reads have their
    own, and nothing is written in place. A view under no_grad still says that it requires grad: it is detached."""
    try:
        result = node.target(*args, **kwargs)  # type: ignore[operator]
    except (RuntimeError, ValueError):  # ValueError: of tensors without memory
        if node.target is not torch.ops.aten.view.default:
            raise
        result = torch.ops.aten.reshape.default(*args, **kwargs)
    return fx.node.map_aggregate(result, _detached) if node.meta.get("no_grad") else result


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) and value.requires_grad else value


def _as_marked(node: fx.Node) -> AbstractContextManager[object]:
    """Without gradients or under autocast, where the model runs the node so."""
    stack = ExitStack()
    if node.meta.get("no_grad"):
        stack.enter_context(torch.no_grad())
    if "autocast" in node.meta:
        device, dtype, enabled = node.meta["autocast"]
        stack.enter_context(torch.autocast(device, dtype, enabled, cache_enabled=False))
    if private.packet_name(node.target) == "lstm":  # a graph cannot call the gradient of oneDNN's, of float32
        stack.enter_context(_without_onednn())
    return stack


@contextmanager
def _without_onednn() -> Iterator[None]:
    """That alone: `torch.backends.mkldnn.flags` also sets, and warns of, what is only for Intel's GPUs."""
    was_enabled = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = was_enabled


def _placer(env: dict[fx.Node, Any], batch_size: int, device: torch.device) -> Callable[[Any], Any]:
    def leaf(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return concrete(value.meta["val"], batch_size) if is_size(value.meta["val"]) else env[value]
        if isinstance(value, torch.device):
            return device
        return concrete(value, batch_size) if isinstance(value, torch.SymInt | torch.SymFloat) else value

    return lambda arguments: fx.node.map_aggregate(arguments, leaf)


def whole_batch_unit(capture: Capture, wanted: Sequence[str], local: Collection[str]) -> CapturedUnit:
    """The unit that computes `wanted` once on the whole batch, from inputs, draws and buffers."""
    return replace(_draft(capture, "whole_batch", wanted, local, ()), returns=tuple(wanted))
