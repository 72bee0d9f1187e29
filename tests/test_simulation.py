"""The simulator: small machines by hand, and predictions that have the actions and bytes of their programs."""

from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fxpipe
from benchmarks.emulation import Slower
from fxpipe.cluster import Cluster, Level
from fxpipe.cluster.links import Link
from fxpipe.costs.model import CostModel, NodeSeconds, node_seconds
from fxpipe.costs.table import CostTable
from fxpipe.errors import ScheduleError
from fxpipe.plan.actions import Action
from fxpipe.plan.rank_program import Message
from fxpipe.plan.timeline import END, Event, RankMemory, Timeline
from fxpipe.simulate import simulate, walk
from fxpipe.simulate.collectives import Collective
from fxpipe.simulate.op_lists import Op, StepOps
from tests.program_ops import back_of, calls_of
from tests.unet import TinyUNet


def message(edge: int, src: int, dst: int, num_bytes: int = 4) -> Message:
    return Message(edge, src, dst, Action(0, "F", 0), "h", 0, "main", (num_bytes,), torch.uint8)


def send(edge: int, src: int, dst: int) -> Op:
    return Op("send", message=message(edge, src, dst))


def post(edge: int, src: int, dst: int) -> Op:
    return Op("post", message=message(edge, src, dst))


def wait(edge: int, src: int, dst: int) -> Op:
    return Op("wait", message=message(edge, src, dst))


def begin(action: str) -> Op:
    return Op("begin", action)


RUN = Op("run", seconds=1.0)


def cluster_of(bandwidth: float, latency: float) -> Cluster:
    return Cluster("toy", (Level(8, Link("test", bandwidth, latency)),))


A_SECOND = cluster_of(1e30, 1.0)  # every message takes one second, however many there are


def test_a_wait_ends_when_the_message_has_arrived() -> None:
    ranks = [
        [begin("0F0"), RUN, send(0, 0, 1), begin(END)],
        [begin("1F0"), wait(0, 0, 1), RUN, begin(END)],
    ]
    events = walk(ranks, A_SECOND).timeline().events
    assert Event(0, "0F0", "F", 0.0, 1.0) in events
    assert Event(0, "0F0", "transfer", 1.0, 2.0, 1, 0, 4, "h[0] main [4]") in events
    assert Event(1, "1F0", "wait", 0.0, 2.0, 0, 0, 4, "h[0] main [4]") in events
    assert Event(1, "1F0", "F", 0.0, 3.0) in events
    timeline = Timeline(events, 2)
    assert timeline.makespan_seconds == 3.0
    assert timeline.busy_seconds == (1.0, 1.0)
    assert timeline.bubble_ratio == pytest.approx(1 - 2 / 6)
    assert timeline.channel_bytes == {(0, 1): 4}


@pytest.mark.parametrize(("runs", "arrives"), [(0, 2.0), (3, 4.0)])
def test_bytes_move_when_the_receive_is_posted(runs: int, arrives: float) -> None:
    ranks = [
        [begin("0F0"), RUN, send(0, 0, 1), RUN, begin(END)],
        [begin("1F0"), *[RUN] * runs, post(0, 0, 1), RUN, wait(0, 0, 1), begin(END)],
    ]
    walked = walk(ranks, A_SECOND)
    assert walked.arrival_seconds == {0: arrives}
    assert walked.rank_ends == [2.0, arrives]  # a send never blocks


def test_a_channel_sends_one_message_at_a_time_and_both_directions_at_once() -> None:
    ranks = [
        [begin("0F0"), send(0, 0, 1), send(1, 0, 1), wait(2, 1, 0), begin(END)],
        [begin("1F0"), send(2, 1, 0), wait(0, 0, 1), wait(1, 0, 1), begin(END)],
    ]
    arrivals = walk(ranks, A_SECOND).arrival_seconds
    assert arrivals == {0: 1.0, 1: 2.0, 2: 1.0}


def test_sends_do_not_block_and_messages_may_wait_for_their_reader() -> None:
    ranks = [
        [begin("0F0"), RUN, send(0, 0, 1), RUN, begin(END)],
        [begin("1F0"), RUN, RUN, RUN, wait(0, 0, 1), begin(END)],
    ]
    walked = walk(ranks, A_SECOND)
    assert walked.op_seconds[0][-1] == (2.0, 2.0)
    assert walked.op_seconds[1][4] == (3.0, 3.0)


def test_messages_take_from_what_their_ends_compute() -> None:
    """A quarter of their seconds and half a second each: the sender pays with what follows, a waiting receiver not."""
    link = Link("busy", 4.0, 0.0, taken_share=0.25, overhead_seconds=0.5)
    ranks = [
        [begin("0F0"), send(0, 0, 1), send(1, 0, 1), RUN, begin(END)],
        [begin("1F0"), RUN, RUN, RUN, wait(0, 0, 1), wait(1, 0, 1), RUN, begin(END)],
        [begin("2F0"), wait(2, 0, 2), RUN, begin(END)],
    ]
    ranks[0].insert(3, send(2, 0, 2))
    walked = walk(ranks, Cluster("toy", (Level(3, link),)))
    assert walked.op_seconds[0][-1] == (1 + 3 * 0.75, 1 + 3 * 0.75)
    assert walked.op_seconds[1][-1] == (4 + 2 * 0.75, 4 + 2 * 0.75)
    assert walked.arrival_seconds[2] > 0.75
    assert walked.op_seconds[2][-1] == pytest.approx([walked.arrival_seconds[2] + 1] * 2)


def test_collectives_take_from_what_their_ranks_compute() -> None:
    """Of two ranks each sends half of the bytes around and receives as many, twice for an all-reduce."""
    link = Link("busy", 4.0, 0.0, taken_share=0.25, overhead_seconds=0.5)
    gather, reduce = Collective(0, "all_gather", (0, 1), 16), Collective(1, "reduce", (0, 1), 16)
    ops = [begin("0F0"), Op("all_gather", collective=gather), RUN, Op("reduce", collective=reduce), RUN, begin(END)]
    walked = walk([ops, ops], Cluster("toy", (Level(2, link),)))
    assert [of_rank[-1][0] for of_rank in walked.op_seconds] == [1 + 2 * 1.0 + 1 + 4 * 1.0] * 2


def test_what_takes_no_time_pays_for_no_message() -> None:
    """An operation without seconds between two sends does not keep the second one back."""
    cluster = Cluster("toy", (Level(3, Link("busy", 8.0, 0.0, overhead_seconds=1.0)),))
    others = [[begin("1F0"), wait(0, 0, 1), begin(END)], [begin("2F0"), wait(1, 0, 2), begin(END)]]
    ends = [
        walk([[begin("0F0"), send(0, 0, 1), *between, send(1, 0, 2), begin(END)], *others], cluster).arrival_seconds
        for between in ([], [Op("run")])
    ]
    assert ends[0] == ends[1]


def test_an_action_starts_after_its_own_waits_and_before_the_next() -> None:
    """A reduction that waits for one before it, then a forward that waits for a gather."""
    first, second = (Collective(edge, "reduce", (0, 1), 4) for edge in range(2))
    ops = [
        *(begin("0B0"), RUN, Op("reduce", collective=first), begin("0R0"), Op("wait_reduce", collective=first)),
        *(Op("reduce", collective=second), begin("1F0"), Op("wait_reduce", collective=second), RUN, begin(END)),
    ]
    step = StepOps([ops, ops], [{}, {}])
    assert simulate(step, A_SECOND).starts[0] == (0.0, 3.0, 5.0, 6.0)


def test_a_deadlock_is_an_error() -> None:
    with pytest.raises(ScheduleError, match=r"wait forever for edges \[0\]"):
        walk([[begin("0F0"), wait(0, 1, 0)], [begin("1F0")]], A_SECOND)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.integers(0, 3), st.integers(0, 3)).filter(lambda pair: pair[0] != pair[1]),
            st.tuples(st.integers(0, 3), st.floats(0.0, 5.0)),
        ),
        max_size=30,
    ),
    st.randoms(use_true_random=False),
)
def test_times_are_longest_paths(steps: list[tuple[int, int | float]], generator: Random) -> None:
    """Any order in which sends come before their waits; a float is a run, a pair of ranks a message."""
    ranks: list[list[Op]] = [[] for _ in range(4)]
    clock, free, arrival, unread = (
        [0.0] * 4,
        dict[tuple[int, int], float](),
        list[float](),
        list[tuple[int, int, int]](),
    )
    for rank, what in steps:
        if isinstance(what, float):
            ranks[rank].append(Op("run", seconds=what))
            clock[rank] += what
        else:
            ranks[rank].append(send(len(arrival), rank, what))
            unread.append((len(arrival), rank, what))
            arrival.append(max(clock[rank], free.get((rank, what), 0.0)) + 1.0)
            free[rank, what] = arrival[-1]
        while unread and generator.random() < 0.5:
            edge, source, target = unread.pop(generator.randrange(len(unread)))
            ranks[target].append(wait(edge, source, target))
            clock[target] = max(clock[target], arrival[edge])
    walked = walk(ranks, A_SECOND)
    assert [nodes[-1][1] if nodes else 0.0 for nodes in walked.op_seconds] == pytest.approx(clock)
    assert walked.arrival_seconds == pytest.approx(dict(enumerate(arrival)))


def test_messages_share_the_ports_of_their_ranks() -> None:
    sends = [begin("0F0"), *(Op("send", message=message(e, 0, e + 1, 10)) for e in range(2)), begin(END)]
    reads = [[begin("1F0"), Op("wait", message=message(e, 0, e + 1, 10)), begin(END)] for e in range(2)]
    arrivals = walk([sends, *reads], cluster_of(10.0, 0.5)).arrival_seconds
    assert arrivals == {0: 2.5, 1: 2.5}


@pytest.fixture(
    scope="module",
    params=[("1f1b", 2, 1), ("wave", 2, 1), ("zero-bubble", 3, 1), ("1f1b", 4, 2)],
    ids=lambda p: f"{p[0]}-{p[1]}",
)
def program(request: Any) -> fxpipe.Program:
    schedule, ranks, replicas = request.param
    model = TinyUNet("no_grad")
    return fxpipe.compile(model, ranks, batch_size=5, microbatches=3, schedule=schedule, data_parallel=replicas)


def test_predictions_have_the_actions_and_bytes_of_the_program(program: fxpipe.Program) -> None:
    timeline = program.simulate()
    for rank, actions in enumerate(program.schedule.ranks):
        simulated = [event.action for event in timeline.actions if event.rank == rank]
        assert simulated == [*map(str, actions), END]
    assert timeline.channel_bytes == program.traffic().channels
    assert sum(event.num_bytes for event in timeline.waits if event.peer >= 0) == program.traffic().total_bytes
    reduced = [0] * program.world_size
    for reduction in program.step.reductions:
        for rank in reduction.ranks:
            reduced[rank] += (1 + bool(reduction.owners)) * reduction.num_bytes
    assert timeline.reduced_bytes == tuple(reduced)
    assert {event.action for event in timeline.collectives if event.kind != "all_gather"} == {
        str(a) for actions in program.schedule.ranks for a in actions if a.kind == "R"
    }
    assert 0 < timeline.bubble_ratio < 1
    assert len(timeline.peak_bytes) == program.world_size
    assert f"rank {program.world_size - 1}: busy" in str(timeline)


def test_every_graph_that_programs_call_has_a_cost(program: fxpipe.Program) -> None:
    nodes = (node for of_rank in program.step.programs for node in of_rank.graph.nodes)
    called = {node.target for node in nodes if node.op == "call_module" and node.args}
    assert called <= set(calls_of(back_of(program), program.schedule))


def test_time_follows_the_cost_model_and_the_cluster(program: fxpipe.Program) -> None:
    fast = cluster_of(1e18, 0.0)
    base = program.simulate(cluster=fast)
    slow = Slower(program.costed.model, 2.0)
    assert program.simulate(slow, fast).makespan_seconds == pytest.approx(2 * base.makespan_seconds)
    slower_network = program.simulate(cluster=cluster_of(1e6, 1e-4))
    assert slower_network.makespan_seconds > base.makespan_seconds
    assert slower_network.busy_seconds == pytest.approx(base.busy_seconds)


@pytest.mark.parametrize(("wrong", "says"), [("H100", "'H100', a str without seconds"), (Slower, "the class Slower;")])
def test_what_is_no_cost_model_is_refused(program: fxpipe.Program, wrong: Any, says: str) -> None:
    with pytest.raises(fxpipe.CompileError, match=f"cost_model is {says}.* give an object of a class that inherits"):
        program.simulate(wrong)


class Measured(CostModel):
    """A cost model that knows its graph: a second per node, whatever it costs."""

    def seconds(self, table: CostTable, num_samples: int) -> NodeSeconds:
        assert table.graph is not None
        assert set(table) == {node.name for node in table.graph.nodes}
        return NodeSeconds(*np.ones((3, len(table))))

    def moving_seconds(self, bytes_read: int, bytes_written: int) -> float:
        return 0.0


def test_measured_nodes_are_taken_as_measured(program: fxpipe.Program) -> None:
    model = Measured()
    calls = calls_of(back_of(program), program.schedule)
    num_nodes = {name: sum(map(len, call.blocks.values())) for name, call in calls.items()}
    forward = [e for e in program.simulate(model, cluster_of(1e18, 0.0)).actions if e.kind == "T"]
    assert forward
    for event in forward:
        name = next(name for name in calls if name.startswith("frozen_0_forward"))
        assert event.seconds == pytest.approx(num_nodes[name], rel=1e-3)


def test_a_split_backward_takes_what_the_whole_one_does(program: fxpipe.Program) -> None:
    model, costs = program.costed.model, program.costed.costs
    calls = calls_of(back_of(program), program.schedule)
    for name, call in calls.items():
        if call.part == "backward_input":
            of_nodes = node_seconds(model, costs, call.num_samples)
            parts = [calls[name.replace("_input", part)] for part in ("_input", "_weight", "")]
            inputs, weights, whole = (sum(p.seconds(costs, of_nodes).values()) for p in parts)
            assert inputs + weights == pytest.approx(whole)


def test_a_peak_is_the_sum_of_its_parts() -> None:
    assert RankMemory(0, ((0.0, 3),), {"state": 3, "transfers": 4}).peak_bytes == 7
