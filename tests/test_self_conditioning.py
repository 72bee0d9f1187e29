"""Partitions for self-conditioning against brute force over all cuts, in code that shares nothing with the pass."""

from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe.errors import CompileError
from passes.chains import all_plans
from passes.chains.self_conditioning import (
    SelfConditionedPlan,
    SelfConditioning,
    all_self_conditioned,
    solve_self_conditioned,
)
from tests.chain_cases import LIMITS, OBJECTIVES, Case, all_cuts, cases


def judge(
    case: Case, cuts: tuple[int, ...], r: int, m: int, batch_size: int, given: SelfConditioning, objective: str
) -> tuple[float, float, float]:
    """Expected seconds, seconds with feedback, and the most bytes of a rank, from the definitions."""
    stages, n = [range(a, b) for a, b in pairwise(cuts)], batch_size // (m * r)
    forward, backward = case.seconds(n)
    plain, extra, late, needs = [], [], [], []  # (compute, transfer) with and without feedback, ...
    before = 0.0
    for s, blocks in enumerate(stages):
        f, b = sum(forward[x] for x in blocks), sum(backward[x] for x in blocks)
        sent = case.cuts[blocks[-1]] * n / case.bandwidths[0] if s < len(stages) - 1 else 0.0
        latency = case.latencies[0] if s < len(stages) - 1 else 0.0
        plain.append((f + b, sent * (1 + case.backward_cuts) + 2 * latency))
        extra.append((2 * f + b, sent * (2 + case.backward_cuts) + 3 * latency))
        sync = sum(case.gradients[x] for x in blocks) / case.bandwidths[1] + case.latencies[1] if r > 1 else 0.0
        late.append(sync - (before if objective == "simulated" else b))
        before += b
        held = min(m, len(stages) - s)
        needs.append(sum(case.state[x] + case.saved[x] * n * held for x in blocks))
    last = max(late) if objective == "paper" else max(0.0, *late)
    feedback = case.latencies[0] + given.feedback_bytes * n / case.bandwidths[0] if len(stages) > 1 else 0.0
    seconds = []
    for pairs, more in ((extra, feedback), (plain, 0.0)):
        slowest = max(max(pair) for pair in pairs)
        if objective == "simulated":
            seconds.append((m - 1) * slowest + sum(map(sum, pairs)) + last + more)
        else:
            seconds.append((m + 2 * len(stages) - 2) * slowest + last + more)
    p = given.probability
    return p * seconds[0] + (1 - p) * seconds[1], seconds[0], max(needs)


CONDITIONING = st.builds(SelfConditioning, st.sampled_from([0.0, 0.3, 0.5, 1.0]), st.integers(0, 6).map(float))


@given(cases(), st.sampled_from([(4, 8), (6, 12)]), CONDITIONING, st.sampled_from(OBJECTIVES), LIMITS)
@settings(max_examples=300)
def test_every_plan_is_best_of_all(
    case: Case, sizes: tuple[int, int], given: SelfConditioning, objective: str, limit: float | None
) -> None:
    """Every (S, M) of one call, some ten each."""
    num_devices, batch_size = sizes
    best: dict[tuple[int, int], float] = {}
    for s, m in product(range(1, case.size + 1), range(1, batch_size + 1)):
        if num_devices % s == 0 and batch_size % (m * num_devices // s) == 0:
            for cuts in all_cuts(case.size, s):
                seconds, _, need = judge(case, cuts, num_devices // s, m, batch_size, given, objective)
                if limit is None or need <= limit:
                    best[s, m] = min(seconds, best.get((s, m), float("inf")))
    options = {"objective": objective, "memory_limit_bytes": limit}
    if not best:
        with pytest.raises(CompileError, match="GiB a rank: the least that any needs is"):
            all_self_conditioned(case.chain(), num_devices, batch_size, given, **options)
        return
    found = all_self_conditioned(case.chain(), num_devices, batch_size, given, **options)
    assert {(x.plan.num_stages, x.plan.num_microbatches) for x in found} == set(best)
    assert [x.expected_seconds for x in found] == sorted(x.expected_seconds for x in found)
    for one in found:
        plan = one.plan
        arguments = plan.boundaries, plan.replicas[0], plan.num_microbatches, batch_size, given, objective
        expected, conditioned, need = judge(case, *arguments)
        assert limit is None or need <= limit
        assert one.expected_seconds == pytest.approx(expected, rel=1e-9, abs=1e-9)
        assert one.conditioned_seconds == pytest.approx(conditioned, rel=1e-9, abs=1e-9)
        assert expected == pytest.approx(best[plan.num_stages, plan.num_microbatches], rel=1e-9, abs=1e-9)


@given(cases(), st.sampled_from(OBJECTIVES))
@settings(max_examples=50)
def test_a_step_that_never_feeds_back_is_the_plain_one(case: Case, objective: str) -> None:
    plain = all_plans(case.chain(), 4, 8, objective=objective)
    found = all_self_conditioned(case.chain(), 4, 8, SelfConditioning(0.0, 3.0), objective=objective)
    assert [x.expected_seconds for x in found] == pytest.approx([plan.seconds for plan in plain])


def heavy_forward(probability: float) -> SelfConditionedPlan:
    """The first block is all forward, the others all backward: the cut depends on how often the forward runs twice."""
    case = Case(
        (0.0,) * 4, (6.0, 0.0, 0.0, 0.0), (0.0, 4.0, 4.0, 4.0), (0.0,) * 3, (0.0,) * 4, (0.0,) * 4, (0.0,) * 4,
        (1.0, 1.0), (0.0, 0.0),
    )  # fmt: skip
    conditioning = SelfConditioning(probability, 0.0)
    return solve_self_conditioned(case.chain(), 2, 64, 1, conditioning, batch_size=64)


def test_the_cut_moves_with_the_probability() -> None:
    assert heavy_forward(0.0).plan.boundaries == (0, 2, 4)
    assert heavy_forward(1.0).plan.boundaries == (0, 1, 4)
    assert "with feedback" in str(heavy_forward(1.0))


def test_memory_is_refused_with_numbers() -> None:
    case = Case((1.0,), (1.0,), (1.0,), (), (1.0,), (0.0,), (2.0**31,), (1.0, 1.0), (0.0, 0.0))
    with pytest.raises(CompileError, match=r"fits 1\.00 GiB a rank: the least that any needs is 2\.00 GiB"):
        solve_self_conditioned(
            case.chain(), 1, 1, 1, SelfConditioning(0.5, 1.0), batch_size=1, memory_limit_bytes=2.0**30
        )


@pytest.mark.parametrize(("probability", "feedback_bytes"), [(-0.1, 1.0), (1.1, 1.0), (0.5, -1.0), (0.5, float("nan"))])
def test_absurd_conditioning_is_refused(probability: float, feedback_bytes: float) -> None:
    with pytest.raises(CompileError, match=r"probability of self-conditioning|feedback_bytes"):
        SelfConditioning(probability, feedback_bytes)
