"""What follows the last action: sums of gradients over replicas and tied weights, and the loss, told to every rank.

Replicas of a stage reduce the gradients that no other stage has; those of
tied weights go to the first rank that has one, are added there, and go back to all that hold the weight.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fxpipe.simulate.collectives import Collective
from passes.step_ops.exchange import TiedGradient, closing_sends
from passes.step_ops.messages import PlannedMessage
from passes.step_ops.step import Step


@dataclass(frozen=True, eq=False)
class Closing:
    """All messages and collectives after the last action; every rank takes its own in this order."""

    step: Step

    @cached_property
    def reductions(self) -> dict[int, Collective]:
        """By stage, where it has replicas: the gradients of the weights that no other stage has."""
        found: dict[int, Collective] = {}
        for stage, ranks in enumerate(self.step.schedule.stage_ranks):
            size = sum(self.step.own_gradients(stage)) if len(ranks) > 1 else 0
            if size:
                edge = len(self.step.messages) + len(self.messages) + len(found)
                found[stage] = Collective(edge, "reduce", tuple(sorted(ranks)), size)
        return found

    @cached_property
    def tied(self) -> list[TiedGradient]:
        """By weight, in the order of their names."""
        found, ranks_of = [], self.step.schedule.stage_ranks
        for weight, stages in sorted(self.step.tied, key=lambda tied: tied[0].name):
            ranks = tuple(sorted({rank for stage in stages for rank in ranks_of[stage]}))
            if len(ranks) > 1:
                found.append(TiedGradient(weight.name, weight.num_bytes, ranks, ranks))
        return found

    @cached_property
    def messages(self) -> Sequence[PlannedMessage]:
        """Rank by rank as they are sent."""
        first_edge, num_ranks = len(self.step.messages), len(self.step.schedule.ranks)
        loss = TiedGradient("loss", self.step.case.costs.loss_bytes, (), ())
        sends = closing_sends(self.tied, self.step.loss_ranks, num_ranks)
        ordered = sorted(((src, dst, of or loss) for src, dst, of in sends), key=lambda send: send[0])
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
