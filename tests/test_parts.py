"""A batch that forward cuts into parts, as images and those of a prior: a sample is a row of each part."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from fxpipe.capture.randomness import SeededDraws
from fxpipe.errors import CompileError
from fxpipe.run.one_device import one_device
from tests.distributed import run_processes
from tests.frozen_steps import SLOW, FrozenStep

SEED, ROWS = 3, 8


class Parts(FrozenStep):
    """Rows that follow each other are of `count` kinds, each with a loss of its own."""

    def __init__(self, way: str = "chunk", count: int = 2) -> None:
        super().__init__()
        self.way, self.count = way, count
        self.table = torch.linspace(0.5, 2, 4, dtype=torch.float64)  # no buffer, like a scheduler's

    def parts(self, value: Tensor) -> Any:
        size = value.shape[0] // self.count
        match self.way:
            case "chunk":
                return value.chunk(self.count)
            case "slices":
                return [value[start * size : (start + 1) * size] for start in range(self.count)]
            case "split":
                return torch.split(value, [size] * self.count)
            case "strided":
                return [value[start :: self.count] for start in range(self.count)]
            case _:
                return value.view(self.count, size, *value.shape[1:]).unbind()

    def forward(self, pixels: Tensor, tokens: Tensor, time: Tensor) -> Any:
        mean, _ = self.moments(self.encoder(pixels)).chunk(2, dim=1)
        noise = torch.randn_like(mean)
        skip = self.unet.inward(mean + time[:, :, None] * noise)
        prediction = self.unet.outward(F.silu(self.unet.up(torch.cat([self.unet.down(skip), skip], dim=1))))
        pairs = zip(self.parts(prediction), self.parts(noise), strict=True)
        first, *others = (F.mse_loss(part, target) for part, target in pairs)
        weights = self.table[(3 * self.parts(noise)[0][:, 0, 0]).abs().long() % 4]
        first = first + (weights / weights.sum() * self.parts(prediction)[0].mean((1, 2))).sum()
        loss = first + sum(0.5 * other for other in others)
        return {"loss": loss, "prior": others[-1], "prediction": prediction, "weights": weights}


def compiled(world_size: int, model: nn.Module, rows: int = ROWS, **options: Any) -> fxpipe.Program:
    return fxpipe.compile(model, world_size, batch_size=rows, cost_model=SLOW, **options)


@pytest.mark.parametrize(("way", "count"), [("chunk", 2), ("slices", 3), ("split", 2), ("rows", 3)])
def test_parts_are_exact(way: str, count: int) -> None:
    model = Parts(way, count)
    program = compiled(2, model, 4 * count, schedule="wave", microbatches=3)
    batch = model.example_inputs(4 * count)
    found = program.verify(**batch, seed=SEED, step=2)
    assert found.ok, found
    assert program.plan.batch_size == 4
    result = program.run_local(**batch, seed=SEED, step=2)
    expected = one_device(Parts(way, count), (), batch, SeededDraws(SEED, 2, torch.device("cpu"))).outputs
    assert result.outputs.keys() == expected.keys() == {"prior", "prediction", "weights"}
    for name, value in expected.items():
        torch.testing.assert_close(result.outputs[name], value, rtol=1e-10, atol=1e-10, msg=name)


def test_plans_of_parts_are_read_again(tmp_path: Path) -> None:
    program = compiled(4, Parts(), schedule="1f1b", data_parallel=2, fill="none")
    assert fxpipe.Plan.parse(str(program.plan)) == program.plan
    assert any("2 rows of the batch" in note for note in program.plan.notes)
    program.plan.save(tmp_path / "plan.json")
    again = fxpipe.compile(Parts(), 4, plan=tmp_path / "plan.json", cost_model=SLOW)
    assert again.step.fingerprint == program.step.fingerprint
    assert again.verify(**Parts().example_inputs(ROWS)).ok


def trained(world_size: str) -> list[Tensor]:
    """Losses of two steps, of parts of batches under torchrun, where a rank collates what it reads of pairs."""
    local, model = "WORLD_SIZE" not in os.environ, Parts()
    batches = [model.example_inputs(rows, seed) for seed, rows in enumerate((ROWS, ROWS - 2))]
    program = compiled(int(world_size), model, schedule="1f1b", data_parallel=2, fill="none")
    engine = program.local_engine(seed=SEED) if local else program.engine(seed=SEED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in batches:
        rows = len(batch["time"])
        own = list(engine.samples(rows // 2))
        assert local or 0 < len(own) < rows // 2
        part = {name: value.view(2, rows // 2, *value.shape[1:])[:, own].flatten(0, 1) for name, value in batch.items()}
        losses.append(engine.step(batch if local else fxpipe.LocalBatch(part, rows // 2)))
        optimizer.step()
        optimizer.zero_grad()
    engine.close()
    return losses


def test_parts_over_gloo_are_those_of_one_process() -> None:
    expected = torch.stack(trained("2"))
    for losses in run_processes(2, trained, "2"):
        torch.testing.assert_close(torch.stack(losses), expected, rtol=1e-10, atol=0)


def test_what_is_no_multiple_is_refused() -> None:
    with pytest.raises(CompileError, match="a batch of 7 has no 2 alike: pass a multiple of 2"):
        compiled(2, Parts(), 7, schedule="1f1b")
    with pytest.raises(CompileError, match=r"exceeds the batch of .* parts: a sample is 2 rows of the batch"):
        compiled(2, Parts(), schedule="1f1b", microbatches=ROWS)
    with pytest.raises(CompileError, match=r"picks some samples of the batch.* parts: a sample is 2 rows"):
        compiled(2, Parts("strided"), schedule="1f1b", microbatches=2)
    program = compiled(2, Parts(), schedule="1f1b")
    with pytest.raises(CompileError, match="has 5 rows, and forward cuts it into 2 parts"):
        program.run_local(**Parts().example_inputs(5))
