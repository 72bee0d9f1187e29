"""A placement and a schedule as op lists: what every rank computes, sends, waits for and holds, with nothing traced.

    rank 0: 0F0 0F1 0B0 0B1         begin 0F0 | run +saved | send h | begin 0F1 | ...
    rank 1: 1F0 1B0 1F1 1B1    ->   begin 1F0 | wait h | run | begin 1B0 | run -saved | send grad | ...

The ops are those of the rank programs that are lowered from the same schedule: the same messages in the same order, the
same sums of gradients, memory taken and let go at the same places. `fxpipe.simulate` walks them.

units         what stages and components read and give       messages      what goes from rank to rank, in which order
rank_ops      one rank's ops and buffers as they grow        writer        the ops of one rank
seconds       what an action lasts                           step          what all ranks' writers read
ahead, pieces frozen work of the next batch                  closing       what follows the last action
whole_batch   inputs, draws, what is computed at once        copies        equal pipelines
exchange      receives, sums of gradients, the loss: of plans and programs
sharding      which replica trains a parameter, and when its sums go; turns when weights are gathered from those that
              do: of both, too
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from fxpipe.costs.block_values import Weight
from fxpipe.plan.schedule import Schedule
from fxpipe.plan.staged import Staged
from fxpipe.simulate.host_update import host_update
from fxpipe.simulate.op_lists import ADAMW_BYTES, Op, StepOps
from passes.case import Case
from passes.costs.call_bytes import UnitKey
from passes.step_ops.closing import Closing
from passes.step_ops.copies import copied, models
from passes.step_ops.messages import Routes
from passes.step_ops.seconds import ActionSeconds
from passes.step_ops.step import Step
from passes.step_ops.units import Units
from passes.step_ops.writer import OpWriter

__all__ = ["step_of", "step_ops"]


def step_ops(
    case: Case,
    staged: Staged,
    schedule: Schedule,
    sizes: Sequence[int],
    *,
    only: Collection[int] | None = None,
    optimizer_bytes: int = ADAMW_BYTES,
) -> StepOps:
    """One step of all ranks.

    Args:
        schedule: with frozen work of its micro-batches (`0T3`), of the next batch in pieces (`0T[0:4]x0:9`), or none:
            then what frozen work makes is there when the step begins.
        sizes: samples of every micro-batch.
        only: ranks of some of equal pipelines: the others, whose schedules are empty, have no ops, and what goes to
            them and comes from them at the end of the step is left out, but for sums over replicas.
        optimizer_bytes: of optimizer state per trained parameter.
    """
    step = step_of(case, staged, schedule, sizes)
    if only is not None:
        step = replace(step, only=frozenset(only))
    closing = Closing(step)
    ranks = list(_ranks(step, closing))
    of_units = {units: _weights(step, units) for units in set(step.units_of)}
    held: list[dict[str, int]] = [{} for _ in ranks]
    for rank in step.written:
        num_bytes, trained = of_units[step.units_of[rank]]
        num_bytes -= sum(closing.others_bytes(stage, rank) for kind, stage in step.units_of[rank] if kind == "F")
        own = [w for w in trained if closing.owners.get(w.name, rank) == rank]
        elements = sum(w.num_elements for w in own)
        held[rank] = {"state": num_bytes, "optimizer": 0 if staged.offloaded else elements * optimizer_bytes}
        if staged.offloaded:
            update = host_update(case.cluster.device, elements, sum(w.num_bytes for w in own))
            ranks[rank] = [*ranks[rank], update]
    return StepOps(ranks, held)


def step_of(case: Case, staged: Staged, schedule: Schedule, sizes: Sequence[int]) -> Step:
    """What the writers of all ranks read; arguments as for `step_ops`."""
    units = Units(case, staged)
    routes, seconds = Routes(units, schedule), ActionSeconds(case, staged)
    return Step(case, units, schedule, tuple(sizes), routes, seconds, case.calls.of(staged))


def _ranks(step: Step, closing: Closing) -> Iterator[list[Op]]:
    """The ops of every rank; none of those that are not written."""
    model_of, done = models(step, closing), dict[int, list[Op]]()
    for rank in range(len(step.schedule.ranks)):
        if rank in step.written:
            model = model_of.get(rank)
            found = copied(step, closing, done[model], model, rank) if model in done else None
            done[rank] = found or OpWriter(step, closing, rank).write()
        yield done.get(rank, [])


def _weights(step: Step, units: Collection[UnitKey]) -> tuple[int, list[Weight]]:
    """Bytes of the weights of what a rank runs, and those of them that are trained."""
    case, staged = step.case, step.units.staged
    blocks = {block for kind, stage in units if kind == "F" for block in staged.blocks(stage)}
    components = {component for kind, component in units if kind == "T"}
    of_blocks = case.costs.weights_of(blocks)
    of_components = [w for w in case.costs.weights if w.components and not components.isdisjoint(w.components)]
    held = {weight.name: weight.num_bytes for weight in (*of_blocks, *of_components)}
    return sum(held.values()), [weight for weight in of_blocks if weight.trained]
