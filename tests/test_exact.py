"""Every model of the zoo and every case at which peers fail, compiled and compared with one device in float64."""

import pytest
import torch

import fxpipe
from fxpipe.capture.inputs import call_of
from tests.models import PEER_CASES, ZOO

# (schedule, ranks, micro-batches of 5 samples): every schedule, 1 to 8 ranks, even and uneven micro-batches.
LAYOUTS = [
    ("wave", 4, 4),
    ("1f1b", 3, 2),
    ("zero-bubble", 3, 4),
    ("auto", 8, 5),
    ("interleaved", 2, 3),
    ("gpipe", 4, 1),
    ("wave", 2, 3),
    ("zero-bubble", 2, 5),
    ("1f1b", 1, 2),
]


def _spread(cases: dict[str, object], offset: int) -> list[object]:
    """Each case with one layout, all layouts used."""
    return [
        pytest.param(
            name, *LAYOUTS[(index + offset) % len(LAYOUTS)], id=f"{name}-{LAYOUTS[(index + offset) % len(LAYOUTS)][0]}"
        )
        for index, name in enumerate(cases)
    ]


def _check(model: torch.nn.Module, schedule: str, world_size: int, microbatches: int) -> fxpipe.Program:
    program = fxpipe.compile(model, world_size, batch_size=5, microbatches=microbatches, schedule=schedule)
    args, kwargs = call_of(program.model.example_inputs(5))
    report = program.verify(*args, **kwargs)
    assert report.loss_error <= 1e-10, report
    assert report.max_grad_error <= 1e-10, report
    assert report.gradients, "a step without gradients proves nothing"
    if schedule == "wave" and program.plan.staged.collocated:
        assert program.traffic().kinds["skip"] == 0
    return program


@pytest.mark.parametrize(("name", "schedule", "world_size", "microbatches"), _spread(ZOO, 0))
def test_zoo(name: str, schedule: str, world_size: int, microbatches: int) -> None:
    torch.manual_seed(0)
    _check(ZOO[name](torch.float64), schedule, world_size, microbatches)


@pytest.mark.parametrize(
    ("name", "schedule", "world_size", "microbatches"), [*_spread(PEER_CASES, 0), *_spread(PEER_CASES, 4)]
)
def test_peer_cases(name: str, schedule: str, world_size: int, microbatches: int) -> None:
    torch.manual_seed(0)
    _check(PEER_CASES[name](torch.float64), schedule, world_size, microbatches)


def test_gradients_equal_plain_autograd() -> None:
    """Against `loss.backward()` itself, with none of fxpipe's code in the reference."""
    torch.manual_seed(0)
    model = PEER_CASES["crossed_skips"](torch.float64)
    batch = model.example_inputs(7)
    args, kwargs = call_of(batch)
    model(*args, **kwargs).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    result = fxpipe.compile(model, 3, example_inputs=batch, microbatches=4, schedule="zero-bubble").run_local(
        *args, **kwargs
    )
    assert result.gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(result.gradients[name], gradient, rtol=1e-10, atol=1e-14)
