"""Every example runs as its reader would run it, at a small size, and shows what it promises."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from examples import demo
from fxpipe.cli import app

ROOT = Path(__file__).parents[1]
EXACT = re.compile(r"^exact: loss .* gradients within \S+, tolerance 1e-10$", re.MULTILINE)


def losses(text: str) -> list[float]:
    return [float(line.split()[-1]) for line in text.splitlines() if line.startswith("step ")]


@pytest.mark.parametrize("name", ["stable_diffusion", "unconditional_unet", "dit", "controlnet"])
def test_example_shows_its_plan_is_exact_and_learns(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    shown, warned = capsys.readouterr()
    assert "stage  0 on rank 0" in shown
    assert EXACT.search(shown)
    skips, crossing = re.search(r"^(\d+) skips, (\d+) bytes", shown, re.MULTILINE).groups()  # type: ignore[union-attr]
    if name != "dit":
        assert int(skips) >= 4
        assert int(crossing) == 0
    assert len(losses(shown)) == 3
    assert losses(shown)[0] > losses(shown)[1]
    assert warned == ""


def test_example_under_torchrun_trains_as_in_one_process(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, str(ROOT / "examples" / "controlnet.py")]
    launched = subprocess.run(command, capture_output=True, text=True, timeout=200, env=_environment())
    assert launched.returncode == 0, launched.stderr
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    runpy.run_path(str(ROOT / "examples" / "controlnet.py"), run_name="__main__")
    assert losses(launched.stdout) == losses(capsys.readouterr().out)
    assert len(losses(launched.stdout)) == 3


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return kept | {"PYTHONPATH": str(ROOT)}


def test_examples_compile_from_the_command_line(tmp_path: Path) -> None:
    args = ["compile", str(ROOT / "examples" / "dit.py:model"), "--world-size", "2", "--dump", str(tmp_path)]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    assert {"rank_0.py", "rank_1.py"} <= {path.name for path in tmp_path.iterdir()}


def test_demo_fits_80_columns_and_says_exact(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    demo.main(["--world-size", "2", "--batch-size", "2", "--steps", "2", "--out", str(tmp_path)])
    shown, warned = capsys.readouterr()
    assert max(map(len, shown.splitlines())) <= 80
    assert "exact, up to rounding" in shown
    assert "7 skips stay on their rank: none crosses" in shown
    assert re.search(r"2/2 loss \d\.\d{4}", shown)
    assert {"rank_0.py", "rank_1.py", "plan.txt", "grid.txt"} <= {path.name for path in tmp_path.iterdir()}
    assert warned == ""


def test_readme_example_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(block, "README.md", "exec"), names)
    shown = capsys.readouterr().out
    assert "exact: loss" in shown
    assert (tmp_path / "out" / "rank_3.py").exists()
    assert float(names["loss"]) > 0  # type: ignore[arg-type]
