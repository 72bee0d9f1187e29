"""Every block of Python in docs/ runs: the first guides as one session, the others on their own."""

import re
from pathlib import Path
from typing import Any

import pytest

import fxpipe
from tests.distributed import ROOT

SESSION = ("accelerate", "plans", "layouts", "checkpoints")
ALONE = ("lora", "buckets", "sampling")
PROSE = ("index", "data", "precision", "torchrun", "when-not", "limits", "reference")


def run(name: str, names: dict[str, Any]) -> None:
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / f"{name}.md").read_text(), re.DOTALL):
        exec(compile(block, f"docs/{name}.md", "exec"), names)


def without_numbers(text: str) -> str:
    return re.sub(r"\b[0-9a-f]*\d[0-9a-f.]*", "#", text)


def test_guides_of_one_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for name in SESSION:
        run(name, names)
    shown = capsys.readouterr().out
    assert "exact: loss" in shown
    quoted = re.findall(r"```\n(plan: .*?)```", (ROOT / "docs" / "plans.md").read_text(), re.DOTALL)[0]
    assert without_numbers(quoted) in without_numbers(shown)
    assert [folder.name for folder in fxpipe.checkpoints("run")] == ["step-2"]
    assert (tmp_path / "trained" / "model_index.json").is_file()


@pytest.mark.parametrize("name", ALONE)
def test_a_guide_on_its_own(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "lora":
        pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    run(name, names)
    assert (tmp_path / "adapters" / "pytorch_lora_weights.safetensors").is_file() == (name == "lora")


def test_every_guide_is_run_and_listed() -> None:
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert pages == {*PROSE, *SESSION, *ALONE}
    listed = set(re.findall(r"(\S+)\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert listed == pages


def test_the_reference_has_all_that_is_offered() -> None:
    shown = set(re.findall(r"^::: fxpipe\.(\w+)$", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE))
    errors = {name for name in fxpipe.__all__ if name in vars(fxpipe.errors)}
    assert shown - {"errors"} == {*fxpipe.__all__} - errors
