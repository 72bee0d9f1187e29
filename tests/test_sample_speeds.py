"""Patches by the speed of their ranks: as even in time as can be, exact, and what a slow rank costs."""

from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fxpipe
from fxpipe.cluster import Cluster
from fxpipe.errors import CompileError
from fxpipe.sampler import Sampler
from passes.sampling.patches import shared_bounds
from tests.denoisers import noise
from tests.test_sample_brute_force import TwoStreams
from tests.test_sample_planner import DEVICE, model

CALL = {"x": noise(2, 3, 64, 8), "text": noise(2, 5, 8)}


def compiled(cluster: str, world_size: int = 4, name: str = "DiT", **how: Any) -> Sampler:
    given = {"sample": {"x": 2}, "cost_model": DEVICE, "steps": 6, "warmup": 1, **how}
    return fxpipe.compile_sampler(model(name), world_size, example=CALL, cluster=cluster, **given)


@given(st.integers(1, 4).flatmap(lambda n: st.lists(st.floats(0.2, 2.0), min_size=n, max_size=n)),
       st.integers(4, 9), st.floats(0.0, 3.0))  # fmt: skip
def test_no_other_bounds_are_more_even(speeds: list[float], count: int, first: float) -> None:
    def longest(bounds: tuple[int, ...]) -> float:
        sizes = [stop - start for start, stop in pairwise(bounds)]
        return max((size + first * (place == 0)) / speeds[place] for place, size in enumerate(sizes))

    every = [(0, *inner, count) for inner in combinations(range(1, count), len(speeds) - 1)]
    assert longest(shared_bounds(count, speeds, first)) == pytest.approx(min(map(longest, every)))


@pytest.mark.parametrize(("name", "mode"), [("DiT", "exact"), ("U-Net", "displaced")])
def test_one_slow_rank_costs_what_its_share_is(name: str, mode: str) -> None:
    slow = compiled("4xA100*1,1,1,0.5", name=name, mode=mode, cfg=1, patches=4)
    sizes = [stop - start for start, stop in pairwise(slow.plan.bounds)]
    assert min(sizes) == sizes[3] <= 0.6 * sizes[1]
    assert slow.verify().ok
    alike = compiled("4xA100", name=name, mode=mode, cfg=1, patches=4).simulate(6).makespan_seconds
    took = slow.simulate(6).makespan_seconds
    assert took <= 1.15 * alike * 4 / 3.5
    even = [0, *(sum(sizes) * patch // 4 for patch in range(1, 5))]
    assert (
        took
        < 0.7 * compiled("4xA100*1,1,1,0.5", name=name, mode=mode, cfg=1, patches=even).simulate(6).makespan_seconds
    )
    assert slow.plan.expects is not None
    assert slow.plan.expects.seconds == pytest.approx(took, rel=0.1)


@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize("mode", ["exact", "displaced"])
def test_one_slow_stage_has_less_of_the_denoiser(mode: str, fold: bool) -> None:
    how: dict[str, Any] = {"mode": mode, "cfg": 1, "stages": 4, "fold": fold}
    slow, alike = compiled("4xA100*1,0.4,1,1", **how), compiled("4xA100", **how)
    took = slow.simulate(6).makespan_seconds
    assert took <= 1.15 * alike.simulate(6).makespan_seconds * 4 / 3.4
    assert slow.plan.expects is not None
    assert slow.plan.expects.seconds == pytest.approx(took, rel=0.1)
    assert slow.verify().ok
    assert compiled("4xA100*1,0.4,1,1", plan=slow.plan).plan == slow.plan


@pytest.mark.parametrize("mode", ["exact", "displaced"])
def test_groups_of_stages_take_as_long_as_the_slowest_of_them(mode: str) -> None:
    """Not as one that has the slowest of all groups at each place."""
    slow = compiled("4xA100*1,0.5,0.5,1", mode=mode, cfg=2, stages=2)
    assert slow.plan.expects is not None
    assert slow.plan.expects.seconds == pytest.approx(slow.simulate(6).makespan_seconds, rel=0.02)


def test_what_is_left_open_is_chosen_by_speeds() -> None:
    slow = compiled("4xA100*1,1,1,0.25")
    assert slow.grid.groups == 1  # of two groups of two ranks one would wait for the slow rank
    assert slow.plan.expects is not None
    assert slow.plan.expects.seconds < compiled("4xA100*1,1,1,0.25", cfg=2).simulate(6).makespan_seconds
    assert Cluster.parse(slow.plan.cluster).speeds == (1, 1, 1, 0.25)


def test_kinds_of_attention_are_chosen_by_speeds() -> None:
    """Heads are shared evenly, so a slow rank is waited for: what is best among equal ranks is not."""
    torch.manual_seed(0)
    given = {"example": {"x": noise(2, 3, 16, 8), "text": noise(2, 5, 8)}, "sample": {"x": 2}, "cost_model": DEVICE}
    given |= {"cfg": 1, "patches": 2, "steps": 4}
    nets = TwoStreams().double()
    alike, slow = (fxpipe.compile_sampler(nets, 2, cluster=f"2xA100{speeds}", **given) for speeds in ("", "*1,0.25"))
    assert set(alike.plan.attention) == {"ulysses"}
    assert set(slow.plan.attention) == {"gather"}
    shared = fxpipe.compile_sampler(nets, 2, cluster="2xA100*1,0.25", attention="ulysses", **given)
    assert slow.simulate(4).makespan_seconds < shared.simulate(4).makespan_seconds / 1.5
    for made in (alike, slow, shared):
        assert made.plan.expects is not None
        assert made.plan.expects.seconds == pytest.approx(made.simulate(4).makespan_seconds, rel=0.03)


def test_speeds_are_of_every_device_and_for_sampling() -> None:
    toml = str(Cluster.parse('device = "H100"\nspeeds = [1, 0.5]\n[[level]]\nsize = 2\nlink = "PCIe-4"'))
    assert Cluster.parse(toml).speeds == (1.0, 0.5)
    for text, rule in {
        "2xA100*1": "speeds [1.0] of 2 devices: give a number above 0 for each",
        "2xA100*1,0": "above 0", "2xA100*1,fast": "are no numbers; write 4xA100-80GB*1,1,1,0.5",
    }.items():  # fmt: skip
        with pytest.raises(CompileError) as raised:
            Cluster.parse(text)
        assert rule in str(raised.value)
    with pytest.raises(CompileError, match="stages are made for equal ones"):
        fxpipe.compile(torch.nn.Linear(2, 2), 2, example_inputs=(noise(4, 2),), cluster="2xA100*1,0.5")
