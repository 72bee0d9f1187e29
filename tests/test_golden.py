"""What a user reads of a compiled step: golden files of a tiny U-Net, and that the dumped Python is right.

`pytest tests/test_golden.py --update-golden` writes the files anew; read the difference before committing it.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import fxpipe
from fxpipe.program import Program
from tests.dumped import assert_text_runs
from tests.unet import TinyUNet

FILES = ("plan.txt", "blocks.txt", "schedule.txt", "grid.txt", "traffic.txt", "rank_0.py", "rank_1.py")


def compiled(**options: object) -> Program:
    return fxpipe.compile(TinyUNet("no_grad"), 2, batch_size=4, microbatches=2, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(schedule="wave").dump(tmp_path_factory.mktemp("dump"))


@pytest.mark.parametrize("name", FILES)
def test_dump_reads_as_before(name: str, dumped: Path, golden: Callable[[str, str], None]) -> None:
    text = re.sub(r"step [0-9a-f]{12} in", "step ... in", (dumped / name).read_text())  # torch's version is part of it
    golden(name + ".txt" if name.endswith(".py") else name, text)


@pytest.mark.parametrize("schedule", ["wave", "zero-bubble", "gpipe"])
def test_dumped_text_computes_what_the_programs_compute(schedule: str) -> None:
    program = compiled(schedule=schedule)
    batch = program.model.example_inputs(4)  # type: ignore[operator]
    assert_text_runs(program, batch)


def test_a_dump_shows_every_form_of_a_filled_step(tmp_path: Path) -> None:
    program = compiled(schedule="wave")
    program.dump(tmp_path, filled=True)
    assert program.filled is not None
    assert program.plan.steady is not None
    assert (tmp_path / "fill.txt").read_text().rstrip() == program.plan.steady.text()
    for name, form in zip(("prologue", "steady", "epilogue"), program.filled, strict=True):
        for rank, of_rank in enumerate(form.programs):
            text = (tmp_path / name / f"rank_{rank}.py").read_text()
            compile(text, f"{name}/rank_{rank}.py", "exec")
            assert all(f"def {module}(" in text for module in of_rank.modules)
        assert (tmp_path / name / "traffic.txt").exists()
    frozen = [
        name for p in program.filled.steady.programs for name in p.modules if name not in program_modules(program)
    ]
    assert frozen, "the steady step does frozen work"


def program_modules(program: Program) -> set[str]:
    return {name for p in program.step.programs for name in p.modules}
