"""Layouts that are compared for a call: what each takes, why the others are not taken, and what is to be said of it."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Literal

from fxpipe.cluster import Cluster
from fxpipe.plan.block_graph import human_bytes
from fxpipe.plan.sample_outcome import Layout, SampleOutcome
from fxpipe.plan.sample_plan import Expected, How
from fxpipe.plan.schedule import counted
from fxpipe.sampling.case import SampleCase
from fxpipe.sampling.layout import Estimate
from fxpipe.sampling.planning import Choices, SampleRequest

_TOLD = 4
_FEW = 4
"""Displaced steps that are too few to be worth it."""

Objective = Literal["latency", "throughput"]


@dataclass(frozen=True)
class Setting:
    """What layouts are compared on: a call of so many steps. `limit_bytes` of a rank is the user's; where it is left
    out, the device's memory is one that a plan keeps where it can. For throughput several requests may be one call."""

    cluster: Cluster
    steps: int
    limit_bytes: int | None = None
    objective: Objective = "latency"


@dataclass(frozen=True)
class SampleCandidate:
    """A layout for the samples of so many `requests`; `found` is what it would take, None where it cannot be, and
    `why`, or where `least_seconds` are too many."""

    request: SampleRequest
    requests: int = 1
    made: Choices | None = None
    found: Estimate | None = None
    why: str = ""
    least_seconds: float | None = None

    @property
    def seconds(self) -> float:
        """Of every request."""
        return inf if self.found is None else self.found.seconds / self.requests

    @property
    def is_exact(self) -> bool:
        return self.request.how.mode == "exact"

    @property
    def layout(self) -> Layout:
        asked, made = self.request, self.made
        groups, stages = asked.cfg or 1, asked.stages or 1
        beside = asked.world_size // (asked.copies * groups * stages)
        turns = (asked.num_patches or 1) // beside if asked.in_turn else 1
        folded = bool(asked.fold) if made is None or made.spans is None else len(made.spans) > made.grid.stages
        warmup = None if self.is_exact else asked.how.warmup
        by = None if made is None or made.warm is None else made.warm.grid
        warm = None if by is None else Layout(by.groups, by.stages, by.patches, copies=by.copies)
        return Layout(groups, stages, beside, turns, folded, warmup, asked.copies, self.requests, warm, asked.watching)

    def __str__(self) -> str:
        return str(self.layout)


@dataclass(frozen=True)
class Ranked:
    """All candidates, the chosen one first, then by seconds; those that cannot be are last. `num_samples` are those of
    a request, `alone_seconds` what they take on one rank; `how` is as was asked for. `narrowed`: whether layouts are
    left out that were far from the best at another size."""

    candidates: tuple[SampleCandidate, ...]
    num_samples: int
    alone_seconds: float
    setting: Setting
    how: How
    narrowed: bool = False

    @property
    def best(self) -> SampleCandidate:
        return self.candidates[0]

    def fallbacks(self, num_samples: int) -> Iterator[SampleCandidate]:
        """Candidates for a call of so many samples, the best first."""
        for one in self.candidates:
            if one.made and not one.why and one.requests * self.num_samples == num_samples:
                yield one

    def outcomes(self, chosen: SampleCandidate) -> Iterator[SampleOutcome]:
        """What is to be said of them, where this one is taken."""
        for one in sorted(self.candidates, key=lambda one: one is not chosen):
            why = one.why if one is chosen or one.why else self._lost(one, chosen)
            if one.found is None:
                yield SampleOutcome(one.layout, why=why, least_seconds=one.least_seconds)
            else:
                numbers = one.found.seconds, one.found.wire_bytes, one.found.memory_bytes
                yield SampleOutcome(one.layout, *numbers, why)

    def _lost(self, one: SampleCandidate, best: SampleCandidate) -> str:
        longer = one.seconds / best.seconds - 1 if best.seconds else 0.0
        if longer < 0:
            return "not exact" if best.is_exact and not one.is_exact else "as long"
        return f"{longer:.1%} longer"

    def expected(self, chosen: SampleCandidate) -> Expected:
        assert chosen.found is not None
        found, requests = chosen.found, chosen.requests
        sizes = found.wire_bytes, found.memory_bytes
        return Expected.of(self.setting.steps, found.seconds, requests * self.alone_seconds, *sizes, requests)

    def considered(self, chosen: SampleCandidate) -> tuple[str, ...]:
        """The next best."""
        _, *others = self.outcomes(chosen)
        return tuple(map(str, others[:_TOLD]))

    def notes(self, case: SampleCase, chosen: SampleCandidate) -> Iterator[str]:
        world_size, steps = chosen.request.world_size, self.setting.steps
        if world_size > 1 and chosen.seconds >= self.alone_seconds:
            yield f"{world_size} ranks are predicted to be no faster than one"
        elif chosen.request.copies > 1:
            yield f"{world_size // chosen.request.copies} ranks are predicted to be faster than {world_size}"
        if more := chosen.request.watching:
            yield f"{world_size} ranks are predicted to be faster than {world_size + more}, of which the others watch"
        told = counted(steps, "step")
        if chosen.is_exact and few(self.how, steps):
            yield f"a call of {told} has too few after {self.how.warmup} exact ones to be displaced: all are exact"
        elif few(self.how, steps):
            which = f"the first {self.how.warmup} are" if steps > self.how.warmup else "all of them are"
            yield f"of a call's {told} {which} exact: too few are displaced to gain"
        device, found = case.cost_model.memory_bytes, chosen.found
        if device and found and found.memory_bytes > device:
            yield f"a rank needs {human_bytes(found.memory_bytes)}, more than the {human_bytes(device)} of a device"


def few(how: How, steps: int) -> bool:
    """Whether a call has too few steps to be displaced."""
    return how.mode == "displaced" and steps <= how.warmup + _FEW
