"""Several backbones in opposite directions: each trains as it does alone; what has one backbone is refused."""

import os

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from examples.cascade import lsun
from tests.distributed import run_processes
from tests.steps import losses_of


class Backbone(nn.Module):
    def __init__(self, num_layers: int, width: int = 24) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


class Several(nn.Module):
    """Backbones with a loss each. `fed`: the next is fed the one before's prediction, without a gradient."""

    def __init__(self, depths: tuple[int, ...], fed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbones, self.fed = nn.ModuleList(map(Backbone, depths)), fed
        self.double()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        loss = torch.zeros((), dtype=x.dtype)
        for backbone in self.backbones:
            prediction = backbone(x)
            loss = loss + F.mse_loss(prediction, target)
            x = prediction.detach() if self.fed else x.roll(1, 1)
        return loss

    def example_inputs(self, batch_size: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1)
        x, target = torch.randn(2, batch_size, 24, generator=generator, dtype=torch.float64)
        return {"x": x, "target": target}


def alone(model: Several, batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """The sum of the losses, and the gradients of every backbone trained by itself."""
    x, total, gradients = batch["x"], 0.0, {}
    for index, backbone in enumerate(model.backbones):
        prediction = backbone(x)
        loss = F.mse_loss(prediction, batch["target"])
        names, parameters = zip(*backbone.named_parameters(), strict=True)
        found = torch.autograd.grad(loss, parameters)
        gradients |= {f"backbones.{index}.{name}": g for name, g in zip(names, found, strict=True)}
        total += float(loss.detach())
        x = prediction.detach() if model.fed else x.roll(1, 1)
    return total, gradients


@pytest.mark.parametrize(
    ("depths", "fed", "world_size", "data_parallel"),
    [((4, 6), False, 2, 1), ((5, 3), True, 4, 2), ((3, 4, 5), False, 3, 1), ((2, 2, 2), True, 4, 1)],
)
def test_each_backbone_trains_as_alone(depths: tuple[int, ...], fed: bool, world_size: int, data_parallel: int) -> None:
    model = Several(depths, fed)
    batch = model.example_inputs(7)
    program = fxpipe.compile(
        model, world_size, example_inputs=batch, microbatches=4, schedule="bidirectional", data_parallel=data_parallel
    )
    result = program.run_local(**batch)
    loss, gradients = alone(model, batch)
    assert float(result.loss) == pytest.approx(loss, rel=1e-12)
    for name, gradient in gradients.items():
        torch.testing.assert_close(result.gradients[name], gradient, rtol=1e-10, atol=1e-14)


def test_groups_go_in_opposite_directions() -> None:
    program = fxpipe.compile(Several((4, 4)), 2, batch_size=8, microbatches=4, schedule="bidirectional")
    ranks = {name: p.rank for p in program.step.programs for name in p.state}
    assert (ranks["backbones.0.layers.0.weight"], ranks["backbones.0.layers.3.weight"]) == (0, 1)
    assert (ranks["backbones.1.layers.0.weight"], ranks["backbones.1.layers.3.weight"]) == (1, 0)
    starts = [str(actions[0]) for actions in program.schedule.ranks]
    assert starts == ["0F0", "2F0"], "both backbones start at once"


def test_one_backbone_is_refused() -> None:
    with pytest.raises(fxpipe.CompileError, match="needs two backbones that share nothing"):
        fxpipe.compile(Several((5,)), 2, batch_size=4, schedule="bidirectional")


def train() -> list[float]:
    model = Several((4, 6), fed=True)
    batch = model.example_inputs(4)
    program = fxpipe.compile(model, 2, example_inputs=batch, microbatches=2, schedule="bidirectional")
    local = "WORLD_SIZE" not in os.environ
    engine = program.local_engine(seed=1) if local else program.engine(seed=1)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-3)
    losses = losses_of(engine, optimizer, [batch] * 2)
    if not local:
        engine.close()
    return losses


def test_over_gloo_it_is_as_in_threads() -> None:
    assert run_processes(2, train) == [train()] * 2


def test_the_example() -> None:
    model = lsun().double()
    batch = model.example_inputs(4)
    program = fxpipe.compile(model, 2, example_inputs=batch, microbatches=2, schedule="bidirectional")
    assert program.verify(**batch).ok
