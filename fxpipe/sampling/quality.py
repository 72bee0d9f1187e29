"""Quality against latency: a call by one device, and by every way to sample it that was considered.

    one device                                    the result that all are held against
    2 groups x 1 stage x 2 patches, displaced     1.77 s predicted     37.8 dB to it
    2 groups x 2 stages x 4 patches in turn       1.81 s               43.1 dB

Predictions are the planner's, decibels are measured: the ways run here, each once.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fxpipe.errors import CompileError
from fxpipe.plan.sample_plan import EXACT, SamplePlan
from fxpipe.plan.sample_quality import Measured, Quality
from fxpipe.sampling.candidates import SampleCandidate, Setting
from fxpipe.sampling.case import SampleCase
from fxpipe.sampling.choosing import ranked
from fxpipe.sampling.lowering import SampleLowering
from fxpipe.sampling.spread import Spread
from fxpipe.sampling.step import SampleStep

Run = Callable[[Callable[..., Any]], Any]
"""A call, given what predicts in it."""


def measured(spread: Spread, run: Run, most: int) -> Quality:
    """The way that calls go now, the fastest exact one, and the `most` fastest of the others.

    Raises:
        CompileError: the call's result has no numbers, or it is not the same call when it is made again.
    """
    alone = _OneDevice(spread)
    wanted = values_of(run(alone))
    if alone.step is None or not wanted.numel():
        raise CompileError("the call predicts nothing, or returns no tensors and no images: nothing is measured")
    if not wanted.isfinite().all():
        raise CompileError("the call's result on one device has values that are no finite numbers: nothing is near it")
    found = []
    for name, seconds, exact, chosen, step in _ways(spread, alone.step, most):
        with spread.by(step):
            decibels = psnr(values_of(run(_Again(spread, alone))), wanted)
        found.append(Measured(name, seconds, decibels, exact, chosen))
    found.sort(key=lambda one: (one.seconds, -one.decibels))
    return Quality(tuple(found), _setting(spread.lowering).steps)


def _ways(spread: Spread, step: SampleStep, most: int) -> Iterator[tuple[str, float, bool, bool, SampleStep]]:
    """By name, with predicted seconds, whether it is exact, whether it is the one that calls go now."""
    lowering, plan = spread.lowering, step.plan
    case = lowering.case(step.traced, step.batch_size)
    with spread.ranks.compiling(lowering.compared(case)):
        candidates = spread.ranks.of_rank_zero(lambda: _candidates(lowering, case))
    fresh = f", {len(plan.how.fresh)} exchanges kept fresh" * bool(plan.how.fresh)
    own = next((one for one in candidates if one.made and _is(plan, one)), None)
    seconds = plan.expects.seconds if plan.expects else own.found.seconds if own and own.found else math.nan
    name = str(own) if own else f"the plan given ({plan.layout}, {plan.staged.schedule})"
    yield name + fresh, seconds, plan.how.mode == "exact", True, step
    exact = [one for one in candidates if one.is_exact][:1]
    others = [one for one in candidates if not one.is_exact][:most]
    for one in dict.fromkeys((*exact, *others)):
        if one.found and (one is not own or plan.how.fresh):
            remade = replace(lowering, plan=None, setting=None, looked_at=None, request=one.request)
            try:
                made = remade.step(step.traced, step.batch_size, spread.ranks)
            except CompileError:
                continue  # the estimate had not seen why
            yield str(one), one.found.seconds, one.is_exact, False, made


def _candidates(lowering: SampleLowering, case: SampleCase) -> list[SampleCandidate]:
    """All layouts, the fastest first."""
    asked, setting = lowering.request, replace(_setting(lowering), objective="latency")
    found = list[SampleCandidate]()
    for request in dict.fromkeys((asked, replace(asked, how=EXACT))):
        try:
            found += ranked(case, request, setting, anew=True).fallbacks(case.num_samples)
        except CompileError:
            continue  # what is displaced alone, such as patches in turn
    return sorted(found, key=lambda one: one.seconds)


def _is(plan: SamplePlan, one: SampleCandidate) -> bool:
    made = one.made
    assert made is not None
    return (made.grid, made.bounds, made.order) == (plan.grid, plan.bounds, plan.staged.schedule) and (
        made.how == replace(plan.how, fresh=())
    )


def _setting(lowering: SampleLowering) -> Setting:
    assert lowering.setting is not None
    return lowering.setting


class _OneDevice:
    """The module itself, which tells the programs that there are for its calls, and what the first one is given."""

    def __init__(self, spread: Spread) -> None:
        self.spread = spread
        self.step: SampleStep | None = None
        self.start: list[torch.Tensor] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step = self.spread.step(args, kwargs)
        if self.step is None:
            self.step, self.start = step, [given.clone() for given in _tensors(step, args, kwargs)]
        elif step is not self.step:
            raise CompileError("the call has steps of several kinds; measure a call whose steps are alike")
        with torch.no_grad():
            return self.spread.module(*args, **kwargs)


class _Again:
    """What predicts, in a call that must begin as that on one device did, or its result says nothing of a way."""

    def __init__(self, spread: Spread, first: _OneDevice) -> None:
        self._spread, self._first, self._begun = spread, first, False

    @property
    def stream_name(self) -> str | None:
        """As a pipeline names it for what it calls."""
        return self._spread.stream_name

    @stream_name.setter
    def stream_name(self, name: str | None) -> None:
        self._spread.stream_name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._begun:
            self._require_same(args, kwargs)
        self._begun = True
        return self._spread(*args, **kwargs)

    def _require_same(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert self._first.step is not None
        pairs = zip(_tensors(self._first.step, args, kwargs), self._first.start, strict=True)
        if not all(one.shape == before.shape and _near(one, before) for one, before in pairs):
            raise CompileError(
                "the call is made once for every way, and begins with other numbers now, as with a generator from "
                "outside of its function: make generators, and what they draw, inside"
            )


def _near(one: torch.Tensor, other: torch.Tensor) -> bool:
    """But for what a device rounds otherwise each time; other draws are far off."""
    return torch.allclose(one.double(), other.double(), rtol=1e-2, atol=1e-2, equal_nan=True)


def _tensors(step: SampleStep, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return [*step.bind(step.traced.captured.inputs.bind(args, kwargs)[0]).values()]


def values_of(result: Any) -> torch.Tensor:
    """All numbers of a call's result: tensors, arrays, images, in whatever they are in."""
    return torch.cat([torch.empty(0, dtype=torch.float64), *_flat(result)])


def _flat(result: Any) -> Iterator[torch.Tensor]:
    if type(result).__module__.startswith("PIL."):
        result = np.asarray(result)
    if isinstance(result, torch.Tensor | np.ndarray):
        yield torch.as_tensor(result).detach().cpu().double().flatten()
    elif isinstance(result, Mapping):
        yield from (values for one in result.values() for values in _flat(one))
    elif isinstance(result, list | tuple):
        yield from (values for one in result for values in _flat(one))


def psnr(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """In decibels; the peak is the range of what is wanted."""
    error = float((found - wanted).square().mean())
    peak = float(wanted.max() - wanted.min())
    return math.inf if error == 0 else 10 * math.log10(peak**2 / error) if peak else -math.inf


def same_draws(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments with generators of their own, which draw what the given ones would."""
    return {name: _cloned(value) for name, value in call.items()}


def _cloned(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.clone_state()
    return [*map(_cloned, value)] if isinstance(value, list) else copy.copy(value)
