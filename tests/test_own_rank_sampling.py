"""A process of a launch lowers its own rank of a sampler alone: the program it would get with all others beside it, by
rank 0's plan, and the same messages; what it is asked of the others it makes then."""

import os
import time
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import fxpipe
from fxpipe.errors import CompileError, RunError
from fxpipe.plan import ops
from fxpipe.plan.program_check import check_programs
from fxpipe.plan.sample_program import SampleProgram
from fxpipe.plan.unroll import in_sequence
from fxpipe.run import launch
from fxpipe.run.launched_rank import LaunchedRank
from fxpipe.run.transport import distributed
from fxpipe.sampler import Sampler
from fxpipe.sampling import lowering, programs
from fxpipe.sampling.planning import line_for
from passes.sampling import piped, staged, text
from tests.denoisers import noise, small
from tests.distributed import run_processes
from tests.test_sampler_faults import Rows

UNET, JOINT = "UNet2DConditionModel", "SD3Transformer2DModel"
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "rows": (UNET, 3, {"cfg": 1, "patches": 3}),
    "groups": (UNET, 4, {"cfg": 2, "patches": 2}),
    "copies": (UNET, 4, {}),
    "displaced": (UNET, 3, {"cfg": 1, "patches": 3, "mode": "displaced"}),
    "displaced groups": (UNET, 4, {"cfg": 2, "patches": 2, "mode": "displaced", "norms": "sync", "advance": False}),
    "text": (JOINT, 4, {"cfg": 1, "patches": 4}),
    "displaced text": (JOINT, 3, {"cfg": 1, "patches": 3, "mode": "displaced"}),
    "ulysses": (JOINT, 2, {"cfg": 1, "patches": 2, "attention": "ulysses"}),
    "ring": (JOINT, 3, {"cfg": 1, "patches": 3, "attention": "ring"}),
    "stages": (UNET, 4, {"cfg": 1, "stages": 2, "patches": 2, "fold": True}),
    "in turn": (UNET, 4, {"cfg": 2, "stages": 2, "patches": 3, "mode": "displaced"}),
    "text in turn": (JOINT, 2, {"cfg": 1, "stages": 2, "patches": 3, "mode": "displaced"}),
}  # fmt: skip


@cache
def compiled(name: str) -> Sampler:
    key, world_size, how = LAYOUTS[name]
    given = small(key)
    return fxpipe.compile_sampler(given.model, world_size, example=given.example, **how)


def told(program: SampleProgram) -> str:
    """All of a program."""
    graphs = {name: form.graph for name, form in program.forms.items()} | {"once": program.once or fx.Graph()}
    nodes = {name: [(n.op, n.name, str(n.target), n.args, n.kwargs) for n in of.nodes] for name, of in graphs.items()}
    forms = {name: (form.carried, form.carries, form.parts) for name, form in program.forms.items()}
    state = {name: (tensor.shape, tensor.dtype) for name, tensor in program.state.items()}
    return f"{program.rank} {program.inputs} {state} {forms} {nodes}"


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_rank_alone_has_the_program_it_has_among_all(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    together, sampler = compiled(name).step, compiled(name)
    plan, made = together.plan, list[tuple[int, Any]]()
    assert {"copies": plan.copies > 1, "text": plan.text_first, "displaced text": plan.text_first}.get(name, True)

    def recorded(make: Any, rows: Any, patch: Any, piece: Any = None, *args: Any, **kwargs: Any) -> fx.Graph:
        made.append((patch.index, piece))
        return make(rows, patch, piece, *args, **kwargs)  # type: ignore[no-any-return]

    for module in (programs, piped, staged, text):
        monkeypatch.setattr(module, "patch_graph", partial(recorded, vars(module)["patch_graph"]))
    asked: Any = sampler.denoiser.lowering
    for rank in range(plan.world_size):
        made.clear()
        fresh = asked.case(together.traced, plan.num_samples)
        alone = asked._lowered(fresh, plan, rank)
        assert [program.rank for program in alone.programs] == [rank]
        assert told(alone.program(rank)) == told(together.program(rank))
        assert alone.messages_of == together.messages_of
        assert (alone.digest, alone.forms, alone.channels) == (together.digest, together.forms, together.channels)
        if plan.in_turn:  # its stage's nodes
            line = line_for(fresh, plan)
            assert line is not None
            column = rank % line.num_columns
            assert {piece.nodes for _, piece in made} == {s.nodes for s in line.stages if s.column == column}
        else:
            assert {index for index, _ in made} == {rank % plan.num_patches}
    assert told(alone.whole.programs[0]) == told(together.programs[0])


def test_a_send_after_a_wait_that_may_need_it_is_seen_in_one_program() -> None:
    """Rank 0 waits for rank 1's part of the prediction before it sends its own."""
    step = compiled("rows").step
    (graph,), sent = in_sequence(step.programs[:1], step.messages_of, ("fresh",))
    positions = {message.edge: position for position, message in enumerate(sent)}
    assert check_programs([graph], sent, positions) == []
    nodes = list(graph.graph.nodes)
    wait = next(n for n in reversed(nodes) if n.target is ops.wait and n.args[0].args[1] == 1)  # type: ignore[union-attr]
    send = next(n for n in reversed(nodes) if n.target is ops.send and n.args[2] == 1)
    wait.append(send)
    (fault,) = check_programs([graph], sent, positions)
    assert "rank 0 waits before it sends" in fault
    assert f"{send.format_node()}  <-- HERE" in fault


# -- processes


def noted() -> list[int]:
    """The ranks that are lowered from now on."""
    seen, own = list[int](), lowering.programs_of

    def programs_of(*args: Any) -> Any:
        found = own(*args)
        seen.extend(program.rank for program in found[0])
        return found

    lowering.programs_of = programs_of
    return seen


def launched(mode: str, folder: str) -> tuple[list[Tensor], list[int], list[str], int, list[str]]:
    """Predictions of the example and of another size, which ranks were lowered, plans, how often one was made, and what
    was observed."""
    seen, made, phases, own = noted(), list[int](), list[str](), lowering.ranked

    def ranked(*args: Any, **kwargs: Any) -> Any:
        made.append(1)
        return own(*args, **kwargs)

    lowering.ranked = ranked
    torch.manual_seed(0)
    model = Rows().double()
    sampler = compiled_rows(model, mode, observe=lambda name, artefact: phases.append(name))
    found, plans = list[Tensor](), list[str]()
    for height in (12, 16, 12):
        found.append(sampler.predict(**given(height)))
        plans.append(str(sampler.denoiser.step((), given(height)).plan))
    lowered = [*seen]
    assert sampler.verify().ok
    assert seen == lowered
    assert len(sampler.simulate().memory) == 2
    assert len([*sampler.dump(Path(folder, os.environ["RANK"])).glob("rank_*.py")]) == 2
    assert seen == [*lowered, 0, 1]  # once, when they are asked for
    sampler.close()
    return found, lowered, plans, len(made), phases


def given(height: int) -> dict[str, Tensor]:
    return {"sample": noise(2, 2, height, 5), "time": torch.ones(1).double(), "text": noise(2, 3)}


def compiled_rows(model: Rows, mode: str, **how: Any) -> Sampler:
    how = {"mode": mode, "sample": {"sample": 2}, "warmup": 1, **how}
    return fxpipe.compile_sampler(model, 2, example=given(12), **how)


@pytest.mark.parametrize("mode", ["exact", "displaced"])
def test_a_process_lowers_its_own_rank_by_rank_0s_plan(mode: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sampler = compiled_rows(Rows().double(), mode)
    wanted = [sampler.predict(**given(height)) for height in (12, 16, 12)]
    plans = [str(sampler.denoiser.step((), given(height)).plan) for height in (12, 16, 12)]
    phases = ["capture", "rows", "layouts", "plan", "programs"] * 2
    for rank, (found, lowered, same, made, seen) in enumerate(run_processes(2, launched, mode, str(tmp_path))):
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
        assert lowered == [rank, rank]
        assert same == plans
        assert bool(made) == (rank == 0)
        assert seen == phases  # on all ranks alike


def given_ways() -> list[tuple[int, str, bool]]:
    """Of samplers for many requests, and by a plan that is given: requests of a call, the plan, whether it is exact."""
    torch.manual_seed(0)
    model, found = Rows().double(), list[tuple[int, str, bool]]()
    for how in ({"objective": "throughput"}, {"patches": 2}):
        sampler = compiled_rows(model, "exact", **how)
        found.append((sampler.requests, str(sampler.plan), sampler.verify().ok))
        sampler.close()
    sampler = compiled_rows(model, "exact", plan=sampler.plan)
    found.append((sampler.requests, str(sampler.plan), sampler.verify().ok))
    assert len(sampler.step.programs) == (1 if "RANK" in os.environ else 2)
    sampler.close()
    return found


def test_requests_and_given_plans_are_the_same_on_all_ranks() -> None:
    wanted = given_ways()
    assert wanted[0][0] > 1
    assert wanted[1] == wanted[2]
    assert all(exact for *_, exact in wanted)
    assert run_processes(2, given_ways) == [wanted, wanted]


def refused() -> dict[str, str]:
    """What one rank says where rank 0 has no plan, where it was asked for something else, and where one rank alone
    compiles."""
    rank, said = int(os.environ["RANK"]), dict[str, str]()
    own: Any = distributed.DistributedTransport
    distributed.DistributedTransport = partial(own, heartbeat_seconds=0.1, lost_after_seconds=2.0)  # type: ignore[misc]
    torch.manual_seed(0)
    model = Rows().double()

    def compile(**how: Any) -> Sampler:
        return compiled_rows(model, "exact", **how)

    sampler = compile(patches=2)
    with pytest.raises(CompileError) as error:
        sampler.predict(**given(1))  # of all ranks: the sampler goes on
    said["small"] = str(error.value)
    assert sampler.verify().ok
    sampler.close()
    for name, fault in {
        "memory": lambda: compile(memory_limit=100),
        "options": lambda: compile(steps=40 + rank),
        "rank 1 compiles": lambda: alone(compile(patches=2), rank == 1),
        "rank 0 compiles": lambda: alone(compile(patches=2), rank == 0),
    }.items():
        with pytest.raises((CompileError, RunError)) as caught:
            fault()
        said[name] = f"{type(caught.value).__name__}: {caught.value}"
    return said


def alone(sampler: Sampler, compiles: bool) -> None:
    """One rank of two makes another call than the other."""
    sampler.predict(**given(16 if compiles else 12))


def test_what_is_refused_is_refused_alike_on_all_ranks() -> None:
    one, other = run_processes(2, refused)
    assert one == other
    assert one["small"].startswith("2 patches of 1 units")
    assert one["memory"].startswith("CompileError: no layout fits into memory_limit=100 B per rank")
    assert one["options"].startswith("RunError: ranks [1] have another steps (41) than rank 0 (40); give every rank")
    for name in ("rank 1 compiles", "rank 0 compiles"):
        assert one[name].startswith("RunError: ranks [1] have another shape of sample (")


def planning() -> list[str]:
    """What a rank hears of plans: of one that takes longer than messages may, of one that takes too long, of one that
    fails."""
    made: Any = partial(distributed.DistributedTransport, heartbeat_seconds=0.1, timeout_seconds=3.0)

    def plan(fails: bool, seconds: float) -> str:
        time.sleep(seconds)
        return f"{1 // (not fails)} plan"

    said = list[str]()
    for bound, fails, seconds in ((1800.0, False, 3.5), (0.5, False, 1.0), (1800.0, True, 0.0)):
        launch.PLAN_SECONDS, ranks = bound, LaunchedRank(made())
        try:
            with ranks.compiling({}):
                said.append(ranks.of_rank_zero(partial(plan, fails, seconds)))
        except (RunError, ZeroDivisionError) as error:
            said.append(str(error))
        ranks.close()
    return said


def test_ranks_wait_for_the_plan_for_longer_than_for_messages() -> None:
    one, other = run_processes(2, planning)
    waited = "waited 0.5 s for plan 1 of rank 0"
    division = "integer division or modulo by zero"
    assert (one[0], one[2]) == ("1 plan", division)
    assert one[1].startswith(f"rank 1 failed in compile: {waited}; with that this engine, or sampler, has ended")
    assert other == ["1 plan", waited, f"rank 0 failed in compile: ZeroDivisionError: {division}"]


def one_cannot(name: str) -> str:
    """Rank 1 alone finds out that the plan is none."""
    if os.environ["RANK"] == "1":

        def refuse(*_: Any) -> Any:
            raise CompileError("not here")

        setattr(lowering, name, refuse)
    with pytest.raises(CompileError) as caught:
        compiled_rows(Rows().double(), "exact", patches=2)
    return str(caught.value)


@pytest.mark.parametrize("name", ["is_of", "line_for"])
def test_what_one_rank_cannot_lower_no_rank_does(name: str) -> None:
    assert run_processes(2, one_cannot, name) == ["not here"] * 2


class Odd(Rows):
    """Another model on rank 1."""

    def forward(self, sample: Tensor, time: Tensor, text: Tensor) -> Tensor:
        found = super().forward(sample, time, text)
        return found if os.environ["RANK"] == "0" else found + found.sin()


def odd() -> str:
    with pytest.raises(RunError) as caught:
        compiled_rows(Odd().double(), "exact", patches=2)
    return str(caught.value)


def test_another_model_on_one_rank_ends_all() -> None:
    for said in run_processes(2, odd):
        assert "rank 0 has planned call" in said
        assert "which rank 1 does not make: its model is another one" in said
