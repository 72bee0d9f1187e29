"""The compiler, top to bottom: a training step becomes one program per rank.

options     what the user asks for                      -> Example, Request
analyse     one flat graph; blocks, frozen parts, costs -> CostedStep
plan        stages on ranks, the order of every form    -> Plan, made by rank 0 alone, or given
lower       stage graphs, messages, rank programs       -> StepPlan, of this process's ranks
"""

import hashlib
import inspect
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fxpipe.analysis import (
    CostedStep,
    Example,
    Observe,
    StepCut,
    costed_step,
    example_of,
    planned_cut,
    priced,
    priced_name,
    shared_cost_model,
)
from fxpipe.back_end import BackEnd
from fxpipe.capture.cache import cache_folder
from fxpipe.capture.snapshot import Snapshot
from fxpipe.capture.weights import device_of
from fxpipe.cluster import Cluster
from fxpipe.collector import held_collector
from fxpipe.costs import uncosted_ops
from fxpipe.costs.model import CostModel
from fxpipe.errors import CompileError
from fxpipe.options import (
    check_backend,
    check_counts,
    check_others,
    given_bytes,
    given_cluster,
    given_device,
    given_plan,
    given_precision,
    given_schedule,
    require_within,
)
from fxpipe.plan.plan import Plan
from fxpipe.plan.plan_check import require as require_plan
from fxpipe.plan.schedule import Schedule
from fxpipe.plan.staged import PlannedCut, trains_alike
from fxpipe.program import Program
from fxpipe.run.launch import join, made_by_rank_zero
from fxpipe.shapes import Shapes, several
from fxpipe.show.explain import Replanned
from fxpipe.show.progress import followed, progress
from passes.case import Case
from passes.placement.cascade import require_first_pass
from passes.tuner.candidates import default_pipelines, require_possible
from passes.tuner.plans import make_plan, usable_bytes
from passes.tuner.request import Request
from passes.tuner.simulate import simulate


@progress()
@held_collector()
@torch.enable_grad()  # what surrounds the call is not part of the step
def compile(
    model: Any,
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
    recompute: bool | str | None = None,
    shard: str | None = None,
    offload_optimizer: bool | None = None,
    budget: float = 2.0,
    fill: str = "auto",
    precision: str | None = None,
    cluster: Cluster | str | None = None,
    cost_model: CostModel | str | None = None,
    device: str | torch.device | None = None,
    cache: bool | str | Path = True,
    observe: Observe | None = None,
    plan: Plan | str | Path | None = None,
    shapes: str = "any",
    backend: str = "eager",
) -> Program:
    """Compile one training step for `world_size` ranks.

    Under torchrun with as many processes rank 0 makes the plan for all, and each lowers its own rank only.

    Args:
        model: an `nn.Module` whose forward returns the loss; a diffusers pipeline (the step is then that of
            `fxpipe.training_step`); or a bare backbone (predict, mean squared error against `target`). On the meta
            device it compiles without weights.
        world_size: number of ranks.
        example_inputs: one batch, a tuple of positional or a dict of keyword arguments of forward; may be left out for
            a backbone and for a model with a method `example_inputs(batch_size)`. A list of dicts, or of tuples, is
            several batches of other shapes: all are compiled, and a step takes the program of its batch's shapes.
        batch_size: samples in one step, over all micro-batches; the example's where left out.
        microbatches: number of micro-batches; their sizes differ by one sample where it does not divide the batch.
        stages: number of stages, a multiple of the ranks of a pipeline.
        data_parallel: number of pipelines, which divides `world_size`; where left out with a named schedule 1, or as
            many as have `stages`, where these are fewer and cannot have replicas in uneven numbers.
        schedule: "auto" tries them all and looks for a better one; a name of `passes.schedules.policies.POLICIES`
            ("gpipe", "1f1b", "interleaved", "wave", "zero-bubble", ...); a `Schedule` or its text.
        memory_limit: bytes per rank that a step may need, alone or with the next batch's frozen work, a number or a
            text ("40GiB"); where left out, what the device planned for has, unless nothing fits into that.
        collocation: of a wave's skips: "hard" keeps both ends of each on one rank, "soft" only where balance allows;
            where left out, the faster one with "auto", else "hard".
        recompute: whether backwards compute their stage's forward again instead of keeping its values. "auto": of the
            blocks of every stage those that take least time, if nothing fits otherwise; where left out, those that the
            model calls through `torch.utils.checkpoint` (`enable_gradient_checkpointing`) in any case.
        shard: what the replicas of a stage share out. "optimizer": each trains a share of the parameters, and tells the
            others, so that an optimizer keeps state for that share alone (ZeRO-1). "gradients": every micro-batch's are
            also summed as they come, and each adds up its share (ZeRO-2). "weights": each also holds that share alone,
            and a share of the frozen ones, which are gathered for the stage's actions and let go after them; more
            stages on a rank then need less memory. "all": weights, and gradients of every micro-batch (ZeRO-3).
            "none": all train all. Where left out, optimizer states, unless that makes the step longer, and the others
            where nothing fits otherwise; gradients also where that is faster.
        offload_optimizer: whether the host keeps the optimizer's states, and updates what is trained, any `torch.optim`
            optimizer's; where left out, if nothing fits otherwise.
        budget: seconds to look for a schedule where that is "auto": of the best candidates, then of the chosen one.
        fill: where frozen work is done: "idle" for the next batch in idle time, "after" for the next batch when this
            one's training has ended, "none" for this batch, as part of its step; "auto" takes the fastest.
        precision: "bf16" or "fp16": forward runs under `torch.autocast` for `device`, while weights, gradients and
            what sums them stay in the model's types; "fp32", or left out: as the model computes by itself.
        cluster: the machines to plan for, a `Cluster` or its text ("2x8xV100"); `world_size` A100-80GB where left out.
        cost_model: a device by name ("H100@bfloat16", "measured"), a profile's .json file, or any `CostModel`; the
            cluster's device where left out.
        device: where the ranks run ("cpu", or "cuda" for one GPU a rank); where the model is, if left out. Engines move
            there what they need of it.
        cache: where captures are kept for other processes: a folder, True for the user's cache folder (or that of
            FXPIPE_CACHE), False for none. One is used again where all that it was made from is as it was.
        observe: called with (step's name, its result) after every step of the compiler.
        plan: one that was made before, a `Plan` or the file it was saved in: nothing is planned. What is asked for
            beside it must be what it says; `memory_limit` is held against what it needs.
        shapes: of batches that are no example's: "any" compiles them when they come, "fixed" refuses them.
        backend: how stage graphs run: "eager", operation by operation; by "inductor", each compiled when it first runs;
            or, on GPUs, as "cudagraphs", recorded in the second step and then replayed, which takes the host next to no
            time (ranks that are threads of one process run eagerly). Plans and predictions are of eager ones.

    Raises:
        CaptureError: the model cannot be captured as one graph.
        CompileError: it can, but not cut into micro-batches or stages as asked; or an option is wrong.
    """
    see = followed(observe)

    # options: checked before anything is captured, as far as they can be known then
    first, *others = several(example_inputs)
    given: dict[str, Any] = dict(
        batch_size=batch_size, microbatches=microbatches, stages=stages, data_parallel=data_parallel,
        schedule=schedule, memory_limit=memory_limit, collocation=collocation, recompute=recompute,
        shard=shard, offload_optimizer=offload_optimizer, budget=budget, fill=fill, precision=precision,
        cluster=cluster, cost_model=cost_model, device=device, cache=cache, observe=observe, plan=plan, shapes=shapes,
        backend=backend,
    )  # fmt: skip
    asked = requested(model, world_size, example_inputs=first, **given)

    given |= {"cluster": asked.cluster, "cost_model": asked.priced or asked.cost_model}  # a plan's, where it has them

    # analyse: captured, cut into blocks, costed
    rank = join(world_size)
    step = asked.analysed(see)
    if not rank:
        _tell_left_out(step)

    # plan: who computes what, in which order; nothing is decided after it
    chosen = made_by_rank_zero(lambda: asked.told(step) or asked.planned(step), asked.compared, rank)
    _require_fresh(chosen, step, rank if asked.plan is None else None)
    see("plan", chosen)

    # lower: this process's rank, or all of them in one process
    back = BackEnd(step, chosen, asked.device, asked.example.conditioning, backend)
    back.require_schedules()
    known = Shapes(lambda example: _another(model, world_size, example, given), shapes == "fixed")
    again, settings = asked.replanned(step), Snapshot(step.example.step)
    program = Program(
        step, chosen, asked.cluster, back.lower, None if rank is None else (rank,), known, again, settings
    )
    known.add(program)
    see("programs", program.step.programs)
    see("stage graphs", back.graphs)

    # other shapes: the same again for each
    for batch in others:
        known.add(_another(model, world_size, batch, given))
    return program


def _another(model: Any, world_size: int, example: Any, given: Mapping[str, Any]) -> Program:
    """The program for inputs of other shapes, with the same options as far as they have samples for them."""
    options = {**given, "batch_size": None, "plan": None, "shapes": "fixed"}
    samples = example_of(model, example, None, world_size).batch_size
    copies, count = given["data_parallel"] or 1, given["microbatches"]
    if copies > samples:
        options |= {"data_parallel": 1, "stages": None, "shard": None}
    if count is not None:
        alike = copies if trains_alike(options["shard"]) else 1
        options["microbatches"] = min(count, samples // alike * alike)
    return compile(model, world_size, example_inputs=example, **options)


def _tell_left_out(step: CostedStep) -> None:
    """Warn of what forward returns beside the loss that no step will."""
    reasons = dict.fromkeys(step.captured.left_out, "it is no tensor whose size is known before it runs")
    for name, why in {**reasons, **step.batch.left_out}.items():
        warnings.warn(f"forward also returns {name}, which engines leave out: {why}", stacklevel=6)


def _unfilled(step: CostedStep) -> tuple[str, ...]:
    why = f"no frozen work is done a step early: it reads {', '.join(step.writes_frozen)}, which forward writes"
    return (why,) if step.writes_frozen else ()


@dataclass(frozen=True, eq=False)
class Requested:
    """What is to be compiled, and how, checked as far as it can be before anything is captured.

    `priced` is the cost model's name, "" where it has none; `plan` is one that was made before; `recompute` is as
    given; `assumed`: nobody said which machines.
    """

    example: Example
    request: Request
    cut: StepCut
    cluster: Cluster
    cost_model: CostModel
    priced: str
    device: torch.device
    plan: Plan | None
    recompute: bool | str | None
    assumed: bool
    cache: Path | None = None

    def analysed(self, see: Observe = lambda name, artefact: None) -> CostedStep:
        """The step, captured, cut into blocks and costed."""
        return costed_step(self.example, self.cost_model, self.cut, self.device, see, self.cache)

    def case(self, step: CostedStep) -> tuple[Case, Request]:
        """The step on its machines, and what is left open now that it is known."""
        request = replace(
            self.request, batch_size=step.batch_size, microbatches=step.microbatches, divisible=step.batch.divisible
        )
        if self.recompute is None:
            request = replace(request, recompute=step.checkpointed)
        if step.writes_frozen:
            request = replace(request, fill="none")
        require_possible(request)
        return step.on(self.cluster, request.world_size), request

    @property
    def compared(self) -> dict[str, object]:
        """What all ranks of a launch must ask for alike, by the option's name."""
        given = None
        if self.plan is not None:
            text = json.dumps({**self.plan.as_dict(), "outcomes": []})
            given = f"one of digest {hashlib.sha256(text.encode()).hexdigest()[:12]}"
        return {
            **vars(self.request),
            "recompute": self.recompute,
            "precision": str(self.example.autocast),
            "plan": given,
        }

    def told(self, step: CostedStep) -> Plan | None:
        """The plan that was made before, if any, with what its orders take: they may have been edited."""
        plan = self.plan
        if plan is None or (plan.cluster, plan.cost_model) != (str(self.cluster), self.priced):
            return plan
        _require_fresh(plan, step, None)
        BackEnd(step, plan, self.device, self.example.conditioning).require_schedules()
        orders = {"step": plan.step} if plan.steady is None else {"step": plan.step, "steady": plan.steady}
        case = step.on(self.cluster, plan.staged.world_size)
        found = {form: simulate(case, plan.staged, order, plan.microbatch_sizes) for form, order in orders.items()}
        plan = replace(plan, predicted={form: simulated.prediction for form, simulated in found.items()})
        require_within(plan, self.request.memory_limit_bytes)
        return plan

    def planned(self, step: CostedStep) -> Plan:
        """The plan for it."""
        case, request = self.case(step)
        made = make_plan(case, request, self.cost_model.memory_bytes)
        rows = step.captured.inputs.rows
        cut = PlannedCut(self.cut.num_blocks, step.likely_samples, step.batch.divisible, rows)
        names = ", ".join(uncosted_ops(step.costs.values()))
        uncosted = (f"no FLOPs are counted for {names}",) if names else ()
        captured = step.captured
        of_step = *captured.notes, *captured.unchecked, *captured.inputs.notes, *uncosted, *self._checkpointed(step)
        notes = *self._assumed(), *of_step, *self._unshared(made), *_unfilled(step), *made.notes
        return replace(made, fingerprint=step.fingerprint, cost_model=self.priced, cut=cut, notes=notes)

    def _assumed(self) -> tuple[str, ...]:
        why = f"no machines were named: times are of {self.cluster}; fxpipe profile measures those at hand"
        return (why,) if self.assumed else ()

    def _checkpointed(self, step: CostedStep) -> tuple[str, ...]:
        if self.recompute is not None or not step.checkpointed:
            return ()
        blocks = sum(stop - start for start, stop in step.checkpointed)
        return (f"{blocks} blocks are recomputed as the model asks; recompute='auto': only where memory does",)

    def _unshared(self, plan: Plan) -> tuple[str, ...]:
        asked, found = self.request.shard, plan.staged
        if asked in (None, "none", found.shard):
            return ()
        if found.replicas == 1:
            why = "every stage has one replica, and nothing is shared out; data_parallel gives more"
        else:
            why = f"replicas have one micro-batch each, which makes it {found.shard!r}; microbatches gives more"
        return (f"shard={asked!r}: {why}",)

    def replanned(self, step: CostedStep) -> Replanned | None:
        """How other plans for it are made, without a search; None where the order is the user's own."""
        if isinstance(self.request.schedule, Schedule):
            return None
        limit, device_bytes = self.request.memory_limit_bytes, self.cost_model.memory_bytes

        def plan(**changes: int) -> Plan:
            case, request = self.case(step)
            return make_plan(case, replace(request, budget_seconds=0.0, **changes), device_bytes)  # type: ignore[arg-type]

        return Replanned(plan, usable_bytes(device_bytes) if limit is None and device_bytes else limit)


def requested(model: Any, world_size: int, **given: Any) -> Requested:
    """The options of `compile` by name, checked and completed; the same for whoever only plans.

    Raises:
        CompileError: an option is wrong, or several exclude each other.
    """
    bound = inspect.signature(compile).bind(model, world_size, **given)
    bound.apply_defaults()
    given = bound.arguments
    counts = {name: given[name] for name in ("batch_size", "microbatches", "stages", "data_parallel")}
    chosen = ("schedule", "collocation", "recompute", "fill", "shard", "offload_optimizer")
    choices = {name: given[name] for name in chosen}
    check_others(**given)
    check_counts(world_size=world_size, **counts)
    limit = given_bytes(given["memory_limit"])
    where = None if given["device"] is None else given_device(given["device"])
    captures = cache_folder(given["cache"])
    known = given_plan(given["plan"], world_size, limit, **counts, **choices)
    network = given_cluster(known.cluster if known and given["cluster"] is None else given["cluster"], world_size)
    network.require_alike()
    by = priced(given["cost_model"], known.cost_model if known else "", network)
    seconds_of, asked = shared_cost_model(by, world_size), given_schedule(given["schedule"], world_size)
    batch_size = known.batch_size * known.cut.rows if known else given["batch_size"]
    autocast = given_precision(given["precision"])
    example = example_of(model, given["example_inputs"], batch_size, world_size, asked, autocast)
    where = where or given_device(device_of(example.step))
    check_backend(given["backend"], where)
    stages, microbatches = given["stages"], given["microbatches"]
    copies = given["data_parallel"] or default_pipelines(asked, world_size, stages, given["shard"])
    alike = copies or 1 if trains_alike(given["shard"]) else 1  # such replicas have as many micro-batches each
    of_batch = example.batch_size, world_size, stages, microbatches, asked, alike
    cut = StepCut.of(known) if known else planned_cut(*of_batch)
    again = given["recompute"] if isinstance(given["recompute"], bool) else ()
    request = Request(
        asked, world_size, example.batch_size, copies, stages, cut.microbatches, given["collocation"], again, limit,
        example.conditioning, given["fill"], given["budget"], shard=given["shard"],
        offload_optimizer=given["offload_optimizer"],
    )  # fmt: skip
    if known is None:
        require_possible(request)
    name, assumed = priced_name(by, seconds_of), given["cluster"] is given["cost_model"] is None
    return Requested(
        example, request, cut, network, seconds_of, name, where, known, given["recompute"], assumed, captures
    )


def _require_fresh(plan: Plan, step: CostedStep, rank: int | None) -> None:
    """A plan holds for the step that it was made for; `rank` has just been given rank 0's."""
    if (plan.fingerprint, plan.batch_size) != (step.fingerprint, step.batch_size):
        if rank is not None:
            raise CompileError(
                f"rank {rank} has step {step.fingerprint} with {step.batch_size} samples, rank 0 has step "
                f"{plan.fingerprint} with {plan.batch_size}: build the model, its inputs and options alike on all ranks"
            )
        priced = "" if plan.cost_model else " (here by a cost model without a name: pass the same one)"
        raise CompileError(
            f"the plan was made for step {plan.fingerprint} with {plan.batch_size} samples, this is step "
            f"{step.fingerprint} with {step.batch_size}: the model, its inputs, its precision or what it is costed by"
            f"{priced} have changed; make a new plan (fxpipe tune --save)"
        )
    conditioned = step.example.conditioning is not None
    first = require_first_pass(step.graph, step.blocks) if conditioned else 0
    require_plan(plan, len(step.graph.blocks), [component.name for component in step.graph.components], first)
