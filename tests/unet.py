"""A U-Net so small that its plan and programs can be read on a screen."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class TinyUNet(nn.Module):
    """Noise prediction on [batch, 2, 8] signals: two levels down, two up, skips by concatenation, time in every level.

    `frozen` freezes the encoder, by requires_grad_(False) or, as "no_grad", by running it under torch.no_grad().
    """

    def __init__(self, frozen: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = frozen
        self.encoder = nn.Conv1d(2, 2, 1)
        self.time = nn.Linear(1, 4)
        self.down_0 = nn.Conv1d(2, 4, 3, padding=1)
        self.down_1 = nn.Conv1d(4, 4, 3, padding=1, stride=2)
        self.mid = nn.Conv1d(4, 4, 3, padding=1)
        self.up_1 = nn.Conv1d(8, 4, 3, padding=1)
        self.up_0 = nn.Conv1d(8, 2, 3, padding=1)
        if frozen:
            self.encoder.requires_grad_(False)
        self.to(torch.float64)

    def forward(self, x: Tensor, time: Tensor, noise: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.frozen != "no_grad"):
            x = torch.tanh(self.encoder(x))
        embedding = F.silu(self.time(time))[:, :, None]
        h_0 = F.silu(self.down_0(x + noise)) + embedding
        h_1 = F.silu(self.down_1(h_0)) + embedding
        y = F.silu(self.mid(h_1)) + embedding
        y = F.silu(self.up_1(torch.cat([y, h_1], dim=1))) + embedding
        y = F.interpolate(y, scale_factor=2.0)
        return F.mse_loss(self.up_0(torch.cat([y, h_0], dim=1)), noise)

    def example_inputs(self, batch_size: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1)
        x, noise = (torch.randn(batch_size, 2, 8, generator=generator, dtype=torch.float64) for _ in range(2))
        return {"x": x, "time": torch.rand(batch_size, 1, generator=generator, dtype=torch.float64), "noise": noise}


def frozen() -> TinyUNet:
    """With a frozen encoder, for the command line."""
    return TinyUNet("no_grad")
