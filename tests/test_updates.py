"""Forwards that write into their own parameters and buffers: once in a step, as one device does for the whole batch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, spectral_norm

import fxpipe
from fxpipe.errors import CaptureError
from tests.distributed import run_processes
from tests.own_models import SEED, WIDTH, OneDevice, batch
from tests.test_own_model import LINE, ROWS, Layout, assert_exact, on_threads, program


class Unit(nn.Linear):
    """Its weight has rows of length one from the first forward in training on."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.weight.div_(self.weight.norm(dim=1, keepdim=True))
        return F.linear(x, self.weight / self.weight.norm(dim=1, keepdim=True), self.bias)


class Writes(nn.Module):
    """All kinds of writes: trained and frozen parameters, power iterations, counts, averages that forward reads or
    not, statistics of the batch, what is drawn."""

    def __init__(self, trained: str = "all") -> None:
        super().__init__()
        torch.manual_seed(0)
        spectral = spectral_norm(nn.Linear(WIDTH, WIDTH)), parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.layers = nn.ModuleList([Unit(WIDTH, WIDTH), *spectral, nn.Linear(WIDTH, WIDTH), Unit(WIDTH, WIDTH)])
        self.down = nn.ModuleList(Unit(WIDTH, 2, bias=False) for _ in self.layers)
        self.up = nn.ModuleList(nn.Linear(2, WIDTH, bias=False) for _ in self.layers)
        self.teacher = Unit(WIDTH, WIDTH).requires_grad_(False)
        self.average = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.shadow = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("warmth", torch.ones(()))
        self.register_buffer("mean", torch.zeros(WIDTH, WIDTH))
        self.register_buffer("unread", torch.zeros(WIDTH, WIDTH))
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.register_buffer("samples", torch.zeros((), dtype=torch.int64))
        self.register_buffer("drawn", torch.zeros(2, WIDTH))
        self.norm = nn.InstanceNorm1d(WIDTH, track_running_stats=True)
        self.drop = nn.Dropout(0.2)
        self.double()
        if trained == "adapters":
            self.layers.requires_grad_(False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        warmth = self.warmth.clone()
        self.count += 1
        with torch.no_grad():
            self.average.weight.lerp_(self.layers[3].weight, 0.2)
            torch._foreach_lerp_([self.shadow.bias], [self.layers[4].bias], 0.2)
            self.mean.mul_(0.9).add_(self.layers[3].weight, alpha=0.1)
        h = x
        for layer, down, up in zip(self.layers, self.down, self.up, strict=True):
            h = h + warmth * self.drop(F.silu(layer(h) + up(down(h))))
        self.seen.mul_(0.9).add_(h.detach().square().mean((0, 1)).sqrt(), alpha=0.1)
        self.samples += len(x)
        self.drawn[0].copy_(F.dropout(h.detach().mean((0, 1)), 0.5))
        self.drawn[1].copy_(torch.randn(WIDTH, dtype=x.dtype))
        h = h + self.norm(h.mT).mT + F.linear(h, self.mean) + self.average(h) + self.teacher(x)
        self.warmth.mul_(0.9)
        self.unread.lerp_(self.up[4].weight.detach() @ self.teacher.weight[:2], 0.1)
        return 20 * F.mse_loss(h, target) / self.count


REPLICAS = {"schedule": "interleaved", "data_parallel": 2, "stages": 4, "microbatches": 4}


@pytest.fixture(autouse=True)
def _trains_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.test_own_model.Adapted", Writes)


@pytest.mark.parametrize(
    ("world_size", "layouts", "trained"),
    [
        (2, [LINE | {"recompute": True}, {"schedule": "wave"}], "all"),  # the second holds other layers on a rank
        (3, [{"schedule": "zero-bubble"}], "adapters"),
        (4, [{"schedule": "wave", "data_parallel": 2}], "all"),
        (2, [REPLICAS | {"shard": "none"}, LINE], "adapters"),
        (2, [LINE, REPLICAS | {"shard": "weights"}], "all"),
        (4, [{"schedule": "zero-bubble", "data_parallel": 2, "microbatches": 4, "shard": "all"}], "all"),
    ],
)
def test_a_users_script_is_exact(world_size: int, layouts: list[Layout], trained: str) -> None:
    assert_exact(world_size, layouts, trained, whole=False)


def rank_main() -> list[Any]:
    model = Writes()
    engine = program(model, 2, ROWS[0], LINE).engine(seed=SEED)
    losses = [float(engine.step(batch(number, ROWS[0]))) for number in range(3)]
    engine.sync_model()
    engine.close()
    return [losses, model.state_dict()]


def test_over_gloo_all_ranks_have_what_was_written() -> None:
    model = Writes()
    one = OneDevice(model)
    losses = [float(one.step(batch(number, ROWS[0]))) for number in range(3)]
    first, second = run_processes(2, rank_main)
    torch.testing.assert_close(first, [losses, model.state_dict()], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(second, first, rtol=0.0, atol=0.0)


def test_a_run_is_taken_up_and_weights_are_let_go(tmp_path: Path) -> None:
    """A smaller batch, too."""

    def body(model: nn.Module, engines: Any) -> list[Any]:
        engine, found = engines[0](), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def step(number: int) -> None:
            engine.step({name: value[: 4 - number % 2] for name, value in batch(number, ROWS[0]).items()})
            optimizer.step()
            optimizer.zero_grad()

        for number in range(3):
            step(number)
            engine.save(tmp_path, optimizer)
        found.append(engine.gather_state_dict())
        engine.load(tmp_path / "step-1", optimizer)
        engine.release()
        step(1)
        step(2)
        return [*found, engine.gather_state_dict()]

    (first, second), _ = on_threads(2, [LINE], body)
    torch.testing.assert_close(first, second, rtol=0.0, atol=0.0)
    model = Writes()
    engine, optimizer = OneDevice(model), torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(3):
        engine.step({name: value[: 4 - number % 2] for name, value in batch(number, ROWS[0]).items()})
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(first, model.state_dict(), rtol=1e-10, atol=1e-12)


class Normed(Writes):
    """Statistics of the whole batch, twice of one norm, which are read when they are written."""

    def __init__(self, trained: str = "all") -> None:
        super().__init__(trained)
        self.norms = nn.ModuleList([nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH, momentum=0.3)]).double()
        self.register_buffer("latest", torch.zeros(4, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for norm in (*self.norms, self.norms[1]):
            x = x + norm(self.layers[3](x).mT).mT
        self.latest.copy_(torch.cat([x.detach().amax(1), self.latest])[:4])
        return super().forward(x / (1 + self.norms[1].running_var), target)


WHOLE: Layout = {"microbatches": 1, "schedule": "gpipe"}


@pytest.mark.parametrize(("world_size", "trained"), [(2, "all"), (3, "adapters")])
def test_statistics_of_the_whole_batch_are_exact_in_one_micro_batch(
    world_size: int, trained: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.test_own_model.Adapted", Normed)
    assert_exact(world_size, [WHOLE, WHOLE | {"recompute": True}], trained, whole=False)


def test_statistics_of_the_whole_batch_are_refused_in_several() -> None:
    with pytest.raises(fxpipe.CompileError, match=r"norms.0: aten.batch_norm.*whole batch.*or pass microbatches=1"):
        program(Normed(), 2, ROWS[0], LINE)


class Bare(nn.Module):
    """A norm of what is normalised, whose mean is rounding noise, and a spectrum's average."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("spectrum", torch.zeros(WIDTH, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers(x)
        self.spectrum.lerp_(torch.fft.fft(h.detach()).mean(0), 0.1)
        return F.mse_loss(self.norm(h), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_means_of_what_is_normalised_are_noise(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, model = torch.randn(64, WIDTH, dtype=dtype), Bare().to(dtype)
    model.spectrum = model.spectrum.to(dtype.to_complex())
    report = fxpipe.compile(model, 2, example_inputs=(x,), microbatches=1).verify(x)
    assert report.ok, report


class Follows(Writes):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        self.seen.lerp_(x.std((0, 1)) + self.up[0].weight.detach().amax(1), 0.1)
        return super().forward(x, target)


class Chooses(Follows):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = self.layers[3](x).detach()
        self.seen.copy_(h[h[..., 0] > 0].cumsum(0).amax(0))
        return super().forward(x, target)


class Largest(Follows):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        self.seen.copy_(self.layers[3](x).detach().amax((0, 1)))
        return super().forward(x, target)


def test_what_is_made_of_inputs_alone_is_seen_whole() -> None:
    report = program(Follows(), 2, ROWS[0], LINE).verify(**batch(0, ROWS[0]))
    assert report.ok, report
    assert "seen, as written" in report.outputs


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (Chooses, r"writes into 'seen' by tensors whose size depends on what others hold; keep them of fixed size"),
        (Largest, r"amax.*it combines.*samples|amax.*batch.*or pass microbatches=1"),
    ],
)
def test_what_no_parts_make_is_not_written(model: type[Writes], says: str) -> None:
    with pytest.raises(fxpipe.FxpipeError, match=says):
        program(model(), 2, ROWS[0], LINE)


class Encoded(Writes):
    """A frozen encoder before it, whose own weights are written to, or not."""

    def __init__(self, layer: type[nn.Linear]) -> None:
        super().__init__()
        self.encoder = nn.Sequential(layer(WIDTH, 256), nn.SiLU(), layer(256, WIDTH)).double().requires_grad_(False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return super().forward(self.encoder(x), target)


@pytest.mark.parametrize("layer", [Unit, nn.Linear])
def test_frozen_work_that_reads_what_is_written_is_not_done_a_step_early(layer: type[nn.Linear]) -> None:
    models = [Encoded(layer) for _ in range(2)]
    made = program(models[0], 2, ROWS[0], LINE | {"fill": "idle"})
    assert (made.plan.steady is None) == (layer is Unit)
    assert any("reads encoder.0.weight, " in note for note in made.plan.notes) == (layer is Unit)
    engine, one = made.local_engine(seed=SEED), OneDevice(models[1])
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    batches = [batch(number, ROWS[0]) for number in range(3)]
    losses = [float(loss) for loss in engine.train(batches, optimizers[0])]
    for number, loss in enumerate(losses):
        assert loss == pytest.approx(float(one.step(batches[number])), rel=1e-10)
        optimizers[1].step()
        optimizers[1].zero_grad()
    torch.testing.assert_close(*(model.state_dict() for model in models), rtol=1e-10, atol=1e-12)


class Returns(Writes):
    def forward(self, x: Tensor, target: Tensor) -> Any:
        loss = super().forward(x, target)
        return loss, {"mean": self.mean, "count": self.count, "first": self.layers[0].weight.detach()}


def test_what_is_written_may_be_returned() -> None:
    made = program(Returns(), 2, ROWS[0], LINE)
    report = made.verify(**batch(0, ROWS[0]))
    assert report.ok, report
    assert report.outputs.keys() > {"mean", "count", "first", "mean, as written", "layers.0.weight, as written"}


def test_a_step_written_twice_in_some_steps_is_refused() -> None:
    with pytest.raises(fxpipe.CompileError, match=r"writes into 'layers.0.weight', once more where a self-conditioned"):
        fxpipe.compile(fxpipe.SelfConditioning(Writes()), 2, example_inputs=batch(0, ROWS[0]))


class Shared(nn.Module):
    """A buffer in the memory of another tensor."""

    def __init__(self, other: Callable[["Shared"], Tensor]) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(WIDTH, WIDTH), torch.zeros(WIDTH)
        self.register_buffer("written", other(self))

    def forward(self, x: Tensor) -> Tensor:
        self.written.add_(1)
        return (self.layer(x) * self.table).mean()


@pytest.mark.parametrize("other", [lambda m: m.layer.bias.detach(), lambda m: m.table, lambda m: m.table[1:]])
def test_what_others_show_is_not_written(other: Callable[[Shared], Tensor]) -> None:
    with pytest.raises(CaptureError, match=r"writes into 'written', in whose memory '.*' is, too: clone it"):
        fxpipe.compile(Shared(other), 2, example_inputs=(torch.zeros(4, WIDTH),))
