"""What is made of inputs row by row: every rank has all rows of these, so a window on it needs no word of others.

frames = flatten(video, 0, 1)        frames_all = flatten(video, 0, 1)
conv_in = conv2d(frames, w, pad 1)   conv_in_rows = cut_rows(frames_all, 2, ...)    one row more above and below
                                     conv_in = conv2d(conv_in_rows, w, pad (0, 1))
"""

from torch import fx

from passes.operations import CASTS, ELEMENTWISE, PERMUTATIONS, VIEWS, is_pointwise, operation_name
from passes.rows import RowPlan
from passes.rows.how import Same, Shaped
from passes.rows.layout import Rows

_KINDS = CASTS | ELEMENTWISE | PERMUTATIONS | VIEWS | {"cat", "concat", "concatenate", "stack"}


def of_inputs(plan: RowPlan, value: fx.Node) -> tuple[fx.Node, ...] | None:
    """The operations that make a value with rows of inputs, in their order; None where others have to tell of it, or
    one of these has a larger result than what it is made of."""
    made = dict[fx.Node, None]()
    return tuple(made) if _made(plan, value, made) else None


def _made(plan: RowPlan, value: fx.Node, made: dict[fx.Node, None]) -> bool:
    if value.meta.get("kind") == "input" or value in made:
        return True
    if value.op != "call_function" or not _row_by_row(plan, value):
        return False
    operands = value.all_input_nodes
    if value.meta["val"].numel() > sum(operand.meta["val"].numel() for operand in operands):
        return False
    if not all(_made(plan, operand, made) for operand in operands if plan.state(operand) is not None):
        return False
    made[value] = None
    return True


def _row_by_row(plan: RowPlan, node: fx.Node) -> bool:
    is_kind = is_pointwise(node.target) or operation_name(node.target) in _KINDS
    how, states = plan.found[node.name].how, (plan.state(operand) for operand in node.all_input_nodes)
    are_rows = all(state is None or isinstance(state, Rows) for state in (plan.state(node), *states))
    return is_kind and are_rows and (how == Same() or isinstance(how, Shaped))
