"""Which layout a call gets: of all that its user leaves open, the fastest by estimate that fits into memory.

groups of samples x stages x patches      as many ranks as there are          exact, and displaced where that is allowed

    2 x 8 displaced   1.77 s, 7.1 GiB     chosen
    2 x 8             1.91 s, 6.2 GiB     7.9% longer
    2 x 4 x 8 in turn 2.30 s, 2.0 GiB     29.9% longer

An exact layout is taken where a displaced one is no more than 5 % faster.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from fxpipe.cluster import Cluster
from fxpipe.collector import held_collector
from fxpipe.errors import CompileError
from fxpipe.plan.block_graph import human_bytes
from fxpipe.plan.sample_outcome import SampleOutcome
from fxpipe.plan.sample_plan import EXACT, Expected, How
from fxpipe.plan.schedule import counted
from fxpipe.sampling.attention import with_attention
from fxpipe.sampling.case import SampleCase
from fxpipe.sampling.estimate import Estimate, estimate
from fxpipe.sampling.planning import Choices, Request, chosen

_EXACT_WINS, _SAME = 1.05, 1.01
"""An exact layout may take so many times as long as the fastest; the first of layouts that are alike is taken."""
_TOLD = 4
_FEW = 4
"""Displaced steps that are too few to be worth it."""


@dataclass(frozen=True)
class Setting:
    """What layouts are compared on: a call of so many steps. `limit_bytes` of a rank is the user's; where it is left
    out, the device's memory is one that a plan keeps where it can."""

    cluster: Cluster
    steps: int
    limit_bytes: int | None = None


@dataclass(frozen=True)
class Candidate:
    """A layout; `found` is what it would take, None where it cannot be, and `why`."""

    request: Request
    made: Choices | None = None
    found: Estimate | None = None
    why: str = ""

    @property
    def seconds(self) -> float:
        return inf if self.found is None else self.found.seconds

    @property
    def is_exact(self) -> bool:
        return self.request.how.mode == "exact"

    def __str__(self) -> str:
        asked, made = self.request, self.made
        beside = asked.num_patches or asked.world_size // ((asked.cfg or 1) * (asked.stages or 1))
        told = [counted(asked.cfg or 1, "group"), counted(asked.stages or 1, "stage"), counted(beside, "patch", "es")]
        folded = made is not None and made.spans is not None and len(made.spans) > made.grid.stages
        ends = " in turn" * asked.in_turn + ", folded" * folded + ", displaced" * (not self.is_exact)
        return " x ".join(told) + ends


@dataclass(frozen=True)
class Ranked:
    """All candidates, the chosen one first, then by seconds; those that cannot be are last."""

    candidates: tuple[Candidate, ...]
    alone_seconds: float
    setting: Setting

    def outcomes(self, chosen: Candidate) -> Iterator[SampleOutcome]:
        """What is to be said of them, where this one is taken."""
        for one in sorted(self.candidates, key=lambda one: one is not chosen):
            why = one.why if one is chosen or one.why else self._lost(one, chosen)
            if one.found is None:
                yield SampleOutcome(str(one), why=why)
            else:
                numbers = one.found.seconds, one.found.wire_bytes, one.found.memory_bytes
                yield SampleOutcome(str(one), *numbers, why)

    def _lost(self, one: Candidate, best: Candidate) -> str:
        longer = one.seconds / best.seconds - 1 if best.seconds else 0.0
        if longer < 0:
            return "not exact" if best.is_exact and not one.is_exact else "as long"
        return f"{longer:.1%} longer"

    def expected(self, chosen: Candidate) -> Expected:
        assert chosen.found is not None
        found = chosen.found
        return Expected.of(self.setting.steps, found.seconds, self.alone_seconds, found.wire_bytes, found.memory_bytes)

    def considered(self, chosen: Candidate) -> tuple[str, ...]:
        """The next best."""
        _, *others = self.outcomes(chosen)
        return tuple(map(str, others[:_TOLD]))

    def notes(self, case: SampleCase, chosen: Candidate) -> Iterator[str]:
        world_size, steps = chosen.request.world_size, self.setting.steps
        if world_size > 1 and chosen.seconds >= self.alone_seconds:
            yield f"{world_size} ranks are predicted to be no faster than one"
        if not chosen.is_exact and few(chosen.request.how, steps):
            yield f"of {counted(steps, 'step')} {chosen.request.how.warmup} are exact: too few are displaced to gain"
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
    found = [_looked_at(case, way, setting) for way in ways(case, request, setting)]
    if not any(one.found for one in found):
        chosen(case, request)  # says what is wrong with what was asked for
        raise CompileError("; ".join(dict.fromkeys(one.why for one in found)) or "there is no layout")
    fitting = _fitting(case, found, setting)
    alone = chosen(case, Request(1, 1, None, None, 1, EXACT, request.text))
    order = sorted(fitting, key=lambda one: (one.found is None or bool(one.why), one.seconds))
    best = _best([one for one in order if one.found and not one.why])
    return Ranked(
        (best, *(one for one in order if one is not best)),
        estimate(case, alone, setting.cluster, setting.steps).seconds, setting,
    )  # fmt: skip


def ways(case: SampleCase, request: Request, setting: Setting) -> Iterator[Request]:
    """Requests that leave nothing open but bounds and folds: more groups first, then fewer stages."""
    ranks, open_layout = request.world_size, request.stages is None and request.patches is None
    groups = [request.cfg] if request.cfg else [g for g in range(case.num_samples, 0, -1) if ranks % g == 0]
    if request.cfg is None and case.dependent is not None:
        groups = [1]
    hows = [EXACT, request.how] if open_layout and request.how.mode == "displaced" else [request.how]
    if open_layout and few(request.how, setting.steps):
        hows = [EXACT]
    for how in hows:
        for num in groups:
            columns = [request.stages] if request.stages else [s for s in range(1, ranks + 1) if ranks // num % s == 0]
            for stages in columns:
                yield from _ways_of(replace(request, cfg=num, how=how), stages, request.stages is not None)


def _ways_of(request: Request, stages: int, asked: bool) -> Iterator[Request]:
    """With so many groups and stages; one stage is none unless it was `asked` for."""
    how, groups = request.how, request.cfg or 1
    beside, rest = divmod(request.world_size, groups * stages)
    if rest or not beside:
        return
    if how.mode == "exact" or (stages == 1 and not asked):
        if request.num_patches in (None, beside) and (how.mode == "exact" or beside > 1 or request.patches is not None):
            yield replace(request, stages=stages if stages > 1 or asked else None, patches=request.patches or beside)
    elif beside == 1 and how.norms != "sync" and (asked or request.patches is None):
        in_turn = replace(request, stages=stages, how=replace(how, advance=False))
        for patches in [request.patches] if request.patches is not None else [stages, 2 * stages]:
            yield replace(in_turn, patches=patches)


def _looked_at(case: SampleCase, way: Request, setting: Setting) -> Candidate:
    try:
        made = with_attention(case, chosen(case, way, look=False), way.attention, setting.cluster)
    except CompileError as error:
        return Candidate(way, why=str(error))
    return Candidate(way, made, estimate(case, made, setting.cluster, setting.steps))


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


def _best(found: Sequence[Candidate]) -> Candidate:
    """Of candidates by seconds: the fastest, an exact one where that is nearly as fast."""
    first = found[0]
    exact = next((one for one in found if one.is_exact), None)
    if exact is not None and exact.seconds <= _EXACT_WINS * first.seconds:
        first = exact
    alike = [one for one in found if one.is_exact == first.is_exact and one.seconds <= _SAME * first.seconds]
    return min(alike, key=lambda one: (-(one.request.cfg or 1), one.request.stages or 1))
