"""The installed wheel, run by `.ci/run` outside the repository: imports, command line, compile and verify."""

import importlib
import subprocess
import sys
from importlib.metadata import files
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxpipe


class ToyStep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(8))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.silu(layer(x))
        return nn.functional.mse_loss(x, target)


@pytest.mark.parametrize("package", ["fxpipe", "passes", "cost_models"])
def test_packages_come_from_the_wheel(package: str) -> None:
    folder = Path(importlib.import_module(package).__file__ or "").parent
    assert folder.parent.is_relative_to(sys.prefix)
    assert (folder / "py.typed").is_file()


def test_the_wheel_holds_nothing_else() -> None:
    tops = {file.parts[0] for file in files("fxpipe") or () if ".." not in file.parts}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"fxpipe", "passes", "cost_models"}


def test_the_console_script_prints_help() -> None:
    script = Path(sys.prefix) / "bin" / "fxpipe"
    printed = subprocess.run([script, "--help"], capture_output=True, text=True, check=True).stdout
    assert "compile" in printed


def test_a_step_compiles_and_verifies() -> None:
    torch.manual_seed(0)
    batch = torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    program = fxpipe.compile(ToyStep().double(), world_size=2, example_inputs=batch)
    assert fxpipe.Plan.parse(str(program.plan)) == program.plan
    report = program.verify(*batch)
    assert report.ok
    assert max(report.loss_error, report.max_grad_error) < 1e-10
