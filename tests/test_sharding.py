"""Replicas of a stage that train a share of its parameters each: shares, what is exchanged for them, their states."""

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fxpipe
from fxpipe.plan.schedule import Schedule
from fxpipe.plan.timeline import Event
from fxpipe.plan.transport import Transport
from fxpipe.run.transport import run_ranks
from fxpipe.run.transport.distributed import DistributedTransport
from passes.step_ops.sharding import owners, sums_in_turn
from tests.distributed import run_processes
from tests.own_models import Adapted, OneDevice, batch
from tests.test_own_model import ROWS, on_threads, program

RANKS = 3
GROUPS = [(0, 1, 2), (0, 2)]
REPLICAS = {"schedule": "gpipe", "data_parallel": 3, "microbatches": 3}


@given(st.lists(st.dictionaries(st.text("abc", min_size=1, max_size=3), st.integers(1, 99)), max_size=3), st.data())
def test_shares_are_nearly_equal(of_stages: list[dict[str, int]], data: st.DataObject) -> None:
    sizes = {stage: {f"{stage}.{name}": n for name, n in of.items()} for stage, of in enumerate(of_stages)}
    ranks = data.draw(st.lists(st.integers(0, 9), min_size=2, max_size=4, unique=True))
    found = owners(sizes, [data.draw(st.permutations(ranks)) for _ in sizes])
    every = {name: n for of in sizes.values() for name, n in of.items()}
    assert found.keys() == every.keys()
    loads = Counter(dict.fromkeys(ranks, 0))
    for name, rank in found.items():
        loads[rank] += every[name]
    assert set(loads) == set(ranks)
    assert max(loads.values()) - min(loads.values()) <= max(every.values(), default=0)


@pytest.mark.parametrize(
    ("ranks", "in_turn"),
    [
        (["0F0 1F0 1B0 1R0 0B0 0R0", "0F1 1F1 1B1 1R1 0B1 0R1"], True),
        (["0F0 1F0 1B0 1R0 0B0 0R0", "0F1 1F1 1B1 0B1 0R1 1R1"], False),  # each would wait for the other
        (["0F0 0B0 0R0", "0F1 0B1 0R1 1F0 1B0 1R1", "1F1 1B1 1R2"], False),  # a ring of such waits for more ranks
    ],
)
def test_sums_are_waited_for_in_turn_where_no_rank_can_wait_forever(ranks: list[str], in_turn: bool) -> None:
    lines = [f"rank {rank}: {actions}" for rank, actions in enumerate(ranks)]
    schedule = Schedule.parse("\n".join(["schedule own: 2 stages, 2 micro-batches", *lines]))
    assert sums_in_turn(schedule) == in_turn


def exchange(transport: Transport) -> list[torch.Tensor]:
    """What a rank has of sums, and all parameters, of two groups at once: several types, shapes, and shares of none."""
    transport.open_channels({}, GROUPS)
    draw = torch.Generator().manual_seed(transport.rank)
    shapes: list[tuple[tuple[int, ...], torch.dtype]] = [
        ((3, 4), torch.float32), ((5,), torch.float64), ((), torch.float64), ((0, 2), torch.float32),
        ((2, 3), torch.bfloat16), ((4,), torch.complex64), ((2, 2, 2, 2), torch.float32),
    ]  # fmt: skip
    found, waits = list[torch.Tensor](), []
    for number, ranks in enumerate(GROUPS):
        if transport.rank not in ranks:
            continue
        of = tuple(ranks[-1 - index % 2] for index in range(len(shapes)))  # of three ranks the first has nothing
        given = [torch.randn(shape, generator=draw, dtype=dtype) for shape, dtype in shapes]
        given[-1] = given[-1].to(memory_format=torch.channels_last)
        values = [nn.Parameter(tensor.clone()) for tensor in given]
        broadcast = transport.broadcast([*values], of, ranks, 2 * number)
        waits.append((transport.reduce_scatter(given, of, ranks, 2 * number + 1), broadcast, values))
    for sums, broadcast, values in waits:
        with torch.no_grad():
            found += sums.wait()
            broadcast.wait()
        found += [value.detach() for value in values]
    return found


def exchange_between_processes() -> list[torch.Tensor]:
    transport = DistributedTransport()
    found = exchange(transport)
    transport.close()
    return found


def test_processes_sum_and_tell_what_threads_do() -> None:
    threads = run_ranks(RANKS, exchange)
    assert [len(found) for found in threads] == [7 + 3 + 7, 3 + 7, 4 + 7 + 4 + 7]
    first, second, third = (found[-7:] for found in threads)
    for one, other in zip(first, third, strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(first[0], second[0])
    for found, expected in zip(run_processes(RANKS, exchange_between_processes), threads, strict=True):
        torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("shard", ["none", "optimizer", "weights"])
def test_an_optimizer_keeps_the_state_of_a_share(shard: str) -> None:
    def train(model: nn.Module, engine: Any) -> tuple[dict[str, Any] | None, list[str]]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for number in range(4):
            engine.step(batch(number, ROWS[0]))
            if number % 2:  # gradients of two batches
                optimizer.step()
                optimizer.zero_grad()
        names = {parameter: name for name, parameter in model.named_parameters()}
        return engine.gather_state_dict(), [names[parameter] for parameter in optimizer.state]

    found = on_threads(RANKS, [REPLICAS | {"shard": shard}], lambda m, engines: train(m, engines[0]()))
    one = Adapted()
    expected, every = train(one, OneDevice(one))
    torch.testing.assert_close(found[0][0], expected, rtol=1e-10, atol=1e-12)
    held = Counter(name for _, names in found for name in names)
    assert held == dict.fromkeys(every, RANKS if shard == "none" else 1)
    num_bytes = [sum(one.get_parameter(name).nbytes for name in names) for _, names in found]
    whole = sum(one.get_parameter(name).nbytes for name in every)
    assert max(num_bytes) <= (whole / RANKS + max(p.nbytes for p in one.parameters()) if shard != "none" else whole)


def test_a_step_that_only_accumulates_broadcasts_nothing() -> None:
    """Three batches a step of the optimizer; then weights are written on one rank alone, between two batches."""

    def train(model: nn.Module, engine: Any) -> tuple[dict[str, Any] | None, list[int]]:
        optimizer, events, broadcasts = torch.optim.AdamW(model.parameters(), lr=0.1), list[Event](), list[int]()
        engine._observe = events.append
        for number in range(8):
            engine.step(batch(number, ROWS[0]))
            broadcasts.append(sum(event.kind == "all_gather" for event in events))
            events.clear()
            if number % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
            if number == 6 and engine.rank == 1:
                with torch.no_grad():
                    next(engine.parameters()).mul_(1.5)
        return engine.gather_state_dict(), broadcasts

    found = on_threads(RANKS, [REPLICAS], lambda m, engines: train(m, engines[0]()))
    for _, broadcasts in found:
        assert broadcasts[0] > 0
        assert broadcasts == [broadcasts[0] * often for often in (1, 0, 0, 1, 0, 0, 1, 1)]


def test_a_share_of_states_is_planned() -> None:
    states: dict[bool, list[int]] = {}
    for sharded in (False, True):
        made = program(Adapted(), RANKS, ROWS[0], REPLICAS | {"shard": "optimizer" if sharded else "none"})
        assert made.plan.staged.sharded == sharded
        assert ("optimizer states shared out over replicas" in str(made.plan)) == sharded
        timeline = made.simulate()
        assert made.plan.peak_bytes == pytest.approx(max(timeline.peak_bytes), rel=0.02)
        states[sharded] = [memory.at_peak["optimizer"] for memory in timeline.memory]
    assert sum(states[True]) == states[False][0] == states[False][1]
    with pytest.raises(fxpipe.CompileError, match="shard='none' beside a plan, which says shard=optimizer"):
        program(Adapted(), RANKS, ROWS[0], {"microbatches": None, "plan": made.plan, "shard": "none"})


def test_a_plan_of_shared_states_is_run_as_it_says() -> None:
    made = program(Adapted(), RANKS, ROWS[0], REPLICAS)
    again = program(Adapted(), RANKS, ROWS[0], {"microbatches": None, "plan": fxpipe.Plan.parse(str(made.plan))})
    assert again.step.fingerprint == made.step.fingerprint
    apart = program(Adapted(), RANKS, ROWS[0], REPLICAS | {"shard": "none"})
    assert apart.step.fingerprint != made.step.fingerprint
