"""Named schedules as references: their times and memory from the literature, on any placement, never beaten by none."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe.plan.actions import Action, Work
from fxpipe.plan.execution import simulate
from fxpipe.plan.schedule_check import check
from passes.schedules.named import make_schedule
from passes.schedules.policies import POLICIES
from passes.schedules.problem import Problem, peak_bytes
from passes.schedules.synthesis import references, synthesise
from tests.partitions import interleaved_ranks, wave_ranks
from tests.test_schedule import chain, peak, unit, works


def uniform(placement: tuple[int, ...], num_microbatches: int) -> Problem:
    """One second per F, I and W, two per B, free transfers."""
    count = len(placement)
    ones = (1.0,) * count
    seconds = {"F": ones, "B": (2.0,) * count, "I": ones, "W": ones}
    return Problem(chain(count, num_microbatches), placement, seconds, activation_bytes=(1,) * count)


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 4), (4, 8), (5, 12), (8, 16), (4, 32)])
def test_zb_v_is_idle_at_its_ends_alone_in_the_memory_of_1f1b(num_ranks: int, num_microbatches: int) -> None:
    problem = uniform(wave_ranks(num_ranks), num_microbatches)
    schedule = next(s for s in references(problem) if s.name == "zb-v")
    seconds = problem.simulate(schedule).makespan_seconds
    assert seconds == 6 * num_microbatches + num_ranks - 1  # Qi et al.: the last rank starts and the first ends late
    assert max(peak_bytes(problem, schedule)) <= 2 * num_ranks


@pytest.mark.parametrize(
    ("num_ranks", "num_waves", "num_microbatches", "seconds"),
    [(4, 1, 4, 36), (4, 2, 4, 61), (8, 2, 8, 126), (4, 1, 8, 60), (4, 2, 8, 115), (8, 2, 32, 443)],
)
def test_hanayo_holds_what_1f1b_holds(num_ranks: int, num_waves: int, num_microbatches: int, seconds: int) -> None:
    problem = uniform(wave_ranks(num_ranks, num_waves), num_microbatches)
    found = {s.name: s for s in references(problem)}
    assert max(peak_bytes(problem, found["hanayo"])) <= 2 * num_waves * num_ranks
    assert problem.simulate(found["hanayo"]).makespan_seconds == seconds
    line = uniform(tuple(range(num_ranks)), num_microbatches)
    scale = 2 * num_waves  # stages of a wave are so much shorter
    alone = next(s for s in references(line) if s.name == "1f1b")
    assert seconds < scale * line.simulate(alone).makespan_seconds


def test_every_schedule_is_a_reference_once() -> None:
    assert [s.name for s in references(uniform(wave_ranks(2), 3))] == [
        "gpipe",
        "1f1b",
        "interleaved",
        "hanayo",
        "zb-h1",
        "zb-v",
    ]
    problem = uniform(wave_ranks(2), 3)
    whole = replace(problem, seconds={kind: problem.seconds[kind] for kind in "FB"})
    assert [s.name for s in references(whole)] == ["gpipe", "1f1b", "interleaved", "hanayo"]


@pytest.mark.parametrize(("name", "other"), [("zero-bubble", "zb-h1"), ("wave", "1f1b")])
def test_two_names_of_one_schedule(name: str, other: str) -> None:
    work, ones = chain(8, 5, 1), [1.0] * 8
    one, two = (make_schedule(n, work, wave_ranks(4), ones, ones, frozen_seconds=[2.0]) for n in (name, other))
    assert (one.name, two.name) == (name, other)
    assert one.ranks == two.ranks


PLACEMENTS = (
    (0, 1, 2, 3),
    interleaved_ranks(2, 2),
    interleaved_ranks(3, 3),
    wave_ranks(3),
    wave_ranks(2, 2),
    wave_ranks(2, 3),
    (0, 2, 1, 1, 0, 2, 2),
    (1,),
)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", POLICIES)
def test_every_name_on_any_map_with_frozen_work(name: str, placement: tuple[int, ...]) -> None:
    count, world_size = len(placement), max(placement) + 1
    for num_microbatches in (1, 2, 3, 7):
        work = chain(count, num_microbatches, num_components=2)
        forward = [1.0 + s % 3 for s in range(count)]
        backward = [2.5 + s % 2 for s in range(count)]
        schedule = make_schedule(name, work, placement, forward, backward, frozen_seconds=[0.5, 1.5])
        assert check(schedule, work, world_size) == []
        for actions in schedule.ranks:
            frozen = [a.kind == "T" for a in actions]
            assert frozen == sorted(frozen, reverse=True)


@st.composite
def replicated(draw: st.DrawFn) -> tuple[Work, list[tuple[int, ...]]]:
    work: Work = draw(works())
    ranks = st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True).map(tuple)
    return work, draw(st.lists(ranks, min_size=work.num_stages, max_size=work.num_stages))


@given(replicated(), st.sampled_from(["hanayo", "zb-v"]))
@settings(max_examples=150, deadline=None)
def test_new_names_order_replicas_too(case: tuple[Work, list[tuple[int, ...]]], name: str) -> None:
    work, ranks = case
    times = [float(1 + stage % 3) for stage in range(work.num_stages)]
    schedule = make_schedule(name, work, ranks, times, times, world_size=4)
    assert check(schedule, work, 4) == []


def test_zb_v_gives_back_memory_before_it_takes_more() -> None:
    """A weight gradient may wait, but not beyond the forward that needs its memory."""
    schedule = make_schedule("zb-v", chain(8, 12), wave_ranks(4), [1.0] * 8, [2.0] * 8)
    assert max(map(peak, schedule.ranks)) <= 8
    late = [a for a in schedule.ranks[0] if a.kind == "W"]
    assert late == sorted(late, key=lambda a: a.microbatch)
    slow = simulate(schedule, chain(8, 12), unit, lambda a, b, kind: 0.3)
    assert slow.makespan_seconds < 12 * 6 + 3 + 24 * 0.3


def test_a_synthesised_schedule_is_no_longer_than_any_reference() -> None:
    problem = uniform(wave_ranks(3, 2), 4)
    found = synthesise(problem, budget_seconds=0)
    times = [problem.simulate(s).makespan_seconds for s in references(problem)]
    assert found.makespan_seconds <= min(times)
    assert Action(0, "B", 0) in found.schedule.ranks[0]
