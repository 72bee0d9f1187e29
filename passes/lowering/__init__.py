"""Lowering: from stage graphs and a schedule to one straight-line program per rank.

    rank 1: 1F0 1B0                 h_mb0 = wait(recv(transport, src=0, edge=0))
                             ->     [loss_mb0], saved_1F0 = self.stage_1_forward(h_mb0, target_mb0)
                                    loss_total = add_weighted(None, loss_mb0, weight=1.0)
                                    [grad_h_mb0], weight_grads_1B0 = self.stage_1_backward(saved_1F0, constant(1.0))
                                    send(transport, grad_h_mb0, dst=0, edge=1)
                                    return loss_total, [weight_grads_1B0[0]]

A value that a stage of the same rank reads is an edge of this graph and nothing else.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx

from fxpipe import ops
from fxpipe.program_check import require_programs
from fxpipe.rank_program import Message, RankProgram, Reduction
from fxpipe.schedule import Action
from passes.fill import among
from passes.lowering.frozen import FrozenWork, FrozenWriter
from passes.lowering.messages import (
    Layout,
    TiedGradient,
    closing_messages,
    gradient_ranks,
    messages_after,
    plan_reductions,
)
from passes.lowering.rank_writer import RankWriter, Sources, carried_name, name_at, shape_only
from passes.lowering.stage_graphs import StageGraphs
from passes.lowering.units import Value

Form = Literal["step", "prologue", "steady", "epilogue"]
PREFETCH = 1  # actions ahead of its use that a receive is posted


@dataclass(frozen=True)
class Lowered:
    """The program of every rank, all messages, and the reductions of gradients over replicas.

    `without` is the same without the stages that may be left out.
    """

    programs: tuple[RankProgram, ...]
    messages: tuple[Message, ...]
    reductions: tuple[Reduction, ...]
    without: "Lowered | None" = None


def lower(
    layout: Layout,
    sources: Sources,
    weights: Sequence[float],
    state: Mapping[str, torch.Tensor],
    device: torch.device,
    frozen: FrozenWork | None = None,
    form: Form = "step",
    optional: Collection[int] = (),
) -> Lowered:
    """The programs of one step.

    Args:
        weights: the factor of every micro-batch's loss in the whole batch's loss.
        state: parameters, buffers and constants by name, for their shapes and types.
        frozen: the frozen work of a batch, where that is done in the step before.
        form: "prologue" (frozen work of the first batch), "steady" (training, and frozen work of the next batch),
            "epilogue" (training on the last batch); a "step" has its frozen work among its actions.
        optional: stages of a first pass, which some steps leave out.
    """
    trains, works = form != "prologue", frozen if form in ("prologue", "steady") else None
    reductions = plan_reductions(layout, 0) if trains else ()
    reduced = {name for reduction in reductions for name in reduction.parameters}
    tied = _tied_gradients(layout, reduced) if trains else []
    messages, of_pieces = _plan(layout, tied, works, trains)
    reductions = plan_reductions(layout, len(messages)) if trains else ()
    programs = []
    for rank in range(len(layout.schedule.ranks)):
        next_inputs = None if works is None else sources.inputs_for(_frozen_reads(works, rank))
        carried = {(n, m): frozen.shape(n, layout.sizes[m]) for n, m in frozen.kept[rank]} if frozen and trains else {}
        writer = RankWriter(rank, layout, sources, messages, device, next_inputs, carried, trains)
        programs.append(_Rank(writer, weights, tied, reductions, works, of_pieces).write(state, trains))
    less = None
    if optional and trains:
        less = lower(layout.without(optional), sources, weights, state, device, frozen, form)
    return Lowered(tuple(programs), messages, reductions, less)


def require_lowered(lowered: Lowered) -> None:
    """Raise CompileError with the faults of the programs, and of those without optional stages."""
    require_programs(lowered.programs, lowered.messages, lowered.reductions)
    if lowered.without is not None:
        require_lowered(lowered.without)


def _plan(
    layout: Layout, tied: Sequence[TiedGradient], frozen: FrozenWork | None, trains: bool
) -> tuple[tuple[Message, ...], dict[tuple[int, int], list[Message]]]:
    """All messages rank by rank as they are sent, and those of every piece, by its rank and place."""
    messages: list[Message] = []
    of_pieces: dict[tuple[int, int], list[Message]] = {}
    for rank, actions in enumerate(layout.schedule.ranks):
        for item in among(actions if trains else (), frozen.pieces[rank] if frozen else ()):
            if isinstance(item[1], Action):
                messages += messages_after(layout, rank, item[0], len(messages))
            else:
                assert frozen is not None
                sends = enumerate(frozen.sends(rank, item[1]), start=len(messages))
                of_pieces[rank, item[0]] = [frozen.message(edge, rank, *send) for edge, send in sends]
                messages += of_pieces[rank, item[0]]
        if trains:
            messages += closing_messages(layout, tied, rank, len(messages))
    return tuple(messages), of_pieces


def _frozen_reads(frozen: FrozenWork, rank: int) -> set[str]:
    layers = {layer for piece in frozen.pieces[rank] for layer in piece.layers}
    return {name for layer in layers for name in frozen.reads(layer)}


def _tied_gradients(layout: Layout, reduced: Collection[str]) -> list[TiedGradient]:
    """Trained parameters that more than one rank holds, unless they are reduced with their stage."""
    givers: dict[str, set[int]] = {}
    holders: dict[str, set[int]] = {}
    values: dict[str, Value] = {}
    for (unit, microbatch), rank in layout.rank_of.items():
        graphs = layout.graph(unit, microbatch)
        values |= graphs.state
        for name in graphs.state:
            holders.setdefault(name, set()).add(rank)
        for name in graphs.weight_grads:
            givers.setdefault(name, set()).add(rank)
    return [
        TiedGradient(values[name], tuple(sorted(ranks)), tuple(sorted(holders[name])))
        for name, ranks in sorted(givers.items())
        if len(holders[name]) > 1 and name not in reduced
    ]


def graph_name(layout: Layout, graphs: StageGraphs, part: str) -> str:
    """What programs call one of a unit's graphs; micro-batches of several sizes have graphs of their own."""
    return f"{graphs.unit.name}_{part}" + (f"_b{graphs.batch_size}" if len(set(layout.sizes)) > 1 else "")


class _Rank:
    """One rank's program, written action by action; the dictionaries hold what exists at this point of it."""

    def __init__(
        self,
        writer: RankWriter,
        weights: Sequence[float],
        tied: Sequence[TiedGradient],
        reductions: Sequence[Reduction],
        frozen: FrozenWork | None,
        of_pieces: Mapping[tuple[int, int], list[Message]],
    ) -> None:
        self.writer, self.layout, self.weights, self.tied = writer, writer.layout, weights, tied
        self.reductions = {reduction.stage: reduction for reduction in reductions}
        self.reducing: dict[tuple[int, tuple[str, ...]], fx.Node] = {}  # sums over replicas that have been started
        self.gradients: dict[tuple[str, int], list[fx.Node]] = {}  # parts, by value and micro-batch
        self.saved: dict[Action, fx.Node] = {}  # lists of saved or kept values, by the action that takes them
        self.totals: dict[tuple[int, tuple[str, ...]], fx.Node] = {}  # weight gradients so far, by stage and names
        self.loss: fx.Node | None = None
        self.frozen, self.of_pieces = None, of_pieces
        if frozen is not None:
            assert writer.next_batch is not None
            self.frozen = FrozenWriter(writer, frozen, writer.next_batch)

    def write(self, state: Mapping[str, torch.Tensor], trains: bool) -> RankProgram:
        writer = self.writer
        carried = tuple(carried_name(*key) for key in writer.carried)
        actions = self.layout.schedule.ranks[writer.rank] if trains else ()
        pieces = self.frozen.work.pieces[writer.rank] if self.frozen else ()
        for position, item in among(actions, pieces):
            if isinstance(item, Action):
                self._act(item, actions[position : position + 1 + PREFETCH])
            else:
                assert self.frozen is not None
                self.frozen.run(item, self.of_pieces[writer.rank, position])
        writer.begin("end of step")
        gradients = self._weight_gradients(state)
        carries = {}
        if trains:
            self._sum_tied(gradients)
            self._share_loss()
        if self.frozen is not None:
            carries = self.frozen.carries()
        results = (self.loss, list(gradients.values()))
        writer.graph.output((*results, list(carries.values())) if self.frozen is not None else results)
        writer.graph.lint()
        held = {str(n.target) for graph in writer.modules.values() for n in graph.nodes if n.op == "get_attr"}
        held |= {g.value.name for g in self.tied if writer.rank in g.holders}
        names = {name: state[name] for name in sorted(held)}
        nexts = writer.next_batch.inputs if writer.next_batch else ()
        return RankProgram(
            writer.rank, writer.graph, writer.modules, writer.batch.inputs, tuple(gradients), names,
            nexts, carried, tuple(carries), self.frozen is not None,
        )  # fmt: skip

    def _act(self, action: Action, ahead: Sequence[Action]) -> None:
        emit = {"F": self._forward, "T": self._forward, "B": self._backward, "I": self._backward, "W": self._weight}
        emit["R"] = self._reduce
        self.writer.begin(str(action))
        for following in ahead:
            self.writer.post_all(following)
        emit[action.kind](action)

    def _forward(self, action: Action) -> None:
        graphs = self.layout.graph((action.kind, action.stage), action.microbatch)
        args = tuple(self.writer.read(name, action.microbatch) for name in graphs.unit.reads)
        returns, saved = self._call(graphs, "forward", graphs.forward, args, ("returns", "saved"), action)
        for index, value in enumerate(graphs.returns):
            is_loss = value.name == self.layout.loss
            node = self.writer.item(returns, index, name_at("loss" if is_loss else value.name, action.microbatch))
            node.meta["val"] = shape_only(value.shape, value.dtype)
            self.writer.values[value.name, action.microbatch] = node
            if is_loss:
                weighted = (self.loss, node, self.weights[action.microbatch])
                self.loss = self.writer.call(ops.add_weighted, weighted, "loss_total")
        if graphs.backward is not None:
            self.saved[Action(action.stage, "B", action.microbatch)] = saved
        for message in self.writer.sends_after(action):
            self.writer.send(message, self.writer.values[message.value, message.microbatch])

    def _backward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        graphs = self.layout.graph(("F", stage), microbatch)
        tangents = [self._tangent(value, microbatch) for value in graphs.returns if value.requires_grad]
        args = (self.saved.pop(Action(stage, "B", microbatch)), *tangents)
        if action.kind == "I" and graphs.backward_input is not None:
            parts = ("input_grads", "kept")
            input_grads, kept = self._call(graphs, "backward_input", graphs.backward_input, args, parts, action)
            self.saved[Action(stage, "W", microbatch)] = kept
        else:
            assert graphs.backward is not None
            parts = ("input_grads", "weight_grads")
            input_grads, new = self._call(graphs, "backward", graphs.backward, args, parts, action)
            self._accumulate(stage, graphs, new)
        reads = {value.name: value for value in graphs.reads}
        for index, name in enumerate(graphs.input_grads):
            node = self.writer.item(input_grads, index, name_at(f"grad_{name}", microbatch))
            node.meta["val"] = shape_only(reads[name].shape, reads[name].dtype)
            self.gradients.setdefault((name, microbatch), []).append(node)
        for message in self.writer.sends_after(action):
            self.writer.send(message, self._summed(message.value, microbatch))

    def _weight(self, action: Action) -> None:
        graphs = self.layout.graph(("F", action.stage), action.microbatch)
        assert graphs.backward_weight is not None
        args = (self.saved.pop(action),)
        (new,) = self._call(graphs, "backward_weight", graphs.backward_weight, args, ("weight_grads",), action)
        self._accumulate(action.stage, graphs, new)

    def _call(
        self,
        graphs: StageGraphs,
        part: str,
        body: fx.Graph,
        args: tuple[fx.Node, ...],
        results: tuple[str, ...],
        action: Action,
    ) -> list[fx.Node]:
        """Call one of a unit's graphs; its results are lists."""
        result = self.writer.call_module(graph_name(self.layout, graphs, part), body, args)
        return [self.writer.item(result, i, f"{kind}_{action}") for i, kind in enumerate(results)]

    def _tangent(self, value: Value, microbatch: int) -> fx.Node:
        """The gradient of a returned value: the loss's own weight, or the sum of what its readers give."""
        if value.name == self.layout.loss:
            return self.writer.filled(value, float(self.weights[microbatch]), name_at("grad_loss", microbatch))
        received = self.writer.gradients_from_others(value.name, microbatch)
        parts = [
            self._summed(value.name, microbatch) if rank == self.writer.rank else self.writer.receive(received[rank])
            for rank in gradient_ranks(self.layout, value.name, microbatch)
        ]
        if parts:
            return self.writer.add(parts)
        return self.writer.filled(value, 0.0, name_at(f"no_grad_{value.name}", microbatch))

    def _summed(self, value: str, microbatch: int) -> fx.Node:
        """This rank's gradient of a value: its stages' parts, summed once."""
        parts = self.gradients[value, microbatch]
        parts[:] = [self.writer.add(parts)]
        return parts[0]

    def _accumulate(self, stage: int, graphs: StageGraphs, new: fx.Node) -> None:
        if not graphs.weight_grads:
            return
        key = stage, graphs.weight_grads
        total = self.totals.get(key)
        self.totals[key] = new if total is None else self.writer.call(ops.accumulate, (total, new), f"grads_{stage}")

    def _reduce(self, action: Action) -> None:
        """Start to sum this replica's gradients with the others'."""
        reduction = self.reductions.get(action.stage)
        if reduction is None:  # all its parameters are tied to other stages'
            return
        (key,) = (key for key in self.totals if key[0] == action.stage)
        given: fx.Node | list[fx.Node] = self.totals[key]
        if reduction.parameters != key[1]:
            items = dict(self._named(key, self.totals[key]))
            given = [items[name] for name in reduction.parameters]
        args = (self.writer.transport, given, list(reduction.ranks), reduction.edge)
        self.reducing[key] = self.writer.call(ops.all_reduce, args, f"reducing_{action.stage}")
        self.reducing[key].meta["reduction"] = reduction

    def _named(self, key: tuple[int, tuple[str, ...]], gradients: fx.Node) -> Iterator[tuple[str, fx.Node]]:
        for index, name in enumerate(key[1]):
            yield name, self.writer.item(gradients, index, f"grad_{name.replace('.', '_')}")

    def _weight_gradients(self, state: Mapping[str, torch.Tensor]) -> dict[str, fx.Node]:
        """The gradient of every parameter of this rank, summed over its stages, and over replicas where reduced."""
        parts: dict[str, list[fx.Node]] = {}
        for key, total in self.totals.items():
            reduced: tuple[str, ...] = ()
            if key in self.reducing:
                reduced = self.reducing[key].meta["reduction"].parameters
                sums = self.writer.call(ops.wait_reduced, (self.reducing[key],), f"reduced_{key[0]}")
                for name, node in self._named((key[0], reduced), sums):
                    parts.setdefault(name, []).append(node)
            if reduced != key[1]:
                for name, node in self._named(key, total):
                    if name not in reduced:
                        parts.setdefault(name, []).append(node)
        for name, nodes in parts.items():
            for node in nodes:
                node.meta["val"] = state[name]
        return {name: self.writer.add(nodes) for name, nodes in parts.items()}

    def _sum_tied(self, gradients: dict[str, fx.Node]) -> None:
        """Sum gradients of tied parameters on their first rank, and give the sum to every rank that holds them."""
        rank = self.writer.rank
        for gradient in self.tied:
            for message in self._closing(gradient.value.name):
                if message.dst == gradient.givers[0] != rank:
                    self.writer.send(message, gradients[message.value])
        for gradient in self.tied:
            if rank == gradient.givers[0]:
                name = gradient.value.name
                received = [self.writer.receive(m) for m in self._closing(name) if m.dst == rank]
                gradients[name] = self.writer.add([gradients[name], *received])
        for gradient in self.tied:
            for message in self._closing(gradient.value.name):
                if message.src == gradient.givers[0] == rank:
                    self.writer.send(message, gradients[message.value])
                elif message.src == gradient.givers[0]:
                    gradients[message.value] = self.writer.receive(message)

    def _share_loss(self) -> None:
        """The first rank that has a part of the loss adds up all parts and tells every rank."""
        rank, first = self.writer.rank, self.layout.loss_ranks[0]
        messages = self._closing(self.layout.loss)
        for message in messages:
            if message.src == rank != first:
                assert self.loss is not None
                self.writer.send(message, self.loss)
        if rank == first:
            assert self.loss is not None
            parts = [self.writer.receive(message) for message in messages if message.dst == rank]
            self.loss = self.writer.add([self.loss, *parts])
            for message in messages:
                if message.src == rank:
                    self.writer.send(message, self.loss)
        else:
            (told,) = (message for message in messages if message.src == first)
            self.loss = self.writer.receive(told)

    def _closing(self, value: str) -> list[Message]:
        """Messages of `value` after the last action that this rank sends or receives, ordered by edge."""
        found = [m for m in self.writer.messages if m.action is None and m.value == value]
        return [m for m in found if self.writer.rank in m.channel]
