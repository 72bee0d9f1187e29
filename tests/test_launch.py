"""Processes of one launch: rank 0 plans for all, each lowers its own rank, and together they train as threads do."""

import os
import re
import signal
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.run.launch import join, made_by_rank_zero
from fxpipe.run.transport import launched, presence
from tests.distributed import run_processes, start_processes
from tests.toy_model import frozen

STEPS = 3
GIVEN: dict[str, Any] = {"batch_size": 6, "budget": 0, "cluster": "3xV100", "cache": False}


def compiled(world_size: int, **options: Any) -> fxpipe.Program:
    torch.manual_seed(0)
    return fxpipe.compile(frozen().double(), world_size, example_inputs=batches()[0], **GIVEN, **options)


def batches() -> list[tuple[torch.Tensor, ...]]:
    draw = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(2, 6, 6, generator=draw, dtype=torch.float64)) for _ in range(STEPS)]


def trained(program: fxpipe.Program, engine: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
    losses = [float(loss) for loss in engine.train(batches(), optimizer)]
    return losses, {name: p.detach().clone() for name, p in engine.named_parameters()}


def train(plan: str) -> dict[str, Any]:
    """In every process: what it planned, lowered and trained."""
    import fxpipe.compiler as compiler

    calls, make_plan = [], compiler.make_plan
    compiler.make_plan = lambda *args: calls.append(args) or make_plan(*args)  # type: ignore[assignment,func-returns-value]
    program = compiled(int(os.environ["WORLD_SIZE"]), **({"plan": plan} if plan else {}))
    engine = program.engine(seed=3)
    losses, parameters = trained(program, engine)
    engine.close()
    lowered = [p.rank for form in (program.step, *program.filled) for p in form.programs] if program.filled else []
    return {
        "planned": len(calls), "plan": str(program.plan), "ranks": program.ranks, "lowered": set(lowered),
        "losses": losses, "parameters": parameters,
    }  # fmt: skip


@pytest.mark.parametrize(("world_size", "given"), [(2, False), (3, False), (2, True)])
def test_rank_zero_plans_and_every_rank_lowers_its_own(world_size: int, given: bool, tmp_path: Path) -> None:
    program = compiled(world_size)
    plan = str(program.plan.save(tmp_path / "plan.json")) if given else ""
    found = run_processes(world_size, train, plan)
    assert [one["planned"] for one in found] == [0 if given else int(rank == 0) for rank in range(world_size)]
    assert {one["plan"] for one in found} == {str(program.plan)}
    assert program.plan.steady is not None
    losses, parameters = trained(program, program.local_engine(seed=3))
    seen = set()
    for rank, one in enumerate(found):
        assert (one["ranks"], one["lowered"]) == ((rank,), {rank})
        assert one["losses"] == losses
        for name, parameter in one["parameters"].items():
            assert torch.equal(parameter, parameters[name]), name
        seen |= one["parameters"].keys()
    assert seen == parameters.keys()


def measure() -> tuple[int, str]:
    """In every process: how often it measured its machine, which is as fast as its rank says; and the plan's costs."""
    from cost_models import devices

    calls = []
    peaks = {torch.float64: 1e9 * (1 + int(os.environ["RANK"]))}
    mine = replace(devices.DEVICES["CPU"], peak_flops=peaks)
    devices.measured = lambda: calls.append(1) or mine  # type: ignore[assignment,func-returns-value]
    program = compiled(int(os.environ["WORLD_SIZE"]), cost_model="measured")
    return len(calls), str(program.block_seconds)


def test_rank_zero_measures_for_all() -> None:
    (of_first, costs), (of_other, costs_there) = run_processes(2, measure)
    assert (of_first, of_other) == (1, 0)
    assert costs == costs_there


def take_own_plan(folder: str, without: str) -> None:
    own = Path(folder, f"{os.environ['RANK']}.json")
    compiled(int(os.environ["WORLD_SIZE"]), **({} if os.environ["RANK"] == without else {"plan": own}))


@pytest.mark.parametrize(
    ("without", "says"),
    [
        ("", "plan=one of digest .* on rank 1 asks for another plan than rank 0, where it is one of digest"),
        ("1", "plan=None on rank 1 asks for another plan than rank 0, where it is one of digest"),
    ],
)
def test_ranks_that_are_given_different_plans_are_told(without: str, says: str, tmp_path: Path) -> None:
    plan = compiled(2).plan
    for rank in range(2):
        replace(plan, notes=(f"edited on rank {rank}",)).save(tmp_path / f"{rank}.json")
    _, other = start_processes(2, take_own_plan, str(tmp_path), without, timeout_seconds=100)
    assert other.returncode == 1
    assert re.search(says, other.output.splitlines()[-1])


def take_another_model() -> None:
    rank = int(os.environ["RANK"])
    fxpipe.compile(nn.Sequential(*[nn.Linear(4, 4)] * (2 + rank), Mean()), 2, example_inputs=(torch.ones(2, 4),))


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean()


def test_a_rank_of_another_model_is_told_so() -> None:
    _, other = start_processes(2, take_another_model, timeout_seconds=100)
    assert other.returncode == 1
    says = (
        r"rank 1 has step \w+ with 2 samples, rank 0 has step \w+ with 2: build the model, its inputs and options alike"
    )
    assert re.search(says, other.output.splitlines()[-1])


def look(folder: str) -> tuple[bool, list[str], float]:
    """In every process: what a program that holds one rank tells of all."""
    program = compiled(int(os.environ["WORLD_SIZE"]))
    out = program.dump(Path(folder, os.environ["RANK"]), filled=True)
    files = sorted(str(path.relative_to(out)) for path in out.rglob("*.py"))
    assert [p.rank for p in program.step.programs] == [int(os.environ["RANK"])]
    return program.verify(*batches()[0]).ok, files, program.simulate(filled=True).makespan_seconds


def test_a_process_of_one_rank_verifies_and_dumps_all(tmp_path: Path) -> None:
    for rank, (exact, files, seconds) in enumerate(run_processes(2, look, str(tmp_path))):
        assert exact
        folders = ("", "epilogue/", "prologue/", "steady/")
        assert files == sorted(f"{folder}rank_{r}.py" for folder in folders for r in range(2))
        assert seconds == compiled(2).simulate(filled=True).makespan_seconds
        for file in files:
            assert (tmp_path / str(rank) / file).read_text() == (tmp_path / "0" / file).read_text()


def fail_to_plan(how: str) -> None:
    def make() -> Any:
        if how == "killed":
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        raise fxpipe.CompileError("no plan fits into a thimble")

    launched._JOIN_TIMEOUT = timedelta(seconds=4)
    if how == "missing" and os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raises" and os.environ["RANK"] == "2":
        time.sleep(2)  # rank 0 has raised by then
    rank = join(int(os.environ["WORLD_SIZE"]))
    if how == "memory":
        compiled(int(os.environ["WORLD_SIZE"]), memory_limit=64)
    made_by_rank_zero(make, {}, rank)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("memory", "rank 0 has no plan: NothingFits: no plan fits into memory_limit=64 B per rank"),
        ("raises", "rank 0 has no plan: CompileError: no plan fits into a thimble"),
        ("killed", "lost rank 0 before it gave its plan"),
        ("missing", "no rank 0 at 127.0.0.1:"),
    ],
)
def test_a_rank_zero_without_a_plan_ends_the_others(how: str, says: str) -> None:
    first, *others = start_processes(3, fail_to_plan, how, timeout_seconds=100)
    assert first.returncode == (-signal.SIGKILL if how in ("killed", "missing") else 1)
    for other in others:
        assert other.returncode == 1
        assert says in other.output.splitlines()[-1]


def end_while_compiling(how: str, is_read: str) -> None:
    presence.LOST_SECONDS = 3.0
    world_size = int(os.environ["WORLD_SIZE"])
    if join(world_size) == 1:
        if is_read:
            compiled(world_size)
        if how == "raises":
            raise ZeroDivisionError("no samples")
        time.sleep(1.5)  # for a sign of life
        os.kill(os.getpid(), signal.SIGKILL)
    compiled(world_size).engine()


@pytest.mark.parametrize(("how", "is_read"), [("raises", ""), ("killed", ""), ("killed", "read")])
def test_a_rank_that_ends_while_it_compiles_is_named_by_every_other(how: str, is_read: str) -> None:
    first, _, last = start_processes(3, end_while_compiling, how, is_read, timeout_seconds=60)
    why = {"raises": "has left after ZeroDivisionError: no samples", "killed": "was lost: no sign of life for 3 s"}
    for ended in (first, last):
        assert ended.returncode == 1
        assert f"and rank 1 {why[how]}" in ended.output.splitlines()[-1]
