"""Groups of samples: the same patches on other ranks, each group with its part of the batch.

samples 0:2, patches 0 1        rank 0: x[0:1], patch 0      rank 2: x[1:2], patch 0
                           ->   rank 1: x[0:1], patch 1      rank 3: x[1:2], patch 1
                                then ranks 0 and 2 swap their predictions, as do 1 and 3

The halves of classifier-free guidance are such samples. Groups exchange nothing but the prediction: a message per step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxpipe.plan import ops
from fxpipe.plan.rank_program import Message
from fxpipe.plan.sample_program import Form, SampleProgram

Span = tuple[int, int]
"""Samples [start, stop) of the batch."""


def grouped(
    groups: Sequence[tuple[Sequence[SampleProgram], Sequence[Message]]],
    spans: Sequence[Span],
    batched: Mapping[str, torch.Tensor],
    device: torch.device,
) -> tuple[tuple[SampleProgram, ...], tuple[Message, ...]]:
    """The programs of all ranks: group g's patch p is on rank g * patches + p.

    Args:
        groups: programs and messages of each group for its own samples, as if it were alone.
        spans: the samples of every group.
        batched: the inputs whose dimension 0 is the batch, by name, on the meta device.
    """
    patches, messages = len(groups[0][0]), list[Message]()
    firsts: list[int] = []
    for group, (_, of_group) in enumerate(groups):
        firsts.append(len(messages))
        first = group * patches
        messages += [replace(m, edge=m.edge + firsts[-1], src=m.src + first, dst=m.dst + first) for m in of_group]
    shared = _predictions(groups, patches, len(messages))
    programs = [
        _Moved(program, group * patches, firsts[group], spans[group], batched, shared, device).program()
        for group, (of_group, _) in enumerate(groups)
        for program in of_group
    ]
    return tuple(programs), (*messages, *shared)


def _predictions(
    groups: Sequence[tuple[Sequence[SampleProgram], Sequence[Message]]], patches: int, first_edge: int
) -> tuple[Message, ...]:
    """Every rank's prediction for its samples, to the ranks that have its patch in the other groups."""
    found: list[Message] = []
    for source, (programs, _) in enumerate(groups):
        for patch, program in enumerate(programs):
            value = _result(program.graph).meta["val"]
            for target in range(len(groups)):
                if target != source:
                    src, dst = source * patches + patch, target * patches + patch
                    name, edge = f"prediction_{source}", first_edge + len(found)
                    shape = tuple(value.shape)
                    found.append(Message(edge, src, dst, None, name, -1, "prediction", shape, value.dtype))
    return tuple(found)


def _result(graph: fx.Graph) -> fx.Node:
    (output,) = graph.find_nodes(op="output")
    result = output.args[0]
    assert isinstance(result, fx.Node)
    return result


class _Moved:
    """One program on another rank, for some samples of the batch."""

    def __init__(
        self, alone: SampleProgram, first_rank: int, first_edge: int, span: Span,
        batched: Mapping[str, torch.Tensor], shared: Sequence[Message], device: torch.device,
    ) -> None:  # fmt: skip
        self.alone, self.first_rank, self.first_edge, self.span = alone, first_rank, first_edge, span
        self.batched, self.shared, self.device = batched, shared, device
        self.rank = first_rank + alone.rank
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}

    def program(self) -> SampleProgram:
        started, sliced = False, [name for name in self.alone.inputs if name in self.batched]
        for node in self.alone.graph.nodes:
            if node.op == "output":
                self.graph.output(self._joined(self.env[_result(self.alone.graph)]))
                continue
            new = self.graph.node_copy(node, self.env.__getitem__)
            self.env[node] = new
            if node.target in (ops.send, ops.recv):
                self._move(new)
            if node.target is ops.begin and not started:
                started = True
                for name in sliced:
                    self._slice(name)
        self.graph.lint()
        return replace(self.alone, rank=self.rank, forms={"fresh": Form(self.graph)})

    def _move(self, node: fx.Node) -> None:
        """A message of the group, between its own ranks."""
        args: list[Any] = list(node.args)
        rank, edge = (2, 3) if node.target is ops.send else (1, 2)
        args[rank] += self.first_rank
        args[edge] += self.first_edge
        node.args = tuple(args)

    def _slice(self, name: str) -> None:
        (placeholder,) = (n for n in self.alone.graph.find_nodes(op="placeholder") if n.name == name)
        start, stop = self.span
        args = (self.env[placeholder], 0, 1, 1, start, stop, 0)
        self.env[placeholder] = self.graph.create_node("call_function", ops.slice_batch, args, name=f"{name}_group")
        like = self.batched[name]
        self.env[placeholder].meta = {"val": like.new_empty((stop - start, *like.shape[1:]))}

    def _joined(self, own: fx.Node) -> fx.Node:
        """The prediction for all samples: this group's is sent to the others before theirs are waited for."""
        value = _result(self.alone.graph).meta["val"]
        (transport, *_) = self.graph.find_nodes(op="placeholder")
        posted: dict[int, fx.Node] = {}
        for message in self.shared:
            if message.src == self.rank:
                args = (transport, own, message.dst, message.edge)
                self._call(ops.send, args, f"send_prediction_to_rank_{message.dst}", message)
            elif message.dst == self.rank:
                wire = (transport, message.src, message.edge, list(message.shape), message.dtype, str(self.device))
                posted[message.src] = self._call(ops.recv, wire, f"recv_prediction_of_rank_{message.src}", message)
        found = {src: self._call(ops.wait, (node,), f"prediction_of_rank_{src}") for src, node in posted.items()}
        parts = [node for _, node in sorted({**found, self.rank: own}.items())]
        whole = self._call(torch.ops.aten.cat.default, (parts, 0), "prediction_of_all")
        samples = value.shape[0] + sum(node.meta["message"].shape[0] for node in posted.values())
        whole.meta["val"] = torch.empty((samples, *value.shape[1:]), dtype=value.dtype, device="meta")
        return whole

    def _call(self, target: Any, args: tuple[Any, ...], name: str, message: Message | None = None) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, name=name)
        if message is not None:
            node.meta["message"] = message
        return node
