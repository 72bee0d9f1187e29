"""The first exact steps in another layout, after which displaced steps are the same to rounding."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fxpipe
from fxpipe.models.backbones import prediction_of
from fxpipe.plan.sample_plan import EXACT, SamplePlan
from fxpipe.sampler import Sampler
from tests.denoisers import noise, small
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
    given = small(key)
    ranks = 4 if dict(own).get("patches") == 4 or dict(own).get("cfg") == 2 else 2
    made = [
        fxpipe.compile_sampler(given.model, ranks, example=given.example, mode=mode, warmup=3, **dict(asked))
        for mode, asked in (("displaced", own), ("exact", exact))
    ]
    plan = replace(made[0].plan, warm=replace(made[1].plan, notes=(), expects=None, considered=()))
    assert SamplePlan.parse(str(plan)) == plan == SamplePlan.from_dict(plan.as_dict())
    return made[0], fxpipe.compile_sampler(given.model, ranks, example=given.example, plan=plan)


def moving(sampler: Sampler, num_steps: int = 6) -> list[dict[str, Any]]:
    """The inputs of a call's steps: another sample and another time in each."""
    (name,), example = sampler.step.traced.rows, sampler.example[1]
    change, time = noise(*example[name].shape).to(example[name].dtype), example["timestep"]
    later = [time * (1 - 0.01 * step) if time.is_floating_point() else time - step for step in range(num_steps)]
    samples = [example[name] + 0.05 * step * change for step in range(num_steps)]
    return [{**example, name: x, "timestep": t.to(time.dtype)} for x, t in zip(samples, later, strict=True)]


def called(sampler: Sampler) -> list[Tensor]:
    """Predictions of one call."""
    with sampler.call():
        return [prediction_of(sampler.predict(**given)).clone() for given in moving(sampler)]


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize(("key", "own", "exact", "bound"), LAYOUTS)
def test_predictions_are_those_of_one_layout(
    key: str, own: Mapping[str, Any], exact: Mapping[str, Any], bound: float
) -> None:
    alone, warm = compiled(key, tuple(own.items()), tuple(exact.items()))
    own_fresh = ["fresh", "again"] if "again" in alone.step.forms else ["fresh"]
    assert warm.step.sequence(6) == ["warm"] * (3 - len(own_fresh)) + own_fresh + ["displaced"] * 3
    assert set(warm.step.forms) - set(alone.step.forms) == {"warm"}
    found, wanted = called(warm), called(alone)
    assert max(map(error, found, wanted)) <= bound
    with torch.no_grad():
        dense = [prediction_of(warm.denoiser.module(**given)) for given in moving(warm)]
    assert max(map(error, found[:3], dense[:3])) <= bound
    assert all(1e-6 < error(*pair) < 0.3 for pair in zip(found[3:], dense[3:], strict=True))  # these are displaced
    assert all(torch.equal(*pair) for pair in zip(found, called(warm), strict=True))  # a call leaves nothing
    assert warm.verify().ok


def launched(plan: str) -> list[Tensor]:
    given = small(LAYOUTS[0][0])
    warm = fxpipe.compile_sampler(given.model, 2, example=given.example, plan=plan)
    found = called(warm)
    warm.close()
    return found


def test_processes_give_what_threads_give(tmp_path: Path) -> None:
    key, own, exact, _ = LAYOUTS[0]
    _, warm = compiled(key, tuple(own.items()), tuple(exact.items()))
    wanted = called(warm)
    for found in run_processes(2, launched, str(warm.plan.save(tmp_path / "plan.json"))):
        assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


def test_plans_that_cannot_make_the_first_steps_are_refused() -> None:
    key, own, exact, _ = LAYOUTS[0]
    alone, sampler = compiled(key, tuple(own.items()), tuple(exact.items()))
    plan, given = sampler.plan, small(key)
    assert plan.warm is not None
    short = replace(plan, how=replace(plan.how, warmup=1))
    for wrong, says in [
        (replace(plan, warm=alone.plan), "the first steps are made by a plan that is exact and of one stage"),
        (replace(plan, warm=plan), "the first steps are made by a plan that is exact and of one stage"),
        (replace(plan.warm, warm=plan.warm), "no step for that to make: all exchanges fresh; leave that plan out"),
        (replace(plan, warm=replace(plan.warm, watching=1)), "made by 2 ranks, 1 watching, the others by 2, 0 "),
        (short, "no step for that to make: displaced after 1 fresh step, norms corrected; leave that plan out"),
    ]:
        with pytest.raises(fxpipe.CompileError, match=says):
            fxpipe.compile_sampler(given.model, 2, example=given.example, plan=wrong)
    told = replace(plan, warm=replace(plan.warm, notes=("as it was saved",)))
    assert fxpipe.compile_sampler(given.model, 2, example=given.example, plan=told).plan == told


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
