"""Steps in bfloat16 and float16: eager autocast's numbers, judged by their distance to float32; scalers."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxpipe
from fxpipe.capture.randomness import SeededDraws
from fxpipe.errors import CaptureError, CompileError, RunError
from fxpipe.plan.rank_program import RankProgram
from fxpipe.plan.staged import runs_within
from fxpipe.program import Program
from fxpipe.run.nearness import Distance, Nearness, noise_of
from fxpipe.run.one_device import IN_FLOAT64, StepResult, one_device, one_device_wider
from fxpipe.run.verification import Verification
from tests.distributed import run_processes
from tests.test_memory import IDLE_NETWORK, Wide, measured_peaks

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


@pytest.mark.parametrize("precision", TYPES)
def test_blocks_that_are_computed_again_change_no_bit(precision: str) -> None:
    """Every second block; as near to float32 as eager autocast is, which computes none again."""
    kept = compiled(Net(), precision)
    blocks = kept.plan.staged.boundaries[-1]
    runs = runs_within([(block, block + 1) for block in range(1, blocks, 2)], kept.plan.staged.boundaries)
    plan = replace(kept.plan, staged=replace(kept.plan.staged, recompute=runs))
    again = compiled(Net(), precision, microbatches=None, schedule="auto", plan=plan)
    assert len(again.plan.staged.recompute) > 1
    assert sum(again.simulate().peak_bytes) < sum(kept.simulate().peak_bytes)
    found, expected = again.run_local(**batch()), kept.run_local(**batch())
    torch.testing.assert_close(dict(found.gradients), dict(expected.gradients), rtol=0.0, atol=0.0)
    model = Net()
    eager(model, 0, TYPES[precision], lambda loss: loss)
    torch.testing.assert_close(dict(found.gradients), gradients_of(model), rtol=1e-6, atol=1e-8)
    report = again.verify(**batch())
    assert report.ok, report
    assert report.nearness is not None
    assert report.nearness.ours.together <= 1.2 * report.nearness.own.together


class Kinds(Net):
    """The frozen layer in bfloat16, and an autocast of forward's own around another."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen.bfloat16()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.frozen(x.to(self.frozen.weight.dtype)).to(x.dtype)
        with torch.autocast(x.device.type, torch.bfloat16):
            h = self.first(x)
        return F.mse_loss(self.last(F.silu(h.float())), y)


def test_models_of_several_types() -> None:
    model = Kinds()
    program = compiled(model, None)
    result, loss = program.run_local(**batch()), model(**batch())
    loss.backward()
    torch.testing.assert_close(dict(result.gradients), gradients_of(model), rtol=2e-2, atol=1e-4)
    torch.testing.assert_close(result.loss, loss.detach())
    assert program.verify(**batch()).ok
    low = Net().bfloat16()
    report = (program := compiled(low, None, batch(dtype=torch.bfloat16))).verify(**batch(dtype=torch.bfloat16))
    assert report.ok, report
    assert program.run_local(**batch(dtype=torch.bfloat16)).loss.dtype == torch.bfloat16


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(6, 6), nn.LSTM(6, 6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.layers(self.first(x))[0], x)


def test_recurrent_layers_in_float32_are_exact() -> None:
    x = torch.randn(4, 3, 6)
    report = fxpipe.compile(Recurrent(), 2, example_inputs=(x,), microbatches=2, budget=0).verify(x)
    assert report.ok, report


class LossCast(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y).bfloat16()


def test_gradients_that_no_lower_precision_reaches_may_round_as_float32_does() -> None:
    """One device's own are those of float32, bit by bit; so is a micro-batch's share, a half."""
    report = compiled(LossCast(), None, microbatches=2).verify(**batch())
    assert report.nearness is not None
    assert report.nearness.own.together == 0.0
    assert 0.0 < report.nearness.ours.together < 1e-6
    assert report.ok, report
    assert "3 times its own, or 0.0001 where its own is 0" in str(report)


def test_what_a_lower_precision_reaches_may_not_round_as_float32_does() -> None:
    """However near to float32 one device is, and whatever of another type is not reached."""

    def distance(a: float, b: float) -> Distance:
        return Distance(0.0, {"a": a, "b": b}, max(a, b), {"kept": a})

    found = Nearness(distance(9e-5, 9e-5), distance(1e-6, 0.0), {"a": 5e-2, "b": 1e-4, "output kept": 5e-2})
    assert found.farther == {"a": (9e-5, 3e-6), "output kept": (9e-5, 3e-6)}
    assert "or 0.0001 where its own is 0" in str(found)
    assert " where " not in str(replace(found, own=distance(1e-6, 1e-6)))


@pytest.mark.parametrize(("make", "precision"), [(Net, "fp16"), (Kinds, None)])
def test_captures_on_meta_are_those_of_weights(make: type[nn.Module], precision: str | None) -> None:
    with torch.device("meta"):
        model = make()
    found = [compiled(one, precision) for one in (model, make())]
    assert found[0].costed.fingerprint == found[1].costed.fingerprint
    assert found[0].traffic().total_bytes == found[1].traffic().total_bytes
    whole = compiled(Net(), "fp32").traffic().total_bytes
    assert found[0].traffic().total_bytes < 0.6 * whole or precision is None


def test_casts_of_weights_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    program = compiled(Wide(), "bf16", Wide().example_inputs(9), schedule="gpipe")
    predicted = program.simulate(cluster=IDLE_NETWORK, optimizer_bytes=0)
    measured = measured_peaks(program, Wide().example_inputs(9), monkeypatch)
    assert list(predicted.peak_bytes) == pytest.approx(measured, rel=0.1)
    saved = {tuple(node.meta["val"].shape) for rank in program.step.programs for node in saved_by(rank)}
    assert saved
    assert (16, 16) not in saved


def saved_by(program: RankProgram) -> list[fx.Node]:
    """What forwards keep for backwards."""
    forwards = [graph for name, graph in program.modules.items() if "forward" in name]
    return [node for graph in forwards for node in graph.output_node().args[0][1]]  # type: ignore[index, union-attr]


def test_a_wrong_gradient_is_farther_from_float32_than_one_device() -> None:
    wide = {name: torch.randn(8, 8) for name in ("a.weight", "b.weight")}
    loss = torch.tensor(1.0)
    own = {name: (g * (1 + 0.01 * torch.randn(8, 8))) for name, g in wide.items()}

    def distance(gradients: dict[str, Tensor]) -> Distance:
        return Distance.of(StepResult(loss, gradients), StepResult(loss, wide))

    for name, change, faults in (
        ("a.weight", lambda g: g * 1.01, []),
        ("a.weight", lambda g: 2 * g, ["a.weight"]),
        ("b.weight", lambda g: g.roll(1, 0), ["b.weight"]),
        ("b.weight", lambda g: g * torch.nan, ["b.weight"]),
    ):
        ours = {**wide, name: change(wide[name])}
        distances = Nearness(distance(ours), distance(own))
        assert list(distances.farther) == faults
        text = str(Verification(1.0, 1.0, 0.0, {}, 5e-2, nearness=distances))
        assert ("FARTHER FROM float32" in text) == bool(faults)
        assert all(f"  {fault}: " in text for fault in faults)
    missing = Nearness(distance({"a.weight": own["a.weight"]}), distances.own)
    assert list(missing.farther) == ["b.weight"]


class Noisy(nn.Module):
    """A bias before a norm, whose gradient is rounding noise."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(8, 8), nn.SiLU(),
            nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(8, 8), nn.SiLU(), nn.Conv2d(8, 3, 3, padding=1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.layers(x + 0.1 * torch.randn_like(x)), x)


def test_gradients_that_are_noise_are_judged_by_their_distance_to_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    x, model = torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(0)), Noisy()
    program = fxpipe.compile(model, 2, example_inputs=(x,), microbatches=3, budget=0)
    report = program.verify(x)
    assert report.ok, report
    assert not report.max_grad_error <= 1e-4
    assert str(report).startswith("as near to float64 as one device")

    def wrong(given: Any) -> Any:
        by_ten_thousandths = {name: 1.0002 * g for name, g in given.gradients.items()}
        return replace(given, gradients=by_ten_thousandths)

    right = fxpipe.Program._run_local
    monkeypatch.setattr(fxpipe.Program, "_run_local", lambda *args: wrong(right(*args)))
    report = program.verify(x)
    assert not report.ok
    assert str(report).startswith("NOT EXACT")


class Asks(Noisy):
    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.float32
        return super().forward(x)


def test_what_float64_does_not_tell_is_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    loss, g = torch.tensor(1.0), torch.randn(8)
    own, wide = StepResult(loss, {"a": g, "b": g}), StepResult(loss.double(), {"a": g.double()})
    for ours in (own, replace(own, gradients={"a": g})):
        assert noise_of(ours, own, wide, ["b"]) is None
    x, right = torch.randn(6, 3, 8, 8), fxpipe.Program._run_local
    program = fxpipe.compile(Asks(), 2, example_inputs=(x,), microbatches=3, budget=0)

    def wrong(*args: Any) -> StepResult:
        found = right(*args)
        return replace(found, gradients={name: 2 * g for name, g in found.gradients.items()})

    monkeypatch.setattr(fxpipe.Program, "_run_local", wrong)
    assert str(program.verify(x)).startswith("NOT EXACT")


def writes_into_zeros(h: Tensor) -> Tensor:
    out = torch.zeros(h.shape)
    out[:, 1:] = h[:, 1:]
    return out


@pytest.mark.parametrize(
    "middle",
    [
        writes_into_zeros,
        lambda h: h + torch.randn(h.shape, dtype=h.dtype),
        lambda h: F.alpha_dropout(h, 0.3, training=True),
        lambda h: h * torch.multinomial(h.detach().softmax(1), 1),
    ],
)
def test_float64_computes_the_same_of_the_same_draws(middle: Callable[[Tensor], Tensor]) -> None:
    class Middle(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(middle(self.first(x)), y)

    draws = SeededDraws(0, 0, torch.device("cpu"))
    own = one_device(Middle(), (), batch(), draws)
    found = Distance.of(own, one_device_wider(Middle(), (), batch(), draws, IN_FLOAT64))
    assert max(found.loss, *found.gradients.values()) < 1e-5


class Foreign(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return super().forward(x, y)


@pytest.mark.parametrize(
    ("make", "precision", "says"),
    [
        (Net, "fp8", "precision='fp8'; give one of 'fp32', 'bf16', 'fp16'"),
        (lambda: Net().double(), "bf16", "no operation computes in torch.bfloat16: autocast leaves torch.float64"),
        (Foreign, None, r"opens torch.autocast\('cuda'\), and the ranks run on 'cpu', where that casts nothing"),
    ],
)
def test_refusals(make: Callable[[], nn.Module], precision: str, says: str) -> None:
    model = make()
    with pytest.raises((CompileError, CaptureError), match=says):
        compiled(model, precision, batch(dtype=next(model.parameters()).dtype))


def test_only_scalers_of_engines_are_taken(tmp_path: Path) -> None:
    program = compiled(Net(), "fp16")
    assert "'cpu', loss_scale)" in (program.dump(tmp_path) / "rank_1.py").read_text().replace('"', "'")
    engine = program.local_engine()
    with pytest.raises(RunError, match=r"torch.amp.grad_scaler.GradScaler, which sees .*use engine.scaler\(\)"):
        engine.step(batch(), scaler=torch.amp.GradScaler("cpu"))  # type: ignore[arg-type]
    engine = compiled(Net(), "bf16").local_engine()
    with pytest.raises(RunError, match="no gradient of this step is in float16"):
        engine.scaler(enabled=True)
    assert not engine.scaler().is_enabled()
    engine = compiled(Net().half(), None, batch(dtype=torch.float16)).local_engine()
    says = r"\d+ trained weights \(\w.*\) are in float16, whose gradients no scaler takes"
    with pytest.warns(UserWarning, match=says):
        assert not engine.scaler().is_enabled()
    with pytest.raises(RunError, match=says):
        engine.scaler(enabled=True)


def test_a_weight_in_float16_that_is_read_without_gradients_scales_as_a_frozen_one() -> None:
    class Encoded(Net):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Linear(WIDTH, WIDTH).half()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            with torch.no_grad():
                y = self.encoder(y.half()).float()
            return super().forward(x, y)

    engine = compiled(Encoded(), "fp16").local_engine()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert engine.scaler(enabled=True).is_enabled()


def test_a_step_under_an_autocast_is_refused() -> None:
    engine = compiled(Net(), "bf16").local_engine()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RunError, match=r"a step under torch.autocast: its"):
        engine.step(batch())


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


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_training_with_a_scaler(default: torch.dtype, request: pytest.FixtureRequest) -> None:
    model = Net(large=16.0)
    engine = compiled(model, "fp16").local_engine()
    request.addfinalizer(partial(torch.set_default_dtype, torch.get_default_dtype()))
    torch.set_default_dtype(default)  # as a script may, for what it computes itself
    optimizer, scaler = torch.optim.SGD(model.parameters(), 1e-2), engine.scaler(init_scale=INIT)
    before = [p.detach().clone() for p in model.parameters()]
    training = engine.train(map(batch, range(2)), optimizer, max_norm=1.0, scaler=scaler)
    next(training)
    assert scaler.get_scale() == INIT / 2
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True)), "an overflow was taken"
    scaler.update(2.0**8)
    assert len(list(training)) == 1
    assert not torch.equal(before[-1], [*model.parameters()][-1])
