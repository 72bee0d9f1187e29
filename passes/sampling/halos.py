"""Halos of a norm's result that are exchanged before the norm, with its moments: one wait instead of two.

n = group_norm(x)     moments(x), wait           moments(x), halo(x), wait
h = silu(n)                                      n and h have the others' rows, too: the same bits as there
conv2d(h)             halo(h), wait              conv2d(h)
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass

import torch
from torch import fx

from passes.rows import RowPlan
from passes.rows.how import Moments, Same, Window


@dataclass(frozen=True)
class Early:
    """What lies between a norm and the window that reads its result, from the norm on, and the window."""

    between: tuple[fx.Node, ...]
    window: fx.Node


def early_halos(plan: RowPlan, made: Set[str] | None) -> Mapping[fx.Node, Early]:
    """By norm, where all that lies between is `made` here (None: everything is), row by row, and read by nobody else.

    The same for every patch.
    """
    early = {}
    for name, found in plan.found.items():
        if isinstance(found.how, Window) and (between := _between(plan, plan.sized.nodes[name], found.how)):
            if made is None or made >= {name, *(node.name for node in between)}:
                early[between[0]] = Early(between, plan.sized.nodes[name])
    return early


def _between(plan: RowPlan, window: fx.Node, how: Window) -> tuple[fx.Node, ...]:
    """Empty where it is not so."""
    node, between = window.all_input_nodes[0], list[fx.Node]()
    state = plan.state(node)
    while (how.above or how.below or how.end) and len(node.users) == 1 and node.name in plan.found:
        found = plan.found[node.name]
        operands = [operand for operand in node.all_input_nodes if plan.state(operand) is not None]
        if len(operands) != 1 or plan.state(operands[0]) != state or found.wants:
            break
        between.append(node)
        if isinstance(found.how, Moments):
            return tuple(reversed(between))
        if found.how != Same() or torch.Tag.pointwise not in getattr(node.target, "tags", ()):
            break
        node = operands[0]
    return ()
