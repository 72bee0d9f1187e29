"""The compiler's back half: a costed step and its plan -> programs, form by form, of the ranks that are asked for."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from fxpipe.analysis import CostedStep
from fxpipe.collector import held_collector
from fxpipe.plan.fewer_samples import first_samples
from fxpipe.plan.plan import Plan
from fxpipe.plan.schedule import Schedule
from fxpipe.plan.schedule_check import require as require_schedule
from fxpipe.plan.state_update import StateUpdate
from fxpipe.plan.step import Predicted, StepPlan
from passes.lowering import Form, Lowered, lower_form
from passes.lowering.state_updates import state_updates
from passes.lowering.step_graphs import StepGraphs
from passes.placement.cascade import first_stages


@dataclass(frozen=True, eq=False)
class BackEnd:
    """A costed step and its plan, to be made into programs, form by form."""

    costed: CostedStep
    plan: Plan
    device: torch.device
    conditioning: float | None
    backend: str = "eager"

    @cached_property
    def graphs(self) -> StepGraphs:
        """The graphs of stages, components and layers, each traced when a rank that runs it is lowered."""
        plan, costed = self.plan, self.costed
        return StepGraphs(
            costed.captured, costed.batch, costed.work, plan.staged, plan.microbatch_sizes, costed.frozen.nodes,
            self.device,
        )  # fmt: skip

    @cached_property
    def updates(self) -> tuple[StateUpdate, ...]:
        """What forward writes into the model's own tensors."""
        return state_updates(self.costed.captured, self.device)

    def require_schedules(self) -> None:
        """Refuse orders that are not correct, with their faults marked."""
        plan, work = self.plan, self.costed.work.of(self.plan.staged, self.plan.num_microbatches)
        require_schedule(plan.step, work, plan.staged.world_size)
        if plan.steady is not None:
            ahead = replace(
                work, num_components=0, frozen_edges=frozenset(),
                ahead_layers=self.costed.frozen.num_layers, ahead_samples=plan.batch_size,
            )  # fmt: skip
            require_schedule(plan.steady, ahead, plan.staged.world_size)

    @held_collector()
    def lower(self, form: Form, ranks: Sequence[int] | None, batch_size: int | None = None) -> StepPlan:
        """The programs of one form of the step, of these ranks; of a smaller batch where its size is given."""
        plan, costed, graphs = self.plan, self.costed, self.graphs
        order = {"step": plan.step, "prologue": plan.prologue, "steady": plan.steady, "epilogue": plan.epilogue}[form]
        if order is None:
            raise ValueError(f"the plan has no form {form!r}")
        planned = order
        if batch_size is not None:
            order, sizes = first_samples(order, plan.microbatch_sizes, batch_size)
            graphs = replace(graphs, sizes=sizes)
            require_schedule(order, graphs.work, plan.staged.world_size, planned)
        optional = frozenset[int]()
        if self.conditioning is not None:
            optional = first_stages(costed.graph, costed.blocks, plan.staged.boundaries)
        lowered = lower_form(graphs, order, form, ranks, optional, plan.steady, planned)
        return self._step_plan(order, lowered, graphs)

    def _step_plan(self, order: Schedule, lowered: Lowered, graphs: StepGraphs) -> StepPlan:
        """One form, and where it has a first pass also the form without it."""
        captured, plan = self.costed.captured, self.plan
        placeholders = captured.graph.find_nodes(op="placeholder")
        names = {n.name: n.meta["input"] for n in placeholders if n.meta["kind"] == "input"}
        draws = {draw.index: draw for draw in captured.draws.values()}
        without = self._step_plan(order, lowered.without, graphs) if lowered.without else None
        return StepPlan(
            captured.inputs, names, graphs.batch_size, captured.fewest, draws, order, lowered.programs,
            lowered.messages, lowered.reductions, self.device, self.plan.fingerprint, without,
            self.conditioning or 0.0, graphs.outputs, lowered.sends, self.backend,
            None if plan.best is None else Predicted(plan.best.seconds, plan.cost_model or plan.cluster),
            plan.staged.offloaded,
            lowered.gatherings,
            self.updates,
        )  # fmt: skip
