"""Operations of torch.nn and torch.nn.functional in a compiled step: exact on two ranks and two micro-batches."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

import fxpipe
from fxpipe.errors import CompileError
from fxpipe.plan import ops
from tests.steps import exact

Body = Callable[[nn.Module, Tensor, Tensor], Any]
DTYPE = torch.float64


class Operation(nn.Module):
    """mse(b(body(m, a(x), y)), y) on [batch, 12]; what body makes of a sample is flattened."""

    def __init__(self, body: Body, make: Callable[[], nn.Module] = nn.Identity) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = body
        self.a, self.m = nn.Linear(12, 12).to(DTYPE), make().to(DTYPE)
        with torch.no_grad():
            self.b = nn.Linear(self.middle(*batch()).shape[1], 3).to(DTYPE)

    def middle(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.body(self.m, self.a(x), y)
        out = out[0] if isinstance(out, tuple) else out
        return (torch.view_as_real(out.resolve_conj()) if out.is_complex() else out).flatten(1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.b(self.middle(x, y)), y[:, :3])


def batch(size: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(size, 12, generator=generator, dtype=DTYPE) for _ in range(2))
    return x, y


def ids(y: Tensor) -> Tensor:
    """[batch, 6], below 4."""
    return (y[:, :6].abs() * 2).long().clamp(max=3)


def spd(h: Tensor) -> Tensor:
    """[batch, 3, 3], positive definite."""
    h = h.reshape(-1, 4, 3)
    return h.mT @ h + 2 * torch.eye(3, dtype=DTYPE)


def complexes(h: Tensor) -> Tensor:
    return torch.view_as_complex(h.reshape(-1, 6, 2))


def spectrum(h: Tensor) -> Tensor:
    return torch.stft(h, 4, 2, window=torch.hann_window(4, dtype=DTYPE), return_complex=True)


def diagonal(h: Tensor) -> Tensor:
    h = h.reshape(-1, 3, 4) * 1
    h.diagonal(dim1=1, dim2=2).mul_(2)
    return h


def one_by_one(h: Tensor, y: Tensor) -> Tensor:
    """Operations of lists of tensors."""
    parts = [part.clone() for part in h.split(4, 1)]
    torch._foreach_div_(parts, torch._foreach_add(torch._foreach_cos(y.split(4, 1)), 2.0))
    torch._foreach_addcmul_(parts, [*y.split(4, 1)], [*h.split(4, 1)], [0.1, 0.2, 0.3])
    with torch.no_grad():
        weights = torch._foreach_addcdiv(parts, [*y.split(4, 1)], parts, torch.tensor([0.1, 0.2, 0.3]))
    torch._foreach_mul_(parts, weights)
    larger = torch._foreach_maximum(self=parts, scalars=[-0.2, -0.1, 0.0])
    return torch.cat(larger + (y,), 1)  # noqa: RUF005 (a tuple, as torch's)


def viewed_without_gradients(m: nn.Module, h: Tensor, y: Tensor) -> Tensor:
    """Torch says of a view under no_grad that it requires grad."""
    with torch.no_grad():
        halves = h.unflatten(1, (2, 6))
    return m(h) * halves.flatten(1)  # type: ignore[no-any-return]


def sequence(m: nn.Module, h: Tensor, y: Tensor) -> Any:
    return m(h.view(-1, 2, 6))


OPERATIONS: dict[str, tuple[Body, Callable[[], nn.Module]]] = {
    "LSTM": (sequence, lambda: nn.LSTM(6, 2, batch_first=True)),
    "GRU, last state": (lambda m, h, y: m(h.view(-1, 3, 4).transpose(0, 1))[1].transpose(0, 1), lambda: nn.GRU(4, 2)),
    "LSTM with dropout": (sequence, lambda: nn.LSTM(6, 2, 2, batch_first=True, dropout=0.4)),
    "RNN with dropout": (sequence, lambda: nn.RNN(6, 2, 2, batch_first=True, dropout=0.4, bidirectional=True)),
    "GRUCell": (lambda m, h, y: m(h, y[:, :3]), lambda: nn.GRUCell(12, 3)),
    "LSTMCell": (lambda m, h, y: m(h)[1], lambda: nn.LSTMCell(12, 3)),
    "lists of tensors": (lambda m, h, y: one_by_one(h, y), nn.Identity),
    "views under no_grad": (viewed_without_gradients, lambda: nn.Linear(12, 12)),
    "Bilinear": (lambda m, h, y: m(h, y), lambda: nn.Bilinear(12, 12, 2)),
    "RReLU": (lambda m, h, y: m(h), nn.RReLU),
    "RReLU in evaluation": (lambda m, h, y: m(h), lambda: nn.RReLU().eval()),
    "AlphaDropout": (lambda m, h, y: m(h), lambda: nn.AlphaDropout(0.3)),
    "FeatureAlphaDropout": (lambda m, h, y: m(h.view(-1, 3, 4)), nn.FeatureAlphaDropout),
    "stft": (lambda m, h, y: spectrum(h), nn.Identity),
    "hfft": (lambda m, h, y: torch.fft.hfft(complexes(h)), nn.Identity),
    "ihfft2": (lambda m, h, y: torch.fft.ihfft2(h.view(-1, 3, 4)), nn.Identity),
    "conjugates": (lambda m, h, y: complexes(h).conj() * complexes(y) + complexes(h).conj().imag, nn.Identity),
    "adjoint": (lambda m, h, y: complexes(h).view(-1, 2, 3).mH, nn.Identity),
    "rot90": (lambda m, h, y: h.view(-1, 3, 4).rot90(3, (2, 1)), nn.Identity),
    "diag_embed": (lambda m, h, y: torch.diag_embed(h.view(-1, 3, 4), 1, 1, 2), nn.Identity),
    "diagonal_scatter": (lambda m, h, y: h.view(-1, 3, 4).diagonal_scatter(y[:, :3], 0, 1, 2), nn.Identity),
    "diagonal in place": (lambda m, h, y: diagonal(h), nn.Identity),
    "solve": (lambda m, h, y: torch.linalg.solve(spd(h), y.view(-1, 3, 4)), nn.Identity),
    "take_along_dim": (lambda m, h, y: h.view(-1, 3, 4).take_along_dim(ids(y)[:, None, :4], 2), nn.Identity),
    "pad_sequence": (lambda m, h, y: pad_sequence([h.mT, y.mT[:8]], True, 0.5).movedim(2, 0), nn.Identity),
    "pad_sequence, before": (
        lambda m, h, y: pad_sequence([h.mT, y.mT[:8]], padding_side="left").movedim(2, 0),
        nn.Identity,
    ),
    "bincount": (
        lambda m, h, y: h * (1 + torch.bincount(ids(y)[:, 0], minlength=12)) + ids(y)[:, 1].int().bincount(y[:, 0], 12),
        nn.Identity,
    ),
    "kron": (lambda m, h, y: torch.kron(h.view(-1, 3, 4), torch.eye(2, dtype=DTYPE)), nn.Identity),
    "gaussian_nll": (
        lambda m, h, y: F.gaussian_nll_loss(h, h.detach().cos(), h.exp(), reduction="none", full=True),
        nn.Identity,
    ),
    "multi_dot": (lambda m, h, y: torch.linalg.multi_dot([h, h.new_ones(12, 3), h.new_ones(3, 2)]), nn.Identity),
    "max_unpool2d": (
        lambda m, h, y: F.max_unpool2d(*F.max_pool2d(h.view(-1, 1, 2, 6), 2, return_indices=True), [2, 2]),
        nn.Identity,
    ),
    "affine_grid": (lambda m, h, y: F.affine_grid(h.view(-1, 2, 2, 3)[:, 0], [h.shape[0], 1, 2, 2]), nn.Identity),
    "quantiles": (lambda m, h, y: h.quantile(torch.tensor([0.2, 0.7], dtype=DTYPE), 1).mT, nn.Identity),
    "index_reduce": (lambda m, h, y: h.index_reduce(1, torch.tensor([0, 2]), h[:, :2], "prod"), nn.Identity),
    "searchsorted by row": (
        lambda m, h, y: h * torch.searchsorted(y.sort(1).values.contiguous(), y.contiguous()),
        nn.Identity,
    ),
    "multinomial": (lambda m, h, y: h * torch.multinomial(torch.ones(9), h.shape[0], True)[:, None], nn.Identity),
    "multinomial by sample": (lambda m, h, y: h.gather(1, torch.multinomial(y.abs(), 3)), nn.Identity),
    "beta": (lambda m, h, y: h * torch.distributions.Beta(2.0, 3.0).sample((h.shape[0], 1)), nn.Identity),
    "poisson": (lambda m, h, y: h * torch.poisson(torch.full((h.shape[0], 1), 3.0)), nn.Identity),
    "bernoulli in place": (lambda m, h, y: h * torch.empty_like(h).bernoulli_(), nn.Identity),
}


TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
SINCE = {"quantiles": (2, 12), "beta": (2, 13)}  # refused with an older torch


@pytest.mark.filterwarnings(
    "ignore:RNN module weights", "ignore:Default grid_sample", "ignore:dropout option", "ignore:index_reduce"
)
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_are_exact(name: str) -> None:
    if TORCH < SINCE.get(name, TORCH):
        pytest.skip("that torch reads the values of quantiles, or has no shapes for gamma variates")
    body, make = OPERATIONS[name]
    program = exact(Operation(body, make), batch(), microbatches=2, schedule="1f1b")
    assert program.capture.batch


def one_row(m: nn.Module, h: Tensor, y: Tensor) -> Tensor:
    return F.affine_grid(h.view(-1, 2, 2, 3)[:, 0], [h.shape[0], 1, 1, 2], False).flatten(1)


REFUSED: dict[str, tuple[Body, Callable[[], nn.Module], str]] = {
    "bags": (
        lambda m, h, y: m(ids(y)) + h,
        lambda: nn.EmbeddingBag(4, 12),
        r"module m: aten.embedding_bag.*lengths of its bags.*nn.Embedding of \[batch, length\]",
    ),
    "frames": (
        lambda m, h, y: torch.istft(spectrum(h), 4, 2, window=torch.hann_window(4, dtype=DTYPE)),
        nn.Identity,
        r"torch.istft decides by the sums of its windows.*functional.fold",
    ),
    "sparse gradients": (
        lambda m, h, y: m(ids(y)[:, :1]).flatten(1) + h,
        lambda: nn.Embedding(4, 12, sparse=True),
        r"module m: aten.embedding.*sparse=True.*sparse=False",
    ),
    "a grid of one row": (one_row, nn.Identity, r"aten.affine_grid_generator.*no rule says whether it keeps"),
    "rates of each sample": (
        lambda m, h, y: h * torch.poisson(y.abs()),
        nn.Identity,
        r"random operation aten.poisson.*depends on a tensor's values",
    ),
    "a table's norm": (
        lambda m, h, y: m(ids(y)[:, :1]).flatten(1) + h,
        lambda: nn.Embedding(4, 12, max_norm=1.0),
        r"module m: aten.embedding_renorm_.*changes the parameter 'm.weight'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_operations_that_are_refused(name: str) -> None:
    body, make, says = REFUSED[name]
    with pytest.raises((CompileError, fxpipe.errors.CaptureError), match=says):
        fxpipe.compile(Operation(body, make), 2, example_inputs=batch(), microbatches=2)


def test_what_torch_runs_on_values_alone_is_told_as_such() -> None:
    with pytest.raises(CompileError, match=r"does not run it, or its gradient, .*without values"):
        fxpipe.compile(Operation(one_row, nn.Identity), 2, example_inputs=batch(), microbatches=1)


class ComplexChain(nn.Module):
    """Complex values between all layers, conjugated without a copy."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(12, 12, dtype=torch.complex128)) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = torch.complex(x, y)
        for weight in self.weights:
            z = (z @ weight).conj()
        return F.mse_loss(z.real + z.conj().imag, y)


def test_messages_hold_conjugates_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Tensor] = []
    send = ops.send

    def spy(transport: Any, value: Tensor, dst: int, edge: int) -> None:
        sent.append(value)
        send(transport, value, dst, edge)

    monkeypatch.setattr(ops, "send", spy)
    exact(ComplexChain(), batch(), schedule="rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1")
    assert any(value.is_complex() for value in sent)
    assert not any(value.is_conj() or value.is_neg() for value in sent)


@torch.library.custom_op("fxpipe_tests::doubled_tanh", mutates_args=())
def doubled_tanh(x: Tensor) -> Tensor:
    return 2 * x.tanh()


doubled_tanh.register_fake(torch.empty_like)
doubled_tanh.register_autograd(
    lambda ctx, gradient: gradient * (2 - ctx.saved_tensors[0] ** 2 / 2),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


def test_operations_of_the_user_run_in_one_microbatch() -> None:
    step = Operation(lambda m, h, y: doubled_tanh(h))
    with pytest.raises(
        CompileError, match=r"fxpipe_tests.doubled_tanh.*no rule says whether it keeps the samples apart"
    ):
        fxpipe.compile(step, 2, example_inputs=batch(), microbatches=2)
    exact(step, batch(), microbatches=1)
