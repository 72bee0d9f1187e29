"""What every graph that rank programs call is made of, to be priced by a cost model.

stage_1 = [conv, silu | linear]      stage_1_forward    {block 4: (conv, silu), block 5: (linear,)}
                               ->    stage_1_backward   the same nodes, counted backward
"""

from fxpipe.block_graph import BlockGraph
from fxpipe.costs.call_costs import PARTS, Block, CallCost
from passes.lowering import graph_name
from passes.lowering.messages import Layout
from passes.lowering.rank_writer import Sources
from passes.lowering.units import Unit


def call_costs(layout: Layout, sources: Sources, graph: BlockGraph) -> dict[str, CallCost]:
    """By graph name."""
    found = {}
    for sizes in layout.graphs.values():
        for graphs in sizes.values():
            blocks = _by_block(graphs.unit, graph)
            for part in PARTS:
                if getattr(graphs, part) is not None:
                    found[graph_name(layout, graphs, part)] = CallCost(
                        part, graphs.batch_size, blocks, graphs.recompute
                    )
    if (prologue := sources.prologue) is not None:
        found[prologue.unit.name] = CallCost("forward", prologue.batch_size, _by_block(prologue.unit, graph))
    return found


def _by_block(unit: Unit, graph: BlockGraph) -> dict[Block, tuple[str, ...]]:
    blocks: dict[Block, list[str]] = {}
    for name in unit.nodes:
        blocks.setdefault(graph.owners.get(name), []).append(name)
    return {block: tuple(nodes) for block, nodes in blocks.items()}
