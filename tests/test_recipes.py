"""Training steps as people write them: preconditioning, weights, schedules of noise, conditions, averages, adapters."""

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxpipe
from fxpipe.errors import CaptureError, CompileError
from tests.steps import exact

DTYPE = torch.float64


class Denoiser(nn.Module):
    """x [batch, 4], time [batch], condition [batch, 6] or none."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.first, self.last = nn.Linear(1, 6), nn.Linear(4, 6), nn.Linear(6, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.SiLU()) for _ in range(2))

    def forward(self, x: Tensor, time: Tensor, condition: Tensor | None = None) -> Tensor:
        h = self.first(x) + self.time(time[:, None]).sin()
        h = h if condition is None else h + condition
        for block in self.blocks:
            h = h + block(h)
        return self.last(h)  # type: ignore[no-any-return]


class Recipe(nn.Module):
    """`loss` of the modules below, x [batch, 4] and labels [batch] below 5."""

    def __init__(self, loss: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.loss = loss
        self.net, self.labels, self.log_variance = Denoiser(), nn.Embedding(6, 6), nn.Linear(1, 1)
        self.average = copy.deepcopy(self.net).requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(8, 4) for _ in range(3))
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.down[0].weight
        self.register_buffer("signal", torch.cumprod(1 - torch.linspace(1e-4, 0.2, 20), 0))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("codes", torch.randn(3, 4))
        self.register_buffer("counts", torch.ones(3))
        self.register_buffer("sums", self.codes.clone())
        self.to(DTYPE)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return self.loss(self, x, labels)


def batch(size: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, 4, generator=generator, dtype=DTYPE)
    return x, torch.randint(5, (size,), generator=generator)


def edm(m: Recipe, x: Tensor, labels: Tensor) -> Tensor:
    """Karras et al., 2022, with the learned uncertainty of EDM2."""
    sigma = (torch.randn([x.shape[0], 1], dtype=DTYPE) * 1.2 - 1.2).exp()
    scale = (sigma**2 + 0.25).sqrt()
    noisy = x + sigma * torch.randn_like(x)
    denoised = 0.25 / scale**2 * noisy + 0.5 * sigma / scale * m.net(noisy / scale, sigma[:, 0].log() / 4)
    log_variance = m.log_variance(sigma.log() / 4)
    return ((scale / (0.5 * sigma)) ** 2 / log_variance.exp() * (denoised - x) ** 2 + log_variance).mean()


def min_snr_v(m: Recipe, x: Tensor, labels: Tensor) -> Tensor:
    """Hang et al., 2023, for velocities (Salimans and Ho, 2022), as training scripts write it."""
    time = torch.randint(0, 20, (x.shape[0],)).long()
    alpha, noise = m.signal[time], torch.randn_like(x)
    signal, spread = alpha.sqrt()[:, None], (1 - alpha).sqrt()[:, None]
    ratio = alpha / (1 - alpha)
    weights = torch.stack([ratio, 5.0 * torch.ones_like(time)], dim=1).min(dim=1)[0] / (ratio + 1)
    losses = F.mse_loss(
        m.net(signal * x + spread * noise, time.to(DTYPE) / 20), signal * noise - spread * x, reduction="none"
    )
    return (losses.mean(dim=list(range(1, losses.ndim))) * weights).mean()


def rectified_flow(m: Recipe, x: Tensor, labels: Tensor) -> Tensor:
    """Esser et al., 2024: logit-normal times, labels dropped for guidance."""
    time = torch.normal(mean=0.0, std=1.0, size=(x.shape[0],), dtype=DTYPE).sigmoid()
    wide, noise = time.view(-1, *([1] * (x.ndim - 1))), torch.randn_like(x)
    kept = torch.where(torch.rand(x.shape[0]) < 0.3, torch.full_like(labels, 5), labels)
    velocity = m.net((1 - wide) * x + wide * noise, time, m.labels(kept))
    return ((noise - x - velocity) ** 2).mean(dim=list(range(1, x.ndim))).mean()


def consistency(m: Recipe, x: Tensor, labels: Tensor) -> Tensor:
    """Song et al., 2023: an average of the weights is the target; times in strata."""
    time = (torch.rand(1, dtype=DTYPE) + torch.arange(x.shape[0], dtype=DTYPE) / x.shape[0]) % 1
    noise = torch.randn_like(x)
    with torch.no_grad():
        target = m.average(x + 0.9 * time[:, None] * noise, 0.9 * time)
    difference = m.net(x + time[:, None] * noise, time) - target
    return (torch.sqrt(difference.pow(2).sum(1) + 0.03**2) - 0.03).mean()


def self_conditioned(m: Recipe, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """A first guess without gradient, the loss over what a random mask leaves."""
    time = torch.rand(x.shape[0], dtype=DTYPE)
    guess = m.net(x, time).detach()
    mask = (torch.rand_like(x) > 0.3).to(DTYPE)
    return {"loss": ((m.net(x + 0.5 * guess, time) - x) ** 2 * mask).sum() / mask.sum(), "guess": guess}


def skips_in_a_dict(m: Recipe, x: Tensor, labels: Tensor) -> Tensor:
    h, skips = x, {}
    for index, layer in enumerate(m.down):
        h = skips[f"level_{index}"] = F.silu(checkpoint(layer, h, use_reentrant=False))
    act = functools.partial(F.gelu, approximate="tanh")
    for index, layer in enumerate(m.up):
        h = act(layer(torch.cat([h, skips[f"level_{2 - index}"]], dim=-1)))
    return F.mse_loss(m.tied(h), x)


def rearranged(m: Recipe, x: Tensor, labels: Tensor) -> Tensor:
    """Heads and pixels moved about as einops would, under autocast switched off again."""
    size = x.shape[0]
    h = x.reshape(size, 2, 2).permute(1, 0, 2).reshape(2 * size, 2)
    h = h.reshape(2, size, 2).permute(1, 0, 2).flatten(1)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
        h = m.net(h, x[:, 0])
    q, k, v = m.net(h, x[:, 1]).reshape(size, 1, 2, 2).expand(3, -1, -1, -1, -1).unbind(0)
    return F.mse_loss(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(1), x)


def preferred(m: Recipe, x: Tensor, labels: Tensor) -> Tensor:
    """Wallace et al., 2023: both images of a pair in one batch, the frozen model beside the trained one."""
    both, time = torch.cat([x, -x]), torch.rand(x.shape[0], dtype=DTYPE).repeat(2)
    better, worse = (m.net(both, time) - both).square().mean(1).chunk(2)
    with torch.no_grad():
        known, other = (m.average(both, time) - both).square().mean(1).chunk(2)
    return -F.logsigmoid(-0.5 * ((better - worse) - (known - other))).mean()


def updates_average(m: Recipe, x: Tensor, labels: Tensor) -> Tensor:
    with torch.no_grad():
        for old, new in zip(m.average.parameters(), m.net.parameters(), strict=True):
            old.lerp_(new, 0.01)
    return F.mse_loss(m.net(x, x[:, 0]), x)


def counts_steps(m: Recipe, x: Tensor, labels: Tensor) -> Tensor:
    m.steps += 1
    return F.mse_loss(m.net(x, x[:, 0]), x)


def quantized(m: Recipe, x: Tensor, labels: Tensor) -> Tensor:
    """Van den Oord et al., 2017, appendix A.1: every code follows the samples that are nearest to it."""
    h = m.net(x, x[:, 0])
    nearest = torch.cdist(h.detach(), m.codes).argmin(1)
    codes = m.codes[nearest]
    with torch.no_grad():
        chosen = F.one_hot(nearest, len(m.codes)).to(DTYPE)
        m.counts.lerp_(chosen.sum(0), 0.1)
        m.sums.lerp_(chosen.T @ h, 0.1)
        m.codes.copy_(m.sums / m.counts[:, None])
    return F.mse_loss(m.tied(h + (codes - h).detach()), x) + 0.25 * F.mse_loss(h, codes)


RECIPES = [
    edm, min_snr_v, rectified_flow, consistency, self_conditioned, skips_in_a_dict, rearranged, preferred,
    updates_average, counts_steps, quantized,
]  # fmt: skip


@pytest.mark.parametrize("loss", RECIPES)
def test_recipes_are_exact(loss: Callable[..., Any]) -> None:
    program = exact(Recipe(loss), batch(), microbatches=2, schedule="1f1b")
    assert program.capture.batch
    assert program.plan.staged.num_stages == 2


class Adapted(nn.Module):
    """A frozen layer with a low-rank correction."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer, self.down = layer.requires_grad_(False), nn.Linear(layer.in_features, 2, dtype=DTYPE)
        self.up = nn.Linear(2, layer.out_features, dtype=DTYPE)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + 0.5 * self.up(self.down(x))  # type: ignore[no-any-return]


def adapted(recipe: Recipe) -> nn.Module:
    recipe.requires_grad_(False)
    for block in recipe.net.blocks:
        block[1] = Adapted(block[1])
    return recipe


def hooked(recipe: Recipe) -> nn.Module:
    recipe.net.register_forward_pre_hook(lambda module, args: (args[0] + 1, *args[1:]))
    recipe.net.blocks[0].register_forward_hook(lambda module, args, output: 2 * output)
    return recipe


def compiled_inside(recipe: Recipe) -> nn.Module:
    recipe.net.blocks[0] = torch.compile(recipe.net.blocks[0])  # type: ignore[assignment]
    return recipe


@pytest.mark.parametrize("change", [adapted, hooked, compiled_inside, torch.compile])
def test_models_that_were_changed_are_exact(change: Callable[[Recipe], nn.Module]) -> None:
    exact(change(Recipe(rectified_flow)), batch(), microbatches=2, schedule="1f1b")


def compares_samples(m: Recipe, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(m.net(x, x[:, 0]) @ x.T / math.sqrt(4), torch.arange(x.shape[0]))


def clamps_the_loss(m: Recipe, x: Tensor, labels: Tensor) -> Tensor:
    return F.mse_loss(m.net(x, x[:, 0]), x).clamp(max=1.0)


def goes_through_the_batch(m: Recipe, x: Tensor, labels: Tensor) -> Tensor:
    return F.mse_loss(m.net(x, torch.tensor([0.5 for _ in range(len(x))], dtype=DTYPE)), x)


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (compares_samples, r"matmul.*multiplies samples of the batch with one another"),
        (clamps_the_loss, r"clamp.*only sums and products with constants may follow"),
        (
            goes_through_the_batch,
            r"take x\.shape\[0\], not int\(\) of it, .*torch\.vmap\), at .*test_recipes.py:\d+; it cannot be cut",
        ),
    ],
)
def test_recipes_that_are_refused(loss: Callable[..., Any], says: str) -> None:
    with pytest.raises((CaptureError, CompileError), match=says):
        fxpipe.compile(Recipe(loss), 2, example_inputs=batch(), microbatches=2)
