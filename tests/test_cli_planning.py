"""The commands that plan: their options are those of `fxpipe.compile`, and tune chooses what compile does."""

import json
from pathlib import Path
from typing import Any

import pytest

import fxpipe
from fxpipe.cluster import Cluster
from tests.test_cli import TOY, invoke
from tests.toy_model import ToyStep
from tests.unet import TinyUNet

UNET = f"{Path(__file__).parent / 'unet.py'}:TinyUNet"
FROZEN_UNET = f"{Path(__file__).parent / 'unet.py'}:frozen"
FROZEN = f"{Path(__file__).parent / 'toy_model.py'}:frozen"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def rows(stdout: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in stdout.splitlines() if line[:1] == "│"]


def test_tune_ranks_as_compile_does_and_traces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"batch_size": 8, "cluster": "4xV100", "memory_limit": "100MB"}
    planned = fxpipe.compile(TinyUNet(), 4, **options).plan.outcomes
    for name in ("StepGraphs", "lower_form"):
        monkeypatch.setattr(f"fxpipe.back_end.{name}", lambda *args: pytest.fail("tune traces or lowers"))
    given = ["--world-size", "4", "--cluster", "4xV100", "--memory-limit", "100MB"]
    code, stdout, _ = invoke("tune", UNET, *given, "--top", str(len(planned)))
    assert code == 0
    found = rows(stdout)
    assert [row[0] for row in found] == [str(place + 1) for place in range(len(planned))]
    for row, outcome in zip(found, planned, strict=True):
        assert row[1:4] == [str(outcome.pipelines), str(outcome.ranks), outcome.schedule]
        assert row[-1] == (outcome.why or "chosen")
    assert all(row[-1] for row in found)
    assert f"8 samples on 4 ranks of {Cluster.parse('4xV100')}, 95.4 MiB a rank" in stdout


def test_tune_plans_for_frozen_work_as_compile_does() -> None:
    for fill in ("auto", "idle", "after", "none"):
        planned = fxpipe.compile(TinyUNet("no_grad"), 2, batch_size=8, fill=fill).plan.outcomes
        code, stdout, _ = invoke("tune", FROZEN_UNET, "--world-size", "2", "--fill", fill, "--top", "3")
        assert code == 0
        assert [row[3:6] for row in rows(stdout)] == [
            [o.schedule, str(o.stages), str(o.microbatches)] for o in planned[:3]
        ]


def test_compare_prints_a_row_per_contestant_and_traces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("StepGraphs", "lower_form"):
        monkeypatch.setattr(f"fxpipe.back_end.{name}", lambda *args: pytest.fail("compare traces or lowers"))
    code, stdout, _ = invoke("compare", FROZEN, "--world-size", "4", "--budget", "0", "--cluster", "2x2xV100")
    assert code == 0
    found = rows(stdout)
    names = ["DDP", "ZeRO-3", "GPipe, 2 stages", "GPipe, recomputed", "GPipe", "1F1B"]
    assert [row[0] for row in found] == [*names, "fxpipe", "fxpipe, filled"]
    assert max(row[-1] for row in found[:6]) == "1.00x"
    assert "8 samples on 4 ranks of 2x2xV100-32GB+Ethernet-10, 28.3 GiB a rank" in stdout


def test_fillers_are_compared_on_the_plan_that_compile_makes() -> None:
    options = ["--world-size", "2", "--budget", "0", "--cluster", "2xV100"]
    code, stdout, _ = invoke("fillers", FROZEN_UNET, *options)
    assert code == 0
    program = fxpipe.compile(TinyUNet("no_grad"), 2, batch_size=8, budget=0, cluster="2xV100")
    assert f"{program.plan.outcomes[0]}; no filling is shorter than" in stdout
    found = {row[0]: row[1:] for row in rows(stdout)}
    assert list(found) == [
        "no fill", "greedy, whole layers", "greedy, as published", "exact, in the same bubbles",
        "greedy, in all bubbles", "per-device, whole layers", "per-device",
    ]  # fmt: skip
    over = {name: float(row[1].rstrip("%")) for name, row in found.items()}
    assert 0 <= over["per-device"] == min(over.values())
    assert over["no fill"] > 0


def test_tune_shows_the_top_only() -> None:
    code, stdout, _ = invoke("tune", f"{TOY}:toy", "--world-size", "2", "--top", "2")
    assert code == 0
    assert len(rows(stdout)) == 2


WRONG = [
    (["tune", f"{TOY}:toy"], "--world-size is missing"),
    (["tune", f"{TOY}:toy", "--world-size", "2", "--schedule", "my.txt"], "is an order already"),
    (["tune", f"{TOY}:toy", "--world-size", "2", "--memory-limit", "64B"], "the least tried needs"),
    (["tune", f"{TOY}:toy", "--world-size", "2", "--memory-limit", "much"], "'40GiB'"),
    (["tune", f"{TOY}:toy", "--world-size", "2", "--collocation", "firm"], "'hard' or 'soft'"),
    (["tune", f"{TOY}:toy", "--world-size", "2", "--top", "0"], "--top"),
    (["fillers", f"{TOY}:toy", "--world-size", "2"], "nothing of this step is frozen"),
    (["tune", f"{TOY}:toy", "--world-size", "2", "--fill", "sand"], "'sand'"),
    (["compare", f"{TOY}:toy", "--world-size", "4", "--batch-size", "2"], "a batch of 2 samples does not give"),
    (["tune", f"{TOY}:toy", "--world-size", "8", "--cluster", "2xV100"], "has 2 devices"),
    (["tune", f"{TOY}:toy", "--world-size", "2", "--schedule", "sideways"], "sideways"),
    (["report", f"{TOY}:toy", "--world-size", "2", "--budget", "-1"], "--budget"),
]


@pytest.mark.parametrize(("args", "says"), WRONG, ids=lambda value: " ".join(value)[-40:])
def test_wrong_options_are_one_line(args: list[str], says: str) -> None:
    code, _, stderr = invoke(*args)
    assert (code, stderr.count("\n")) == (2, 1)
    assert stderr.startswith("fxpipe: ")
    assert says in stderr


OPTIONS: list[tuple[list[str], dict[str, Any]]] = [
    (["--data-parallel", "2"], {"data_parallel": 2}),
    (["--memory-limit", "40GiB"], {"memory_limit": "40GiB"}),
    (["--recompute"], {"recompute": True}),
    (["--no-recompute"], {"recompute": False}),
    (["--shard", "weights"], {"shard": "weights"}),
    (["--collocation", "soft"], {"collocation": "soft"}),
    (["--budget", "0.5"], {"budget": 0.5}),
    (["--fill", "idle"], {"fill": "idle"}),
    (["--cluster", "2xH100", "--device-model", "H100@bfloat16"], {"cluster": "2xH100", "cost_model": "H100@bfloat16"}),
    (["--microbatches", "4", "--stages", "2", "--schedule", "wave"], {"microbatches": 4, "stages": 2}),
]


@pytest.mark.parametrize("command", ["compile", "run", "simulate", "trace", "report"])
def test_every_command_passes_its_options_on(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def compile(model: Any, world_size: int, **options: Any) -> None:
        seen.append({"world_size": world_size} | options)
        raise fxpipe.CompileError("seen")

    monkeypatch.setattr(fxpipe, "compile", compile, raising=False)
    for options, expected in OPTIONS:
        steps = ["--steps", "1"] if command == "run" else []
        assert invoke(command, f"{TOY}:toy", "--world-size", "2", *steps, *options)[2] == "fxpipe: seen\n"
        assert seen[-1].items() >= ({"world_size": 2, "batch_size": 8} | expected).items()
        left_out = {"data_parallel": None, "memory_limit": None, "recompute": None, "collocation": None, "stages": None}
        assert seen[-1].items() >= {k: v for k, v in left_out.items() if k not in expected}.items()


def test_simulate_prints_the_step_and_the_filled_one() -> None:
    code, stdout, _ = invoke("simulate", FROZEN, "--world-size", "2", "--schedule", "1f1b")
    assert code == 0
    assert stdout.count("step: ") == 2
    assert "with the next batch's frozen work:" in stdout
    assert invoke("simulate", f"{TOY}:toy", "--world-size", "2", "--schedule", "1f1b")[1].count("step: ") == 1


def test_trace_and_report_write_their_files(tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="reports are an extra")
    given = ["--world-size", "2", "--schedule", "1f1b", "--out"]
    assert invoke("trace", FROZEN, *given, str(tmp_path / "plain.json"))[0] == 0
    assert invoke("trace", FROZEN, "--filled", *given, str(tmp_path / "filled.json"))[0] == 0
    plain, filled = (json.loads((tmp_path / f"{name}.json").read_text())["traceEvents"] for name in ("plain", "filled"))
    assert any(event["name"] == "0T0" for event in plain)
    assert not any(event["name"] == "0T0" for event in filled)
    code, stdout, _ = invoke("report", FROZEN, *given, str(tmp_path / "page.html"))
    assert (code, stdout.strip()) == (0, str(tmp_path / "page.html"))
    assert ToyStep.__name__ in (tmp_path / "page.html").read_text()
