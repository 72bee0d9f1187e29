"""The script that trains text-to-image pipelines, as its reader would start it, at toy size."""

import json
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionPipeline
from PIL import Image

from examples.captioned_images import CaptionedImages
from fxpipe.run.local_engine import LocalEngine
from tests.distributed import ROOT, run_processes

OPTIONS = (
    "--schedule 1f1b --microbatches 2 --train-batch-size 4 --max-train-steps 3 --gradient-accumulation-steps 2 "
    "--checkpointing-steps 2 --ema 0.5 --snr-gamma 5 --lr-scheduler linear --learning-rate 1e-2 "
    "--num-inference-steps 2 --validation-prompts disc"
)


def start(folder: str, *more: str) -> None:
    sys.argv = ["train_text_to_image.py", *OPTIONS.split(), "--output-dir", folder, *more]
    runpy.run_path(str(ROOT / "examples" / "train_text_to_image.py"), run_name="__main__")


def losses(folder: Path) -> dict[int, Any]:
    lines = [json.loads(line) for line in (folder / "scalars.jsonl").read_text().splitlines()]
    return {line.pop("update"): line for line in lines}


def test_a_run_goes_on_under_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three updates in one process; from its checkpoint after two, the third in two."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(sys, "argv", sys.argv)
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    of_batches, step = list[float](), LocalEngine.step

    def seen(*given: Any) -> Any:
        of_batches.append(float(loss := step(*given)))
        return loss

    with monkeypatch.context() as patched:
        patched.setattr(LocalEngine, "step", seen)
        start(str(whole))
    assert [path.name for path in (whole / "checkpoints").iterdir()] == ["step-4"]
    with Image.open(whole / "samples-3.png") as samples:
        assert samples.size == (4 * 32, 32)
    shutil.copytree(whole / "checkpoints", resumed / "checkpoints")
    run_processes(2, start, str(resumed), "--resume")
    found, wanted = losses(resumed), losses(whole)
    assert list(wanted) == [1, 2, 3]
    assert wanted[1]["loss"] == pytest.approx(sum(of_batches[:2]) / 2)
    assert list(found) == [3]
    assert found[3] == pytest.approx(wanted[3], rel=1e-4)
    one, other = (StableDiffusionPipeline.from_pretrained(run / "pipeline").unet for run in (whole, resumed))
    for name, weight in one.named_parameters():
        torch.testing.assert_close(other.get_parameter(name), weight, rtol=1e-3, atol=1e-5)


def test_gradients_that_are_not_finite_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(sys, "argv", sys.argv)
    with pytest.raises(SystemExit, match="update 2: the norm of the gradients is nan; --resume goes on"):
        start(str(tmp_path), "--learning-rate", "1e30", "--lr-scheduler", "constant")


def test_images_are_read_with_their_captions(tmp_path: Path) -> None:
    for name, size in (("a", (8, 4)), ("b", (4, 6))):
        Image.new("RGB", size, (255, 0, 0)).save(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.txt").write_text(f"{name} cat\n")
    beside = list(CaptionedImages(tmp_path, 4))
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "b.png", "text": "listed"}')
    listed = list(CaptionedImages(tmp_path, 4))
    assert [caption for _, caption in beside + listed] == ["a cat", "b cat", "listed"]
    for pixels, _ in beside + listed:
        assert torch.equal(pixels, torch.tensor([1.0, -1.0, -1.0]).view(3, 1, 1).expand(3, 4, 4))
