"""Text in a joint sequence: what belongs to no row is the first patch's alone, or every patch's.

                         text="all"                   text="first"
patch 0, of 4 units      text | units 0 1             text | unit 0
patch 1                  text | units 2 3                    units 1 2 3

Where the first patch has it, what text alone feeds vanishes from the graphs of the others, who read its keys and values
as they read anyone's. A step then has T + L rows of tokens instead of N T + L, and the first patch fewer of the image.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from torch import fx

from fxpipe.plan.sample_plan import AttentionKind
from passes.rows import RowPlan
from passes.rows.how import Summed
from passes.rows.layout import Rows
from passes.sampling.attention import Shared
from passes.sampling.messages import exchange_nodes
from passes.sampling.patch_graph import patch_graph
from passes.sampling.patches import Patch, shared_bounds
from passes.sampling.shared import shared_values

Text = Literal["first", "all"]


def has_text(plan: RowPlan) -> bool:
    """Whether some value is rows and text in one sequence."""
    return any(isinstance(state, Rows) and not state.all_rows for state in plan.states.values())


def text_graph(
    plan: RowPlan, shared: frozenset[str], patches: Sequence[Patch], index: int, kinds: Sequence[AttentionKind] = ()
) -> fx.Graph | None:
    """The graph of one of the patches, of which the first one has the text, and what is `shared`; attention of these
    kinds. None where it needs some of that beside its keys and values."""
    graph = patch_graph(plan, patches[index], None, shared, Shared.of(plan, patches, kinds))
    read = [node for node in graph.find_nodes(op="placeholder") if node.meta["kind"] == "read"]
    if any(node.users for node in read):
        return None
    for node in read:
        graph.erase_node(node)
    return graph


def one_of_every_sort(num_patches: int) -> list[int]:
    """Patches by number, as all others are but for their units: the first one, which has the text, one with neighbours
    on both sides, and the last one."""
    return sorted({0, min(1, num_patches - 1), num_patches - 1})


def alike(graphs: Sequence[fx.Graph]) -> bool:
    """Whether patches exchange the same, in the same order."""
    swapped = [[node.meta["exchange"].name for node in exchange_nodes(graph)] for graph in graphs]
    return all(one == swapped[0] for one in swapped)


def balanced_bounds(
    plan: RowPlan, shared: frozenset[str], node_seconds: Mapping[str, float], num_patches: int,
    speeds: Sequence[float] = (),
) -> tuple[int, ...]:  # fmt: skip
    """Bounds of patches that take about as long, the first one's text and rows as the rows of another; by the `speeds`
    of their ranks where these are given. `shared`: what the first one alone makes."""
    count, text, rows = plan.units.count, 0.0, 0.0
    for name, seconds in node_seconds.items():
        state = plan.states[name]
        part = float(name in shared)
        if isinstance(state, Rows):
            part = 1 - sum(p.size(count) for p in state.parts if p.kind == "rows") / state.size(count)
        if state is not None or name in shared or isinstance(plan.found[name].how, Summed):
            text, rows = text + part * seconds, rows + (1 - part) * seconds
    return shared_bounds(count, speeds or [1.0] * num_patches, text / rows * count if rows else 0.0)


def shared_text(plan: RowPlan, late: frozenset[str]) -> frozenset[str]:
    """What is the first patch's where that has the text alone; `late` is what depends on the patch."""
    return shared_values(plan, frozenset(plan.sized.nodes) - late)
