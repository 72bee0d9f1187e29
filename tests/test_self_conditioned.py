"""Self-conditioning: both passes of a stage on one rank, the first in some steps only, equal to one device's steps."""

import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from fxpipe.compiler import requested
from fxpipe.errors import CompileError
from fxpipe.models.self_conditioning import conditioned
from passes.placement.cascade import first_pass
from tests.distributed import run_processes
from tests.steps import losses_of

SEED, STEPS = 5, 6


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))

    def forward(self, x: Tensor, first: Tensor) -> Tensor:
        h = x + 0.5 * first
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        return h


class Step(nn.Module):
    """Noise prediction; a frozen encoder in front, noise drawn inside. `on` leaves out the first pass by hand."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(6, 6).requires_grad_(False)
        self.backbone = Backbone()
        self.on = True
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        latent = torch.tanh(self.encoder(x))
        noise = torch.randn_like(latent)
        noisy = latent + noise
        with torch.no_grad():
            first = self.backbone(noisy, torch.zeros_like(noisy))
        return F.mse_loss(self.backbone(noisy, first if self.on else torch.zeros_like(first)), noise)

    def example_inputs(self, batch_size: int) -> dict[str, Tensor]:
        return {"x": torch.randn(batch_size, 6, generator=torch.Generator().manual_seed(batch_size)).double()}


def batches() -> list[dict[str, Tensor]]:
    return [{"x": Step().example_inputs(7)["x"] + i} for i in range(STEPS)]


def one_device() -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of the same steps on one rank, with the first pass or without it, as drawn."""
    model = Step()
    optimizer = torch.optim.SGD(model.backbone.parameters(), lr=0.05)
    losses = []
    for index, batch in enumerate(batches()):
        model.on = conditioned(SEED, index, 0.5)
        result = fxpipe.compile(model, 1, example_inputs=batch, schedule="gpipe", microbatches=1).run_local(
            **batch, seed=SEED, step=index
        )
        for name, gradient in result.gradients.items():
            model.get_parameter(name).grad = gradient
        optimizer.step()
        losses.append(float(result.loss))
    return losses, {name: p.detach().clone() for name, p in model.backbone.named_parameters(prefix="backbone")}


def train(world_size: str, data_parallel: str, ahead: str, apart: str = "") -> tuple[list[float], dict[str, Tensor]]:
    """`apart`: rank 0 has most of the first pass, also what reads weights that others train."""
    model = fxpipe.SelfConditioning(Step(), 0.5)
    program = fxpipe.compile(
        model, int(world_size), batch_size=7, microbatches=3, data_parallel=int(data_parallel), schedule="interleaved"
    )
    if apart:
        start, _, *later = program.plan.staged.boundaries
        staged = replace(program.plan.staged, boundaries=(start, later[0] - 1, *later))
        program = fxpipe.compile(model, int(world_size), plan=replace(program.plan, staged=staged))
    local = "WORLD_SIZE" not in os.environ
    engine = program.local_engine(seed=SEED) if local else program.engine(seed=SEED)
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.05)
    if ahead == "ahead":
        losses = [float(loss.detach()) for loss in engine.train(batches(), optimizer)]
    else:
        losses = losses_of(engine, optimizer, batches())
    trained = {name: p.detach().clone() for name, p in engine.named_parameters()}
    if not local:
        engine.close()
    return losses, trained


def assert_equal(found: tuple[list[float], dict[str, Tensor]], wanted: tuple[list[float], dict[str, Tensor]]) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=1e-10)
    for name, parameter in found[1].items():
        torch.testing.assert_close(parameter, wanted[1][name], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(
    ("world_size", "data_parallel", "ahead"), [("2", "1", ""), ("2", "1", "ahead"), ("4", "2", "ahead"), ("1", "1", "")]
)
def test_steps_equal_one_device(world_size: str, data_parallel: str, ahead: str) -> None:
    drawn = [conditioned(SEED, index, 0.5) for index in range(STEPS)]
    assert {*drawn} == {True, False}, "both programs should run"
    found = train(world_size, data_parallel, ahead)
    assert_equal(found, one_device())
    assert found[1].keys() == one_device()[1].keys()


@pytest.mark.parametrize("apart", ["", "apart"])
def test_gloo_equals_one_device(apart: str) -> None:
    """Also where a rank reads weights in first passes alone, which are trained in all steps."""
    wanted = one_device()
    for found in run_processes(2, train, "2", "1", "ahead", apart):
        assert_equal(found, wanted)


def test_both_passes_of_a_stage_are_on_its_rank() -> None:
    program = fxpipe.compile(fxpipe.SelfConditioning(Step()), 2, batch_size=4, data_parallel=1)
    holders = [{name for name in p.state if name.startswith("backbone")} for p in program.step.programs]
    assert not holders[0] & holders[1]
    assert program.step.without is not None
    sent = [sum(m.num_bytes for m in step.messages) for step in (program.step, program.step.without)]
    assert sent[1] < sent[0]


def test_stages_of_both_passes_are_refused() -> None:
    """The first pass is left out by stages."""
    model = fxpipe.SelfConditioning(Step())
    plan = fxpipe.compile(model, 1, batch_size=4, schedule="interleaved").plan
    first, middle, last = plan.staged.boundaries
    later = replace(plan, staged=replace(plan.staged, boundaries=(first, middle + 1, last)))
    with pytest.raises(CompileError, match=f"no stage begins at block {middle}, where the first pass ends"):
        fxpipe.compile(model, 1, plan=later)


def test_replicas_leave_the_first_pass_out_too() -> None:
    asked = requested(fxpipe.SelfConditioning(Step()), 2, batch_size=4, data_parallel=2, cache=False)
    costed = asked.analysed()
    plan = asked.planned(costed)
    length = first_pass(costed.graph, costed.blocks)
    assert length in plan.staged.boundaries[1:-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "1f1b"}, "does not keep both passes"),
        ({"schedule": "rank 0: 0F0 0B0\nrank 1: 1F0 1B0"}, "of your own"),
    ],
)
def test_other_placements_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(fxpipe.CompileError, match=message):
        fxpipe.compile(fxpipe.SelfConditioning(Step()), 2, batch_size=4, **options)


def test_a_step_with_one_pass_is_refused() -> None:
    with pytest.raises(fxpipe.CompileError, match="must call it twice"):
        fxpipe.compile(fxpipe.SelfConditioning(nn.Sequential(nn.Linear(2, 2), nn.Flatten(0), Mean())), 2,
                       example_inputs=(torch.ones(4, 2),))  # fmt: skip
    with pytest.raises(fxpipe.CompileError, match="from 0 to 1"):
        fxpipe.SelfConditioning(Step(), 1.5)


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()
