"""When the values of a denoiser are known: a value is known when the last of its operands is.

0 with the weights      position tables            2 with the step     time embeddings, modulation
1 with the call         keys of the text           3 with the patch    what is made of the sample
"""

from collections.abc import Collection, Mapping

from passes.rows import RowPlan
from passes.rows.sized import Sized

WEIGHTS, CALL, STEP, PATCH = range(4)


def inputs_of_call(plan: RowPlan, sample: Collection[str]) -> frozenset[str]:
    """The inputs that are taken to stay as they are in a call: all with channels but the `sample`; times have none."""
    nodes, known = plan.sized.nodes, plan.inputs.items()
    return frozenset(name for name, argument in known if argument not in sample and nodes[name].meta["val"].ndim > 1)


def late_values(sized: Sized, sample: Collection[str]) -> frozenset[str]:
    """The names of values that are known with the patch; `sample`: the inputs that have rows."""
    times = binding_times(sized, dict.fromkeys(sample, PATCH))
    return frozenset(name for name, time in times.items() if time == PATCH)


def binding_times(sized: Sized, of_inputs: Mapping[str, int]) -> dict[str, int]:
    """The time of every value, by its node's name.

    Args:
        of_inputs: the time of every input, by its name; one that is not named is known with the step.
    """
    times: dict[str, int] = {}
    for node in sized.graph.nodes:
        if node.op == "placeholder":
            is_input = node.meta["kind"] == "input"
            times[node.name] = of_inputs.get(node.meta["input"], STEP) if is_input else WEIGHTS
        elif node.op == "call_function":
            times[node.name] = max((times[operand.name] for operand in node.all_input_nodes), default=WEIGHTS)
    return times
