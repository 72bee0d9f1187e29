"""When a stage's weights are whole, where each of them is held by one of its replicas alone.

    rank 0: 0F0 | 1F0 1B0 | 0B0        turns: stage 0, stage 1, stage 0; gathered while the action before runs, and let
    rank 1: 0F1 | 1F1 1B1 | 0B1        go after the last one that reads them

Replicas do the same in turn, so that they gather together. After Rajbhandari et al., "ZeRO", SC 2020 (stage 3), and
Zhao et al., "PyTorch FSDP", VLDB 2023 (prefetch).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from fxpipe.plan.actions import Action
from fxpipe.plan.schedule import Schedule

READERS = "FBIW"
"""The actions that read a stage's weights."""


@dataclass(frozen=True)
class Turn:
    """A run of actions of one stage, on every rank of its replicas; it is gathered before `starts`, by rank."""

    stage: int
    ranks: tuple[int, ...]
    number: int
    starts: Mapping[int, Action]
    actions: Mapping[int, tuple[Action, ...]]


def turns(schedule: Schedule, stages: Collection[int]) -> list[Turn]:
    """Those of the stages whose weights are shared out, group by group of ranks in the order in which they come."""
    found = []
    for ranks in dict.fromkeys(tuple(sorted(schedule.stage_ranks[stage])) for stage in sorted(stages)):
        runs = {rank: _runs(schedule.ranks[rank]) for rank in ranks}
        of_first = [run[0].stage for run, _ in runs[ranks[0]]]
        for number, stage in enumerate(of_first):
            if stage in stages:
                of_rank = {rank: runs[rank][number] for rank in ranks}
                starts = {rank: start for rank, (_, start) in of_rank.items()}
                found.append(Turn(stage, ranks, number, starts, {rank: run for rank, (run, _) in of_rank.items()}))
    return found


def _runs(actions: Sequence[Action]) -> list[tuple[tuple[Action, ...], Action]]:
    """Actions that read weights, by runs of one stage, each with the action before which it is gathered."""
    found, start = [], actions[0]
    for _, of_stage in groupby((a for a in actions if a.kind in READERS), key=lambda action: action.stage):
        run = tuple(of_stage)
        found.append((run, start))
        start = run[-1]
    return found


@dataclass(frozen=True)
class RankTurns:
    """One rank's: what it starts to gather before an action and waits for there, None at the end of the step, and what
    its actions read."""

    started: Mapping[Action | None, Sequence[Turn]]
    awaited: Mapping[Action | None, Sequence[Turn]]
    of: Mapping[Action, Turn]

    def idle_before(self, action: Action | None, turn: Turn) -> Iterator[Turn]:
        """Those that are awaited before an action though nothing here reads them, and before this turn is started: two
        are on their way at most."""
        read = None if action is None else self.of.get(action)
        return (one for one in self.awaited.get(action, ()) if one.number < turn.number - 1 and one is not read)

    @staticmethod
    def within(all_turns: Iterable[Turn], rank: int, whole: Sequence[Action], actions: Sequence[Action]) -> "RankTurns":
        """Of a rank that does these of the `whole` actions that turns are made of; what belongs before one that it
        leaves out comes before the next."""
        mine = [turn for turn in all_turns if rank in turn.ranks]
        places, there = {action: place for place, action in enumerate(whole)}, {*actions}
        following: list[Action | None] = [None]
        for action in reversed(whole):
            following.append(action if action in there else following[-1])
        next_at = following[::-1]
        started: dict[Action | None, list[Turn]] = {}
        awaited: dict[Action | None, list[Turn]] = {}
        for turn in mine:
            started.setdefault(next_at[places[turn.starts[rank]]], []).append(turn)
            awaited.setdefault(next_at[places[turn.actions[rank][0]]], []).append(turn)
        return RankTurns(started, awaited, {action: turn for turn in mine for action in turn.actions[rank]})
