"""examples/digits.py: a few steps on one device, over two processes, or first there and then here, give one model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image, ImageChops

SCRIPT = str(Path(__file__).parents[1] / "examples" / "digits.py")


def train(launcher: list[str], out: Path, *options: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, *launcher, SCRIPT, "--steps", "3", "--samples", "1", "--out", str(out), *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert ended.returncode == 0, ended.stderr


def test_two_processes_train_as_one_device_does(tmp_path: Path) -> None:
    train([], tmp_path, "--single")
    save = ("--save", str(tmp_path / "run"), "--save-every", "2")
    train(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], tmp_path, *save)
    single, two = (json.loads((tmp_path / f"digits_{where}.json").read_text()) for where in ("single", "2"))
    assert len(single["losses"]) == 3
    assert len(set(single["losses"])) == 3
    assert two["losses"] == pytest.approx(single["losses"], rel=1e-4)  # float32, summed in another order
    # The samples come from the gathered weights: any parameter left behind on a rank would show.
    pictures = [Image.open(tmp_path / f"digits_{where}.png") for where in ("single", "2")]
    (_, largest) = ImageChops.difference(*pictures).getextrema()
    assert largest <= 8  # of 255
    train([], tmp_path, "--single", "--resume", "--samples", "0", *save)
    resumed = json.loads((tmp_path / "digits_single.json").read_text())
    assert resumed["losses"][:2] == two["losses"][:2]
    assert resumed["losses"][2] == pytest.approx(single["losses"][2], rel=1e-4)
