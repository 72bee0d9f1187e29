"""Random training steps in random layouts give one device's loss and gradients.

Every example is compared with plain autograd, run here and not by fxpipe, where the step makes no random draws; and by
`program.verify` always. The suite runs 6 steps in two layouts each, which share a capture; `FXPIPE_FUZZ_EXAMPLES=1000
pytest tests/test_fuzz.py --timeout 0` runs more, and `--hypothesis-seed=N` others.
"""

import os
import random
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, assume, event, example, given, settings

import fxpipe
from fxpipe.capture import loss_of
from fxpipe.compiler import requested
from fxpipe.plan.actions import Action, Work
from fxpipe.plan.plan import Plan, microbatch_sizes
from fxpipe.plan.schedule import Schedule
from fxpipe.program import Program
from passes.placement.place import place_schedule
from passes.schedules.replicas import with_reductions
from tests.dumped import assert_text_runs
from tests.strategies import Layer, RandomStep, Split, StepSpec, splits, step_specs

EXAMPLES = int(os.environ.get("FXPIPE_FUZZ_EXAMPLES", "6"))
TOLERANCE = 1e-10


READ_WITHOUT_GRADIENT = StepSpec(
    num_inputs=1,
    layers=(
        Layer("linear", (0,), frozen=False, no_grad=True, tied=None, tied_parameter=False),
        Layer("add", (1, 1), frozen=False, no_grad=False, tied=None, tied_parameter=False),
        Layer("linear", (2,), frozen=False, no_grad=False, tied=0, tied_parameter=False),
    ),
    outputs=(3,), loss="mean", square=False, width=4, returns="tensor", frozen_condition=False, seed=0,
)  # fmt: skip
"""A weight that one stage trains, and another reads under no_grad."""
FIVE_STAGES = Split(
    world_size=3, batch_size=1, microbatches=None, schedule="custom", stages=5, data_parallel=None, recompute=None,
    seed=3,
)  # fmt: skip
TIED_ENDS = replace(
    READ_WITHOUT_GRADIENT,
    layers=tuple(
        Layer("linear", (i,), frozen=False, no_grad=False, tied=0 if i == 4 else None, tied_parameter=False)
        for i in range(5)
    ),
    outputs=(5,),
)  # fmt: skip
"""The first layer's weight is the last one's, in another stage of the same rank."""
TWO_COPIES = Split(2, 2, None, "gpipe", stages=2, data_parallel=2)
NO_BACKWARD = replace(
    READ_WITHOUT_GRADIENT,
    layers=(
        Layer("conv", (0,), frozen=False, no_grad=False, tied=None, tied_parameter=False),
        Layer("add", (1, 1), frozen=False, no_grad=True, tied=None, tied_parameter=False),
        Layer("linear", (2,), frozen=False, no_grad=True, tied=None, tied_parameter=False),
    ),
    outputs=(3, 1),
)  # fmt: skip
"""The last layer's weight requires grad and has none."""
LEFT_OPEN = Split(2, 2, None, "auto", stages=None)


@given(step_specs(), splits(), splits())
@example(READ_WITHOUT_GRADIENT, FIVE_STAGES, None)
@example(TIED_ENDS, TWO_COPIES, None)
@example(NO_BACKWARD, LEFT_OPEN, None)
@settings(
    max_examples=EXAMPLES,
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
def test_any_step_in_any_layout_equals_one_device(spec: StepSpec, split: Split, another: Split | None) -> None:
    model = RandomStep(spec)
    assume(trains(model, model.example_inputs(split.batch_size)))
    check(model, split)
    if another is not None:
        check(model, another)


def check(model: RandomStep, split: Split) -> None:
    batch = model.example_inputs(split.batch_size)
    event(split.schedule)
    program = compiled(model, batch, split)
    if not model.draws:
        loss, gradients = plain_step(model, batch)
        result = program.run_local(**batch)
        assert_close(result.loss, loss, "loss", 0.0)
        assert_gradients(result.gradients, gradients)
    report = program.verify(**batch)
    assert report.ok, str(report)
    assert report.tolerance == TOLERANCE
    assert_repeats(program, batch)
    assert_text_runs(program, batch)


def trains(model: RandomStep, batch: Mapping[str, Any]) -> bool:
    """Whether the loss depends on a trainable parameter; what doesn't is refused, which has tests of its own."""
    return loss_of(model(**batch)).requires_grad


def compiled(model: RandomStep, batch: dict[str, Any], split: Split, **more: Any) -> Program:
    options: dict[str, Any] = {"example_inputs": batch, "batch_size": split.batch_size, **more}
    if split.recompute == "blocks":
        plan = compiled(model, batch, replace(split, recompute=None), **more).plan
        options.pop("fill", None)  # the plan has chosen
        return fxpipe.compile(model, split.world_size, **options, plan=with_random_runs(plan, split.seed))
    if split.schedule != "custom":
        named = {"schedule": split.schedule, "stages": split.stages, "microbatches": split.microbatches}
        named |= {"data_parallel": split.data_parallel, "recompute": split.recompute, "budget": 0.0}
        return fxpipe.compile(model, split.world_size, **options, **named)
    text = custom_schedule(model, split, options)
    return fxpipe.compile(model, split.world_size, schedule=text, **options)


def with_random_runs(plan: Plan, seed: int) -> Plan:
    """The plan with any blocks of every stage computed again, in runs of any length."""
    rng, runs = random.Random(seed), list[tuple[int, int]]()
    for start, stop in pairwise(plan.staged.boundaries):
        marks = [start, *(block for block in range(start + 1, stop) if rng.random() < 0.6), stop]
        runs += [run for run in pairwise(marks) if run[0] < run[1] and rng.random() < 0.6]
    return replace(plan, staged=replace(plan.staged, recompute=tuple(runs)))


def custom_schedule(model: RandomStep, split: Split, options: dict[str, Any]) -> str:
    """The text of a random correct schedule, stages on random ranks."""
    rng = random.Random(split.seed)
    num_microbatches = split.microbatches or rng.randint(1, split.batch_size)
    owner = [tuple(rng.choices(range(split.world_size), k=rng.choice((1, 1, 2, 3)))) for _ in range(split.stages or 1)]
    for _ in range(2):
        # A stage that turns out empty has no actions, and the rest is then divided among fewer.
        ranks = tuple(
            tuple(Action(s, "F", 0) for s in range(len(owner)) if owner[s][0] == rank)
            for rank in range(split.world_size)
        )
        work = work_of(model, Schedule("custom", len(owner), num_microbatches, ranks), options)
        owner = [owner[s] for s in work.stages]
    assert not work.empty
    return random_order(work, owner, split.world_size, rng).text()


def work_of(model: RandomStep, placement: Schedule, options: dict[str, Any]) -> Work:
    """Which actions a schedule with these stages needs."""
    asked = requested(model, len(placement.ranks), schedule=placement, **options)
    step = asked.analysed()
    size = microbatch_sizes(step.batch_size, placement.num_microbatches)[0]
    case = step.on(asked.cluster, len(placement.ranks))
    staged = place_schedule(case, step.blocks.at(size), placement)
    return step.work.of(staged, placement.num_microbatches)


def random_order(work: Work, owner: list[tuple[int, ...]], world_size: int, rng: random.Random) -> Schedule:
    """Actions taken one by one among those whose needs are met; backwards are split at random where they can be.

    Each micro-batch of a stage is on any one of its owners.
    """
    actions: dict[Action, int] = {}
    for microbatch in range(work.num_microbatches):
        for component in range(work.num_components):
            actions[Action(component, "T", microbatch)] = rng.randrange(world_size)
        for stage in work.stages:
            kinds = "F"
            if stage in work.backward:
                split = stage in work.input_grad and rng.random() < 0.5
                kinds += ("IW" if stage in work.weight_grad else "I") if split else "B"
            rank = rng.choice(owner[stage])
            actions |= {Action(stage, kind, microbatch): rank for kind in kinds}
    ranks: list[list[Action]] = [[] for _ in range(world_size)]
    done: set[Action] = set()
    while len(done) < len(actions):
        ready = [a for a in actions if a not in done and done.issuperset(work.needs(a, actions.keys()))]
        chosen = rng.choice(ready)
        ranks[actions[chosen]].append(chosen)
        done.add(chosen)
    schedule = Schedule("custom", work.num_stages, work.num_microbatches, tuple(map(tuple, ranks)))
    return with_reductions(schedule, work)


def plain_step(model: RandomStep, batch: Mapping[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients by name as any training loop gets them."""
    model.zero_grad()
    loss = loss_of(model(**batch))
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.detach(), gradients


def assert_gradients(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
    """Equal by name; a gradient that one side leaves out must be zero on the other."""
    floor = 1e-4 * max((float(g.abs().max()) for g in theirs.values()), default=0.0)
    for name in {*ours, *theirs}:
        mine, other = ours.get(name), theirs.get(name)
        zero = torch.zeros_like(mine if other is None else other)
        assert_close(zero if mine is None else mine, zero if other is None else other, name, floor)


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, name: str, floor: float) -> None:
    scale = max(float(theirs.abs().max()), floor)
    error = float((ours - theirs).abs().max())
    assert error <= TOLERANCE * scale, f"{name}: differs by {error:.2e}, largest value {scale:.2e}"


def assert_repeats(program: Program, batch: Mapping[str, Any]) -> None:
    """Two runs are equal bit for bit, and move exactly the planned bytes."""
    engine = program.local_engine()
    tensors = program.step.tensors((), batch)[0]
    first, second = engine.run(tensors, 0), engine.run(tensors, 0)
    assert engine.sent_bytes == program.traffic().channels
    assert torch.equal(first[0], second[0])
    assert first[1].keys() == second[1].keys()
    for name, gradient in first[1].items():
        assert torch.equal(gradient, second[1][name]), name
