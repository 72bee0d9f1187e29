"""An order of all sends of a step in which each can happen, so that one rank's program can be checked alone.

    rank 0: 0F0 (1) 0F1 (2) 0B0 (5)        moments of the actions, and of what is sent right after them
    rank 1: 1F0 (3) 1B0 (4) ...            0B0 waits for the gradient sent at 4, and nothing is sent at 4 or before that
                                           waits for 0B0; parameters of replicas are sent before all, at 0
    what is gathered for an action is sent between the one before and the one after it, on every rank; where a rank has
    waited there for an earlier turn that nothing on it reads, after that turn has come

Where every rank sends what belongs to a moment only after waits for earlier moments, no rank can wait forever: of all
that is never sent, the earliest has a sender that waits for something earlier still.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from fxpipe.errors import ScheduleError
from fxpipe.plan.actions import Action, Work
from fxpipe.plan.execution import execution_order
from fxpipe.plan.rank_program import Message, Reduction
from fxpipe.plan.schedule import Schedule
from passes.lowering.layout import Exchanged, UnitLayout, closing
from passes.step_ops.sharding import sums_in_turn
from passes.step_ops.turns import RankTurns

SendMoments = Mapping[tuple[int, int], int]
"""When a rank sends a message or starts a reduction, by (edge, rank)."""


def moments(
    schedule: Schedule, work: Work, layout: UnitLayout, messages: Sequence[Message], exchanged: Exchanged
) -> SendMoments:
    """When every message is sent, and every rank starts a reduction or to gather parameters.

    Raises:
        ScheduleError: the ranks wait for each other; `schedule_check` says where.
    """
    reductions, gatherings, turns = exchanged.reductions, exchanged.gatherings, exchanged.turns
    starts = _starts(schedule, turns)
    together = _one_by_one(schedule, [r for r in reductions if r.owners]) if sums_in_turn(layout.summing) else {}
    for of_rank in turns.values():
        for action, awaited in of_rank.awaited.items():
            if action is not None:
                lasts = [last for turn in awaited for last, _ in starts[turn.ranks, turn.number].values()]
                together.setdefault(action, set()).update(last for last in lasts if last is not None)
    order = execution_order(schedule, work, together)
    between = 2 + len(gatherings)
    of_action = {action: between * place for place, (_, action) in enumerate(order, start=1)}
    if len(of_action) < sum(map(len, schedule.ranks)):
        raise ScheduleError(f"schedule {schedule.name} stops after {len(of_action)} actions; schedule_check says why")
    found = {(m.edge, m.src): of_action[m.action] for m in messages if m.action is not None}
    for reduction in reductions:
        for rank in reduction.ranks:
            found[reduction.edge, rank] = of_action[_start(reduction, rank)]
            if reduction.values_edge >= 0:
                found[reduction.values_edge, rank] = 0
    arrived: dict[tuple[tuple[int, ...], int], int] = {}  # turns, when they are there: a rank's are in order
    for gathering in gatherings:
        turn = gathering.ranks, gathering.turn
        for rank, (action, idle) in starts[turn].items():
            waited = (arrived[gathering.ranks, number] for number in idle)
            found[gathering.edge, rank] = max([0 if action is None else of_action[action], *waited]) + 1
        arrived[turn] = max(found[gathering.edge, rank] for rank in gathering.ranks)
    last = {(m.src, m.dst, m.value, m.kind): m.edge for m in messages if m.action is None}
    closes = closing(layout, exchanged.tied) if last else ()
    for moment, (src, dst, value, kind) in enumerate(closes, start=between * (1 + len(of_action))):
        found[last[src, dst, value, kind], src] = moment
    return found


def _one_by_one(schedule: Schedule, reductions: Sequence[Reduction]) -> dict[Action, set[Action]]:
    """Reductions that wait for those before them: on every rank, since these end together."""
    found: dict[Action, set[Action]] = {}
    starts = {(r.stage, r.turn): {_start(r, rank) for rank in r.ranks} for r in reductions}
    for actions in schedule.ranks:
        reduced = [action for action in actions if action.kind == "R" and (action.stage, action.turn) in starts]
        found |= {action: starts[before.stage, before.turn] for before, action in pairwise(reduced)}
    return found


def _start(reduction: Reduction, rank: int) -> Action:
    """What starts it on a rank."""
    return Action(reduction.stage, "R", rank, turn=reduction.turn)


def _starts(
    schedule: Schedule, turns: Mapping[int, RankTurns]
) -> dict[tuple[tuple[int, ...], int], dict[int, tuple[Action | None, list[int]]]]:
    """By a turn's ranks and number: the last action of each rank before it starts to gather, if there is one, and the
    turns that it waits for between the two."""
    found: dict[tuple[tuple[int, ...], int], dict[int, tuple[Action | None, list[int]]]] = {}
    for rank, of_rank in turns.items():
        actions: list[Action | None] = [None, *schedule.ranks[rank]]
        before = dict(zip([*actions[1:], None], actions, strict=True))
        for action, started in of_rank.started.items():
            for turn in started:
                idle = [one.number for one in of_rank.idle_before(action, turn)]
                found.setdefault((turn.ranks, turn.number), {})[rank] = before[action], idle
    return found


def by_arrival(moments: SendMoments) -> list[int]:
    """The edges in an order in which all can be sent; a reduction comes when its last rank starts it."""
    latest: dict[int, int] = {}
    for (edge, _), moment in moments.items():
        latest[edge] = max(moment, latest.get(edge, moment))
    return sorted(latest, key=lambda edge: (latest[edge], edge))
