"""What forward returns beside the loss: one device's values, however the step is laid out, at no backward's cost."""

import os
import warnings
from collections import Counter, OrderedDict, namedtuple
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from fxpipe.capture.outputs import outputs_of
from fxpipe.capture.randomness import SeededDraws
from fxpipe.models.self_conditioning import conditioned
from fxpipe.run.one_device import one_device
from tests.distributed import run_processes
from tests.frozen_steps import SLOW, FrozenStep
from tests.test_self_conditioned import Step

SEED, SIZES, EXACT = 3, (7, 7, 5), 1e-10
NUMBERS = {"mean", "total", "hits", "late", "early", "frozen", "given", "constant", "again"}


class Returning(FrozenStep):
    """Beside the loss: numbers and tensors of every kind, made early, late, by frozen layers, and drawn; `std` mixes
    samples, so that it is left out."""

    def forward(self, pixels: Tensor, tokens: Tensor, time: Tensor) -> Any:
        mean, _ = self.moments(self.encoder(pixels)).chunk(2, dim=1)
        noise = torch.randn_like(mean)
        skip = self.unet.inward(mean + time[:, :, None] * noise)
        prediction = self.unet.outward(F.silu(self.unet.up(torch.cat([self.unet.down(skip), skip], dim=1))))
        each = F.mse_loss(prediction, noise, reduction="none").mean((1, 2))
        loss = each.mean()
        with torch.no_grad():
            hits = (prediction.argmax(2) == noise.argmax(2)).sum()
        return loss, {
            "mean": (prediction - noise).abs().mean(), "total": each.sum(), "hits": hits, "late": (each * 2).mean(),
            "early": skip.flatten(1).norm(dim=1).mean(), "frozen": mean.mean(), "given": time.mean(),
            "constant": torch.tensor(5), "again": loss, "prediction": prediction, "skip": skip, "latents": mean,
            "noise": noise, "tokens": tokens, "by_row": each / pixels.shape[0], "over": prediction.square().sum(0),
            "folded": torch.cat([prediction, -prediction]), "std": prediction.std(),
        }  # fmt: skip


class Apart(Returning):
    """Without the mean over an input, for which every rank reads all of that."""

    def forward(self, pixels: Tensor, tokens: Tensor, time: Tensor) -> Any:
        loss, beside = super().forward(pixels, tokens, time)
        return loss, {name: value for name, value in beside.items() if name != "given"}


def outputs_on_one_device(batch: dict[str, Tensor], step: int) -> dict[str, Tensor]:
    found = one_device(Returning(), (), batch, SeededDraws(SEED, step, torch.device("cpu"))).outputs
    return {name: value for name, value in found.items() if name != "std"}


def compiled(world_size: int, model: nn.Module | None = None, **options: Any) -> fxpipe.Program:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*also returns std, which engines leave out")
        return fxpipe.compile(model or Returning(), world_size, batch_size=7, cost_model=SLOW, **options)


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (1, {"schedule": "gpipe", "microbatches": 1}),
        (2, {"schedule": "wave", "microbatches": 3}),
        (2, {"schedule": "zero-bubble", "microbatches": 2, "recompute": True}),
        (4, {"schedule": "1f1b", "microbatches": 4, "data_parallel": 2}),
    ],
)
def test_outputs_are_one_devices(world_size: int, options: dict[str, Any]) -> None:
    program = compiled(world_size, **options)
    batch = Returning().example_inputs(7)
    found = program.verify(**batch, seed=SEED, step=2)
    assert found.ok, found
    assert f"{len(found.outputs)} outputs within" in str(found)
    expected = outputs_on_one_device(batch, 2)
    assert found.outputs.keys() - {"std"} == expected.keys()
    assert ("std" in found.outputs) == (options["microbatches"] == 1)
    result = program.run_local(**batch, seed=SEED, step=2)
    for name, value in expected.items():
        torch.testing.assert_close(result.outputs[name], value, rtol=EXACT, atol=EXACT, msg=name)
    broken = {**found.outputs, "hits": 1.0}
    assert "output hits: 1.00e+00  <-- HERE" in str(replace(found, outputs=broken))


class Counting(Returning):
    def forward(self, pixels: Tensor, tokens: Tensor, time: Tensor) -> Any:
        loss, _ = super().forward(pixels, tokens, time)
        return loss, {"samples": pixels.shape[0]}


def test_a_size_is_left_out_by_its_name() -> None:
    """And nothing that torch knows of it, at the user's own line."""
    with pytest.warns(UserWarning, match="forward also returns samples, ") as said:
        compiled(1, Counting(), schedule="gpipe", microbatches=2)
    assert [warning.filename for warning in said] == [__file__]


def test_outputs_cost_no_backward() -> None:
    """Gradients take the graphs that they take without outputs."""
    programs = [compiled(2, schedule="1f1b", microbatches=2)]
    silent = Returning()
    silent.forward = lambda pixels, tokens, time: Returning.forward(silent, pixels, tokens, time)[0]  # type: ignore[method-assign]
    programs.append(fxpipe.compile(silent, 2, batch_size=7, cost_model=SLOW, schedule="1f1b", microbatches=2))
    backwards = [
        Counter(
            str(node.target)
            for rank in program.step.programs
            for name, graph in rank.modules.items()
            for node in graph.nodes
            if "backward" in name and "aten" in str(node.target)
        )
        for program in programs
    ]
    assert backwards[0] == backwards[1]


def batches() -> list[dict[str, Tensor]]:
    return [Returning().example_inputs(size, seed) for seed, size in enumerate(SIZES)]


def train(schedule: str, data_parallel: str, world_size: str) -> list[tuple[dict[str, Tensor], Any]]:
    """Every step's outputs, as this rank has them; processes have their samples alone, and do no frozen work ahead."""
    local = "WORLD_SIZE" not in os.environ
    program = compiled(
        int(world_size), Returning() if local else Apart(), schedule=schedule, data_parallel=int(data_parallel),
        microbatches=3 if data_parallel == "1" else 4, fill="auto" if local else "none",
    )  # fmt: skip
    assert (program.plan.steady is not None) == local
    engine = program.local_engine(seed=SEED) if local else program.engine(seed=SEED)

    def part(batch: dict[str, Tensor]) -> fxpipe.LocalBatch:
        own = engine.samples(size := len(batch["time"]))
        assert len(own) < size
        return fxpipe.LocalBatch({name: value[list(own)] for name, value in batch.items()}, size)

    given, found = [batch if local else part(batch) for batch in batches()], []
    for batch, following in zip(given, [*given[1:], None], strict=True):
        engine.step(batch, following)
        found.append((engine.outputs, engine.gather_outputs()))
    engine.close()
    return found


def assert_one_devices(found: list[tuple[dict[str, Tensor], Any]], gathers: bool, without: str = "") -> None:
    for index, (batch, (numbers, everything)) in enumerate(zip(batches(), found, strict=True)):
        expected = {name: value for name, value in outputs_on_one_device(batch, index).items() if name != without}
        assert numbers.keys() == NUMBERS - {without}
        assert (everything is not None) == gathers
        assert everything is None or everything.keys() == expected.keys()
        for name, value in {**numbers, **(everything or {})}.items():
            torch.testing.assert_close(value, expected[name], rtol=EXACT, atol=EXACT, msg=name)


def test_filled_and_smaller_steps_return_the_same() -> None:
    assert_one_devices(train("wave", "1", "2"), gathers=True)


def test_outputs_of_parts_over_gloo_are_one_devices() -> None:
    for rank, found in enumerate(run_processes(2, train, "gpipe", "2", "2")):
        assert_one_devices(found, rank == 0, "given")


def test_outputs_in_float16_are_not_scaled_with_the_loss() -> None:
    batch = {name: value.float() if value.is_floating_point() else value for name, value in batches()[0].items()}
    options = {"schedule": "gpipe", "microbatches": 3, "precision": "fp16", "example_inputs": batch}
    program = compiled(2, model=Returning().float(), **options)
    found = program.verify(**batch, seed=SEED)
    assert found.ok, found
    assert found.nearness is not None
    assert {"prediction", "latents", "by_row"} <= found.nearness.ours.outputs.keys()
    far = replace(found.nearness.ours, outputs={**found.nearness.ours.outputs, "prediction": 1.0})
    assert "output prediction: 1.00e+00" in str(replace(found, nearness=replace(found.nearness, ours=far)))
    engine = program.local_engine(seed=SEED)
    seen = []
    for scaler in (None, engine.scaler(init_scale=2.0**6)):
        engine.step_index = 0
        seen.append((engine.step(batch, scaler=scaler), engine.gather_outputs()))
    assert scaler.is_enabled()
    torch.testing.assert_close(*seen, rtol=0, atol=0)


class Conditioned(Step):
    """Two passes of a backbone; beside the loss what either makes."""

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            first = self.backbone(x, torch.zeros_like(x))
        second = self.backbone(x, first)
        by_first = {"first": first, "ones": torch.exp(0 * first).mean()}
        return {"loss": F.mse_loss(second, x), "second": second, "mean": second.mean(), **by_first}


def test_steps_without_a_first_pass_return_nothing_of_it() -> None:
    program = fxpipe.compile(fxpipe.SelfConditioning(Conditioned(), 0.5), 2, batch_size=6, data_parallel=1)
    assert program.step.without is not None
    engine = program.local_engine(seed=SEED)
    for index in range(5):
        engine.step(Conditioned().example_inputs(6))
        drawn = conditioned(SEED, index, 0.5)
        assert engine.outputs.keys() == {"mean", *(["ones"] if drawn else [])}
        assert (engine.gather_outputs() or {}).keys() == {"mean", "second", *(["ones", "first"] if drawn else [])}
        assert not drawn or engine.outputs["ones"] == 1.0


@dataclass
class Pair:
    loss: Tensor
    inner: Any
    nothing: Any = None


LOSS, ONE, TWO = (torch.tensor(float(i)) for i in range(3))


@pytest.mark.parametrize(
    ("output", "names", "others"),
    [
        (LOSS, [], []),
        ((LOSS, ONE, [TWO, 3.0]), ["1", "2.0"], ["2.1"]),
        ((LOSS, {"mse": ONE, "inner": {"x": TWO}}), ["mse", "inner.x"], []),
        ((LOSS, {"mse": ONE}, {"mse": TWO}), ["1.mse", "2.mse"], []),
        ({"loss": LOSS, "mse": ONE, "lr": 0.1, "none": None}, ["mse"], ["lr"]),
        (Pair(LOSS, (ONE, Pair(TWO, "text"))), ["inner.0", "inner.1.loss"], ["inner.1.inner"]),
        (namedtuple("Output", "x loss")(ONE, LOSS), ["x"], []),
        (OrderedDict(x=ONE, loss=LOSS), ["x"], []),
        (SimpleNamespace(loss=LOSS, x=ONE), ["x"], []),
    ],
)
def test_names_of_outputs(output: Any, names: list[str], others: list[str]) -> None:
    tensors, left_out = outputs_of(output)
    assert (list(tensors), list(left_out)) == (names, others)
    assert all(value is not LOSS for value in tensors.values())


class Sized(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return {"loss": y.square().mean(), "above": y[y > 0], "below": (y < 0).sum()}


def test_what_has_no_known_size_is_left_out() -> None:
    with pytest.warns(UserWarning, match="returns above, which engines leave out: it is no tensor whose size is known"):
        program = fxpipe.compile(Sized(4, 4), 2, example_inputs=(torch.randn(6, 4),), schedule="1f1b")
    assert [output.name for output in program.step.outputs] == ["below"]
    assert program.verify(torch.randn(6, 4)).ok


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        h = self.first(x)
        loss = F.mse_loss(self.second(h), x)
        return loss * 0.5, {"features": h.mean(0), "average": (0.9 + 0.1 * loss.detach()).clone()}


def test_numbers_that_are_made_before_the_loss_is_are_made_beside_it() -> None:
    x = torch.randn(6, 6)
    report = fxpipe.compile(Scaled(), 2, example_inputs=(x,), microbatches=1, budget=0).verify(x)
    assert report.ok, report
    assert report.outputs.keys() == {"features", "average"}


def test_before_the_first_step_there_are_none() -> None:
    assert compiled(2, schedule="1f1b", microbatches=2).local_engine().outputs == {}
