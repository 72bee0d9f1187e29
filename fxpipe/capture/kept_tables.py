"""Whether two captures make one step although forward has kept, in one of them, what it computes in the other: tables
made of constants and buffers alone, which count by their values.

self.freqs = arange(8).cos(); h * self.freqs     ->     h * value 0     <-     h * self.freqs, from a call before
"""

from collections.abc import Mapping

import torch

from fxpipe.capture import Capture
from fxpipe.capture.evaluation import evaluated_nodes
from fxpipe.capture.fingerprint import MARKS, draw_fingerprint
from fxpipe.capture.known import Read
from fxpipe.capture.same import computation

_ROUNDINGS = 2  # of numbers that were made on one device, and on another


def tables_apart(some: Capture, other: Capture, buffers: Mapping[str, torch.Tensor]) -> Read | None:
    """The buffers that only one of two captures makes a table of, so that they are one step while these keep their
    values; None where they do not compute the same. `buffers` are the model's, by name."""
    (steps, values, made), (others, other_values, other_made) = (_computed(one, buffers) for one in (some, other))
    if steps != others or not all(_are_equal(*both) for both in zip(values, other_values, strict=True)):
        return None
    names = {name for both in zip(made, other_made, strict=True) if both[0] != both[1] for name in both[0] | both[1]}
    return {name: (buffers[name], buffers[name].detach().cpu().clone()) for name in sorted(names)}


def _computed(
    captured: Capture, buffers: Mapping[str, torch.Tensor]
) -> tuple[list[object], list[torch.Tensor], list[frozenset[str]]]:
    """What is computed of inputs, weights and draws; the tables that it reads, in order; the buffers of each."""
    own = {name: state for name, state in captured.tensors.items() if state in buffers}
    found = evaluated_nodes(captured.graph, {**captured.constants, **{n: buffers[state] for n, state in own.items()}})
    others = [node for node in captured.graph.nodes if node not in found]
    read = dict.fromkeys(one for node in others for one in node.all_input_nodes if one in found)
    tables = [node for node in read if node.name not in own]
    values = {node: "" for node in found if node in tables or node not in read}
    values |= {node: f"value {number}" for number, node in enumerate(tables)}
    states = {**captured.tensors, **{n: f"draw {d.index} {draw_fingerprint(d)}" for n, d in captured.draws.items()}}
    marks = [[node.meta.get(key) for key in MARKS] for node in others if node.op == "call_function"]
    steps = computation(captured.graph, captured.inputs.batch_size, states, values)
    made = dict[object, frozenset[str]]()
    for node in found:
        made[node] = frozenset({own[node.name]} if node.name in own else ()).union(
            *(made[one] for one in node.all_input_nodes)
        )
    return [bool(captured.batch), *steps, *marks], [found[node] for node in tables], [made[node] for node in tables]


def _are_equal(some: torch.Tensor, other: torch.Tensor) -> bool:
    if (some.shape, some.dtype) != (other.shape, other.dtype):
        return False
    if not some.is_floating_point() or not some.numel():
        return torch.equal(some, other)
    most = _ROUNDINGS * torch.finfo(some.dtype).eps
    largest = min(1.0, float(some.abs().nan_to_num().max()))  # masks have the largest number there is
    return torch.allclose(some, other, rtol=most, atol=most * largest, equal_nan=True)
