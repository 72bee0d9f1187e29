"""The ops of one rank, action by action; the dictionaries hold what exists at this point of it.

0F1    receives that 0F1 and the actions after it wait for are posted | waits | slices of inputs | run | sends
0B1    the same | sums of the gradients that come in | run | weight gradients added | sums | sends
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fxpipe.plan.actions import Action
from fxpipe.plan.timeline import END
from fxpipe.simulate.collectives import Collective
from fxpipe.simulate.op_lists import Op
from passes.costs.call_bytes import ForwardBytes
from passes.step_ops.closing import Closing
from passes.step_ops.exchange import MessageWriter, Use
from passes.step_ops.messages import PlannedMessage
from passes.step_ops.pieces import Pieces
from passes.step_ops.rank_ops import RankOps
from passes.step_ops.step import Step
from passes.step_ops.turns import RankTurns
from passes.step_ops.whole_batch import WholeBatchBuffers


class Saved(NamedTuple):
    """What a forward has kept for its backward: memory of its own, of values that live elsewhere too."""

    buffer: int | None
    shared: dict[str, int]


class Reducing(NamedTuple):
    """A sum over replicas that is under way: this rank's part of it, and what is moved for it."""

    collective: Collective
    sums: int
    moved: int | None


class OpWriter(MessageWriter[PlannedMessage, int]):
    """Writes one rank."""

    def __init__(self, step: Step, closing: Closing, rank: int) -> None:
        of_closing = closing.of_rank[rank]
        incoming = [*step.incoming[rank], *(message for message in of_closing if message.dst == rank)]
        super().__init__(rank, incoming, of_closing)
        self.step, self.closing = step, closing
        self.ops = RankOps()
        self.saved: dict[Action, Saved] = {}
        self.totals: dict[int, int] = {}  # weight gradients so far, by stage, of weights no other stage has
        self.tied: dict[str, dict[int, int]] = {}  # of those that several have, by weight and stage
        self.again: dict[int, list[int]] = {}  # by stage: more of these, to be added
        self.stages: dict[int, None] = {}  # those with gradients, in the order in which they come
        self.reducing: dict[int, Reducing] = {}  # by stage: a sum over its replicas, until it is there
        self.sums: dict[int, int] = {}  # by stage: those that are there, added up
        self.refreshing: dict[int, int] = {}  # by stage: weights on their way from the replicas that train them
        actions = step.schedule.ranks[rank]
        self.turns = RankTurns.within([turn for turn, _ in closing.turns], rank, actions, actions)
        self.gathers = {turn.number: of for turn, of in closing.turns if rank in turn.ranks}
        self.gathered: dict[int, tuple[int, int]] = {}  # by turn: weights of others, and a copy of one's own for them
        self._backwards: list[tuple[int, int, int, str, dict[str, int]]] = []  # place, stage, samples, part, kept

    def write(self) -> list[Op]:
        """All ops."""
        actions = self.step.schedule.ranks[self.rank]
        training = [action for action in actions if not action.is_piece]
        prefetch = self.step.units.staged.prefetch
        position = posted = 0
        self._given()
        for place, action in enumerate(actions):
            self.ops.begin(str(action))
            if not place:
                self._refresh()
            self._gather(action)
            if action.is_piece:
                self._await(action)
                self.pieces.run(action, self.receive)
            else:
                position += 1
                for following in training[posted : position + prefetch]:
                    self.post_all(following)
                posted = position + prefetch
                self._await(action)
                self._act(action)
            for message in self.step.sends[self.rank][place]:
                self._send(message)
        self.ops.begin(END)
        self._gather(None)
        self._await(None)
        self._close()
        self._see_backwards()
        return self.ops.ops()

    # -- what is there from the start

    def _given(self) -> None:
        """Inputs, and what frozen work has made in the step before."""
        self.ops.no_op()
        self.batch = WholeBatchBuffers(self.step, self.ops, self._reads())
        self.pieces = Pieces(
            self.step, self.rank, self.ops, WholeBatchBuffers(self.step, self.ops, self._reads_ahead())
        )
        for name, microbatch in self.step.ahead.kept[self.rank]:
            size = self.step.units.edges[name].num_bytes(self.step.sizes[microbatch])
            self.values[name, microbatch] = self.ops.make("carried", size)

    def _reads(self) -> set[str]:
        units = {(action.kind, action.stage) for action in self.step.schedule.ranks[self.rank] if action.kind in "FT"}
        within = {("T", a.stage) for a in self.step.schedule.ranks[self.rank] if a.kind == "T" and not a.is_piece}
        return {name for unit in units if unit[0] == "F" or unit in within for name in self.step.sources[unit]}

    def _reads_ahead(self) -> set[str]:
        pieces = [action for action in self.step.schedule.ranks[self.rank] if action.is_piece]
        layers = {(piece.stage, layer) for piece in pieces for layer in range(*piece.layers)}
        return {name for layer in layers for name in self.step.given_of_layer(*layer)}

    # -- messages

    def start_receive(self, message: PlannedMessage) -> int:
        return self.ops.post(message)

    def wait(self, message: PlannedMessage, posted: int) -> int:
        self.ops.wait(message, posted)
        return posted

    def send(self, message: PlannedMessage, value: int) -> None:
        self.ops.send(message, value)

    def uses(self, action: Action) -> Iterable[Use]:
        if action.kind in "RW":
            return ()
        unit = self.step.units.table["T" if action.kind == "T" else "F", action.stage]
        backward = action.kind in "BI"
        return [(name, action.microbatch, backward) for name in (unit.readers if backward else unit.makers)]

    def _send(self, message: PlannedMessage) -> None:
        if message.samples is not None:
            buffer = self.pieces.part(message.value, message.samples, self.receive)
        elif message.kind == "gradient":
            buffer = self.summed(message.value, message.microbatch)
        else:
            buffer = self.values[message.value, message.microbatch]
        self.ops.send(message, buffer)

    # -- actions

    def _act(self, action: Action) -> None:
        if action.kind in "FT":
            self._forward(action)
        elif action.kind in "BI":
            self._backward(action)
        elif action.kind == "W" and action.stage in self.step.split:
            self._weight(action)
        elif action.kind == "R" and (action.stage, action.turn) in self.closing.reductions:
            self._issue(action.stage, self.closing.reductions[action.stage, action.turn])

    def fetch(self, name: str, microbatch: int) -> int:
        return self.batch.samples(name, *self.step.samples[microbatch])

    def _refresh(self) -> None:
        """Start to bring the weights of this rank's stages from the replicas that train them, first stages first."""
        for stage, broadcast in self.closing.broadcasts.items():
            if self.rank in broadcast.ranks:
                self.ops.issue(broadcast)
                self.refreshing[stage] = self.ops.make("transfers", broadcast.num_bytes)

    def _gather(self, action: Action | None) -> None:
        """Start to bring the weights here that are awaited soon."""
        for turn in self.turns.started.get(action, ()):
            gather, others = self.gathers[turn.number], self.closing.others_bytes(turn.stage, self.rank)
            self.ops.issue(gather)
            copy = gather.num_bytes - others
            self.gathered[turn.number] = self.ops.make("gathered weights", others), self.ops.make("transfers", copy)

    def _await(self, action: Action | None) -> None:
        for turn in self.turns.awaited.get(action, ()):
            self.ops.wait_for(self.gathers[turn.number])
            for buffer in self.gathered[turn.number]:
                self.ops.use(buffer)

    def _use_weights(self, action: Action) -> None:
        """The last op reads them."""
        if turn := self.turns.of.get(action):
            self.ops.use(self.gathered[turn.number][0])

    def _forward(self, action: Action) -> None:
        for stage in self.closing.refreshing.get(action.stage, ()) if action.kind == "F" else ():
            if stage in self.refreshing:
                self.ops.wait_for(self.closing.broadcasts[stage])
                self.ops.use(self.refreshing.pop(stage))
        unit, microbatch, size = (action.kind, action.stage), action.microbatch, self.step.sizes[action.microbatch]
        of, found = self.step.units.table[unit], self.step.calls.forward(unit, size)
        read = {name: self.read(name, microbatch) for name in (*of.makers, *self.step.sources[unit])}
        self.ops.run(self.step.seconds.of(action, size), found.most)
        self._use_weights(action)
        for buffer in read.values():
            self.ops.use(buffer)
        made = self._own(found.returned, read)
        for name in of.readers:
            self.values[name, microbatch] = made[name] if name in made else read[name]
        for name in self.step.units.step.graph.kept:
            if name in made:
                self.ops.keep(made[name])
        if action.kind == "F" and action.stage in self.step.with_backward:
            self._save(action, found, read | made)

    def _own(self, values: Mapping[str, tuple[str, int]], given: Mapping[str, int]) -> dict[str, int]:
        """Buffers of what a call returns: memory of its own, or of something it was given."""
        memory = dict(given)
        found = {}
        for name, (place, size) in values.items():
            if place not in memory:
                memory[place] = self.ops.make("activations", size)
            found[name] = memory[place]
        return found

    def _save(self, action: Action, found: ForwardBytes, known: dict[str, int]) -> None:
        buffer = self.ops.make("activations", found.saved) if found.saved else None
        shared = {name: known[name] for name in found.kept if name in known}
        self.saved[Action(action.stage, "B", action.microbatch)] = Saved(buffer, shared)

    def add(self, parts: Sequence[int], category: str = "gradients") -> int:
        """The sum of one or more buffers, from first to last."""
        total = parts[0]
        for part in parts[1:]:
            size = self.ops.num_bytes(part)
            self.ops.run(self.step.seconds.adding(size))
            self.ops.use(total)
            self.ops.use(part)
            total = self.ops.make(category, size)
        return total

    def _backward(self, action: Action) -> None:
        stage, microbatch, size = action.stage, action.microbatch, self.step.sizes[action.microbatch]
        of, calls = self.step.units.table["F", stage], self.step.calls
        tangents = {}
        for name in of.readers:
            if self.step.units.returns_gradient(name):
                buffer = self.gradient(name, microbatch)
                if buffer is not None:
                    tangents[name] = buffer
        split = action.kind == "I" and stage in self.step.split
        saved = self.saved.pop(Action(stage, "B", microbatch))
        found = calls.backward(("F", stage), size, "I" if split else "B", frozenset())
        self.ops.run(self.step.seconds.of(action if split else Action(stage, "B", microbatch), size), found.most)
        self._use_weights(action)
        self._let_go(action, "I" if split else "B", size, saved)
        for buffer in tangents.values():
            self.ops.use(buffer)
        given = {f"grad of {name}": buffer for name, buffer in tangents.items()} | saved.shared
        made = self._own(found.gradients, given)
        if split:
            kept = self.ops.make("activations", found.saved + found.made) if found.saved + found.made else None
            shared = {name: buffer for name, buffer in given.items() if name in found.kept}
            self.saved[Action(stage, "W", microbatch)] = Saved(kept, shared)
        else:
            self._accumulate(stage, found.weight_gradients)
        for name, source in of.makers.items():
            if source[0] == "F" and self.step.units.returns_gradient(name):
                parts = [made[name]] if name in made else []
                parts += [tangents[name]] if name in tangents else []
                if not parts:  # a read without influence still owes its maker a gradient: zeros
                    parts = [self.ops.make("gradients", self.step.units.edges[name].num_bytes(size))]
                self.gradients.setdefault((name, microbatch), []).append(self.add(parts))

    def _let_go(self, action: Action, part: str, size: int, saved: Saved) -> None:
        """What a backward was given; what nobody else holds goes while it runs."""
        if saved.buffer is not None:
            self.ops.use(saved.buffer)
        for buffer in saved.shared.values():
            self.ops.use(buffer)
        self._backwards.append((self.ops.position, action.stage, size, part, saved.shared))

    def _see_backwards(self) -> None:
        """Now that all uses are known: the most during every backward."""
        goes, calls = self.ops.goes_at, self.step.calls
        for place, stage, size, part, shared in self._backwards:
            alone = frozenset([name for name, buffer in shared.items() if goes(buffer) == place])
            if alone:
                arrived = frozenset([name for name in alone if not self.ops.is_sent(shared[name])])
                found = (calls.backward(("F", stage), size, part, given).most for given in (alone, arrived))
                self.ops.see(place, *found)

    def _weight(self, action: Action) -> None:
        size = self.step.sizes[action.microbatch]
        saved = self.saved.pop(action)
        found = self.step.calls.backward(("F", action.stage), size, "W", frozenset())
        self.ops.run(self.step.seconds.of(action, size), found.most)
        self._use_weights(action)
        self._let_go(action, "W", size, saved)
        self._accumulate(action.stage, found.weight_gradients)

    def _accumulate(self, stage: int, num_bytes: int) -> None:
        """From a stage's second micro-batch on, its gradients are added to those that are there."""
        if not num_bytes:
            return
        if stage not in self.totals:
            tied = self.step.tied_of(stage)
            found = {name: self.ops.make("gradients", size) for name, size in tied.items()}
            if stage in self.stages:
                self.again[stage] = [*found.values()]
            else:
                for name, buffer in found.items():
                    self.tied.setdefault(name, {})[stage] = buffer
            self.stages[stage] = None
            self.totals[stage] = self.ops.make("gradients", num_bytes - sum(tied.values()))
            return
        new = self.ops.make("gradients", num_bytes)
        self.ops.run(self.step.seconds.adding(num_bytes))
        self.ops.use(new)
        self.ops.use(self.totals[stage])

    # -- the end of the step

    def _issue(self, stage: int, reduction: Collective) -> None:
        """Start to sum this replica's gradients with the others'."""
        for other in [*self.reducing]:
            if other == stage or self.closing.sums_in_turn:  # so that what is sent for them goes
                self._wait_reduced(other)
        self.ops.issue(reduction)
        self.ops.use(self.totals.pop(stage))
        own, moved = self.closing.scattered(stage, self.rank) if self.closing.owners else (reduction.num_bytes, 0)
        self.reducing[stage] = Reducing(
            reduction, self.ops.make("gradients", own), self.ops.make("transfers", moved) if moved else None
        )
        if moved:
            self.ops.see(self.ops.position, moved, moved)
        if again := self.again.pop(stage, None):
            self._added(again, [of[stage] for of in self.tied.values() if stage in of])

    def _added(self, new: Sequence[int], to: Sequence[int]) -> None:
        """Add buffers in place."""
        self.ops.run(self.step.seconds.adding(sum(map(self.ops.num_bytes, new))))
        for buffer in (*new, *to):
            self.ops.use(buffer)

    def _wait_reduced(self, stage: int) -> None:
        reduction, sums, moved = self.reducing.pop(stage)
        self.ops.wait_for(reduction)
        self.ops.use(sums)
        if moved is not None:
            self.ops.use(moved)
        if stage not in self.sums:
            self.sums[stage] = sums
        elif self.ops.num_bytes(sums):
            self._added([sums], [self.sums[stage]])

    def _close(self) -> None:
        for stage in self.stages:
            if stage in self.reducing:
                self._wait_reduced(stage)
            for found in (self.sums, self.totals):
                if stage in found:
                    self.ops.keep(found[stage])
        sums = {name: self.add([of[stage] for stage in sorted(of)]) for name, of in sorted(self.tied.items())}
        self.sum_tied(self.closing.tied, sums)
        for buffer in sums.values():
            self.ops.keep(buffer)
        if self.step.loss_ranks:
            self.share_loss(self.step.loss_ranks[0], self.ops.make("activations", 0))
        if any(self.step.ahead.pieces):
            self.pieces.carry(self.receive)
