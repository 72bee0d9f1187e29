"""Whether two captures make one step although forward has kept, in one of them, what it computes in the other: tables
made of constants and buffers alone, which count by their values.

self.freqs = arange(8).cos(); h * self.freqs     ->     h * value 0     <-     h * self.freqs, from a call before
"""

from collections.abc import Mapping

import torch

from fxpipe.capture import Capture
from fxpipe.capture.evaluation import evaluated_nodes
from fxpipe.capture.fingerprint import MARKS, draw_fingerprint
from fxpipe.capture.same import computation

_ROUNDINGS = 8  # of a table that was made on one device, and on another


def same_but_for_tables(some: Capture, other: Capture, buffers: Mapping[str, torch.Tensor]) -> bool:
    """Whether they compute the same; `buffers` of the model, by name."""
    (steps, values), (others, other_values) = (_computed(one, buffers) for one in (some, other))
    return steps == others and all(_are_equal(*both) for both in zip(values, other_values, strict=True))


def _computed(captured: Capture, buffers: Mapping[str, torch.Tensor]) -> tuple[list[object], list[torch.Tensor]]:
    """What is computed of inputs, weights and draws; and the tables that it reads, in order."""
    own = {name: buffers[state] for name, state in captured.tensors.items() if state in buffers}
    found = evaluated_nodes(captured.graph, {**captured.constants, **own})
    others = [node for node in captured.graph.nodes if node not in found]
    read = dict.fromkeys(one for node in others for one in node.all_input_nodes if one in found)
    tables = [node for node in read if node.name not in own]
    values = {node: "" for node in found if node in tables or node not in read}
    values |= {node: f"value {number}" for number, node in enumerate(tables)}
    states = {**captured.tensors, **{n: f"draw {d.index} {draw_fingerprint(d)}" for n, d in captured.draws.items()}}
    marks = [[node.meta.get(key) for key in MARKS] for node in others if node.op == "call_function"]
    steps = computation(captured.graph, captured.inputs.batch_size, states, values)
    return [bool(captured.batch), *steps, *marks], [found[node] for node in tables]


def _are_equal(some: torch.Tensor, other: torch.Tensor) -> bool:
    if (some.shape, some.dtype) != (other.shape, other.dtype):
        return False
    if not some.is_floating_point():
        return torch.equal(some, other)
    most = _ROUNDINGS * torch.finfo(some.dtype).eps
    return torch.allclose(some, other, rtol=most, atol=most, equal_nan=True)
