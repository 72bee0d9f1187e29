"""Weights that replicas of a stage share out (ZeRO-3), and gradients of every micro-batch: exact, gathered for the
actions that read them, summed as they come, and let go."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.plan import ops
from tests.distributed import run_processes
from tests.own_models import SEED, Adapted, OneDevice, Trained, assert_same, batch, script
from tests.test_never_slower import DEVICES
from tests.test_own_model import ROWS, Layout, assert_exact, on_threads, one_device, program
from tests.unet import TinyUNet

WEIGHTS, ALL, GRADIENTS = {"shard": "weights"}, {"shard": "all"}, {"shard": "gradients"}
LAYERS: Layout = {"schedule": "interleaved", "data_parallel": 2, "stages": 4} | WEIGHTS
"""Several stages on a rank: each is gathered apart."""
TWICE = LAYERS | {"microbatches": 4}
"""Gradients of two micro-batches a replica, for which there are two sums where these are shared out."""
LINE = {"schedule": "1f1b"}


@pytest.mark.parametrize(
    ("world_size", "layouts", "trained"),
    [
        (3, [LAYERS | {"data_parallel": 3, "microbatches": 3}], "all"),
        (4, [{"schedule": "wave", "data_parallel": 2} | WEIGHTS], "adapters"),
        (4, [{"schedule": "zero-bubble", "data_parallel": 2, "microbatches": 4} | WEIGHTS], "all"),
        (2, [LAYERS, LINE], "adapters"),  # the second holds whole what the first shares out
        (2, [LINE, TWICE], "all"),
        (2, [TWICE | ALL], "adapters"),
        (2, [TWICE | GRADIENTS], "all"),
        (4, [{"schedule": "zero-bubble", "data_parallel": 2, "microbatches": 4} | ALL], "all"),
        (2, [TWICE | ALL, LINE], "all"),
        (2, [LINE, TWICE | GRADIENTS], "adapters"),
    ],
)
def test_a_users_script_is_exact(world_size: int, layouts: list[Layout], trained: str) -> None:
    assert_exact(world_size, layouts, trained, whole=False)


def test_a_rank_keeps_its_share_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of trained and frozen weights, from the beginning; what it lacks is neither read nor written by mistake."""
    brought = set[Tensor]()

    def at(device: torch.device, tensor: Tensor) -> Tensor:
        brought.add(tensor)
        return tensor

    monkeypatch.setattr("fxpipe.run.engine.at", at)

    def body(model: nn.Module, engines: Any) -> tuple[int, int, list[Tensor]]:
        engine = engines[0]()
        held = sum(p.untyped_storage().nbytes() for p in model.parameters())
        assert 0 < sum(p.nbytes for p in model.parameters() if p in brought) <= held  # of which the device has memory
        engine.step(batch(0, ROWS[0]))
        assert sum(p.untyped_storage().nbytes() for p in model.parameters()) == held
        lacks = next(p for p in model.parameters() if p.untyped_storage().nbytes() < p.nbytes)
        assert lacks.isnan().all()
        with torch.no_grad(), pytest.raises(RuntimeError, match="single memory location"):
            lacks.copy_(torch.zeros(lacks.shape))
        for use in (model.state_dict, lambda: model(**batch(0, ROWS[0]))):
            with pytest.raises(fxpipe.RunError, match=r"not here yet.*sync_model"):
                use()
        engine.sync_model()
        model(**batch(0, ROWS[0]))
        state = [tensor.clone() for tensor in model.state_dict().values()]
        engine.step(batch(0, ROWS[0]))
        assert sum(p.untyped_storage().nbytes() for p in model.parameters()) == held
        return held, sum(p.nbytes for p in model.parameters()), state

    (held, whole, first), (other, _, second) = on_threads(2, [LAYERS], body, "adapters")
    spare = sum(p.nbytes for p in Adapted().spare.parameters())  # which no program reads
    tied = sum(p.nbytes for p in Adapted().layers[0].parameters())  # read by two stages
    assert held + other < (whole + spare + tied) * 1.05
    torch.testing.assert_close(first, second, rtol=0.0, atol=0.0)


@pytest.mark.parametrize(
    ("world_size", "replicas", "stages", "schedule", "shard", "batch_size"),
    [
        (2, 2, 1, "gpipe", "weights", 12),
        (3, 3, 4, "interleaved", "weights", 12),
        (4, 2, 2, "1f1b", "weights", 12),
        (6, 3, 4, "wave", "weights", 12),
        (4, 2, 2, "zero-bubble", "weights", 12),
        (2, 2, 1, "gpipe", "gradients", 11),
        (3, 3, 4, "interleaved", "all", 11),
        (6, 3, 4, "wave", "all", 12),
        (4, 2, 2, "1f1b", "all", 12),
    ],
)
def test_a_unet_is_exact(
    world_size: int, replicas: int, stages: int, schedule: str, shard: str, batch_size: int
) -> None:
    """With a frozen encoder and a frozen layer among trained ones, in a step of its own and in one with the next
    batch's frozen work, by uneven micro-batches."""
    model = TinyUNet("no_grad")
    model.down_1.requires_grad_(False)
    given = {"schedule": schedule, "data_parallel": replicas, "stages": stages, "microbatches": 2 * replicas}
    made = fxpipe.compile(model, world_size, batch_size=batch_size, fill="idle", shard=shard, **given)
    assert bool(made.step.gatherings) == (shard != "gradients")
    assert {reduction.turn for reduction in made.step.reductions} == ({0} if shard == "weights" else {0, 1})
    assert made.verify(**model.example_inputs(batch_size)).ok
    for filled in (False, True):
        planned = made.plan.predicted["steady" if filled else "step"].peak_bytes
        assert max(made.simulate(filled=filled).peak_bytes) == pytest.approx(planned, rel=0.03 if filled else 0.02)
    engine = made.local_engine()
    batches = [model.example_inputs(batch_size)] * 2
    gradients = []
    for following in (batches[1], None):
        engine.step(batches[0], following)
        gradients.append({name: p.grad for name, p in model.named_parameters()})
        model.zero_grad()
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-10, atol=0.0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            ("rank 0: 0F0 0F2 0B0 0B2 0R0", "rank 0: 0F0 0B0 0F2 0B2 0R0"),
            r"ranks 0, 1, which do not train in one order",
        ),
        (("on ranks 0, 1: ", "on rank 0: "), r"shared out, but stages have \[1\] replicas|0F1 on rank 1"),
        (
            ("0B0 0B2 0R0", "0B0 0R0 0B2 0R0:1"),
            r"shares out 'weights', but schedule gpipe sums .* several times: share out 'all', or .* in place of 0R0",
        ),
    ],
)
def test_a_plan_whose_replicas_cannot_gather_together_is_refused(change: tuple[str, str], says: str) -> None:
    layout = {"schedule": "gpipe", "data_parallel": 2, "microbatches": 4} | WEIGHTS
    text = str(program(Adapted(), 2, ROWS[0], layout).plan)
    assert change[0] in text
    edited = fxpipe.Plan.parse(text.replace(*change))
    with pytest.raises(fxpipe.CompileError, match=says):
        program(Adapted(), 2, ROWS[0], {"microbatches": None, "plan": edited})


def test_a_run_is_taken_up_by_an_engine_that_has_trained(tmp_path: Path) -> None:
    """What a rank has no memory for is loaded where it is held."""

    def body(model: nn.Module, engines: Any) -> list[Any]:
        engine, found = engines[0](), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for number in range(2):
            engine.step(batch(number, ROWS[0]))
            optimizer.step()
            optimizer.zero_grad()
            engine.save(tmp_path, optimizer)
        for folder in ("step-1", "step-2"):
            engine.load(tmp_path / folder, optimizer)
            if folder == "step-1":
                engine.step(batch(1, ROWS[0]))
                optimizer.step()
                optimizer.zero_grad()
            found.append(engine.gather_state_dict())
        return found

    (first, second), _ = on_threads(2, [LAYERS], body, "adapters")
    torch.testing.assert_close(first, second, rtol=0.0, atol=0.0)


def small_batches(model: nn.Module, engine: Any) -> list[Any]:
    """The last batch of an epoch has fewer samples: some replica has none."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for number, size in enumerate((4, 1, 3, 4)):
        losses.append(float(engine.step({name: value[:size] for name, value in batch(number, ROWS[0]).items()})))
        engine.clip_grad_norm_(0.2)
        optimizer.step()
        optimizer.zero_grad()
    return [losses, engine.gather_state_dict()]


def most_gathered(graph: torch.fx.Graph) -> int:
    """Stages whose weights are on their way or here at once; those that nothing reads go as they come."""
    place = {node: number for number, node in enumerate(graph.nodes)}
    spans = []
    for wait in graph.find_nodes(op="call_function", target=ops.wait_gathered):
        spans.append((place[wait.args[0]], max(place[reader] for reader in (wait, *wait.users))))
    return max(sum(start <= here <= end for start, end in spans) for here in place.values())


@pytest.mark.parametrize(("microbatches", "shard"), [(2, "weights"), (4, "weights"), (4, "all"), (4, "gradients")])
def test_smaller_batches(microbatches: int, shard: str) -> None:
    """A replica without samples holds no more of the others' weights at once than one that has some, and owns the same
    share of gradients."""
    layout = LAYERS | {"microbatches": microbatches, "shard": shard}
    programs = program(Adapted("adapters"), 2, ROWS[0], layout).smaller(1).programs
    assert [most_gathered(of.graph) for of in programs] == ([0, 0] if shard == "gradients" else [2, 2])
    found, _ = on_threads(2, [layout], lambda model, engines: small_batches(model, engines[0]()), "adapters")
    model = Adapted("adapters")
    torch.testing.assert_close(found, small_batches(model, OneDevice(model)), rtol=1e-10, atol=1e-12)


def test_batches_of_another_shape_are_cut_for_all_replicas_alike() -> None:
    """Of 3 samples 2 micro-batches instead of 4; a sample alone has one replica, with all weights."""
    made = program(Adapted("adapters"), 2, ROWS[0], LAYERS | {"microbatches": 4})
    for samples, replicas in ((3, 2), (1, 1)):
        other = {name: value[:samples] for name, value in batch(0, 7 + samples).items()}
        with pytest.warns(UserWarning, match="for the first time"):
            assert made.verify(**other).ok
        assert made.of((), other).plan.staged.replicas == replicas


def as_process(shard: str) -> tuple[Trained, Any]:
    def engine(model: nn.Module) -> Any:
        compiled = program(model, int(os.environ["WORLD_SIZE"]), ROWS[0], TWICE | {"shard": shard})
        return compiled.engine(seed=SEED, timeout=timedelta(minutes=1))

    model, another = Adapted("adapters"), Adapted("adapters")
    trained = script(model, [lambda: engine(model)], ROWS, whole=False)
    return trained, small_batches(another, engine(another))


@pytest.mark.parametrize("shard", ["weights", "all"])
def test_processes_train_as_one_device(shard: str) -> None:
    (first, states), (second, others) = run_processes(2, as_process, shard)
    assert_same(first, one_device("adapters", 1))
    assert (second.losses, second.norms) == (first.losses, first.norms)
    model = Adapted("adapters")
    torch.testing.assert_close(states, small_batches(model, OneDevice(model)), rtol=1e-10, atol=1e-12)
    assert others == [states[0], None]


class Heavy(nn.Module):
    """More weights than anything else; some of them are frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(12)).double()
        self.layers[3:5].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x.square().mean()

    def example_inputs(self, batch_size: int) -> dict[str, Tensor]:
        return {"x": torch.randn(batch_size, 32, dtype=torch.float64)}


def test_weights_are_shared_out_where_memory_asks_for_it() -> None:
    """Two replicas of six stages do not fit otherwise, and are then as exact."""

    def heavy(**options: Any) -> fxpipe.Program:
        given = {"batch_size": 4, "microbatches": 2, "schedule": "interleaved", "data_parallel": 2, "stages": 6}
        return fxpipe.compile(Heavy(), 2, **given | options)

    least = heavy(**WEIGHTS).plan.peak_bytes
    assert least is not None
    limit = least * 11 // 10
    with pytest.raises(fxpipe.CompileError, match="no plan fits into memory_limit"):
        heavy(memory_limit=limit, shard="optimizer", offload_optimizer=False)
    made = heavy(memory_limit=limit)
    assert made.plan.staged.shard == "weights"
    assert "weights and optimizer states shared out over replicas" in str(made.plan)
    assert fxpipe.Plan.parse(str(made.plan)) == made.plan == fxpipe.Plan.from_dict(made.plan.as_dict())
    assert max(made.simulate().peak_bytes) == pytest.approx(made.plan.peak_bytes, rel=0.02)
    assert made.verify(**made.model.example_inputs(4)).ok  # type: ignore[operator]
    assert heavy(memory_limit=2 * limit).plan.staged.shard == "optimizer"
    own = heavy(memory_limit=limit, schedule=made.plan.step, data_parallel=None, stages=None).plan
    assert own.staged.shard == "weights"
    assert own.peak_bytes is not None
    assert own.peak_bytes <= limit
    alone = heavy(data_parallel=1, **WEIGHTS).plan
    assert "shard='weights': every stage has one replica, and nothing is shared out" in str(alone)
    assert fxpipe.Plan.parse(str(alone)) == alone


@pytest.mark.parametrize(("shard", "found"), [("gradients", "optimizer"), ("all", "weights")])
def test_gradients_of_one_micro_batch_each_are_those_of_the_step(shard: str, found: str) -> None:
    """Which the plan says, also of an order that is given."""
    given: dict[str, Any] = {"batch_size": 4, "shard": shard}
    made = fxpipe.compile(Heavy(), 2, schedule="gpipe", stages=2, microbatches=2, data_parallel=2, **given)
    again = fxpipe.compile(Heavy(), 2, schedule=made.plan.step, **given)
    for plan in (made.plan, again.plan):
        assert plan.staged.shard == found
        assert f"shard='{shard}': replicas have one micro-batch each, which makes it '{found}'" in str(plan)
    assert again.verify(**Heavy().example_inputs(4)).ok


def test_an_order_of_scattered_gradients_may_be_given_as_one_of_whole_ones() -> None:
    """As the refusal says."""
    scattered = """
        rank 0: 0F0 0B0 0R0 0F2 0B2 0R0:1
        rank 1: 0F1 0F3 0B1 0R1 0B3 0R1:1"""
    with pytest.raises(fxpipe.CompileError) as told:
        fxpipe.compile(Heavy(), 2, schedule=scattered, batch_size=4)
    remedy = "make them agree, or shard='optimizer', where you reduce once, after the last gradient of a stage: 0R0 in "
    assert f"{remedy}place of 0R0 and 0R0:1" in str(told.value)
    once = scattered.replace("0B0 0R0", "0B0").replace("0B1 0R1", "0B1").replace(":1", "")
    assert fxpipe.compile(Heavy(), 2, schedule=once, batch_size=4, shard="optimizer").plan.staged.shard == "optimizer"


def test_gradients_are_shared_out_where_that_is_faster_or_makes_room() -> None:
    """Of four micro-batches a replica, on a device that adds up slowly: a sum of shares instead of whole gradients."""

    def heavy(**options: Any) -> fxpipe.Plan:
        given = {"batch_size": 8, "microbatches": 8, "data_parallel": 2, "cost_model": DEVICES["busy"], "budget": 0.0}
        plan = fxpipe.compile(Heavy(), 2, **given | {"schedule": "interleaved", "stages": 6} | options).plan
        assert plan.best is not None
        return plan

    ways = {shard: heavy(shard=shard) for shard in ("optimizer", "gradients", "weights", "all")}
    assert (heavy().staged, heavy().best) == (ways["gradients"].staged, ways["gradients"].best)
    assert heavy(schedule="auto", stages=None).staged.shard == "gradients"
    assert ways["all"].best.seconds < ways["weights"].best.seconds
    least, room = ways["all"].peak_bytes, ways["gradients"].peak_bytes
    assert least is not None
    assert room is not None
    assert least < room
    assert heavy(memory_limit=room - 1).staged.shard == "all"
    assert heavy(memory_limit=room).staged.shard == "gradients"
