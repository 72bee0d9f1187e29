"""What a training step costs before it is planned: FLOPs, bytes and parameters of every block, as formulas of the
batch."""

from pathlib import Path
from typing import Any

from torch import nn

from cost_models import devices, profiled
from cost_models.flops import node_costs
from fxpipe.capture import Capture, capture
from fxpipe.capture.inputs import describe
from fxpipe.costs import CostModel, node_seconds
from fxpipe.costs.rows import Costed
from fxpipe.errors import CompileError
from fxpipe.options import training_step
from passes.batch import BatchPlan
from passes.batch import analyse as analyse_batch
from passes.block_costs import block_costs
from passes.blocks import analyse as analyse_blocks

_MIN_BLOCKS, _BLOCKS_PER_STAGE, _MOST_BLOCKS = 24, 8, 128


def given_cost_model(given: CostModel | str) -> CostModel:
    """A device by name, the profile of a `.json` file, or the cost model itself."""
    if not isinstance(given, str):
        return given
    if given.endswith(".json"):
        return profiled.load(Path(given), devices.device("A100-80GB"))
    return devices.device(given)


def num_blocks(stages: int | None, world_size: int) -> int:
    """Into how many blocks a step is cut to be planned: fine enough to balance, coarse enough to plan and to read."""
    wanted = _BLOCKS_PER_STAGE * (stages or 2 * world_size)
    return max(_MIN_BLOCKS, min(_MOST_BLOCKS, wanted), stages or 0)


def costed(
    model: nn.Module,
    example_inputs: Any,
    batch_size: int,
    cost_model: CostModel,
    num_blocks: int,
    num_samples: int | None = None,
) -> Costed:
    """Capture a step and cut it into about `num_blocks` blocks of equal time by `cost_model`.

    Times are those of `num_samples` samples, a micro-batch; of the whole batch where left out.
    """
    step, args, kwargs = training_step(model, example_inputs, batch_size, 1)
    captured = capture(step, *describe(step, args, kwargs, batch_size))
    batch_plan(captured)  # its rewrites are part of what is compiled
    costs = {node.name: cost for node, cost in node_costs(captured.graph.nodes).items()}
    seconds = node_seconds(cost_model, captured.graph, costs, num_samples or batch_size)
    both = {name: seconds.forward[name] + seconds.backward[name] for name in costs}
    graph = analyse_blocks(captured, both, num_blocks)
    return Costed(captured, costs, graph, block_costs(captured, graph, costs, cost_model))


def batch_plan(captured: Capture) -> BatchPlan:
    """How the step runs on micro-batches; where it cannot be cut, on one."""
    try:
        return analyse_batch(captured, 2)
    except CompileError:
        return analyse_batch(captured, 1)
