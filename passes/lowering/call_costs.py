"""What every graph that rank programs call is made of, to be priced by a cost model.

stage_1 = [conv, silu | linear]      stage_1_forward    {block 4: (conv, silu), block 5: (linear,)}
                               ->    stage_1_backward   the same nodes, counted backward; forward too where recomputed
"""

from collections.abc import Iterator

from fxpipe.costs.call_costs import Block, CallCost, Part
from fxpipe.plan.block_graph import BlockGraph
from fxpipe.plan.schedule import Schedule
from passes.lowering.borders import Border
from passes.lowering.program_writer import graph_name
from passes.lowering.step_graphs import WHOLE_BATCH, Key, StepGraphs


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
