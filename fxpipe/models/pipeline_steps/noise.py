"""Noise as a pipeline's scheduler adds it, at times drawn per sample; what is to be predicted, and how much it counts.

DDPM and its kin (alphas_cumprod)    x, n, t  ->  sqrt(a) x + sqrt(1 - a) n    predict n, v or x
flow matching (sigmas)               x, n, t  ->  (1 - s) x + s n              predict n - x
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.errors import CompileError

Times = tuple[float, float]
PREDICTIONS = ("epsilon", "v_prediction", "sample")


@dataclass(frozen=True)
class Noised:
    """`noisy` and `target` [B, ...] like the latents, `timesteps` [B], `weights` [B] of losses, None where equal."""

    noisy: Tensor
    timesteps: Tensor
    target: Tensor
    weights: Tensor | None = None

    def loss(self, predicted: Tensor) -> Tensor:
        """The weighted mean squared error of a prediction, in float32 at least."""
        dtype = torch.promote_types(predicted.dtype, torch.float32)
        predicted, target = predicted.to(dtype), self.target.to(dtype)
        if self.weights is None:
            return nn.functional.mse_loss(predicted, target)
        return ((predicted - target).square().flatten(1).mean(1) * self.weights).mean()


class DiffusionNoise(nn.Module):
    """Times are uniform (Ho et al., "Denoising Diffusion Probabilistic Models", 2020, algorithm 1).

    Args:
        scheduler: one with `alphas_cumprod`; its config says what is predicted. Velocities are those of Salimans and
            Ho, "Progressive Distillation", 2022, appendix D.
        snr_gamma: Min-SNR weights (Hang et al., "Efficient Diffusion Training via Min-SNR Weighting Strategy", 2023,
            section 3.4), in terms of what is predicted; equal weights where left out.
    """

    alphas_cumprod: Tensor

    def __init__(self, scheduler: Any, dtype: torch.dtype, snr_gamma: float | None = None) -> None:
        super().__init__()
        self.prediction_type, self.snr_gamma = scheduler.config.prediction_type, snr_gamma
        if self.prediction_type not in PREDICTIONS:
            raise CompileError(
                f"{type(scheduler).__name__} has prediction_type={self.prediction_type!r}; a training step is known "
                f"for {', '.join(PREDICTIONS)}, and for flow matching (FlowMatchEulerDiscreteScheduler)"
            )
        self.register_buffer("alphas_cumprod", scheduler.alphas_cumprod.to(dtype), persistent=False)

    def forward(self, latents: Tensor) -> Noised:
        noise = torch.randn_like(latents)
        timesteps = torch.randint(0, self.alphas_cumprod.shape[0], (latents.shape[0],), device=latents.device)
        alphas = self.alphas_cumprod[timesteps]
        signal, spread = (_like(root, latents) for root in (alphas.sqrt(), (1 - alphas).sqrt()))
        targets = {"epsilon": noise, "v_prediction": signal * noise - spread * latents, "sample": latents}
        noisy = signal * latents + spread * noise
        return Noised(noisy, timesteps, targets[self.prediction_type], self._weights(alphas))

    def _weights(self, alphas: Tensor) -> Tensor | None:
        if self.snr_gamma is None:
            return None
        ratios = alphas / (1 - alphas)
        if self.prediction_type == "epsilon":
            return (self.snr_gamma / ratios).clamp(max=1.0)  # finite where a schedule ends in noise alone
        least = ratios.clamp(max=self.snr_gamma)
        return least / (ratios + 1) if self.prediction_type == "v_prediction" else least


class FlowNoise(nn.Module):
    """Times are logit-normal, of mean 0 and deviation 1 (Esser et al., "Scaling Rectified Flow Transformers", 2024,
    section 3.1), and shifted as the scheduler's config says: of FlowMatch schedulers, and of those made for DDPM-like
    noise that are told of flow (UniPC of Wan, with `flow_shift`)."""

    sigmas: Tensor
    timesteps: Tensor

    def __init__(self, scheduler: Any, dtype: torch.dtype, times: Times | None = None) -> None:
        super().__init__()
        if type(scheduler).__name__.startswith("FlowMatch"):
            fresh = type(scheduler).from_config(scheduler.config)  # a pipeline that has sampled has set its own
            sigmas, timesteps = fresh.sigmas, fresh.timesteps
        else:
            number, shift = scheduler.config.num_train_timesteps, scheduler.config.get("flow_shift") or 1.0
            even = torch.arange(number, 0, -1, dtype=torch.float32) / number
            sigmas = shift * even / (1 + (shift - 1) * even)
            timesteps = sigmas * number
        if times is not None:
            kept = (timesteps >= times[0]) & (timesteps < times[1])
            sigmas, timesteps = sigmas[: len(kept)][kept], timesteps[kept]
        self.register_buffer("sigmas", sigmas.to(dtype), persistent=False)
        self.register_buffer("timesteps", timesteps.to(dtype), persistent=False)

    def forward(self, latents: Tensor) -> Noised:
        noise = torch.randn_like(latents)
        drawn = torch.randn((latents.shape[0],), dtype=self.sigmas.dtype, device=latents.device).sigmoid()
        number = self.timesteps.shape[0]
        places = (drawn * number).long().clamp(max=number - 1)
        sigmas = _like(self.sigmas[places], latents)
        return Noised((1 - sigmas) * latents + sigmas * noise, self.timesteps[places], noise - latents)


def noise_of(scheduler: Any, dtype: torch.dtype, snr_gamma: float | None, times: Times | None) -> nn.Module:
    """The noise that a scheduler adds, at its `times` from and to below, or at all; its tables are kept in `dtype`.

    Raises:
        CompileError: it is not known how it trains, or Min-SNR is asked for where it has no meaning.
    """
    kind = type(scheduler).__name__
    if snr_gamma is not None and not snr_gamma > 0:
        raise CompileError(f"snr_gamma={snr_gamma} must be more than 0; 5 is usual")
    if scheduler.config.get("invert_sigmas"):
        raise CompileError(f"{kind} has invert_sigmas, by which models predict the reverse of what is known here")
    if kind.startswith("FlowMatch") or scheduler.config.get("prediction_type") == "flow_prediction":
        if snr_gamma is not None:
            raise CompileError(f"snr_gamma={snr_gamma} weighs DDPM-like noise, {kind} is flow matching; leave it out")
        return FlowNoise(scheduler, dtype, times)
    if isinstance(getattr(scheduler, "alphas_cumprod", None), Tensor) and times is None:
        return DiffusionNoise(scheduler, dtype, snr_gamma)
    raise CompileError(
        f"it is not known how to train for {kind}; give the pipeline a DDPMScheduler or a "
        "FlowMatchEulerDiscreteScheduler, as pipe.scheduler = DDPMScheduler.from_config(pipe.scheduler.config)"
    )


def _like(values: Tensor, latents: Tensor) -> Tensor:
    """A value per sample [B] as [B, 1, ...], of the latents' type."""
    return values.to(latents.dtype).view(-1, *[1] * (latents.ndim - 1))
