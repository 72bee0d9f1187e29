"""What every graph that rank programs call is made of, block by block, and the seconds a cost model makes of it: what
planners add up of blocks is held against it.

stage_1 = [conv, silu | linear]      stage_1_forward    {block 4: (conv, silu), block 5: (linear,)}
                               ->    stage_1_backward   the same nodes, counted backward; forward too where recomputed
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from fxpipe.costs.model import NodeSeconds
from fxpipe.costs.polynomials import Floats
from fxpipe.costs.table import CostTable
from fxpipe.plan.block_graph import BlockGraph
from fxpipe.plan.schedule import Schedule
from passes.lowering.borders import Border
from passes.lowering.program_writer import graph_name
from passes.lowering.step_graphs import WHOLE_BATCH, Key, StepGraphs

Part = Literal["forward", "backward", "backward_input", "backward_weight"]

Block = int | str | None
"""A block's index or a component's name; None for nodes that any unit computes for itself."""


@dataclass(frozen=True)
class CallCost:
    """One graph: which part of a unit, for how many samples, and the captured nodes of each block.

    The backward computes the nodes in `again` anew, where it is whole or gives input gradients.
    """

    part: Part
    num_samples: int
    blocks: Mapping[Block, tuple[str, ...]]
    again: frozenset[str] = frozenset()

    def seconds(self, table: CostTable, of_nodes: NodeSeconds) -> dict[Block, float]:
        """Seconds of each block in this graph; `of_nodes` are those of the table at `num_samples`."""
        taken: Floats = getattr(of_nodes, self.part)
        again = self.again if self.part in ("backward", "backward_input") else ()
        found = {}
        for block, nodes in self.blocks.items():
            anew = table.positions([name for name in nodes if name in again])
            found[block] = float(taken[table.positions(nodes)].sum() + of_nodes.forward[anew].sum())
        return found


def call_costs(step: StepGraphs) -> dict[str, CallCost]:
    """Of the stages and components, in a step that trains on its own frozen work, by graph name."""
    found = {}
    for key in step.units:
        again = _again(step, key)
        for size in sorted({*step.sizes}):
            border = step.border(key, size)
            blocks = _by_block(border, step.graph)
            for part in _parts(border):
                found[graph_name(step.sizes, border, part)] = CallCost(part, size, blocks, again)
    if step.whole_batch is not None:
        border = step.border(WHOLE_BATCH, step.batch_size)
        found[border.unit.name] = CallCost("forward", border.batch_size, _by_block(border, step.graph))
    return found


def piece_costs(step: StepGraphs, schedule: Schedule) -> dict[str, CallCost]:
    """Of the layers in a schedule's pieces of frozen work, by graph name."""
    owner = {name: component.name for component in step.graph.components for name in component.nodes}
    found = {}
    for piece in (action for actions in schedule.ranks for action in actions if action.is_piece):
        for layer in step.layers_of(piece):
            unit = step.unit(layer)
            blocks: dict[Block, tuple[str, ...]] = {owner.get(unit.nodes[-1]): unit.nodes}
            found[f"{unit.name}_b{piece.num_samples}"] = CallCost("forward", piece.num_samples, blocks)
    return found


def _parts(border: Border) -> Iterator[Part]:
    yield "forward"
    if border.has_backward:
        yield "backward"
    if border.splits:
        yield "backward_input"
        yield "backward_weight"


def _again(step: StepGraphs, key: Key) -> frozenset[str]:
    """Of a unit's nodes those that its backward computes again: what no block owns, where all its blocks are."""
    nodes, recompute = step.unit(key).nodes, step.recompute(key)
    runs = frozenset(name for run in recompute.runs for name in run)
    return frozenset(nodes) if runs.issuperset(n for n in nodes if n not in recompute.local) else runs


def _by_block(border: Border, graph: BlockGraph) -> dict[Block, tuple[str, ...]]:
    blocks: dict[Block, list[str]] = {}
    for name in border.unit.nodes:
        blocks.setdefault(graph.owners.get(name), []).append(name)
    return {block: tuple(nodes) for block, nodes in blocks.items()}
