"""Data: every rank loads the samples it reads, the result is one device's, and a run goes on at the next batch."""

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    WeightedRandomSampler,
)

import fxpipe
from fxpipe.capture.inputs import call_of
from fxpipe.errors import CompileError, RunError
from fxpipe.plan.fewer_samples import first_samples
from fxpipe.plan.schedule import Schedule
from fxpipe.plan.transport import Transport
from fxpipe.run.engine import Engine
from fxpipe.run.loader import Loader
from fxpipe.run.transport import run_ranks
from tests.distributed import run_processes
from tests.frozen_steps import SLOW, FrozenStep
from tests.own_models import SEED, OneDevice
from tests.peer_cases import PEER_CASES

BATCH, SAMPLES, ORDER = 4, 9, 3  # the last batch of an epoch has one sample
PIPELINE, REPLICAS = {"schedule": "1f1b", "microbatches": 2}, {"schedule": "1f1b", "data_parallel": 2}
Layout = dict[str, Any]


class Pictures(Dataset[dict[str, Tensor]]):
    """Of a diffusion step; counts which were read."""

    def __init__(self, num_samples: int = SAMPLES) -> None:
        self.all, self.read = FrozenStep().example_inputs(num_samples), list[int]()

    def __len__(self) -> int:
        return len(self.all["time"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.read.append(index)
        return {name: value[index] for name, value in self.all.items()}


class Drawing(Dataset[tuple[int, list[float]]]):
    """Every sample draws from each generator."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> tuple[int, list[float]]:
        return index, [float(torch.rand(())), random.random(), float(np.random.rand())]


@cache
def compiled(world_size: int, *layout: tuple[str, Any]) -> tuple[nn.Module, fxpipe.Program, dict[str, Tensor]]:
    model = FrozenStep()
    program = fxpipe.compile(
        model, world_size, example_inputs=model.example_inputs(BATCH), cost_model=SLOW, **dict(layout)
    )
    return model, program, {name: tensor.clone() for name, tensor in model.state_dict().items()}


class Run:
    """A model in training, by ranks that are threads, all ranks in one, or one device."""

    def __init__(self, model: nn.Module, engine: Any, num_samples: int = SAMPLES) -> None:
        self.model, self.engine, self.data = model, engine, Pictures(num_samples)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train(self, num_steps: int, loader: Loader | None = None) -> list[float]:
        """As many steps, over as many epochs as that takes; read ahead."""
        loader, losses = loader or self.loader(), list[float]()
        while len(losses) < num_steps:
            for loss in self.engine.train(loader, self.optimizer):
                losses.append(float(loss))
                if len(losses) == num_steps:
                    break
        return losses

    def loader(self) -> Loader:
        loader: Loader = self.engine.dataloader(self.data, shuffle=True, seed=ORDER)
        return loader

    def weights(self) -> dict[str, Tensor] | None:
        state: dict[str, Tensor] | None = self.engine.gather_state_dict(trainable_only=True)
        return state


def on_ranks(world_size: int, layout: Layout, body: Callable[[Run], Any], num_samples: int = SAMPLES) -> list[Any]:
    """`body` on every rank, each with a model of its own."""
    _, program, state = compiled(world_size, *layout.items())
    models = [FrozenStep() for _ in range(world_size)]

    def of_rank(transport: Transport) -> Any:
        model = models[transport.rank]
        model.load_state_dict(state)
        given = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        held = {name: given.get(name, tensor) for name, tensor in program.state.items()}
        engine = Engine(replace(program.kind, state=held), model, transport, SEED)
        return body(Run(model, engine, num_samples))

    return run_ranks(world_size, of_rank)


def local(layout: Layout, num_samples: int = SAMPLES) -> Run:
    model, program, state = compiled(2, *layout.items())
    model.load_state_dict(state)
    model.zero_grad()
    return Run(model, program.local_engine(seed=SEED), num_samples)


@cache
def on_one_device(num_steps: int, num_samples: int = SAMPLES) -> tuple[list[float], dict[str, Tensor]]:
    """By torch's own loader and sampler."""
    run = Run(model := FrozenStep(), OneDevice(model), num_samples)
    sampler = DistributedSampler(run.data, num_replicas=1, rank=0, shuffle=True, seed=ORDER)
    losses = list[float]()
    for epoch in range(num_steps):
        sampler.set_epoch(epoch)
        for batch in DataLoader(run.data, batch_size=BATCH, sampler=sampler):
            losses.append(float(run.engine.step(batch)))
            run.optimizer.step()
            run.optimizer.zero_grad()
            if len(losses) == num_steps:
                return losses, run.engine.gather_state_dict(trainable_only=True)
    raise AssertionError


def assert_same(found: tuple[Sequence[float], Any], num_steps: int, num_samples: int = SAMPLES) -> None:
    torch.testing.assert_close(found, on_one_device(num_steps, num_samples), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("world_size", "layout", "num_samples", "shares"),
    [
        (2, PIPELINE, 11, [(0, 1, 2, 3), (2, 3)]),
        (2, REPLICAS, 9, [(0, 2), (1, 3)]),
        (4, REPLICAS, 10, [(0, 2), (2,), (1, 3), (3,)]),
    ],
    ids=["pipeline", "replicas", "both"],
)
def test_ranks_load_their_samples_and_train_as_one_device(
    world_size: int, layout: Layout, num_samples: int, shares: Any
) -> None:
    assert layout is REPLICAS or compiled(world_size, *layout.items())[1].filled is not None
    of_ranks = on_ranks(world_size, layout, lambda run: (run.train(5), run.weights(), run), num_samples)
    assert_same(of_ranks[0][:2], 5, num_samples)
    for (*_, run), share in zip(of_ranks, shares, strict=True):
        assert run.engine.samples() == share
        order, wanted = DistributedSampler(run.data, num_replicas=1, rank=0, shuffle=True, seed=ORDER), list[int]()
        for epoch in range(2):
            order.set_epoch(epoch)
            read = [*order]
            wanted += [read[i] for i in range(num_samples) if i % BATCH in share]
        assert run.data.read == wanted


def test_a_rank_that_reads_nothing_loads_nothing() -> None:
    """The middle of a line of stages gets what it computes with from its neighbours."""
    model, batch = Line(), {"x": torch.randn(2, 3), "y": torch.randn(2, 3)}
    program = fxpipe.compile(model, 3, example_inputs=batch, schedule="gpipe", microbatches=2)
    expected = float(model(**batch).detach())
    rows = [{name: value[index] for name, value in batch.items()} for index in range(2)]

    def of_rank(transport: Transport) -> Any:
        engine = Engine(program.kind, model, transport)
        (part,) = engine.dataloader(rows)
        return part.batch is None, float(engine.step(part).detach())

    found = run_ranks(3, of_rank)
    assert [empty for empty, _ in found] == [False, True, False]
    torch.testing.assert_close([loss for _, loss in found], 3 * [expected])


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return nn.functional.mse_loss(x, y)


def test_a_smaller_batch_keeps_the_order_of_its_samples() -> None:
    order = Schedule.parse("rank 0: 0F0 0F2 0B0 0B2 0R0\nrank 1: 0F1 0F3 0B1 0B3 0R1")
    three, sizes = first_samples(order, (2, 2, 2, 2), 3)
    assert (three.text().split("\n")[1:], sizes) == (["rank 0: 0F0 0B0 0R0", "rank 1: 0F1 0B1 0R1"], (2, 1))
    one, sizes = first_samples(order, (2, 2, 2, 2), 1)
    assert (one.text().split("\n")[1:], sizes) == (["rank 0: 0F0 0B0", "rank 1:"], (1,))


@pytest.mark.parametrize(
    ("case", "world_size", "layout"),
    [
        ("crossed_skips", 2, {"schedule": "wave"}),
        ("dropout", 2, {"schedule": "zero-bubble"}),
        ("tied_parameters", 4, {"schedule": "1f1b", "data_parallel": 2}),
    ],
)
def test_smaller_batches_are_exact_in_any_layout(case: str, world_size: int, layout: Layout) -> None:
    torch.manual_seed(0)
    model = PEER_CASES[case](torch.float64)
    program = fxpipe.compile(model, world_size, batch_size=5, microbatches=3, **layout)
    for size in (4, 1):
        args, kwargs = call_of(program.model.example_inputs(size))
        verified = program.verify(*args, **kwargs)
        assert verified.ok, verified


def test_a_batch_on_which_the_model_decides_otherwise_is_refused_before_training() -> None:
    class Deciding(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return (super().forward(x) * (2 if x.shape[0] >= 3 else 1)).square().mean()

    program = fxpipe.compile(Deciding(3, 3), 1, example_inputs=(torch.randn(5, 3),), schedule="gpipe")
    engine, rows = program.local_engine(), [torch.randn(3) for _ in range(8)]
    assert [batch.size for batch in engine.dataloader(rows)] == [5, 3]
    says = r"batch has 2 samples, .* compiled for 5, and the model is the same from 3 samples on.*drop_last=True"
    with pytest.raises(CompileError, match=says):
        engine.dataloader(rows[:7])
    assert len(engine.dataloader(rows[:7], drop_last=True)) == 1


@pytest.mark.parametrize(
    "go_on",
    [
        lambda body: on_ranks(2, PIPELINE, body)[0],
        lambda body: on_ranks(4, REPLICAS, body)[0],
        lambda body: body(local(PIPELINE)),
    ],
    ids=["same", "replicas", "one process"],
)
def test_a_run_goes_on_at_the_next_batch(saved: Path, go_on: Callable[[Any], Any]) -> None:
    def body(run: Run) -> Any:
        loader = run.loader()
        run.engine.load(saved, run.optimizer)
        assert (loader.epoch, len(loader)) == (1, 3)
        loader.set_epoch(1)
        return run.train(3, loader), run.weights()

    losses, weights = go_on(body)
    assert_same((on_one_device(8)[0][:5] + losses, weights), 8)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in the middle of its second epoch, a batch read ahead."""
    directory = tmp_path_factory.mktemp("run")

    def body(run: Run) -> None:
        run.train(5)
        run.engine.save(directory, run.optimizer)

    on_ranks(2, PIPELINE, body)
    return directory


def test_a_loader_made_after_load_begins_there_too(saved: Path) -> None:
    run = local(PIPELINE)
    run.engine.load(saved, run.optimizer)
    with pytest.raises(RunError, match=f"the loader has seed={ORDER + 1}, and was saved with {ORDER}"):
        run.engine.dataloader(run.data, shuffle=True, seed=ORDER + 1, drop_last=False)
    assert run.loader().state_dict() | {"samples": 0} == {
        "samples": 0, "batch_size": 4, "shuffle": True, "seed": ORDER, "drop_last": False, "epoch": 1, "batch": 2,
    }  # fmt: skip
    assert run.loader().state_dict()["epoch"] == 0
    with pytest.raises(RunError, match="has made 2 loaders, and 1 were saved"):
        run.engine.load(saved, run.optimizer)
    other = local(PIPELINE, 13)
    other.loader()
    with pytest.raises(RunError, match="the loader has samples=13, and was saved with 9"):
        other.engine.load(saved, other.optimizer)
    assert other.engine.step_index == 0


@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "persistent_workers": True}])
def test_samples_draw_the_same_whoever_loads_them(options: dict[str, Any]) -> None:
    def drawn(samples: Sequence[int], **options: Any) -> dict[tuple[int, int], list[float]]:
        loader = Loader(
            Drawing(), lambda size: [one for one in samples if one < size], 3, True, collate_fn=list, **options
        )
        found = {}
        for epoch in range(2):
            loader.set_epoch(epoch)
            for part in loader:
                found.update({(epoch, index): draws for index, draws in part.batch or ()})
        return found

    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    all_of_them, some = drawn(range(3)), drawn((1, 2), **options)
    assert len({tuple(draws) for draws in all_of_them.values()}) == 14
    assert len(some) == 8
    assert all(all_of_them[key] == draws for key, draws in some.items())
    torch.testing.assert_close(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]


def wrong_length(run: Run, batch: dict[str, Tensor]) -> Any:
    return fxpipe.LocalBatch({name: value[:3] for name, value in batch.items()})


def another_sample(run: Run, batch: dict[str, Tensor]) -> Any:
    part = {name: value[list(run.engine.samples())] for name, value in batch.items()}
    if run.engine.rank == 1:
        part["time"] = part["time"] + 1e-9
    return fxpipe.LocalBatch(part)


def another_place(run: Run, batch: dict[str, Tensor]) -> Any:
    loader = run.loader()
    loader.set_epoch(run.engine.rank)
    return next(iter(loader))


def only_one_whole(run: Run, batch: dict[str, Tensor]) -> Any:
    return another_place(run, batch) if run.engine.rank else batch


@pytest.mark.parametrize(
    ("give", "says"),
    [
        (wrong_length, r"reads samples [02]-3 of a batch of 4, [24] in all, and was given 3; give it what engine"),
        (another_sample, r"samples 2-3 of the batch \(time\) differ between ranks 0 and 1; a sample must be the same"),
        (another_place, r"ranks \[1\] have another batch \(place of a LocalBatch\) \(.*\) than rank 0"),
        (only_one_whole, r"ranks \[1\] have another batch \(whole, or samples\) .* than rank 0"),
        (lambda run, batch: fxpipe.LocalBatch(None), r"reads samples .* of a batch of 4, and was given none"),
    ],
)
def test_a_wrong_part_is_told(give: Callable[..., Any], says: str) -> None:
    batch = FrozenStep().example_inputs(BATCH)
    with pytest.raises(RunError, match=says):
        on_ranks(2, PIPELINE, lambda run: run.engine.step(give(run, batch)))


def test_parts_that_a_user_has_read_are_taken() -> None:
    batches = [FrozenStep().example_inputs(size, seed) for seed, size in enumerate((4, 4, 3, 4))]

    def part(run: Run, batch: dict[str, Tensor]) -> fxpipe.LocalBatch:
        own = run.engine.samples(size := len(batch["time"]))
        return fxpipe.LocalBatch({name: value[list(own)] for name, value in batch.items()}, size)

    def body(run: Run) -> Any:
        parts = (part(run, batch) for batch in batches)
        return [float(loss.detach()) for loss in run.engine.train(parts, run.optimizer)], run.weights()

    whole = local(PIPELINE)
    losses = [float(loss.detach()) for loss in whole.engine.train(batches, whole.optimizer)]
    torch.testing.assert_close(on_ranks(2, REPLICAS, body)[0], (losses, whole.weights()), rtol=1e-10, atol=1e-12)


NINE: Any = range(9)


class Reversed(SequentialSampler):
    def __iter__(self) -> Any:
        return reversed(range(len(self)))


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("dataset", "options", "says"),
    [
        (Endless(), {}, r"dataset is a Endless without a length.*give fxpipe.LocalBatch"),
        (range(9), {"sampler": range(9)}, "sampler: which samples a rank loads"),
        (range(9), {"batch_size": 2}, "batch_size=2: a batch has the samples of all ranks together, .* for 4"),
        (range(3), {"drop_last": True}, "3 samples, fewer than a batch of 4"),
        (DataLoader(NINE, 3), {}, "batch_size=3: a batch has the samples of all ranks together"),
        (DataLoader(NINE, 4), {"shuffle": True, "num_workers": 0}, "shuffle, num_workers: a DataLoader has its own"),
        (DataLoader(NINE, 4, sampler=WeightedRandomSampler([0.5] * 9, 9)), {}, "reads by a WeightedRandomSampler"),
        (DataLoader(NINE, 4, sampler=Reversed(NINE)), {}, "reads by a Reversed"),
        (DataLoader(NINE, 4, sampler=SequentialSampler(range(5))), {}, "reads by a SequentialSampler"),
        (DataLoader(NINE, batch_sampler=[[0, 1], [2]]), {}, "reads by a list"),
        (DataLoader(NINE, None), {}, "reads by a NoneType"),
        (DataLoader(Endless(), 4), {}, "dataset is a Endless without a length"),
    ],
)
def test_other_batches_are_refused(dataset: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(CompileError, match=says):
        local(PIPELINE).engine.dataloader(dataset, **options)


def test_a_loader_of_one_device_is_taken_over() -> None:
    engine, rows = local(PIPELINE).engine, NINE

    def batches(loader: Loader) -> list[list[int]]:
        return [part.batch.tolist() for part in loader]

    own = {"collate_fn": lambda samples: torch.tensor(samples) + 1, "num_workers": 0}
    for shuffle, drop_last in ((True, False), (False, True)):
        given: DataLoader[int] = DataLoader(rows, 4, shuffle, drop_last=drop_last, **own)  # type: ignore[arg-type]
        wanted = engine.dataloader(rows, shuffle=shuffle, drop_last=drop_last, seed=ORDER, **own)
        assert batches(engine.dataloader(given, seed=ORDER)) == batches(wanted)


def test_what_other_trainers_have_is_told() -> None:
    engine = local(PIPELINE).engine
    with pytest.raises(AttributeError, match=r"an engine has no 'no_sync': several engine.step before"):
        engine.no_sync()
    with pytest.raises(AttributeError, match="object has no attribute 'nothing_known'"):
        _ = engine.nothing_known


def processes() -> tuple[list[float], dict[str, Tensor] | None, int]:
    world_size = int(os.environ["WORLD_SIZE"])
    model, program, _ = compiled(world_size, *REPLICAS.items())
    engine = program.engine(seed=SEED)
    run = Run(model, engine)
    found = run.train(4), run.weights(), len(run.data.read)
    engine.close()
    return found


def test_processes_train_as_one_device() -> None:
    (losses, weights, num_read), (others, _, _) = run_processes(2, processes)
    assert losses == others
    assert_same((losses, weights), 4)
    assert num_read == sum(len(range(0, size, 2)) for size in (4, 4, 1, 4, 4))  # the last of them ahead
