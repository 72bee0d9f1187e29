"""Plans on the command line: saved by tune, read by all that compile, edited by hand, refused where stale."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import fxpipe
from cost_models.devices import device
from fxpipe.errors import CompileError
from fxpipe.plan.plan import Plan
from tests import toy_model
from tests.distributed import run_processes
from tests.test_cli import TOY, invoke

FROZEN, WIDER = (f"{Path(__file__).parent / 'toy_model.py'}:{name}" for name in ("frozen", "wider"))
GIVEN = ["--world-size", "2", "--cluster", "2xV100", "--schedule", "1f1b", "--microbatches", "2"]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "new" / "plan.json"
    code, stdout, _ = invoke("tune", FROZEN, *GIVEN, "--save", str(path))
    assert code == 0
    assert stdout.splitlines()[-1] == str(path)
    return path


def test_every_command_takes_the_plan_and_plans_nothing(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fxpipe.compiler.make_plan", lambda *args: pytest.fail("planned"))
    plan = Plan.load(saved)
    given = [FROZEN, "--plan", str(saved)]
    code, stdout, _ = invoke("compile", *given, "--dump", str(tmp_path / "out"))
    assert code == 0
    assert plan.summary() in stdout
    assert Plan.load(tmp_path / "out" / "plan.json") == Plan.load(tmp_path / "out" / "plan.txt") == plan
    assert invoke("run", *given, "--steps", "1")[1].startswith("step 1/1  loss ")
    assert plan.predicted.keys() == {"step", "steady"}
    assert invoke("simulate", *given)[1].count("step: ") == 2
    assert invoke("trace", *given, "--out", str(tmp_path / "trace.json"))[0] == 0
    pytest.importorskip("plotly", reason="reports are an extra")
    assert invoke("report", *given, "--out", str(tmp_path / "page.html"))[0] == 0


def test_the_text_of_a_dump_is_a_plan_to_edit(saved: Path, tmp_path: Path) -> None:
    """Micro-batch 1 goes first on every rank; the plan says so, and runs."""
    text = str(Plan.load(saved))
    edited = tmp_path / "plan.txt"
    edited.write_text(re.sub(r"\b(\d[TFB])([01])\b", lambda found: f"{found[1]}{1 - int(found[2])}", text))
    code, stdout, _ = invoke("compile", FROZEN, "--plan", str(edited))
    assert code == 0
    assert " 1F1 1B1 --- 1F0 1B0" in stdout
    assert invoke("run", FROZEN, "--plan", str(edited), "--steps", "1")[0] == 0


Edit = Callable[[str], str]
EDITS: list[tuple[Edit, str]] = [
    (lambda text: text.replace("on rank 1:", "on rank 2:"), "stage 1 is on rank 2, there are ranks 0 to 1"),
    (lambda text: text.replace("blocks 7-", "blocks 8-"), "begins at block 8; the stage before it ends before block 7"),
    (lambda text: text.replace("-10  ", "-9  "), "its stages hold blocks 0 to 9, the step has blocks 0 to 10"),
    (lambda text: text.replace("frozen 0 on all ranks: ", "frozen 0 on all ranks: my "), "frozen components are ['my "),
    (
        lambda text: text.replace("frozen 0 on all ranks", "frozen 0 on rank 1"),
        "0T0 on rank 0: layers.0 .. layers.2 is",
    ),
    (lambda text: text.replace(" 0B1", ""), "0B1"),
    (lambda text: text.replace("1F0 ", "0F0 "), "0F0 on rank 1: stage 0 is on rank 0"),
    (lambda text: text.replace("plan: 8 samples", "plan: 9 samples"), "its other lines say 'plan: 9 samples"),
    (lambda text: text.replace("2 stages on", "3 stages on"), "its other lines say 'plan: 8 samples in 2"),
    (lambda text: text.replace(" s, ", "s s, "), "could not convert string to float"),
    (lambda text: text.replace(" idle, ", " busy, "), "a plan has no line 'step: "),
    (lambda text: text.replace("0F0", "0X0"), "'0X0' on rank 0 is no action"),
    (lambda text: text.split("\nschedule")[0], "is no plan's text"),
    (lambda text: "{" + text, "is no JSON"),
    (lambda text: "", "is no plan's text"),
]


@pytest.mark.parametrize(("edit", "says"), EDITS, ids=[says for _, says in EDITS])
def test_a_wrong_edit_is_told(edit: Edit, says: str, saved: Path, tmp_path: Path) -> None:
    path, text = tmp_path / "plan.txt", str(Plan.load(saved))
    path.write_text(edit(text))
    assert path.read_text() != text
    code, stdout, stderr = invoke("compile", FROZEN, "--plan", str(path))
    assert (code, stderr.count("\n")) == (2, 1)
    assert says in stderr + stdout


BESIDE: list[tuple[list[str], str]] = [
    ([f"{TOY}:toy"], "the plan was made for step"),
    ([WIDER], "the model, its inputs, its precision or what it is costed by have changed; make a new plan"),
    ([FROZEN, "--batch-size", "16"], "batch_size=16 beside a plan, which says batch_size=8"),
    (
        [FROZEN, "--world-size", "4"],
        "the plan is for 2 ranks, world_size is 4; use as many ranks, or make a plan for 4",
    ),
    ([FROZEN, "--microbatches", "4"], "microbatches=4 beside a plan, which says microbatches=2"),
    ([FROZEN, "--data-parallel", "2"], "data_parallel=2 beside a plan, which says data_parallel=1"),
    ([FROZEN, "--schedule", "wave"], "schedule='wave' beside a plan, which has chosen that; leave schedule out"),
    ([FROZEN, "--fill", "none"], "fill='none' beside a plan"),
    ([FROZEN, "--recompute"], "recompute=True beside a plan"),
    ([FROZEN, "--collocation", "soft"], "collocation='soft' beside a plan"),
    ([FROZEN, "--memory-limit", "1KiB"], "a rank, memory_limit is 1.0 KiB; give a higher limit, or make a plan within"),
]


@pytest.mark.parametrize(("given", "says"), BESIDE, ids=[says[:40] for _, says in BESIDE])
def test_what_does_not_go_with_a_plan_is_told(given: list[str], says: str, saved: Path) -> None:
    code, _, stderr = invoke("simulate", *given, "--plan", str(saved))
    assert (code, stderr.count("\n")) == (2, 1)
    assert says in stderr


def test_a_plan_by_a_measured_machine_holds_where_it_would_be_measured_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are cut by the machine's seconds: the plan says which they were."""
    monkeypatch.setattr("cost_models.devices.measured", lambda: device("CPU"))
    plan = fxpipe.compile(toy_model.frozen(), 2, batch_size=8, cost_model="measured", budget=0.0).plan
    monkeypatch.setattr("cost_models.devices.measured", lambda: pytest.fail("measured again"))
    plan.save(tmp_path / "plan.json")
    (tmp_path / "plan.txt").write_text(str(plan))
    assert fxpipe.compile(toy_model.frozen(), 2, plan=tmp_path / "plan.json").plan == plan
    text = fxpipe.compile(toy_model.frozen(), 2, plan=tmp_path / "plan.txt", cost_model="measured").plan
    assert text == replace(plan, outcomes=())


def test_an_edited_order_is_told_what_it_takes_itself() -> None:
    """In seconds, and in bytes, which a limit is held against."""
    given = {"batch_size": 8, "microbatches": 4, "fill": "none"}
    few, many = (
        fxpipe.compile(toy_model.frozen(), 2, schedule=name, **given).plan  # type: ignore[arg-type]
        for name in ("1f1b", "gpipe")
    )
    edited = replace(many, predicted=few.predicted)
    assert fxpipe.compile(toy_model.frozen(), 2, plan=edited).plan.predicted == many.predicted != few.predicted
    with pytest.raises(CompileError, match=r"the plan needs .* a rank, memory_limit is"):
        fxpipe.compile(toy_model.frozen(), 2, plan=edited, memory_limit=few.peak_bytes)


def test_what_the_plan_says_may_be_said_beside_it(saved: Path) -> None:
    given = ["--world-size", "2", "--batch-size", "8", "--microbatches", "2", "--memory-limit", "1GiB"]
    assert invoke("simulate", FROZEN, "--plan", str(saved), *given)[0] == 0


def test_a_launch_runs_the_plan_as_threads_do(saved: Path) -> None:
    given = ["run", FROZEN, "--plan", str(saved), "--steps", "2"]
    (code, first, stderr), (_, other, _) = run_processes(2, invoke, *given)
    assert (code, other) == (0, ""), stderr
    shown = [[line.split("  ")[:2] for line in out.splitlines()] for out in (first, invoke(*given)[1])]
    assert shown[0] == shown[1]  # steps and losses; seconds and bytes are a process's own
    assert [words[0] for words in shown[0]] == ["step 1/2", "step 2/2"]


@pytest.mark.parametrize("command", ["tune", "compare", "fillers"])
def test_who_plans_takes_no_plan(command: str, saved: Path) -> None:
    _, _, stderr = invoke(command, FROZEN, "--plan", str(saved))
    assert "is a plan already; fxpipe simulate tells what it takes" in stderr


@pytest.mark.parametrize("text", ["[1]", "{}", '{"format": 7}', '{"format": 1, "staged": {}}', "{"])
def test_files_without_a_plan_are_told(text: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    code, _, stderr = invoke("compile", FROZEN, "--plan", str(path))
    assert (code, stderr.count("\n")) == (2, 1)
    assert stderr.startswith(f"fxpipe: {path}")
    assert "no plan in" in invoke("compile", FROZEN, "--plan", str(tmp_path / "none.json"))[2]


def test_a_plan_of_another_size_is_no_plan(saved: Path, tmp_path: Path) -> None:
    data = json.loads(saved.read_text())
    data["num_microbatches"] = 0
    (tmp_path / "plan.json").write_text(json.dumps(data))
    _, _, stderr = invoke("compile", FROZEN, "--plan", str(tmp_path / "plan.json"))
    assert "8 samples cannot be cut into 0 micro-batches" in stderr
