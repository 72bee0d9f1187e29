"""What every block of a step costs, as a table of formulas and as data.

                                      saved   forward     input    weight           forward  forward  backward
    block                  weights    bytes     FLOPs     grads     grads             bytes       ms        ms
    frozen vae                67 K        0  49.4 M*b         0         0  3.94 M*b + 264 K    1.699     0.000
      0 unet.conv_in        44.7 K  236 K*b  10.1 M*b  9.48 M*b  10.1 M*b   664 K*b + 179 K    0.453     0.636

b is the number of samples; weights are numbers, those of buffers with them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sympy
from rich import box
from rich.table import Table

from fxpipe.capture.sizes import evaluate
from fxpipe.costs import COUNT_NAMES, NodeCost, total_cost, uncosted_ops
from fxpipe.costs.block_values import Weight

if TYPE_CHECKING:
    from fxpipe.analysis import CostedStep

_NAME_WIDTH = 30

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


def cost_table(step: CostedStep, batch_size: int) -> Table:
    """The rows for the terminal: formulas in the batch b, milliseconds at `batch_size`; 120 columns are enough."""
    table = Table(
        title=f"costs of a step; milliseconds at b = {batch_size}", title_justify="left", box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0), pad_edge=False, caption_justify="left",
    )  # fmt: skip
    table.add_column("block", no_wrap=True)
    for name in ("weights", "saved\nbytes", "forward\nFLOPs", "input\ngrads", "weight\ngrads", "forward\nbytes"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("forward\nms", "backward\nms"):
        table.add_column(name, justify="right", no_wrap=True)
    found = rows(step, batch_size)
    for number, row in enumerate(found):
        cost = row.cost
        bytes_moved = cost.bytes_read + cost.bytes_written
        flops = (cost.forward_flops, cost.backward_input_flops, cost.backward_weight_flops)
        table.add_row(
            _label(row, number - len(step.graph.components)),
            human(row.num_weights),
            *(formula(count) for count in (row.saved_bytes, *flops, bytes_moved)),
            f"{row.forward_seconds * 1e3:.3f}",
            f"{(row.input_gradient_seconds + row.weight_gradient_seconds) * 1e3:.3f}",
            end_section=number == len(found) - 2,
        )
    table.caption = "\n".join(_caption(found[-1], batch_size))
    return table


def _label(row: Row, index: int) -> str:
    label = {"component": f"frozen {row.name}", "block": f"{index:3} {row.name}", "total": "total"}[row.kind]
    return label if len(label) <= _NAME_WIDTH else label[:4] + "…" + label[len(label) - _NAME_WIDTH + 5 :]


def _caption(total: Row, batch_size: int) -> list[str]:
    cost = total.cost
    flops = (cost.forward_flops, cost.backward_input_flops + cost.backward_weight_flops)
    forward, backward = (evaluate(count, batch_size) / 2e9 for count in flops)
    lines = [f"{forward:,.3f} GMACs forward, {backward:,.3f} GMACs backward"]
    if unknown := uncosted_ops([cost]):
        lines.append(f"no FLOPs are counted for {', '.join(unknown)}")
    return lines


def cost_data(step: CostedStep, batch_size: int) -> dict[str, Any]:
    """Everything as JSON data: counts are formulas in b, as strings; seconds are those of `batch_size` samples."""
    found = rows(step, batch_size)
    owners = step.graph.owners
    nodes = [{"name": name, "owner": owners.get(name), **_counts(cost)} for name, cost in step.costs.items()]
    return {
        "batch_size": batch_size,
        "parts": [_data(row) for row in found[:-1]],
        "total": _data(found[-1]),
        "nodes": [node for node in nodes if len(node) > 2],
        "uncosted_ops": list(uncosted_ops(step.costs.values())),
    }


def _data(row: Row) -> dict[str, Any]:
    plain = ("kind", "name", "num_weights", "weight_bytes", *SECONDS)
    counts = {name: _text(getattr(row.cost, name)) for name in COUNT_NAMES}
    saved = {name: _text(getattr(row, name)) for name in ("saved_bytes", "input_bytes")}
    return {**{name: getattr(row, name) for name in plain}, "num_operations": len(row.nodes), **counts, **saved}


def _counts(cost: NodeCost) -> dict[str, str]:
    return {name: _text(count) for name in COUNT_NAMES if (count := getattr(cost, name)) != 0}


_B = sympy.Symbol("b")


def _text(expression: sympy.Expr) -> str:
    return str(_in_b(expression))


def _in_b(expression: sympy.Expr) -> sympy.Expr:
    return expression.subs(dict.fromkeys(expression.free_symbols, _B))


def formula(expression: sympy.Expr) -> str:
    """`12.6 G*b + 3 M`: a polynomial of the batch b with short coefficients."""
    if not expression.free_symbols:
        return human(int(expression))
    expression = _in_b(expression)
    if not expression.is_polynomial(_B):
        return str(expression)
    names = {0: "", 1: "*b"}
    terms = [(power, value) for (power,), value in sympy.Poly(expression, _B).terms()]
    return " + ".join(human(float(value)) + names.get(power, f"*b^{power}") for power, value in terms)


def human(number: float) -> str:
    """Three digits: `12.6 G`."""
    for unit in ("", " K", " M", " G"):
        if abs(number) < 999.5:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.4g} T"
