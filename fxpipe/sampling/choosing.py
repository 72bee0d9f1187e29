"""Which layout a call gets: of all that its user leaves open, the fastest by estimate that fits into memory.

groups of samples x stages x patches      as many ranks as there are          exact, and displaced where that is allowed

    2 x 8 displaced   1.77 s, 7.1 GiB     chosen
    2 x 8             1.91 s, 6.2 GiB     7.9% longer
    2 x 4 x 8 in turn 2.30 s, 2.0 GiB     29.9% longer

An exact layout is taken where a displaced one is no more than 5 % faster. The first exact steps before displaced ones
are made by the fastest exact layout of rows where that fits beside, and is faster than their own. Where fewer ranks are
faster than all, the others do the same once more, or watch: a call takes no longer than on one rank, which shows them
what it predicts.

Where a call of about this size has been planned, layouts that were far from the best there are not looked at.

Throughput is that of many requests at once: the samples of some are joined in one call, and the fewest seconds for each
are the best. Groups of samples that hold whole requests are replicas that go step by step together.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from math import gcd, inf, prod, sqrt
from operator import attrgetter, itemgetter

from fxpipe.collector import held_collector
from fxpipe.errors import CompileError
from fxpipe.plan.block_graph import human_bytes
from fxpipe.plan.sample_plan import EXACT
from fxpipe.sampling import bounds
from fxpipe.sampling.attention import with_attention
from fxpipe.sampling.candidates import Ranked, SampleCandidate, Setting, few
from fxpipe.sampling.case import SampleCase
from fxpipe.sampling.columns import Columns
from fxpipe.sampling.estimate import estimate
from fxpipe.sampling.layout import Estimate
from fxpipe.sampling.planning import SampleRequest, chosen

_EXACT_WINS, _SAME = 1.05, 1.01
"""An exact layout may take so many times as long as the fastest; the first of layouts that are alike is taken."""
_NEAR, _FAR = 1.6, 1.15
"""Of calls of which one is up to so many times as large, the best layout for one took at most so many times as long as
the best for the other, and no more than the root of how many times as large: in 559 of 560 pairs of SDXL and Flux, 4 to
16 devices, four clusters, ten sizes; in the other it was 1.119 where the root is 1.118. Seconds of displaced ones, who
win by 5 %, count so many more: so it held in 160 of 160, where without it one was missed. Of twice as large ones the
best took up to 1.4 times as long."""
_ALIKE = 1.02
"""Of layouts of one sort those alone may be the best at one size that took at most so many times as long as the best of
them at the other: of 960 pairs of SDXL and Flux 8 led to calls that are 0.5 % slower or more, at worst 4.2 %; 6 and 3.1
% if all of a sort are looked at, which are nearly twice as many."""


_UNTIMED = Estimate(inf, 0, 0, inf, 0, 0)
"""Of stages that need more memory than the user allows, until some layout fits."""


@dataclass(frozen=True)
class _Known:
    """A call of this shape, and what was found where it was asked for this."""

    shape: tuple[int, ...]
    asked: tuple[object, ...]
    ranked: Ranked

    def times(self, shape: tuple[int, ...]) -> float:
        """How many times as large one call is as the other."""
        own, other = prod(self.shape), prod(shape)
        return max(own, other) / min(own, other)


@held_collector()
def ranked(case: SampleCase, request: SampleRequest, setting: Setting, anew: bool = False) -> Ranked:
    """Every layout that a request leaves open, the best first; `anew` whatever is known of calls of other sizes.

    Raises:
        CompileError: there is none, or none fits into the memory that the user allows.
    """
    known: list[_Known] = case.traced.of_all_sizes.setdefault("ranked", [])
    shape, asked = case.result_shape, (case.num_samples, request, setting, case.cost_model)
    others = [] if anew else [one for one in known if one.asked == asked and one.shape != shape]
    near = min(others, key=lambda one: one.times(shape), default=None)
    if near is not None and (times := near.times(shape)) <= _NEAR:
        with suppress(CompileError):
            looked_at = _narrowed(case, request, setting, near.ranked, _told(near.ranked, min(sqrt(times), _FAR)))
            narrowed = replace(_ranked(case, request, setting, looked_at), narrowed=True)
            fitted = {_way(one.request, one.requests) for one in filter(_fits, near.ranked.candidates)}
            too_large = (one for one in narrowed.candidates if one.found and one.why)
            if not any(_way(one.request, one.requests) in fitted for one in too_large):
                return narrowed
    looked_at = _found(case, request, setting)
    between = _between(case, request, setting, _warmed(case, looked_at, setting))
    found = _ranked(case, request, setting, _timed(case, [*looked_at, *between], setting))
    known.append(_Known(shape, asked, found))
    return found


def _ranked(case: SampleCase, request: SampleRequest, setting: Setting, looked_at: Sequence[SampleCandidate]) -> Ranked:
    found = _warmed(case, looked_at, setting)
    if not any(one.found for one in found):
        chosen(case, request)  # says what is wrong with what was asked for
        raise CompileError("; ".join(dict.fromkeys(one.why for one in found)) or "there is no layout")
    fitting = _fitting(case, found, setting)
    on_one = chosen(case, SampleRequest(1, 1, None, None, 1, EXACT, request.text))
    alone = estimate(case, on_one, setting.cluster, setting.steps).seconds / max(request.speeds, default=1.0)
    order = sorted(fitting, key=lambda one: (one.found is None or bool(one.why), one.seconds, one.least_seconds or inf))
    best = _best([*filter(_fits, order)], alone)
    others = (one for one in order if one is not best)
    return Ranked((best, *others), case.num_samples, alone, setting, request.how)


def _between(
    case: SampleCase, request: SampleRequest, setting: Setting, found: Sequence[SampleCandidate]
) -> list[SampleCandidate]:
    """Patches in turn of a number between those that are looked at, where the best of these are about the best."""
    limit = _limit(case, setting)
    fits = sorted((one for one in found if one.found and one.found.memory_bytes <= limit), key=attrgetter("seconds"))
    best = next((one for one in fits if one.request.in_turn and one.seconds <= _FAR * fits[0].seconds), None)
    if best is None or best.made is None or request.patches is not None:
        return []
    grid, own = best.made.grid, case.of(best.requests * case.num_samples)
    turns = [turns for turns in (grid.turns * 3 // 4, grid.turns * 3 // 2) if turns > 1]
    others = [replace(best.request, patches=grid.patches * times) for times in turns]
    looked = [_looked_at(own, one, setting, best.requests, found) for one in others]
    return [one for one in looked if one is not None]


def _told(there: Ranked, most: float) -> dict[object, str | None]:
    """By another call, why a layout need not be looked at: one that took more than so many times as long as the best,
    of displaced ones with what an exact one may take longer, or longer than others of its sort. Of others nothing, and
    None of those that were not looked at there."""
    found: dict[object, str | None] = {}
    warm, best = _fastest_rows(there.candidates), there.best.seconds
    of_sort: dict[object, float] = {}
    for one in filter(_fits, there.candidates):
        of_sort[_sort(one)] = min(one.seconds, of_sort.get(_sort(one), inf))
    for one in there.candidates:
        least = one.seconds if one.found else (one.least_seconds or 0.0) / one.requests
        times = least / best if best else 1.0
        far = f"at another size {'' if one.found else 'at least '}{times - 1:.1%} longer" if times > 1 else "not exact"
        near = "" if one.found else None
        is_far = times * _weight(one) > most * _weight(there.best) or least > _ALIKE * of_sort.get(_sort(one), inf)
        found[_way(one.request, one.requests)] = far if is_far and one is not warm.get(one.request.watching) else near
    return found


def _fits(one: SampleCandidate) -> bool:
    return one.found is not None and not one.why


def _sort(one: SampleCandidate) -> object:
    """What layouts have in common that are about as much faster or slower than the best at another size."""
    return one.request.how.mode, one.request.num_patches, one.requests


def _weight(one: SampleCandidate) -> float:
    """Of its seconds, where layouts are chosen."""
    return 1.0 if one.is_exact else _EXACT_WINS


def _way(way: SampleRequest, requests: int) -> object:
    """What tells the layouts of one request apart."""
    return way.cfg, way.stages, way.fold, way.num_patches, way.how, way.copies, way.watching, requests


def _narrowed(
    case: SampleCase, request: SampleRequest, setting: Setting, there: Ranked, told: Mapping[object, str | None]
) -> list[SampleCandidate]:
    """All candidates; those of which another call has `told` why are not looked at. Of some it knows nothing, as where
    it has too few units."""
    found, open_ones = list[SampleCandidate](), list[tuple[bool, int, SampleCase, SampleRequest]]()
    for requests, of_requests in _joined(case, request, setting):
        own = {_way(way, requests): way for way in ways(of_requests, request, setting)}
        between = (one.request for one in there.candidates if one.requests == requests and one.found)
        for way in (own | {_way(way, requests): way for way in between}).values():
            if why := told.get(key := _way(way, requests)):
                found.append(SampleCandidate(way, requests, why=why))
            elif key in told or _way(replace(way, fold=False), requests) not in told:  # else it has nothing to fold
                open_ones.append((why is None, requests, of_requests, way))
    best, limit = inf, _limit(case, setting)
    for was_not, requests, of_requests, way in sorted(open_ones, key=itemgetter(0)):
        least = bounds.least_seconds_of_work(of_requests, way, setting.cluster, setting.steps, 0.0) if was_not else 0.0
        if least / requests > _EXACT_WINS * best:
            found.append(_slower(way, requests, least, best))
        elif one := _looked_at(of_requests, way, setting, requests, found):
            found.append(one)
            if one.found and one.found.memory_bytes <= limit:
                best = min(best, one.seconds)
    return _timed(case, found, setting)


def _found(case: SampleCase, request: SampleRequest, setting: Setting) -> list[SampleCandidate]:
    """All candidates; those that cannot be the best by what they take at least are not looked at."""
    best, best_rows, found, open_ones = inf, inf, list[SampleCandidate](), []
    for requests, of_requests in _joined(case, request, setting):
        own = [*ways(of_requests, request, setting)]
        fresh = min((bounds.least_seconds(of_requests, way, 1) for way in own if _may_warm(way)), default=inf)
        for place, way in enumerate(own):
            least = bounds.least_seconds(of_requests, way, setting.steps, fresh) / requests
            open_ones.append((least, place, requests, False, of_requests, way, fresh))
    heapify(open_ones)
    limit = _limit(case, setting)
    while open_ones:
        least, place, requests, refined, of_requests, way, fresh = heappop(open_ones)
        may_warm = _may_warm(way) and way.watching == request.watching
        if least > _EXACT_WINS * (best_rows if may_warm and request.how.warmup > 1 else best):
            found.append(_slower(way, requests, least * requests, best))
            continue
        if not refined:
            seconds = bounds.least_seconds_of_work(of_requests, way, setting.cluster, setting.steps, fresh) / requests
            heappush(open_ones, (max(least, seconds), place, requests, True, of_requests, way, fresh))
            continue
        one = _looked_at(of_requests, way, setting, requests, found)
        if one is None:
            continue  # a line that was to be folded, and has nothing to fold
        found.append(one)
        if one.found and one.found.memory_bytes <= limit:
            best = min(best, one.seconds)
            best_rows = min(best_rows, one.seconds) if may_warm else best_rows
    return _timed(case, found, setting)


def _slower(way: SampleRequest, requests: int, least_seconds: float, best: float) -> SampleCandidate:
    longer = least_seconds / requests / best - 1 if best else inf
    why = f"at least {longer:.1%} longer"
    return SampleCandidate(way, requests, why=why, least_seconds=least_seconds)


def _limit(case: SampleCase, setting: Setting) -> float:
    """Bytes of a rank, the user's or the device's."""
    return setting.limit_bytes or case.cost_model.memory_bytes or inf


def _may_warm(way: SampleRequest) -> bool:
    """Whether fresh steps of another layout may be made by it."""
    return way.how.mode == "exact" and way.stages is None


def _fastest_rows(found: Sequence[SampleCandidate], limit: float = inf) -> dict[int, SampleCandidate]:
    """The fastest that fresh steps may be made by, of one request, by how many ranks watch."""
    fits = (one for one in found if one.found and not one.why and one.found.memory_bytes <= limit)
    rows = (one for one in fits if _may_warm(one.request) and one.requests == 1)
    return {one.request.watching: one for one in sorted(rows, key=attrgetter("seconds"), reverse=True)}


def _warmed(case: SampleCase, found: Sequence[SampleCandidate], setting: Setting) -> list[SampleCandidate]:
    """Displaced ones of a request with the fastest exact steps first, where a call is the faster for it, and fits."""
    limit = _limit(case, setting)
    by = _fastest_rows(found, limit)

    def warmed(one: SampleCandidate) -> SampleCandidate:
        rows = by.get(one.request.watching)
        if rows is None or rows.found is None or one.is_exact or one.requests > 1:
            return one
        if one.found is None or one.made is None:
            return one
        told = one.found.warmed(rows.found, min(one.request.how.num_warm, setting.steps))
        fits = told.memory_bytes <= max(limit, one.found.memory_bytes)
        if not fits or _SAME * told.seconds >= one.found.seconds:
            return one
        return replace(one, made=replace(one.made, warm=rows.made), found=told)

    return [*map(warmed, found)]


def _joined(case: SampleCase, request: SampleRequest, setting: Setting) -> Iterator[tuple[int, SampleCase]]:
    """How many requests a call may have, with the case of their samples: up to two samples for every rank."""
    yield 1, case
    if setting.objective == "throughput" and case.traced.captured.batch:
        ranks, own = request.world_size, case.num_samples
        even = ranks // gcd(ranks, own)  # samples are as many as ranks, or a multiple
        most = max(2 * ranks // own, 2)
        for requests in sorted({even, 2 * even, *(2**power for power in range(1, most.bit_length()))}):
            if 1 < requests <= max(most, even):
                yield requests, case.of(requests * own)


def ways(case: SampleCase, request: SampleRequest, setting: Setting) -> Iterator[SampleRequest]:
    """Requests that leave nothing open but bounds: on all ranks, then on fewer, of which there are as many copies as
    are no slower; ranks that are left over watch."""
    is_open = request.stages is None and request.patches is None and request.cfg is None
    for ranks in _ranks(request, case.num_samples) if is_open else [request.world_size]:
        for copies in _copies(request, ranks):
            used = copies * ranks
            watching = request.watching + request.world_size - used
            speeds = request.speeds[:used]
            own = replace(request, world_size=used, copies=copies, speeds=speeds if {*speeds} - {1.0} else ())
            yield from _ways_on(case, replace(own, watching=watching), setting)


def _ranks(request: SampleRequest, num_samples: int) -> list[int]:
    """How many may make a call together, the most first: all, those before a slower one, of these as many as samples
    can be shared out to, and what divides all or those."""
    speeds, most = request.speeds, request.world_size
    shared = {most, most - most % num_samples} - {0}
    slower = [at for at in range(1, len(speeds)) if speeds[at] < speeds[at - 1]]
    ends = {end for at in slower for end in (at, at - at % num_samples)}
    return [r for r in range(most, 0, -1) if r in ends or any(count % r == 0 for count in shared)]


def _copies(request: SampleRequest, ranks: int) -> list[int]:
    """How often so many ranks may be there: all, or all before a slower copy."""
    count, speeds = request.world_size // ranks, request.speeds
    slower = {at // ranks for at in range(ranks, len(speeds)) if speeds[at] < speeds[at - ranks]}
    return sorted({one for one in slower if one < count} | {count})


def _ways_on(case: SampleCase, request: SampleRequest, setting: Setting) -> Iterator[SampleRequest]:
    """On all its ranks: more groups first, then fewer stages."""
    open_layout = request.stages is None and request.patches is None
    hows = [EXACT, request.how] if open_layout and request.how.mode == "displaced" else [request.how]
    if open_layout and few(request.how, setting.steps):
        hows = [EXACT]
    ranks = request.world_size // request.copies
    for how in hows:
        for groups in _groups(case, request.cfg, ranks):
            for stages in [request.stages] if request.stages else range(1, ranks // groups + 1):
                if ranks // groups % stages == 0:
                    yield from _ways_of(case, replace(request, cfg=groups, how=how), stages)


def _groups(case: SampleCase, asked: int | None, ranks: int) -> list[int]:
    case.require_apart(asked or 1)
    if asked is not None or case.dependent is not None:
        return [asked or 1]
    return [groups for groups in range(case.num_samples, 0, -1) if ranks % groups == 0]


def _ways_of(case: SampleCase, request: SampleRequest, stages: int) -> Iterator[SampleRequest]:
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
    elif how.norms != "sync" and (asked or request.patches is None) and (request.copies == 1 or not request.watching):
        in_turn = replace(request, stages=stages, how=replace(how, advance=False))
        turns = [stages, 2 * stages, 4 * stages]
        if asked:  # with fewer units than that, too
            most = case.rows(case.num_samples).units.count // beside
            turns = [*dict.fromkeys(max(min(times, most), 1) for times in turns)]
        open_patches = [beside * times for times in turns]
        for patches in [request.patches] if request.patches is not None else open_patches:
            for fold in folds:
                yield replace(in_turn, patches=patches, fold=fold)


def _looked_at(
    case: SampleCase, way: SampleRequest, setting: Setting, requests: int, others: Sequence[SampleCandidate]
) -> SampleCandidate | None:
    """What a layout takes; None where it is one of the others."""
    try:
        made = with_attention(case, chosen(case, way), way.attention, setting.cluster, way.speeds)
    except CompileError as error:
        return SampleCandidate(way, requests, why=str(error))
    if any(made == other.made and requests == other.requests for other in others):
        return None
    if made.spans is not None and setting.limit_bytes is not None and not way.speeds:
        held = Columns(case, made, setting.cluster).memory_bytes
        if held > setting.limit_bytes:
            return SampleCandidate(way, requests, made, replace(_UNTIMED, memory_bytes=held))
    return SampleCandidate(way, requests, made, estimate(case, made, setting.cluster, setting.steps, way.speeds))


def _timed(case: SampleCase, found: list[SampleCandidate], setting: Setting) -> list[SampleCandidate]:
    """With the seconds of those that need more memory than there may be, unless all do: then nobody asks for them."""
    limit = _limit(case, setting)
    if not any(one.found and one.found.memory_bytes <= limit for one in found):
        return found

    def timed(one: SampleCandidate) -> SampleCandidate:
        if one.made is None or one.found is None or one.seconds < inf:
            return one
        own = case.of(one.requests * case.num_samples)
        return replace(one, found=estimate(own, one.made, setting.cluster, setting.steps))

    return [*map(timed, found)]


def _fitting(case: SampleCase, found: Sequence[SampleCandidate], setting: Setting) -> list[SampleCandidate]:
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


def _best(found: Sequence[SampleCandidate], alone_seconds: float) -> SampleCandidate:
    """Of candidates by seconds: the fastest, an exact one where that is nearly as fast; of those that are as fast, and
    as fast as one rank, that with the most groups."""
    first = found[0]
    exact = next((one for one in found if one.is_exact), None)
    if exact is not None and exact.seconds <= _EXACT_WINS * first.seconds:
        first = exact
    most = max(first.seconds, min(_SAME * first.seconds, alone_seconds))
    alike = [one for one in found if one.is_exact == first.is_exact and one.seconds <= most]
    return min(alike, key=lambda one: (-(one.request.cfg or 1), one.request.stages or 1, one.requests))
