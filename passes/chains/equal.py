"""Cut a chain into stages with equally many replicas, exactly, for all numbers of stages and micro-batches at once.

    64 devices     S = 1 2 4 8 ..  times  M = 1 2 4 ..      each (S, M) its best boundaries, r = 64 / S

With equal replicas every data-parallel copy of a pipeline is a replica: 8 copies of 8 stages are 8 stages of 8.

All micro-batches of one S are solved together: the time is that of a few dozen passes over tables of cuts.
"""

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from fxpipe.errors import CompileError
from passes.chains.chain import Chain, ChainPlan, Objective, check_objective, check_stages
from passes.chains.costs import CostTable, evaluate
from passes.chains.terms import Layout, chain_problems, objective_terms, solve_problems


def solve_equal(
    chain: Chain,
    num_stages: int,
    num_microbatches: int,
    replicas: int,
    *,
    batch_size: int,
    objective: Objective = "simulated",
    memory_limit_bytes: float | None = None,
) -> ChainPlan:
    """The best boundaries of `num_stages` stages with `replicas` devices each, of `batch_size` samples in a step.

    Raises:
        CompileError: fewer blocks than stages, fewer samples than replicas, or nothing fits into memory.
    """
    check_objective(objective)
    check_stages(chain, num_stages)
    table, layouts = CostTable(chain), [Layout(num_stages, num_microbatches, replicas)]
    found = plan_equal(table, layouts[0], batch_size, objective, memory_limit_bytes)
    if found is None:
        raise memory_error(table, layouts, batch_size, memory_limit_bytes)
    return found


def all_plans(
    chain: Chain,
    num_devices: int,
    batch_size: int,
    *,
    objective: Objective = "simulated",
    memory_limit_bytes: float | None = None,
    stages: Sequence[int] | None = None,
    microbatches: Sequence[int] | None = None,
) -> tuple[ChainPlan, ...]:
    """The best plan of every (S, M), the fastest first; those that do not fit into memory are left out.

    S divides `num_devices`, and S * batch is a multiple of M * devices: all local batches are equal. `stages` and
    `microbatches` restrict the two.

    Raises:
        CompileError: there is no (S, M) at all, or nothing fits into memory.
    """
    check_objective(objective)
    layouts = layouts_of(chain, num_devices, batch_size, stages, microbatches)
    table = CostTable(chain)
    plans = [p for p in _solve(table, layouts, batch_size, objective, memory_limit_bytes) if p is not None]
    if not plans:
        raise memory_error(table, layouts, batch_size, memory_limit_bytes)
    return tuple(sorted(plans, key=lambda plan: plan.seconds))


def layouts_of(
    chain: Chain, num_devices: int, batch_size: int, stages: Sequence[int] | None, microbatches: Sequence[int] | None
) -> list[Layout]:
    if num_devices < 1 or batch_size < 1:
        raise CompileError(f"num_devices={num_devices} and batch_size={batch_size} must be positive")
    found = []
    for s in stages or range(1, min(num_devices, chain.num_blocks) + 1):
        if s > chain.num_blocks or num_devices % s or batch_size % (num_devices // s):
            continue
        samples = batch_size // (num_devices // s)
        found += [
            Layout(s, m, num_devices // s) for m in microbatches or range(1, samples + 1) if m and samples % m == 0
        ]
    if not found:
        raise CompileError(
            f"no number of stages S (of {stages or 'all'}) and micro-batches M (of {microbatches or 'all'}) has S <= "
            f"{chain.num_blocks} blocks, S dividing {num_devices} devices, and M * {num_devices} / S dividing "
            f"{batch_size} samples; change the batch size or the devices"
        )
    return found


def _solve(
    table: CostTable, layouts: Sequence[Layout], batch_size: int, objective: Objective, limit: float | None
) -> list[ChainPlan | None]:
    """The best plan of every layout, None where none fits."""
    found: dict[Layout, ChainPlan] = {}
    for num_stages, group in groupby(layouts, key=lambda layout: layout.num_stages):
        some = list(group)
        costs = [table.of(batch_size, x.num_microbatches, x.replicas) for x in some]
        terms = [objective_terms(c, x, objective) for c, x in zip(costs, some, strict=True)]
        for x, cuts in zip(some, solve_problems(chain_problems(terms, some, costs, limit)), strict=True):
            if cuts is not None:
                replicas = [x.replicas] * num_stages
                found[x] = evaluate(table, cuts, replicas, x.num_microbatches, batch_size, objective)
    return [found.get(layout) for layout in layouts]


def plan_equal(
    table: CostTable, layout: Layout, batch_size: int, objective: Objective, limit: float | None
) -> ChainPlan | None:
    """The best plan of one layout, None where none fits."""
    return _solve(table, [layout], batch_size, objective, limit)[0]


def memory_error(table: CostTable, layouts: Sequence[Layout], batch_size: int, limit: float | None) -> CompileError:
    """Says how much memory the most modest cut of all layouts needs."""
    assert limit is not None, "without a limit every layout has a plan"
    needs = [(least_peak_bytes(table, layout, batch_size), layout) for layout in layouts]
    least, layout = min(needs, key=lambda pair: pair[0])
    return CompileError(
        f"no cut of {table.chain.num_blocks} blocks fits {limit / 2**30:.2f} GiB a rank: the least that any needs is "
        f"{least / 2**30:.2f} GiB ({layout.num_stages} stages, {layout.num_microbatches} micro-batches, "
        f"{layout.replicas} replicas); allow more stages or micro-batches, a smaller batch, or raise the limit"
    )


def least_peak_bytes(table: CostTable, layout: Layout, batch_size: int) -> float:
    """Bytes of the fullest rank under the cut where that is least."""
    costs = table.of(batch_size, layout.num_microbatches, layout.replicas)
    position = np.arange(len(costs.state))
    start, stop = position[:, None], position[None, :]
    least = np.where(position == position[-1], 0.0, np.inf)
    for k in range(1, layout.num_stages + 1):
        peak = np.where(start < stop, costs.peak_bytes(start, stop, min(k, layout.num_microbatches)), np.inf)
        least = np.maximum(peak, least[None, :]).min(axis=1)
    return float(least[0])
