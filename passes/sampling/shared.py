"""Shared values: what belongs to no row though it depends on the patch, as text does after attention with the image.

x = attention(...)          whole T | rows W     every patch its rows, the first one the text too
text, image = split(x)      None, rows W         text is shared: the first patch makes it, the others read it there
text2 = linear(text)        None                 shared
s = sum over rows of image  None                 not shared: every patch adds up what it knows
m = topk(whole image)[0]    None                 nor this: every patch has its own whole image
"""

from fxpipe.errors import CompileError
from passes.rows import RowPlan
from passes.rows.how import CutRows
from passes.rows.layout import Result, Rows


def shared_values(plan: RowPlan, early: frozenset[str]) -> frozenset[str]:
    """The names of shared values.

    Args:
        early: operations that do not depend on the patch.
    """
    found: set[str] = set()
    for node in plan.sized.graph.nodes:
        state = plan.states.get(node.name)
        has_rows = isinstance(state, Rows) or _is_split(state)
        if node.op != "call_function" or node.name in early or has_rows:
            continue
        how, late = plan.found[node.name].how, [n for n in node.all_input_nodes if n.name not in early]
        late = [operand for operand in late if operand.op != "placeholder" or plan.state(operand) is not None]
        if isinstance(how, CutRows) or all(n.name in found or _is_split(plan.state(n)) for n in late):
            found.add(node.name)
    return frozenset(found)


def _is_split(state: Result) -> bool:
    """Whether some of several results have rows."""
    return isinstance(state, tuple) and any(one is not None for one in state)


def require_rows(plan: RowPlan) -> None:
    """Refuse a prediction that patches, one after the other, would each make whole."""
    state = plan.state(plan.sized.result)
    if not isinstance(state, Rows):
        node = plan.sized.result
        raise CompileError(
            f"module {node.meta.get('path') or '(the model itself)'}: the prediction ({node.name}) is not made row by "
            "row, so patches that follow each other through stages would each make another; use mode='exact', or "
            "stages=1 with a rank for each patch"
        )
