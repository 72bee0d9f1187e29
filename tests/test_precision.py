"""Steps in bfloat16 and float16: eager autocast's numbers, judged by their distance to float32; scalers of all ranks."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from fxpipe.errors import CaptureError, CompileError, RunError
from fxpipe.plan.transport import Transport
from fxpipe.program import Program
from fxpipe.run.engine import Engine
from fxpipe.run.nearness import Distance, Nearness
from fxpipe.run.transport import run_ranks
from tests.distributed import run_processes

SAMPLES, WIDTH = 6, 16
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Net(nn.Module):
    """A frozen layer, layers with a skip over them, and a loss; `first` reads values that are `large` times others'."""

    def __init__(self, large: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.large = large
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        skip = h = self.large * self.first(self.frozen(x) / self.large)
        for layer in self.layers:
            h = F.silu(layer(self.norm(h)))
        return F.mse_loss(self.last(h + skip), y)


def batch(number: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(number)
    return {name: torch.randn(SAMPLES, WIDTH, generator=draw).to(dtype) for name in ("x", "y")}


def compiled(model: nn.Module, precision: str | None, example: Any = None, **options: Any) -> Program:
    layout = {"microbatches": 3, "schedule": "1f1b", "cost_model": "CPU", **options}
    return fxpipe.compile(model, 2, example_inputs=example or batch(), precision=precision, **layout)


def eager(model: nn.Module, number: int, dtype: torch.dtype, scale: Callable[[Tensor], Tensor]) -> Tensor:
    """Plain autocast around forward, micro-batch by micro-batch; gradients are added to `.grad`."""
    losses = []
    for part in range(3):
        with torch.autocast("cpu", dtype, cache_enabled=False):
            loss = model(**{name: value[2 * part : 2 * part + 2] for name, value in batch(number).items()}) / 3
        scale(loss).backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("precision", TYPES)
@pytest.mark.parametrize("options", [{}, {"schedule": "wave"}, {"schedule": "zero-bubble", "recompute": True}])
def test_steps_are_those_of_eager_autocast(precision: str, options: dict[str, Any]) -> None:
    model = Net()
    program = compiled(model, precision, **options)
    result = program.run_local(**batch())
    loss = eager(model, 0, TYPES[precision], lambda loss: loss)
    expected = gradients_of(model)
    assert {g.dtype for g in result.gradients.values()} == {torch.float32}
    torch.testing.assert_close(dict(result.gradients), expected, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(result.loss, loss)
    report = program.verify(**batch())
    assert report.ok, report
    assert report.nearness is not None
    assert 0 < report.nearness.ours.together < 0.02


# Scalers

STEPS, INIT = 5, 2.0**16


class Run:
    """Two batches a step, two groups, clipping; `scaler` and `step` are one device's or an engine's."""

    def __init__(
        self, model: nn.Module, scaler: torch.amp.GradScaler, step: Callable[[int], Tensor], clip: Any
    ) -> None:
        weights = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
        biases = [p for p in model.parameters() if p.requires_grad and p.ndim == 1]
        self.optimizer = torch.optim.AdamW([{"params": weights}, {"params": biases, "lr": 1e-2}], lr=1e-3)
        self.model, self.scaler, self._step, self._clip = model, scaler, step, clip
        self.overflown: list[bool] = []  # of this rank's own gradients, in every step
        self.scales: list[float] = []

    def train(self, start: int, stop: int) -> None:
        for index in range(start, stop):
            for number in (2 * index, 2 * index + 1):
                self._step(number)
            self.overflown.append(not all(bool(g.isfinite().all()) for g in gradients_of(self.model).values()))
            self.scaler.unscale_(self.optimizer)
            self._clip(0.5)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            self.scales.append(self.scaler.get_scale())


OPTIONS: dict[str, Any] = {"init_scale": INIT, "growth_interval": 2}


def on_one_device() -> Run:
    model, scaler = Net(large=16.0), torch.amp.GradScaler("cpu", **OPTIONS)
    trained = [p for p in model.parameters() if p.requires_grad]
    clip = partial(nn.utils.clip_grad_norm_, trained)
    run = Run(model, scaler, lambda number: eager(model, number, torch.float16, scaler.scale), clip)
    run.train(0, STEPS)
    return run


def of_engine(model: nn.Module, engine: Any) -> Run:
    scaler = engine.scaler(**OPTIONS)
    return Run(model, scaler, lambda number: engine.step(batch(number), scaler=scaler), engine.clip_grad_norm_)


def saved_and_taken_up(make: Callable[[Program], Any], directory: Path) -> tuple[Any, ...]:
    """Weights, scales and overflows of a run that another engine has taken up in its middle."""
    runs = []
    for start, stop in ((0, 2), (2, STEPS)):
        model = Net(large=16.0)
        engine = make(compiled(model, "fp16"))
        run = of_engine(model, engine)
        if start:
            engine.load(directory, run.optimizer, extra={"scaler": run.scaler})
        run.train(start, stop)
        engine.save(directory, run.optimizer, extra={"scaler": run.scaler})
        gathered = engine.gather_state_dict()
        engine.close()
        runs.append(run)
    return gathered, [*runs[0].scales, *runs[1].scales], [*runs[0].overflown, *runs[1].overflown]


def assert_as_on_one_device(ranks: list[tuple[Any, ...]]) -> None:
    one = on_one_device()
    assert one.overflown[0], "nothing overflows"
    assert one.scales[0] < INIT
    assert one.scales[-1] > min(one.scales), "no step was taken"
    for _, scales, _ in ranks:
        assert scales == one.scales
    of_steps = list(zip(*(overflown for _, _, overflown in ranks), strict=True))
    assert [any(of) for of in of_steps] == one.overflown
    if len(ranks) > 1:
        assert any(any(of) and not all(of) for of in of_steps), "no overflow was on one rank only"
    torch.testing.assert_close(ranks[0][0], one.model.state_dict(), rtol=1e-5, atol=1e-7)


def test_scalers_in_one_process(tmp_path: Path) -> None:
    assert_as_on_one_device([saved_and_taken_up(Program.local_engine, tmp_path)])


def rank_main(directory: str) -> tuple[Any, ...]:
    return saved_and_taken_up(Program.engine, Path(directory))


def test_an_overflow_on_one_rank_is_that_of_all(tmp_path: Path) -> None:
    assert_as_on_one_device(run_processes(2, rank_main, str(tmp_path)))
