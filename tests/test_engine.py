"""Engines: processes over gloo against threads of one process bit for bit, optimizers, disagreement, faults."""

import logging
import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.capture.inputs import call_of
from fxpipe.errors import RunError
from fxpipe.run.agreement import checksum
from tests.distributed import run_processes, start_processes
from tests.peer_cases import PEER_CASES
from tests.steps import losses_of

STEPS = 3


def _compile(case: str, world_size: int, schedule: str) -> tuple[fxpipe.Program, torch.nn.Module]:
    torch.manual_seed(0)
    model = PEER_CASES[case](torch.float64)
    return fxpipe.compile(model, world_size, batch_size=5, microbatches=3, schedule=schedule), model


def train(case: str, schedule: str) -> tuple[list[float], dict[str, torch.Tensor], dict[tuple[int, int], int]]:
    """Losses, this rank's trained parameters and the bytes it sent; runs in every process."""
    program, _ = _compile(case, int(os.environ["WORLD_SIZE"]), schedule)
    engine = program.engine(seed=7)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-2)
    losses = losses_of(engine, optimizer, (program.model.example_inputs(5) for _ in range(STEPS)))
    trained = {name: p.detach() for name, p in engine.named_parameters()}
    sent = engine.sent_bytes()
    engine.close()
    return losses, trained, sent


@pytest.mark.parametrize(
    ("case", "world_size", "schedule"),
    [
        ("crossed_skips", 2, "wave"),
        ("tied_parameters", 3, "1f1b"),
        ("dropout", 2, "zero-bubble"),
        ("no_grad_encoder", 4, "wave"),
    ],
)
def test_gloo_equals_threads_bit_for_bit(case: str, world_size: int, schedule: str) -> None:
    results = run_processes(world_size, train, case, schedule)
    program, _ = _compile(case, world_size, schedule)
    engine = program.local_engine(seed=7)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-2)
    losses = losses_of(engine, optimizer, (program.model.example_inputs(5) for _ in range(STEPS)))
    expected = dict(engine.named_parameters())
    seen = set()
    for of_rank, trained, _ in results:
        assert of_rank == losses
        seen |= set(trained)
        for name, parameter in trained.items():
            assert torch.equal(parameter, expected[name]), name
    assert seen == set(expected)
    planned = {channel: STEPS * size for channel, size in program.traffic().channels.items()}
    assert {channel: size for _, _, sent in results for channel, size in sent.items()} == planned


def gather(case: str) -> dict[str, torch.Tensor] | None:
    program, _ = _compile(case, int(os.environ["WORLD_SIZE"]), "wave")
    engine = program.engine()
    state = engine.gather_state_dict()
    engine.close()
    return state


def test_gathered_state_has_every_original_name() -> None:
    state, nothing = run_processes(2, gather, "frozen_middle")
    _, model = _compile("frozen_middle", 1, "1f1b")
    assert nothing is None
    assert state.keys() == model.state_dict().keys()
    model.load_state_dict(state)


def disagree(what: str) -> None:
    rank = int(os.environ["RANK"])
    model = PEER_CASES["no_grad_encoder"](torch.float64)  # every rank holds the encoder
    torch.manual_seed(rank if what == "weights" else 0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    schedule = "gpipe" if what == "plan" and rank == 1 else "1f1b"
    program = fxpipe.compile(model, 2, batch_size=4, microbatches=4, schedule=schedule)
    if what == "plan":  # rank 0 has its plan, and would wait for the other
        return
    engine = program.engine()
    batch = program.model.example_inputs(4)
    if what == "batch" and rank == 1:
        args, kwargs = call_of(batch)
        batch = {k: v + 1 for k, v in kwargs.items()} if kwargs else tuple(v + 1 for v in args)
    engine.step(batch)


@pytest.mark.parametrize(
    ("what", "message"),
    [("plan", "another plan than rank 0"), ("weights", "differs between ranks"), ("batch", "another batch")],
)
def test_ranks_that_disagree_are_told_so(what: str, message: str) -> None:
    every = start_processes(2, disagree, what, timeout_seconds=60)
    assert every[1].returncode not in (0, None)
    assert message in every[1].output
    assert what == "plan" or (every[0].returncode != 0 and message in every[0].output)


def go_on() -> tuple[str, list[float]]:
    """What an engine says after a step that has failed, and the losses of it and of another."""
    program, _ = _compile("crossed_skips", 2, "wave")
    batch = program.model.example_inputs(5)
    engine = program.engine()
    losses = [float(engine.step(batch))]
    with pytest.raises(RunError, match="another batch"):
        engine.step(program.model.example_inputs(5 - engine.rank))
    with pytest.raises(RunError) as told:
        engine.step(batch)
    engine.close()
    engine = program.engine()
    losses.append(float(engine.step(batch)))
    engine.close()
    return str(told.value), losses


def test_an_engine_that_has_failed_says_so_and_another_goes_on() -> None:
    for told, (first, second) in run_processes(2, go_on):
        assert "another batch" in told
        assert "this engine, or sampler, has ended: close() it, and go on with another" in told
        assert first == second


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.float32, torch.complex128])
def test_checksums_tell_values_apart_wherever_they_lie(dtype: torch.dtype) -> None:
    ones = torch.eye(97).to(dtype)  # more than a row of words, and a rest
    assert checksum(ones[1:]) == checksum(ones[1:].clone()) == checksum(ones[1:].t().contiguous().t())
    assert checksum(ones[0, 0].expand(1)) == checksum(ones[0, :1].clone())  # a time of one sample: no stride at all
    changed = ones.clone()
    changed[-1, -1] = 0
    shorter, empty = ones[:-1], ones[:0]
    different = [ones, changed, ones.roll(1, 0), ones.flip(0), ones[:, None], shorter, empty]
    assert len({checksum(one) for one in different}) == len(different)


def fail(how: str) -> None:
    """Rank 1 fails in its second step, before its third action."""
    program, _ = _compile("crossed_skips", int(os.environ["WORLD_SIZE"]), "wave")
    engine = program.engine()
    if int(os.environ["RANK"]) == 1:
        set_action, seen = engine._transport.set_action, []

        def failing(action: str) -> None:
            set_action(action)
            seen.append(action)
            if len(seen) == 20:
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise OSError("planted")

        engine._transport.set_action = failing
    for _ in range(50):
        engine.step(program.model.example_inputs(5))


@pytest.mark.parametrize("how", ["raise", "kill"])
def test_a_failing_rank_ends_all_and_is_named(how: str) -> None:
    for rank, ended in enumerate(start_processes(3, fail, how, timeout_seconds=60)):
        assert ended.returncode not in (0, None), "the others must not wait for ever"
        assert rank == 1 or "rank 1" in ended.output
        assert how == "kill" or "planted" in ended.output


def test_optimizer_of_a_local_engine_trains_the_model_itself() -> None:
    program, model = _compile("crossed_skips", 3, "1f1b")
    engine = program.local_engine()
    batch = program.model.example_inputs(5)
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
    before = float(engine.step(batch))
    optimizer.step()
    optimizer.zero_grad()
    args, kwargs = call_of(batch)
    assert float(model(*args, **kwargs).detach()) < before


def test_gradients_accumulate_as_on_one_device() -> None:
    program, _ = _compile("crossed_skips", 2, "1f1b")
    engine = program.local_engine()
    batch = program.model.example_inputs(5)
    engine.step(batch)
    once = {name: p.grad.clone() for name, p in engine.named_parameters()}
    engine.step(batch)
    for name, parameter in engine.named_parameters():
        torch.testing.assert_close(parameter.grad, 2 * once[name])


class Overflowing(nn.Module):
    """A loss that is infinite where `limit` is 0, and gradients that are no numbers where it is negative."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.double()

    def forward(self, x: Tensor, limit: Tensor) -> Tensor:
        h = x
        for layer in self.layers:
            h = torch.tanh(layer(h))
        grown = (h - x).square().mean(1) / limit.clamp(min=0)
        return torch.where(limit < 0, (h * limit[:, None].clamp(min=0)).square().sum(1).sqrt(), grown).mean()


def overflowing(number: int, limit: float) -> dict[str, Tensor]:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    return {"x": x, "limit": torch.full((4,), limit if number == 1 else 1.0, dtype=torch.float64)}


def trained_on(limit: float, nonfinite: str, local: bool) -> tuple[str, list[float], dict[str, Tensor]]:
    """What ended training, the losses, and the weights then."""
    model, losses, said = Overflowing(), list[float](), ""
    program = fxpipe.compile(model, 2, example_inputs=overflowing(0, 1.0), microbatches=2, schedule="1f1b")
    engine: Any = program.local_engine() if local else program.engine()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [overflowing(number, limit) for number in range(4)]
    try:
        for loss in engine.train(batches, optimizer, 10.0, nonfinite=nonfinite):
            losses.append(float(loss))
    except RunError as error:
        said = str(error)
    engine.sync_model()
    engine.close()
    return said, losses, model.state_dict()


def of_one_device(numbers: list[int]) -> dict[str, Tensor]:
    model = Overflowing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in numbers:
        model(**overflowing(number, 1.0)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize(("limit", "fault"), [(0.0, "the loss is inf"), (-1.0, "the norm of the gradients is nan")])
def test_a_step_that_is_not_finite_trains_nothing(limit: float, fault: str, caplog: pytest.LogCaptureFixture) -> None:
    said, losses, state = trained_on(limit, "raise", local=True)
    assert re.fullmatch(rf"step 1: {fault}; weights are as they were before it; .*", said)
    assert len(losses) == 1
    torch.testing.assert_close(state, of_one_device([0]), rtol=1e-10, atol=1e-12)
    with caplog.at_level(logging.WARNING, "fxpipe.run.training"):
        said, losses, state = trained_on(limit, "skip", local=True)
    assert not said
    assert len(losses) == 4
    torch.testing.assert_close(state, of_one_device([0, 2, 3]), rtol=1e-10, atol=1e-12)
    assert f"step 1: {fault}; the optimizer's step is left out" in caplog.text
    said, _, state = trained_on(limit, "train", local=True)
    assert not said
    assert not all(value.isfinite().all() for value in state.values())
    assert trained_on(limit, "never", local=True)[0] == "nonfinite='never'; give 'raise', 'skip' or 'train'"


WRONG: list[tuple[str, Callable[[Any, Any, Path], object], str]] = [
    ("extra", lambda engine, _, path: engine.save(path, extra=[1]), r"extra is \[1\]; give a dict"),
    ("extra to load", lambda engine, _, path: engine.load(path, extra=[1]), r"extra is \[1\]; give a dict"),
    ("directory", lambda engine, *_: engine.save(None), "directory is None; give the path"),
    ("scheduler", lambda engine, _, path: engine.save(path, scheduler=5), "scheduler is 5; give one of torch.optim"),
    ("no max_norm", lambda engine, *_: engine.clip_grad_norm_(None), "max_norm is None; give a number"),
    ("negative max_norm", lambda engine, *_: engine.clip_grad_norm_(-1), "max_norm is -1; give a number, 0 or more"),
    ("loader", lambda engine, optimizer, _: next(engine.train(5, optimizer)), "not iterable: give batches"),
    (
        "step_index",
        lambda engine, *_: setattr(engine, "step_index", "a") or engine.step(None),
        "step_index is 'a'; set",
    ),
    ("seed", lambda engine, *_: setattr(engine, "seed", 1.5) or engine.step(None), "seed is 1.5; set engine.seed to a"),
]


def test_wrong_arguments_are_refused_in_words(tmp_path: Path) -> None:
    program, model = _compile("dropout", 1, "gpipe")
    optimizer = torch.optim.AdamW(model.parameters())
    for _, call, says in WRONG:
        with pytest.raises(RunError, match=says):
            call(program.local_engine(), optimizer, tmp_path)


def not_finite() -> list[Any]:
    return [trained_on(0.0, "raise", local=False), trained_on(0.0, "skip", local=False)]


def test_a_step_that_is_not_finite_ends_all_ranks_alike() -> None:
    wanted = [trained_on(0.0, how, local=True) for how in ("raise", "skip")]
    for found in run_processes(2, not_finite):
        for (said, losses, state), expected in zip(found, wanted, strict=True):
            assert (said, losses) == expected[:2]
            torch.testing.assert_close(state, expected[2], rtol=0.0, atol=0.0)


def test_counted_bytes_equal_planned_bytes() -> None:
    for case, world_size, schedule in (("nested_skips", 4, "wave"), ("shared_table", 3, "zero-bubble")):
        program, _ = _compile(case, world_size, schedule)
        engine = program.local_engine()
        engine.step(program.model.example_inputs(5))
        assert engine.sent_bytes == program.traffic().channels


def test_a_larger_batch_is_refused_where_asked_with_the_remedy() -> None:
    program, _ = _compile("crossed_skips", 2, "1f1b")
    engine = replace(program, shapes=None).local_engine()
    with pytest.raises(fxpipe.CompileError, match=r"batch has 6 samples.*compiled for 5.*batch_size=6"):
        engine.step(program.model.example_inputs(6))


def test_a_rank_that_raises_in_process_is_named() -> None:
    program, _ = _compile("crossed_skips", 2, "1f1b")
    engine = program.local_engine()
    module = engine._bound(program.step)[1]
    name = next(iter(dict(module.named_children())))

    def broken(*values: object) -> None:
        raise ArithmeticError("planted")

    getattr(module, name).forward = broken
    with pytest.raises(fxpipe.RunError, match=r"rank 1 failed in \d[FB]\d: ArithmeticError: planted$"):
        engine.step(program.model.example_inputs(5))


class Labelled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.labels, self.last = nn.Linear(4, 4), nn.Embedding(5, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)) + self.labels(y)).square().mean()  # type: ignore[no-any-return]


def test_an_operation_that_fails_is_named_with_what_it_reads() -> None:
    given = {"x": torch.randn(4, 4), "y": torch.arange(4)}
    program = fxpipe.compile(Labelled(), 2, example_inputs=given, microbatches=2, schedule="1f1b")
    says = r"failed in \dF1: IndexError: index out of range in self, in embedding of labels\.weight \[5, 4\], y \[2\]$"
    with pytest.raises(fxpipe.RunError, match=says):
        program.local_engine().step(given | {"y": torch.arange(2, 6)})
