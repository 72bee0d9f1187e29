"""The front half, made once for whoever plans, costs or profiles: a training step becomes a `CostedStep`.

example     the step and one call of it, described: nothing is run yet
capture     one flat graph of ATen operations
batch       what may be cut into micro-batches
blocks      blocks in order, frozen components, the values between them
costs       of every node, block and frozen layer, as functions of the batch
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cost_models import devices, profile_files
from cost_models.flops import cost_table
from cost_models.roofline import Roofline
from fxpipe.capture import Capture, private
from fxpipe.capture.cache import cached_capture
from fxpipe.capture.code_names import compares_by_is
from fxpipe.capture.fingerprint import graph_fingerprint
from fxpipe.capture.holders import own_functions
from fxpipe.capture.inputs import InputSpec, describe, refuse_ragged
from fxpipe.capture.model_call import ModelCall
from fxpipe.capture.surroundings import Surroundings
from fxpipe.cluster import Cluster
from fxpipe.collector import held_collector
from fxpipe.costs.block_costs import BlockCosts
from fxpipe.costs.model import CostModel, node_seconds
from fxpipe.costs.table import CostTable
from fxpipe.errors import CompileError
from fxpipe.options import asked_microbatches, given_precision, held_cost_model, training_step, unwrapped
from fxpipe.plan.block_graph import Block, BlockGraph, Component
from fxpipe.plan.block_graph_check import require as require_block_graph
from fxpipe.plan.plan import Plan
from fxpipe.plan.schedule import Schedule
from fxpipe.plan.staged import Run
from fxpipe.run.launch import join, text_of_rank_zero
from fxpipe.simulate.op_lists import ADAMW_BYTES, StepOps
from passes.batch import BatchPlan, parts_of_batch
from passes.batch import analyse as analyse_batch
from passes.blocks import analyse as analyse_blocks
from passes.blocks.checkpoints import checkpointed
from passes.case import Case
from passes.costs.block_costs import block_costs
from passes.costs.frozen_layers import FrozenLayers, frozen_layers, seconds_of_layers
from passes.costs.local import owners_reading
from passes.costs.stage_bytes import StageBytes
from passes.costs.work import StepWork
from passes.step_ops import step_ops

Observe = Callable[[str, Any], None]

_MIN_BLOCKS, _BLOCKS_PER_STAGE, _MOST_BLOCKS = 24, 8, 128
_CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Example:
    """A step and one call of it: `step` returns the loss, `tensors` are the call's in the order of `inputs`.

    `step` is the user's `model`, or what makes a loss of a bare backbone: names of state then begin with `prefix`.
    `conditioning` is the probability of a self-conditioned first pass, None where there is none to leave out;
    `autocast` the type of an autocast around forward, None where there is none.
    """

    step: nn.Module
    inputs: InputSpec
    tensors: Sequence[torch.Tensor]
    conditioning: float | None
    prefix: str
    autocast: torch.dtype | None = None

    @property
    def batch_size(self) -> int:
        return self.inputs.batch_size


def example_of(
    model: Any,
    example_inputs: Any = None,
    batch_size: int | None = None,
    world_size: int = 1,
    schedule: str | Schedule = "auto",
    autocast: torch.dtype | None = None,
) -> Example:
    """The model's step and its example call.

    Raises:
        CompileError: what is given is no step, or no call of it; or the schedule is not for such a step.
    """
    model, conditioning = unwrapped(model, schedule)
    step, args, kwargs = training_step(model, example_inputs, batch_size, world_size)
    inputs, tensors = describe(step, args, kwargs, batch_size)
    if batch_size is None:
        refuse_ragged(inputs)
    compares = next(filter(None, map(compares_by_is, own_functions(step))), "")
    inputs = replace(inputs, compares=compares)
    inputs.require_apart(dict(zip(inputs.tensor_names, tensors, strict=True)))
    return Example(step, inputs, tensors, conditioning, "model." if step is not model else "", autocast)


@dataclass(frozen=True)
class StepCut:
    """Into what a step is cut, as far as that is known before it is captured.

    `microbatches` is None where their number is open, `of_samples` what it is for another number of samples; seconds
    are those of `likely` micro-batches. A step that has no micro-batches is refused, unless `or_whole`: it is left
    whole.
    """

    num_blocks: int
    microbatches: int | None = None
    likely: int = 1
    or_whole: bool = False
    of_samples: Callable[[int], int | None] | None = None

    @staticmethod
    def of(plan: Plan) -> "StepCut":
        """The one a plan was made for."""
        likely = -(-plan.batch_size // plan.cut.num_samples)
        return StepCut(plan.cut.num_blocks, None if plan.cut.divisible else 1, likely)


def planned_cut(
    batch_size: int, world_size: int, stages: int | None, microbatches: int | None, schedule: str | Schedule,
    multiple: int = 1,
) -> StepCut:  # fmt: skip
    """As a step is cut for so many ranks: blocks fine enough to balance, coarse enough to plan and to read."""
    of_samples = partial(asked_microbatches, microbatches, world_size=world_size, schedule=schedule, multiple=multiple)
    count = of_samples(batch_size)
    wanted = _BLOCKS_PER_STAGE * (stages or 2 * world_size)
    blocks = max(_MIN_BLOCKS, min(_MOST_BLOCKS, wanted), stages or 0)
    return StepCut(blocks, count, count or 2 * world_size, of_samples=of_samples)


@dataclass(frozen=True, eq=False)
class CostedStep:
    """A captured step with what its nodes, blocks and frozen layers cost by `model`.

    `microbatches` is their number where it is fixed, by the user or because the graph holds for one batch size only.
    """

    example: Example
    captured: Capture
    batch: BatchPlan
    costs: CostTable
    graph: BlockGraph
    frozen: FrozenLayers
    calls: StageBytes
    work: StepWork
    model: CostModel
    device: torch.device
    microbatches: int | None
    likely: int = 1

    @cached_property
    @held_collector()
    def blocks(self) -> BlockCosts:
        """What every block costs, for whoever plans: the ranks that are given a plan never ask."""
        return block_costs(self.captured, self.graph, self.costs, self.model, self.device, self.batch)

    @property
    def likely_samples(self) -> int:
        """Of the micro-batch that blocks were balanced for."""
        return -(-self.batch_size // (self.microbatches or self.likely))

    @cached_property
    def checkpointed(self) -> tuple[Run, ...]:
        """Blocks that the model itself wants computed again."""
        return checkpointed(self.captured, self.graph)

    @cached_property
    def writes_frozen(self) -> tuple[str, ...]:
        """What forward writes into the model that frozen work reads: it cannot be done a step early."""
        owners = {name: component.name for component in self.graph.components for name in component.nodes}
        written = {update.name for update in self.captured.updates}
        placeholders = self.captured.graph.find_nodes(op="placeholder")
        nodes = [node for node in placeholders if self.captured.tensors.get(node.name) in written]
        return tuple(self.captured.tensors[node.name] for node in nodes if owners_reading([node], owners))

    @cached_property
    def fingerprint(self) -> str:
        """Of the captured graph, what goes into it, and the blocks it was cut into: plans hold for no other step."""
        batch = f"{self.batch_size} {self.batch.divisible} {self.batch.loss_scale} {self.batch.whole_batch}"
        text = [graph_fingerprint(self.captured.graph), batch]
        text += [" ".join(part.nodes) for part in self.parts]
        return hashlib.sha256("\n".join(text).encode()).hexdigest()[:12]

    @property
    def parts(self) -> tuple[Component | Block, ...]:
        return (*self.graph.components, *self.graph.blocks)

    @property
    def batch_size(self) -> int:
        return self.captured.inputs.batch_size

    def on(self, cluster: Cluster, world_size: int, limit_bytes: int | None = None) -> Case:
        """The step on the first ranks of a cluster."""
        machines = cluster, world_size, self.batch_size, limit_bytes
        parts = self.graph, self.blocks, self.frozen, self.work, self.calls, self.model
        return Case(*parts, *machines, divisible=self.batch.divisible)

    def priced(self, model: CostModel) -> "CostedStep":
        """The same by another cost model, in the same blocks and layers."""
        seconds_at = seconds_of_layers(self.captured, self.graph, self.costs, model, self.frozen.nodes, self.batch)
        return replace(self, model=model, frozen=replace(self.frozen, seconds_at=seconds_at))

    def ops(self, plan: Plan, order: Schedule, cluster: Cluster, optimizer_bytes: int = ADAMW_BYTES) -> StepOps:
        """What every rank does in one order of a plan's step, for how long, and in how many bytes."""
        case, sizes = self.on(cluster, plan.staged.world_size), plan.microbatch_sizes
        return step_ops(case, plan.staged, order, sizes, optimizer_bytes=optimizer_bytes)


@held_collector()
def costed_step(
    example: Example,
    cost_model: CostModel,
    cut: StepCut,
    device: torch.device = _CPU,
    see: Observe = lambda name, artefact: None,
    cache: Path | None = None,
) -> CostedStep:
    """Capture a step, cut it into blocks of about equal time by `cost_model`, and cost them.

    Args:
        device: where its stages will run.
        see: called with (phase's name, its result) after every phase.
        cache: a folder of captures of earlier processes; none where left out.

    Raises:
        CaptureError: the model cannot be captured as one graph.
        CompileError: it can, but not be cut into so many micro-batches.
    """
    captured, batch, count = _captured(example, cut, device, cache)
    if example.autocast is not None:
        _require_cast(captured, example.autocast)
    if example.conditioning is not None and captured.updates:
        raise CompileError(
            f"forward writes into {captured.updates[0].name!r}, once more where a self-conditioned step makes its "
            "first pass, which some steps leave out; write it outside of forward, after the optimizer's step"
        )
    see("capture", captured)
    see("batch", batch)

    costs = cost_table(captured.graph)
    seconds = node_seconds(cost_model, costs, -(-captured.inputs.batch_size // (count or cut.likely)))
    graph = analyse_blocks(captured, costs.by_name(seconds.both), cut.num_blocks)
    require_block_graph(graph, captured)
    see("blocks", graph)

    layers = frozen_layers(captured, graph, costs, cost_model, batch)
    calls, work = StageBytes(captured, batch, graph, layers, device), StepWork.in_capture(captured, graph, device)
    made = captured, batch, costs, graph, layers, calls, work
    step = CostedStep(example, *made, cost_model, device, count, cut.likely)
    see("costs", step)
    return step


def _require_cast(captured: Capture, autocast: torch.dtype) -> None:
    """Raises CompileError where an autocast has cast nothing."""
    values = [value for node in captured.graph.nodes for value in private.tensors_in(node.meta.get("val"))]
    if not any(value.dtype == autocast for value in values):
        kinds = {str(value.dtype) for value in values if value.is_floating_point()}
        raise CompileError(
            f"no operation computes in {autocast}: autocast leaves {', '.join(sorted(kinds))} as it is here; call "
            "model.float(), or leave precision out"
        )


def costed(
    model: nn.Module,
    example_inputs: Any,
    batch_size: int,
    cost_model: CostModel,
    num_blocks: int,
    likely: int = 1,
    precision: str | None = None,
    device: torch.device = _CPU,
) -> CostedStep:
    """A step to look at rather than to compile: what has no micro-batches is costed all the same."""
    example = example_of(model, example_inputs, batch_size, autocast=given_precision(precision))
    return costed_step(example, cost_model, StepCut(num_blocks, None, likely, True), device)


def _captured(
    example: Example, cut: StepCut, device: torch.device, cache: Path | None
) -> tuple[Capture, BatchPlan, int | None]:
    """The step, how it runs on micro-batches, and their number where it is fixed.

    Where it does not run on micro-batches of rows, and cuts the batch into parts, of as many rows each as there are
    parts: images and those of a prior, concatenated.
    """
    surroundings = Surroundings(device, example.autocast)

    def of(inputs: InputSpec, count: int | None) -> tuple[Capture, BatchPlan, int | None]:
        captured = cached_capture(ModelCall(example.step, inputs, example.tensors, surroundings), cache)
        refused.append(captured)
        return captured, *_batch(captured, count)

    refused: list[Capture] = []
    try:
        try:
            return of(example.inputs, cut.microbatches)
        except CompileError:
            parts = parts_of_batch(refused[0]) if refused else 1
            if parts == 1:
                raise
            inputs = example.inputs.of_rows(parts)
            try:
                return of(inputs, cut.of_samples(inputs.batch_size) if cut.of_samples else cut.microbatches)
            except CompileError as error:
                raise CompileError(f"{error}; {inputs.notes[0]}") from error.__cause__
    except CompileError as error:
        if not (cut.or_whole and refused):
            if not (hint := example.inputs.grouped):
                raise
            raise CompileError(f"{error}; {hint}") from error.__cause__
        return refused[0], analyse_batch(refused[0], 1), 1


def _batch(captured: Capture, asked: int | None) -> tuple[BatchPlan, int | None]:
    count = 1 if asked is None and not captured.batch else asked
    batch = analyse_batch(captured, min(2, captured.inputs.batch_size) if count is None else count)
    if not batch.divisible and (count or 1) > 1:
        raise CompileError(f"{captured.notes[0]}; it cannot be cut into {count} micro-batches: pass microbatches=1")
    return batch, count


def given_cost_model(given: CostModel | str) -> CostModel:
    """A device by name, the profile of a `.json` file, or the cost model itself."""
    if not isinstance(given, str):
        return held_cost_model(given, "a device's name ('H100'), the path of a profile (.json), or ")
    if given.endswith(".json"):
        return profile_files.load(Path(given), devices.device())
    return devices.device(given)


def priced(given: CostModel | str | None, known: str, cluster: Cluster) -> CostModel | str:
    """What a step is costed by: what the user gives, else by what the plan is that it comes with, else the cluster's
    device. A machine that the plan's maker measured is not measured again."""
    if isinstance(given, str) and known.startswith(f"{given} {{"):
        return known
    return (known or cluster.device) if given is None else given


def priced_name(given: CostModel | str, found: CostModel) -> str:
    """The cost model as a plan names it, with the numbers that were measured; "" where it has no name."""
    if not isinstance(given, str):
        return ""
    if given.lower().startswith(devices.MEASURED) and isinstance(found, Roofline):
        return devices.told(given, found)
    return given


def shared_cost_model(given: CostModel | str, world_size: int) -> CostModel:
    """As `given_cost_model`; of a launch's ranks only rank 0 measures, so that all cut and plan by the same numbers."""
    if not isinstance(given, str) or not given.lower().startswith(devices.MEASURED) or join(world_size) is None:
        return given_cost_model(given)
    return Roofline.from_dict(json.loads(text_of_rank_zero(lambda: json.dumps(devices.device(given).as_dict()))))
