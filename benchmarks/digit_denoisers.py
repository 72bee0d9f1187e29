"""Small denoisers that have learnt something: a U-Net and a DiT, trained on scikit-learn's digits enlarged to 16x16."""

from collections.abc import Callable
from pathlib import Path

import torch
from diffusers import DDIMScheduler, DiTTransformer2DModel, UNet2DModel
from torch import Tensor, nn
from torch.nn.functional import interpolate, mse_loss

from examples.digits import digits, recognised

SIDE = 16  # of the image
_BATCH_SIZE, _RATE = 64, 1e-3


def unet() -> nn.Module:
    return UNet2DModel(
        sample_size=SIDE, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8, attention_head_dim=8, num_class_embeds=10,
    )  # fmt: skip


def dit() -> nn.Module:
    return DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=16, in_channels=1, out_channels=1, num_layers=6, patch_size=2,
        sample_size=SIDE, num_embeds_ada_norm=1000, dropout=0.0,
    )  # fmt: skip


MODELS: dict[str, Callable[[], nn.Module]] = {"U-Net": unet, "DiT": dit}


def trained(name: str, num_steps: int, folder: Path, report: Callable[[str], None]) -> nn.Module:
    """The model after so many training steps; from the folder where it is there, else kept in it."""
    torch.manual_seed(0)
    model = MODELS[name]()
    file = folder / f"{name}_{num_steps}.pt"
    if file.exists():
        model.load_state_dict(torch.load(file))
        return model.eval()
    images, labels = digits()
    images = interpolate(images, SIDE, mode="bilinear")
    scheduler = ddim()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE)
    cooling = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=num_steps)
    for step in range(num_steps):
        chosen = torch.randint(len(images), (_BATCH_SIZE,))
        noise, times = torch.randn(_BATCH_SIZE, 1, SIDE, SIDE), torch.randint(0, 1000, (_BATCH_SIZE,))
        noisy = scheduler.add_noise(images[chosen], noise, times)
        loss = mse_loss(model(noisy, timestep=times, class_labels=labels[chosen]).sample, noise)
        loss.backward()
        optimizer.step()
        cooling.step()
        optimizer.zero_grad()
        if step % 250 == 0 or step == num_steps - 1:
            report(f"{name}: step {step}, loss {loss.item():.4f}")
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), file)
    return model.eval()


def ddim() -> DDIMScheduler:
    """Song et al., "Denoising Diffusion Implicit Models", ICLR 2021."""
    return DDIMScheduler(num_train_timesteps=1000, beta_schedule="linear", clip_sample=True, steps_offset=1)


def share_recognised(images: Tensor, labels: Tensor) -> float:
    """Of images [B, 1, 16, 16] in [-1, 1] whose digit a classifier trained on real ones sees."""
    return recognised(interpolate(images, 8, mode="area"), labels)
