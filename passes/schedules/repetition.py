"""Precedences that repeat one micro-batch's block with a period, for the list scheduler.

rank 0   F0 F0' F3 I3 F0" ...    forwards and backwards in the order of the repeated blocks
         W wherever the rank is idle, or right before the forward that needs its memory
"""

from collections.abc import Callable, Mapping
from graphlib import TopologicalSorter

from fxpipe.schedule import Action
from passes.schedules.building_block import Block, Operation, shortest_block

_MOST_HOPS = 2  # shares of a period between stages: less than half of one would not hold 1F1B's micro-batches


def keep_blocks(
    needs: dict[Action, set[Action]], rank_of: Mapping[Action, int], ticks: Callable[[Action], int], copies: int
) -> None:
    """Add to `needs` the order of all actions but frozen ones and W as their block is repeated.

    A forward waits for the weight gradients before it in that order, so that a rank holds no more than the blocks do.

    Args:
        copies: micro-batches after which the ranks of the stages repeat; a block has so many.
    """
    pattern = [a for a in _one_after_the_other(needs) if a.microbatch < copies]
    if not pattern:
        return
    block = _block(pattern, needs, rank_of, ticks, copies)
    first = dict(zip(pattern, block.starts, strict=True))

    def start(action: Action) -> int:
        rounds, copy = divmod(action.microbatch, copies)
        return first[Action(action.stage, action.kind, copy)] + rounds * block.period

    ranks: dict[int, list[Action]] = {}
    for action in sorted((a for a in needs if a.kind != "T"), key=lambda a: (start(a), a)):
        ranks.setdefault(rank_of[action], []).append(action)
    for actions in ranks.values():
        _keep_order(needs, actions)


def _keep_order(needs: dict[Action, set[Action]], actions: list[Action]) -> None:
    previous: Action | None = None
    weights: list[Action] = []
    for action in actions:
        if action.kind == "W":
            weights.append(action)
            continue
        if previous is not None:
            needs[action].add(previous)
        if action.kind == "F":
            needs[action].update(weights)
            weights.clear()
        previous = action


def _one_after_the_other(needs: Mapping[Action, set[Action]]) -> list[Action]:
    """Micro-batch after micro-batch, weight gradients last, each action after what it needs."""
    own = {
        action: sorted(n for n in before if n.kind != "T" and n.microbatch == action.microbatch)
        for action, before in needs.items()
        if action.kind != "T"
    }
    order = TopologicalSorter(dict(sorted(own.items()))).static_order()
    return sorted(order, key=lambda action: (action.microbatch, action.kind == "W"))


def _block(
    pattern: list[Action],
    needs: Mapping[Action, set[Action]],
    rank_of: Mapping[Action, int],
    ticks: Callable[[Action], int],
    copies: int,
) -> Block:
    index = {action: i for i, action in enumerate(pattern)}
    stages: dict[int, set[int]] = {}
    load: dict[int, int] = {}
    for action in pattern:
        stages.setdefault(rank_of[action], set()).add(action.stage)
        load[rank_of[action]] = load.get(rank_of[action], 0) + ticks(action)
    hops = max(_MOST_HOPS, *map(len, stages.values()))

    def operations(period: int) -> list[Operation]:
        apart = period // copies
        found = []
        for action in pattern:
            before = [n for n in needs[action] if n in index and n.microbatch == action.microbatch]
            hop = {n: apart // hops if n.stage != action.stage else 0 for n in before}
            gaps = [(index[n], max(ticks(n), hop[n])) for n in before]
            if action.microbatch:
                gaps.append((index[Action(action.stage, action.kind, action.microbatch - 1)], apart))
            found.append(Operation(rank_of[action], ticks(action), tuple(gaps)))
        return found

    return shortest_block(operations, max(load.values()))
