"""What patches do, read off the graphs of two of them, is what each one's own graph says."""

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

import fxpipe
from cost_models.devices import device
from fxpipe.sampling.case import SampleCase
from passes.sampling.alike import alike
from passes.sampling.patches import patches_of
from passes.sampling.work import PatchWork, patch_work
from tests.denoisers import noise
from tests.row_programs import row_programs
from tests.test_sample_planner import DiT, UNet
from tests.test_sampling_text import Joint

OTHER = {"x": noise(2, 3, 40, 4), "text": noise(2, 5, 8)}
IMAGE = {"x": noise(2, 3, 24, 4), "text": noise(2, 5, 8)}
MODELS: dict[str, tuple[nn.Module, dict[str, Any], int]] = {
    "U-Net": (UNet(), IMAGE, 2),
    "DiT": (DiT(), IMAGE, 2),
    "text and rows": (Joint(False), {"x": noise(2, 12, 4), "text": noise(2, 5, 4)}, 1),
    "short rows": (nn.Conv2d(3, 2, 4, 2, 3), {"input": noise(2, 3, 23, 4)}, 2),
}


def told(work: PatchWork) -> object:
    """All but the nodes' identities."""
    named = [(node.name, owner, work.sizes[node]) for node, owner in work.owners.items()]
    return work.items, named, work.held_bytes(frozenset(work.owners.values()))


@pytest.mark.parametrize("name", MODELS)
def test_work_is_that_of_a_patch_of_its_own(name: str) -> None:
    model, example, dim = MODELS[name]
    sample = {next(iter(example)): dim}
    traced = row_programs(model.double(), example, 1, sample=sample).traced
    own, line = (SampleCase(traced, 2, device("A100-80GB")) for _ in range(2))
    plan, count = own.rows(2), own.rows(2).units.count
    for bounds in ((0, 1, 4, count - 2, count), (0, 3, count - 1, count), (0, count // 2, count)):
        patches = patches_of(plan, bounds, "first" if own.has_text(2) else "all")
        tellers = [patches] * len(patches)
        for patch in patches:
            shared = frozenset[str]() if patch.owns else own.shared_text(2)
            written = patch_work(plan, patch, tellers, shared, own._seconds)
            found = alike(plan, patch, shared)
            assert found is not None
            assert told(found.work(patch.stop - patch.first, tellers, line._seconds)) == told(written)


def test_work_is_the_same_whichever_patch_was_asked_for_first() -> None:
    traced = row_programs(UNet().double(), IMAGE, 1, sample={"x": 2}).traced

    def works(order: int) -> dict[object, object]:
        case = SampleCase(replace(traced, of_all_sizes={}), 2, device("A100-80GB"))
        count = case.rows(2).units.count
        asks = [((0, 3, count), 0), ((0, 3, 6, count), 1)]
        return {ask: case.work(2, *ask, True).items for ask in asks[::order]}

    assert works(1) == works(-1)


@pytest.mark.parametrize("bounds", [(0, 6, 8), (0, 1, 8), (0, 1, 2, 8)])
def test_a_patch_that_reads_over_both_borders_has_its_own_graph(bounds: tuple[int, ...]) -> None:
    model, example = nn.Conv2d(3, 2, 7, padding=3).double(), {"input": noise(1, 3, 8, 4)}
    given: dict[str, Any] = {"example": example, "sample": {"input": 2}, "cfg": 1, "patches": [*bounds]}
    made = fxpipe.compile_sampler(model, len(bounds) - 1, **given)
    assert made.verify().ok
    assert made.plan.expects is not None
    assert made.plan.expects.seconds == pytest.approx(made.simulate(50).makespan_seconds, rel=0.1)


@pytest.mark.parametrize("name", ["U-Net", "DiT"])
def test_a_graph_of_all_operations_is_written_at_one_size(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, example, dim = MODELS[name]
    plans = []
    for given in (example, OTHER):
        case = SampleCase(row_programs(model.double(), given, 1, sample={"x": dim}).traced, 2, device("A100-80GB"))
        plans.append((case, case.rows(2)))
    (_, plan), (case, other) = plans
    patch = patches_of(plan, (0, 1, 4, plan.units.count))[1]
    found = alike(plan, patch, frozenset())
    assert found is not None
    monkeypatch.setattr("passes.sampling.alike._form", None)
    patches = patches_of(other, (0, 2, 7, other.units.count))
    again = alike(other, patches[1], frozenset(), found.form)
    assert again is not None
    written = patch_work(other, patches[1], [patches] * 3, frozenset(), case._seconds)
    assert told(again.work(5, [patches] * 3, case._seconds)) == told(written)


def test_a_form_that_does_not_hold_at_another_size_is_written_anew() -> None:
    made = []
    for name in ("U-Net", "DiT"):
        model, example, dim = MODELS[name]
        case = SampleCase(row_programs(model.double(), example, 1, sample={"x": dim}).traced, 2, device("A100-80GB"))
        made.append((case.rows(2), patches_of(case.rows(2), (0, 1, 4, case.rows(2).units.count))[1]))
    one, other = (alike(plan, patch, frozenset()) for plan, patch in made)
    assert one is not None
    assert other is not None
    again = alike(*made[1], frozenset(), one.form)
    assert again is not None
    assert again.form.written == other.form.written
