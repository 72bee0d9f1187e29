"""Stage graphs by another back end: the same loss and gradients, weights that stay the model's own; a graph that does
not compile runs eagerly. Real compilers take minutes: everyday tests have one that runs the graph it is given."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

import fxpipe
from fxpipe.capture import private
from fxpipe.errors import CompileError
from fxpipe.program import Program
from fxpipe.run.compiled import runnable
from tests.distributed import run_processes
from tests.peer_cases import PEER_CASES
from tests.toy_model import ToyStep


def compiled(world_size: int = 2, case: str = "", **options: Any) -> tuple[Program, Any]:
    torch.manual_seed(0)
    model = PEER_CASES[case](torch.float64) if case else ToyStep().double()
    batch = tuple(tensor.double() for tensor in model.example_inputs(6)) if not case else model.example_inputs(6)
    options = {"schedule": "1f1b", "microbatches": 2, "backend": "inductor", **options}
    return fxpipe.compile(model, world_size, example_inputs=batch, **options), batch


def plain(module: fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
    """A compiler that keeps the graph, and empties lists as it is asked to."""
    stolen = [node.meta.get("steal_arg", False) for node in module.graph.find_nodes(op="placeholder")]

    def run(*args: Any) -> Any:
        found = module(*([*arg] if isinstance(arg, list) else arg for arg in args))
        for arg, steal in zip(args, stolen, strict=True):
            if steal:
                arg.clear()
        return found

    return run


@pytest.mark.parametrize(
    ("case", "schedule"), [("tied_parameters", "1f1b"), ("crossed_skips", "wave"), ("dropout", "zero-bubble")]
)
def test_lifted_graphs_compute_the_same(case: str, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def compiler(module: fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
        seen.append(module.code)
        return plain(module, given)

    monkeypatch.setattr(private, "inductor", compiler)
    program, batch = compiled(case=case, schedule=schedule)
    found = program.verify(**batch) if isinstance(batch, dict) else program.verify(*batch)
    assert found.ok, found
    assert len(seen) == len(set(seen)) >= 4
    assert not any("self." in code.split("\n", 2)[-1] for code in seen)  # weights are arguments


def test_an_optimizer_trains_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "inductor", plain)
    losses: dict[str, list[float]] = {}
    for backend in ("eager", "inductor"):
        program, batch = compiled(backend=backend)
        engine = program.local_engine()
        optimizer = torch.optim.AdamW(program.model.parameters(), lr=1e-2, fused=True)
        losses[backend] = [float(loss) for loss in engine.train([batch] * 3, optimizer)]
    assert losses["inductor"] == losses["eager"]
    assert losses["eager"][0] > losses["eager"][2]


def test_outputs_in_shared_memory_are_copied_where_the_graph_clones(monkeypatch: pytest.MonkeyPatch) -> None:
    def aliasing(module: fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
        for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default):
            node.replace_all_uses_with(node.args[0])
        module.recompile()
        return plain(module, given)

    monkeypatch.setattr(private, "inductor", aliasing)
    program, batch = compiled(case="tied_parameters")
    assert program.verify(**batch).ok if isinstance(batch, dict) else program.verify(*batch).ok


def test_a_graph_that_does_not_compile_runs_eagerly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(module: fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
        raise RuntimeError("no compiler here\nand much more")

    monkeypatch.setattr(private, "inductor", fails)
    program, batch = compiled()
    with caplog.at_level(logging.WARNING, "fxpipe.run.compiled"):
        assert program.verify(*batch).ok
    assert "stage_0_forward runs eagerly: inductor: RuntimeError: no compiler here" in caplog.messages


@pytest.mark.parametrize("case", ["tied_parameters", "dropout"])
def test_recorded_graphs_are_called_as_eager_ones_are(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the recording, which takes a GPU."""
    monkeypatch.setattr(private, "needs_host", lambda graph: None)
    monkeypatch.setattr(private, "recorded", lambda run, *rest: run)
    program, batch = compiled(1, case, backend="eager", microbatches=3)
    expected = program.run_local(**batch)
    monkeypatch.setattr(fxpipe.run.local_engine, "runnable", lambda *given: runnable(*given[:2], "cudagraphs"))
    found = program.run_local(**batch)
    assert torch.equal(found.loss, expected.loss)
    assert found.gradients.keys() == expected.gradients.keys()
    assert all(torch.equal(gradient, expected.gradients[name]) for name, gradient in found.gradients.items())


def test_unknown_back_ends_are_refused() -> None:
    with pytest.raises(CompileError, match="backend='triton'; give one of 'eager', 'inductor', 'cudagraphs'"):
        compiled(backend="triton")
    with pytest.raises(CompileError, match="backend='cudagraphs' is for GPUs, the ranks run on cpu"):
        compiled(backend="cudagraphs")


@pytest.mark.parametrize("case", ["", "crossed_skips"], ids=["toy", "crossed_skips"])
def test_inductor_computes_the_same(case: str, caplog: pytest.LogCaptureFixture) -> None:
    program, batch = compiled(case=case)
    found = program.verify(**batch) if isinstance(batch, dict) else program.verify(*batch)
    assert found.ok, found
    assert not [message for message in caplog.messages if "eagerly" in message]


def step_main(backend: str) -> tuple[float, dict[str, torch.Tensor]]:
    program, batch = compiled(backend=backend)
    engine = program.engine()
    loss = float(engine.step(batch))
    gradients = {name: p.grad for name, p in engine.named_parameters() if p.grad is not None}
    engine.close()
    return loss, gradients


def test_inductor_in_processes() -> None:
    wanted = run_processes(2, step_main, "eager")
    for (loss, gradients), (expected, own) in zip(
        run_processes(2, step_main, "inductor", timeout_seconds=400), wanted, strict=True
    ):
        assert loss == pytest.approx(expected, rel=1e-10)
        assert gradients.keys() == own.keys()
        for name, gradient in gradients.items():
            assert (gradient - own[name]).norm() <= 1e-10 * own[name].norm()
