"""A pipeline's schedule as op lists.

    rank 0: 0F0 0F1 0B0 0B1         begin 0F0 | run | send | begin 0F1 | ...
    rank 1: 1F0 1B0 1F1 1B1    ->   begin 1F0 | wait | run | begin 1B0 | run | send | ...

Actions begin with the waits for what they read, and end with the sends of what they make; reductions over replicas are
waited for at the end, as in rank programs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fxpipe.rank_program import Message
from fxpipe.schedule import Action, Schedule
from fxpipe.simulation.collectives import Collective
from fxpipe.staged import Staged
from passes.fill import among
from passes.rehearsal.case import Case
from passes.rehearsal.flows import Flows, Point
from passes.rehearsal.op_writer import OpWriter
from passes.rehearsal.pieces import Piece


def pipeline_ops(
    case: Case,
    staged: Staged,
    schedule: Schedule,
    sizes: Sequence[int],
    *,
    relayed: bool = False,
    pieces: Sequence[Sequence[Piece]] = (),
) -> OpWriter:
    """One step.

    Args:
        sizes: samples of every micro-batch.
        relayed: whether what a later stage reads is handed on from stage to stage; else it is sent there.
        pieces: per rank, frozen work beside the schedule's actions.
    """
    flows = Flows(case, staged, schedule, sizes, relayed, pieces)
    return _Writer(case, staged, schedule, sizes, flows).write()


@dataclass
class _Writer:
    case: Case
    staged: Staged
    schedule: Schedule
    sizes: Sequence[int]
    flows: Flows
    ops: OpWriter = field(init=False)

    def write(self) -> OpWriter:
        self.ops = OpWriter(self.case.world_size)
        for rank, actions in enumerate(self.schedule.ranks):
            pieces = self.flows.pieces[rank] if self.flows.pieces else ()
            added: set[int] = set()
            for place, item in among(actions, pieces):
                self.ops.begin(rank, str(item))
                point = rank, "piece" if isinstance(item, Piece) else "action", place
                self._wait(point)
                if isinstance(item, Action) and item.kind == "R":
                    self._issue(rank, item.stage)
                else:
                    self.ops.run(rank, self._seconds(item))
                if point in self.flows.summing_seconds:
                    self.ops.run(rank, self.flows.summing_seconds[point])
                if isinstance(item, Action) and item.kind in "BW":
                    self._add_gradients(rank, item.stage, added)
                for message in self._sends.get(point, ()):
                    self.ops.send(message)
            self._finish(rank)
        return self.ops

    def _wait(self, point: Point) -> None:
        for message in self._waits.get(point, ()):
            self.ops.wait(message)

    def _seconds(self, item: Action | Piece) -> float:
        if isinstance(item, Piece):
            return item.seconds(self.case)
        times = self.case.costs.at(self.sizes[item.microbatch])
        if item.kind == "T":
            return times.component_seconds[item.stage]
        of_block = {
            "F": times.forward_seconds,
            "B": times.backward_seconds,
            "I": times.input_gradient_seconds,
            "W": times.weight_gradient_seconds,
        }
        blocks = self.staged.blocks(item.stage)
        again = item.kind in "BI" and item.stage in self.staged.recompute
        return sum(of_block[item.kind][b] + again * times.forward_seconds[b] for b in blocks)

    def _add_gradients(self, rank: int, stage: int, added: set[int]) -> None:
        """From a stage's second micro-batch on, its gradients are added to those that are there."""
        if stage in added:
            size = sum(self.case.costs.trained_bytes[b] for b in self.staged.blocks(stage))
            self.ops.run(rank, self.case.adding_seconds(size))
        added.add(stage)

    # -- messages

    @cached_property
    def _messages(self) -> list[tuple[Point, Point, Message]]:
        """In the order in which every rank sends, and of one point in the order of use."""
        found = []
        for (source, target, kind), num_bytes in sorted(self.flows.num_bytes.items(), key=lambda flow: flow[0][:2]):
            found.append((source, target, self.ops.message(source[0], target[0], num_bytes, "values", kind)))
        return found

    @cached_property
    def _sends(self) -> dict[Point, list[Message]]:
        found: dict[Point, list[Message]] = {}
        for source, _, message in self._messages:
            found.setdefault(source, []).append(message)
        return found

    @cached_property
    def _waits(self) -> dict[Point, list[Message]]:
        found: dict[Point, list[Message]] = {}
        for _, target, message in self._messages:
            found.setdefault(target, []).append(message)
        return found

    # -- gradients of replicas and of tied weights

    def _issue(self, rank: int, stage: int) -> None:
        if stage in self._reductions:
            self.ops.issue(rank, self._reductions[stage])

    @cached_property
    def _reductions(self) -> dict[int, Collective]:
        """By stage, where it has replicas: the gradients of the weights that no other stage has."""
        found = {}
        for stage, ranks in enumerate(self.staged.stage_ranks):
            tied = {name for name, blocks in self.case.costs.shared.items() if len(self._stages(blocks)) > 1}
            weights = self.case.costs.weights_of(self.staged.blocks(stage))
            size = sum(w.num_bytes for w in weights if w.trained and w.name not in tied)
            if len(ranks) > 1 and size:
                found[stage] = self.ops.collective("reduce", ranks, size)
        return found

    @cached_property
    def _tied(self) -> list[Collective]:
        """Sums of what several stages' ranks have gradients for, a collective for each set of ranks."""
        size_of: dict[tuple[int, ...], int] = {}
        for weight in self.case.costs.weights:
            stages = self._stages(weight.blocks) if weight.trained else set()
            ranks = tuple(sorted({rank for stage in stages for rank in self.staged.stage_ranks[stage]}))
            if len(stages) > 1 and len(ranks) > 1:
                size_of[ranks] = size_of.get(ranks, 0) + weight.num_bytes
        return [self.ops.collective("reduce", ranks, size) for ranks, size in sorted(size_of.items())]

    def _stages(self, blocks: Sequence[int]) -> set[int]:
        return {self.staged.stage_of_block[block] for block in blocks}

    def _finish(self, rank: int) -> None:
        self.ops.end(rank)
        self._wait((rank, "end", 0))
        for reduction in self._of_rank(self._tied, rank):
            self.ops.issue(rank, reduction)
        for reduction in self._of_rank([*self._reductions.values(), *self._tied], rank):
            self.ops.wait_for(rank, reduction)

    def _of_rank(self, collectives: Sequence[Collective], rank: int) -> Iterator[Collective]:
        return (collective for collective in collectives if rank in collective.ranks)
