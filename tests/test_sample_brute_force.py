"""The planner's layout against all: every one is lowered, and its programs are simulated on the one clock."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest

from cost_models.roofline import Roofline
from fxpipe.cluster import Cluster
from fxpipe.errors import CompileError
from fxpipe.plan.sample_plan import EXACT, How
from fxpipe.sampling.attention import with_attention
from fxpipe.sampling.case import SampleCase
from fxpipe.sampling.choosing import Objective, Setting, _joined, ranked, ways
from fxpipe.sampling.planning import Choices, Request, chosen, planned
from fxpipe.sampling.step import SampleStep
from fxpipe.simulate import timeline
from fxpipe.simulate.op_lists import StepOps
from tests.test_sample_planner import DEVICE, asked, compiled

DISPLACED = How("displaced", 1, "corrected", False)
LINKS = ("Ethernet-10", "Ethernet-100", "NVLink")
OFF = 1.02
"""An estimate and the simulated programs may differ by this."""


@dataclass(frozen=True)
class Grid:
    """All layouts of a model's call on so many ranks, lowered; `joined` requests are one call."""

    case: SampleCase
    lowering: Any
    world_size: int
    joined: int = 1

    def steps(self) -> Mapping[Choices, SampleStep]:
        return _steps(self)

    def seconds(self, made: Choices, setting: Setting) -> float:
        """Of every request, simulated."""
        return timeline(_ops(self, made, setting.steps), setting.cluster).makespan_seconds / self.joined


@cache
def _lowered(grid: Grid, made: Choices) -> SampleStep:
    plan, line = planned(grid.case, made, "", "")
    step: SampleStep = grid.lowering._lowered(grid.case, plan, line)
    return step


@cache
def _ops(grid: Grid, made: Choices, steps: int) -> StepOps:
    ops: StepOps = grid.lowering.ops(_lowered(grid, made), steps, grid.case.cost_model)
    return ops


@cache
def _steps(grid: Grid) -> Mapping[Choices, SampleStep]:
    found = dict[Choices, SampleStep]()
    for made in _every(grid):
        with suppress(CompileError):
            found[made] = _lowered(grid, made)
    return found


def _every(grid: Grid) -> Iterator[Choices]:
    """All numbers of groups, stages and patches, exact and displaced, whatever attention."""
    request = Request(grid.world_size, None, None, None, None, DISPLACED)
    setting = Setting(Cluster.parse(f"{grid.world_size}x1xA100+Ethernet-10"), 100)
    for way in ways(grid.case, request, setting):
        with suppress(CompileError):
            made = chosen(grid.case, way)
            kinds = ("gather", "ulysses", "ring") if made.how == EXACT and made.grid.patches > 1 else ("gather",)
            yield from dict.fromkeys(with_attention(grid.case, made, kind, setting.cluster) for kind in kinds)


@cache
def grids(name: str, world_size: int, objective: Objective) -> Sequence[Grid]:
    case, _, _ = asked(compiled(name, cfg=1, patches=1, world_size=1))
    lowering = compiled(name, cfg=1, patches=1, world_size=1).denoiser.lowering
    request, setting = Request(world_size, None, None, None, None, EXACT), Setting(Cluster.parse("4xA100"), 6, None, objective)
    return [Grid(joined, lowering, world_size, requests) for requests, joined in _joined(case, request, setting)]


def check(name: str, world_size: int, link: str, mode: str, objective: Objective, steps: int) -> str:
    cluster = Cluster.parse(f"{world_size}x1xA100+{link}" if link != "NVLink" else f"{world_size}xA100")
    setting = Setting(cluster, steps, None, objective)
    every = grids(name, world_size, objective)
    found = {(grid.joined, made): grid.seconds(made, setting) for grid in every for made in grid.steps()
             if mode == "displaced" or made.how == EXACT}  # fmt: skip
    request = Request(world_size, None, None, None, None, DISPLACED if mode == "displaced" else EXACT)
    best = ranked(every[0].case, request, setting).best
    assert best.made is not None
    own = {grid.joined: grid for grid in every}[best.requests]
    took = own.seconds(best.made, setting)
    fastest = min(found.values())
    exact = min(s for (_, made), s in found.items() if made.how == EXACT)
    assert best.found is not None
    least = min(exact, took) if best.is_exact else fastest
    key = min(found, key=lambda k: found[k])
    return f"{name} {world_size} {link} {mode} {objective} {steps}: {best} est {best.seconds:.6f} took {took:.6f} least {fastest:.6f} exact {exact:.6f} {took/least:.3f} exact-ratio {exact/fastest:.3f} best {key[0]} {key[1].grid} {key[1].order} {key[1].how.mode} {key[1].attention[:2]}"
