"""The compiler, top to bottom: a training step becomes one program per rank."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from cost_models.flops import node_costs
from fxpipe.block_graph import human_bytes
from fxpipe.block_graph_check import require as require_block_graph
from fxpipe.capture import Capture, capture
from fxpipe.capture.inputs import describe
from fxpipe.cluster import Cluster
from fxpipe.costing import given_cost_model, num_blocks
from fxpipe.costs import CostModel, NodeCost, node_seconds, uncosted_ops
from fxpipe.errors import CompileError
from fxpipe.options import (
    asked_microbatches,
    check_collocation,
    check_counts,
    check_fill,
    check_others,
    given_bytes,
    given_cluster,
    given_device,
    given_schedule,
    microbatch_sizes,
    training_step,
    unwrapped,
)
from fxpipe.prediction import Costing
from fxpipe.program import Plan, Program
from fxpipe.schedule import Schedule
from fxpipe.schedule_check import require as require_schedule
from fxpipe.step import FilledPlan, StepPlan
from passes.batch import BatchPlan
from passes.batch import analyse as analyse_batch
from passes.block_costs import block_costs
from passes.blocks import analyse as analyse_blocks
from passes.call_costs import call_costs
from passes.estimate import without_components
from passes.filled import FORMS, Filled, Frozen, fill_step
from passes.frozen_layers import frozen_layers
from passes.lowering import Lowered, lower, require_lowered
from passes.lowering.trace import trace
from passes.order import Ordered, Resources, order
from passes.placement.cascade import first_stages
from passes.plan import make_plan
from passes.rehearsal.case import Case
from passes.room import Room
from passes.tuner.candidates import Wishes
from passes.tuner.tune import NothingFits

Observe = Callable[[str, Any], None]
_TRIES = 6  # plans whose programs are held against a memory limit
_LESS = 0.995  # of what should be little enough for the next one


@torch.enable_grad()  # what surrounds the call is not part of the step
def compile(
    model: nn.Module,
    world_size: int,
    *,
    example_inputs: Any = None,
    batch_size: int | None = None,
    microbatches: int | None = None,
    stages: int | None = None,
    data_parallel: int | None = None,
    schedule: str | Schedule = "auto",
    memory_limit: int | str | None = None,
    collocation: str | None = None,
    recompute: bool | None = None,
    budget: float = 2.0,
    fill: str = "per-device",
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
        stages: number of stages, a multiple of the ranks of a pipeline.
        data_parallel: number of pipelines, which divides `world_size`; 1 where left out with a named schedule.
        schedule: "auto" tries them all and looks for a better one; a name of `passes.schedules.named.POLICIES`
            ("gpipe", "1f1b", "interleaved", "wave", "zero-bubble", ...); a `Schedule` or its text.
        memory_limit: bytes per rank that a step may need, alone or with the next batch's frozen work, a number or a
            text ("40GiB"); where left out, what the device planned for has, unless nothing fits into that.
        collocation: of a wave's skips: "hard" keeps both ends of each on one rank, "soft" only where balance allows;
            where left out, the faster one with "auto", else "hard".
        recompute: whether backwards compute their stage's forward again instead of keeping its values; where left out,
            only if nothing fits otherwise.
        budget: seconds to look for a schedule where that is "auto": of the best candidates, then of the chosen one.
        fill: how frozen work of the next batch gets into idle time: "per-device", "greedy", "exact" or "none".
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
    counts = {"batch_size": batch_size, "microbatches": microbatches, "stages": stages, "data_parallel": data_parallel}
    check_counts(world_size=world_size, **counts)
    check_collocation(collocation)
    check_fill(fill)
    check_others(cost_model, observe, recompute, budget)
    network = given_cluster(cluster, world_size)
    seconds_of = given_cost_model(network.device if cost_model is None else cost_model)
    where = given_device(device)
    asked = given_schedule(schedule, world_size)
    model, conditioning = unwrapped(model, asked)
    step, args, kwargs = training_step(model, example_inputs, batch_size, world_size)

    # capture: one flat graph of ATen operations
    inputs, examples = describe(step, args, kwargs, batch_size)
    captured = capture(step, inputs, examples)
    size = captured.inputs.batch_size
    see("capture", captured)

    # analyse: what may be cut into micro-batches; blocks, frozen components, the values between them
    count = asked_microbatches(microbatches, size, world_size, asked)
    count = 1 if count is None and not captured.batch else count
    batch = analyse_batch(captured, min(2, size) if count is None else count)
    _require_divisible(captured, batch, count)
    see("batch", batch)
    costs = {node.name: cost for node, cost in node_costs(captured.graph.nodes).items()}
    seconds = node_seconds(seconds_of, captured.graph, costs, -(-size // (count or 2 * world_size)))
    both = {name: seconds.forward[name] + seconds.backward[name] for name in costs}
    graph = analyse_blocks(captured, both, num_blocks(stages, world_size))
    require_block_graph(graph, captured)
    see("blocks", graph)

    # plan: how many replicas, stages and micro-batches; which blocks form a stage, which ranks own it
    table = block_costs(captured, graph, costs, seconds_of, where)
    filled, limit = fill != "none" and bool(graph.components), given_bytes(memory_limit)
    copies = data_parallel if asked == "auto" else data_parallel or 1
    layers = frozen_layers(captured, graph, costs, seconds_of)
    case = Case(graph, table, layers, seconds_of, network, world_size, size, divisible=batch.divisible)
    wishes = Wishes(asked, world_size, size, copies, stages, count, collocation, recompute, limit, conditioning, filled)
    back = _BackEnd(step, captured, batch, costs, case, where, budget, fill, "model." if step is not model else "", see)
    tries = 1 if isinstance(asked, Schedule) else _TRIES
    return _within(limit, tries, lambda within: back.program(replace(wishes, memory_limit_bytes=within)))


def _within(limit: int | None, tries: int, program_of: Callable[[int | None], Program]) -> Program:
    """The program whose ranks need no more than a limit for a step, filled or not. Plans count blocks, programs every
    tensor: where a program needs more than its plan counted, the next plan gets so much less.

    Raises:
        CompileError: no plan gets that far in so many tries.
    """
    if limit is None:
        return program_of(None)
    needed: list[int] = []
    within, too_little, too_much = float(limit), 0.0, float(limit)
    for _ in range(tries):
        try:
            program = program_of(int(within))
        except NothingFits:
            if not needed:
                raise
            too_little = within
        else:
            needed.append(program.needed_bytes)
            if needed[-1] <= limit:
                return program
            too_much = min([within, *(outcome.peak_bytes or within for outcome in program.plan.outcomes[:1])])
            within = _LESS * too_much * limit / needed[-1]
        if within <= too_little:
            within = (too_little + too_much) / 2
    raise NothingFits(
        f"no plan fits into memory_limit={human_bytes(limit)} per rank: of {len(needed)} programs that were tried, the "
        f"least needed is {human_bytes(min(needed))}; use more ranks, smaller batches, or a higher limit"
    )


@dataclass(frozen=True)
class _BackEnd:
    """An analysed step, to be planned and made into programs."""

    step: nn.Module
    captured: Capture
    batch: BatchPlan
    costs: Mapping[str, NodeCost]
    case: Case
    device: torch.device
    budget: float
    fill: str
    prefix: str
    see: Observe

    def program(self, wishes: Wishes) -> Program:
        """The program that serves the wishes."""
        captured, batch, graph, table, where = self.captured, self.batch, self.case.graph, self.case.costs, self.device
        asked, conditioning, network, seconds_of = (
            wishes.schedule,
            wishes.conditioning,
            self.case.cluster,
            self.case.model,
        )
        size, see = self.case.batch_size, self.see
        plan = make_plan(self.case, wishes, _device_bytes(seconds_of), self.budget)
        sizes, staged = microbatch_sizes(size, plan.microbatches), plan.staged
        see("plan", plan)

        # trace: forward and explicit backward graphs of every stage
        traced = trace(captured, batch, graph, staged, sizes, where)
        see("stage graphs", traced)

        # schedule: the order of every rank's actions
        search = plan.search_seconds
        room = Room(table, size, wishes.filled)
        resources = Resources.of(room, staged, plan.times, network, plan.limit_bytes)
        ordered = (
            Ordered(asked) if isinstance(asked, Schedule) else order(graph, staged, traced.work, resources, search)
        )
        require_schedule(ordered.schedule, traced.work, wishes.world_size)
        see("schedule", ordered.schedule)

        # lower: one program per rank
        layout = traced.layout(ordered.schedule, graph, staged)
        optional = first_stages(graph, table, staged.boundaries) if conditioning is not None else frozenset[int]()
        weights = _loss_weights(batch, sizes)
        lowered = lower(layout, traced.sources, weights, traced.state, where, optional=optional)
        require_lowered(lowered)
        see("programs", lowered.programs)

        steps = _Steps(captured, sum(sizes), where, conditioning)

        # fill: where something is frozen, the next batch's frozen work in this step's idle time; made when asked for
        def make_filled() -> FilledPlan:
            alone = without_components(traced.work)
            plain = ordered if isinstance(asked, Schedule) else order(graph, staged, alone, resources, search)
            limit, ahead = plan.limit_bytes, Room(table, size, filled=True)
            left = None if limit is None else ahead.for_frozen_work(staged, plain.schedule, sizes[0], limit)
            frozen = Frozen(captured, batch, graph, self.case.frozen, left)
            reduced = table.trained_bytes
            found = fill_step(
                frozen, staged, traced, plain.schedule, resources, reduced, weights, where, self.fill, optional
            )
            see("filled", found)
            return steps.filled(found)

        notes = (*captured.notes, *_uncosted(self.costs), *plan.notes, *ordered.notes)
        shown = Plan(staged, graph, sizes, plan.times.total, notes, plan.outcomes)
        costing = Costing(call_costs(layout, traced.sources, graph), self.costs, seconds_of, network)
        first = steps.plan(ordered.schedule, lowered)
        filled = make_filled if graph.components else None
        return Program(self.step, captured, shown, first, costing, filled, self.prefix)


@dataclass(frozen=True)
class _Steps:
    """Lowered programs as what engines run."""

    captured: Capture
    batch_size: int
    device: torch.device
    conditioning: float | None

    def plan(self, schedule: Schedule, lowered: Lowered) -> StepPlan:
        """One step, and where it has a first pass also the step without it."""
        placeholders = self.captured.graph.find_nodes(op="placeholder")
        names = {n.name: n.meta["input"] for n in placeholders if n.meta["kind"] == "input"}
        draws = {draw.index: draw for draw in self.captured.draws.values()}
        parts = (lowered.programs, lowered.messages, lowered.reductions)
        without = self.plan(schedule, lowered.without) if lowered.without else None
        rest = (self.device, without, self.conditioning or 0.0)
        return StepPlan(self.captured.inputs, names, self.batch_size, draws, schedule, *parts, *rest)

    def filled(self, found: Filled) -> FilledPlan:
        """The three forms of a step."""
        forms = {form: self.plan(found.schedule, getattr(found, form)) for form in FORMS}
        return FilledPlan(**forms, calls=found.calls, text=found.fill.text())


def _require_divisible(captured: Capture, batch: BatchPlan, count: int | None) -> None:
    if not batch.divisible and (count or 1) > 1:
        raise CompileError(f"{captured.notes[0]}; it cannot be cut into {count} micro-batches: pass microbatches=1")


def _uncosted(costs: Mapping[str, NodeCost]) -> tuple[str, ...]:
    names = uncosted_ops(costs.values())
    return (f"no FLOPs are counted for {', '.join(names)}",) if names else ()


def _device_bytes(model: CostModel) -> int | None:
    """The memory of the device that is planned for, where its cost model knows it."""
    known: int | None = getattr(model, "memory_bytes", None)
    return known


def _loss_weights(batch: BatchPlan, sizes: Sequence[int]) -> list[float]:
    """The factor of every micro-batch's loss in the whole batch's."""
    return [size / sum(sizes) if batch.loss_scale == "mean" else 1.0 for size in sizes]
