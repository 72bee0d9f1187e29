"""Messages: every value and gradient that crosses ranks, in the one order that both ends of a channel use.

    rank 0: 0F0 0F1 0B0 0B1          channel 0 -> 1:  h[0] main, h[1] main
    rank 1: 1F0 1B0 1F1 1B1    ->    channel 1 -> 0:  h[0] gradient, h[1] gradient

A value goes once to each rank that reads it, from the action that makes it; the gradients that a rank's stages give
to a value are summed there and go back once, from the last of those stages' backwards.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from fxpipe.plan.actions import Action
from fxpipe.plan.rank_program import Message, Reduction
from fxpipe.plan.schedule import Schedule
from passes.lowering.borders import Border
from passes.lowering.units import Unit, Value

Key = tuple[str, int]


@dataclass(frozen=True)
class Layout:
    """What is lowered: units, ("F", stage) or ("T", component), what each reads and gives, and who runs them.

    `border` tells it of a unit at a number of samples, `kinds` the kind of a value as read by a unit, by (value, unit).
    """

    units: Mapping[Key, Unit]
    border_at: Callable[[Key, int], Border]
    schedule: Schedule
    sizes: tuple[int, ...]
    kinds: Mapping[tuple[str, Key], str]
    loss: str
    zeros: Mapping[str, Key] = field(default_factory=dict)  # values that are zeros, by the unit that would make them

    def without(self, stages: Collection[int]) -> "Layout":
        """The layout without some stages; what they return is zeros to the others."""
        gone = {("F", stage) for stage in stages}
        zeros = {name: key for key in gone & self.units.keys() for name in self.units[key].returns}
        left = {key: unit for key, unit in self.units.items() if key not in gone}
        schedule = self.schedule.where(lambda a: a.kind == "T" or a.stage not in stages)
        return replace(self, units=left, schedule=schedule, zeros=zeros)

    def border(self, key: Key, microbatch: int) -> Border:
        return self.border_at(key, self.sizes[microbatch])

    @cached_property
    def producer(self) -> dict[str, Key]:
        return {value: key for key, unit in self.units.items() for value in unit.returns}

    @cached_property
    def readers(self) -> dict[str, list[Key]]:
        readers: dict[str, list[Key]] = {}
        for key, unit in self.units.items():
            for value in unit.reads:
                readers.setdefault(value, []).append(key)
        return readers

    @cached_property
    def rank_of(self) -> dict[tuple[Key, int], int]:
        """The rank that runs a unit for a micro-batch."""
        owner = {}
        for rank, actions in enumerate(self.schedule.ranks):
            for action in actions:
                if action.kind in "FT" and not action.is_piece:
                    owner[(action.kind, action.stage), action.microbatch] = rank
        return owner

    def gradient_givers(self, value: str) -> list[int]:
        """Stages whose backward gives a gradient to `value`, in order; they are the same for every micro-batch."""
        if value not in self._givers:
            units = [key for key in self.readers.get(value, []) if key[0] == "F"]
            self._givers[value] = sorted(key[1] for key in units if value in self.border(key, 0).input_grads)
        return self._givers[value]

    @cached_property
    def _givers(self) -> dict[str, list[int]]:
        return {}

    @cached_property
    def last_givers(self) -> dict[tuple[int, int, str], Action]:
        """By rank, micro-batch and value the last of its backwards that gives the value a gradient."""
        found: dict[tuple[int, int, str], Action] = {}
        for rank, actions in enumerate(self.schedule.ranks):
            for action in actions:
                if action.kind in "BI":
                    for name in self.border(("F", action.stage), action.microbatch).input_grads:
                        found[rank, action.microbatch, name] = action
        return found

    @cached_property
    def loss_ranks(self) -> tuple[int, ...]:
        """The ranks that make some micro-batch's loss; the first adds them up."""
        unit = self.producer[self.loss]
        return tuple(dict.fromkeys(self.rank_of[unit, m] for m in range(len(self.sizes))))


def plan_reductions(layout: Layout, first_edge: int) -> tuple[Reduction, ...]:
    """One per stage with replicas: the gradients of the parameters that no other stage holds."""
    holders: dict[str, set[int]] = {}
    for key in layout.units:
        for name in layout.border(key, 0).state if key[0] == "F" else ():
            holders.setdefault(name, set()).add(key[1])
    reductions: list[Reduction] = []
    for stage, ranks in enumerate(layout.schedule.stage_ranks):
        if len(ranks) < 2:
            continue
        border = layout.border(("F", stage), 0)
        names = tuple(name for name in border.weight_grads if len(holders[name]) == 1)
        if names:
            size = sum(border.state[name].num_bytes for name in names)
            reductions.append(Reduction(first_edge + len(reductions), stage, tuple(sorted(ranks)), names, size))
    return tuple(reductions)


def messages_after(layout: Layout, rank: int, action: Action, first_edge: int) -> list[Message]:
    """What a rank sends right after one of its actions."""
    sends: Iterable[tuple[int, Value, str]] = ()
    if action.kind in "FT":
        sends = _values(layout, rank, action)
    elif action.kind in "BI":
        sends = _gradients(layout, rank, action)
    return [
        _message(first_edge + i, rank, dst, action, value, action.microbatch, kind)
        for i, (dst, value, kind) in enumerate(sends)
    ]


def tied_gradients(layout: Layout, reduced: Collection[str]) -> list["TiedGradient"]:
    """Trained parameters that more than one rank holds, unless they are reduced with their stage."""
    givers: dict[str, set[int]] = {}
    holders: dict[str, set[int]] = {}
    values: dict[str, Value] = {}
    for (key, microbatch), rank in layout.rank_of.items():
        border = layout.border(key, microbatch)
        values |= border.state
        for name in border.state:
            holders.setdefault(name, set()).add(rank)
        for name in border.weight_grads:
            givers.setdefault(name, set()).add(rank)
    return [
        TiedGradient(values[name], tuple(sorted(ranks)), tuple(sorted(holders[name])))
        for name, ranks in sorted(givers.items())
        if len(holders[name]) > 1 and name not in reduced
    ]


@dataclass(frozen=True)
class TiedGradient:
    """A parameter of several ranks: `givers` have gradients, the first sums them and sends the sum to all `holders`."""

    value: Value
    givers: tuple[int, ...]
    holders: tuple[int, ...]


def _message(edge: int, src: int, dst: int, action: Action | None, value: Value, microbatch: int, kind: str) -> Message:
    return Message(edge, src, dst, action, value.name, microbatch, kind, value.shape, value.dtype)


def _values(layout: Layout, rank: int, action: Action) -> Iterator[tuple[int, Value, str]]:
    for value in layout.border((action.kind, action.stage), action.microbatch).returns:
        kinds: dict[int, str] = {}
        for unit in layout.readers.get(value.name, []):
            kinds.setdefault(layout.rank_of[unit, action.microbatch], layout.kinds[value.name, unit])
        kinds.pop(rank, None)
        for reader, kind in sorted(kinds.items()):
            yield reader, value, kind


def _gradients(layout: Layout, rank: int, action: Action) -> Iterator[tuple[int, Value, str]]:
    border = layout.border(("F", action.stage), action.microbatch)
    for value in border.reads:
        if layout.last_givers.get((rank, action.microbatch, value.name)) != action:
            continue
        producer = layout.rank_of[layout.producer[value.name], action.microbatch]
        if producer != rank:
            yield producer, value, "gradient"


def closing_messages(layout: Layout, tied: Sequence[TiedGradient], rank: int, first_edge: int) -> list[Message]:
    """What a rank sends after its last action: tied gradients to and from their owner, the loss."""
    sends = ((dst, value, kind) for src, dst, value, kind in closing(layout, tied) if src == rank)
    return [_message(first_edge + i, rank, dst, None, value, -1, kind) for i, (dst, value, kind) in enumerate(sends)]


def closing(layout: Layout, tied: Sequence[TiedGradient]) -> Iterator[tuple[int, int, Value, str]]:
    """(source, destination, value, kind), every one after those that it waits for."""
    for gradient in tied:
        owner, *others = gradient.givers
        for giver in others:
            yield giver, owner, gradient.value, "gradient"
    for gradient in tied:
        for holder in gradient.holders:
            if holder != gradient.givers[0]:
                yield gradient.givers[0], holder, gradient.value, "gradient"
    loss = layout.border(layout.producer[layout.loss], 0).returns[-1]
    first, *others = layout.loss_ranks
    for rank in others:
        yield rank, first, loss, "loss"
    for rank in range(len(layout.schedule.ranks)):
        if rank != first:
            yield first, rank, loss, "loss"


def gradient_ranks(layout: Layout, value: str, microbatch: int) -> list[int]:
    """The ranks whose stages give a gradient to a value."""
    return sorted({layout.rank_of[("F", s), microbatch] for s in layout.gradient_givers(value)})
