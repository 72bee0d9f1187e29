"""The layout of a sampler that its user leaves open: estimates against simulated programs of all layouts."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from cost_models.devices import device
from fxpipe.errors import CompileError
from fxpipe.plan.sample_plan import SamplePlan
from fxpipe.sampler import Sampler
from fxpipe.sampling.choosing import ranked, ways

DEVICE = replace(device("A100-80GB"), peak_flops=1e9, bandwidth=1e10, launch_seconds=1e-6, ramp_seconds=1e-6)
STEPS, CLUSTER = 6, "4x1xA100+Ethernet-100"
X, TEXT = torch.randn(2, 3, 16, 8, dtype=torch.float64), torch.randn(2, 5, 8, dtype=torch.float64)


class UNet(nn.Module):
    """Halos, moments, keys and values of the image and of text, a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, 2, 1)
        self.norm, self.qkv = nn.GroupNorm(4, 16), nn.Linear(16, 48)
        self.k, self.v = nn.Linear(8, 16), nn.Linear(8, 16)
        self.up, self.last = nn.Conv2d(24, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        first = self.first(x)
        h = self.norm(self.down(first.tanh()))
        tokens = h.flatten(2).transpose(1, 2)
        q, k, v = self.qkv(tokens).chunk(3, -1)
        tokens = tokens + nn.functional.scaled_dot_product_attention(q, k, v)
        tokens = tokens + nn.functional.scaled_dot_product_attention(tokens, self.k(text), self.v(text))
        h = nn.functional.interpolate(tokens.transpose(1, 2).reshape(h.shape), scale_factor=2.0)
        return self.last(self.up(torch.cat([first, h], 1)).tanh())


class DiT(nn.Module):
    """Patches of the image as tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Conv2d(3, 16, 2, 2), nn.ConvTranspose2d(16, 3, 2, 2)
        self.qkv = nn.ModuleList(nn.Linear(16, 48) for _ in range(3))
        self.mlp = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 16)) for _ in range(3))

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        h = self.embed(x)
        tokens = h.flatten(2).transpose(1, 2) + text.mean((1, 2))[:, None, None]
        for qkv, mlp in zip(self.qkv, self.mlp, strict=True):
            tokens = tokens + nn.functional.scaled_dot_product_attention(*qkv(tokens).chunk(3, -1))
            tokens = tokens + mlp(tokens)
        return self.out(tokens.transpose(1, 2).reshape(h.shape))


MODELS: dict[str, type[nn.Module]] = {"U-Net": UNet, "DiT": DiT}


@cache
def model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().double()


def compiled(name: str, world_size: int = 4, **how: Any) -> Sampler:
    given = {"cost_model": DEVICE, "cluster": CLUSTER, "steps": STEPS, "warmup": 1, **how}
    example = {"x": X, "text": TEXT}
    return fxpipe.compile_sampler(model(name), world_size, example=example, sample={"x": 2}, **given)


@pytest.mark.parametrize("name", MODELS)
def test_the_chosen_layout_is_the_best_of_all_that_are_simulated(name: str) -> None:
    made = compiled(name, mode="displaced")
    asked = replace(made.denoiser.lowering.request, cfg=None)  # type: ignore[attr-defined]
    setting = made.denoiser.lowering.setting  # type: ignore[attr-defined]
    case = made.denoiser.lowering.case(made.step.traced, 2)  # type: ignore[attr-defined]
    seconds = {}
    for one in ranked(case, asked, setting).candidates:
        assert one.found is not None
        way = one.request
        how = {"cfg": way.cfg, "stages": way.stages, "patches": way.patches, "mode": way.how.mode}
        timeline = compiled(name, **how).simulate(STEPS)
        seconds[str(one)] = timeline.makespan_seconds
        assert one.found.seconds == pytest.approx(timeline.makespan_seconds, rel=0.1), str(one)
        assert one.found.memory_bytes == pytest.approx(max(timeline.peak_bytes), rel=0.3), str(one)
    assert len(seconds) == len([*ways(case, asked, setting)]) >= 8
    best = made.simulate(STEPS).makespan_seconds
    assert best <= 1.03 * min(seconds.values()) * (1.05 if made.plan.how.mode == "exact" else 1)
    assert made.plan.expects is not None
    assert made.plan.expects.seconds == pytest.approx(best, rel=0.05)
    assert made.verify().ok
    assert SamplePlan.parse(str(made.plan)) == made.plan == SamplePlan.from_dict(made.plan.as_dict())


def test_what_is_given_is_kept_and_few_steps_are_exact() -> None:
    made = compiled("DiT", stages=2)
    assert (made.grid.stages, made.plan.how.mode) == (2, "exact")
    assert compiled("DiT", mode="displaced", patches=2, steps=4).plan.how.mode == "displaced"
    assert compiled("DiT", mode="displaced", steps=5).plan.how.mode == "exact"
    assert compiled("DiT", mode="displaced").plan.how.mode == "displaced"


def test_memory_decides() -> None:
    made = compiled("DiT")
    assert made.plan.expects is not None
    least = min(compiled("DiT", stages=s).plan.expects.memory_bytes for s in (1, 2, 4))  # type: ignore[union-attr]
    tight = compiled("DiT", memory_limit=least).plan
    assert tight.expects is not None
    assert tight.expects.memory_bytes == least < made.plan.expects.memory_bytes
    assert any("needs more than" in line for line in tight.considered)
    with pytest.raises(CompileError, match=r"no layout fits into memory_limit=1.0 KiB per rank: the least, .* needs"):
        compiled("DiT", memory_limit="1KiB")


def test_more_ranks_than_are_of_use_are_told() -> None:
    slow = compiled("DiT", patches=4, cost_model="A100-80GB")
    assert "4 ranks are predicted to be no faster than one" in slow.notes
