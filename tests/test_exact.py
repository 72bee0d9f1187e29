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


# These compute in float32 on the way, whatever the type of their weights.
FLOAT32_INSIDE = {"hunyuan_dit"}


def _spread(cases: dict[str, object], offset: int) -> list[object]:
    """Each case with one layout, all layouts used."""
    return [
        pytest.param(
            name, *LAYOUTS[(index + offset) % len(LAYOUTS)], id=f"{name}-{LAYOUTS[(index + offset) % len(LAYOUTS)][0]}"
        )
        for index, name in enumerate(cases)
    ]


def _check(
    model: torch.nn.Module, schedule: str, world_size: int, microbatches: int, bound: float = 1e-10
) -> fxpipe.Program:
    program = fxpipe.compile(model, world_size, batch_size=5, microbatches=microbatches, schedule=schedule)
    args, kwargs = call_of(program.model.example_inputs(5))
    report = program.verify(*args, **kwargs)
    assert report.ok, report
    assert max(report.loss_error, report.max_grad_error) <= bound, report
    assert report.gradients, "a step without gradients proves nothing"
    if schedule == "wave" and program.plan.staged.collocated:
        assert program.traffic().kinds["skip"] == 0
    return program


@pytest.mark.parametrize(("name", "schedule", "world_size", "microbatches"), _spread(ZOO, 0))
def test_zoo(name: str, schedule: str, world_size: int, microbatches: int) -> None:
    torch.manual_seed(0)
    bound = 1e-5 if name in FLOAT32_INSIDE else 1e-10
    _check(ZOO[name](torch.float64), schedule, world_size, microbatches, bound)


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


class WritesInPlaceInside(torch.nn.Module):
    """Circular padding and Fourier transforms: their formulas write in place, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular")
        self.last = torch.nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        h = torch.fft.irfft2(torch.fft.rfft2(h) * 0.5, s=h.shape[-2:])
        return self.last(h.tanh()).square().mean()

    def example_inputs(self, batch_size: int) -> tuple[torch.Tensor]:
        generator = torch.Generator().manual_seed(batch_size)
        return (torch.randn(batch_size, 2, 8, 8, dtype=torch.float64, generator=generator),)


@pytest.mark.parametrize(("schedule", "world_size", "microbatches"), [("zero-bubble", 2, 3), ("gpipe", 3, 1)])
def test_kernels_that_write_in_place(schedule: str, world_size: int, microbatches: int) -> None:
    torch.manual_seed(0)
    _check(WritesInPlaceInside().double(), schedule, world_size, microbatches)


class AcrossSamples(torch.nn.Module):
    """A loss that no micro-batches add up to, with an argument named as one of verify's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * step).square().mean().sqrt()


def test_one_micro_batch_needs_no_independent_samples() -> None:
    batch = {"x": torch.randn(5, 4).double(), "step": torch.randn(5, 1).double()}
    program = fxpipe.compile(AcrossSamples().double(), 2, example_inputs=batch, microbatches=1)
    assert program.verify(**batch).ok
    with pytest.raises(fxpipe.CompileError, match="micro-batch"):
        fxpipe.compile(AcrossSamples().double(), 2, example_inputs=batch, microbatches=2)


def test_a_model_changed_after_compiling_is_refused() -> None:
    model = PEER_CASES["crossed_skips"](torch.float64)
    program = fxpipe.compile(model, 2, batch_size=4)
    next(model.parameters()).requires_grad_(False)
    with pytest.raises(fxpipe.CompileError, match=r"requires_grad=True, when compiled, and is now.*compile again"):
        program.local_engine()


class NamedLikeFx(torch.nn.Module):
    """Modules and a parameter called as attributes that an fx.GraphModule has for itself; one like a word of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.graph, self.code = torch.nn.Conv2d(2, 2, 3, padding=1), torch.nn.Conv2d(2, 2, 1)
        self.meta = torch.nn.Parameter(torch.rand(2, 1, 1))
        self.add_module("class", torch.nn.Conv2d(2, 2, 1))

    def forward(self, x: torch.Tensor, mean: bool = False) -> torch.Tensor:
        y: torch.Tensor = self.code((getattr(self, "class")(self.graph(x)) * self.meta).sin())
        return y.square().mean() if mean else y


def test_names_that_fx_or_python_has_taken() -> None:
    model, x = NamedLikeFx().double(), torch.randn(4, 2, 6, 4, dtype=torch.float64)
    found = fxpipe.compile(model, 2, example_inputs=(x, True), schedule="1f1b").verify(x, True)
    assert found.ok, found
    assert fxpipe.compile_sampler(model, 2, example={"x": x}, sample={"x": 2}, patches=2).verify().ok
