"""The command line: what it prints, and one line with exit code 2 for wrong input."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

import fxpipe
from fxpipe.cli import app
from fxpipe.cli.sampling import _grid
from fxpipe.errors import CompileError
from tests.distributed import ROOT

TOY = str(Path(__file__).parent / "toy_model.py")

PLAN = """plan: 200 samples in {count} micro-batches of 100, 1 stage on 1 rank (1f1b)
  for 1xV100, costs of V100, step ab in 24 blocks for 4 samples
  stage  0 on rank 0: blocks 0-3  conv_in [x]
schedule 1f1b: 1 stage, {count} micro-batches
rank 0: {order}
"""


def invoke(*args: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, args, prog_name="fxpipe")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def dumped(tmp_path: Path) -> Path:
    (tmp_path / "plan.txt").write_text(PLAN.format(count=2, order="0F0 0F1 0B0 0B1"))
    (tmp_path / "traffic.txt").write_text("channel  main\n0 -> 1    1,500\n")
    return tmp_path


WRONG = [
    ([], "no command given"),
    (["draw"], "No such command 'draw'"),
    (["compile"], "MODEL"),
    (["compile", f"{TOY}:toy"], "--world-size"),
    (["compile", f"{TOY}:toy", "--world-size", "0"], "--world-size"),
    (["compile", f"{TOY}:toy", "--world-size", "two"], "--world-size"),
    (["compile", f"{TOY}:toy", "--world-size", "2", "--microbatches", "0"], "--microbatches"),
    (["compile", f"{TOY}:toy", "--world-size", "2", "--batch-size", "-1"], "--batch-size"),
    (["compile", f"{TOY}:toy", "--world-size", "2", "--fast"], "--fast"),
    (["compile", f"{TOY}:toy", "--world-size", "2", "--schedule", "/nowhere/my.txt"], "/nowhere/my.txt"),
    (["compile", f"{TOY}:toy", "--world-size", "2", "--filled"], "--filled says what to dump: add --dump DIR"),
    (["compile", TOY, "--world-size", "2"], "file.py:factory or module:factory"),
    (["compile", "nowhere.py:toy", "--world-size", "2"], "no file nowhere.py"),
    (["compile", "no_such_module:toy", "--world-size", "2"], "No module named 'no_such_module'"),
    (["compile", f"{TOY}:nothing", "--world-size", "2"], "has no 'nothing'"),
    (["compile", f"{TOY}:not_a_module", "--world-size", "2"], "must be an nn.Module or return one, got str"),
    (["compile", f"{TOY}:broken", "--world-size", "2"], "RuntimeError: no weights"),
    (["compile", f"{TOY}:silent", "--world-size", "2"], "example_inputs(batch_size)"),
    (["show"], "DIR"),
    (["show", "/nowhere"], "/nowhere/plan.txt"),
    (["run", f"{TOY}:toy", "--world-size", "2"], "--steps"),
    (["run", f"{TOY}:toy", "--steps", "2"], "start under torchrun"),
    (["run", f"{TOY}:toy", "--steps", "0", "--world-size", "2"], "--steps"),
    (["tune", f"{TOY}:toy", "--world-size", "2", "--backend", "fast"], "backend='fast'; give one of 'eager', "),
    (["sample", f"{TOY}:toy", "--world-size", "2"], "must return a pipeline"),
    (["sample", "examples/text_to_image.py:pipe"], "start under torchrun"),
    (["sample", "nowhere.py:pipe", "--out", "images.xyz"], ".xyz is no kind of image; name it .png or .jpg"),
    (["sample", "nowhere.py:pipe", "--out", "nowhere/images.png"], "there is no folder nowhere; make it first"),
    (["sample", "nowhere.py:pipe", "--seed", str(2**64)], "--seed"),
]


@pytest.mark.parametrize(("args", "says"), WRONG, ids=lambda value: " ".join(value)[-40:] if value else "nothing")
def test_wrong_input_is_one_line_and_exit_code_2(args: list[str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    code, _, stderr = invoke(*args)
    assert code == 2
    assert stderr.startswith("fxpipe: ")
    assert stderr.count("\n") == 1
    assert says in stderr


def test_unknown_schedule_is_one_line_and_exit_code_2() -> None:
    code, _, stderr = invoke("compile", f"{TOY}:toy", "--world-size", "2", "--schedule", "sideways")
    assert (code, stderr.count("\n")) == (2, 1)
    assert "sideways" in stderr


def test_world_size_must_be_torchruns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    code, _, stderr = invoke("run", f"{TOY}:toy", "--steps", "1", "--world-size", "2")
    assert (code, stderr.count("\n")) == (2, 1)
    assert "torchrun's 4 processes" in stderr


def test_the_version_is_told() -> None:
    assert invoke("--version")[:2] == (0, f"{fxpipe.__version__}\n")


def test_help_names_the_commands() -> None:
    code, stdout, _ = invoke("--help")
    assert code == 0
    assert all(command in stdout for command in ("compile", "show", "run", "sample"))


def test_show_prints_texts_as_they_are(dumped: Path) -> None:
    code, stdout, stderr = invoke("show", str(dumped))
    assert (code, stderr) == (0, "")
    assert "stage  0 on rank 0: blocks 0-3  conv_in [x]" in stdout
    assert "rank 0  0F0 0F1 0B0 --- 0B1 ---" in stdout
    assert "rank 0: 0F0" not in stdout
    assert "0 -> 1    1,500\n" in stdout


def test_show_does_not_fold_wide_lines(dumped: Path) -> None:
    label = " ".join(f"layer_{i}" for i in range(200))
    (dumped / "plan.txt").write_text((dumped / "plan.txt").read_text().replace("conv_in", label))
    assert label in invoke("show", str(dumped))[1]


def test_show_says_what_is_no_plan(dumped: Path) -> None:
    (dumped / "plan.txt").write_text("stages: some")
    code, _, stderr = invoke("show", str(dumped))
    assert (code, stderr.count("\n")) == (2, 1)
    assert f"{dumped / 'plan.txt'}: this is no plan's text: it begins with 'stages: some'" in stderr


@pytest.mark.parametrize("name", ["toy", "ToyStep", "INSTANCE"])
def test_compile_dumps_and_prints(name: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, stdout, _ = invoke("compile", f"{TOY}:{name}", "--world-size", "2", "--dump", str(out))
    assert code == 0
    assert {"plan.json", "rank_0.py", "rank_1.py"} <= {path.name for path in out.iterdir()}
    assert all(line in stdout for line in (out / "grid.txt").read_text().splitlines())
    assert (out / "plan.txt").read_text().split("\nschedule ")[0] in stdout
    assert invoke("show", str(out))[1] == stdout


def test_run_in_one_process_prints_a_loss_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    code, stdout, _ = invoke("run", f"{TOY}:toy", "--steps", "3", "--world-size", "2", "--lr", "0.01")
    losses = [float(line.split()[3]) for line in stdout.splitlines() if line.startswith("step ")]
    assert code == 0
    assert len(losses) == 3
    assert losses[0] > losses[1] > losses[2]


def test_samples_images_on_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    out, dump = tmp_path / "images.png", tmp_path / "dump"
    model = ["sample", "examples/text_to_image.py:pipe", "--steps", "2", "--out", str(out), "--dump", str(dump)]
    code, stdout, _ = invoke(*model, "--world-size", "4", "--patches", "2", "--verify", "--height", "48")
    assert code == 0
    assert "in 2 groups x 1 stage x 2 patches on 4 ranks" in stdout
    assert "exact: prediction" in stdout
    with Image.open(out) as image:
        assert image.size == (64, 48)
    assert (dump / "rank_3.py").exists()


DRAWS = """
import torch
from PIL import Image
from torch import nn
from types import SimpleNamespace

from examples.text_to_image import pipe


class Net(nn.Conv2d):
    config = {}

    def forward(self, sample, timestep):
        return super().forward(sample) * timestep


class Drawing:
    def __init__(self):
        self.net = Net(1, 1, 3, padding=1)
        self.components = {"net": self.net}

    def __call__(self, num_inference_steps=1):
        made = torch.randn(1, 1, 8, 8)
        self.net(made, torch.ones(()))
        return SimpleNamespace(images=[Image.fromarray((made[0, 0] * 50 + 128).byte().numpy())])


def given():
    made, call = pipe()
    return made, {**call, "generator": torch.Generator().manual_seed(7)}
"""


@pytest.mark.parametrize("factory", ["Drawing", "given"])
def test_noise_is_the_seeds(factory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a pipeline's that takes no generator, or whose factory gives one."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (tmp_path / "draws.py").write_text(DRAWS)
    os.utime(tmp_path / "draws.py", (0, 0))  # captures are cached of code that is older than this process
    found = []
    for seed in ("1", "1", "2"):
        model = ["sample", f"{tmp_path / 'draws.py'}:{factory}", "--world-size", "2", "--steps", "1", "--seed", seed]
        code, _, stderr = invoke(*model, "--out", str(tmp_path / "made.png"))
        assert code == 0, stderr
        found.append((tmp_path / "made.png").read_bytes())
    assert found[0] == found[1] != found[2]


def test_a_video_is_a_row_of_frames() -> None:
    red, blue = (Image.new("RGB", (3, 2), color) for color in ("red", "blue"))
    grid = _grid(SimpleNamespace(frames=[[red, blue], [blue]]))
    assert grid.size == (6, 4)
    assert [grid.getpixel(at) for at in ((0, 0), (3, 1), (2, 2), (3, 2))] == [
        (255, 0, 0), (0, 0, 255), (0, 0, 255), (0, 0, 0),
    ]  # fmt: skip
    assert _grid(SimpleNamespace(images=[red, blue])).size == (6, 2)
    for none in (None, [2], 1.0):
        with pytest.raises(CompileError, match="no list of images"):
            _grid(SimpleNamespace(images=none))


def test_samples_by_a_saved_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    model, saved = (
        ["sample", "examples/text_to_image.py:pipe", "--steps", "1", "--height", "48"],
        tmp_path / "plan.json",
    )
    code, stdout, stderr = invoke(
        *model, "--world-size", "2", "--cfg", "1", "--patches", "0,4,12", "--save", str(saved)
    )
    assert (code, "patch 1: units 4-11" in stdout) == (0, True), stderr
    code, again, _ = invoke(*model, "--world-size", "2", "--plan", str(saved))
    assert [line for line in again.splitlines() if "units" in line] == [
        line for line in stdout.splitlines() if "units" in line
    ]
    code, _, stderr = invoke(*model, "--world-size", "2", "--patches", "0,a")
    assert (code, "give a count (4), or bounds" in stderr) == (2, True)


def test_layouts_are_told_and_the_plan_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("COLUMNS", "180")
    model, saved = ["examples/text_to_image.py:pipe", "--world-size", "2"], tmp_path / "plan.json"
    options = ["--cluster", "2xV100", "--memory-limit", "1GiB", "--save", str(saved), "--displaced"]
    code, stdout, stderr = invoke("tune", "--sample", *model, *options)
    assert code == 0, stderr
    assert "2 groups x 1 stage x 1 patch" in stdout
    rows = [[cell.strip() for cell in line.split("│")] for line in stdout.splitlines() if line.startswith("│")]
    assert ["2", "1", "1", "1", "", "fresh", "1"] in [row[2:9] for row in rows]
    assert ["1", "2", "1", "4", "straight"] in [row[2:7] for row in rows]
    assert "longer" in stdout
    assert "expects: " in stdout
    code, again, _ = invoke("sample", *model, "--steps", "1", "--plan", str(saved))
    assert (code, "2 groups x 1 stage x 1 patch" in again) == (0, True)
    code, stdout, _ = invoke("tune", *model, "--sample", "--objective", "throughput")
    assert (code, "images a" in stdout, " requests in " in stdout) == (0, True, True)


def test_python_dash_m_fails_without_a_traceback() -> None:
    ended = subprocess.run([sys.executable, "-m", "fxpipe", "show", "/nowhere"], capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr.startswith("fxpipe: no file /nowhere/plan.txt")
    assert ended.stderr.count("\n") == 1


def told_commands() -> list[str]:
    """Those that README.md and the guides give as lines, or in words with a model."""
    text = "\n".join(path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))))
    lines = [line for block in re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S) for line in block.splitlines()]
    words = [" ".join(found.split()) for found in re.findall(r"`((?:fxpipe|torchrun)\s[^`]*(?:MODEL|:)[^`]*)`", text)]
    return [found[0] for line in lines + words if (found := re.search(r"^fxpipe .*|(?<=-m )fxpipe .*", line))]


@pytest.mark.parametrize("line", told_commands())
def test_commands_that_are_told_are_taken(line: str) -> None:
    group: Any = typer.main.get_command(app)
    for command in group.commands.values():
        command.callback = None
    with pytest.raises(SystemExit, match="0"):
        group.main(line.split()[1:])
