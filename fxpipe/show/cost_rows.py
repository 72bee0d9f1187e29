"""A step and the costs of its parts: a row for each frozen component and each block, and their sum."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import sympy

from fxpipe.costs import NodeCost, total_cost
from fxpipe.costs.block_values import Weight

if TYPE_CHECKING:
    from fxpipe.analysis import CostedStep

SECONDS = ("forward_seconds", "input_gradient_seconds", "weight_gradient_seconds")
"""The seconds of a row, by name."""


@dataclass(frozen=True)
class Row:
    """One frozen component, one block, or all of them: counts as expressions of the batch, seconds at one batch size.

    `num_weights` counts the numbers in weights and buffers of `weight_bytes`. `saved_bytes` wait for the backward;
    `input_bytes` come in from elsewhere, and are what recomputation leaves of them.
    """

    kind: str
    name: str
    nodes: tuple[str, ...]
    cost: NodeCost
    num_weights: int
    weight_bytes: int
    saved_bytes: sympy.Expr
    input_bytes: sympy.Expr
    forward_seconds: float
    input_gradient_seconds: float
    weight_gradient_seconds: float


def rows(step: CostedStep, batch_size: int) -> tuple[Row, ...]:
    """A row per frozen component and per block, and the total last."""
    costs, seconds = step.blocks, step.blocks.at(batch_size)
    found = []
    for number, part in enumerate(step.graph.components):
        weights = [weight for weight in costs.weights if number in weight.components]
        none = (sympy.S.Zero, sympy.S.Zero, seconds.component_seconds[number], 0.0, 0.0)
        found.append(Row("component", part.name, part.nodes, _cost(step, part.nodes), *_sizes(weights), *none))
    for number, block in enumerate(step.graph.blocks):
        saved = costs.saved_formulas[number], costs.input_formulas[number]
        times = (seconds.forward_seconds, seconds.input_gradient_seconds, seconds.weight_gradient_seconds)
        sizes = _sizes(costs.weights_of([number]))
        of_block = [of[number] for of in times]
        found.append(Row("block", block.name, block.nodes, _cost(step, block.nodes), *sizes, *saved, *of_block))
    nodes = tuple(name for row in found for name in row.nodes)
    sums = [sum(getattr(row, name) for row in found) for name in SECONDS]
    saved = tuple(sympy.Add(*(getattr(row, name) for row in found)) for name in ("saved_bytes", "input_bytes"))
    every = [weight for weight in costs.weights if weight.blocks or weight.components]
    return (*found, Row("total", "total", nodes, _cost(step, nodes), *_sizes(every), *saved, *sums))


def _cost(step: CostedStep, nodes: Iterable[str]) -> NodeCost:
    return total_cost(step.costs[name] for name in nodes)


def _sizes(weights: Iterable[Weight]) -> tuple[int, int]:
    """Numbers and bytes of weights, each once."""
    distinct = {weight.name: weight for weight in weights}.values()
    return sum(w.num_elements for w in distinct), sum(w.num_bytes for w in distinct)
