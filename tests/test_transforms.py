"""Transforms inside forward: vmap, jvp and grad of functions, exact as any other operation, or refused."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, grad_and_value, jacrev, jvp, vjp
from torch.nn import functional as F

import fxpipe
from fxpipe.capture.calls import Calls
from fxpipe.capture.formulas import EXACT, IN_A_TRACE
from fxpipe.capture.transforms import exact_transforms
from fxpipe.errors import CaptureError, CompileError
from tests.steps import batch, exact


class Net(nn.Module):
    """A network of x and time; `loss` is a function of it, x and y."""

    def __init__(self, loss: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.loss = loss
        self.first, self.norm, self.last = nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 4)
        self.double()

    def run(self, x: Tensor, time: Tensor) -> Tensor:
        h = F.silu(self.norm(self.first(torch.cat([x, time[:, None]], 1))))
        return x + self.last(h)  # type: ignore[no-any-return]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self, x, y)


def mean_flow(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Geng et al., 2025, Mean Flows for One-step Generative Modeling, algorithm 1."""
    time = torch.rand(x.shape[0], dtype=x.dtype)
    velocity = torch.randn_like(x) - x
    z = x + time[:, None] * velocity
    u, change = jvp(net.run, (z, time), (velocity, torch.ones_like(time)))
    return F.mse_loss(u, (velocity - time[:, None] * change).detach())


def sliced_scores(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Song et al., 2019, Sliced Score Matching, equation 8: the loss is a derivative, and is differentiated."""
    direction = torch.randn_like(x)
    score, change = jvp(lambda z: net.run(z, y[:, 0]), (x,), (direction,))
    return ((change * direction).sum(1) + 0.5 * score.square().sum(1)).mean()


def energy(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    gradient, _ = grad_and_value(lambda z: net.run(z, y[:, 0]).square().sum())(x)
    return F.mse_loss(gradient + grad(lambda z: net.run(z, y[:, 1]).cos().sum())(x), y)


def tokens(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """On more than rows, and of views: what torch decides there by sizes and offsets holds for any batch."""
    rows = torch.stack([x, y], 1)
    gradient = grad(lambda z: net.last(z).cos().sum())(rows)
    _, change = jvp(lambda z, time: net.last(z * time[:, None, None]), (gradient, x[:, 0]), (rows, y[:, 0]))
    return change.square().mean()


def by_sample(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    rows = torch.vmap(lambda a, b: F.mse_loss(net.run(a[None], b[:1]), b[None]), randomness="different")(x, y)
    jacobians = torch.vmap(jacrev(lambda a: net.last(a).sin()))(x)
    return rows.mean() + jacobians.square().mean()


def tables(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Of each sample its own, looked up at numbers that are the same for all, and at its own."""
    numbers, own = torch.tensor([0, 2, 2]), y.abs().long() % 4

    def entries(row: Tensor, own: Tensor) -> Tensor:
        table = net.last(row)[:, None]
        return (F.embedding(numbers, table).sum() * F.embedding(own, table)).sin().sum()

    return torch.vmap(grad(entries))(x, own).square().mean()


def scaled_weights(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    weights = {name: 0.5 * p for name, p in net.last.named_parameters()}
    return F.mse_loss(functional_call(net.last, weights, (net.run(x, y[:, 0]),)), y)


@pytest.mark.parametrize("loss", [mean_flow, sliced_scores, energy, tokens, by_sample, tables, scaled_weights])
def test_transforms_are_exact(loss: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
    program = exact(Net(loss), batch(4), microbatches=2, schedule="1f1b")
    assert program.capture.batch
    assert program.plan.staged.num_stages == 2


class Image(nn.Module):
    """Convolutions and norms, as a U-Net has; `loss` is a function of it and a batch."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Conv2d(2, 4, 3, padding=1), norm, nn.Conv2d(4, 2, 3, padding=1)
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        u, change = jvp(lambda z: self.last(F.gelu(self.norm(self.first(z)))), (x,), (y,))
        return F.mse_loss(u - change, y)


class Energy(Image):
    """The gradient of a function of the input, by which weights learn (a gradient penalty)."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        def energy(z: Tensor) -> Tensor:
            turned = self.first(z).index_select(-1, torch.arange(5, -1, -1))
            pooled = F.max_pool2d(F.avg_pool2d(self.norm(turned), 2, padding=1), 2)
            pooled = F.pad(F.pad(pooled, (1, 1, 0, 1), "circular"), (1, 0, 0, 0), "reflect")
            return self.last(F.dropout(pooled, 0.3)).square().sum()  # type: ignore[no-any-return]

        return F.mse_loss(grad(energy)(x), y)


def test_gradients_of_convolutions_are_exact() -> None:
    x, y = torch.randn(2, 4, 2, 6, 6, dtype=torch.float64)
    assert exact(Energy(nn.GroupNorm(2, 4)), (x, y), microbatches=2, schedule="1f1b").capture.batch


def test_gradients_of_convolutions_weights_are_refused() -> None:
    class Weights(Image):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return grad(lambda w: F.conv2d(x, w).square().sum())(self.first.weight).square().sum()

    x, y = torch.randn(2, 4, 2, 6, 6, dtype=torch.float64)
    with pytest.raises(CompileError, match=r"aten.square.default .*: it is not linear in a value already summed over"):
        fxpipe.compile(Weights(nn.Identity()), 2, example_inputs=(x, y), microbatches=2)


@pytest.mark.parametrize("norm", [nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True)])
def test_transforms_of_convolutions_are_exact(norm: nn.Module) -> None:
    x, y = torch.randn(2, 4, 2, 6, 6, dtype=torch.float64)
    assert exact(Image(norm), (x, y), microbatches=2, schedule="1f1b").capture.batch


class Scales(Image):
    """One convolution of images at several scales."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.vmap(lambda scale: F.mse_loss(self.first(x * scale)[:, :2], y))(torch.ones(2)).mean()


def test_convolutions_under_vmap_of_what_is_around_it_hold_for_one_batch_size() -> None:
    x, y = torch.randn(2, 4, 2, 6, 6, dtype=torch.float64)
    with pytest.raises(CompileError, match=r"batches of 4, .*torch loses a size that is free, as its vmap of a conv"):
        fxpipe.compile(Scales(nn.Identity()), 2, example_inputs=(x, y), microbatches=2)


class Attending(nn.Module):
    """Heads as views of one projection, normalised by `rms_norm`; a causal, a masked and a plain attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.gated = nn.Linear(8, 24), nn.Linear(8, 16)
        self.double()

    def run(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(F.glu(self.gated(x))).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        query, key = F.rms_norm(query, (4,)), F.rms_norm(key, (4,))
        seen = torch.ones(5, 5, dtype=torch.bool).tril(-1)
        for given in ({}, {"is_causal": True, "dropout_p": 0.2}, {"attn_mask": seen}):
            value = F.scaled_dot_product_attention(query, key, value, **given)
        return value.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        u, change = jvp(self.run, (x,), (y,))
        rows = torch.vmap(grad(lambda z: F.gelu(self.gated(z)).sum()))(x)
        return F.mse_loss(u - change, y) + rows.square().mean()


def test_transforms_of_attention_are_exact() -> None:
    x, y = torch.randn(2, 4, 5, 8, dtype=torch.float64)
    assert exact(Attending(), (x, y), microbatches=2, schedule="1f1b").capture.batch


class Stopped(nn.Module):
    """The tangent, which gives no gradient, reads views of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        u, change = jvp(self.layers, (x,), (y,))
        return F.mse_loss(u - change.detach(), y)


def test_a_stopped_tangent_crosses_stages() -> None:
    exact(Stopped(), batch(4), microbatches=2, stages=8, schedule="interleaved")


def stopped(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return jvp(lambda z: net.run(z.detach() + z, y[:, 0]), (x,), (y,))[1].mean()


def without_grad(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return torch.vmap(lambda z: torch.no_grad()(net.last)(z))(net.run(x, y[:, 0])).mean()


def dual(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(net.run(forward_ad.make_dual(x, y), y[:, 0])).tangent.mean()


def called_later(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    output, pull = vjp(lambda z: net.run(z, y[:, 0]), x)
    return pull(output)[0].mean()


def chosen(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (net.run(x, y[:, 0]),)).mean()


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (stopped, "detach and no_grad inside a function that torch.func or vmap transforms"),
        (without_grad, "detach and no_grad inside a function"),
        (called_later, "torch.func.vjp, jacrev, jacfwd and linearize inside forward"),
        (dual, "forward AD .dual_level, make_dual. cannot be captured; use torch.func.jvp"),
        (chosen, "torch.cond decides by a tensor's value; compute both branches and choose with torch.where"),
    ],
)
def test_transforms_that_are_refused(loss: Callable[[nn.Module, Tensor, Tensor], Tensor], says: str) -> None:
    with pytest.raises(CaptureError, match=says):
        fxpipe.compile(Net(loss), 2, example_inputs=batch(4))


def test_a_derivative_of_layer_norm_is_differentiated_as_its_formula_is() -> None:
    """By finite differences; torch's own kernel is far off (2.13), so that the reference needs the formula too."""
    net, (x, y) = Net(sliced_scores), batch(4)

    def loss() -> Tensor:
        with exact_transforms():
            return jvp(lambda z: net.run(z, y[:, 0]), (x,), (y,))[1].square().mean()

    weight = net.first.weight
    (gradient,) = torch.autograd.grad(loss(), weight)
    with torch.no_grad():
        weight[1, 2] += 1e-6
        above = loss()
        weight[1, 2] -= 2e-6
        difference = (above - loss()) / 2e-6
    assert gradient[1, 2].item() == pytest.approx(difference.item(), rel=1e-6)


def test_formulas_are_the_operations() -> None:
    """Outside of a transform, against torch's own kernels."""
    torch.manual_seed(0)
    x, (weight, bias) = torch.randn(3, 4, 5, 6, dtype=torch.float64), torch.randn(2, 4, dtype=torch.float64)
    mask = torch.rand(5, 5) > 0.5
    mask[2] = False
    added = torch.randn(5, 5, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    for call in (
        lambda: F.group_norm(x, 2, weight, bias),
        lambda: F.instance_norm(x, weight=weight, bias=bias, eps=1e-3),
        lambda: F.scaled_dot_product_attention(x, x, x, mask, scale=0.3),
        lambda: F.scaled_dot_product_attention(x, x, x, mask.double(), enable_gqa=True),
        lambda: F.scaled_dot_product_attention(x, x[:, :2], x[:, :2], is_causal=True, enable_gqa=True),
        lambda: F.scaled_dot_product_attention(x, x, x, added),
        lambda: F.scaled_dot_product_attention(x, x, x, mask, is_causal=True),
        lambda: F.scaled_dot_product_attention(x, x, x, added, is_causal=True),
        lambda: F.glu(x, 1),
        *(lambda mode=mode: F.pad(x, (3, 1, 0, 2), mode) for mode in ("reflect", "replicate", "circular", "constant")),
    ):
        with Calls(EXACT, IN_A_TRACE):
            found = call()
        torch.testing.assert_close(found, call(), rtol=1e-12, atol=1e-12)


def test_formulas_refuse_what_operations_do() -> None:
    x = torch.randn(2, 3, 4, 5)
    for call in (
        lambda: F.pad(x, (5, 0, 0, 0), "reflect"),
        lambda: F.pad(x, (1, 1), "replicate"),
        lambda: F.pad(x, (0, 0, 0, 4), "reflect"),
        lambda: F.pad(x, (0, 6, 0, 0), "circular"),
    ):
        with pytest.raises(RuntimeError) as own:
            call()
        with pytest.raises(RuntimeError) as found, Calls(EXACT, IN_A_TRACE):
            call()
        assert str(found.value) == str(own.value)
    with Calls(EXACT, IN_A_TRACE):
        widest = [F.pad(x, (4, 0, 0, 3), "reflect"), F.pad(x, (0, 5, 4, 0), "circular")]
    assert torch.equal(widest[0], F.pad(x, (4, 0, 0, 3), "reflect"))
    assert torch.equal(widest[1], F.pad(x, (0, 5, 4, 0), "circular"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_formulas_of_norms_are_as_precise_as_the_operations(dtype: torch.dtype) -> None:
    """Which take moments in float32; against the same in float64."""
    torch.manual_seed(0)
    x, given = (torch.randn(3, 4, 5, 64) + 3.0).to(dtype), torch.randn(4, 64).to(dtype)
    for call in (
        lambda x, p: F.layer_norm(x, (64,), p[0], p[1]),
        lambda x, p: F.group_norm(x, 2, p[0, :4], p[1, :4]),
        lambda x, p: F.instance_norm(x, weight=p[0, :4], bias=p[1, :4]),
    ):
        kernel, exact = call(x, given), call(x.double(), given.double())
        with Calls(EXACT, IN_A_TRACE):
            found = call(x, given)
        assert found.dtype == kernel.dtype
        assert (found - exact).abs().max() <= 1.05 * (kernel - exact).abs().max()
