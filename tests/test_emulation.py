"""Emulated runs have the actions, messages and reductions of their predictions, in order."""

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

import fxpipe
from benchmarks.deviation import ActionSpan, deviation
from benchmarks.emulation import Slower, emulate, emulated
from benchmarks.emulation.network import EmulatedDevice, EmulatedNetwork
from fxpipe.cluster import Cluster, Level
from fxpipe.cluster.links import Link
from fxpipe.costs.model import CostModel
from fxpipe.errors import CompileError, RunError
from fxpipe.plan.timeline import Event, Timeline
from fxpipe.run.run_rank import run_rank
from fxpipe.run.transport import run_ranks
from fxpipe.simulate.collectives import Collective
from tests.frozen_steps import FrozenStep
from tests.unet import TinyUNet

ACTION_SECONDS = 1e-3


@pytest.fixture(
    scope="module",
    params=[("wave", 2, 1, ""), ("zero-bubble", 3, 1, ""), ("1f1b", 4, 2, ""), ("1f1b", 2, 1, "draws")],
    ids=lambda p: f"{p[0]}-{p[1]}{p[3]}",
)
def program(request: Any) -> fxpipe.Program:
    schedule, ranks, replicas, draws = request.param
    model = FrozenStep() if draws else TinyUNet("no_grad")
    return fxpipe.compile(model, ranks, batch_size=4, microbatches=4, schedule=schedule, data_parallel=replicas)


def slow(program: fxpipe.Program, link: Link) -> tuple[CostModel, Cluster]:
    """An action takes ACTION_SECONDS on average."""
    timeline = program.simulate()
    factor = ACTION_SECONDS * len(timeline.actions) / sum(timeline.busy_seconds)
    cluster = Cluster("toy", (Level(program.world_size, link),))
    return Slower(program.costed.model, factor), cluster


def test_a_run_does_what_the_prediction_says(program: fxpipe.Program) -> None:
    slower = slow(program, Link("latency alone", 1e30, 2e-3))
    predicted = program.simulate(*slower)
    measured = emulate(program, *slower)
    for rank in range(program.world_size):
        run = [(event.action, event.kind) for event in measured.actions if event.rank == rank]
        assert run == [(event.action, event.kind) for event in predicted.actions if event.rank == rank]
    for kind in ("transfer", "wait", "reduce"):
        of_run, of_prediction = (
            sorted((e.rank, e.peer, e.edge, e.num_bytes) for e in timeline.events if e.kind == kind)
            for timeline in (measured, predicted)
        )
        assert of_run == of_prediction
    assert all(times.measured_busy_seconds >= 0 for times in deviation(predicted, measured).actions)


def test_messages_that_share_links_arrive_in_a_run_too(program: fxpipe.Program) -> None:
    measured = emulate(program, *slow(program, Link("narrow bus", 1e6, 1e-4, duplex=False, shared=True)))
    assert measured.channel_bytes == program.traffic().channels


def test_an_emulated_program_returns_zeros_of_the_right_shapes() -> None:
    program = fxpipe.compile(TinyUNet("no_grad"), 1, batch_size=2, microbatches=2)
    (rank,), planned = program.step.programs, program.costed.ops(program.plan, program.schedule, program.cluster)
    module = emulated(rank, planned.ranks[0], EmulatedDevice())
    batch = program.step.tensors((), TinyUNet().example_inputs(2))[0]
    (result,) = run_ranks(1, lambda transport: run_rank(module, rank, transport, _no_draws, batch))
    assert result.loss == 0.0
    assert {name: g.shape for name, g in result.gradients.items()} == {n: rank.state[n].shape for n in rank.gradients}
    assert not any(gradient.any() for gradient in result.gradients.values())


def _no_draws(index: int) -> torch.Tensor:
    raise AssertionError(f"draw {index} of a model without draws")


def test_programs_for_gpus_are_refused(program: fxpipe.Program) -> None:
    other = replace(program, lower=lambda *given: replace(program.step, device=torch.device("cuda")))
    with pytest.raises(CompileError, match="compile for it, not for cuda"):
        emulate(other, program.costed.model, program.cluster)


class Clock:
    """A clock that sleeps move on, each `late` seconds too far."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, late: float = 0.0) -> None:
        self.now, self.late = 0.0, late
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self.late if seconds else 0.0


def test_waits_end_when_the_network_has_brought_what_they_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, device = Clock(monkeypatch), EmulatedDevice()
    network = EmulatedNetwork(Cluster("toy", (Level(2, Link("toy", 1e6, 5e-3)),)))
    network.send(0, (0, 1), 5000)
    network.send(1, (0, 1), 5000)
    device.wait(network, 1, 0.0)
    assert clock.now == pytest.approx(0.02)  # one after the other
    device.wait(network, 0, 0.0)
    assert clock.now == pytest.approx(0.02)
    total, start = Collective(2, "reduce", (0, 1), 10_000), clock.now
    for rank in (0, 1):
        network.issue(rank, total)
    device.wait(network, 2, start)
    assert clock.now - start == pytest.approx(0.02)  # twice: latency, and half the bytes


def test_a_late_sleep_is_made_up_for_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, device = Clock(monkeypatch, late=0.25), EmulatedDevice()
    for end in (1.25, 2.25, 3.25):
        device.compute(1.0)
        assert clock.now == end
    device.compute(0.125)  # free at 3.0: over before it is looked at
    assert clock.now == 3.25
    clock.now = 4.0  # the program itself took its time: that counts
    device.compute(1.0)
    assert clock.now == 4.0 - 0.125 + 1.0 + 0.25


def action(rank: int, name: str, start: float, end: float) -> Event:
    return Event(rank, name, name[1], start, end)


def test_deviations_by_hand() -> None:
    waited = Event(1, "1F0", "wait", 0.0, 1.0, 0, 7, 8, "h")
    predicted = Timeline((action(0, "0F0", 0.0, 1.0), action(1, "1F0", 0.0, 3.0), waited), 2)
    late = replace(waited, end_seconds=1.5)
    measured = Timeline((action(0, "0F0", 0.25, 1.5), action(1, "1F0", 0.0, 4.5), late), 2)
    found = deviation(predicted, measured)
    assert found.ratio == 0.5
    assert found.actions == (
        ActionSpan(0, "0F0", "F", 0.0, 0.25, 1.0, 1.25),
        ActionSpan(1, "1F0", "F", 0.0, 0.0, 2.0, 3.0),
    )
    assert found.actions[0].late_seconds == 0.25
    first, last = str(found).splitlines()[1:]
    assert first.split() == ["forward", "2", "1.500", "s", "2.125", "s", "250", "ms"]
    assert last.split() == ["step", "3.000", "s", "4.500", "s", "+50.0%"]


def test_runs_of_another_program_are_told() -> None:
    one, other = (Timeline((action(0, "0F0", 0.0, 1.0), action(0, name, 1.0, 2.0)), 1) for name in ("0B0", "0F1"))
    with pytest.raises(RunError, match=r"where one has \(0, '0B0'\), one has \(0, '0F1'\)"):
        deviation(one, other)
    with pytest.raises(RunError, match=r"where one has \(0, '0B0'\), one has None"):
        deviation(one, Timeline(one.events[:1], 1))
