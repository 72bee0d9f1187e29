"""What a training step costs before it is planned: block by block as formulas, or as measured on the device at hand.

fxpipe cost MODEL         FLOPs, bytes and parameters of every block as formulas of the batch b
fxpipe profile MODEL      seconds of every block at a few batch sizes, for `cost_model="profile.json"`
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sympy
import torch
from rich.table import Table
from torch import fx, nn

from cost_models import devices, profiled
from cost_models.flops import node_costs
from fxpipe.block_graph import Block, BlockGraph, Component
from fxpipe.capture import Capture, capture
from fxpipe.capture.inputs import describe
from fxpipe.costs import CostModel, NodeCost, evaluate, node_seconds, total_cost
from fxpipe.errors import CompileError
from fxpipe.options import training_step
from fxpipe.rank_program import nest
from fxpipe.staged import Staged
from passes.batch import analyse as analyse_batch
from passes.blocks import analyse as analyse_blocks
from passes.lowering.stage_graphs import StageGraphs
from passes.lowering.trace import trace
from passes.lowering.units import Value


def given_cost_model(given: CostModel | str) -> CostModel:
    """A device by name, the profile of a `.json` file, or the cost model itself."""
    if not isinstance(given, str):
        return given
    if given.endswith(".json"):
        return profiled.load(Path(given), devices.device("A100-80GB"))
    return devices.device(given)


@dataclass(frozen=True)
class Costed:
    """A captured step with the cost of every node, by name, and its blocks."""

    captured: Capture
    costs: Mapping[str, NodeCost]
    graph: BlockGraph

    @property
    def parts(self) -> tuple[Component | Block, ...]:
        return (*self.graph.components, *self.graph.blocks)


def costed(model: nn.Module, example_inputs: Any, batch_size: int, cost_model: CostModel, num_blocks: int) -> Costed:
    """Capture a step and cut it into about `num_blocks` blocks by `cost_model`'s roofline."""
    step, args, kwargs = training_step(model, example_inputs, batch_size, 1)
    captured = capture(step, *describe(step, args, kwargs, batch_size))
    costs = {node.name: cost for node, cost in node_costs(captured.graph.nodes).items()}
    seconds = node_seconds(cost_model, captured.graph, costs, batch_size)
    both = {name: seconds.forward[name] + seconds.backward[name] for name in costs}
    return Costed(captured, costs, analyse_blocks(captured, both, num_blocks))


def cost_table(step: Costed, cost_model: CostModel, batch_size: int) -> Table:
    """A row per frozen component and block, and the total: formulas in the batch b, seconds at `batch_size`."""
    seconds = node_seconds(cost_model, step.captured.graph, step.costs, batch_size)
    table = Table(title=f"seconds and GMACs at b = {batch_size}", title_justify="left")
    for column in ("block", "ops", "forward FLOPs", "input grads", "weight grads", "forward bytes", "parameters"):
        table.add_column(column, justify="left" if column == "block" else "right", overflow="fold")
    for column in ("forward ms", "backward ms"):
        table.add_column(column, justify="right")
    sizes = _parameter_sizes(step.captured)
    rows: list[tuple[str, Sequence[str]]] = [(_label(part), part.nodes) for part in step.parts]
    rows.append(("total", [name for _, nodes in rows for name in nodes]))
    for label, nodes in rows:
        cost = total_cost(step.costs[name] for name in nodes)
        read = {name for node in nodes for name in sizes.get(node, {})}
        backward = sum(seconds.backward[n] for n in nodes) if not label.startswith("frozen") else 0.0
        table.add_row(
            label,
            str(len(nodes)),
            formula(cost.forward_flops),
            formula(cost.backward_input_flops),
            formula(cost.backward_weight_flops),
            formula(cost.bytes_read + cost.bytes_written),
            _human(sum(sizes[name][name] for name in read)),
            f"{sum(seconds.forward[n] for n in nodes) * 1e3:.3f}",
            f"{backward * 1e3:.3f}",
            end_section=label != "total" and rows[-2][0] == label,
        )
    table.caption = _gmacs(total_cost(step.costs[name] for name in rows[-1][1]), batch_size)
    return table


def _gmacs(cost: NodeCost, batch_size: int) -> str:
    flops = (cost.forward_flops, cost.backward_input_flops + cost.backward_weight_flops)
    forward, backward = (evaluate(f, batch_size) / 2e9 for f in flops)
    return f"{forward:,.3f} GMACs forward, {backward:,.3f} GMACs backward"


def _label(part: Component | Block) -> str:
    return f"{part.index:3} {part.name}" if isinstance(part, Block) else f"frozen {part.name}"


def _parameter_sizes(captured: Capture) -> dict[str, dict[str, int]]:
    """Elements of the parameters a node reads, by node; of a parameter itself, by its own placeholder."""
    sizes: dict[str, dict[str, int]] = {}
    for node in captured.graph.find_nodes(op="placeholder"):
        if node.meta["kind"] == "parameter":
            own = {node.name: node.meta["val"].numel()}
            for reader in (node, *node.users):
                sizes.setdefault(reader.name, {}).update(own)
    return sizes


def formula(expression: sympy.Expr) -> str:
    """`12.6 G*b + 3 M`: a polynomial of the batch b with short coefficients."""
    symbols = expression.free_symbols
    if not symbols:
        return _human(int(expression))
    b = sympy.Symbol("b")
    expression = expression.subs(dict.fromkeys(symbols, b))
    if not expression.is_polynomial(b):
        return str(expression)
    names = {0: "", 1: "*b"}
    terms = [(power, int(value)) for (power,), value in sympy.Poly(expression, b).terms()]
    return " + ".join(_human(value) + names.get(power, f"*b^{power}") for power, value in terms)


def _human(number: float) -> str:
    for unit in ("", " K", " M", " G"):
        if abs(number) < 1000:
            return f"{number:.4g}{unit}"
        number /= 1000
    return f"{number:.4g} T"


def profile(
    step: Costed, batch_sizes: Sequence[int], device: torch.device, progress: Callable[[str], None] = lambda name: None
) -> profiled.Profile:
    """Time every block and component, forward and backward, at every batch size; all weights and inputs are made up.

    The explicit graphs that rank programs are made of run on `device`, one block at a time. `progress` is called with a
    part's name before it is timed: parts times batch sizes calls.
    """
    sizes = sorted(set(batch_sizes))
    if not sizes or sizes[0] < 1:
        raise CompileError(f"batch sizes to profile must be positive, got {list(batch_sizes)}")
    fixed = step.captured.inputs.batch_size
    if not step.captured.batch and sizes != [fixed]:
        raise CompileError(f"the graph holds for batches of {fixed} only; profile that size")
    num_blocks = len(step.graph.blocks)
    alone = Staged(tuple(range(num_blocks + 1)), (0,) * num_blocks, "1f1b", False, 1)
    traced = trace(step.captured, analyse_batch(step.captured, 2), step.graph, alone, sizes, device)
    entries = []
    for part in step.parts:
        where = ("F", part.index) if isinstance(part, Block) else ("T", step.graph.components.index(part))
        times = []
        for size in sizes:
            progress(part.name)
            times.append(_timed(traced.graphs[where][size], device))
        forward, backward = zip(*times, strict=True)
        entries.append(profiled.Entry(part.name, part.nodes, tuple(sizes), forward, backward))
    key = profiled.key_of(step.captured.graph, device)
    return profiled.with_measurements(devices.device("A100-80GB"), key, tuple(entries))


def _timed(graphs: StageGraphs, device: torch.device) -> tuple[float, float]:
    """Median seconds of forward and backward."""
    state = nest({name: _made_up(value, device) for name, value in graphs.state.items()})
    reads = [_made_up(value, device) for value in graphs.reads]
    forward = fx.GraphModule(state, graphs.forward)
    with torch.no_grad():
        seconds = profiled.median_seconds(lambda: forward(*reads), device)
        if graphs.backward is None:
            return seconds, 0.0
        returns, saved = forward(*reads)
        pairs = zip(graphs.returns, returns, strict=True)
        tangents = [torch.ones_like(value) for border, value in pairs if border.requires_grad]
        backward = fx.GraphModule(state, graphs.backward)
        return seconds, profiled.median_seconds(lambda: backward(list(saved), *tangents), device)


def _made_up(value: Value, device: torch.device) -> torch.Tensor:
    """Small positive numbers: no infinities, and integers that are valid as indices."""
    if value.dtype.is_floating_point:
        return torch.rand(value.shape, device=device).mul_(0.1).add_(0.01).to(value.dtype)
    return torch.zeros(value.shape, dtype=value.dtype, device=device)


def part_count(step: Costed, batch_sizes: Iterable[int]) -> int:
    """How many timings a profile takes."""
    return len(step.parts) * len(set(batch_sizes))
