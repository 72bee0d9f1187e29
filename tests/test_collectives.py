"""Collectives in simulated steps: by hand, as data-parallel replicas and as sharded parameters issue them."""

import pytest

from fxpipe.cluster import Cluster, Level
from fxpipe.cluster.links import Link
from fxpipe.errors import ScheduleError
from fxpipe.plan.timeline import END, Event, Timeline
from fxpipe.show.report.figures import timeline_figure
from fxpipe.show.trace_format import trace_events
from fxpipe.simulate import walk
from fxpipe.simulate.collectives import Collective, SimulatedCollectives, ring_ports
from fxpipe.simulate.op_lists import Op

# A gather of 400 bytes over two ranks takes 1 + 200 / 100 = 3 s, an all-reduce twice that.
CLUSTER = Cluster("toy", (Level(4, Link("toy", 100.0, 1.0)),))


def collective(edge: int, kind: str = "reduce", ranks: tuple[int, ...] = (0, 1)) -> Collective:
    return Collective(edge, kind, ranks, 400)


def issue(of: Collective) -> Op:
    return Op(of.kind, collective=of)


def wait(of: Collective) -> Op:
    return Op(f"wait_{of.kind}", collective=of)


def begin(action: str) -> Op:
    return Op("begin", action)


def run(seconds: float) -> Op:
    return Op("run", seconds=seconds)


def test_it_starts_when_the_last_rank_has_issued_it_and_wakes_all() -> None:
    total = collective(7)
    ranks = [
        [begin("0B0"), run(1.0), issue(total), run(2.0), wait(total), begin(END)],
        [begin("0B0"), run(2.0), issue(total), wait(total), run(1.0), begin(END)],
    ]
    timeline = walk(ranks, CLUSTER).timeline()
    label = "all-reduce of 400 B over ranks 0, 1"
    for rank, since in ((0, 3.0), (1, 2.0)):
        assert Event(rank, "0B0", "reduce", 2.0, 8.0, -1, 7, 400, label) in timeline.collectives
        assert Event(rank, "0B0", "wait", since, 8.0, -1, 7, 400, label) in timeline.waits
    assert timeline.makespan_seconds == 9.0
    assert timeline.busy_seconds == (3.0, 3.0)
    assert timeline.reduced_bytes == (400, 400)
    assert timeline.channel_bytes == {}
    assert {event.kind for event in timeline.actions} == {"B", "end"}


def test_work_hides_it() -> None:
    total = collective(0)
    ranks = [[begin("0B0"), issue(total), run(10.0), wait(total), begin(END)] for _ in range(2)]
    timeline = walk(ranks, CLUSTER).timeline()
    assert timeline.makespan_seconds == 10.0
    assert [event.seconds for event in timeline.waits] == [0.0, 0.0]
    assert timeline.bubble_ratio == 0.0


def test_those_of_the_same_ranks_run_one_after_the_other() -> None:
    first, second, other = collective(0), collective(1), collective(2, ranks=(2, 3))
    mine = [begin("0B0"), issue(first), issue(second), wait(second), wait(first), begin(END)]
    theirs = [begin("1B0"), issue(other), wait(other), begin(END)]
    timeline = walk([mine, mine, theirs, theirs], CLUSTER).timeline()
    spans = {(event.rank, event.edge): (event.start_seconds, event.end_seconds) for event in timeline.collectives}
    assert spans[0, 0] == spans[1, 0] == spans[2, 2] == spans[3, 2] == (0.0, 6.0)
    assert spans[0, 1] == spans[1, 1] == (6.0, 12.0)
    assert timeline.reduced_bytes == (800, 800, 400, 400)


NODES = Cluster("toy", (Level(2, Link("inside", 1e9, 0.0)), Level(2, Link("across", 100.0, 1.0))))


def test_those_that_leave_a_node_by_the_same_port_run_one_after_the_other() -> None:
    """Ranks 0 and 1 are a node's; each sums with its twin in the other node. The second is issued first in time."""
    twins = {rank: collective(rank, ranks=(rank, rank + 2)) for rank in (0, 1)}
    ranks = [[run(2.0 - rank % 2), issue(twins[rank % 2]), wait(twins[rank % 2])] for rank in range(4)]
    timeline = walk(ranks, NODES).timeline()
    spans = {event.edge: (event.start_seconds, event.end_seconds) for event in timeline.collectives}
    assert spans == {1: (1.0, 7.0), 0: (7.0, 13.0)}
    assert ring_ports(NODES, (0, 1)) == ((0, "out", 1), (0, "in", 0), (0, "out", 0), (0, "in", 1))
    assert set(ring_ports(NODES, (0, 2))) == set(ring_ports(NODES, (1, 3)))


def test_sharded_parameters_are_gathered_one_layer_ahead() -> None:
    """The op list of a sharded forward and backward: gathers run on while the layer before computes."""
    gathers = [collective(layer, "all_gather") for layer in range(3)]
    scatter = collective(3, "reduce_scatter")
    ops = [issue(gathers[0])]
    for layer in range(3):
        ops += [wait(gathers[layer]), *map(issue, gathers[layer + 1 : layer + 2]), run(4.0)]
    ops += [issue(scatter), run(1.0), wait(scatter)]
    timeline = walk([ops, ops], CLUSTER).timeline()
    assert [event.start_seconds for event in timeline.collectives if event.rank == 0] == [0.0, 3.0, 7.0, 15.0]
    assert timeline.makespan_seconds == 3.0 + 3 * 4.0 + 3.0


def test_ranks_that_issue_in_another_order_are_told() -> None:
    first, second = collective(0), collective(1)
    with pytest.raises(ScheduleError, match=r"rank 1 issues collective 1 where another rank of \(0, 1\) has issued 0"):
        walk([[issue(first), issue(second)], [issue(second), issue(first)]], CLUSTER)


def test_one_that_a_rank_never_issues_is_a_deadlock() -> None:
    total = collective(5)
    with pytest.raises(ScheduleError, match=r"wait forever for edges \[5\]"):
        walk([[issue(total), wait(total)], [run(1.0)]], CLUSTER)


def test_spans_are_known_once_all_have_issued() -> None:
    under_way = SimulatedCollectives(CLUSTER)
    assert under_way.issue(1.0, 0, collective(0)) is None
    assert under_way.issue(3.0, 1, collective(0)) == (3.0, 9.0)
    assert under_way.issue(4.0, 1, collective(1, "reduce_scatter")) is None
    assert under_way.issue(5.0, 0, collective(1, "reduce_scatter")) == (9.0, 12.0)


def test_the_report_draws_them_in_rows_of_their_own() -> None:
    total = collective(7)
    ranks = [[begin("0B0"), issue(total), run(1.0), wait(total), begin(END)] for _ in range(2)]
    figure = timeline_figure(walk(ranks, CLUSTER).timeline())
    (bars,) = (trace for trace in figure["data"] if trace["color"] == "reduce")
    assert (bars["y"], bars["base"], bars["x"]) == (["rank 0 collectives", "rank 1 collectives"], [0.0] * 2, [6e3] * 2)
    assert set(bars["y"]) < set(figure["layout"]["yaxis"]["categoryarray"])


def test_traces_show_them_beside_the_actions() -> None:
    events = (
        Event(0, "0B0", "B", 0.0, 4.0),
        Event(0, "0B0", "wait", 2.0, 4.0, -1, 7, 400, "all-reduce"),
        Event(0, "0B0", "reduce", 1.0, 4.0, -1, 7, 400, "all-reduce"),
    )
    found = trace_events(Timeline(events, 1))
    slices = [(event["name"], event["tid"], event["dur"]) for event in found if event["ph"] == "X"]
    assert slices == [("0B0", 0, 4e6), ("wait for a collective", 0, 2e6), ("all-reduce", 2, 3e6)]
    assert any(event["ph"] == "M" and event["args"].get("name") == "collectives" for event in found)
