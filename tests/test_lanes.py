"""Communicators: few on each rank, whatever the number of ranks; programs run on them without a standstill, which the
checker finds where it is; and processes that use them give the bits of those that do not."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import fxpipe
from fxpipe.plan import ops
from fxpipe.plan.lanes import NUM_OWN, Lanes, SendOrder, Turns, lanes
from fxpipe.plan.rank_program import Message
from fxpipe.plan.transport import Channel
from fxpipe.plan.unroll import Unrolled
from fxpipe.run.sampling import LocalRun, SampleRun
from fxpipe.run.transport import distributed
from tests import test_engine
from tests.distributed import run_processes
from tests.lane_check import check_lanes
from tests.row_nets import attention
from tests.row_programs import row_programs

TRANSPORT = distributed.DistributedTransport


class Deep(nn.Module):
    """A line of linear layers, the first half of which the second half reads through skips."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(depth))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            x = x + kept.pop() if 2 * i > len(self.layers) else x
            x = torch.tanh(layer(x))
            kept += [x] if 2 * i < len(self.layers) - 2 else []
        return nn.functional.mse_loss(x, target)

    def example_inputs(self, batch_size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(batch_size, 6), torch.randn(batch_size, 6)


LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "a wave of 64 ranks": (64, 64, {"schedule": "wave", "batch_size": 8, "microbatches": 8}),
    "8 lines of 8 ranks": (
        64, 16, {"schedule": "1f1b", "stages": 8, "data_parallel": 8, "batch_size": 64, "microbatches": 16},
    ),
}  # fmt: skip


def compiled(name: str) -> fxpipe.Program:
    world_size, depth, options = LAYOUTS[name]
    with torch.device("meta"):
        model = Deep(depth)
    return fxpipe.compile(model, world_size, **options)


@pytest.mark.parametrize("name", LAYOUTS)
def test_training_on_64_ranks(name: str) -> None:
    step = compiled(name).step
    found = lanes(step.channels)
    assert found.own | found.shared == step.channels.keys()
    assert max(len({c for c in step.channels if rank in c}) for rank in range(64)) < 20  # neighbours, and a tree
    assert max(found.count(rank) for rank in range(64)) == NUM_OWN + 1
    assert max(sum(rank in group for group in step.groups) for rank in range(64)) <= 1
    for num_own in (0, 2, NUM_OWN):
        assert not check_lanes(step.programs, lanes(step.channels, num_own), step.sends)


def test_training_on_512_ranks() -> None:
    options = {"schedule": "1f1b", "stages": 8, "data_parallel": 64, "batch_size": 512, "microbatches": 128}
    with torch.device("meta"):
        program = fxpipe.compile(Deep(16), 512, **options)
    step = replace(program, ranks=(0,)).step  # as each process of a launch lowers it
    found = lanes(step.channels)
    assert max(found.count(rank) for rank in range(512)) == NUM_OWN + 1
    assert max(sum(rank in group for group in step.groups) for rank in range(512)) == 1


@pytest.mark.parametrize("num_ranks", [64, 512])
def test_channels_from_all_to_all(num_ranks: int) -> None:
    channels = {(a, b): 8 for a in range(num_ranks) for b in range(num_ranks) if a != b}
    found = lanes(channels)
    assert max(found.count(rank) for rank in range(num_ranks)) == NUM_OWN + 1
    assert found.groups == (tuple(range(num_ranks)),)


class Attending(nn.Module):
    """Rows that read their neighbours, all others, and all others' moments."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.of = nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ModuleList()
        self.of.append(nn.Linear(4, 12))

    def forward(self, x: Tensor) -> Tensor:
        return attention(self, self.norm(self.conv(x)), x)  # type: ignore[arg-type]


@pytest.mark.parametrize(("num_patches", "mode"), [(24, "exact"), (6, "displaced")])
def test_sampling(num_patches: int, mode: str) -> None:
    x = {"x": torch.randn(1, 4, num_patches, 2)}
    programs = row_programs(Attending(), x, num_patches, sample={"x": 2}, mode=mode)
    for form in programs.step.forms:
        graphs = [Unrolled(p.rank, p.forms[form].graph) for p in programs.programs]
        order = programs.step.sends(form)
        for num_own in (0, 3, NUM_OWN):
            found = lanes(programs.channels, num_own)
            assert max(found.count(rank) for rank in range(num_patches)) <= num_own + 1
            assert not check_lanes(graphs, found, order), form


@given(st.dictionaries(st.tuples(st.integers(0, 9), st.integers(0, 9)), st.integers(0, 5)), st.integers(0, 5))
def test_channels_that_come_later_move_no_others(given: dict[Channel, int], num_own: int) -> None:
    channels = {channel: size for channel, size in given.items() if channel[0] != channel[1]}
    first = dict(list(channels.items())[::2])
    before = lanes(first, num_own)
    after = lanes(channels, num_own, before)
    assert before.own <= after.own
    assert before.shared <= after.shared
    assert after.own | after.shared == channels.keys()
    ranks = [rank for group in after.groups for rank in group]
    assert len(ranks) == len(set(ranks))
    assert all(after.count(rank) <= num_own + 1 for rank in range(10))
    assert all(any({*channel} <= {*group} for group in after.groups) for channel in after.shared)


def programs_of(text: str) -> tuple[list[Unrolled], list[Message]]:
    """A line for each rank: ">1:5" sends edge 5 to rank 1, "<1:5" posts its receive, "?5" waits for it."""
    programs, messages = [], list[Message]()
    for rank, line in enumerate(text.strip().splitlines()):
        graph, posted = fx.Graph(), dict[int, fx.Node]()
        value = graph.placeholder("transport")
        for word in line.split():
            peer, _, edge = word[1:].rpartition(":")
            if word[0] == ">":
                graph.call_function(ops.send, (value, value, int(peer), int(edge)))
                like = (None, "h", 0, "main", (2,), torch.float32)
                messages.append(Message(int(edge), rank, int(peer), *like))  # type: ignore[arg-type]
            elif word[0] == "<":
                args = (value, int(peer), int(edge), [2], torch.float32, "cpu")
                posted[int(edge)] = graph.call_function(ops.recv, args)
            else:
                graph.call_function(ops.wait, (posted[int(edge)],))
        programs.append(Unrolled(rank, graph))
    return programs, messages


CROSSED = """
<1:2 >2:1 ?2
<2:3 ?3 >0:2
<0:1 ?1 >1:3
"""


def test_receives_posted_early_wait_for_their_turn() -> None:
    """Rank 0 posts the receive of edge 2 first: started then, it would hold up what it waits for."""
    programs, messages = programs_of(CROSSED)
    order = SendOrder.of(messages, [1, 3, 2])
    shared = Lanes(shared=frozenset(message.channel for message in messages))
    assert not check_lanes(programs, shared, order)


def test_an_order_in_which_a_send_waits_for_a_later_one_is_a_fault() -> None:
    programs, messages = programs_of(CROSSED)
    shared = Lanes(shared=frozenset(message.channel for message in messages))
    (fault,) = check_lanes(programs, shared, SendOrder.of(messages, [1, 2, 3]))
    assert fault == "rank 1 sends edge 2 after something later"


def test_a_standstill_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With receives started as they are posted, the machine stops."""
    programs, messages = programs_of(CROSSED)
    shared = Lanes(shared=frozenset(message.channel for message in messages))
    order = SendOrder.of(messages, [1, 3, 2])
    eager = {0: [[2], [0]], 1: [[1], [2]], 2: [[0], [1]]}  # what each rank starts, batch by batch
    taken = iter([*eager[0], *eager[1], *eager[2]])
    monkeypatch.setattr(Turns, "due", lambda self, position: next(taken))
    faults = check_lanes(programs, shared, order)
    assert any("open on communicator shared forever" in fault for fault in faults)


def with_communicators(num_own: int | None) -> None:
    """Transports of this process that send by communicators, over gloo."""
    distributed.DistributedTransport = partial(TRANSPORT, num_own=num_own)  # type: ignore[assignment, misc]


def train(case: str, schedule: str) -> None:
    wanted, trained, sent = test_engine.train(case, schedule)
    for num_own in (0, 1):
        with_communicators(num_own)
        losses, same, as_many = test_engine.train(case, schedule)
        assert (losses, as_many) == (wanted, sent)
        assert all(torch.equal(same[name], value) for name, value in trained.items())


def test_processes_with_communicators_train_bit_for_bit() -> None:
    run_processes(3, train, "tied_parameters", "1f1b")


def sample() -> None:
    """Fresh and displaced steps of three patches; what threads predict, to the bit."""
    torch.manual_seed(0)
    steps = [{"x": torch.randn(1, 4, 6, 2)} for _ in range(5)]
    forms = ["fresh", "displaced", "displaced", "fresh", "displaced"]
    programs = row_programs(Attending(), steps[0], 3, sample={"x": 2}, mode="displaced")
    threads, bound, wanted = LocalRun(3), programs.bound(), list[Tensor]()
    for x, form in zip(steps, forms, strict=True):
        wanted += threads.predict(bound, programs.bind(**x), form)[:1]
    transport = distributed.DistributedTransport(num_own=1)
    transport.open_channels(programs.channels, [])
    run, mine = SampleRun(transport), programs.bound()[transport.rank]
    for x, form, expected in zip(steps, forms, wanted, strict=True):
        assert torch.equal(run.predict(mine, programs.bind(**x), form), expected)
    run.reset()
    transport.close()


def test_processes_with_communicators_sample_bit_for_bit() -> None:
    run_processes(3, sample)
