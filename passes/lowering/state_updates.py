"""What forward writes into the model's own tensors, as graphs that run beside the programs.

update of w:   p_w = placeholder          w = get_attr "w"
               n   = norm(p_w)       ->   n = linalg_vector_norm(w)
               div(p_w, n)                div(w, n)

Outputs of the step that they read stay placeholders.
"""

from dataclasses import replace
from typing import cast

import torch
from torch import fx

from fxpipe.capture import Capture
from fxpipe.capture.updates import OUTPUT, Update
from fxpipe.plan.state_update import StateUpdate
from passes.costs.gradient_flow import GradientFlow
from passes.lowering.borders import border
from passes.lowering.stage_graphs import trace_stage
from passes.lowering.units import CapturedUnit, state_name


def state_updates(capture: Capture, device: torch.device) -> tuple[StateUpdate, ...]:
    """Those of a captured step, to run on `device`."""
    return tuple(_lowered(replace(capture, graph=update.graph), update, device) for update in capture.updates)


def held_whole(capture: Capture) -> set[str]:
    """The frozen parameters that a rank must have beside others, to write by them."""
    found = set[str]()
    for update in capture.updates:
        placeholders = update.graph.find_nodes(op="placeholder")
        names = {state_name(capture, node.name) for node in placeholders if node.meta["kind"] == "parameter"}
        names.add(update.name)
        found |= names - capture.trainable if len(names) > 1 else set()
    return found


def _lowered(of: Capture, update: Update, device: torch.device) -> StateUpdate:
    placeholders = of.graph.find_nodes(op="placeholder")
    reads = tuple(node.name for node in placeholders if node.meta["kind"] == OUTPUT)
    state = tuple(node.name for node in placeholders if node.name not in reads)
    nodes = tuple(node.name for node in of.graph.nodes if node.op == "call_function")
    (output,) = of.graph.find_nodes(op="output")
    unit = CapturedUnit("update", nodes, reads, state, (cast(fx.Node, output.args[0]).name,))
    found = border(of, GradientFlow({}, frozenset()), unit, of.inputs.batch_size)
    graph = trace_stage(of, found, device).forward
    (output,) = graph.find_nodes(op="output")
    ((value,), _) = cast(tuple[list[fx.Node], list[fx.Node]], output.args[0])
    output.args = (value,)
    return StateUpdate(update.name, tuple(found.state), graph, update.is_first, update.seen)
