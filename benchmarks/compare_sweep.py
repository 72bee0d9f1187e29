"""fxpipe's plan against the best of DDP, ZeRO-3, GPipe and 1F1B: many models, clusters, batches and memory limits.

    python benchmarks/compare_sweep.py                               every case, a process each, a line each
    python benchmarks/compare_sweep.py --only cascade --limit 200    those with a word, 200 seconds each
    python benchmarks/compare_sweep.py --case "sd21 8xA100-80GB 768 24GiB"

A case is a model, a cluster, the batch of all its ranks and, where it is not the device's, a memory limit. Every
contestant is judged by the same simulator, and has its best setting that fits. The ratio is the best baseline's seconds
over those of the step that `fxpipe.compile` would run; below 1 the plan would lose, and the exit status says so.
Seconds to plan are of a core, of baselines apart. Models are at full size on the meta device.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import diffusers
import torch
from compile_sd21 import StableDiffusion21Step
from planning import SDXL
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from examples.cascade import Cascade
from fxpipe.cluster import Cluster
from fxpipe.compiler import requested
from fxpipe.errors import CompileError
from fxpipe.plan.plan import Plan
from fxpipe.show.comparison import best_baseline
from passes.comparison import baselines
from passes.tuner.plans import make_plan, usable_bytes

_SAME = 1 - 1e-6  # a plan that is a baseline takes as long


class ControlNetStep(nn.Module):
    """Stable Diffusion 1.5 at 512x512, locked, and its ControlNet: latents [B, 4, 64, 64], text [B, 77, 768] and
    condition images [B, 3, 512, 512] to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.unet = diffusers.UNet2DConditionModel(sample_size=64, cross_attention_dim=768)
        self.controlnet = diffusers.ControlNetModel(cross_attention_dim=768)
        self.unet.requires_grad_(False)

    def forward(self, latents: Tensor, text: Tensor, condition: Tensor) -> Tensor:
        noise = torch.randn_like(latents)
        times = torch.randint(0, 1000, (latents.shape[0],), device=latents.device)
        noisy = latents + noise
        down, middle = self.controlnet(noisy, times, text, condition, return_dict=False)
        predicted = self.unet(
            noisy, times, text, down_block_additional_residuals=down, mid_block_additional_residual=middle
        ).sample
        return mse_loss(predicted, noise)

    def example_inputs(self, batch_size: int) -> dict[str, Tensor]:
        shapes = {"latents": (4, 64, 64), "text": (77, 768), "condition": (3, 512, 512)}
        return {name: torch.empty(batch_size, *shape, device="meta") for name, shape in shapes.items()}


MODELS: dict[str, Callable[[], nn.Module]] = {
    "sd21": StableDiffusion21Step,
    "sdxl": lambda: diffusers.UNet2DConditionModel(**SDXL),
    "controlnet": ControlNetStep,
    "dit": lambda: diffusers.DiTTransformer2DModel(sample_size=32),  # DiT-XL/2 at 256x256
    "cascade": lambda: Cascade(2, size=64, width=128),
}

CASES = """
sd21 1xA100-80GB 32
sd21 2xA100-80GB 64
sd21 4xA100-80GB 64
sd21 8xA100-80GB 64
sd21 8xA100-80GB 256
sd21 8xA100-80GB 768
sd21 8xA100-80GB 256 24GiB
sd21 8xH100 256
sd21 8xV100-32GB 64
sd21 8xV100-32GB 256
sd21 2x8xV100-32GB+Ethernet-10 128
sd21 4x4xV100-32GB+Ethernet-10 64
sd21 2x8xA100-80GB+Ethernet-10 256
sd21 8x8xA100-80GB+EFA 512
sd21 8x8xA100-80GB+EFA 2048
sd21 16x8xA100-80GB+EFA 1024
sdxl 1xA100-80GB 4
sdxl 8xA100-80GB 32
sdxl 8xA100-80GB 128
sdxl 8xA100-80GB 32 40GiB
sdxl 8xH100 64
sdxl 2x8xA100-80GB+Ethernet-10 64
sdxl 8x8xA100-80GB+EFA 512
sdxl 16x8xH100+EFA 1024
controlnet 1xA100-80GB 32
controlnet 8xA100-80GB 384
controlnet 8xA100-80GB 2048
controlnet 4x4xV100-32GB+Ethernet-10 128
controlnet 8x8xA100-80GB+EFA 2048
controlnet 16x8xA100-80GB+EFA 1024
dit 1xA100-80GB 32
dit 8xA100-80GB 256
dit 8xA100-80GB 256 12GiB
dit 8xV100-16GB 128
dit 2x8xV100-32GB+Ethernet-10 256
dit 16x8xH100+EFA 2048
cascade 1xA100-80GB 32
cascade 2xA100-80GB 64
cascade 8xA100-80GB 256
cascade 8xV100-32GB 128
cascade 8xA100-80GB 256 16GiB
cascade 4x4xV100-32GB+Ethernet-10 64
cascade 8x8xA100-80GB+EFA 1024
cascade 16x8xA100-80GB+EFA 1024
""".strip().splitlines()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", help="MODEL CLUSTER BATCH [LIMIT], in this process")
    parser.add_argument("--only", default="", help="cases that contain this text")
    parser.add_argument("--limit", type=float, default=400, help="seconds of a case")
    options = parser.parse_args()
    if options.case:
        return contest(options.case)
    lost = [case for case in CASES if options.only in case and not run(case, options.limit)]
    print(f"lost or not ended: {lost}" if lost else "never slower")
    return len(lost)


def run(case: str, limit: float) -> bool:
    """A case in a process of its own."""
    try:
        here = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
        return not subprocess.run([sys.executable, __file__, "--case", case], timeout=limit, env=here).returncode
    except subprocess.TimeoutExpired:
        print(f"{case:<46} not ended in {limit:.0f} s", flush=True)
        return False


def contest(text: str) -> int:
    """Print the line of one case; 1 where fxpipe lost."""
    torch.set_num_threads(1)
    name, cluster, batch_size, *limit = text.split()
    with torch.device("meta"):
        model = MODELS[name]()
    asked = requested(
        model, Cluster.parse(cluster).num_ranks, batch_size=int(batch_size), cluster=cluster,
        memory_limit=limit[0] if limit else None,
    )  # fmt: skip
    step = asked.analysed()
    case, request = asked.case(step)
    limit_bytes = request.memory_limit_bytes or usable_bytes(asked.cost_model.memory_bytes or 0) or None
    lap = laps()
    next(lap)
    best = best_baseline(baselines(replace(case, limit_bytes=limit_bytes)))
    others = next(lap)
    step.blocks  # noqa: B018, costs of blocks are made once for all contestants
    try:
        plan = make_plan(case, request, asked.cost_model.memory_bytes)
    except CompileError as error:
        print(f"{text:<46} {error}", flush=True)
        return int(best is not None)
    line, ratio = told(plan, limit_bytes), 0.0
    if best is None:
        against, ratio = "no baseline fits", 1.0
    else:
        ratio = best.seconds / seconds_of(plan)
        against = f"{ratio:6.3f}  {best.name} {best.seconds:.4f} s ({best.setting})"
    print(f"{text:<46} {against}; fxpipe {line}; planned in {next(lap):.1f} s, baselines {others:.1f} s", flush=True)
    return int(ratio < _SAME)


def seconds_of(plan: Plan) -> float:
    """Of the step that engines run over and over."""
    return plan.predicted.get("steady", plan.predicted["step"]).seconds


def told(plan: Plan, limit_bytes: int | None) -> str:
    staged = plan.staged
    most = max(prediction.peak_bytes for prediction in plan.predicted.values())
    return (
        f"{seconds_of(plan):.4f} s ({staged.schedule}, {staged.num_stages} stages x {staged.replicas}, "
        f"{plan.num_microbatches} micro-batches{', recomputed' * bool(staged.recompute)}"
        f"{', filled' * (plan.steady is not None)}{', TOO LARGE' * (limit_bytes is not None and most > limit_bytes)})"
    )


def laps() -> Iterator[float]:
    """Seconds of a core since the last."""
    last = time.process_time()
    while True:
        now = time.process_time()
        yield now - last
        last = now


if __name__ == "__main__":
    sys.exit(main())
