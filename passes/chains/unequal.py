"""Cut a chain into stages with any numbers of replicas that sum to the number of devices.

    8 devices, 3 stages     x x x | x | x x x x        a heavy middle block gets one device of its own, not 8 / 3

Method: the paper's objectives are two maxima over stages. One is minimised under a limit on the other by bisection over
its finitely many values, with a test of feasibility on bit masks (`moves`), and the limits are searched (`boxes`):
exact. Moves that leave too few devices for the rest of the work are dropped: no plan with period W has a stage on r
devices whose rest of the work exceeds (D - r) W.

"simulated" is searched with one change: the backward of earlier stages, which hides an all-reduce, is that of D / S
replicas each, since true numbers depend on the path. Plans are compared by their true value, with equal replicas among
them where S divides D. So it is not exact: of 1,600 random small instances 99.8 % were solved to the optimum, the worst
within 2.4 %; `tests/test_chains.py` holds it to that.
"""

from collections.abc import Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from fxpipe.errors import CompileError
from passes.chains.boxes import TIE, Boxes, search
from passes.chains.chain import Chain, ChainPlan, Objective, check_objective, check_stages
from passes.chains.choices import Choices, Question, least_peak_bytes
from passes.chains.costs import CostTable, evaluate
from passes.chains.equal import plan_equal
from passes.chains.moves import Moves
from passes.chains.terms import Layout

Floats = NDArray[np.float64]


def solve_unequal(
    chain: Chain,
    num_stages: int,
    num_microbatches: int,
    num_devices: int,
    *,
    batch_size: int,
    objective: Objective = "simulated",
    memory_limit_bytes: float | None = None,
) -> ChainPlan:
    """The best boundaries and replicas of `num_stages` stages on exactly `num_devices` devices.

    Raises:
        CompileError: fewer blocks or devices than stages, fewer samples than replicas, or nothing fits into memory.
    """
    check_objective(objective)
    check_stages(chain, num_stages)
    question = Question(num_stages, num_microbatches, num_devices, batch_size, objective, memory_limit_bytes)
    found = _solve(CostTable(chain), question, np.inf)
    if found is None:
        raise _memory_error(chain, [question])
    return found


def best_unequal(
    chain: Chain,
    num_devices: int,
    batch_size: int,
    *,
    stages: Sequence[int],
    microbatches: Sequence[int],
    objective: Objective = "simulated",
    memory_limit_bytes: float | None = None,
) -> ChainPlan:
    """The best plan over all given (S, M), equal replicas among them; most are pruned by bounds.

    Raises:
        CompileError: as `solve_unequal`, where that holds for all (S, M).
    """
    check_objective(objective)
    table, best, questions, refusal = CostTable(chain), None, [], None
    for s, m in product(sorted(stages), sorted(microbatches, reverse=True)):
        try:
            check_stages(chain, s)
            questions.append(Question(s, m, num_devices, batch_size, objective, memory_limit_bytes))
        except CompileError as error:
            refusal = error
    for question in questions:
        if best is None or question.lower_bound(table) < best.seconds:
            found = _solve(table, question, best.seconds if best else np.inf)
            best = min((p for p in (best, found) if p), key=lambda plan: plan.seconds, default=None)
    if best is None:
        raise _memory_error(chain, questions) if questions else refusal or CompileError("no (S, M) is given")
    return best


def _memory_error(chain: Chain, questions: Sequence[Question]) -> CompileError:
    """Says how much memory the most modest plan of all questions needs."""
    table, limit = CostTable(chain), questions[0].memory_limit_bytes
    assert limit is not None, "without a limit every question has a plan"
    least, best = min(((least_peak_bytes(table, q), q) for q in questions), key=lambda pair: pair[0])
    return CompileError(
        f"no cut of {chain.num_blocks} blocks on {best.num_devices} devices fits {limit / 2**30:.2f} GiB a rank: the "
        f"least that any needs is {least / 2**30:.2f} GiB ({best.num_stages} stages, {best.num_microbatches} "
        "micro-batches); allow more stages or micro-batches, a smaller batch, or raise the limit"
    )


def _solve(table: CostTable, question: Question, cutoff: float) -> ChainPlan | None:
    """The best plan, or None where none fits into memory or beats `cutoff`."""
    choices = Choices.of(question.costs(table), question)
    if question.objective != "simulated":
        path = _paper_path(choices, cutoff)
        return None if path is None else _plan(table, question, path)
    plans = [_plan(table, question, path) for path in _simulated_paths(choices)]
    layout = Layout(question.num_stages, question.num_microbatches, question.num_devices // question.num_stages)
    if question.num_devices % question.num_stages == 0:
        equal = plan_equal(table, layout, question.batch_size, question.objective, question.memory_limit_bytes)
        plans += [equal] if equal else []
    return min(plans, key=lambda plan: plan.seconds, default=None)


def _plan(table: CostTable, question: Question, path: Moves) -> ChainPlan:
    boundaries = (0, *path.stop.tolist())
    return evaluate(
        table, boundaries, path.replicas.tolist(), question.num_microbatches, question.batch_size, question.objective
    )


def _paper_path(choices: Choices, cutoff: float) -> Moves | None:
    """The stages with the least weighted period plus late all-reduce, in order; None where none beats `cutoff`."""

    def evaluate_boxes(boxes: Boxes, ceiling: Floats) -> tuple[Floats, Floats]:
        main, late = np.full(len(ceiling), np.inf), np.full((len(ceiling), 1), np.inf)
        for n, (limit, most) in enumerate(zip(boxes.limit[:, 0], ceiling, strict=True)):
            some = choices.take((choices.late <= limit) & (choices.period <= most))
            main[n] = some.moves.least_maximum(some.period)
            some = some.take(some.period <= main[n])
            late[n] = some.moves.least_maximum(some.late)
        return main, late

    lower = np.array([[choices.moves.covering(choices.late)]])
    best, late = search(evaluate_boxes, np.array([choices.moves.covering(choices.period)]), lower, cutoff)
    if not np.isfinite(best[0]):
        return None
    period = best[0] - late[0, 0]
    room = TIE * (abs(best[0]) + abs(late[0, 0]))
    some = choices.take((choices.late <= late[0, 0]) & (choices.period <= period + room))
    return some.moves.take(some.moves.least_sum(some.added)[1])


def _simulated_paths(choices: Choices) -> list[Moves]:
    """All stages that the search finds least for some limits, with the hidden part of all-reduces estimated."""
    paths: list[Moves] = []

    def evaluate_boxes(boxes: Boxes, ceiling: Floats) -> tuple[Floats, Floats]:
        main, criteria = np.full(len(ceiling), np.inf), np.full((len(ceiling), 2), np.inf)
        for n, limit in enumerate(boxes.limit):
            some = choices.take(
                (choices.period <= limit[0]) & (choices.late <= limit[1]) & (choices.added <= ceiling[n])
            )
            main[n], path = some.moves.least_sum(some.added)
            if len(path):
                criteria[n] = some.period[path].max(), some.late[path].max()
                paths.append(some.moves.take(path))
        return main, criteria

    period = choices.moves.least_maximum(choices.period)
    if np.isfinite(period):
        search(
            evaluate_boxes, np.array([choices.least_added]), np.array([[period, choices.moves.covering(choices.late)]])
        )
    return paths
