"""Training with frozen work a step early: no batch is lost, none is trained on twice, nothing stale is used."""

import copy
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fxpipe
from fxpipe.errors import CompileError, RunError
from fxpipe.run.training import Training
from tests.distributed import start_processes
from tests.frozen_steps import SLOW, FrozenStep

Batch = dict[str, Tensor]
SEED = 5


class Runs:
    """One compiled step, trained anew from the same weights by every run."""

    def __init__(self) -> None:
        self.model = FrozenStep()
        example = self.model.example_inputs(4)
        self.program = fxpipe.compile(
            self.model, 2, example_inputs=example, schedule="1f1b", microbatches=2, cost_model=SLOW
        )
        self._initial = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def engine(self) -> tuple[Training, torch.optim.Optimizer]:
        self.model.load_state_dict(self._initial)
        self.model.zero_grad()
        engine = self.program.local_engine(seed=SEED)
        return engine, torch.optim.AdamW(engine.parameters(), lr=1e-2)

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters() if p.requires_grad}

    def plain(self, batches: Iterable[Batch], first_step: int = 0) -> tuple[list[float], dict[str, Tensor]]:
        """One batch after the other, its frozen work in its own step."""
        engine, optimizer = self.engine()
        engine.step_index = first_step
        return [stepped(engine, optimizer, batch) for batch in batches], self.weights()

    def check(self, losses: list[float], batches: Iterable[Batch], first_step: int = 0) -> None:
        """What has been trained now is what plain steps on `batches` train."""
        weights = self.weights()
        expected, expected_weights = self.plain(batches, first_step)
        torch.testing.assert_close(losses, expected, rtol=1e-10, atol=0.0)
        for name, weight in expected_weights.items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-10, atol=1e-12, msg=name)


def stepped(engine: Training, optimizer: torch.optim.Optimizer, *batches: Batch) -> float:
    loss = float(engine.step(*batches))
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.fixture(scope="module")
def runs() -> Runs:
    return Runs()


@pytest.fixture(scope="module")
def batches() -> list[Batch]:
    return [FrozenStep().example_inputs(4, seed) for seed in range(6)]


def copied(batch: Batch) -> Batch:
    return {name: tensor.clone() for name, tensor in batch.items()}


def as_dataset(batches: list[Batch]) -> list[Batch]:
    return [{name: tensor[i] for name, tensor in batch.items()} for batch in batches for i in range(4)]


LOADERS: dict[str, Callable[[list[Batch]], Any]] = {
    "list": list,
    "generator": lambda batches: (batch for batch in batches),
    "fresh tensors": lambda batches: map(copied, batches),
    "DataLoader": lambda batches: DataLoader(as_dataset(batches), batch_size=4),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_any_iterable_is_trained_on(kind: str, runs: Runs, batches: list[Batch]) -> None:
    engine, optimizer = runs.engine()
    losses = [float(loss) for loss in engine.train(LOADERS[kind](batches), optimizer)]
    assert engine.step_index == 6
    runs.check(losses, batches)


@pytest.mark.parametrize("wrap", [lambda batch: batch, lambda batch: [batch], lambda batch: iter((batch,))])
def test_one_batch_and_none(wrap: Callable[[Batch], Any], runs: Runs, batches: list[Batch]) -> None:
    engine, optimizer = runs.engine()
    losses = [float(loss) for loss in engine.train(wrap(batches[0]), optimizer)]
    assert list(engine.train([], optimizer)) == []
    runs.check(losses, batches[:1])


def test_a_batch_twice_in_a_row_is_trained_on_twice_with_draws_of_its_own(runs: Runs, batches: list[Batch]) -> None:
    engine, optimizer = runs.engine()
    losses = [float(loss) for loss in engine.train([batches[0]] * 3, optimizer)]
    assert len(set(losses)) == 3
    runs.check(losses, [batches[0]] * 3)


def broken_after(batches: list[Batch], count: int) -> Iterator[Batch]:
    yield from batches[:count]
    raise OSError("planted")


@pytest.mark.parametrize("count", [0, 1, 3])
def test_what_the_loader_raises_comes_after_the_batches_before_it(count: int, runs: Runs, batches: list[Batch]) -> None:
    engine, optimizer = runs.engine()
    losses: list[float] = []
    with pytest.raises(OSError, match="planted"):
        losses += collected(engine.train(broken_after(batches, count), optimizer), losses)
    assert len(losses) == count
    runs.check(losses, batches[:count])


def collected(steps: Iterator[Tensor], into: list[float]) -> list[float]:
    """Losses as they come, kept whatever ends the loop."""
    for loss in steps:
        into.append(float(loss))
    return []


class Stumbling:
    """An iterator that raises instead of giving its third batch a first time, and then goes on."""

    def __init__(self, batches: list[Batch]) -> None:
        self._batches, self._stumbled = iter(enumerate(batches)), False

    def __iter__(self) -> "Stumbling":
        return self

    def __next__(self) -> Batch:
        if not self._stumbled and self.number == 2:
            self._stumbled = True
            raise ConnectionError("once")
        self.number, batch = next(self._batches)
        self.number += 1
        return batch

    number = 0


def test_after_an_exception_the_same_iterator_goes_on(runs: Runs, batches: list[Batch]) -> None:
    engine, optimizer = runs.engine()
    loader, losses = Stumbling(batches), list[float]()
    with pytest.raises(ConnectionError):
        collected(engine.train(loader, optimizer), losses)
    assert len(losses) == 2
    collected(engine.train(loader, optimizer), losses)
    runs.check(losses, batches)


def test_an_exception_is_not_lost_by_an_early_stop(runs: Runs, batches: list[Batch]) -> None:
    engine, optimizer = runs.engine()
    loader = broken_after(batches, 2)
    losses = [float(loss) for _, loss in zip(range(2), engine.train(loader, optimizer), strict=False)]
    with pytest.raises(OSError, match="planted"):
        next(engine.train(loader, optimizer))
    runs.check(losses, batches[:2])


def test_a_batch_that_does_not_fit_is_refused_after_those_before_it(runs: Runs, batches: list[Batch]) -> None:
    engine, optimizer = runs.engine()
    other = {name: tensor.to(torch.complex64) for name, tensor in batches[2].items()}
    loader, losses = iter([*batches[:2], other, *batches[3:]]), list[float]()
    with pytest.raises(CompileError, match=r"must be .* torch.complex64"):
        collected(engine.train(loader, optimizer), losses)
    assert len(losses) == 2
    collected(engine.train(loader, optimizer), losses)
    runs.check(losses, [*batches[:2], *batches[3:]])


def test_an_early_stop_loses_no_batch(runs: Runs, batches: list[Batch]) -> None:
    engine, optimizer = runs.engine()
    first, second = iter(batches[:4]), iter(batches[4:])
    losses = [float(next(engine.train(first, optimizer))) for _ in range(2)]
    losses += [float(next(engine.train(second, optimizer)))]
    losses += [float(loss) for loss in engine.train(first, optimizer)]
    losses += [float(loss) for loss in engine.train(second, optimizer)]
    runs.check(losses, [*batches[:2], batches[4], *batches[2:4], batches[5]])


def test_a_list_begins_anew(runs: Runs, batches: list[Batch]) -> None:
    engine, optimizer = runs.engine()
    losses = [float(next(engine.train(batches, optimizer))) for _ in range(3)]
    runs.check(losses, [batches[0]] * 3)


def test_a_loader_that_writes_into_what_it_gave_is_told(runs: Runs, batches: list[Batch]) -> None:
    def reusing() -> Iterator[Batch]:
        buffer = copied(batches[0])
        for batch in batches:
            for name, tensor in batch.items():
                buffer[name].copy_(tensor)
            yield buffer

    engine, optimizer = runs.engine()
    with pytest.raises(RunError, match=r"wrote into a batch .* clone\(\)"):
        next(engine.train(reusing(), optimizer))


def test_a_next_batch_that_does_not_come_is_done_in_vain(runs: Runs, batches: list[Batch]) -> None:
    b = batches
    engine, optimizer = runs.engine()
    given = [(b[0], b[1]), (b[2], b[3]), (b[3], b[3]), (b[3], b[5]), (b[4],), (b[5],)]
    losses = [stepped(engine, optimizer, *pair) for pair in given]
    runs.check(losses, [b[0], b[2], b[3], b[3], b[4], b[5]])


def test_equal_values_in_other_tensors_are_the_next_batch(runs: Runs, batches: list[Batch]) -> None:
    engine, optimizer = runs.engine()
    forms: list[str] = []
    execute = engine._execute
    names = {id(form): name for name, form in zip(("prologue", "steady", "epilogue"), engine._forms(), strict=True)}
    engine._execute = lambda plan, *rest: [forms.append(names[id(plan)]), execute(plan, *rest)][1]  # type: ignore[method-assign]
    losses = [stepped(engine, optimizer, batches[0], batches[1]), stepped(engine, optimizer, copied(batches[1]))]
    assert forms == ["prologue", "steady", "epilogue"]
    runs.check(losses, batches[:2])


def overwrite_batch(runs: Runs, engine: Training, batch: Batch) -> None:
    batch["pixels"].mul_(0.5)


def change_seed(runs: Runs, engine: Training, batch: Batch) -> None:
    engine.seed += 1


def set_back(runs: Runs, engine: Training, batch: Batch) -> None:
    engine.step_index = 0


def change_frozen_weights(runs: Runs, engine: Training, batch: Batch) -> None:
    with torch.no_grad():
        runs.model.encoder[0].weight.mul_(0.5)


def change_frozen_data(runs: Runs, engine: Training, batch: Batch) -> None:
    runs.model.encoder[0].weight.data.mul_(0.5)


CHANGES = [overwrite_batch, change_seed, set_back, change_frozen_weights, change_frozen_data]


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_become_stale_is_made_again(change: Callable[..., None], runs: Runs, batches: list[Batch]) -> None:
    results = []
    for ahead in (True, False):
        engine, optimizer = runs.engine()
        following = copied(batches[1])
        losses = [stepped(engine, optimizer, batches[0], *([following] if ahead else []))]
        change(runs, engine, following)
        losses += [stepped(engine, optimizer, following), stepped(engine, optimizer, batches[2])]
        results.append((losses, runs.weights()))
    (losses, weights), (expected, expected_weights) = results
    torch.testing.assert_close(losses, expected, rtol=1e-10, atol=0.0)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-10, atol=1e-12)


def test_training_resumes_in_the_middle(runs: Runs, batches: list[Batch]) -> None:
    engine, optimizer = runs.engine()
    engine.step_index = 11
    losses = [float(loss) for loss in engine.train(batches[:3], optimizer)]
    assert engine.step_index == 14
    runs.check(losses, batches[:3], first_step=11)


def test_a_checkpoint_goes_on_as_if_nothing_had_been(runs: Runs, batches: list[Batch]) -> None:
    engine, optimizer = runs.engine()
    losses = [float(loss) for loss in engine.train(batches[:3], optimizer)]
    weights, states, step_index = runs.weights(), optimizer.state_dict(), engine.step_index
    engine, optimizer = runs.engine()
    runs.model.load_state_dict(weights, strict=False)
    optimizer.load_state_dict(states)
    engine.step_index = step_index
    losses += [float(loss) for loss in engine.train(batches[3:], optimizer)]
    runs.check(losses, batches)


def test_gradients_accumulate_over_steps(runs: Runs, batches: list[Batch]) -> None:
    engine, _ = runs.engine()
    for i in range(3):
        engine.step(batches[i], batches[i + 1])
    found = {name: p.grad for name, p in engine.named_parameters()}
    engine, _ = runs.engine()
    for i in range(3):
        engine.step(batches[i])
    for name, parameter in engine.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-10, atol=1e-12, msg=name)


def test_a_step_that_fails_can_be_repeated(runs: Runs, batches: list[Batch]) -> None:
    engine, optimizer = runs.engine()
    losses = [stepped(engine, optimizer, batches[0], batches[1])]
    execute = engine._execute

    def fails(*args: Any) -> Any:
        execute(*args)  # what was made has been taken
        raise ArithmeticError("planted")

    engine._execute = fails  # type: ignore[method-assign]
    with pytest.raises(ArithmeticError, match="planted"):
        engine.step(batches[1], batches[2])
    engine._execute = execute  # type: ignore[method-assign]
    losses += [stepped(engine, optimizer, batches[1], batches[2]), stepped(engine, optimizer, batches[2])]
    runs.check(losses, batches[:3])


def disagree(what: str) -> None:
    runs, rank = Runs(), int(os.environ["RANK"])
    engine = runs.program.engine(seed=SEED)
    batch, other = (runs.model.example_inputs(4, seed) for seed in (1, 2))
    engine.step(batch, other)
    if rank == 1 and what == "step":
        engine.step_index += 1
    if rank == 1 and what == "weights":
        with torch.no_grad():
            engine._state[next(name for name in sorted(engine._state) if name.startswith("encoder"))].mul_(2)
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
    loader = broken_after([other], 1) if what == "loader" and rank == 1 else iter([other, batch])
    list(engine.train(loader, optimizer))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("step", r"ranks \[1\] have another seed or step index than rank 0"),
        ("weights", r"encoder.* differs between ranks 0 and 1; call engine.sync_model"),
        ("loader", "this rank's loader raised OSError"),
    ],
)
def test_ranks_that_disagree_are_told_so(what: str, message: str) -> None:
    ended = start_processes(2, disagree, what, timeout_seconds=120)
    assert all(e.returncode not in (0, None) for e in ended)
    assert any(re.search(message, e.output) for e in ended), ended[1].output


@pytest.mark.parametrize("fused", [True, False])
def test_gradients_are_in_memory_as_the_weights_are(fused: bool) -> None:
    """Fused optimizers go through both as if they were; so do lists of gradients that a script holds."""

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(2, 6, 3), nn.Conv2d(6, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x).sin()).square().mean()  # type: ignore[no-any-return]

    def trained(model: nn.Module, step: Callable[..., Any]) -> list[Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        step({"x": x})
        held = [parameter.grad for parameter in model.parameters()]
        for _ in range(3):
            step({"x": x})
            assert all(parameter.grad is one for parameter, one in zip(model.parameters(), held, strict=True))
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return [parameter.detach() for parameter in model.parameters()]

    torch.manual_seed(0)
    x = torch.randn(4, 2, 7, 6, dtype=torch.float64)
    model = Step().to(torch.float64, memory_format=torch.channels_last)
    alone = copy.deepcopy(model)
    program = fxpipe.compile(model, 2, example_inputs={"x": x}, schedule="1f1b", microbatches=2)
    found = trained(model, program.local_engine().step)
    expected = trained(alone, lambda batch: alone(**batch).backward())
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
