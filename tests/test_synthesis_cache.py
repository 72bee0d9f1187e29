"""Found schedules are kept: equal and scaled problems find them, others do not, and bounds stay honest."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.placement.waves import wave_ranks
from passes.schedules import schedule_cache, synthesis
from passes.schedules.problem import Problem
from passes.schedules.synthesis import references, synthesise
from tests.test_schedule import chain

LIMIT = (7, 7, 7)


@pytest.fixture(autouse=True)
def _empty(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(schedule_cache.ENVIRONMENT, raising=False)
    schedule_cache.clear()
    yield
    schedule_cache.clear()


def problem(scale: float = 1.0, change: float = 0.0) -> Problem:
    placement = wave_ranks(3)
    forward = [scale * (6 + 2 * (s % 2)) for s in range(6)]
    forward[2] += scale * change
    return Problem(
        chain(6, 6),
        placement,
        {"F": forward, "B": [2 * f for f in forward]},
        lag=lambda a, b, kind: 0.0 if placement[a] == placement[b] else scale,
        activation_bytes=(1,) * 6,
        memory_limit_bytes=LIMIT,
    )


def never(*args: object) -> None:
    raise AssertionError("it was searched for")


def test_an_equal_problem_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    first = synthesise(problem(), 0.2)
    monkeypatch.setattr(synthesis, "_searched", never)
    assert synthesise(problem(), 0.2) == first


@pytest.mark.parametrize("scale", [3.0, 0.1, 1e-6, 1 / 3])
def test_a_scaled_problem_is_looked_up(monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    first = synthesise(problem(), 0.2)
    monkeypatch.setattr(synthesis, "_searched", never)
    again = synthesise(problem(scale), 0.2)
    assert again.schedule == first.schedule
    assert again.makespan_seconds == pytest.approx(scale * first.makespan_seconds, rel=1e-9)
    assert again.lower_bound_seconds == pytest.approx(scale * first.lower_bound_seconds, rel=1e-9)
    assert again.gap == pytest.approx(first.gap, abs=1e-9)


CHANGES = {
    "budget": lambda p: (p, 0.1, 0),
    "seed": lambda p: (p, 0.2, 1),
    "times": lambda p: (problem(change=1), 0.2, 0),
    "placement": lambda p: (replace(p, stage_rank=(0, 1, 2, 0, 1, 2)), 0.2, 0),
    "memory": lambda p: (replace(p, memory_limit_bytes=(8, 7, 7)), 0.2, 0),
    "micro-batches": lambda p: (replace(p, work=chain(6, 5)), 0.2, 0),
    "lags": lambda p: (replace(p, lag=lambda a, b, kind: 0.0), 0.2, 0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_problem_is_not(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    synthesise(problem(), 0.2)
    monkeypatch.setattr(synthesis, "_searched", never)
    other, budget, seed = CHANGES[change](problem())
    with pytest.raises(AssertionError, match="it was searched for"):
        synthesise(other, budget, seed)


@given(st.lists(st.floats(-0.004, 0.004), min_size=6, max_size=6))
@settings(max_examples=5, deadline=None)
def test_nearly_the_same_times_find_it_with_a_makespan_and_a_bound_of_their_own(noise: list[float]) -> None:
    base = problem()
    first = synthesise(base, 0.1)
    forward = [f + n for f, n in zip(base.seconds["F"], noise, strict=True)]
    near = replace(base, seconds={"F": forward, "B": base.seconds["B"]})
    assert schedule_cache.key(near, 0.1, 0) == schedule_cache.key(base, 0.1, 0)
    found = synthesise(near, 0.1)
    assert found.makespan_seconds == near.simulate(found.schedule).makespan_seconds
    named = [near.simulate(s).makespan_seconds for s in references(near) if synthesis.fits(near, s)]
    assert found.makespan_seconds <= min(named)
    schedule_cache.clear()
    searched = synthesise(near, 0.1)
    assert found.lower_bound_seconds <= searched.makespan_seconds * (1 + 1e-9)
    assert searched.lower_bound_seconds <= found.makespan_seconds * (1 + 1e-9)
    schedule_cache.clear()
    assert synthesise(base, 0.1) == first


def test_a_folder_keeps_it_for_other_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = synthesise(problem(), 0.2, cache=tmp_path / "schedules")
    schedule_cache.clear()
    monkeypatch.setattr(synthesis, "_searched", never)
    assert synthesise(problem(), 0.2, cache=tmp_path / "schedules") == first
    schedule_cache.clear()
    monkeypatch.setenv(schedule_cache.ENVIRONMENT, str(tmp_path / "schedules"))
    assert synthesise(problem(), 0.2) == first
    assert len(list((tmp_path / "schedules").iterdir())) == 1


def test_without_a_folder_no_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    synthesise(problem(), 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["", "{}", "[1, 2]", "another key", "another schedule"])
def test_a_damaged_file_is_not_used(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    first = synthesise(problem(), 0, cache=tmp_path)
    (path,) = tmp_path.iterdir()
    text = path.read_text()
    damaged = {"another key": text.replace('"key": "', '"key": "_'), "another schedule": text.replace("0F0", "0F1")}
    path.write_text(damaged.get(damage, damage))
    schedule_cache.clear()
    with caplog.at_level(logging.WARNING):
        assert synthesise(problem(), 0, cache=tmp_path) == first
    assert "not used" in caplog.text
    assert path.read_text() == text


def test_only_so_many_are_kept() -> None:
    schedule = next(references(problem()))
    for number in range(300):
        entry = schedule_cache.Entry(schedule, (float(number),), 1.0, "test")
        schedule_cache.keep(str(number), entry, None)
    assert schedule_cache.find("0", problem(), None) is None
    kept = schedule_cache.find("299", replace(problem(), memory_limit_bytes=(99,) * 3), None)
    assert kept is not None
    assert kept.times == (299.0,)
