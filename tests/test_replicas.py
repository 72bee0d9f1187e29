"""Replicated stages: exact for any numbers of replicas, in threads and over gloo; wrong reductions are told."""

import os
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import fxpipe
from fxpipe.plan import ops
from fxpipe.plan.actions import Work
from fxpipe.plan.program_check import check_programs
from fxpipe.plan.schedule import Schedule
from fxpipe.plan.schedule_check import check
from passes.schedules.named import make_schedule
from passes.schedules.replicas import tile
from tests.distributed import run_processes
from tests.peer_cases import PEER_CASES
from tests.steps import losses_of
from tests.test_schedules_exact import assert_exact, unet

WORK = Work(
    num_stages=2,
    num_microbatches=4,
    backward=frozenset({0, 1}),
    input_grad=frozenset({1}),
    weight_grad=frozenset({0, 1}),
    edges=frozenset({(0, 1)}),
    grad_edges=frozenset({(1, 0)}),
)
TWO = """
rank 0: 0F0 0F2 0B0 0B2 0R0
rank 1: 1F0 1B0 1F2 1B2 1R1
rank 2: 0F1 0F3 0B1 0B3 0R2
rank 3: 1F1 1B1 1F3 1B3 1R3"""


def test_two_pipelines_read_as_two() -> None:
    schedule = make_schedule("1f1b", WORK, ((0, 2), (1, 3)), [1.0, 1.0], [2.0, 2.0])
    assert schedule.text().split("\n", 1)[1] == TWO.strip()
    one = make_schedule("1f1b", replace(WORK, num_microbatches=2), (0, 1), [1.0, 1.0], [2.0, 2.0])
    assert tile(one, ((0, 1), (2, 3)), WORK) == schedule


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("0B2 0R0", "0B2", "0R0 is missing: stage 0 has replicas on ranks [0, 2]"),
        ("0B2 0R0", "0R0 0B2", "0R0 comes before 0B2"),
        ("0B2 0R0", "0B2 0R2", "the number after R is the rank; write 0R0"),
        ("0B2 0R0", "0B2 0R0 0R0", "0R0 is there 2 times"),
        ("0B2 0R0", "0B2 0R0 1R0", "there is no replica of stage 1 to reduce with"),
        ("1F2 1B2", "1F2", "1B2 is missing"),
        ("0B1 0B3", "0B1 0B3 1B0", "micro-batch 0 of stage 1 is on ranks [1, 2]"),
    ],
)
def test_wrong_reductions_are_told(old: str, new: str, fault: str) -> None:
    assert check(Schedule.parse(TWO), WORK, 4) == []
    faults = check(Schedule.parse(TWO.replace(old, new, 1)), WORK, 4)
    assert any(fault in told for told in faults), faults


IN_TURN = TWO.replace("0B0 0B2 0R0", "0B0 0R0 0B2 0R0:1").replace("0B1 0B3 0R2", "0B1 0R2 0B3 0R2:1")


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("0B2 0R0:1", "0B2", "0R0 comes before 0B2; reduce after the last gradient"),
        ("0B2 0R0:1", "0B2 0R0:2", "0R0:2 is reduction 1 of stage 0 on its rank, counted from 0; write 0R0:1"),
        ("0B2 0R0:1", "0B2 0R0:1 0R0:2", "0R0:2 has nothing to sum: no gradient of stage 0 has come since"),
        ("0B2 0R0:1", "0B2 0R2:1", "0R2:1 on rank 0: the number after R is the rank; write 0R0:1"),
        ("0B0 0R0 0B2 0R0:1", "0B0 0B2 0R0", "ranks [0, 2] reduce the stages [0] (rank 0) and [0, 0] (rank 2)"),
    ],
)
def test_reductions_of_every_micro_batch(old: str, new: str, fault: str) -> None:
    schedule = Schedule.parse(IN_TURN)
    assert check(schedule, WORK, 4) == []
    assert schedule.text().split("\n", 1)[1] == IN_TURN.strip()
    one = make_schedule("1f1b", replace(WORK, num_microbatches=2), (0, 1), [1.0, 1.0], [2.0, 2.0])
    tiled = tile(one, ((0, 1), (2, 3)), WORK, scattered=True)
    assert [a for a in tiled.ranks[0] if a.stage == 0] == [*schedule.ranks[0]]
    faults = check(Schedule.parse(IN_TURN.replace(old, new, 1)), WORK, 4)
    assert any(fault in told for told in faults), faults


def test_reductions_in_different_orders_are_told() -> None:
    text = """
        rank 0: 0F0 1F0 1B0 0B0 1R0 0R0
        rank 1: 0F1 1F1 1B1 0B1 0R1 1R1"""
    (fault,) = check(Schedule.parse(text), replace(WORK, num_microbatches=2), 2)
    assert "ranks [0, 1] reduce the stages [1, 0] (rank 0) and [0, 1] (rank 1) in different orders" in fault


@pytest.mark.parametrize("function", ops.COLLECTIVES)
def test_a_lost_reduction_is_found_in_the_programs(function: object) -> None:
    program = fxpipe.compile(
        unet(), 2, batch_size=4, microbatches=2, schedule="1f1b", data_parallel=2,
        shard={ops.all_reduce: "none", ops.gather: "weights"}.get(function, "optimizer"),
    )  # fmt: skip
    step = program.step
    of_step = step.messages, step.sends.positions, [*step.reductions, *step.gatherings]
    assert check_programs(step.programs, *of_step) == []
    (node,) = step.programs[1].graph.find_nodes(op="call_function", target=function)  # type: ignore[arg-type]
    node.args = (*node.args[:2], [0], *node.args[3:])
    faults = check_programs(step.programs, *of_step)
    assert any("rank 1 starts a reduction that is not planned" in fault for fault in faults)


@pytest.mark.parametrize(
    ("schedule", "world_size", "data_parallel", "microbatches"),
    [("1f1b", 4, 2, 8), ("wave", 4, 2, 3), ("zero-bubble", 6, 3, 8), ("gpipe", 3, 3, 3), ("interleaved", 8, 4, 8)],
)
def test_pipelines_side_by_side(schedule: str, world_size: int, data_parallel: int, microbatches: int) -> None:
    model = unet()
    program = fxpipe.compile(
        model, world_size, batch_size=11, microbatches=microbatches, schedule=schedule, data_parallel=data_parallel
    )
    assert program.plan.staged.replicas == data_parallel
    assert_exact(program, model)


@pytest.mark.parametrize("ranks", [((0,), (1, 2)), ((0, 1, 2), (3,)), ((0, 1), (1, 2), (0,)), ((2, 0), (2, 0))])
def test_any_replicas(ranks: tuple[tuple[int, ...], ...]) -> None:
    model = unet()
    found: dict[str, object] = {}
    stages = {"stages": len(ranks), "batch_size": 7, "microbatches": 5}
    fxpipe.compile(model, 1, schedule="gpipe", observe=found.__setitem__, **stages)
    work: Work = found["stage graphs"].work  # type: ignore[attr-defined]
    ones = [1.0] * len(ranks)
    schedule = make_schedule("1f1b", work, ranks, ones, ones)
    assert_exact(fxpipe.compile(model, len(schedule.ranks), batch_size=7, schedule=schedule), model)


def train(case: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and this rank's parameters after three steps of two pipelines of two ranks."""
    torch.manual_seed(0)
    model = PEER_CASES[case](torch.float64)
    program = fxpipe.compile(model, 4, batch_size=5, microbatches=4, schedule="1f1b", data_parallel=2)
    if case == "crossed_skips":  # with every second block computed again
        runs = tuple((block, block + 1) for block in range(1, len(program.blocks.blocks), 2))
        plan = replace(program.plan, staged=replace(program.plan.staged, recompute=runs))
        program = fxpipe.compile(model, 4, batch_size=5, plan=plan)
    local = "WORLD_SIZE" not in os.environ
    engine = program.local_engine(seed=3) if local else program.engine(seed=3)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-2)
    losses = losses_of(engine, optimizer, (program.model.example_inputs(5) for _ in range(3)))
    trained = {name: p.detach() for name, p in engine.named_parameters()}
    if not local:
        mesh = engine.mesh
        assert mesh is engine.mesh
        for name, members in (
            ("data", engine.rank % 2 + torch.tensor([0, 2])),
            ("pipeline", mesh.mesh[engine.rank // 2]),
        ):
            total = torch.tensor(float(engine.rank))
            dist.all_reduce(total, group=mesh.get_group(name))
            assert mesh[name].mesh.equal(members)
            assert float(total) == float(members.sum())
        engine.close()
    return losses, trained


@pytest.mark.parametrize("case", ["crossed_skips", "tied_parameters"])
def test_gloo_equals_threads(case: str) -> None:
    """And ranks are a mesh of two pipelines of two."""
    losses, expected = train(case)
    seen = set()
    for of_rank, trained in run_processes(4, train, case):
        assert of_rank == losses
        seen |= set(trained)
        for name, parameter in trained.items():
            assert torch.equal(parameter, expected[name]), name
    assert seen == set(expected)


@pytest.mark.parametrize(("schedule", "world_size"), [("1f1b", 2), ("zero-bubble", 2), ("wave", 3)])
def test_recomputed_stages_are_exact_and_keep_less(schedule: str, world_size: int) -> None:
    model = unet()
    options = {"batch_size": 7, "microbatches": 4, "schedule": schedule}
    plain = fxpipe.compile(model, world_size, **options)
    again = fxpipe.compile(model, world_size, recompute=True, **options)
    assert_exact(again, model)
    kept = [sum(m.at_peak.get("activations", 0) for m in p.simulate().memory) for p in (plain, again)]
    assert kept[1] < kept[0]
