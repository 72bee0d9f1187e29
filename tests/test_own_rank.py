"""A process that lowers its own rank alone gets the program it would get with all others beside it, and traces no more
than that needs."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import fx

import fxpipe
from fxpipe.errors import ScheduleError
from fxpipe.plan import ops
from fxpipe.plan.program_check import check_programs
from fxpipe.plan.rank_program import RankProgram
from fxpipe.plan.schedule import Schedule
from fxpipe.program import Program
from passes.lowering import Form, Lowered, lower_form
from passes.lowering.step_graphs import StepGraphs
from tests.frozen_steps import SLOW, FrozenStep
from tests.models import PEER_CASES
from tests.test_self_conditioned import Step
from tests.unet import TinyUNet

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "line": (lambda: TinyUNet("no_grad"), {"world_size": 3, "schedule": "1f1b"}),
    "wave": (lambda: TinyUNet("no_grad"), {"world_size": 2, "schedule": "wave", "microbatches": 3}),
    "split": (lambda: TinyUNet("no_grad"), {"world_size": 3, "schedule": "zero-bubble"}),
    "replicas": (FrozenStep, {"world_size": 4, "schedule": "1f1b", "data_parallel": 2, "cost_model": SLOW}),
    "shared": (lambda: FrozenStep(how="shared"), {"world_size": 3, "schedule": "gpipe", "cost_model": SLOW}),
    "ties": (PEER_CASES["tied_parameters"], {"world_size": 3, "schedule": "interleaved"}),
    "recomputed": (lambda: TinyUNet("no_grad"), {"world_size": 2, "schedule": "1f1b", "recompute": True}),
    "two passes": (lambda: fxpipe.SelfConditioning(Step(), 0.5), {"world_size": 2, "schedule": "interleaved"}),
}


@cache
def compiled(name: str) -> tuple[Program, StepGraphs]:
    make, options = CASES[name]
    torch.manual_seed(0)
    seen: dict[str, Any] = {}
    options = {"batch_size": 6, "microbatches": 2} | options
    return fxpipe.compile(make(), **options, observe=seen.__setitem__), seen["stage graphs"]


def untraced(step: StepGraphs) -> StepGraphs:
    return replace(step, _borders={}, _traced={})


def text(program: RankProgram) -> str:
    names = program.inputs, program.gradients, program.next_inputs, program.carried, program.carries
    modules = [f"{name}: {graph}" for name, graph in program.modules.items()]
    return "\n".join([str((program.rank, names, program.state, program.works_ahead)), str(program.graph), *modules])


def assert_same(alone: Lowered, together: Lowered, rank: int) -> None:
    (mine,) = alone.programs
    assert mine.rank == rank
    assert text(mine) == text(together.programs[rank])
    assert (alone.messages, alone.reductions) == (together.messages, together.reductions)
    assert (alone.without is None) == (together.without is None)
    if alone.without is not None and together.without is not None:
        assert_same(alone.without, together.without, rank)


def forms(name: str) -> list[tuple[Schedule, Form]]:
    program, _ = compiled(name)
    found: list[tuple[Schedule, Form]] = [(program.schedule, "step")]
    if program.filled is not None:
        schedules = [form.schedule for form in program.filled]
        found += zip(schedules, ("prologue", "steady", "epilogue"), strict=True)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_rank_alone_has_the_program_it_has_among_all(name: str) -> None:
    program, step = compiled(name)
    optional = [0] if name == "two passes" else []
    for schedule, form in forms(name):
        together = lower_form(step, schedule, form, None, optional)
        for rank in range(program.world_size):
            fresh = untraced(step)
            assert_same(lower_form(fresh, schedule, form, [rank], optional), together, rank)
            traced = {key for key, _ in fresh._traced}
            actions = schedule.ranks[rank]
            mine = {(a.kind if a.kind == "T" else "F", a.stage) for a in actions if not a.is_piece and a.kind != "R"}
            mine |= {layer for a in actions if a.is_piece for layer in fresh.layers_of(a)}
            assert {key for key in traced if key[0] != "whole batch"} == mine


@pytest.mark.parametrize("name", ["shared", "replicas"])
def test_filled_forms_train_like_one_device(name: str) -> None:
    program, _ = compiled(name)
    assert program.filled is not None
    assert any(action.is_piece for actions in program.filled.steady.schedule.ranks for action in actions)
    batch = program.model.example_inputs(6)  # type: ignore[operator]
    assert program.verify(**batch).ok


def test_ranks_that_wait_for_each_other_are_refused_by_each_alone() -> None:
    program, step = compiled("line")
    (first, *rest) = program.schedule.ranks[2]
    stuck = replace(program.schedule, ranks=(*program.schedule.ranks[:2], (*rest, first)))
    with pytest.raises(ScheduleError, match="stops after"):
        lower_form(untraced(step), stuck, "step", [0])


def test_a_wait_before_what_others_wait_for_is_seen_in_one_program() -> None:
    """Rank 0 waits for a gradient before it sends what that gradient comes of."""
    program, step = compiled("line")
    lowered = lower_form(untraced(step), program.schedule, "step", [0])
    (mine,) = lowered.programs
    graph = fx.Graph()
    graph.output(graph.graph_copy(mine.graph, {}))
    nodes = list(graph.nodes)
    waits = [n for n in nodes if n.target is ops.wait and n.args[0].meta["message"].kind == "gradient"]
    send = next(n for n in nodes if n.target is ops.send and n.meta["message"].kind == "main")
    send.prepend(waits[0].args[0])
    send.prepend(waits[0])
    (fault,) = check_programs([replace(mine, graph=graph)], lowered.messages, lowered.sends.positions)
    assert "rank 0 waits before it sends" in fault
    assert f"{send.format_node()}  <-- HERE" in fault
    assert check_programs([mine], lowered.messages, lowered.sends.positions) == []
