"""Tiny training steps with much frozen work: an encoder, a text model, a third that reads both; draws inside them.

pixels -> encoder -> (sampled) latents -> noised ----> trained U-Net <- hint
tokens -> text ---------------------- \\-> control -----^
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cost_models.roofline import Roofline

SLOW = Roofline(peak_flops=1e6, bandwidth=1e6, matrix_efficiency=1.0, memory_efficiency=1.0, launch_seconds=0.0)
"""A device on which tiny steps take seconds and every sample as long as the first: bubbles worth filling, frozen work
worth sharing."""


class UNet(nn.Module):
    """Two levels on [batch, 2, 8] signals, a long skip, a condition [batch, 4] and a hint [batch, 4, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.down = nn.Conv1d(2, 4, 3, padding=1), nn.Conv1d(4, 4, 3, padding=1)
        self.time = nn.Linear(1, 4)
        self.middle, self.up = nn.Conv1d(4, 4, 3, padding=1), nn.Conv1d(8, 4, 3, padding=1)
        self.outward = nn.Conv1d(4, 2, 1)

    def forward(self, x: Tensor, time: Tensor, condition: Tensor, hint: Tensor) -> Tensor:
        embedding = (torch.tanh(self.time(time)) + condition)[:, :, None]
        skip = F.silu(self.inward(x)) + embedding
        y = F.silu(self.down(skip)) + hint
        y = F.silu(self.middle(y)) * embedding
        return self.outward(F.silu(self.up(torch.cat([y, skip], dim=1))) + hint)


class FrozenStep(nn.Module):
    """`draws`: sample the latents, noise and time inside, as diffusion steps do; without, the step is plain autograd's.

    `how` changes what comes out of the frozen part:
        ""          latents, text, hint, the batch in dimension 0
        "doubled"   the control runs on [2 batch], its outputs are read as they are
        "inner"     the hint has its batch in dimension 1
        "shared"    also a draw through the frozen text model that all samples share
    """

    def __init__(self, draws: bool = True, how: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.draws, self.how = draws, how
        self.encoder = nn.Sequential(nn.Conv1d(3, 6, 3, padding=1), nn.SiLU(), nn.Conv1d(6, 6, 3, padding=1), nn.Tanh())
        self.moments = nn.Conv1d(6, 4, 1)
        self.text = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))
        self.control = nn.Sequential(nn.Conv1d(6, 6, 3, padding=1), nn.SiLU(), nn.Conv1d(6, 4, 1))
        for frozen in (self.encoder, self.moments, self.text, self.control):
            frozen.requires_grad_(False)
        self.unet = UNet()
        self.to(torch.float64)

    def forward(self, pixels: Tensor, tokens: Tensor, time: Tensor) -> Tensor:
        mean, spread = self.moments(self.encoder(pixels)).chunk(2, dim=1)
        latents = mean + 0.1 * spread * torch.randn_like(mean) if self.draws else mean
        words = self.text(tokens)
        condition = words.mean(1)
        if self.how == "shared":
            condition = condition * torch.tanh(self.text[3](self._random(8)))
        hint = self._hint(latents, words)
        noise = torch.randn_like(latents) if self.draws else torch.sin(9 * latents)
        noisy = (1 - time[:, :, None]) * latents + time[:, :, None] * noise
        return F.mse_loss(self.unet(noisy, time, condition, hint), noise)

    def _random(self, width: int) -> Tensor:
        return torch.randn(width, dtype=torch.float64) if self.draws else torch.linspace(-1, 1, width).double()

    def _hint(self, latents: Tensor, words: Tensor) -> Tensor:
        """[batch, 4, 8]"""
        given = torch.cat([latents, words.transpose(1, 2).repeat(1, 1, 2)], dim=1)
        if self.how == "doubled":  # as for guidance: without and with the text
            with_out, with_text = self.control(torch.cat([given * 0.5, given])).chunk(2)
            return with_out + 2 * (with_text - with_out)
        if self.how == "inner":
            return self.control(given).transpose(0, 1).contiguous().transpose(0, 1)
        return self.control(given)

    def example_inputs(self, batch_size: int, seed: int = 1) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {
            "pixels": torch.randn(batch_size, 3, 8, generator=generator, dtype=torch.float64),
            "tokens": torch.randint(11, (batch_size, 4), generator=generator),
            "time": torch.rand(batch_size, 1, generator=generator, dtype=torch.float64),
        }
