"""The compiler, top to bottom: a training step becomes one program per rank."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from cost_models.flops import node_costs
from fxpipe.block_graph import Block, Component
from fxpipe.block_graph_check import require as require_block_graph
from fxpipe.capture import capture
from fxpipe.capture.inputs import describe
from fxpipe.cluster import Cluster
from fxpipe.costing import given_cost_model
from fxpipe.costs import CostModel, node_seconds
from fxpipe.errors import CompileError
from fxpipe.options import check_counts, given_cluster, given_device, given_schedule, microbatch_sizes, training_step
from fxpipe.prediction import Costing
from fxpipe.program import Plan, Program
from fxpipe.program_check import require_programs
from fxpipe.schedule import Schedule
from fxpipe.schedule_check import require as require_schedule
from fxpipe.staged import Staged
from fxpipe.step import StepPlan
from passes.batch import BatchPlan
from passes.batch import analyse as analyse_batch
from passes.blocks import analyse as analyse_blocks
from passes.call_costs import call_costs
from passes.lowering import lower
from passes.lowering.trace import Traced, trace
from passes.place import BlockTimes, Request, place, stage_seconds
from passes.schedule import make_schedule

Observe = Callable[[str, Any], None]
_MIN_BLOCKS, _BLOCKS_PER_STAGE = 24, 4  # fine enough to balance, coarse enough to read


@torch.enable_grad()  # what surrounds the call is not part of the step
def compile(
    model: nn.Module,
    world_size: int,
    *,
    example_inputs: Any = None,
    batch_size: int | None = None,
    microbatches: int | None = None,
    stages: int | None = None,
    schedule: str | Schedule = "auto",
    cluster: Cluster | str | None = None,
    cost_model: CostModel | str | None = None,
    device: str | torch.device = "cpu",
    observe: Observe | None = None,
) -> Program:
    """Compile one training step for `world_size` ranks.

    Args:
        model: an `nn.Module` whose forward returns the loss, or a bare diffusers backbone (the step is then: predict,
            mean squared error against `target`). On the meta device it compiles without weights.
        world_size: number of ranks.
        example_inputs: one batch, a tuple of positional or a dict of keyword arguments of forward; may be left out for
            a backbone and for a model with a method `example_inputs(batch_size)`.
        batch_size: samples in one step, over all micro-batches; the example's where left out.
        microbatches: number of micro-batches; their sizes differ by one sample where it does not divide the batch.
        stages: number of stages, a multiple of `world_size`.
        schedule: "auto", a name ("gpipe", "1f1b", "interleaved", "wave", "zero-bubble"), a `Schedule` or its text.
        cluster: the machines to plan for, a `Cluster` or its text ("2x8xV100"); `world_size` A100-80GB where left out.
        cost_model: a device by name ("H100@bfloat16", "measured"), a profile's .json file, or any `CostModel`; the
            cluster's device where left out.
        device: where the ranks run ("cpu", or "cuda" for one GPU a rank).
        observe: called with (step's name, its result) after every step of the compiler.

    Raises:
        CaptureError: the model cannot be captured as one graph.
        CompileError: it can, but not cut into micro-batches or stages as asked; or an option is wrong.
    """
    see = observe or (lambda name, artefact: None)
    check_counts(world_size=world_size, batch_size=batch_size, microbatches=microbatches, stages=stages)
    network = given_cluster(cluster, world_size)
    seconds_of = given_cost_model(network.device if cost_model is None else cost_model)
    where = given_device(device)
    asked = given_schedule(schedule, world_size)
    step, args, kwargs = training_step(model, example_inputs, batch_size, world_size)

    # capture: one flat graph of ATen operations
    inputs, examples = describe(step, args, kwargs, batch_size)
    captured = capture(step, inputs, examples)
    inputs = captured.inputs
    see("capture", captured)

    # analyse: what may be cut into micro-batches; blocks, frozen components, the values between them
    wanted = microbatches if captured.batch else microbatches or 1
    sizes = microbatch_sizes(inputs.batch_size, wanted, world_size, asked)
    batch = analyse_batch(captured, len(sizes))
    if not batch.divisible and len(sizes) > 1:
        raise CompileError(
            f"{captured.notes[0]}; it cannot be cut into {len(sizes)} micro-batches: pass microbatches=1"
        )
    see("batch", batch)
    costs = {node.name: cost for node, cost in node_costs(captured.graph.nodes).items()}
    seconds = node_seconds(seconds_of, captured.graph, costs, max(sizes))
    both = {name: seconds.forward[name] + seconds.backward[name] for name in costs}
    graph = analyse_blocks(captured, both, max(_MIN_BLOCKS, _BLOCKS_PER_STAGE * (stages or 2 * world_size)))
    require_block_graph(graph, captured)
    see("blocks", graph)

    # partition: stages and their ranks
    times = BlockTimes(
        _sums(graph.blocks, seconds.forward),
        _sums(graph.blocks, seconds.backward),
        _sums(graph.components, seconds.forward),
        max(sizes),
    )
    request = Request(asked, stages, world_size, len(sizes))
    staged = place(graph, times, request, network)
    see("stages", staged)

    # trace: forward and explicit backward graphs of every stage
    traced = trace(captured, batch, graph, staged, sizes, where)
    see("stage graphs", traced)

    # schedule: the order of every rank's actions
    ordered = asked if isinstance(asked, Schedule) else _order(staged, traced, times)
    require_schedule(ordered, traced.work, world_size)
    see("schedule", ordered)

    # lower: one program per rank
    layout = traced.layout(ordered, graph, staged)
    programs, messages, reductions = lower(layout, traced.sources, _loss_weights(batch, sizes), traced.state, where)
    require_programs(programs, messages, reductions)
    see("programs", programs)

    plan = Plan(staged, graph, sizes, times.total, (*captured.notes, *staged.notes))
    names = {n.name: n.meta["input"] for n in captured.graph.find_nodes(op="placeholder") if n.meta["kind"] == "input"}
    draws = {draw.index: draw for draw in captured.draws.values()}
    step_plan = StepPlan(inputs, names, sum(sizes), draws, ordered, programs, messages, reductions, where)
    costing = Costing(call_costs(layout, traced.sources, graph), costs, seconds_of, network)
    return Program(step, captured, plan, step_plan, costing, "model." if step is not model else "")


def _sums(groups: Iterable[Block | Component], seconds: Mapping[str, float]) -> tuple[float, ...]:
    return tuple(sum(seconds[name] for name in group.nodes) for group in groups)


def _loss_weights(batch: BatchPlan, sizes: Sequence[int]) -> list[float]:
    """The factor of every micro-batch's loss in the whole batch's."""
    return [size / sum(sizes) if batch.loss_scale == "mean" else 1.0 for size in sizes]


def _order(staged: Staged, traced: Traced, times: BlockTimes) -> Schedule:
    return make_schedule(
        staged.schedule,
        traced.work,
        staged.stage_ranks,
        stage_seconds(staged, times.forward),
        stage_seconds(staged, times.backward),
        frozen_seconds=times.components,
        world_size=staged.world_size,
    )
