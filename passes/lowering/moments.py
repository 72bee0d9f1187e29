"""An order of all sends of a step in which each can happen, so that one rank's program can be checked alone.

    rank 0: 0F0 (1) 0F1 (2) 0B0 (5)        moments of the actions, and of what is sent right after them
    rank 1: 1F0 (3) 1B0 (4) ...            0B0 waits for the gradient sent at 4, and nothing is sent at 4 or before that
                                           waits for 0B0; parameters of replicas are sent before all, at 0

Where every rank sends what belongs to a moment only after waits for earlier moments, no rank can wait forever: of all
that is never sent, the earliest has a sender that waits for something earlier still.
"""

from collections.abc import Sequence

from fxpipe.errors import ScheduleError
from fxpipe.plan.actions import Action, Work
from fxpipe.plan.execution import execution_order
from fxpipe.plan.program_check import Moments
from fxpipe.plan.rank_program import Message, Reduction
from fxpipe.plan.schedule import Schedule
from passes.lowering.layout import Layout, closing
from passes.step_ops.exchange import TiedGradient


def moments(
    schedule: Schedule,
    work: Work,
    layout: Layout,
    messages: Sequence[Message],
    reductions: Sequence[Reduction],
    tied: Sequence[TiedGradient],
) -> Moments:
    """When every message is sent, and every rank starts a reduction.

    Raises:
        ScheduleError: the ranks wait for each other; `schedule_check` says where.
    """
    of_action = {action: moment for moment, (_, action) in enumerate(execution_order(schedule, work), start=1)}
    if len(of_action) < sum(map(len, schedule.ranks)):
        raise ScheduleError(f"schedule {schedule.name} stops after {len(of_action)} actions; schedule_check says why")
    found = {(m.edge, m.src): of_action[m.action] for m in messages if m.action is not None}
    for reduction in reductions:
        for rank in reduction.ranks:
            found[reduction.edge, rank] = of_action[Action(reduction.stage, "R", rank)]
            if reduction.owners:
                found[reduction.values_edge, rank] = 0
    last = {(m.src, m.dst, m.value, m.kind): m.edge for m in messages if m.action is None}
    closes = closing(layout, tied) if last else ()
    for moment, (src, dst, value, kind) in enumerate(closes, start=1 + len(of_action)):
        found[last[src, dst, value, kind], src] = moment
    return found


def by_arrival(moments: Moments) -> list[int]:
    """The edges in an order in which all can be sent; a reduction comes when its last rank starts it."""
    latest: dict[int, int] = {}
    for (edge, _), moment in moments.items():
        latest[edge] = max(moment, latest.get(edge, moment))
    return sorted(latest, key=lambda edge: (latest[edge], edge))
