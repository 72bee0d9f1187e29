"""The cost of every graph that rank programs call, from the costs of the captured nodes.

stage_1 = [conv, silu | linear]      stage_1_forward    {block 4: (conv, silu), block 5: (linear,)}
                               ->    stage_1_backward   the same nodes, counted backward
"""

from collections.abc import Mapping

from fxpipe.block_graph import BlockGraph
from fxpipe.call_costs import PARTS, CallCost
from fxpipe.costs import NodeCost
from passes.lowering import graph_name
from passes.lowering.messages import Layout
from passes.lowering.rank_writer import Sources
from passes.lowering.units import Unit


def call_costs(
    layout: Layout, sources: Sources, costs: Mapping[str, NodeCost], graph: BlockGraph
) -> dict[str, CallCost]:
    """By graph name; `costs` is by captured node."""
    found = {}
    for sizes in layout.graphs.values():
        for graphs in sizes.values():
            blocks = _by_block(graphs.unit, costs, graph)
            for part in PARTS:
                if getattr(graphs, part) is not None:
                    found[graph_name(layout, graphs, part)] = CallCost(part, graphs.batch_size, blocks)
    if (prologue := sources.prologue) is not None:
        blocks = _by_block(prologue.unit, costs, graph)
        found[prologue.unit.name] = CallCost("forward", prologue.batch_size, blocks)
    return found


def _by_block(
    unit: Unit, costs: Mapping[str, NodeCost], graph: BlockGraph
) -> dict[int | str | None, tuple[NodeCost, ...]]:
    blocks: dict[int | str | None, list[NodeCost]] = {}
    for name in unit.nodes:
        blocks.setdefault(graph.owners.get(name), []).append(costs[name])
    return {key: tuple(nodes) for key, nodes in blocks.items()}
