"""Attention with heads shared over ranks, or keys and values passed around: one device's prediction, in float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from fxpipe.plan.program_check import check_programs
from tests.denoisers import KEYS, Case, small
from tests.row_programs import RowPrograms, row_programs
from tests.test_sampling_exact import CONDITIONS, FLOAT32_INSIDE, FLOAT32_ONLY, REFUSED, one_device, relative_error

MODELS = [key for key in KEYS if key not in CONDITIONS and key not in REFUSED]


def by(kind: Any, given: RowPrograms, patches: Any = None, **asked: Any) -> RowPrograms:
    """The same call with attention of this kind."""
    cut = given if patches is None else given.cut(patches)
    request = replace(cut.lowering.request, attention=kind, **asked)
    return replace(cut, lowering=replace(cut.lowering, request=request))


def uneven(count: int, patches: int) -> tuple[int, ...]:
    """Bounds of patches, the first ones of one unit."""
    return (*range(patches), count)


def predicts(programs: RowPrograms, given: Case, bound: float = 1e-10) -> None:
    assert not check_programs(programs.programs, programs.messages)
    found = programs.predict(**given.example)
    assert all(torch.equal(other, found[0]) for other in found[1:])
    assert relative_error(found[0], one_device(given)) <= bound


@pytest.mark.parametrize("key", MODELS)
def test_every_backbone(key: str) -> None:
    given = small(key, torch.float32 if key in FLOAT32_ONLY else torch.float64)
    bound = 1e-5 if key in FLOAT32_INSIDE | FLOAT32_ONLY else 1e-10
    whole = row_programs(given.model, given.example, 2, sample=given.sample)
    for kind in ("ulysses", "ring"):
        found = by(kind, whole)
        print(key, kind, found.step.plan.attention, found.step.plan.notes[-1:])
        if kind in found.step.plan.attention:
            for patches in (2, 3, 4):
                if whole.rows.units.count >= patches:
                    predicts(by(kind, whole, uneven(whole.rows.units.count, patches)), given, bound)
