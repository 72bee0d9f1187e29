"""Cut a chain into stages for a backbone that is fed back its own first prediction in a part of all steps.

    stage 0   F F F F         f f f f b b b b       F: the extra forward pass, which keeps nothing for a backward
    stage 1     F F F F     f f f f b b b b         f, b: the pass that trains; its input waits for the last stage's F
                      '-feedback-^

Model: DiffusionPipe (Tian et al., MLSys 2024), section 4.3, equations 17 and 18; the idea is Chen et al., 2022.
With probability p a step computes 2 P^f + P^b and sends 2 C^f + C^b in 3 messages; the feedback goes from the last
stage to the first. One partition serves both kinds of step, so the expectation is minimised:

    "paper"       (M + 2S - 2) (p max T0_SC + (1 - p) max T0) + max (T_S - T_C) + p T_F
    "simulated"   (M - 1) (p max T0_SC + (1 - p) max T0) + max (0, late all-reduces)
                  + p (sums of compute and transfers of such a step + T_F) + (1 - p) (sums of a step without)

Three maxima at once, and a sum: exact by the search of `passes.chains`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from fxpipe.errors import CompileError
from passes.chains.chain import Chain, ChainPlan, Objective, check_objective, check_stages, local_batch
from passes.chains.costs import Costs, CostTable, evaluate
from passes.chains.equal import layouts_of, memory_error
from passes.chains.layers import band
from passes.chains.terms import Layout, Terms, chain_problems, objective_terms, solve_problems

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class SelfConditioning:
    """How often a step feeds back, and the bytes per sample of what is fed back."""

    probability: float
    feedback_bytes: float

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise CompileError(f"the probability of self-conditioning is from 0 to 1, got {self.probability}")
        if not 0 <= self.feedback_bytes < float("inf"):
            raise CompileError(f"feedback_bytes={self.feedback_bytes} must be finite and not negative")


@dataclass(frozen=True)
class SelfConditionedPlan:
    """Stages for both kinds of step. `plan` is that of a step without feedback."""

    plan: ChainPlan
    expected_seconds: float
    conditioned_seconds: float  # of a step with feedback

    def __str__(self) -> str:
        with_feedback = f"{self.conditioned_seconds * 1e3:.1f} ms with feedback"
        return f"expected {self.expected_seconds * 1e3:.1f} ms, {with_feedback}; without: {self.plan}"


def solve_self_conditioned(
    chain: Chain,
    num_stages: int,
    num_microbatches: int,
    replicas: int,
    conditioning: SelfConditioning,
    *,
    batch_size: int,
    objective: Objective = "simulated",
    memory_limit_bytes: float | None = None,
) -> SelfConditionedPlan:
    """The boundaries of `num_stages` stages with `replicas` devices each that take least time on average.

    Raises:
        CompileError: as `passes.chains.solve_equal`.
    """
    check_objective(objective)
    check_stages(chain, num_stages)
    layout = Layout(num_stages, num_microbatches, replicas)
    return _plans(chain, [layout], conditioning, batch_size, objective, memory_limit_bytes)[0]


def all_self_conditioned(
    chain: Chain,
    num_devices: int,
    batch_size: int,
    conditioning: SelfConditioning,
    *,
    objective: Objective = "simulated",
    memory_limit_bytes: float | None = None,
    stages: Sequence[int] | None = None,
    microbatches: Sequence[int] | None = None,
) -> tuple[SelfConditionedPlan, ...]:
    """The best plan of every (S, M), the fastest first; arguments and errors as of `passes.chains.all_plans`."""
    check_objective(objective)
    layouts = layouts_of(chain, num_devices, batch_size, stages, microbatches)
    plans = _plans(chain, layouts, conditioning, batch_size, objective, memory_limit_bytes)
    return tuple(sorted(plans, key=lambda plan: plan.expected_seconds))


def _plans(
    chain: Chain,
    layouts: Sequence[Layout],
    conditioning: SelfConditioning,
    batch_size: int,
    objective: Objective,
    limit: float | None,
) -> list[SelfConditionedPlan]:
    """Those that fit; at least one, or an error."""
    table, found = CostTable(chain), []
    for num_stages, group in groupby(layouts, key=lambda layout: layout.num_stages):
        some = list(group)
        costs = [table.of(batch_size, x.num_microbatches, x.replicas) for x in some]
        terms = [conditioned_terms(c, x, conditioning, objective) for c, x in zip(costs, some, strict=True)]
        cuts_of = solve_problems(chain_problems(terms, some, costs, limit))
        for layout, cost, cuts in zip(some, costs, cuts_of, strict=True):
            if cuts is not None:
                replicas = [layout.replicas] * num_stages
                plan = evaluate(table, cuts, replicas, layout.num_microbatches, batch_size, objective)
                found.append(_conditioned(plan, cost, conditioning, _feedback(chain, layout, conditioning, batch_size)))
    if not found:
        raise memory_error(table, layouts, batch_size, limit)
    return found


def _feedback(chain: Chain, layout: Layout, conditioning: SelfConditioning, batch_size: int) -> float:
    """T_F: from the last stage to the first; a single stage keeps it."""
    if layout.num_stages == 1:
        return 0.0
    link, _ = chain.links(layout.replicas)
    num_samples = local_batch(batch_size, layout.num_microbatches, layout.replicas)
    return link.latency_seconds + conditioning.feedback_bytes * num_samples / link.bandwidth_bytes_per_second


def _conditioned_compute(costs: Costs, start: Ints, stop: Ints) -> Floats:
    return costs.compute_seconds(start, stop) + costs.forward[stop] - costs.forward[start]


def _conditioned_transfer(costs: Costs) -> Floats:
    return costs.transfer + costs.forward_message


def _conditioned_period(costs: Costs, start: Ints, stop: Ints) -> Floats:
    """T0_SC."""
    return np.maximum(_conditioned_compute(costs, start, stop), _conditioned_transfer(costs)[stop])


def conditioned_terms(costs: Costs, layout: Layout, conditioning: SelfConditioning, objective: Objective) -> Terms:
    """The expectation as a main table and criteria: p of a step with feedback, 1 - p of one without."""
    start, stop, _ = band(len(costs.state) - 1, layout.num_stages)
    plain, p, m = objective_terms(costs, layout, objective), conditioning.probability, layout.num_microbatches
    extra = p * _conditioned_period(costs, start, stop)
    if objective == "simulated":
        period, late = plain.criteria
        sent = np.broadcast_to(costs.forward_message[stop], plain.main.shape)
        return Terms(plain.main + p * sent, True, ((m - 1) * extra, (1 - p) * period, late))
    return Terms((m + 2 * layout.num_stages - 2) * extra, False, ((1 - p) * plain.main, *plain.criteria))


def _conditioned(plan: ChainPlan, costs: Costs, conditioning: SelfConditioning, feedback: float) -> SelfConditionedPlan:
    start, stop = np.array(plan.boundaries[:-1]), np.array(plan.boundaries[1:])
    period = float(_conditioned_period(costs, start, stop).max())
    if plan.objective == "simulated":
        through = float(_conditioned_compute(costs, start, stop).sum() + _conditioned_transfer(costs)[stop].sum())
        seconds = (plan.num_microbatches - 1) * period + through + plan.sync_seconds + feedback
    else:
        seconds = (plan.num_microbatches + 2 * plan.num_stages - 2) * period + plan.sync_seconds + feedback
    p = conditioning.probability
    return SelfConditionedPlan(plan, p * seconds + (1 - p) * plan.seconds, seconds)
