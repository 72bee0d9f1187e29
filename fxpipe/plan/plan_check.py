"""Does a plan fit its step? People edit plans: what they say of stages, ranks and orders is checked as if from scratch.

    stage  1 on rank 2: blocks 5-8   <-- there are 2 ranks
    rank 1: 0F0 1F0 ...              <-- stage 0 is on rank 0

That an order is correct is checked beside schedules.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from fxpipe.errors import CompileError
from fxpipe.plan.plan import Plan
from fxpipe.plan.plan_lines import on_ranks
from fxpipe.plan.schedule import Schedule
from fxpipe.plan.staged import Staged


def require(plan: Plan, num_blocks: int, components: Sequence[str], first_pass: int = 0) -> None:
    """Raise CompileError with the faults `check` finds."""
    if faults := check(plan, num_blocks, components, first_pass):
        raise CompileError("\n".join([f"the plan does not fit its step: {faults[0]}", *faults[1:]]))


def check(plan: Plan, num_blocks: int, components: Sequence[str], first_pass: int = 0) -> list[str]:
    """The faults of a plan for a step of so many blocks and these frozen components; empty where it has none.

    The blocks of a `first_pass` are left out in some steps, so that no stage has others beside them.
    """
    faults = [*_numbers(plan), *_stages(plan, num_blocks, first_pass), *_frozen(plan, components)]
    if not faults:
        orders = [order for order in (plan.step, plan.steady) if order is not None]
        faults = [f for order in orders for f in (*_places(plan, order), *unlike_replicas(order, plan.staged))]
        faults += _moved(*orders)
    return faults


def _numbers(plan: Plan) -> Iterator[str]:
    if plan.staged.prefetch < 0:
        yield f"receives are posted {plan.staged.prefetch} actions ahead; 0 or more can be"
    for order in (plan.step, plan.steady):
        if order is None:
            continue
        for what, has, wants in (
            ("stages", order.num_stages, plan.staged.num_stages),
            ("micro-batches", order.num_microbatches, plan.num_microbatches),
            ("ranks", len(order.ranks), plan.staged.world_size),
        ):
            if has != wants:
                yield f"schedule {order.name} has {has} {what}, the plan {wants}; make them agree"


def _stages(plan: Plan, num_blocks: int, first_pass: int) -> Iterator[str]:
    staged = plan.staged
    first, last = staged.boundaries[0], staged.boundaries[-1]
    if (first, last) != (0, num_blocks):
        yield f"its stages hold blocks {first} to {last - 1}, the step has blocks 0 to {num_blocks - 1}"
    for stage, (start, stop) in enumerate(pairwise(staged.boundaries)):
        if start > stop:
            yield f"stage {stage} begins at block {start}, the next one at {stop}; stages hold runs of blocks in order"
    if first_pass and first_pass not in staged.boundaries:
        yield f"no stage begins at block {first_pass}, where the first pass ends, which some steps leave out; let one"
    for stage, ranks in enumerate(staged.stage_ranks):
        yield from _ranks(f"stage {stage}", ranks, staged.world_size)
    for start, stop in staged.recompute:
        if not any(a <= start < stop <= b for a, b in pairwise(staged.boundaries)):
            yield f"blocks {start}-{stop - 1} are to be recomputed, but are no run of blocks of one stage"


def unlike_replicas(order: Schedule, staged: Staged) -> Iterator[str]:
    """Where weights, or gradients of every micro-batch, are shared out: replicas that do not train the same in turn, as
    they gather or sum them together."""
    what = "weights are" if staged.gathered else "gradients of every micro-batch are"
    if order.is_scattered != staged.scattered:
        agreeing = replace(staged, sharded=True, scattered=order.is_scattered).shard
        yield (
            f"the plan shares out {staged.shard!r}, but schedule {order.name} sums gradients of a stage "
            f"{'several times' if order.is_scattered else 'once'}: share out {agreeing!r}, or {_otherwise(order)}"
        )
    if not (staged.gathered or staged.scattered):
        return
    if not staged.sharded:
        yield f"{what} shared out, optimizer states are not; share both out"
    once = f", where you {_otherwise(order)}" if order.is_scattered else ""
    if not staged.pipelines:
        counts = [*map(len, staged.stage_ranks)]
        yield f"{what} shared out, but stages have {counts} replicas; give all as many, or shard='optimizer'{once}"
        return
    for ranks in {tuple(sorted(ranks)) for ranks in staged.stage_ranks}:
        does = [" ".join(f"{a.stage}{a.kind}" for a in order.ranks[r] if a.kind != "T") for r in ranks]
        for rank, other in zip(ranks[1:], does[1:], strict=True):
            if other != does[0]:
                yield (
                    f"{what} shared out over ranks {', '.join(map(str, ranks))}, which do not train in one order: "
                    f"rank {ranks[0]} does {does[0]}, rank {rank} does {other}; make them agree, or "
                    f"shard='optimizer'{once}"
                )


def _otherwise(order: Schedule) -> str:
    """What makes an order sum gradients once, if it does so several times, or the other way round."""
    later = next((action for actions in order.ranks for action in actions if action.turn), None)
    if later is None:
        return "reduce after every gradient of a stage, counted as 0R0, 0R0:1, ..."
    first = replace(later, turn=0)
    return f"reduce once, after the last gradient of a stage: {first} in place of {first} and {later}"


def _frozen(plan: Plan, components: Sequence[str]) -> Iterator[str]:
    if plan.components != tuple(components):
        yield f"its frozen components are {list(plan.components)}, those of the step {list(components)}"
    elif plan.staged.frozen_ranks:
        for name, ranks in zip(components, plan.staged.frozen_ranks, strict=True):
            yield from _ranks(name, ranks, plan.staged.world_size)


def _ranks(what: str, ranks: Sequence[int], world_size: int) -> Iterator[str]:
    if not ranks or len(set(ranks)) < len(ranks):
        yield f"{what} is on ranks {list(ranks)}; name each of its ranks once"
    for rank in ranks:
        if not 0 <= rank < world_size:
            yield f"{what} is on rank {rank}, there are ranks 0 to {world_size - 1}"


def _moved(step: Schedule, steady: Schedule | None = None) -> Iterator[str]:
    """Stages that a steady step trains on other ranks: a run has both kinds of step, and who owns a stage's weights
    trains them in each."""
    both = () if steady is None else zip(step.stage_ranks, steady.stage_ranks, strict=True)
    for stage, (here, there) in enumerate(both):
        if {*here} != {*there}:
            one, other = on_ranks(sorted(here)), on_ranks(sorted(there))
            yield f"stage {stage} is {one}, in the steady schedule {other}; train it on the same ranks in both"


def _places(plan: Plan, order: Schedule) -> Iterator[str]:
    """Actions on ranks that do not hold what they run."""
    staged = plan.staged
    for rank, actions in enumerate(order.ranks):
        for action in actions:
            if action.kind == "T":
                known = action.stage < len(plan.components)
                if known and not staged.may_run(action.stage, rank):
                    held = ", ".join(map(str, staged.frozen_ranks[action.stage]))
                    yield f"{action} on rank {rank}: {plan.components[action.stage]} is on ranks {held}"
            elif action.kind != "R" and action.stage < staged.num_stages:
                replicas = staged.stage_ranks[action.stage]
                if rank not in replicas:
                    held = ", ".join(map(str, replicas))
                    yield f"{action} on rank {rank}: stage {action.stage} is on rank{'s' * (len(replicas) > 1)} {held}"
