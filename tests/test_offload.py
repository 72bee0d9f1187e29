"""Optimizer states on the host: planned where nothing fits otherwise, counted, and kept there by every optimizer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.run import host_states
from fxpipe.run.host_states import HOST
from tests.own_models import Adapted, Trained, assert_same, batch, script
from tests.test_own_model import LINE, ROWS, on_threads, one_device, program

OFFLOADED = {"offload_optimizer": True}
REPLICAS = {"schedule": "gpipe", "data_parallel": 2, **OFFLOADED}


@pytest.mark.parametrize("layouts", [[LINE | OFFLOADED], [REPLICAS, LINE | OFFLOADED]], ids=["line", "two programs"])
def test_a_users_script_is_exact(layouts: list[dict[str, Any]]) -> None:
    def body(model: nn.Module, engines: Any) -> Trained:
        return script(model, engines, ROWS)

    first, second = on_threads(2, layouts, body)
    assert_same(first, one_device("all", len(layouts)))
    assert second.losses == first.losses


def test_an_optimizer_works_on_copies() -> None:
    """Of what has a gradient here alone; gradients, weights and their memory are the engine's before and after."""
    made = program(Adapted(), 2, ROWS[0], REPLICAS)
    engine, model = made.local_engine(), made.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    while_stepping: dict[nn.Parameter, tuple[int, int]] = {}
    addresses = {p: p.data_ptr() for p in model.parameters()}

    def look(*_: Any) -> None:
        for p in model.parameters():
            if p.grad is not None:
                while_stepping[p] = p.data_ptr(), p.grad.data_ptr()

    optimizer.register_step_pre_hook(look)
    engine.step(batch(0, ROWS[0]))
    gradients = {p: (p.grad, p.grad.clone()) for p in model.parameters() if p.grad is not None}
    before = {p: (p.detach().clone(), p._version) for p in gradients}
    optimizer.step()
    assert while_stepping.keys() == gradients.keys() == optimizer.state.keys()
    assert {*gradients} < {*model.parameters()}
    for p, (gradient, was) in gradients.items():
        assert p.grad is gradient
        assert torch.equal(gradient, was)
        assert p.data_ptr() == addresses[p]
        assert not {addresses[p], gradient.data_ptr()} & {*while_stepping[p]}
        assert not torch.equal(p, before[p][0])
        assert p._version > before[p][1]
        assert {state.device for state in optimizer.state[p].values()} == {HOST}
    first = dict(while_stepping)

    def fail(*_: Any) -> None:
        raise ValueError("no")

    failing = optimizer.register_step_pre_hook(fail)
    with pytest.raises(ValueError, match="no"):
        optimizer.step()
    failing.remove()
    engine.sync_model()  # as any call of the engine
    assert all(p.data_ptr() == addresses[p] and p.grad is gradients[p][0] for p in gradients)
    failing = optimizer.register_step_pre_hook(fail)
    with pytest.raises(ValueError, match="no"):
        optimizer.step()
    failing.remove()
    for p in gradients:
        assert p.grad is not None
        p.grad.mul_(0.5)  # what is done to gradients before the engine is called again
    kept, *zeroed = gradients
    for p in zeroed:
        p.grad = None
    engine.sync_model()
    assert kept.grad is not None
    torch.testing.assert_close(kept.grad, 0.5 * gradients[kept][1], rtol=0.0, atol=0.0)
    assert all(p.grad is None and p.data_ptr() == addresses[p] for p in zeroed)
    for p, (gradient, _) in gradients.items():
        p.grad = gradient
    optimizer.step()
    assert while_stepping == first, "the same memory on the host, step after step"
    assert all(p.data_ptr() == addresses[p] and p.grad is gradients[p][0] for p in gradients)
    with pytest.raises(fxpipe.RunError, match=r"optimizer.step\(closure\) where the plan keeps optimizer states on"):
        optimizer.step(lambda: 0.0)


def test_states_made_or_loaded_elsewhere_come_to_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run on one device, taken up with its states on the host, and back."""

    def train(options: dict[str, Any], steps: int, load: bool, save: bool) -> list[float]:
        made = program(Adapted(), 2, ROWS[0], LINE | options)
        engine = made.local_engine()
        optimizer = torch.optim.AdamW(made.model.parameters(), lr=0.1)
        if load:
            engine.load(tmp_path, optimizer)
        losses = [float(loss) for loss in engine.train([batch(0, ROWS[0])] * steps, optimizer)]
        if save:
            engine.save(tmp_path, optimizer)
        engine.close()
        return losses

    made = host_states._buffers_of

    def buffers_of(parameter: nn.Parameter) -> Any:
        assert parameter.grad is not None, "what is loaded needs no memory for updates"
        return made(parameter)

    monkeypatch.setattr(host_states, "_buffers_of", buffers_of)
    whole = train({}, 6, False, False)
    assert train({}, 2, False, True) == whole[:2]
    assert train(OFFLOADED, 2, True, True) == pytest.approx(whole[2:4], rel=1e-12)
    assert train({}, 2, True, False) == pytest.approx(whole[4:], rel=1e-12)


@pytest.mark.parametrize("layout", [LINE, {"schedule": "gpipe", "data_parallel": 2}], ids=["line", "replicas"])
def test_bytes_and_seconds_are_planned(layout: dict[str, Any]) -> None:
    if layout is LINE:  # an order of one's own is placed the same, with and without
        layout = {"schedule": program(Adapted(), 2, ROWS[0], LINE).schedule.text(), "microbatches": None}
    here, there = (program(Adapted(), 2, ROWS[0], layout | {"offload_optimizer": of}) for of in (False, True))
    found = [made.simulate() for made in (here, there)]
    trained = [sum(p.state[name].numel() for name in p.gradients) for p in there.step.programs]
    for rank, elements in enumerate(trained):
        assert found[0].memory[rank].at_peak["optimizer"] == 8 * elements
        assert "optimizer" not in found[1].memory[rank].at_peak
        assert found[0].peak_bytes[rank] - found[1].peak_bytes[rank] == 8 * elements
    update = found[1].makespan_seconds - found[0].makespan_seconds
    link = 31.5e9 * 0.8  # of an A100: float64, two copies there and one back
    slowest = max(trained)
    assert update == pytest.approx(3 * 8 * slowest / link + 2 * 15e-6 + 28 * slowest / 20e9, rel=0.2)
    for made, timeline in zip((here, there), found, strict=True):
        assert made.plan.best is not None
        assert made.plan.best.seconds == pytest.approx(timeline.makespan_seconds, rel=1e-5)
        assert made.plan.peak_bytes == pytest.approx(max(timeline.peak_bytes), rel=0.02)


def test_a_plan_says_it_and_is_run_as_it_says(tmp_path: Path) -> None:
    made = program(Adapted(), 2, ROWS[0], LINE | OFFLOADED)
    assert "optimizer states on the host, which updates what is trained" in str(made.plan)
    assert "the host keeps" in str(made.plan)
    assert fxpipe.Plan.parse(str(made.plan)) == made.plan
    assert fxpipe.Plan.load(made.plan.save(tmp_path / "plan.json")) == made.plan
    again = program(Adapted(), 2, ROWS[0], {"microbatches": None, "plan": made.plan})
    assert again.step.offloaded
    with pytest.raises(
        fxpipe.CompileError, match="offload_optimizer=False beside a plan, which says offload_optimizer=T"
    ):
        program(Adapted(), 2, ROWS[0], {"microbatches": None, "plan": made.plan, "offload_optimizer": False})


@pytest.mark.parametrize("schedule", ["auto", "1f1b", "text"])
def test_states_leave_the_device_only_where_nothing_fits_otherwise(schedule: str) -> None:
    asked: dict[str, Any] = {"schedule": schedule, "budget": 0, "microbatches": 2, "data_parallel": 1, "stages": 2}
    if schedule == "text":
        asked = {"schedule": program(Adapted(), 2, ROWS[0], LINE).schedule.text(), "microbatches": None}
    asked |= {"recompute": False}

    def plan(**options: Any) -> fxpipe.Plan:
        return program(Adapted(), 2, ROWS[0], asked | options).plan

    here, there = (plan(offload_optimizer=of).peak_bytes for of in (False, True))
    assert here is not None
    assert there is not None
    assert there < here
    assert not plan(memory_limit=here).staged.offloaded
    tight, limit = plan(memory_limit=there), there
    while not tight.staged.offloaded:
        limit = int(0.97 * limit)
        tight = plan(memory_limit=limit)
    assert (tight.peak_bytes or 0) <= limit
    assert any("optimizer states are on the host: with them nothing fits into" in note for note in tight.notes)
    with pytest.raises(fxpipe.CompileError, match="memory_limit"):
        plan(memory_limit=limit, offload_optimizer=False)
    with pytest.raises(fxpipe.CompileError, match="memory_limit"):
        plan(memory_limit=there // 2)


def test_a_cpus_states_go_nowhere_else() -> None:
    asked: dict[str, Any] = LINE | {"cluster": "2xCPU", "recompute": False}

    def tightened(limit: int) -> fxpipe.Plan:
        made = program(Adapted(), 2, ROWS[0], asked | {"memory_limit": limit}).plan
        return made if made.staged.offloaded else tightened(int(0.9 * limit))

    with pytest.raises(fxpipe.CompileError, match="no plan fits into memory_limit"):
        tightened(max(program(Adapted(), 2, ROWS[0], asked).simulate().peak_bytes))
