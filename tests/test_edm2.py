"""EDM2, whose forward writes to its own weights, trained on several ranks as on one device."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import fxpipe
from tests.distributed import run_processes
from tests.edm2 import EDM2, batch
from tests.own_models import SEED, OneDevice

STEPS = 3
Run = tuple[list[float], list[dict[str, Tensor]], dict[str, Tensor]]


def trained(model: EDM2, engine: Any) -> Run:
    """Losses, gradients of every step, and the state in the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, gradients = [], []
    for number in range(STEPS):
        losses.append(float(engine.step(batch(number))))
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients, engine.gather_state_dict()


@cache
def one_device() -> Run:
    model = EDM2()
    return trained(model, OneDevice(model))


def program(model: EDM2, world_size: int, **layout: Any) -> fxpipe.Program:
    return fxpipe.compile(model, world_size, example_inputs=batch(0), microbatches=4 if world_size > 1 else 1, **layout)


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (1, {}),
        (2, {"schedule": "wave"}),
        (2, {"schedule": "1f1b", "recompute": True}),
        (2, {"schedule": "gpipe", "data_parallel": 2}),
        (4, {"schedule": "zero-bubble"}),
        (4, {"schedule": "wave", "data_parallel": 2}),
    ],
)
def test_edm2_is_trained_as_on_one_device(world_size: int, layout: dict[str, Any]) -> None:
    model = EDM2()
    made = program(model, world_size, **layout)
    assert {update.name for update in made.step.updates} == {n for n, p in model.named_parameters() if p.ndim > 1}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = made.verify(**batch(0))
    assert report.ok, report
    torch.testing.assert_close(model.state_dict(), before, rtol=0.0, atol=0.0)
    torch.testing.assert_close(trained(model, made.local_engine(seed=SEED)), one_device(), rtol=1e-10, atol=1e-12)


def rank_main() -> Run:
    model = EDM2()
    engine = program(model, 2, schedule="gpipe", data_parallel=2, shard="weights").engine(seed=SEED)
    found = trained(model, engine)
    engine.close()
    return found


def test_over_gloo_replicas_share_its_weights_out() -> None:
    (losses, first, state), (_, second, _) = run_processes(2, rank_main)
    expected = one_device()
    torch.testing.assert_close((losses, state), (expected[0], expected[2]), rtol=1e-10, atol=1e-12)
    both = [{**mine, **others} for mine, others in zip(first, second, strict=True)]
    torch.testing.assert_close(both, expected[1], rtol=1e-10, atol=1e-12)
