"""Stage graphs by another back end: the same loss and gradients, weights that stay the model's own; a graph that does
not compile runs eagerly. Real compilers take minutes: everyday tests have one that runs the graph it is given."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxpipe
from fxpipe.capture import private
from fxpipe.errors import CompileError
from fxpipe.models.backbones import example_inputs
from fxpipe.plan.transport import Transport
from fxpipe.program import Program
from fxpipe.run import ranks
from fxpipe.run.compiled import runnable
from fxpipe.run.patched import settled
from fxpipe.run.sampling import BoundProgram, SampleRun
from fxpipe.run.transport import RankThreads
from fxpipe.sampler import Sampler
from tests.distributed import run_processes
from tests.peer_cases import PEER_CASES
from tests.tiny_backbones import backbone
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


def in_place(run: Callable[[list[Any]], Any], *rest: Any) -> Callable[[list[Any]], Any]:
    """A recording whose every replay writes in the memory of the one before, as CUDA graphs do."""
    memory: list[torch.Tensor] = []

    def replay(leaves: list[Any]) -> Any:
        found = [value.clone() for value in run(leaves)]
        if not memory:
            memory.extend(found)
        for place, value in zip(memory, found, strict=True):
            place.copy_(value)
        return memory

    return replay


UNET, DIT = "UNet2DConditionModel", "DiTTransformer2DModel"
SAMPLERS: dict[str, tuple[str, dict[str, Any]]] = {
    "rows": (UNET, {"patches": 2}),
    "advanced": (UNET, {"patches": 2, "mode": "displaced", "warmup": 2}),
    "displaced": (DIT, {"patches": 2, "mode": "displaced", "warmup": 2, "advance": False}),
    "stages": (UNET, {"stages": 2}),
    "pipeline": (DIT, {"stages": 2, "patches": 4, "mode": "displaced", "warmup": 1}),
    "pipeline of a U-Net": (UNET, {"stages": 2, "patches": 4, "mode": "displaced", "warmup": 1}),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_sampling_between_messages(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By each form's segments: to the bit what eager ones give, also where memory is written again."""
    monkeypatch.setattr(private, "inductor", plain)
    monkeypatch.setattr(private, "needs_host", lambda graph: None)
    monkeypatch.setattr(private, "recorded", in_place)
    model, options = SAMPLERS[name]
    sampler = fxpipe.compile_sampler(backbone(model), 2, **options)
    wanted = sampled(sampler)
    for backend in ("inductor", "cudagraphs"):
        monkeypatch.setattr(ranks, "BoundProgram", lambda *given, by=backend, **_: BoundProgram(*given, backend=by))
        sampler.ranks.forget(sampler.step)
        same = [*map(torch.equal, sampled(sampler), wanted)]
        assert same == [True] * 6
    assert "runs eagerly" not in caplog.text


def sampled(sampler: Sampler) -> list[torch.Tensor]:
    """Six steps of a call."""
    call = {key: value for key, value in example_inputs(sampler.denoiser.module, 2).items() if key != "target"}
    name, found = "sample" if "sample" in call else "hidden_states", list[torch.Tensor]()
    call[name] = torch.randn(call[name].shape, generator=torch.Generator().manual_seed(0))
    with sampler.call():
        for step in range(6):
            call["timestep"] = torch.full_like(call["timestep"], 900 - 100 * step)
            found.append(sampler.predict(**call).sample.clone())
            call[name] = call[name] + 0.1 * found[-1][:, : call[name].shape[1]]
    return found


class Conditioned(nn.Module):
    """Reads what it predicted before, as a condition that is no image."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.before = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 2, 1), nn.Linear(2, 4)

    def forward(self, x: Tensor, timestep: Tensor, before: Tensor) -> Tensor:
        told: Tensor = self.before((before * timestep).mean((2, 3)))
        return self.last((self.first(x) + told[..., None, None]).tanh())  # type: ignore[no-any-return]


def test_segments_get_inputs_whose_patches_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code reads memory, which a tensor whose patches are on their way has none of."""

    def compiles(module: fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
        return lambda *args: plain(module, given)(*args) if {*map(type, args)} <= {Tensor, nn.Parameter} else None

    monkeypatch.setattr(private, "inductor", compiles)
    call = {"x": torch.randn(1, 2, 8, 4), "timestep": torch.tensor(0.5), "before": torch.randn(1, 2, 8, 4)}
    options: dict[str, Any] = {"sample": {"x": 2}, "mode": "displaced", "warmup": 1}
    sampler = fxpipe.compile_sampler(Conditioned(), 2, example=call, stages=2, patches=4, **options)
    step, state = sampler.step, sampler.denoiser.state(sampler.step.traced)
    tensors, _ = step.traced.captured.inputs.bind((), call)

    def steps(transport: Transport, backend: str) -> list[Tensor]:
        run, inputs, found = SampleRun(transport), dict(step.bind(tensors)), list[Tensor]()
        bound = BoundProgram(step.program(transport.rank), state, backend=backend)
        for form in step.sequence(5):
            found.append(run.predict(bound, inputs, form))
            inputs |= {"x": inputs["x"] - found[-1], "before": found[-1]}
        return [*map(settled, found)]

    wanted, found = (RankThreads(2).run(partial(steps, backend=backend)) for backend in ("eager", "inductor"))
    assert all(map(torch.equal, found[0] + found[1], wanted[0] + wanted[1]))


def test_unknown_back_ends_are_refused() -> None:
    with pytest.raises(CompileError, match="backend='triton'; give one of 'eager', 'inductor', 'cudagraphs'"):
        compiled(backend="triton")
    with pytest.raises(CompileError, match="backend='cudagraphs' is for GPUs, the ranks run on cpu"):
        compiled(backend="cudagraphs")
    with pytest.raises(CompileError, match="backend='cudagraphs' is for GPUs, the ranks run on cpu"):
        fxpipe.compile_sampler(backbone(DIT), 2, backend="cudagraphs")


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
