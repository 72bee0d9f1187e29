"""Batches of several shapes and sizes: one model, one set of weights, trained as on one device."""

import os
import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import fxpipe
from fxpipe.errors import CompileError
from fxpipe.plan.transport import Transport
from fxpipe.run.ownership import empty
from fxpipe.run.transport import run_ranks
from fxpipe.shapes import several
from tests.distributed import run_processes
from tests.frozen_steps import SLOW, FrozenStep
from tests.own_models import SEED, Adapted, OneDevice, batch
from tests.test_filled import ahead, assert_same, batches_of, one_device
from tests.test_own_model import as_rank

SIZES = [(4, 5), (4, 3), (3, 5), (4, 4), (1, 3), (4, 5)]
"""Samples and rows of the batches: both that are compiled at first, the last of an epoch, and one that is unknown."""


def batches() -> list[dict[str, Tensor]]:
    given = [(samples, batch(number, rows)) for number, (samples, rows) in enumerate(SIZES)]
    return [{name: value[:samples] for name, value in one.items()} for samples, one in given]


def trained(model: Adapted, engine: Any) -> tuple[list[float], list[float], Any]:
    """Losses, norms, and the weights after a step on every batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for one in batches():
        losses.append(float(engine.step(one)))
        norms.append(float(engine.clip_grad_norm_(0.2)))
        optimizer.step()
        optimizer.zero_grad()
    assert engine.step_index == len(SIZES)
    return losses, norms, engine.gather_state_dict()


def compiled(model: Adapted, world_size: int, **options: Any) -> fxpipe.Program:
    layout = {"schedule": "wave", "microbatches": 2} | options
    return fxpipe.compile(model, world_size, example_inputs=[batch(0, 5), batch(0, 3)], **layout)


def train(schedule: str, data_parallel: str) -> tuple[list[float], list[float], Any]:
    model, local = Adapted(), "WORLD_SIZE" not in os.environ
    program = compiled(model, 2, schedule=schedule, data_parallel=int(data_parallel))
    engine = program.local_engine(seed=SEED) if local else program.engine(seed=SEED)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = trained(model, engine)
    engine.close()
    texts = [str(one.message) for one in told]
    if os.environ.get("RANK", "0") == "0":
        assert [re.findall(r"x \[.*?\]", text)[0] for text in texts] == ["x [4, 4, 6]"]
    return found


def assert_one_devices(found: tuple[list[float], list[float], Any]) -> None:
    model = Adapted()
    torch.testing.assert_close(found, trained(model, OneDevice(model)), rtol=1e-10, atol=1e-12)


def test_shapes_and_sizes_train_as_one_device() -> None:
    assert_one_devices(train("gpipe", "2"))


def test_shapes_and_sizes_over_gloo_train_as_one_device() -> None:
    first, second = run_processes(2, train, "wave", "1")
    assert_one_devices(first)
    assert (second[0], second[1], second[2]) == (first[0], first[1], None)


def test_an_epoch_ends_with_what_is_left() -> None:
    """Frozen work is done a step ahead for whole batches, and within the step for the last."""
    model = FrozenStep()
    program = fxpipe.compile(model, 2, batch_size=6, microbatches=3, schedule="1f1b", cost_model=SLOW)
    assert program.plan.steady is not None
    given = batches_of(model, 6, 3)
    given.insert(2, {name: value[:2] for name, value in given[2].items()})
    assert_same(ahead(program, given), one_device(FrozenStep(), given))


def test_a_batch_goes_to_the_smallest_program_that_has_its_samples() -> None:
    program = compiled(Adapted(), 2)
    assert str(program).endswith("also for batches of x [4, 3, 6], target [4, 3, 6]")
    assert program.of((), {name: value[:1] for name, value in batch(0, 5).items()}) is program
    with pytest.warns(UserWarning, match=r"a batch of x \[8, 5, 6\].* comes for the first time, and is compiled now"):
        larger = program.of((), {name: torch.cat([value, value]) for name, value in batch(0, 5).items()})
    for samples, takes in ((1, program), (4, program), (5, larger), (8, larger)):
        given = {name: torch.cat([value, value])[:samples] for name, value in batch(0, 5).items()}
        assert program.of((), given) is takes
        assert program.verify(**given).ok


def test_other_shapes_are_refused_where_asked() -> None:
    program = compiled(Adapted(), 2, shapes="fixed")
    engine = program.local_engine()
    engine.step(batch(0, 3))
    with pytest.raises(fxpipe.CompileError, match=r"a batch of x \[4, 4, 6\].*compiled are batches of x \[4, 5, 6\]"):
        engine.step(batch(0, 4))
    with pytest.raises(fxpipe.CompileError, match=r"input x must be \['batch', 5, 6\] torch.float64, got \[\] torch"):
        engine.step(batch(0, 5) | {"x": torch.zeros(()).double()})
    with pytest.raises(fxpipe.CompileError, match="shapes='some'; give 'any' or 'fixed'"):
        compiled(Adapted(), 2, shapes="some")


@pytest.mark.parametrize(("rows", "check"), [((5, 4), True), ((3, 5), False)])
def test_ranks_with_other_shapes_are_told_so(rows: tuple[int, int], check: bool) -> None:
    models = [Adapted(), Adapted()]
    programs = [compiled(model, 2) for model in models]

    def body(transport: Transport) -> None:
        engine = as_rank(programs[transport.rank], transport)
        for known in (5, 3):
            engine.step(batch(0, known))
        engine.check_batches = check
        engine.step(batch(0, rows[transport.rank]))

    with pytest.raises(fxpipe.RunError, match=r"ranks \[1\] have another shape of the batch \(.*\) than rank 0"):
        run_ranks(2, body)


def test_several_batches_are_a_list_of_dicts_or_tuples() -> None:
    x = torch.ones(2)
    for one in ((x, x), [x, x], {"x": x}, x, None, [(x,), {"x": x}], []):
        assert several(one) == [one]
    for more in ([(x,), (x,)], [{"x": x}, {"x": x}], [{"x": x}]):
        assert several(more) is more


def test_examples_that_differ_in_more_than_sizes_are_refused() -> None:
    examples = [{"x": torch.zeros(4, 8)}, {"x": torch.zeros(4, 2, 8)}]

    class Anything(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).square().mean()

    with pytest.raises(CompileError, match="differ in more than their sizes"):
        fxpipe.compile(Anything(), 1, example_inputs=examples)


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x: Tensor, scale: float) -> Tensor:
        return self.layer(x).square().mean() * scale


def test_an_example_whose_program_no_batch_would_find_is_refused() -> None:
    one, two = {"x": torch.zeros(4, 8), "scale": 1.0}, {"x": torch.zeros(4, 8), "scale": 2.0}
    with pytest.raises(CompileError, match=r"two example_inputs of x \[4, 8\] differ in scale, 1.0 and 2.0"):
        fxpipe.compile(Scaled(), 1, example_inputs=[one, two])
    other = {"x": torch.zeros(6, 8), "scale": 2.0}
    assert fxpipe.compile(Scaled(), 1, example_inputs=[one, one, other]).verify(**other).ok
    with pytest.raises(CompileError, match=r"called with 2.0; compile again with it, or compile with a tensor there"):
        fxpipe.compile(Scaled(), 1, example_inputs=one).verify(**two)


def test_weights_without_memory_are_planned_as_those_that_have_it() -> None:
    model, options = Adapted("adapters"), {"schedule": "interleaved", "stages": 4, "budget": 0.0, "cost_model": SLOW}
    before = fxpipe.compile(model, 2, example_inputs=batch(0, 3), cache=False, **options)
    empty(layer.weight for layer in model.layers[2:6])  # type: ignore[union-attr]
    now = fxpipe.compile(model, 2, example_inputs=batch(0, 3), cache=False, **options)
    assert str(now.plan) == str(before.plan)
