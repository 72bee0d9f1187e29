"""What follows the last action: sums of gradients over replicas and tied weights, and the loss, told to every rank.

Replicas of a stage reduce the gradients that no other stage has, to all of them, or each to the one that trains it,
whose weights then begin the next step, or are gathered in turns; those of tied weights go to the first rank that has
one, and their sum to all that hold the weight.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from operator import itemgetter

from fxpipe.simulate.collectives import Collective
from passes.step_ops.exchange import TiedGradient, closing_sends
from passes.step_ops.messages import PlannedMessage
from passes.step_ops.sharding import owners, sums_in_turn
from passes.step_ops.step import Step
from passes.step_ops.turns import Turn, turns


@dataclass(frozen=True, eq=False)
class Closing:
    """All messages and collectives after the last action; every rank takes its own in this order."""

    step: Step

    @cached_property
    def _own(self) -> dict[int, dict[str, int]]:
        """By stage, where it has replicas: bytes of the trained weights that no other stage has, by name."""
        ranks_of = enumerate(self.step.stage_ranks)
        found = {stage: self.step.own_gradients(stage) for stage, ranks in ranks_of if len(ranks) > 1}
        return {stage: sizes for stage, sizes in found.items() if sum(sizes.values())}

    @cached_property
    def reductions(self) -> dict[tuple[int, int], Collective]:
        """By stage, where it has replicas, and turn: the gradients of the weights that no other stage has."""
        firsts = self._collectives("reduce_scatter" if self.owners else "reduce", 0)
        found = {(stage, 0): reduction for stage, reduction in firsts.items()}
        edges = count(len(self.step.messages) + len(self.messages) + 2 * len(self._own) + len(self.turns))
        for action in (action for actions in self.step.schedule.ranks for action in actions if action.turn):
            key = action.stage, action.turn
            if action.stage in firsts and key not in found:
                found[key] = replace(firsts[action.stage], edge=next(edges))
        return found

    @cached_property
    def broadcasts(self) -> dict[int, Collective]:
        """By stage, where each of these weights is trained by one replica: their values, to all."""
        gathered = self.step.units.staged.gathered
        return self._collectives("all_gather", len(self._own)) if self.owners and not gathered else {}

    def _collectives(self, kind: str, start: int) -> dict[int, Collective]:
        first_edge, ranks_of = len(self.step.messages) + len(self.messages) + start, self.step.stage_ranks
        return {
            stage: Collective(edge, kind, tuple(sorted(ranks_of[stage])), sum(sizes.values()))
            for edge, (stage, sizes) in enumerate(self._own.items(), first_edge)
        }

    @cached_property
    def refreshing(self) -> Mapping[int, Sequence[int]]:
        """By stage: those whose broadcasts bring weights that it has."""
        found: dict[int, dict[int, None]] = {}
        for weight in self.step.case.costs.weights if self.broadcasts else ():
            stages = self.step.stages_of(weight)
            for stage in stages:
                mine = (other for other in stages if weight.name in self._own.get(other, ()))
                found.setdefault(stage, {}).update(dict.fromkeys(mine))
        return {stage: [*others] for stage, others in found.items()}

    @cached_property
    def turns(self) -> list[tuple[Turn, Collective]]:
        """When each stage's weights are gathered, where replicas share them out."""
        first_edge = len(self.step.messages) + len(self.messages) + 2 * len(self._own)
        found = enumerate(turns(self.step.schedule, self._shared_out.keys()), first_edge)
        sizes = {stage: sum(size for _, size in weights) for stage, weights in self._shared_out.items()}
        return [(turn, Collective(edge, "all_gather", turn.ranks, sizes[turn.stage])) for edge, turn in found]

    @cached_property
    def _shared_out(self) -> dict[int, list[tuple[int, int]]]:
        """By stage: of every weight that its replicas share out, who holds it, and its bytes."""
        if not self.step.units.staged.gathered:
            return {}
        ranks_of = self.step.stage_ranks
        frozen = {stage: self.step.own_frozen(stage) for stage, ranks in enumerate(ranks_of) if len(ranks) > 1}
        holders = self.owners | owners(frozen, ranks_of)
        weights = {stage: {**self._own.get(stage, {}), **of_stage} for stage, of_stage in frozen.items()}
        return {stage: [(holders[name], size) for name, size in of.items()] for stage, of in weights.items() if of}

    def others_bytes(self, stage: int, rank: int) -> int:
        """Of the weights of a stage, those that a rank gathers from others."""
        return sum(size for holder, size in self._shared_out.get(stage, ()) if holder != rank)

    @cached_property
    def owners(self) -> dict[str, int]:
        """The rank that trains a weight, where it is one of several replicas."""
        return owners(self._own, self.step.stage_ranks) if self.step.units.staged.sharded else {}

    @cached_property
    def sums_in_turn(self) -> bool:
        """Whether a stage's sums, each on one replica, are waited for before those of the next stage start."""
        return bool(self.owners) and sums_in_turn(self.step.schedule)

    def scattered(self, stage: int, rank: int) -> tuple[int, int]:
        """Bytes of the sums that a rank has of a stage's gradients, and of what is moved for them."""
        reduction = self.reductions[stage, 0]
        own = self._owned.get((stage, rank), 0)
        return own, scattered_bytes(reduction.num_bytes, own, len(reduction.ranks))

    @cached_property
    def _owned(self) -> Mapping[tuple[int, int], int]:
        """By stage and rank: bytes of its weights that the rank trains."""
        found = Counter[tuple[int, int]]()
        for stage, sizes in self._own.items():
            for name, size in sizes.items():
                found[stage, self.owners[name]] += size
        return found

    @cached_property
    def reduced(self) -> Mapping[int, int]:
        """The stage of every reduction, by edge."""
        return {reduction.edge: stage for (stage, _), reduction in self.reductions.items()}

    @cached_property
    def tied(self) -> list[TiedGradient]:
        """By weight, in the order of their names."""
        found, ranks_of = [], self.step.schedule.stage_ranks
        for weight, stages in sorted(self.step.tied, key=lambda tied: tied[0].name):
            holders = {rank for stage in stages for rank in ranks_of[stage]}
            givers = {rank for stage in self.step.giving(weight) for rank in ranks_of[stage]}
            if len(holders) > 1 and givers:  # a stage may read it under no_grad alone
                found.append(TiedGradient(weight.name, weight.num_bytes, tuple(sorted(givers)), tuple(sorted(holders))))
        return found

    @cached_property
    def messages(self) -> Sequence[PlannedMessage]:
        """Rank by rank as they are sent."""
        first_edge, num_ranks = len(self.step.messages), len(self.step.schedule.ranks)
        loss = TiedGradient("loss", self.step.case.costs.loss_bytes, (), ())
        sends, written = closing_sends(self.tied, self.step.loss_ranks, num_ranks), self.step.written
        ordered = sorted(
            ((src, dst, of or loss) for src, dst, of in sends if src in written and dst in written), key=itemgetter(0)
        )
        return [
            PlannedMessage(edge, src, dst, of.num_bytes, "loss" if of is loss else "gradient", of.name)
            for edge, (src, dst, of) in enumerate(ordered, first_edge)
        ]

    @cached_property
    def of_rank(self) -> list[list[PlannedMessage]]:
        """The messages that a rank sends or receives."""
        found: list[list[PlannedMessage]] = [[] for _ in self.step.schedule.ranks]
        for message in self.messages:
            found[message.src].append(message)
            found[message.dst].append(message)
        return found


def scattered_bytes(num_bytes: int, own_bytes: int, num_ranks: int) -> int:
    """What a rank copies to sum gradients of which some are its own: those of others, and what all others send it."""
    return num_bytes - own_bytes + (num_ranks - 1) * own_bytes
