"""Fresh steps but the last in another layout: exact ones, after which displaced steps are the same to rounding."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import fxpipe
from fxpipe.models.backbones import prediction_of
from fxpipe.plan.sample_plan import EXACT, SamplePlan
from fxpipe.sampler import Sampler
from tests.denoisers import case, noise
from tests.distributed import run_processes
from tests.test_sample_planner import DEVICE, DiT

FLUX = "FluxTransformer2DModel"
LAYOUTS = [  # of steps at the end, of fresh ones before, the bound on rounding
    (FLUX, {"stages": 2, "patches": 3, "cfg": 1}, {"cfg": 1, "attention": "ulysses"}, 1e-10),
    ("SD3Transformer2DModel", {"stages": 2, "patches": 3, "cfg": 2}, {"cfg": 1, "patches": 4}, 1e-10),
    ("UNet2DConditionModel", {"stages": 2, "patches": 3, "cfg": 1}, {"cfg": 2, "patches": 1}, 1e-10),
    ("PixArtTransformer2DModel", {"cfg": 1, "patches": 4}, {"cfg": 2, "patches": 2, "attention": "ring"}, 1e-10),
]


@cache
def compiled(key: str, own: tuple[tuple[str, Any], ...], exact: tuple[tuple[str, Any], ...]) -> tuple[Sampler, Sampler]:
    """By one layout alone, and with another for fresh steps."""
    given = case(key)
    ranks = 4 if dict(own).get("patches") == 4 or dict(own).get("cfg") == 2 else 2
    made = [
        fxpipe.compile_sampler(given.model, ranks, example=given.example, mode=mode, warmup=3, **dict(asked))
        for mode, asked in (("displaced", own), ("exact", exact))
    ]
    plan = replace(made[0].plan, warm=replace(made[1].plan, notes=(), expects=None, considered=()))
    assert SamplePlan.parse(str(plan)) == plan == SamplePlan.from_dict(plan.as_dict())
    return made[0], fxpipe.compile_sampler(given.model, ranks, example=given.example, plan=plan)


def called(sampler: Sampler, num_steps: int = 5) -> list[Tensor]:
    """Predictions of one call, whose sample changes from step to step."""
    (name,), example = sampler.step.traced.rows, sampler.example[1]
    change = noise(*example[name].shape).to(example[name].dtype)
    with sampler.call():
        steps = [{**example, name: example[name] + 0.05 * step * change} for step in range(num_steps)]
        return [prediction_of(sampler.predict(**given)).clone() for given in steps]


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize(("key", "own", "exact", "bound"), LAYOUTS)
def test_predictions_are_those_of_one_layout(
    key: str, own: Mapping[str, Any], exact: Mapping[str, Any], bound: float
) -> None:
    alone, warm = compiled(key, tuple(own.items()), tuple(exact.items()))
    assert warm.step.sequence(5) == ["warm", "warm", "fresh", "displaced", "displaced"]
    assert set(warm.step.forms) - set(alone.step.forms) == {"warm"}
    found, wanted = called(warm), called(alone)
    assert max(map(error, found, wanted)) <= bound
    assert all(torch.equal(*pair) for pair in zip(found, called(warm), strict=True))  # a call leaves nothing
    assert warm.verify().ok


def launched() -> list[Tensor]:
    key, own, exact, _ = LAYOUTS[0]
    _, warm = compiled(key, tuple(own.items()), tuple(exact.items()))
    found = called(warm)
    warm.close()
    return found


def test_processes_give_what_threads_give() -> None:
    key, own, exact, _ = LAYOUTS[0]
    _, warm = compiled(key, tuple(own.items()), tuple(exact.items()))
    for found in run_processes(2, launched):
        assert all(torch.equal(*pair) for pair in zip(found, called(warm), strict=True))


def test_other_layouts_make_fresh_steps_where_that_is_predicted_to_be_faster() -> None:
    """Of one sample an exact step through stages takes as long as on one device."""
    device = replace(DEVICE, peak_flops=1e10)
    given: dict[str, Any] = {"cost_model": device, "cluster": "4x1xA100+Ethernet-1", "steps": 30, "sample": {"x": 2}}
    torch.manual_seed(0)
    example, model = {"x": noise(1, 3, 64, 8), "text": noise(1, 5, 8)}, DiT().double()
    made = fxpipe.compile_sampler(model, 4, example=example, mode="displaced", warmup=4, **given)
    assert made.plan.in_turn
    assert made.plan.warm is not None
    assert made.plan.warm.how == EXACT
    assert made.plan.expects is not None
    assert made.plan.expects.seconds == pytest.approx(made.simulate(30).makespan_seconds, rel=0.05)
    assert made.verify().ok
    own = fxpipe.compile_sampler(model, 4, example=example, plan=replace(made.plan, warm=None, expects=None), **given)
    assert made.plan.expects.seconds < 0.99 * own.simulate(30).makespan_seconds
