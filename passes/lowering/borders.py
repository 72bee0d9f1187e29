"""Borders: what comes into a unit and what goes out of it, and where gradients are, told without tracing it.

stage_1 at 4 samples:   reads h_12 [4, 64] with a gradient, timesteps [4]     returns h_20 [4, 64] with a gradient
                        input_grads h_12     weight_grads unet.mid.conv.weight, ...
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fxpipe.capture import Capture
from fxpipe.capture.sizes import concrete
from passes.costs.gradient_flow import GradientFlow
from passes.lowering.units import CapturedUnit, Value, state_name


@dataclass(frozen=True)
class Border:
    """A unit at one micro-batch size.

    `input_grads` names the reads, `weight_grads` the parameters, that its backward gives a gradient for; `state` holds
    all parameters, buffers and constants by name.
    """

    unit: CapturedUnit
    batch_size: int
    reads: tuple[Value, ...]
    returns: tuple[Value, ...]
    input_grads: tuple[str, ...]
    weight_grads: tuple[str, ...]
    state: Mapping[str, Value]

    @property
    def tangents(self) -> tuple[str, ...]:
        """The returned values that a gradient comes in for."""
        return tuple(v.name for v in self.returns if v.requires_grad)

    @property
    def has_backward(self) -> bool:
        return bool(self.input_grads or self.weight_grads)

    @property
    def splits(self) -> bool:
        """Whether its backward has two parts."""
        return bool(self.input_grads) and bool(self.weight_grads)


def border(capture: Capture, flow: GradientFlow, unit: CapturedUnit, batch_size: int) -> Border:
    """Of a unit at so many samples. Without a value to hand on that requires grad, none is asked for."""
    reads, returns = (_values(capture, flow, names, batch_size) for names in (unit.reads, unit.returns))
    gradients = [value.name for value in returns if value.requires_grad]
    trained = flow.weights_behind(gradients, frozenset(unit.nodes))
    return Border(
        unit,
        batch_size,
        reads,
        returns,
        tuple(value.name for value in reads if value.requires_grad) if gradients else (),
        tuple(state_name(capture, name) for name in unit.state if name in trained),
        {state_name(capture, name): _state_value(capture, name) for name in unit.state},
    )


def _values(capture: Capture, flow: GradientFlow, names: Iterable[str], batch_size: int) -> tuple[Value, ...]:
    fakes = ((name, capture.nodes[name].meta["val"]) for name in names)
    return tuple(
        Value(name, concrete(tuple(fake.shape), batch_size), fake.dtype, flow.requires_grad(name))
        for name, fake in fakes
    )


def _state_value(capture: Capture, placeholder: str) -> Value:
    node = capture.nodes[placeholder]
    value = node.meta["val"]
    return Value(state_name(capture, placeholder), tuple(value.shape), value.dtype, node.meta["requires_grad"])
