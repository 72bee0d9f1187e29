"""Which layout a call gets: of all that its user leaves open, the fastest by estimate that fits into memory.

groups of samples x stages x patches      as many ranks as there are          exact, and displaced where that is allowed

    2 x 8 displaced   1.77 s, 7.1 GiB     chosen
    2 x 8             1.91 s, 6.2 GiB     7.9% longer
    2 x 4 x 8 in turn 2.30 s, 2.0 GiB     29.9% longer

An exact layout is taken where a displaced one is no more than 5 % faster. Where fewer ranks are faster than all, the
others do the same once more: a call never takes longer than on one rank.

Throughput is that of many requests at once: the samples of some are joined in one call, and the fewest seconds for each
are the best. Groups of samples that hold whole requests are replicas that go step by step together.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from math import gcd, inf
from typing import Literal

from fxpipe.cluster import Cluster
from fxpipe.collector import held_collector
from fxpipe.errors import CompileError
from fxpipe.plan.block_graph import human_bytes
from fxpipe.plan.sample_outcome import Layout, SampleOutcome
from fxpipe.plan.sample_plan import EXACT, Expected, How
from fxpipe.plan.schedule import counted
from fxpipe.sampling import bounds
from fxpipe.sampling.attention import with_attention
from fxpipe.sampling.case import SampleCase
from fxpipe.sampling.estimate import estimate
from fxpipe.sampling.layout import Estimate
from fxpipe.sampling.planning import Choices, Request, chosen

_EXACT_WINS, _SAME = 1.05, 1.01
"""An exact layout may take so many times as long as the fastest; the first of layouts that are alike is taken."""
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
class Candidate:
    """A layout for the samples of so many `requests`; `found` is what it would take, None where it cannot be, and
    `why`, or where `least_seconds` are too many."""

    request: Request
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
        turns = (asked.num_patches or 1) if asked.in_turn else 1
        folded = bool(asked.fold) if made is None or made.spans is None else len(made.spans) > made.grid.stages
        warmup = None if self.is_exact else asked.how.warmup
        return Layout(groups, stages, beside, turns, folded, warmup, asked.copies, self.requests)

    def __str__(self) -> str:
        return str(self.layout)


@dataclass(frozen=True)
class Ranked:
    """All candidates, the chosen one first, then by seconds; those that cannot be are last. `num_samples` are those of
    a request, `alone_seconds` what they take on one rank; `how` is as was asked for."""

    candidates: tuple[Candidate, ...]
    num_samples: int
    alone_seconds: float
    setting: Setting
    how: How

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    def fallbacks(self, num_samples: int) -> Iterator[Candidate]:
        """Candidates for a call of so many samples, the best first."""
        for one in self.candidates:
            if one.made and not one.why and one.requests * self.num_samples == num_samples:
                yield one

    def outcomes(self, chosen: Candidate) -> Iterator[SampleOutcome]:
        """What is to be said of them, where this one is taken."""
        for one in sorted(self.candidates, key=lambda one: one is not chosen):
            why = one.why if one is chosen or one.why else self._lost(one, chosen)
            if one.found is None:
                yield SampleOutcome(one.layout, why=why, least_seconds=one.least_seconds)
            else:
                numbers = one.found.seconds, one.found.wire_bytes, one.found.memory_bytes
                yield SampleOutcome(one.layout, *numbers, why)

    def _lost(self, one: Candidate, best: Candidate) -> str:
        longer = one.seconds / best.seconds - 1 if best.seconds else 0.0
        if longer < 0:
            return "not exact" if best.is_exact and not one.is_exact else "as long"
        return f"{longer:.1%} longer"

    def expected(self, chosen: Candidate) -> Expected:
        assert chosen.found is not None
        found, requests = chosen.found, chosen.requests
        sizes = found.wire_bytes, found.memory_bytes
        return Expected.of(self.setting.steps, found.seconds, requests * self.alone_seconds, *sizes, requests)

    def considered(self, chosen: Candidate) -> tuple[str, ...]:
        """The next best."""
        _, *others = self.outcomes(chosen)
        return tuple(map(str, others[:_TOLD]))

    def notes(self, case: SampleCase, chosen: Candidate) -> Iterator[str]:
        world_size, steps = chosen.request.world_size, self.setting.steps
        if world_size > 1 and chosen.seconds >= self.alone_seconds:
            yield f"{world_size} ranks are predicted to be no faster than one"
        elif chosen.request.copies > 1:
            yield f"{world_size // chosen.request.copies} ranks are predicted to be faster than {world_size}"
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


@held_collector()
def ranked(case: SampleCase, request: Request, setting: Setting) -> Ranked:
    """Every layout that a request leaves open, the best first.

    Raises:
        CompileError: there is none, or none fits into the memory that the user allows.
    """
    found = _found(case, request, setting)
    if not any(one.found for one in found):
        chosen(case, request)  # says what is wrong with what was asked for
        raise CompileError("; ".join(dict.fromkeys(one.why for one in found)) or "there is no layout")
    fitting = _fitting(case, found, setting)
    on_one = chosen(case, Request(1, 1, None, None, 1, EXACT, request.text))
    alone = estimate(case, on_one, setting.cluster, setting.steps).seconds / max(request.speeds, default=1.0)
    order = sorted(fitting, key=lambda one: (one.found is None or bool(one.why), one.seconds, one.least_seconds or inf))
    best = _best([one for one in order if one.found and not one.why], alone)
    others = (one for one in order if one is not best)
    return Ranked((best, *others), case.num_samples, alone, setting, request.how)


def _found(case: SampleCase, request: Request, setting: Setting) -> list[Candidate]:
    """All candidates; those that cannot be the best by what they take at least are not looked at."""
    open_ones = [
        (bounds.least_seconds(of_requests, way, setting.steps) / requests, place, requests, False, of_requests, way)
        for requests, of_requests in _joined(case, request, setting)
        for place, way in enumerate(ways(of_requests, request, setting))
    ]
    heapify(open_ones)
    limit = setting.limit_bytes or case.cost_model.memory_bytes or inf
    best, found = inf, list[Candidate]()
    while open_ones:
        least, place, requests, refined, of_requests, way = heappop(open_ones)
        if least > _EXACT_WINS * best:
            why = f"at least {least / best - 1:.1%} longer"
            found.append(Candidate(way, requests, why=why, least_seconds=least * requests))
            continue
        if not refined:
            seconds = bounds.least_seconds_of_work(of_requests, way, setting.cluster, setting.steps) / requests
            heappush(open_ones, (max(least, seconds), place, requests, True, of_requests, way))
            continue
        one = _looked_at(of_requests, way, setting, requests)
        if any(_same(one, other) for other in found):
            continue  # a line that was to be folded, and has nothing to fold
        found.append(one)
        if one.found and one.found.memory_bytes <= limit:
            best = min(best, one.seconds)
    return found


def _same(one: Candidate, other: Candidate) -> bool:
    return one.made is not None and one.made == other.made and one.requests == other.requests


def _joined(case: SampleCase, request: Request, setting: Setting) -> Iterator[tuple[int, SampleCase]]:
    """How many requests a call may have, with the case of their samples: up to two samples for every rank."""
    yield 1, case
    if setting.objective == "throughput" and case.traced.captured.batch:
        ranks, own = request.world_size, case.num_samples
        even = ranks // gcd(ranks, own)  # samples are as many as ranks, or a multiple
        most = max(2 * ranks // own, 2)
        for requests in sorted({even, 2 * even, *(2**power for power in range(1, most.bit_length()))}):
            if 1 < requests <= max(most, even):
                yield requests, case.of(requests * own)


def ways(case: SampleCase, request: Request, setting: Setting) -> Iterator[Request]:
    """Requests that leave nothing open but bounds: more groups first, then fewer stages, then fewer ranks."""
    open_layout = request.stages is None and request.patches is None
    hows = [EXACT, request.how] if open_layout and request.how.mode == "displaced" else [request.how]
    if open_layout and few(request.how, setting.steps):
        hows = [EXACT]
    all_ranks, every = request.world_size, range(1, request.world_size + 1)
    copies = [c for c in every if all_ranks % c == 0] if open_layout and request.cfg is None else [1]
    for how in hows:
        for times in copies:
            ranks = all_ranks // times
            for groups in _groups(case, request.cfg, ranks):
                columns = [request.stages] if request.stages else [s for s in every if ranks // groups % s == 0]
                for stages in columns:
                    way = replace(request, cfg=groups, how=how, copies=times)
                    yield from _ways_of(way, stages)


def _groups(case: SampleCase, asked: int | None, ranks: int) -> list[int]:
    case.require_apart(asked or 1)
    if asked is not None or case.dependent is not None:
        return [asked or 1]
    return [groups for groups in range(case.num_samples, 0, -1) if ranks % groups == 0]


def _ways_of(request: Request, stages: int) -> Iterator[Request]:
    """With so many groups and stages; one stage is none unless it was asked for, on ranks without any beside them."""
    how, groups, asked = request.how, request.cfg or 1, request.stages is not None
    beside, rest = divmod(request.world_size // request.copies, groups * stages)
    if rest or not beside:
        return
    folds = [request.fold] if request.fold is not None or stages == 1 else [False, True]
    if how.mode == "exact" or (stages == 1 and not request.in_turn):
        if request.num_patches in (None, beside) and (how.mode == "exact" or beside > 1 or request.patches is not None):
            rows = replace(request, patches=request.patches or beside)
            for fold in folds:
                yield replace(rows, stages=stages if stages > 1 else None, fold=fold)
    elif beside == 1 and how.norms != "sync" and (asked or request.patches is None):
        in_turn = replace(request, stages=stages, how=replace(how, advance=False))
        open_turns = [stages, 2 * stages, 4 * stages]
        for patches in [request.patches] if request.patches is not None else open_turns:
            for fold in folds:
                yield replace(in_turn, patches=patches, fold=fold)


def _looked_at(case: SampleCase, way: Request, setting: Setting, requests: int) -> Candidate:
    try:
        made = with_attention(case, chosen(case, way), way.attention, setting.cluster, way.speeds)
    except CompileError as error:
        return Candidate(way, requests, why=str(error))
    return Candidate(way, requests, made, estimate(case, made, setting.cluster, setting.steps, way.speeds))


def _fitting(case: SampleCase, found: Sequence[Candidate], setting: Setting) -> list[Candidate]:
    """With a reason where a layout needs more memory than there may be."""
    device = case.cost_model.memory_bytes
    limit = setting.limit_bytes or device
    needs = [one.found.memory_bytes for one in found if one.found]
    if limit is None or (setting.limit_bytes is None and min(needs) > limit):
        return list(found)
    if min(needs) > limit:
        least = min((one for one in found if one.found), key=lambda one: one.found.memory_bytes if one.found else inf)
        raise CompileError(
            f"no layout fits into memory_limit={human_bytes(limit)} per rank: the least, {least}, needs "
            f"{human_bytes(min(needs))}; use more ranks, more stages, a smaller image, or a higher limit"
        )
    over = [one.found is not None and one.found.memory_bytes > limit for one in found]
    return [
        replace(one, why=f"needs more than {human_bytes(limit)} on a rank") if more else one
        for one, more in zip(found, over, strict=True)
    ]


def _best(found: Sequence[Candidate], alone_seconds: float) -> Candidate:
    """Of candidates by seconds: the fastest, an exact one where that is nearly as fast; of those that are as fast, and
    as fast as one rank, that with the most groups."""
    first = found[0]
    exact = next((one for one in found if one.is_exact), None)
    if exact is not None and exact.seconds <= _EXACT_WINS * first.seconds:
        first = exact
    most = max(first.seconds, min(_SAME * first.seconds, alone_seconds))
    alike = [one for one in found if one.is_exact == first.is_exact and one.seconds <= most]
    return min(alike, key=lambda one: (-(one.request.cfg or 1), one.request.stages or 1, one.requests))
