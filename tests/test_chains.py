"""Chain partitions against brute force over all cuts and replicas (`tests.chain_cases`)."""

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, pairwise, product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe.cluster.links import Link
from fxpipe.errors import CompileError
from passes.chains import Chain, ChainPlan, all_plans, best_unequal, solve_equal, solve_unequal, tabulated
from tests.chain_cases import LIMITS, OBJECTIVES, Case, best_of_all, cases, judge, random_case


def require_honest(plan: ChainPlan, case: Case, batch_size: int, objective: str, limit: float | None) -> None:
    """What a plan says of itself is true."""
    assert plan.boundaries[0] == 0
    assert plan.boundaries[-1] == case.size
    assert list(plan.boundaries) == sorted(set(plan.boundaries))
    seconds, peaks = judge(case, plan.boundaries, plan.replicas, plan.num_microbatches, batch_size, objective)
    assert plan.seconds == pytest.approx(seconds, rel=1e-9, abs=1e-12)
    assert plan.peak_bytes == pytest.approx(peaks)
    assert limit is None or max(peaks) <= limit


@given(cases(), st.sampled_from([(4, 8), (6, 12), (8, 8)]), LIMITS)
@settings(max_examples=400)
def test_every_plan_is_best_of_all(case: Case, sizes: tuple[int, int], limit: float | None) -> None:
    """Every (S, M) of one call, some ten each, by every objective."""
    num_devices, batch_size = sizes
    for objective in OBJECTIVES:
        options = {"objective": objective, "memory_limit_bytes": limit}
        wanted = {}
        for s, m in product(range(1, case.size + 1), range(1, batch_size + 1)):
            if num_devices % s == 0 and batch_size % (m * num_devices // s) == 0:
                layout = (num_devices // s,) * s
                if (best := best_of_all(case, [layout], s, m, batch_size, objective, limit)) is not None:
                    wanted[s, m] = best
        if not wanted:
            with pytest.raises(CompileError, match="GiB a rank: the least that any needs is"):
                all_plans(case.chain(), num_devices, batch_size, **options)
            continue
        plans = all_plans(case.chain(), num_devices, batch_size, **options)
        assert {(p.num_stages, p.num_microbatches) for p in plans} == set(wanted)
        assert [p.seconds for p in plans] == sorted(p.seconds for p in plans)
        for plan in plans:
            assert plan.replicas == (num_devices // plan.num_stages,) * plan.num_stages
            require_honest(plan, case, batch_size, objective, limit)
            assert plan.seconds == pytest.approx(wanted[plan.num_stages, plan.num_microbatches], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("seed", range(8))
def test_many_blocks_in_four_stages(objective: str, seed: int) -> None:
    """Among 1,771 cuts many are near the best."""
    rng = Random(seed)
    case, m = random_case(rng, 24, whole=False), rng.randint(2, 6)
    plan = solve_equal(case.chain(), 4, m, 2, batch_size=4 * m, objective=objective)
    require_honest(plan, case, 4 * m, objective, None)
    assert plan.seconds == pytest.approx(best_of_all(case, [(2,) * 4], 4, m, 4 * m, objective, None), rel=1e-9)


def all_replicas(num_stages: int, num_devices: int) -> list[tuple[int, ...]]:
    cuts = combinations(range(1, num_devices), num_stages - 1)
    return [tuple(b - a for a, b in pairwise((0, *c, num_devices))) for c in cuts]


@given(cases(5), st.integers(1, 4), st.integers(1, 5), st.integers(1, 6), LIMITS)
@settings(max_examples=300)
def test_unequal_replicas_are_best_of_all(
    case: Case, num_stages: int, num_microbatches: int, num_devices: int, limit: float | None
) -> None:
    s, batch_size = min(num_stages, case.size, num_devices), 30
    layouts = all_replicas(s, num_devices)
    for objective in OBJECTIVES[1:]:
        best = best_of_all(case, layouts, s, num_microbatches, batch_size, objective, limit)
        options = {"batch_size": batch_size, "objective": objective, "memory_limit_bytes": limit}
        if best is None:
            with pytest.raises(CompileError, match="GiB a rank: the least that any needs is"):
                solve_unequal(case.chain(), s, num_microbatches, num_devices, **options)
            continue
        plan = solve_unequal(case.chain(), s, num_microbatches, num_devices, **options)
        assert sum(plan.replicas) == num_devices
        require_honest(plan, case, batch_size, objective, limit)
        assert plan.seconds == pytest.approx(best, rel=1e-9, abs=1e-9)


def test_unequal_replicas_by_the_simulated_objective_are_near_the_best() -> None:
    """This one is not exact: 99.8 % optimal and at most 2.4 % off on 1,600 such instances."""
    rng, excess = Random(7), []
    for _ in range(150):
        case = random_case(rng, rng.randint(1, 5), rng.random() < 0.5)
        num_devices, m = rng.randint(1, 6), rng.randint(1, 5)
        s = min(rng.randint(1, 4), case.size, num_devices)
        plan = solve_unequal(case.chain(), s, m, num_devices, batch_size=30)
        require_honest(plan, case, 30, "simulated", None)
        best = best_of_all(case, all_replicas(s, num_devices), s, m, 30, "simulated", None)
        assert best is not None
        assert plan.seconds >= best * (1 - 1e-9)
        if num_devices % s == 0 and best:
            equal = solve_equal(case.chain(), s, m, num_devices // s, batch_size=30)
            assert plan.seconds <= equal.seconds * (1 + 1e-9)
        excess.append(plan.seconds / best - 1 if best else 0.0)
    assert sum(e < 1e-9 for e in excess) >= 147
    assert max(excess) < 0.05


@given(cases(4), st.integers(1, 5), st.sampled_from(OBJECTIVES[1:]))
@settings(max_examples=60)
def test_the_best_of_all_unequal_plans(case: Case, num_devices: int, objective: str) -> None:
    stages, microbatches = range(1, 5), [1, 2, 5]
    best = min(
        best_of_all(case, all_replicas(s, num_devices), s, m, 30, objective, None) or 0.0
        for s, m in product(stages, microbatches)
        if s <= min(case.size, num_devices)
    )
    options = {"stages": stages, "microbatches": microbatches, "objective": objective}
    plan = best_unequal(case.chain(), num_devices, 30, **options)
    require_honest(plan, case, 30, objective, None)
    assert plan.seconds == pytest.approx(best, rel=1e-9, abs=1e-9)


EVEN = Case(
    (0.0,) * 4, (1.0,) * 4, (2.0,) * 4, (1.0,) * 3, (3.0,) * 4, (1.0,) * 4, (2.0,) * 4, (1.0, 1.0), (0.0, 0.0)
)  # fmt: skip


def test_a_plan_worked_out_by_hand() -> None:
    """2 stages of 2 blocks on one device each, 3 micro-batches of one sample: t = 6, transfer 2, nothing to reduce."""
    plan = solve_equal(EVEN.chain(), 2, 3, 1, batch_size=3)
    assert plan.boundaries == (0, 2, 4)
    assert plan.seconds == (3 - 1) * 6 + 12 + 2
    assert plan.peak_bytes == (2 * (2 + 2), 2 * (2 + 1))  # two micro-batches in flight on the first, one on the last
    assert solve_equal(EVEN.chain(), 2, 3, 1, batch_size=3, objective="paper").seconds == (3 + 2) * 6 - 4
    assert str(plan) == ("2 stages, 3 micro-batches: 26000.0 ms (simulated), at most 0.0 GiB a rank; [0-1]x1 [2-3]x1")


def test_replicas_reduce_gradients() -> None:
    """One stage on 2 devices: 2 micro-batches of 2 samples, t = 12, and 12 bytes of gradients that nothing hides."""
    plan = solve_equal(EVEN.chain(), 1, 2, 2, batch_size=4)
    assert (plan.seconds, plan.sync_seconds) == (12 + 12 + 12, 12)


def test_more_devices_than_a_word_has_bits() -> None:
    case = Case((0.0,) * 2, (3.0, 1.0), (3.0, 1.0), (0.0,), (0.0,) * 2, (0.0,) * 2, (0.0,) * 2, (1.0, 1.0), (0.0, 0.0))
    plan = solve_unequal(case.chain(), 2, 1, 80, batch_size=60 * 60, objective="paper")
    assert plan.replicas == (60, 20)


def test_refusals_for_memory_name_the_least() -> None:
    """States 2 a block, saved 1 a block and sample; 2 stages of 2 blocks, one sample on each of 4 devices."""
    chain, gib = EVEN.chain(), 2.0**30
    heavy = replace(chain, state_bytes=(2 * gib,) * 4, saved_bytes=(gib,) * 4)
    needs = r"the least that any needs is 6\.00 GiB \(2 stages, 1 micro-batches"
    with pytest.raises(CompileError, match=needs):
        solve_equal(heavy, 2, 1, 2, batch_size=2, memory_limit_bytes=5.9 * gib)
    with pytest.raises(CompileError, match=needs):
        solve_unequal(heavy, 2, 1, 4, batch_size=2, memory_limit_bytes=5.9 * gib)
    assert solve_unequal(heavy, 2, 1, 4, batch_size=2, memory_limit_bytes=6 * gib).replicas == (2, 2)


def test_links_by_number_of_replicas() -> None:
    chain = EVEN.chain()
    by_replicas = replace(chain, all_reduce={2: Link("pair", 6.0, 0.0), 4: Link("four", 0.5, 0.0)})
    assert solve_equal(by_replicas, 1, 1, 2, batch_size=2).sync_seconds == 2
    assert solve_equal(by_replicas, 1, 1, 4, batch_size=4).sync_seconds == 24
    with pytest.raises(CompileError, match=r"all_reduce has no link for 3 replicas, only for \[2, 4\]"):
        solve_equal(by_replicas, 1, 1, 3, batch_size=3)
    outer = replace(chain, all_reduce={1: Link("other pipelines", 6.0, 0.0)})
    assert solve_equal(outer, 1, 1, 1, batch_size=1).sync_seconds == 2


def test_times_from_a_table() -> None:
    chain = replace(EVEN.chain(), seconds=tabulated({1: ([1.0] * 4, [2.0] * 4)}))
    assert solve_equal(chain, 2, 3, 1, batch_size=3).seconds == 26
    with pytest.raises(CompileError, match=r"no seconds for a local batch of 2; the table has \[1\]"):
        solve_equal(chain, 2, 3, 1, batch_size=6)


def test_one_block_and_no_times() -> None:
    zeros = Case((0.0,), (0.0,), (0.0,), (), (0.0,), (0.0,), (0.0,), (1.0, 1.0), (0.0, 0.0))
    for objective in OBJECTIVES:
        (plan,) = all_plans(zeros.chain(), 1, 1, objective=objective)
        assert (plan.boundaries, plan.seconds) == ((0, 1), 0.0)
        assert solve_unequal(zeros.chain(), 1, 1, 3, batch_size=3, objective=objective).replicas == (3,)


def test_no_times_at_all_over_many_blocks() -> None:
    zeros = Case((0.0,) * 9, (0.0,) * 9, (0.0,) * 9, (0.0,) * 8, *([(0.0,) * 9] * 3), (1.0, 1.0), (0.0, 0.0))
    assert {plan.seconds for plan in all_plans(zeros.chain(), 8, 64)} == {0.0}
    assert solve_unequal(zeros.chain(), 4, 2, 7, batch_size=64).seconds == 0.0


REFUSED = {
    "more stages than blocks": (
        lambda chain: solve_equal(chain, 5, 1, 1, batch_size=1),
        "5 stages need a block each, and the chain has 4; use at most 4 stages",
    ),
    "more stages than devices": (
        lambda chain: solve_unequal(chain, 3, 1, 2, batch_size=4),
        "3 stages need a device each, and there are 2; use fewer stages",
    ),
    "more replicas than samples": (
        lambda chain: solve_equal(chain, 2, 2, 3, batch_size=4),
        "4 samples in 2 micro-batches are at most 2 each, too few for 3 replicas",
    ),
    "more micro-batches than samples": (
        lambda chain: solve_equal(chain, 2, 5, 1, batch_size=4),
        "use fewer micro-batches, more stages or a larger batch",
    ),
    "more devices than samples": (
        lambda chain: solve_unequal(chain, 2, 1, 9, batch_size=4),
        "at most 4 each, too few for 5 replicas",
    ),
    "no common divisor": (
        lambda chain: all_plans(chain, 6, 4, stages=[1]),
        r"no number of stages S \(of \[1\]\) and micro-batches M \(of all\) has S <= 4 blocks",
    ),
    "no devices": (lambda chain: all_plans(chain, 0, 4), "num_devices=0 and batch_size=4 must be positive"),
    "no micro-batches": (lambda chain: solve_equal(chain, 1, 0, 1, batch_size=1), "num_microbatches=0"),
    "no stages": (lambda chain: solve_unequal(chain, 0, 1, 1, batch_size=1), "num_stages=0 must be positive"),
    "unknown objective": (
        lambda chain: all_plans(chain, 1, 1, objective="fastest"),
        "unknown objective 'fastest'; choose one of simulated, paper, paper-clamped",
    ),
    "too little memory": (
        lambda chain: solve_equal(chain, 2, 1, 1, batch_size=1, memory_limit_bytes=1.0),
        r"the least that any needs is 0\.00 GiB \(2 stages, 1 micro-batches, 1 replicas\); allow more stages",
    ),
    "too little memory for any replicas": (
        lambda chain: solve_unequal(chain, 2, 1, 3, batch_size=4, memory_limit_bytes=1.0),
        r"no cut of 4 blocks on 3 devices fits 0\.00 GiB a rank: the least that any needs is 0\.00 GiB \(2 stages, 1",
    ),
    "too little memory for anything": (
        lambda chain: best_unequal(chain, 3, 4, stages=[2], microbatches=[1], memory_limit_bytes=1.0),
        r"no cut of 4 blocks on 3 devices fits 0\.00 GiB a rank",
    ),
    "no question": (lambda chain: best_unequal(chain, 3, 4, stages=[], microbatches=[1]), "no \\(S, M\\) is given"),
    "questions without an answer": (
        lambda chain: best_unequal(chain, 3, 4, stages=[5], microbatches=[1]),
        "5 stages need a block each",
    ),
    "no bandwidth": (
        lambda chain: replace(chain, p2p=Link("cut", 0.0, 0.0)),
        "link cut: bandwidth 0.0 bytes/s must be",
    ),
    "no blocks": (
        lambda chain: Chain(chain.seconds, (0.0,), (0.0,), (), (), (), chain.p2p, chain.p2p),
        "a chain needs at least one block",
    ),
    "a missing cut": (
        lambda chain: replace(chain, forward_bytes=(0.0,) * 4),
        "forward_bytes has 4 values for 4 blocks; give 5",
    ),
    "negative bytes": (
        lambda chain: replace(chain, state_bytes=(0.0, -1.0, 0.0, 0.0)),
        "state_bytes: -1.0 at 1 must be finite and not negative",
    ),
    "infinite times": (
        lambda chain: all_plans(replace(chain, seconds=lambda n: ([1.0] * 4, [float("inf")] * 4)), 1, 1),
        "backward seconds at 1 samples: inf at 0 must be finite",
    ),
    "times of other blocks": (
        lambda chain: all_plans(replace(chain, seconds=lambda n: ([1.0], [1.0])), 1, 1),
        "forward seconds of 1 blocks, but the chain has 4",
    ),
}


@pytest.mark.parametrize(("ask", "message"), REFUSED.values(), ids=REFUSED)
def test_absurd_questions_are_refused(ask: Callable[[Chain], object], message: str) -> None:
    with pytest.raises(CompileError, match=message):
        ask(EVEN.chain())
