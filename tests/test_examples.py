"""Every example runs as its reader would run it, and shows what it promises; README.md's example too."""

import re
import runpy
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from examples import demo
from fxpipe.cli.user_model import example_inputs, load_model
from tests.distributed import run_processes

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
EXACT = re.compile(r"^exact: loss .* gradients within \S+, tolerance 1e-10$", re.MULTILINE)


TOY_SCRIPT = """
import torch
from examples.try_out import try_out
from tests.toy_model import toy

torch.manual_seed(0)
try_out(toy(), world_size=8)
"""

SAVING = """
from itertools import islice
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
engine, batches = program.local_engine(), [batch] * 2
"""


def trains(shown: str) -> bool:
    losses = [float(line.split()[-1]) for line in shown.splitlines() if line.startswith("step ")]
    return len(losses) == 3 and losses[1] < losses[0]


def skips(shown: str) -> tuple[int, int]:
    """Number of skips, and how many of their bytes go from rank to rank."""
    (found,) = re.findall(r"^(\d+) skips, ([\d,]+) bytes of them sent between ranks$", shown, re.MULTILINE)
    return int(found[0]), int(found[1].replace(",", ""))


@pytest.mark.parametrize("name", ["unconditional_unet", "dit", "controlnet"])
def test_script_shows_its_plan_is_exact_and_trains(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    shown, warned = capsys.readouterr()
    assert "stage  0 on rank 0" in shown
    assert "rank 0  0" in shown  # the schedule's grid
    assert EXACT.search(shown)
    assert trains(shown)
    if name != "dit":  # a U-Net
        assert skips(shown) == ({"unconditional_unet": 6, "controlnet": 9}[name], 0)
    if name == "controlnet":
        assert re.search(r"^  frozen \d on .*: unet", shown, re.MULTILINE)
    assert warned == ""


def test_text_to_image_is_one_devices(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    runpy.run_path(str(EXAMPLES / "text_to_image.py"), run_name="__main__")
    shown, _ = capsys.readouterr()
    assert "exact: prediction" in shown
    assert float(re.findall(r"10 steps: (\S+) off", shown)[0]) < 1e-4


def run_toy_script() -> str:
    with redirect_stdout(StringIO()) as shown:
        exec(TOY_SCRIPT, {"__name__": "__main__"})
    return shown.getvalue()


def test_try_out_in_processes_shows_the_plan_once_and_trains() -> None:
    first, second = run_processes(2, run_toy_script)
    assert first.count("stage  1 on rank 1") == 1
    assert trains(first)
    assert second == ""


SPECS = ["stable_diffusion:step", "unconditional_unet:step", "dit:model", "controlnet:step", "toy_pipeline:pipe"]


@pytest.mark.parametrize("spec", SPECS)
def test_factory_is_one_the_command_line_takes(spec: str) -> None:
    file, name = spec.split(":")
    model = load_model(f"{EXAMPLES / file}.py:{name}")
    inputs = example_inputs(model, 3)
    assert {len(value) for value in inputs.values()} == {3}
    assert any(parameter.requires_grad for parameter in model.parameters())


def test_demo_fits_80_columns_and_is_exact(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    demo.main(["--world-size", "2", "--steps", "2", "--out", str(tmp_path)])
    shown, warned = capsys.readouterr()
    assert max(map(len, shown.splitlines())) <= 80
    assert "exact, up to rounding" in shown
    assert re.search(r"all \d+ skips stay on their rank: none crosses", shown)
    assert 'begin(transport, "1F0")' in shown  # the quoted action
    assert re.search(r"2/2 loss \d\.\d{4}", shown)
    assert "images: exact" in shown
    assert {"rank_0.py", "rank_1.py", "plan.txt", "grid.txt"} <= {path.name for path in tmp_path.iterdir()}
    assert warned == ""


def test_readme_example_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    training, sampling, saving = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(training, "README.md", "exec"), names)
    assert EXACT.search(capsys.readouterr().out)
    assert (tmp_path / "out" / "rank_3.py").exists()
    exec(SAVING, names)
    exec(compile(saving.replace("1000", "2"), "README.md", "exec"), names)
    assert (tmp_path / "run" / "step-2").is_dir()
    exec(compile(sampling, "README.md", "exec"), {})
    assert "exact: prediction" in capsys.readouterr().out
    assert (tmp_path / "sampler" / "rank_3.py").exists()
    assert float(names["loss"]) > 0  # type: ignore[arg-type]
