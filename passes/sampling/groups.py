"""Groups of samples: the same patches on other ranks, each group with its part of the batch.

samples 0:2, patches 0 1        rank 0: x[0:1], patch 0      rank 2: x[1:2], patch 0
                           ->   rank 1: x[0:1], patch 1      rank 3: x[1:2], patch 1
                                then ranks 0 and 2 swap their predictions, as do 1 and 3

The halves of classifier-free guidance are such samples. Groups exchange nothing but the prediction: a message per step.
Copies exchange nothing at all.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import fx

from fxpipe.plan import ops
from fxpipe.plan.rank_program import Message
from fxpipe.plan.sample_program import SampleProgram

Span = tuple[int, int]
"""Samples [start, stop) of the batch."""


Alone = tuple[Sequence[SampleProgram], Mapping[str, tuple[Message, ...]]]
"""Programs of ranks of one group for its own samples, as if it were alone, and the messages of each form."""


def grouped(
    groups: Sequence[Alone], spans: Sequence[Span], batched: Mapping[str, torch.Tensor], device: torch.device,
    patches: int, ranks: Collection[int],
) -> tuple[tuple[SampleProgram, ...], dict[str, tuple[Message, ...]]]:  # fmt: skip
    """The programs of these ranks, of which the groups have theirs; and the messages of each form, side by side.

    Args:
        spans: the samples of every group.
        batched: the inputs whose dimension 0 is the batch, by name, on the meta device.
        patches: ranks of a group: group g's patch p is on rank g * patches + p.
    """
    edges = 1 + max((m.edge for _, of_forms in groups for of in of_forms.values() for m in of), default=-1)
    results = [result_of(programs[0].graph).meta["val"] for programs, _ in groups]
    shared = _predictions(results, patches, len(groups) * edges)
    places = [_Place(group * patches, group * edges, span) for group, span in enumerate(spans)]
    programs = tuple(
        _moved(program, place, batched, shared, device)
        for place, (alone, _) in zip(places, groups, strict=True)
        for program in alone
        if place.rank + program.rank in ranks
    )
    messages = {}
    for form in groups[0][1]:
        beside = zip_longest(*(map(place.moved, of[form]) for place, (_, of) in zip(places, groups, strict=True)))
        messages[form] = (*(message for many in beside for message in many if message is not None), *shared)
    return programs, messages


def copied(alone: Alone, copies: int, num_ranks: int, ranks: Collection[int]) -> Alone:
    """The same again on the ranks that follow the first `num_ranks`: the programs of these ranks, of which the first
    copy has theirs."""
    if copies == 1:
        return alone
    programs, of_forms = alone
    edges = 1 + max((message.edge for of in of_forms.values() for message in of), default=-1)
    places = [_Place(copy * num_ranks, copy * edges) for copy in range(copies)]
    messages = {form: tuple(place.moved(m) for place in places for m in of) for form, of in of_forms.items()}
    return [_again(p, place) for place in places for p in programs if place.rank + p.rank in ranks], messages


def _again(program: SampleProgram, place: "_Place") -> SampleProgram:
    """A program on another rank."""
    forms = {name: replace(form, graph=place.written(form.graph)) for name, form in program.forms.items()}
    return replace(program, rank=place.rank + program.rank, forms=forms)


@dataclass(frozen=True)
class _Place:
    """Where a group is: its first rank, the first edge of its messages, its samples."""

    rank: int
    edge: int
    span: Span = (0, 0)

    def moved(self, message: Message) -> Message:
        members = tuple(map(self.moved, message.members))
        src, dst = message.src + self.rank, message.dst + self.rank
        return replace(message, edge=message.edge + self.edge, src=src, dst=dst, members=members)

    def written(self, graph: fx.Graph) -> fx.Graph:
        """The graph, with messages between its own ranks."""
        new, env = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in graph.nodes:
            env[node] = new.node_copy(node, env.__getitem__)
            self.move(env[node])
        new.lint()
        return new

    def move(self, node: fx.Node) -> None:
        """Make a message that of the group's own ranks."""
        if node.target not in (ops.send, ops.recv):
            return
        args: list[Any] = list(node.args)
        rank, edge = (2, 3) if node.target is ops.send else (1, 2)
        args[rank] += self.rank
        args[edge] += self.edge
        node.args = tuple(args)
        node.meta = {**node.meta, "message": self.moved(node.meta["message"])}


def _predictions(results: Sequence[torch.Tensor], patches: int, first_edge: int) -> tuple[Message, ...]:
    """Every rank's prediction for its samples, to the ranks that have its patch in the other groups; `results` has each
    group's shape and type."""
    found: list[Message] = []
    for source, value in enumerate(results):
        for patch in range(patches):
            for target in range(len(results)):
                if target != source:
                    src, dst = source * patches + patch, target * patches + patch
                    name, edge = f"prediction_{source}", first_edge + len(found)
                    shape = tuple(value.shape)
                    found.append(Message(edge, src, dst, None, name, -1, "prediction", shape, value.dtype))
    return tuple(found)


def result_of(graph: fx.Graph) -> fx.Node:
    """What a form predicts; it may return what it carries beside."""
    (output,) = graph.find_nodes(op="output")
    result = output.args[0]
    found = result[0] if isinstance(result, tuple) else result
    assert isinstance(found, fx.Node)
    return found


def _moved(
    alone: SampleProgram, place: _Place, batched: Mapping[str, torch.Tensor], shared: Sequence[Message],
    device: torch.device,
) -> SampleProgram:  # fmt: skip
    rank = place.rank + alone.rank
    mine = [message for message in shared if rank in message.channel]
    forms = {
        name: replace(form, graph=_MovedForm(form.graph, rank, place, batched, mine, device).written())
        for name, form in alone.forms.items()
    }
    return replace(alone, rank=rank, forms=forms)


class _MovedForm:
    """One form of a program on another rank, for some samples of the batch."""

    def __init__(
        self, alone: fx.Graph, rank: int, place: _Place, batched: Mapping[str, torch.Tensor],
        shared: Sequence[Message], device: torch.device,
    ) -> None:  # fmt: skip
        self.alone, self.rank, self.place, self.batched = alone, rank, place, batched
        self.shared, self.device = shared, device
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.posted: dict[int, fx.Node] = {}  # the other groups' predictions

    def written(self) -> fx.Graph:
        begun = False
        for node in self.alone.nodes:
            if node.op == "output":
                carries = node.args[0][1:] if isinstance(node.args[0], tuple) else ()
                whole = self._joined(self.env[result_of(self.alone)])
                rest = fx.map_arg(carries, self.env.__getitem__)
                self.graph.output((whole, *rest) if carries else whole)
                break
            self.env[node] = self.graph.node_copy(node, self.env.__getitem__)
            self.place.move(self.env[node])
            if node.target is ops.begin and not begun:
                begun = True
                self._post()
                self._slice()
        self.graph.lint()
        return self.graph

    def _slice(self) -> None:
        """The group's samples of every input that has some."""
        start, stop = self.place.span
        for placeholder in self.alone.find_nodes(op="placeholder"):
            like = self.batched.get(placeholder.name)
            if like is not None and placeholder in self.env:
                args = (self.env[placeholder], 0, 1, 1, start, stop, len(like))
                node = self._call(ops.slice_batch, args, f"{placeholder.name}_group")
                node.meta["val"] = like.new_empty((stop - start, *like.shape[1:]))
                self.env[placeholder] = node

    def _post(self) -> None:
        """What the others predict: a group that is late finds it there."""
        (transport, *_) = self.graph.find_nodes(op="placeholder")
        for message in self.shared:
            if message.dst == self.rank:
                name = f"recv_prediction_of_rank_{message.src}"
                self.posted[message.src] = message.received(transport, self.device, name)

    def _joined(self, own: fx.Node) -> fx.Node:
        """The prediction for all samples."""
        value = result_of(self.alone).meta["val"]
        (transport, *_) = self.graph.find_nodes(op="placeholder")
        for message in self.shared:
            if message.src == self.rank:
                message.sent(transport, own, f"send_prediction_to_rank_{message.dst}")
        found = {src: self._call(ops.wait, (node,), f"prediction_of_rank_{src}") for src, node in self.posted.items()}
        parts = [node for _, node in sorted({**found, self.rank: own}.items())]
        whole = self._call(torch.ops.aten.cat.default, (parts, 0), "prediction_of_all")
        samples = value.shape[0] + sum(node.meta["message"].shape[0] for node in self.posted.values())
        whole.meta["val"] = torch.empty((samples, *value.shape[1:]), dtype=value.dtype, device="meta")
        return whole

    def _call(self, target: Any, args: tuple[Any, ...], name: str) -> fx.Node:
        return self.graph.create_node("call_function", target, args, name=name)
