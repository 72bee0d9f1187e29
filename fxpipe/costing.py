"""What a training step costs before it is planned: block by block as formulas, or as measured on the device at hand.

fxpipe cost MODEL         FLOPs, bytes and parameters of every block as formulas of the batch b
fxpipe profile MODEL      seconds of every block at a few batch sizes, for `cost_model="profile.json"`
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from cost_models import devices, profiled
from cost_models.flops import node_costs
from fxpipe.block_graph import Block
from fxpipe.capture import Capture, capture
from fxpipe.capture.inputs import describe
from fxpipe.cost_rows import Costed
from fxpipe.costs import CostModel, node_seconds
from fxpipe.errors import CompileError
from fxpipe.options import training_step
from fxpipe.prediction import whole_bytes
from fxpipe.rank_program import nest
from fxpipe.staged import Staged
from passes.batch import BatchPlan
from passes.batch import analyse as analyse_batch
from passes.block_costs import block_costs
from passes.blocks import analyse as analyse_blocks
from passes.lowering.stage_graphs import StageGraphs
from passes.lowering.trace import trace
from passes.lowering.units import Value

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
    _batch_plan(captured)  # its rewrites are part of what is compiled
    costs = {node.name: cost for node, cost in node_costs(captured.graph.nodes).items()}
    seconds = node_seconds(cost_model, captured.graph, costs, num_samples or batch_size)
    both = {name: seconds.forward[name] + seconds.backward[name] for name in costs}
    graph = analyse_blocks(captured, both, num_blocks)
    return Costed(captured, costs, graph, block_costs(captured, graph, costs, cost_model))


def _batch_plan(captured: Capture) -> BatchPlan:
    """How the step runs on micro-batches; where it cannot be cut, on one."""
    try:
        return analyse_batch(captured, 2)
    except CompileError:
        return analyse_batch(captured, 1)


def profile(
    step: Costed,
    batch_sizes: Sequence[int],
    device: torch.device,
    progress: Callable[[str], None] = lambda name: None,
    share: tuple[int, int] = (0, 1),
) -> profiled.Profile:
    """Time every block and component, forward and backward, at every batch size; all weights and inputs are made up.

    The explicit graphs that rank programs are made of run on `device`, one block at a time. `progress` is called with a
    part's name before it is timed. Of a `share` (r, N) only parts r, r + N, ... are timed; `gathered` puts the profiles
    of all N together.
    """
    sizes = sorted(set(batch_sizes))
    if not sizes or sizes[0] < 1:
        raise CompileError(f"batch sizes to profile must be positive, got {list(batch_sizes)}")
    fixed = step.captured.inputs.batch_size
    if not step.captured.batch and sizes != [fixed]:
        raise CompileError(f"the graph holds for batches of {fixed} only; profile that size")
    num_blocks = len(step.graph.blocks)
    alone = Staged(tuple(range(num_blocks + 1)), ((0,),) * num_blocks, "1f1b", False, 1)
    traced = trace(step.captured, _batch_plan(step.captured), step.graph, alone, sizes, device)
    entries = []
    for part in step.parts[share[0] :: share[1]]:
        where = ("F", part.index) if isinstance(part, Block) else ("T", step.graph.components.index(part))
        times = []
        for size in sizes:
            progress(part.name)
            times.append(_timed(traced.graphs[where][size], device))
        forward, backward = zip(*times, strict=True)
        entries.append(profiled.Entry(part.name, part.nodes, tuple(sizes), forward, backward))
    key = profiled.key_of(step.captured.graph, device)
    speeds = profiled.Speeds(profiled.moving_speed(device), _drawing(step.captured, sizes[-1], device))
    return profiled.with_measurements(devices.device("A100-80GB"), key, tuple(entries), speeds)


def _drawing(captured: Capture, batch_size: int, device: torch.device) -> tuple[tuple[str, float], ...]:
    """Bytes per second that each of the step's random operations draws, by the largest of its draws."""
    sizes = whole_bytes(captured, batch_size)
    largest = {draw.target: draw for draw in sorted(captured.draws.values(), key=lambda draw: sizes[draw.index])}
    return tuple(
        (target, sizes[draw.index] / profiled.median_seconds(partial(draw.sample, batch_size, 0, 0, device), device))
        for target, draw in largest.items()
    )


def gathered(profiles: Sequence[profiled.Profile]) -> profiled.Profile:
    """One profile of the N shares that N ranks have timed, in rank order.

    Raises:
        CompileError: they are of different graphs or devices.
    """
    first = profiles[0]
    for other in profiles[1:]:
        profiled.require_key(other.key, first.key)
    most = max(len(one.entries) for one in profiles)
    entries = [one.entries[turn] for turn in range(most) for one in profiles if turn < len(one.entries)]
    return replace(first, entries=tuple(entries))


def _timed(graphs: StageGraphs, device: torch.device) -> tuple[float, float]:
    """Median seconds of forward and backward."""
    state = nest({name: _made_up(value, device) for name, value in graphs.state.items()})
    reads = [_made_up(value, device) for value in graphs.reads]
    forward = fx.GraphModule(state, graphs.forward)
    with torch.no_grad():
        seconds = profiled.median_seconds(lambda: forward(*reads), device)
        if graphs.backward is None:
            return seconds, 0.0
        returns, saved = forward(*reads)
        pairs = zip(graphs.returns, returns, strict=True)
        tangents = [torch.ones_like(value) for border, value in pairs if border.requires_grad]
        backward = fx.GraphModule(state, graphs.backward)
        return seconds, profiled.median_seconds(lambda: backward(list(saved), *tangents), device)


def _made_up(value: Value, device: torch.device) -> torch.Tensor:
    """Small positive numbers: no infinities, and integers that are valid as indices."""
    if value.dtype.is_floating_point:
        return torch.rand(value.shape, device=device).mul_(0.1).add_(0.01).to(value.dtype)
    return torch.zeros(value.shape, dtype=value.dtype, device=device)


def part_count(step: Costed, batch_sizes: Iterable[int], share: tuple[int, int] = (0, 1)) -> int:
    """How many timings a share of a profile takes."""
    return len(step.parts[share[0] :: share[1]]) * len(set(batch_sizes))
