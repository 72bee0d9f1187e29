"""A step to be written: the placement's units, the schedule, and all messages of its actions."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from fxpipe.costs.block_values import BatchValue, Weight
from fxpipe.plan.plan import microbatch_samples
from fxpipe.plan.schedule import Schedule
from passes.case import Case
from passes.costs.call_bytes import CallBytes, UnitKey
from passes.step_ops.ahead import AheadPieces
from passes.step_ops.messages import PlannedMessage, Routes
from passes.step_ops.seconds import ActionSeconds
from passes.step_ops.sharding import summing_stage
from passes.step_ops.units import Units


@dataclass(frozen=True, eq=False)
class Step:
    """What all ranks' writers read; `only` are the ranks that are written, of equal pipelines, where not all are."""

    case: Case
    units: Units
    schedule: Schedule
    sizes: tuple[int, ...]
    routes: Routes
    seconds: ActionSeconds
    calls: CallBytes
    only: frozenset[int] | None = None

    @property
    def written(self) -> Collection[int]:
        """The ranks that are written."""
        return range(len(self.schedule.ranks)) if self.only is None else self.only

    @property
    def stage_ranks(self) -> Sequence[Sequence[int]]:
        """The ranks of every stage, written or not."""
        return self.schedule.stage_ranks if self.only is None else self.units.staged.stage_ranks

    @cached_property
    def ahead(self) -> AheadPieces:
        """Frozen work of the next batch."""
        values = {value.name: value for value in self.case.frozen.values}
        return AheadPieces(self.units, self.schedule, self.schedule, self.samples, values)

    @cached_property
    def samples(self) -> list[tuple[int, int]]:
        return microbatch_samples(self.sizes)

    @cached_property
    def sends(self) -> list[list[list[PlannedMessage]]]:
        """The messages of every action of every rank; edges count through them."""
        edges, found, count = self.units.edges, [], 0
        for rank, actions in enumerate(self.schedule.ranks):
            of_rank: list[list[PlannedMessage]] = []
            for place, action in enumerate(actions):
                messages: list[PlannedMessage] = []
                if action.is_piece:
                    for i, (other, value, samples) in enumerate(self.ahead.sends(rank, action), count):
                        num_bytes = self.ahead.values[value].num_bytes(samples[1] - samples[0])
                        messages.append(
                            PlannedMessage(i, rank, other, num_bytes, "conditioning", value, samples=samples)
                        )
                else:
                    size = self.sizes[action.microbatch] if action.kind != "R" else 0
                    for i, (other, value, kind) in enumerate(self.routes.sends(rank, place, action), count):
                        num_bytes = edges[value].num_bytes(size)
                        messages.append(PlannedMessage(i, rank, other, num_bytes, kind, value, action.microbatch))
                count += len(messages)
                of_rank.append(messages)
            found.append(of_rank)
        return found

    @cached_property
    def messages(self) -> list[PlannedMessage]:
        """All of them, by edge."""
        return [message for of_rank in self.sends for of_action in of_rank for message in of_action]

    @cached_property
    def incoming(self) -> list[list[PlannedMessage]]:
        """What every rank receives, in order."""
        found: list[list[PlannedMessage]] = [[] for _ in self.schedule.ranks]
        for message in self.messages:
            found[message.dst].append(message)
        return found

    # -- who has what

    @cached_property
    def units_of(self) -> list[frozenset[UnitKey]]:
        """The stages and frozen components that every rank runs."""
        return [frozenset([(a.kind, a.stage) for a in of_rank if a.kind in "FT"]) for of_rank in self.schedule.ranks]

    def own_gradients(self, stage: int) -> dict[str, int]:
        """Bytes of the trained weights whose gradients its replicas sum, by name."""
        found = (w for w in self._weights_of(stage) if w.trained and self._summed_by.get(w.name) == stage)
        return {w.name: w.num_bytes for w in found}

    @cached_property
    def _summed_by(self) -> Mapping[str, int | None]:
        """The stage whose replicas sum the gradients of a trained weight, by its name."""
        trained, given = (
            (w for w in self.case.costs.weights if w.trained),
            (self.stage_ranks, self.units.staged.gathered),
        )
        return {w.name: summing_stage(self.stages_of(w), self.giving(w), *given) for w in trained}

    def stages_of(self, weight: Weight) -> set[int]:
        """The stages that have it."""
        return {self.units.staged.stage_of_block[block] for block in weight.blocks}

    def own_frozen(self, stage: int) -> dict[str, int]:
        """Bytes of the frozen parameters that no other stage has, and no component, by name."""
        frozen = (w for w in self._own_weights(stage) if not w.trained and not w.components)
        return {w.name: w.num_bytes for w in frozen if w.kind == "parameter"}

    def _own_weights(self, stage: int) -> Iterator[Weight]:
        return (w for w in self._weights_of(stage) if self.stages_of(w) == {stage})

    def _weights_of(self, stage: int) -> Sequence[Weight]:
        return self.case.costs.weights_of(self.units.staged.blocks(stage))

    @cached_property
    def last_stage(self) -> int:
        """The stage that makes the loss."""
        return max(stage for stage in range(self.units.staged.num_stages) if self.units.staged.blocks(stage))

    @cached_property
    def loss_ranks(self) -> Sequence[int]:
        """The ranks that make some micro-batch's loss; the first adds them up."""
        found = (self.routes.rank_of.get(("F", self.last_stage, m)) for m in range(len(self.sizes)))
        return tuple(dict.fromkeys(rank for rank in found if rank is not None))

    @cached_property
    def batch_size(self) -> int:
        return sum(self.sizes)

    @cached_property
    def given(self) -> Mapping[str, BatchValue]:
        """Whole-batch values by name."""
        return {given.name: given for given in self.case.costs.given}

    @cached_property
    def sources(self) -> Mapping[UnitKey, list[str]]:
        """The whole-batch values that each unit reads."""
        found: dict[UnitKey, list[str]] = {unit: [] for unit in self.units.table}
        for given in self.given.values():
            for unit in {self.units.unit_of(b) for b in given.blocks} | {("T", c) for c in given.components}:
                found[unit].append(given.name)
        return found

    @cached_property
    def _given_of_layers(self) -> Mapping[tuple[int, int], list[str]]:
        found: dict[tuple[int, int], list[str]] = {}
        for name, readers in self.case.frozen.given.items():
            for layer in readers if name in self.given else ():
                found.setdefault(layer, []).append(name)
        return found

    def given_of_layer(self, component: int, layer: int) -> Sequence[str]:
        """The whole-batch values that a frozen layer reads."""
        return self._given_of_layers.get((component, layer), ())

    @cached_property
    def with_backward(self) -> frozenset[int]:
        """The stages that have a backward."""
        return frozenset(a.stage for actions in self.schedule.ranks for a in actions if a.kind in "BI")

    @cached_property
    def split(self) -> frozenset[int]:
        """The stages whose backward is in two parts."""
        return frozenset(a.stage for actions in self.schedule.ranks for a in actions if a.kind == "W")

    @cached_property
    def tied(self) -> list[tuple[Weight, set[int]]]:
        """Every trained weight whose gradients several stages exchange, and these."""
        weights = (w for w in self.case.costs.weights if w.trained and self._summed_by[w.name] is None)
        return [(weight, self.stages_of(weight)) for weight in weights if weight.blocks]

    def tied_of(self, stage: int) -> dict[str, int]:
        """Bytes by name of a stage's gradients of weights that other stages have, too."""
        return {weight.name: weight.num_bytes for weight, _ in self.tied if stage in self.giving(weight)}

    def giving(self, weight: Weight) -> set[int]:
        """The stages in which a gradient of it arises: others may read it under no_grad alone."""
        return {self.units.staged.stage_of_block[block] for block in weight.gives} & self.with_backward
