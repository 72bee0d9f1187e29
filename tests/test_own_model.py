"""The user's own script on several ranks: the model's own parameters are trained, exactly as on one device."""

import copy
import os
import pickle
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from fxpipe.plan.schedule import Schedule
from fxpipe.plan.transport import Transport
from fxpipe.run.engine import Engine
from fxpipe.run.transport import run_ranks
from tests.distributed import run_processes
from tests.own_models import SEED, WIDTH, Adapted, OneDevice, Trained, assert_same, batch, copying, script

Layout = dict[str, Any]
ROWS = (5, 3)
WAVE, LINE = {"schedule": "wave"}, {"schedule": "1f1b"}
COPIES = {"schedule": "gpipe", "data_parallel": 2, "shard": "none"}


def program(model: nn.Module, world_size: int, rows: int, layout: Layout) -> fxpipe.Program:
    options = {"microbatches": 2} | layout
    return fxpipe.compile(model, world_size, example_inputs=batch(0, rows), **options)


def as_rank(program: fxpipe.Program, transport: Transport) -> Engine:
    """The engine of a process, on a thread."""
    return Engine(program.kind, program.model, copying(transport), SEED, kinds=program._kinds(whole=False))


def on_threads(world_size: int, layouts: list[Layout], body: Callable[..., Any], trained: str = "all") -> list[Any]:
    """`body(model, engines)` on every rank, which has a model of its own; engines are made when they are called."""
    models = [Adapted(trained) for _ in range(world_size)]
    programs = [[program(m, world_size, *of) for of in zip(ROWS, layouts, strict=False)] for m in models]

    def of_rank(transport: Transport) -> Any:
        engines = [lambda one=one: as_rank(one, transport) for one in programs[transport.rank]]
        return body(models[transport.rank], engines)

    return run_ranks(world_size, of_rank)


def one_device(trained: str, num_buckets: int) -> Trained:
    model = Adapted(trained)
    return script(model, [lambda: OneDevice(model)] * num_buckets, ROWS)


def assert_exact(world_size: int, layouts: list[Layout], trained: str, whole: bool = True) -> None:
    def body(model: nn.Module, engines: Any) -> Trained:
        return script(model, engines, ROWS, whole)

    first, *others = on_threads(world_size, layouts, body, trained)
    assert_same(first, one_device(trained, len(layouts)))
    for other in others:
        assert (other.losses, other.norms, other.states) == (first.losses, first.norms, [None] * 3)
    Adapted(trained).load_state_dict(first.states[0], strict=True)


@pytest.mark.parametrize(
    ("world_size", "layouts", "trained"),
    [
        (3, [{"schedule": "zero-bubble"}], "adapters"),
        (4, [{"schedule": "1f1b", "data_parallel": 2}], "all"),
        (2, [LINE, WAVE], "all"),  # the second holds other layers on a rank
        (2, [{"schedule": "gpipe", "data_parallel": 2}, LINE], "adapters"),
        (
            4,
            [{"schedule": "wave", "data_parallel": 2}, {"schedule": "gpipe", "data_parallel": 4, "microbatches": 4}],
            "all",
        ),
        (2, [COPIES, LINE], "all"),
    ],
)
def test_a_users_script_is_exact(world_size: int, layouts: list[Layout], trained: str) -> None:
    assert_exact(world_size, layouts, trained)


def test_a_local_engine_offers_the_same() -> None:
    model = Adapted("adapters")
    programs = [program(model, 2, *of) for of in zip(ROWS, (LINE, WAVE), strict=True)]
    engines = [lambda one=one: one.local_engine(seed=SEED) for one in programs]
    assert_same(script(model, engines, ROWS), one_device("adapters", 2))


def test_what_other_ranks_train_is_neither_run_nor_saved_before_it_is_here() -> None:
    def body(model: nn.Module, engines: Any) -> list[Tensor]:
        engine = engines[0]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine.step(batch(0, ROWS[0]))
        here = {name for name, p in model.named_parameters() if p.grad is not None}
        assert here == {name for name, _ in engine.named_parameters()}
        optimizer.step()
        for use in (model.state_dict, lambda: model(**batch(0, ROWS[0]))):
            with pytest.raises(fxpipe.RunError, match=r"parameters of Adapted .* trained on other ranks.*sync_model"):
                use()
        engine.sync_model()
        model(**batch(0, ROWS[0]))
        return list(model.state_dict().values())

    first, second = on_threads(2, [LINE], body)
    torch.testing.assert_close(first, second, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("given", [lambda model, engine: model.parameters(), lambda model, engine: engine.parameters()])
def test_what_needs_all_gradients_is_refused_where_they_are_not(given: Callable[..., Any]) -> None:
    def body(model: nn.Module, engines: Any) -> Tensor:
        engine = engines[0]()
        engine.step(batch(0, ROWS[0]))
        with pytest.raises(
            fxpipe.RunError, match=r"norm of the gradients on this rank.*call engine.clip_grad_norm_ on"
        ):
            torch.nn.utils.clip_grad_norm_(given(model, engine), 1.0)
        with pytest.raises(fxpipe.RunError, match=r"would take the norm of the gradients on this rank"):
            torch.nn.utils.get_total_norm([p.grad for p in given(model, engine) if p.grad is not None])
        with pytest.raises(fxpipe.RunError, match=r"LBFGS computes with all gradients .*shard='none'"):
            torch.optim.LBFGS(given(model, engine)).step(lambda: 0.0)  # type: ignore[arg-type, return-value]
        norm = engine.clip_grad_norm_(1.0)
        engine.sync_model()
        model(**batch(0, ROWS[0])).backward()  # without an engine all gradients are here
        torch.nn.utils.clip_grad_norm_(given(model, engine), 1.0)
        return norm

    def by_torch(model: nn.Module, engines: Any) -> Tensor:
        engine = engines[0]()
        engine.step(batch(0, ROWS[0]))
        return torch.nn.utils.clip_grad_norm_(given(model, engine), 1.0)

    norms = on_threads(2, [LINE], body)
    torch.testing.assert_close(on_threads(2, [COPIES], by_torch), norms, rtol=1e-10, atol=0.0)


@pytest.mark.parametrize("layout", [LINE, COPIES])
def test_groups_are_clipped_by_norms_of_their_own(layout: Layout) -> None:
    def clipped(model: nn.Module, clip: Callable[..., Tensor]) -> list[float]:
        groups = [[p for name, p in model.named_parameters() if ("bias" in name) is bias] for bias in (True, False)]
        return [float(clip(parameters=group, max_norm=1e-3)) for group in groups]

    def body(model: nn.Module, engines: Any) -> tuple[list[float], float]:
        engine = engines[0]()
        for number in range(2):
            engine.step(batch(number, ROWS[0]))
        with pytest.raises(fxpipe.RunError, match="some of the parameters are not the model's"):
            engine.clip_grad_norm_(1.0, parameters=nn.Linear(2, 2).parameters())
        return clipped(model, engine.clip_grad_norm_), float(engine.clip_grad_norm_(1.0))

    model = Adapted()
    one = OneDevice(model)
    for number in range(2):
        one.step(batch(number, ROWS[0]))
    expected = clipped(model, nn.utils.clip_grad_norm_), float(one.clip_grad_norm_(1.0))
    for found in on_threads(2, [layout], body):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=0.0)


def test_values_are_clipped_where_a_rank_has_no_gradient() -> None:
    def body(model: nn.Module, engines: Any) -> None:
        engines[0]().step(batch(0, ROWS[0]))
        elsewhere = [p for p in model.parameters() if p.grad is None]
        torch.nn.utils.clip_grad_value_(elsewhere, 0.1)
        torch.nn.utils.clip_grad_value_(model.parameters(), 1e-9)
        assert max(float(p.grad.max()) for p in model.parameters() if p.grad is not None) == 1e-9

    on_threads(2, [LINE], body)


class Averaged(nn.Module):
    """A target that is an average of the backbone: frozen, and written to between steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).double()
        self.target = copy.deepcopy(self.net).requires_grad_(False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.net(x) + x, self.target(target))

    @torch.no_grad()
    def average(self) -> None:
        for mine, of in zip(self.target.parameters(), self.net.parameters(), strict=True):
            mine.lerp_(of, 0.5)


@pytest.mark.parametrize("synced", [True, False])
@pytest.mark.parametrize("microbatches", [2, 1])  # in one, the target is on one rank alone
def test_frozen_weights_that_are_written_between_steps(microbatches: int, synced: bool) -> None:
    batches = [batch(number, ROWS[0]) for number in range(3)]

    def trained(model: Averaged, step: Callable[..., Tensor], sync: Callable[[], None]) -> list[Tensor]:
        optimizer, losses = torch.optim.SGD(model.net.parameters(), lr=0.1), []
        for one, following in zip(batches, [*batches[1:], None], strict=True):
            losses.append(step(one, following))  # its frozen work is not what it was by the next step
            optimizer.step()
            optimizer.zero_grad()
            sync()
            model.average()
        return losses

    def of_rank(transport: Transport) -> list[Tensor]:
        model = models[transport.rank]
        engine = as_rank(programs[transport.rank], transport)
        return trained(model, engine.step, engine.sync_model if synced else lambda: None)

    models = [Averaged() for _ in range(2)]
    options: Layout = {"schedule": "1f1b", "fill": "idle", "microbatches": microbatches}
    programs = [fxpipe.compile(m, 2, example_inputs=batches[0], **options) for m in models]
    held = [sum("target" in name for name in one.step.programs[rank].state) for one in programs[:1] for rank in (0, 1)]
    assert (min(held) == 0) == (microbatches == 1)
    if not synced:
        with pytest.raises(fxpipe.RunError, match=r"target.* differs between ranks 0 and 1; call engine.sync_model"):
            run_ranks(2, of_rank)
        return
    model = Averaged()
    expected = trained(model, lambda one, _: [loss := model(**one), loss.backward()][0].detach(), lambda: None)
    for losses in run_ranks(2, of_rank):
        torch.testing.assert_close(losses, expected, rtol=1e-10, atol=0.0)


@pytest.mark.parametrize(
    ("on_one", "says"),
    [
        (
            lambda engine: engine.step(batch(0, ROWS[0])),
            "rank 0 calls gather_state_dict, rank 1 calls step; call every",
        ),
        (lambda engine: engine.gather_state_dict(True), r"ranks \[1\] have another trainable_only than rank 0"),
        (lambda engine: engine.close(), "no rank can go on: rank 0 waits for .* ranks that have ended: .1."),
    ],
)
def test_a_call_that_not_all_ranks_make_ends_all(on_one: Callable[[Engine], Any], says: str) -> None:
    def body(model: nn.Module, engines: Any) -> None:
        engine = engines[0]()
        on_one(engine) if engine.rank else engine.gather_state_dict()

    with pytest.raises(fxpipe.RunError, match=says):
        on_threads(2, [LINE], body)


def stepped_with(make: Callable[[nn.Module, Engine], Callable[[], Any]]) -> Callable[..., Any]:
    """A script whose optimizer steps as `make` says on this rank."""

    def body(model: nn.Module, engines: Any) -> None:
        engine = engines[0]()
        step = make(model, engine)
        for number in range(3):
            engine.step(batch(number, ROWS[0]))
            step()

    return body


def rates(model: nn.Module, engine: Engine) -> Callable[[], Any]:
    return torch.optim.SGD(model.parameters(), lr=0.1 if engine.rank else 0.2).step


def kinds(model: nn.Module, engine: Engine) -> Callable[[], Any]:
    return (torch.optim.SGD if engine.rank else torch.optim.AdamW)(model.parameters(), lr=0.1).step


def only_one(model: nn.Module, engine: Engine) -> Callable[[], Any]:
    return torch.optim.SGD(model.parameters(), lr=0.1).step if engine.rank else lambda: None


def twice(model: nn.Module, engine: Engine) -> Callable[[], Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return lambda: [optimizer.step() for _ in range(1 + engine.rank)]


@pytest.mark.parametrize("layout", [LINE, COPIES])
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (rates, r"ranks \[1\] have another lr of group 0 of its optimizer \(0.1\) than rank 0 \(0.2\)"),
        (kinds, r"ranks \[1\] have another optimizer \(SGD\) than rank 0 \(AdamW\)"),
        (only_one, r"ranks \[1\] have stepped an optimizer since the step before, and ranks \[0\] have not"),
        (twice, r"ranks \[1\] have another number of optimizer steps since \(2\) than rank 0 \(1\)"),
    ],
)
def test_ranks_that_step_otherwise_are_told_so(layout: Layout, make: Any, says: str) -> None:
    with pytest.raises(fxpipe.RunError, match=says):
        on_threads(2, [layout], stepped_with(make))


def test_an_optimizer_over_what_a_rank_trains_may_be_its_own() -> None:
    def by_rank(model: nn.Module, engine: Engine) -> Callable[[], Any]:
        own = torch.optim.SGD(engine.parameters(), lr=0.1 if engine.rank else 0.2)
        return own.step if engine.rank else lambda: None

    on_threads(2, [LINE], stepped_with(by_rank))


@pytest.mark.parametrize("layout", [LINE, COPIES, {"schedule": "gpipe", "data_parallel": 2}])
def test_a_model_may_have_an_optimizer_for_each_of_its_halves(layout: Layout) -> None:
    def halves(model: nn.Module, engine: Engine) -> Callable[[], Any]:
        trained = [*model.parameters()]
        parts = trained[: len(trained) // 2], trained[len(trained) // 2 :]
        optimizers = [torch.optim.SGD(part, lr=0.1) for part in parts]
        return lambda: [optimizer.step() for optimizer in optimizers]

    on_threads(2, [layout], stepped_with(halves))


def test_weights_that_are_swapped_and_back_do_for_another_engine() -> None:
    def swapped(model: nn.Module, engines: Any) -> None:
        engine = engines[0]()
        engine.step(batch(0, ROWS[0]))
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        with torch.no_grad():
            kept = [parameter.clone() for parameter in model.parameters()]
            for parameter, value in zip(model.parameters(), kept, strict=True):
                parameter.zero_()
                parameter.copy_(value)
        engines[1]().step(batch(1, ROWS[1]))

    on_threads(2, [LINE, LINE], swapped)


def test_loaders_may_fail_for_other_reasons_and_the_batches_before_are_trained() -> None:
    losses: list[Tensor] = []

    def failing(model: nn.Module, engines: Any) -> None:
        engine = engines[0]()

        def loader() -> Iterator[Any]:
            yield from (batch(number, ROWS[0]) for number in range(2))
            raise OSError(f"worker {engine.rank} died")

        losses.extend(engine.train(loader(), torch.optim.SGD(model.parameters(), lr=0.1)))

    with pytest.raises((OSError, fxpipe.RunError), match=r"worker \d died"):
        on_threads(2, [LINE], failing)
    assert len(losses) == 2 * 2


def test_ranks_with_other_models_are_told_so() -> None:
    def perturbed(model: nn.Module, engines: Any) -> None:
        with torch.no_grad():
            model.layers[1].weight.add_(changes.pop())  # type: ignore[index, union-attr]
        engines[0]()

    changes = [0.0, 0.1]
    with pytest.raises(fxpipe.RunError, match=r"layers.1.weight differs between ranks 0 and 1; seed every"):
        on_threads(2, [LINE], perturbed)
    models = [Adapted(), Adapted()]
    models[1].drop.p = 0.3
    programs = [program(model, 2, ROWS[0], LINE) for model in models]
    with pytest.raises(fxpipe.RunError, match=r"ranks \[1\] have another random operation, as a dropout of another p"):
        run_ranks(2, lambda transport: as_rank(programs[transport.rank], transport))


def test_a_mesh_is_of_processes_in_equal_pipelines() -> None:
    uneven = Schedule.parse("""
        rank 0: 0F0 0F1 0B0 0B1
        rank 1: 1F0 1B0 1R1
        rank 2: 1F1 1B1 1R2""")
    layout: Layout = {"schedule": uneven, "microbatches": None}
    with pytest.raises(
        fxpipe.RunError, match=r"stages are on the ranks \[\[0\], \[1, 2\]\], which are no equal pipelines"
    ):
        on_threads(3, [layout], lambda model, engines: engines[0]().mesh)
    with pytest.raises(fxpipe.RunError, match=r"ranks are threads of this one; use program.engine\(\)"):
        _ = program(Adapted(), 3, ROWS[0], layout).local_engine().mesh


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_an_engine_is_not_copied(copied: Callable[[Any], object]) -> None:
    with pytest.raises(fxpipe.RunError, match="neither copied nor pickled: copy the model"):
        copied(program(Adapted(), 2, ROWS[0], LINE).local_engine())


@pytest.mark.parametrize("call", ["sync_model", "gather_state_dict", "step", "clip_grad_norm_"])
def test_a_closed_engine_says_so(call: str) -> None:
    engine = program(Adapted(), 2, ROWS[0], LINE).local_engine()
    engine.close()
    given = {"step": [batch(0, ROWS[0])], "clip_grad_norm_": [1.0]}
    with pytest.raises(fxpipe.RunError, match=f"{call} after close.*make another engine"):
        getattr(engine, call)(*given.get(call, []))


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        (torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1), "none of the 34 parameters of Adapted .* train nothing"),
        (None, "optimizer is None; give one of torch.optim"),
    ],
)
def test_an_optimizer_of_something_else_is_refused(optimizer: Any, says: str) -> None:
    engine = program(Adapted(), 2, ROWS[0], LINE).local_engine()
    with pytest.raises(fxpipe.CompileError, match=says):
        next(engine.train([batch(0, ROWS[0])], optimizer))
    engine.close()


@pytest.mark.parametrize(
    ("given", "says"),
    [({"timeout": 0}, "timeout=0: give seconds, more than 0"), ({"device": "cuda"}, "compiled for cpu, not for cuda")],
)
def test_wrong_options_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(fxpipe.CompileError, match=says):
        program(Adapted(), 2, ROWS[0], LINE).engine(**given)


@pytest.mark.parametrize(
    ("returned", "named"),
    [
        (lambda loss, x: (loss, x, {"kl": x}), ["1", "kl"]),
        (lambda loss, x: {"prediction": x, "loss": loss, "none": None}, ["prediction"]),
        (lambda loss, x: SimpleNamespace(loss=loss, mse=loss), ["mse"]),
    ],
)
def test_what_forward_returns_beside_the_loss_is_named(returned: Callable[..., Any], named: list[str]) -> None:
    class Logged(Adapted):
        def forward(self, x: Tensor, target: Tensor) -> Any:
            return returned(super().forward(x, target), x)

    for _ in range(2):  # the second capture is read from the cache
        assert [output.name for output in program(Logged(), 1, 2, LINE).step.outputs] == named


def as_process() -> tuple[Trained, str, str]:
    """The same script with processes, then a call that rank 0 alone makes, then one after close."""
    model, world_size = Adapted(), int(os.environ["WORLD_SIZE"])
    made: list[Engine] = []

    def engine_of(rows: int, layout: Layout) -> Engine:
        """The second is compiled when parameters are outdated already."""
        made.append(program(model, world_size, rows, layout).engine(seed=SEED, timeout=timedelta(minutes=1)))
        return made[-1]

    found = script(model, [lambda of=of: engine_of(*of) for of in zip(ROWS, (LINE, WAVE), strict=True)], ROWS)
    errors = []
    for use in (lambda: made[0].gather_state_dict(), lambda: made[1].step(batch(0, ROWS[1]))):
        for engine in made[1:] if errors or os.environ["RANK"] == "1" else ():
            engine.close()
        try:
            use() if errors or os.environ["RANK"] == "0" else made[0].close()
            errors.append("")
        except fxpipe.RunError as error:
            errors.append(str(error))
    return found, *errors


def test_processes_train_as_one_device() -> None:
    (first, alone, closed), (second, _, _) = run_processes(2, as_process)
    assert_same(first, one_device("all", 2))
    assert (second.losses, second.norms) == (first.losses, first.norms)
    assert alone == "rank 0 in gather_state_dict needs rank 1, which has left"
    assert "step after close()" in closed
