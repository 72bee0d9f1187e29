"""Frozen work of the next batch in the idle time of this one: losses and trained weights are one device's."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fxpipe
from fxpipe.capture.randomness import SeededDraws
from fxpipe.errors import CompileError
from fxpipe.plan.rank_program import Message
from fxpipe.run import one_device as uncompiled
from tests.distributed import run_processes
from tests.frozen_steps import SLOW, FrozenStep
from tests.strategies import RandomStep, Split, StepSpec, splits, step_specs
from tests.test_fuzz import compiled, trains

STEPS, SEED, EXACT = 5, 3, 1e-10


@dataclass(frozen=True)
class Trained:
    """Losses of a few steps with an optimizer, and the weights they led to."""

    losses: list[float]
    weights: Mapping[str, Tensor]


def batches_of(model: Any, batch_size: int, count: int = STEPS) -> list[dict[str, Tensor]]:
    """Different ones, the same in every process."""
    torch.manual_seed(1)
    return [model.example_inputs(batch_size) for _ in range(count)]


def trained_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def one_device(model: nn.Module, batches: Sequence[Mapping[str, Tensor]], plain: bool = False) -> Trained:
    """The uncompiled model, trained as any is; unless `plain`, with the draws that a compiled step makes."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2)
    losses = []
    for index, batch in enumerate(batches):
        if plain:
            loss = model(**batch)
            loss.backward()
        else:
            found = uncompiled.one_device(model, (), batch, SeededDraws(SEED, index, torch.device("cpu")))
            loss = found.loss
            for name, gradient in found.gradients.items():
                parameters[name].grad = gradient
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, trained_weights(model))


def ahead(program: fxpipe.Program, batches: Sequence[Mapping[str, Tensor]]) -> Trained:
    """The compiled step on all ranks, threads or this process's one, each batch's frozen work a step early."""
    local = "WORLD_SIZE" not in os.environ
    engine = program.local_engine(seed=SEED) if local else program.engine(seed=SEED)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-2)
    losses = [float(loss) for loss in engine.train(iter(batches), optimizer)]
    weights = {name: p.detach().clone() for name, p in engine.named_parameters() if p.requires_grad}
    if not local:
        engine.close()
    return Trained(losses, weights)


def assert_same(ours: Trained, theirs: Trained) -> None:
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=EXACT, atol=0.0)
    assert ours.weights.keys() == theirs.weights.keys()
    for name, weight in theirs.weights.items():
        torch.testing.assert_close(ours.weights[name], weight, rtol=EXACT, atol=EXACT, msg=name)


def crossing(program: fxpipe.Program) -> list[Message]:
    """What frozen work sends to other ranks in a step."""
    assert program.filled is not None
    return [message for message in program.filled.steady.messages if message.samples is not None]


@dataclass(frozen=True)
class Case:
    ranks: int
    options: dict[str, Any] = field(default_factory=dict)
    how: str = ""
    batch_size: int = 5

    def program(self, model: Any) -> fxpipe.Program:
        example = model.example_inputs(self.batch_size)
        options = {"cost_model": SLOW, "fill": "idle", **self.options}
        return fxpipe.compile(model, self.ranks, example_inputs=example, **options)

    def __str__(self) -> str:
        words = "-".join(map(str, self.options.values()))
        return f"{self.ranks}-{words}" + (f"-{self.how}" if self.how else "") + f"-batch{self.batch_size}"


CASES = [
    Case(2, {"schedule": "1f1b", "microbatches": 3}),
    Case(4, {"schedule": "wave", "microbatches": 4, "data_parallel": 2}, "doubled"),
    Case(3, {"schedule": "zero-bubble", "microbatches": 5}, "shared"),
    Case(2, {"schedule": "1f1b", "microbatches": 2}, "inner", 4),
    Case(3, {"schedule": "gpipe", "microbatches": 3, "fill": "after"}, "inner"),
    Case(4, {"schedule": "1f1b", "microbatches": 5, "data_parallel": 2}, "inner"),
    Case(2, {"schedule": "1f1b", "microbatches": 1}, "shared"),  # nothing is cut into samples
    Case(5, {"schedule": "1f1b", "microbatches": 2}, "", 2),  # more ranks than samples
    Case(2, {"schedule": "1f1b"}, "doubled", 1),
    Case(1, {"schedule": "gpipe", "microbatches": 2}),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_losses_and_weights_are_one_devices(case: Case) -> None:
    batches = batches_of(FrozenStep(), case.batch_size)
    program = case.program(FrozenStep(how=case.how))
    assert_same(ahead(program, batches), one_device(FrozenStep(how=case.how), batches))
    fill = case.options.get("fill", "idle")
    if case.ranks > 1 and case.batch_size > 2 and case.options["microbatches"] > 1:
        assert crossing(program)
        assert any("T" in action for action in between_actions(program)) == (fill != "after")


def between_actions(program: fxpipe.Program) -> list[str]:
    """What ranks do before their last action of training."""
    assert program.filled is not None
    found = []
    for rank in program.filled.steady.programs:
        actions = [str(node.args[1]) for node in rank.graph.nodes if node.name.startswith("begin_")]
        last = max((i for i, action in enumerate(actions) if "T" not in action and "end" not in action), default=0)
        found += actions[:last]
    return found


def test_without_draws_it_is_what_plain_autograd_trains() -> None:
    batches = batches_of(FrozenStep(), 6)
    program = Case(2, {"schedule": "wave", "microbatches": 4}, "", 6).program(FrozenStep(draws=False))
    assert_same(ahead(program, batches), one_device(FrozenStep(draws=False), batches, plain=True))


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("sd", Case(2, {"schedule": "1f1b", "microbatches": 2}, "", 4)),
        ("sdxl", Case(2, {"schedule": "wave", "microbatches": 2}, "", 4)),
        ("controlnet", Case(2, {"schedule": "zero-bubble", "microbatches": 2}, "", 4)),
    ],
)
def test_diffusion_steps(name: str, case: Case) -> None:
    """VAE samples, noise and time are drawn in the frozen part, a step early."""
    from tests.models import ZOO  # not at the top: ranks in processes would wait for diffusers

    model = ZOO[name](torch.float64)
    batches = batches_of(model, case.batch_size)
    program = case.program(model)
    assert_same(ahead(program, batches), one_device(ZOO[name](torch.float64), batches))
    assert crossing(program)


def train_in_processes(ranks: str, schedule: str, replicas: str) -> tuple[list[float], Mapping[str, Tensor]]:
    trained = gloo_case(ranks, schedule, replicas)
    return trained.losses, trained.weights


def gloo_case(ranks: str, schedule: str, replicas: str) -> Trained:
    options = {"schedule": schedule, "microbatches": 4, "data_parallel": int(replicas)}
    program = Case(int(ranks), options).program(FrozenStep())
    return ahead(program, batches_of(FrozenStep(), 5))


@pytest.mark.parametrize(("ranks", "schedule", "replicas"), [("2", "zero-bubble", "1"), ("4", "1f1b", "2")])
def test_gloo_equals_threads_bit_for_bit(ranks: str, schedule: str, replicas: str) -> None:
    expected = gloo_case(ranks, schedule, replicas)
    seen: set[str] = set()
    for losses, weights in run_processes(int(ranks), train_in_processes, ranks, schedule, replicas):
        assert losses == expected.losses
        seen |= weights.keys()
        for name, weight in weights.items():
            assert torch.equal(weight, expected.weights[name]), name
    assert seen == expected.weights.keys()


@st.composite
def frozen_specs(draw: st.DrawFn) -> StepSpec:
    """Random steps that begin with frozen layers."""
    spec = draw(step_specs())
    count = draw(st.integers(1, len(spec.layers) - 1))
    how = draw(st.sampled_from(("frozen", "no_grad")))
    first = replace(spec.layers[0], kind="linear", args=spec.layers[0].args[:1])
    frozen = [replace(layer, **{how: True}) for layer in (first, *spec.layers[1:count])]
    layers = [*frozen, *spec.layers[count:]]
    fits = [layer if layer.tied != 0 or layer.kind == "linear" else replace(layer, tied=None) for layer in layers]
    return replace(spec, layers=tuple(fits))


@given(frozen_specs(), splits(), st.sampled_from(("auto", "idle", "after")))
@settings(max_examples=5, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
def test_any_step_in_any_layout(spec: StepSpec, split: Split, fill: str) -> None:
    model = RandomStep(spec)
    batch = model.example_inputs(split.batch_size)
    assume(trains(model, batch))
    program = compiled(model, batch, split, fill=fill, cost_model=SLOW)
    following = {name: value if name == "xs" else value.flip(0) for name, value in batch.items()}
    plain, filled = program.local_engine(seed=SEED), program.local_engine(seed=SEED)
    expected = [float(plain.step(batch)), float(plain.step(following))]
    gradients = taken_gradients(model)
    losses = [float(filled.step(batch, following)), float(filled.step(following))]
    torch.testing.assert_close(losses, expected, rtol=EXACT, atol=1e-3 * EXACT)
    found = taken_gradients(model)
    floor = EXACT * 1e-4 * max(float(g.abs().max()) for g in gradients.values())
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            found[name], gradient, rtol=0.0, atol=max(floor, EXACT * float(gradient.abs().max()))
        )


def taken_gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def test_frozen_work_runs_in_parts_where_memory_is_short() -> None:
    case = Case(2, {"schedule": "1f1b", "microbatches": 8}, "", 16)
    free = case.program(FrozenStep())
    needed = free.plan.outcomes[0].peak_bytes
    assert needed is not None
    limit = int(0.95 * needed)
    tight = replace(case, options={**case.options, "memory_limit": limit}).program(FrozenStep())
    assert max(tight.simulate(filled=True).peak_bytes) < max(free.simulate(filled=True).peak_bytes)
    assert max(tight.simulate(filled=True).peak_bytes) <= limit
    batches = batches_of(FrozenStep(), case.batch_size)
    assert_same(ahead(tight, batches), one_device(FrozenStep(), batches))


class Mixing(FrozenStep):
    """A frozen part that looks at the whole batch: it can't run on some samples."""

    def __init__(self, how: str) -> None:
        super().__init__(draws=False)
        self.norm = nn.BatchNorm1d(4).double().requires_grad_(False)
        self.norm.train(how == "batch statistics")
        self.mixes = how

    def _hint(self, latents: Tensor, words: Tensor) -> Tensor:
        hint = super()._hint(latents, words)
        return hint - hint.mean(0) if self.mixes == "mean" else self.norm(hint)


@pytest.mark.parametrize(
    ("how", "message"), [("mean", "micro-batches would give another result"), ("batch statistics", "norm")]
)
def test_frozen_work_that_mixes_samples_is_refused(how: str, message: str) -> None:
    with pytest.raises(fxpipe.FxpipeError, match=message):
        Case(2, {"schedule": "1f1b", "microbatches": 2}, "", 4).program(Mixing(how))


@pytest.mark.parametrize("how", ["mean", "batch statistics"])
def test_frozen_work_that_mixes_samples_runs_whole_on_one_micro_batch(how: str) -> None:
    batches = batches_of(FrozenStep(), 4)
    program = Case(2, {"schedule": "1f1b", "microbatches": 1}, "", 4).program(Mixing(how))
    assert_same(ahead(program, batches), one_device(Mixing(how), batches, plain=True))


def test_frozen_statistics_that_are_fixed_mix_nothing() -> None:
    batches = batches_of(FrozenStep(), 4)
    program = Case(2, {"schedule": "1f1b", "microbatches": 2}, "", 4).program(Mixing("fixed"))
    assert_same(ahead(program, batches), one_device(Mixing("fixed"), batches, plain=True))


def test_a_step_without_frozen_work_takes_a_next_batch_all_the_same() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x).square().mean()

    program = fxpipe.compile(Bare(), 2, example_inputs={"x": torch.ones(4, 4).double()}, schedule="1f1b")
    batches = [{"x": torch.full((4, 4), i + 1.0).double()} for i in range(STEPS)]
    assert program.filled is None
    assert_same(ahead(program, batches), one_device(Bare(), batches, plain=True))


def test_an_unknown_filler_is_refused() -> None:
    with pytest.raises(CompileError, match="fill='all'; give one of"):
        Case(2, {"schedule": "1f1b", "microbatches": 2, "fill": "all"}).program(FrozenStep())
