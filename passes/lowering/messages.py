"""Messages: every value and gradient that crosses ranks, in the one order that both ends of a channel use.

    rank 0: 0F0 0F1 0B0 0B1          channel 0 -> 1:  h[0] main, h[1] main
    rank 1: 1F0 1B0 1F1 1B1    ->    channel 1 -> 0:  h[0] gradient, h[1] gradient

A value goes once to each rank that reads it, from the action that makes it; the gradients that a rank's stages give
to a value are summed there and go back once, from the last of those stages' backwards.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from fxpipe.rank_program import Message, Reduction
from fxpipe.schedule import Action, Schedule
from passes.lowering.stage_graphs import StageGraphs
from passes.lowering.units import Value

Graphs = Mapping[tuple[str, int], Mapping[int, StageGraphs]]


@dataclass(frozen=True)
class Layout:
    """What is lowered: graphs of every unit, ("F", stage) or ("T", component), by micro-batch size, and who runs them.

    `kinds` gives the kind of a value as read by a unit, by (value, unit).
    """

    graphs: Graphs
    schedule: Schedule
    sizes: tuple[int, ...]
    kinds: Mapping[tuple[str, tuple[str, int]], str]
    loss: str
    zeros: Mapping[str, Mapping[int, Value]] = field(default_factory=dict)  # values that are zeros, by micro-batch size

    def without(self, stages: Collection[int]) -> "Layout":
        """The layout without some stages; what they return is zeros to the others."""
        gone = {("F", stage) for stage in stages}
        actions = (tuple(a for a in ranks if a.kind == "T" or a.stage not in stages) for ranks in self.schedule.ranks)
        zeros: dict[str, dict[int, Value]] = {}
        for unit in gone & self.graphs.keys():
            for size, graphs in self.graphs[unit].items():
                for value in graphs.returns:
                    zeros.setdefault(value.name, {})[size] = value
        return replace(
            self,
            graphs={unit: sizes for unit, sizes in self.graphs.items() if unit not in gone},
            schedule=replace(self.schedule, ranks=tuple(actions)),
            zeros=zeros,
        )

    def graph(self, unit: tuple[str, int], microbatch: int) -> StageGraphs:
        return self.graphs[unit][self.sizes[microbatch]]

    @cached_property
    def producer(self) -> dict[str, tuple[str, int]]:
        return {v: unit for unit, sizes in self.graphs.items() for v in next(iter(sizes.values())).unit.returns}

    @cached_property
    def readers(self) -> dict[str, list[tuple[str, int]]]:
        readers: dict[str, list[tuple[str, int]]] = {}
        for unit, sizes in self.graphs.items():
            for value in next(iter(sizes.values())).unit.reads:
                readers.setdefault(value, []).append(unit)
        return readers

    @cached_property
    def rank_of(self) -> dict[tuple[tuple[str, int], int], int]:
        """The rank that runs a unit for a micro-batch."""
        owner = {}
        for rank, actions in enumerate(self.schedule.ranks):
            for action in actions:
                if action.kind in "FT":
                    owner[(action.kind, action.stage), action.microbatch] = rank
        return owner

    def gradient_givers(self, value: str, microbatch: int) -> list[int]:
        """Stages whose backward gives a gradient to `value`, in order."""
        units = self.readers.get(value, [])
        return sorted(s for kind, s in units if kind == "F" and value in self.graph((kind, s), microbatch).input_grads)

    @cached_property
    def loss_ranks(self) -> tuple[int, ...]:
        """The ranks that make some micro-batch's loss; the first adds them up."""
        unit = self.producer[self.loss]
        return tuple(dict.fromkeys(self.rank_of[unit, m] for m in range(len(self.sizes))))


def plan_reductions(layout: Layout, first_edge: int) -> tuple[Reduction, ...]:
    """One per stage with replicas: the gradients of the parameters that no other stage holds."""
    holders: dict[str, set[int]] = {}
    for (kind, stage), sizes in layout.graphs.items():
        for name in next(iter(sizes.values())).state if kind == "F" else ():
            holders.setdefault(name, set()).add(stage)
    reductions: list[Reduction] = []
    for stage, ranks in enumerate(layout.schedule.stage_ranks):
        if len(ranks) < 2:
            continue
        graphs = layout.graph(("F", stage), 0)
        names = tuple(name for name in graphs.weight_grads if len(holders[name]) == 1)
        if names:
            size = sum(graphs.state[name].num_bytes for name in names)
            reductions.append(Reduction(first_edge + len(reductions), stage, tuple(sorted(ranks)), names, size))
    return tuple(reductions)


def messages_after(layout: Layout, rank: int, position: int, first_edge: int) -> list[Message]:
    """What a rank sends right after one of its actions."""
    actions = layout.schedule.ranks[rank]
    action = actions[position]
    sends: Iterator[tuple[int, Value, str]] = iter(())
    if action.kind in "FT":
        sends = _values(layout, rank, action)
    elif action.kind in "BI":
        sends = _gradients(layout, rank, action, actions[position + 1 :])
    return [
        _message(first_edge + i, rank, dst, action, value, action.microbatch, kind)
        for i, (dst, value, kind) in enumerate(sends)
    ]


def closing_messages(layout: Layout, tied: Sequence["TiedGradient"], rank: int, first_edge: int) -> list[Message]:
    """What a rank sends after its last action."""
    sends = ((dst, value, kind) for src, dst, value, kind in _closing(layout, tied) if src == rank)
    return [_message(first_edge + i, rank, dst, None, value, -1, kind) for i, (dst, value, kind) in enumerate(sends)]


@dataclass(frozen=True)
class TiedGradient:
    """A parameter of several ranks: `givers` have gradients, the first sums them and sends the sum to all `holders`."""

    value: Value
    givers: tuple[int, ...]
    holders: tuple[int, ...]


def _message(edge: int, src: int, dst: int, action: Action | None, value: Value, microbatch: int, kind: str) -> Message:
    return Message(edge, src, dst, action, value.name, microbatch, kind, value.shape, value.dtype)


def _values(layout: Layout, rank: int, action: Action) -> Iterator[tuple[int, Value, str]]:
    for value in layout.graph((action.kind, action.stage), action.microbatch).returns:
        kinds: dict[int, str] = {}
        for unit in layout.readers.get(value.name, []):
            kinds.setdefault(layout.rank_of[unit, action.microbatch], layout.kinds[value.name, unit])
        kinds.pop(rank, None)
        for reader, kind in sorted(kinds.items()):
            yield reader, value, kind


def _gradients(layout: Layout, rank: int, action: Action, later: Sequence[Action]) -> Iterator[tuple[int, Value, str]]:
    graphs = layout.graph(("F", action.stage), action.microbatch)
    pending = {a.stage for a in later if a.kind in "BI" and a.microbatch == action.microbatch}
    for value in graphs.reads:
        if value.name not in graphs.input_grads or pending & set(layout.gradient_givers(value.name, action.microbatch)):
            continue
        producer = layout.rank_of[layout.producer[value.name], action.microbatch]
        if producer != rank:
            yield producer, value, "gradient"


def _closing(layout: Layout, tied: Sequence[TiedGradient]) -> Iterator[tuple[int, int, Value, str]]:
    """(source, destination, value, kind) after the last action: tied gradients to and from their owner, the loss."""
    for gradient in tied:
        owner, *others = gradient.givers
        for giver in others:
            yield giver, owner, gradient.value, "gradient"
    for gradient in tied:
        for holder in gradient.holders:
            if holder != gradient.givers[0]:
                yield gradient.givers[0], holder, gradient.value, "gradient"
    loss = layout.graph(layout.producer[layout.loss], 0).returns[-1]
    first, *others = layout.loss_ranks
    for rank in others:
        yield rank, first, loss, "loss"
    for rank in range(len(layout.schedule.ranks)):
        if rank != first:
            yield first, rank, loss, "loss"


def gradient_ranks(layout: Layout, value: str, microbatch: int) -> list[int]:
    """The ranks whose stages give a gradient to a value."""
    return sorted({layout.rank_of[("F", s), microbatch] for s in layout.gradient_givers(value, microbatch)})
