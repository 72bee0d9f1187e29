"""Two backbones in opposite directions against brute force, in code that shares nothing with the passes."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe.cluster.links import Link
from fxpipe.errors import CompileError
from passes.chains.backbone_groups import joined, two_groups
from passes.chains.bidirectional import BidirectionalObjective, TwoWays, all_bidirectional, solve_bidirectional
from passes.chains.chain import Chain

P2P, ALL_REDUCE = Link("p2p", 4.0, 1.0), Link("all-reduce", 2.0, 3.0)


@dataclass(frozen=True)
class Backbone:
    """Small numbers for every block, seconds per sample."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    cuts: tuple[int, ...]  # bytes per sample before each block and after the last, each way
    gradients: tuple[int, ...]

    @property
    def chain(self) -> Chain:
        def seconds(n: int) -> tuple[Sequence[float], Sequence[float]]:
            return [n * f for f in self.forward], [n * b for b in self.backward]

        size = len(self.forward)
        return Chain(seconds, self.cuts, self.cuts, self.gradients, (1.0,) * size, (10.0,) * size, P2P, ALL_REDUCE)

    def stages(self, cuts: tuple[int, ...], n: int, replicas: int) -> list[tuple[float, float]]:
        """T0 and Y of every stage of `replicas` devices with n samples each, by the definition."""
        found = []
        for start, stop in pairwise(cuts):
            backward = n * sum(self.backward[start:stop])
            message = 2 * n * self.cuts[stop] / P2P.bandwidth_bytes_per_second + 2 * P2P.latency_seconds
            communication = 2 * message if stop < len(self.forward) else 0.0
            sync = sum(self.gradients[start:stop]) / ALL_REDUCE.bandwidth_bytes_per_second + ALL_REDUCE.latency_seconds
            sync = sync if replicas > 1 else 0.0
            found.append((max(n * sum(self.forward[start:stop]) + backward, communication), sync - backward))
        return found

    def every(self, num_stages: int) -> list[tuple[int, ...]]:
        size = len(self.forward)
        return [(0, *inner, size) for inner in combinations(range(1, size), num_stages - 1)]


@st.composite
def backbones(draw: st.DrawFn, min_blocks: int) -> Backbone:
    size = draw(st.integers(min_blocks, 7))

    def table(extra: int, most: int) -> tuple[int, ...]:
        return tuple(draw(st.lists(st.integers(0, most), min_size=size + extra, max_size=size + extra)))

    return Backbone(table(0, 5), table(0, 9), table(1, 12), table(0, 40))


@given(
    st.data(), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 2),
    st.sampled_from(["paper", "paper-clamped"]),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_best_of_all_pairs_of_cuts(
    data: st.DataObject,
    num_stages: int,
    m_down: int,
    m_up: int,
    replicas: int,
    samples: int,
    objective: BidirectionalObjective,
) -> None:
    both = [data.draw(backbones(num_stages)) for _ in range(2)]
    counts = (m_down, m_up)
    batches = (m_down * replicas * samples, m_up * replicas * samples)
    slots = m_down + m_up - min(num_stages // 2, m_down, m_up)

    def seconds(cuts: Sequence[tuple[int, ...]]) -> float:
        stages = [s for way, c in zip(both, cuts, strict=True) for s in way.stages(c, samples, replicas)]
        late = max(y for _, y in stages)
        late = max(late, 0.0) if objective == "paper-clamped" else late
        return (slots + 2 * num_stages - 2) * max(t for t, _ in stages) + late

    layout = TwoWays(num_stages, counts, replicas)
    plan = solve_bidirectional(both[0].chain, both[1].chain, layout, batch_sizes=batches, objective=objective)
    best = min(map(seconds, product(both[0].every(num_stages), both[1].every(num_stages))))
    assert seconds((plan.down, plan.up)) == pytest.approx(best)
    assert plan.seconds == pytest.approx(best)
    assert plan.seconds == pytest.approx((slots + 2 * num_stages - 2) * plan.period_seconds + plan.sync_seconds)


EVEN = Backbone((1,) * 8, (2,) * 8, (0,) * 9, (6,) * 8)


def test_all_plans_are_the_single_ones_in_order() -> None:
    down, up = EVEN.chain, Backbone((2, 1) * 3, (1, 4) * 3, (1,) * 7, (9,) * 6).chain
    plans = all_bidirectional(down, up, 4, batch_sizes=(8, 8))
    found = {(plan.layout.num_stages, plan.layout.num_microbatches[0]) for plan in plans}
    assert found == {(1, 1), (1, 2), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (4, 4), (4, 8)}
    assert [plan.seconds for plan in plans] == sorted(plan.seconds for plan in plans)
    for plan in plans:
        assert plan == solve_bidirectional(down, up, plan.layout, batch_sizes=(8, 8))
    some = all_bidirectional(down, up, 4, batch_sizes=(8, 8), stages=[2], microbatches=[2, 4])
    assert {(plan.layout.num_stages, plan.layout.num_microbatches) for plan in some} == {(2, (2, 2)), (2, (4, 4))}


def test_groups_hold_opposite_stages() -> None:
    """Two samples of 8 even blocks on 2 stages of 2 devices: T0 = 12; group 0 has 2 + 1 in flight, group 1 1 + 2."""
    plan = solve_bidirectional(EVEN.chain, EVEN.chain, TwoWays(2, (2, 2), 2), batch_sizes=(4, 4))
    assert (plan.down, plan.up) == ((0, 4, 8), (0, 4, 8))
    assert plan.layout.slots == 3
    assert plan.period_seconds == 12.0
    assert plan.sync_seconds == 4 * 6 / 2 + 3 - 8
    assert plan.seconds == 5 * 12.0 + plan.sync_seconds
    assert plan.peak_bytes == (2 * 40 + 3 * 4, 2 * 40 + 3 * 4)
    assert str(plan).startswith("2 stages x 2 devices both ways, 2 + 2 micro-batches: 67000.0 ms (paper), at most 0.0")


@given(st.lists(st.integers(0, 20), min_size=2, max_size=7))
def test_groups_are_balanced(work: list[int]) -> None:
    groups = two_groups(work)
    assert sorted(groups[0] + groups[1]) == list(range(len(work)))
    assert all(groups)
    sums = [sum(work[k] for k in group) for group in groups]
    assert sums[0] >= sums[1]
    subsets = (c for size in range(1, len(work)) for c in combinations(range(len(work)), size))
    assert sums[0] == min(max(sum(work[k] for k in c), sum(work) - sum(work[k] for k in c)) for c in subsets)


def test_joined_backbones_send_nothing_to_each_other() -> None:
    first = Backbone((1, 2), (3, 4), (0, 5, 7), (1, 2))
    second = Backbone((5, 6, 7), (8, 9, 1), (8, 9, 10, 0), (3, 4, 5))
    both = joined([first.chain, second.chain])
    assert both.block_seconds(2) == ([2, 4, 10, 12, 14], [6, 8, 16, 18, 2])
    assert both.forward_bytes == (0, 5, 0, 9, 10, 0)
    assert both.gradient_bytes == (1, 2, 3, 4, 5)
    assert joined([first.chain]).forward_bytes == first.chain.forward_bytes


def test_three_backbones_plan_as_two() -> None:
    """Work 24, 15 and 9 seconds: the largest one way, the two others the other way."""
    rest = [Backbone((1,) * size, (2,) * size, (0,) * (size + 1), (0,) * size).chain for size in (5, 3)]
    groups = two_groups([24.0, 15.0, 9.0])
    assert groups == ((0,), (1, 2))
    up = joined(rest)
    plan = solve_bidirectional(EVEN.chain, up, TwoWays(2, (4, 4), 1), batch_sizes=(4, 4))
    assert plan.period_seconds == 12.0
    assert plan.up == (0, 4, 8)


def test_refusals() -> None:
    chain = EVEN.chain
    with pytest.raises(CompileError, match="9 stages need a block each, and the chain has 8"):
        solve_bidirectional(chain, chain, TwoWays(9, (1, 1), 1), batch_sizes=(1, 1))
    with pytest.raises(CompileError, match="too few for 2 replicas"):
        solve_bidirectional(chain, chain, TwoWays(2, (1, 4), 2), batch_sizes=(2, 4))
    with pytest.raises(CompileError, match="no number of stages S"):
        all_bidirectional(chain, chain, 4, batch_sizes=(3, 3), stages=[2])
    with pytest.raises(CompileError, match=r"num_devices=0 and batch_sizes=\(1, 1\) must be positive"):
        all_bidirectional(chain, chain, 0, batch_sizes=(1, 1))
    with pytest.raises(CompileError, match="unknown objective 'fast'; choose one of paper, paper-clamped"):
        all_bidirectional(chain, chain, 1, batch_sizes=(1, 1), objective="fast")  # type: ignore[arg-type]
    with pytest.raises(CompileError, match="1 backbones cannot be divided into two groups: give 2 to 16"):
        two_groups([1.0])
    with pytest.raises(CompileError, match="no backbones to join"):
        joined([])
    other = Chain(lambda n: ([1.0], [1.0]), (0, 0), (0, 0), (1,), (1,), (1,), ALL_REDUCE, ALL_REDUCE)
    with pytest.raises(CompileError, match="different links"):
        joined([chain, other])


def test_one_block_each_way() -> None:
    one = Backbone((0,), (0,), (0, 0), (0,)).chain
    assert solve_bidirectional(one, one, TwoWays(1, (1, 1), 1), batch_sizes=(1, 1)).seconds == 0.0
