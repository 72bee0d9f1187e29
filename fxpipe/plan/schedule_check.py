"""Is a schedule a correct order of all work? First that everything is there once, then a run of the abstract machine.

    rank 0: 0F0 0B0 <-- HERE waits for 1B0 (rank 1)
    rank 1: 1B0 <-- HERE waits for 1F0 (rank 1, after it) | then 1F0

The first missing action would stop the machine, so it runs only where the first check finds nothing.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from fxpipe.errors import ScheduleError
from fxpipe.plan.actions import KINDS, VOCABULARY, Action, Work
from fxpipe.plan.execution import execution_order
from fxpipe.plan.schedule import Schedule

_SHOWN = 20


def check(schedule: Schedule, work: Work, world_size: int, planned: Schedule | None = None) -> list[str]:
    """The faults of `schedule` as an order of `work` on `world_size` ranks; empty when it is correct.

    Of a smaller batch, `planned` is the order of the whole one: where gradients are summed in several turns, all its
    replicas take part, with or without samples.

    Every stage does per micro-batch one F and, on the same rank, where it has gradients, one B or an I (with a W where
    it owns parameters); every component one T on any rank. A stage with parameters on several ranks ends on each with
    an R, and has others before it where gradients are summed in several turns. The ranks, run together, come to their
    end.
    """
    if len(schedule.ranks) != world_size:
        return [f"the schedule has {len(schedule.ranks)} ranks, the program {world_size}; give one line per rank"]
    if schedule.num_microbatches != work.num_microbatches:
        return [f"the schedule has {schedule.num_microbatches} micro-batches, the program {work.num_microbatches}"]
    faults = [
        *_foreign(schedule, work),
        *_scattered(schedule),
        *_unreduced(schedule, work, planned if planned is not None and planned.is_scattered else None),
        *_miscounted(schedule, work),
        *_unshared(schedule, work),
    ]
    return faults or _stuck(schedule, work)


def require(schedule: Schedule, work: Work, world_size: int, planned: Schedule | None = None) -> None:
    """Raise ScheduleError with the faults `check` finds."""
    faults = check(schedule, work, world_size, planned)
    if faults:
        more = [f"... and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else []
        raise ScheduleError("\n".join([f"schedule {schedule.name} is not correct:", *faults[:_SHOWN], *more]))


def _foreign(schedule: Schedule, work: Work) -> Iterator[str]:
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            if reason := _why_foreign(action, work):
                yield f"{action} on rank {rank}: {reason}"


def _why_foreign(action: Action, work: Work) -> str:
    """Why `work` has no such action, or an empty string; easy cases first."""
    stage, kind = action.stage, action.kind
    noun, count = ("component", work.num_components) if kind == "T" else ("stage", work.num_stages)
    if kind not in KINDS:
        return f"unknown kind {kind!r}; {VOCABULARY}"
    if action.is_piece:
        return _why_no_piece(action, work)
    if not 0 <= stage < count:
        return f"there is no {noun} {stage}, only {count}"
    if kind == "R":
        return "" if stage in work.weight_grad else f"stage {stage} owns no trainable parameter; remove the action"
    if not 0 <= action.microbatch < work.num_microbatches:
        return f"there is no micro-batch {action.microbatch}, only {work.num_microbatches}"
    if kind == "T":
        return ""
    if stage in work.empty:
        return f"stage {stage} is empty and has no work"
    if kind in "BIW" and stage not in work.backward:
        return f"stage {stage} has no gradient work; remove the action"
    if kind in "IW" and stage not in work.input_grad:
        return f"stage {stage} sends no gradient to another stage, so its backward isn't split; use B"
    if kind == "W" and stage not in work.weight_grad:
        return f"stage {stage} owns no trainable parameter; remove the action"
    return ""


def _why_no_piece(piece: Action, work: Work) -> str:
    """Why the next batch has no such frozen work, or an empty string."""
    if not work.ahead_layers:
        return "this form of the step does no frozen work of the next batch; remove the action"
    if piece.stage >= len(work.ahead_layers):
        return f"there is no component {piece.stage}, only {len(work.ahead_layers)}"
    if piece.layers[1] > work.ahead_layers[piece.stage]:
        return f"component {piece.stage} has {work.ahead_layers[piece.stage]} layers"
    return "" if piece.samples[1] <= work.ahead_samples else f"the batch has {work.ahead_samples} samples"


def _unshared(schedule: Schedule, work: Work) -> Iterator[str]:
    """Every layer of the next batch's frozen work is done once for every sample."""
    pieces = [action for actions in schedule.ranks for action in actions if action.is_piece]
    for component, layers in enumerate(work.ahead_layers):
        done = np.zeros((layers, work.ahead_samples), dtype=int)
        for piece in (piece for piece in pieces if piece.stage == component):
            done[slice(*piece.layers), slice(*piece.samples)] += 1
        for layer, sample in np.argwhere(done != 1)[:1]:
            times = "not done" if done[layer, sample] == 0 else f"done {done[layer, sample]} times"
            yield f"layer {layer} of component {component} is {times} for sample {sample} of the next batch; do it once"


def _scattered(schedule: Schedule) -> Iterator[str]:
    """A backward reads what its forward saved."""
    owners: dict[tuple[int, int], set[int]] = {}
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            if action.kind not in "TR":
                owners.setdefault((action.stage, action.microbatch), set()).add(rank)
    for (stage, microbatch), ranks in sorted(owners.items()):
        if len(ranks) > 1:
            yield (
                f"micro-batch {microbatch} of stage {stage} is on ranks {sorted(ranks)}; keep its forward and backward "
                "together, the saved activations are there"
            )


def _unreduced(schedule: Schedule, work: Work, planned: Schedule | None) -> Iterator[str]:
    """Replicas end with an R each, after their last gradient, and in one order where they share several stages; others
    before it sum those that have come since the one before."""
    stage_ranks = (planned or schedule).stage_ranks
    for stage, ranks in enumerate(stage_ranks):
        replicated = len(ranks) > 1 and stage in work.weight_grad
        for rank, actions in enumerate(schedule.ranks):
            places = [i for i, a in enumerate(actions) if a.kind == "R" and a.stage == stage]
            if places and not (replicated and rank in ranks):
                here = f"{actions[places[0]]} on rank {rank}"
                yield f"{here}: there is no replica of stage {stage} to reduce with; remove the action"
            elif wrong := [actions[i] for i in places if actions[i].microbatch != rank]:
                right = replace(wrong[0], microbatch=rank)
                yield f"{wrong[0]} on rank {rank}: the number after R is the rank; write {right}"
            elif replicated and rank in ranks:
                last = max((i for i, a in enumerate(actions) if a.kind in "BW" and a.stage == stage), default=-1)
                if not places:
                    yield (
                        f"{stage}R{rank} is missing: stage {stage} has replicas on ranks {sorted(ranks)}, whose "
                        f"gradients are summed by {stage}R{rank} after the last backward on rank {rank}"
                    )
                elif places[-1] < last:
                    yield f"{actions[places[-1]]} comes before {actions[last]}; reduce after the last gradient"
                else:
                    yield from _miscounted_turns(stage, actions, planned is not None)
    yield from _crossed(schedule, stage_ranks)


def _miscounted_turns(stage: int, actions: Sequence[Action], may_idle: bool) -> Iterator[str]:
    """Reductions of a stage on a rank are numbered as they come; each has gradients to sum, unless it `may_idle`."""
    turn, last = 0, ""
    for action in (action for action in actions if action.stage == stage and action.kind in "BWR"):
        if action.kind == "R":
            wanted = replace(action, turn=turn)
            if action != wanted:
                yield f"{action} is reduction {turn} of stage {stage} on its rank, counted from 0; write {wanted}"
                return
            if last in ("", "R") and not may_idle:
                yield f"{action} has nothing to sum: no gradient of stage {stage} has come since; remove the action"
                return
            turn += 1
        last = action.kind


def _crossed(schedule: Schedule, stage_ranks: Sequence[tuple[int, ...]]) -> Iterator[str]:
    """Reductions of the same ranks are started in one order, since backends match them by order."""
    groups: dict[tuple[int, ...], dict[tuple[int, ...], int]] = {}
    for rank, actions in enumerate(schedule.ranks):
        mine = [a.stage for a in actions if a.kind == "R" and 0 <= a.stage < schedule.num_stages]
        for ranks in {stage_ranks[stage] for stage in mine}:
            order = tuple(stage for stage in mine if stage_ranks[stage] == ranks)
            groups.setdefault(ranks, {}).setdefault(order, rank)
    for ranks, orders in groups.items():
        if len(orders) > 1:
            (one, first), (other, second), *_ = orders.items()
            yield (
                f"ranks {sorted(ranks)} reduce the stages {list(one)} (rank {first}) and {list(other)} (rank {second}) "
                "in different orders; use one order"
            )


def _miscounted(schedule: Schedule, work: Work) -> Iterator[str]:
    counts = Counter(action for actions in schedule.ranks for action in actions)
    for action, count in sorted(counts.items()):
        if count > 1:
            yield f"{action} is there {count} times; do it once"
    for microbatch in range(work.num_microbatches):
        for component in range(work.num_components):
            if not counts[Action(component, "T", microbatch)]:
                yield f"{component}T{microbatch} is missing"
        for stage in work.stages:
            yield from _missing(stage, microbatch, {k for k in KINDS if counts[Action(stage, k, microbatch)]}, work)


def _missing(stage: int, microbatch: int, kinds: set[str], work: Work) -> Iterator[str]:
    """Faults of one stage and micro-batch that does `kinds`, of which those foreign to the stage are told elsewhere."""
    if "F" not in kinds:
        yield f"{stage}F{microbatch} is missing"
    if "B" in kinds and kinds & {"I", "W"}:
        yield f"stage {stage} does both a full and a split backward of micro-batch {microbatch}; use B, or I and W"
    elif stage in work.backward and not kinds & {"B", "I"}:
        yield f"{stage}B{microbatch} is missing"
    elif "I" in kinds and "W" not in kinds and stage in work.weight_grad:
        yield f"{stage}W{microbatch} is missing: {stage}I{microbatch} leaves the weight gradient undone"


def _stuck(schedule: Schedule, work: Work) -> list[str]:
    done = {action for _, action in execution_order(schedule, work)}
    if all(set(actions) <= done for actions in schedule.ranks):
        return []
    place = {action: rank for rank, actions in enumerate(schedule.ranks) for action in actions}
    lines = [_stuck_rank(rank, schedule, work, done, place) for rank in range(len(schedule.ranks))]
    return ["\n".join(["the ranks wait for each other:", *lines])]


def _stuck_rank(rank: int, schedule: Schedule, work: Work, done: set[Action], place: dict[Action, int]) -> str:
    actions = schedule.ranks[rank]
    position = sum(action in done for action in actions)
    words = [f"rank {rank}:", *map(str, actions[: position + 1])]
    if position == len(actions):
        return " ".join([*words, "(ends)"])
    waits = [need for need in work.needs_among(place.keys())(actions[position]) if need not in done]
    words += ["<-- HERE waits for", ", ".join(f"{need} ({_whereabouts(need, rank, place)})" for need in waits)]
    rest = actions[position + 1 :]
    return " ".join([*words, "| then", *map(str, rest)] if rest else words)


def _whereabouts(action: Action, rank: int, place: dict[Action, int]) -> str:
    if action not in place:
        return "on no rank"
    return f"rank {place[action]}, after it" if place[action] == rank else f"rank {place[action]}"
