"""Which samples of a batch a rank's programs read, so that it need not be given the others.

x_mb0 = slice_batch(x, ..., 0, 2, 8)      x_mb2 = slice_batch(x, ..., 4, 6, 8)      ->   samples 0, 1, 4, 5
weights = whole_batch(w, ...)                                                       ->   all samples
"""

from collections.abc import Collection, Iterable, Iterator

from torch import fx

from fxpipe.plan import ops
from fxpipe.plan.step import StepPlan


def samples_read(plans: Iterable[StepPlan], rank: int) -> tuple[int, ...]:
    """The samples of a batch that a rank reads in these forms of a step, in order, of whichever inputs.

    One sample where it reads nothing but what all samples share, for that must come with some batch.
    """
    found: set[int] = set()
    for plan in plans:
        for form in (plan, plan.without):
            if form is not None:
                found.update(_of_program(form, rank))
    return tuple(sorted(found))


def _of_program(plan: StepPlan, rank: int) -> Iterator[int]:
    program, batched = plan.program(rank), batched_inputs(plan)
    inputs = {name: name for name in program.inputs} | {f"next_{name}": name for name in program.next_inputs}
    for node in program.graph.find_nodes(op="placeholder"):
        if node.target in inputs and node.users:
            yield from _of_input(node, plan.batch_size) if inputs[node.target] in batched else (0,)


def _of_input(node: fx.Node, batch_size: int) -> Iterator[int]:
    for user in node.users:
        start, stop = user.args[4:6] if user.target is ops.slice_batch else (0, batch_size)
        yield from range(start, stop)  # type: ignore[arg-type]


def batched_inputs(plan: StepPlan) -> Collection[str]:
    """The programs' inputs that have a row for every sample; others are shared by all."""
    batched = {leaf.name for leaf in plan.inputs.leaves if leaf.batched}
    return {name for name, argument in plan.input_names.items() if argument in batched}
