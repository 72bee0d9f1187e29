"""One rank's program, written action by action.

    rank 1: 1F0 1B0                 h_mb0 = wait(recv(transport, src=0, edge=0))
                             ->     [loss_mb0], saved_1F0 = self.stage_1_forward(h_mb0, target_mb0)
                                    loss_total = add_weighted(None, loss_mb0, weight=1.0)
                                    [grad_h_mb0], weight_grads_1B0 = self.stage_1_backward(saved_1F0, constant(1.0))
                                    send(transport, grad_h_mb0, dst=0, edge=1)
                                    return loss_total, [weight_grads_1B0[0]]

A value that a stage of the same rank reads is an edge of this graph and nothing else.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from fxpipe.capture.reach import reached
from fxpipe.plan import ops
from fxpipe.plan.actions import Action
from fxpipe.plan.outputs import WHOLE, Output
from fxpipe.plan.rank_program import RankProgram, Reduction
from passes.lowering.borders import Border
from passes.lowering.frozen import FrozenWork, FrozenWriter
from passes.lowering.layout import Exchanged
from passes.lowering.rank_writer import RankWriter, carried_name, name_at, shape_only
from passes.lowering.step_graphs import Key
from passes.lowering.units import Value
from passes.step_ops.sharding import sums_in_turn
from passes.step_ops.turns import RankTurns, Turn


def graph_name(sizes: Sequence[int], border: Border, part: str) -> str:
    """What programs call one of a unit's graphs; micro-batches of several sizes have graphs of their own."""
    return f"{border.unit.name}_{part}" + (f"_b{border.batch_size}" if len(set(sizes)) > 1 else "")


class ProgramWriter:
    """The dictionaries hold what exists at this point of the program. `frozen` is the next batch's frozen work."""

    def __init__(self, writer: RankWriter, exchanged: Exchanged, frozen: FrozenWork | None) -> None:
        self.writer, self.layout, self.tied = writer, writer.layout, exchanged.tied
        self.weights = writer.step.loss_weights
        self.reductions = {(reduction.stage, reduction.turn): reduction for reduction in exchanged.reductions}
        self.reducing: dict[int, fx.Node] = {}  # by stage: sums over replicas that have been started
        self.sums: dict[int, fx.Node] = {}  # those that are there, of all turns so far
        self.rest: dict[int, tuple[tuple[str, ...], Any]] = {}  # by stage: gradients that replicas do not sum, by name
        self.refreshing: dict[int, fx.Node] = {}  # by stage: its parameters, on their way from who trains them
        self.gatherings = {(gathering.ranks, gathering.turn): gathering for gathering in exchanged.gatherings}
        self.turns = exchanged.turns.get(writer.rank, RankTurns({}, {}, {}))
        self.gathering: dict[int, fx.Node] = {}  # by turn: its stage's parameters, on their way, then here
        self.saved: dict[Action, fx.Node] = {}  # lists of saved or kept values, by the action that takes them
        self.totals: dict[int, tuple[tuple[str, ...], fx.Node]] = {}  # by stage: names, and weight gradients so far
        self.stages: dict[int, None] = {}  # those with gradients, in the order in which they come
        self.loss: fx.Node | None = None
        self.outputs = {output.value: output for output in writer.step.outputs}
        self.numbers = [output for output in writer.step.outputs if output.is_number]
        self.parts: dict[tuple[str, int], fx.Node] = {}  # of outputs, by name and micro-batch
        self.frozen = None
        if frozen is not None:
            assert writer.next_batch is not None
            self.frozen = FrozenWriter(writer, frozen, writer.next_batch)

    def write(self, actions: Sequence[Action], trains: bool) -> RankProgram:
        """The program that does these actions, and where it trains tells every rank the loss."""
        writer = self.writer
        training = [action for action in actions if not action.is_piece]
        position, prefetch = 0, writer.step.staged.prefetch
        for place, action in enumerate(actions):
            writer.begin(str(action))
            if not place and trains:
                self._refresh()
            self._gather(action)
            if action.is_piece:
                assert self.frozen is not None
                self._await(action)
                self.frozen.run(action)
            else:
                self._act(action, training[position : position + 1 + prefetch])
                position += 1
        writer.begin("end of step")
        self._gather(None)
        self._await(None)
        for stage in [*self.refreshing]:  # of a smaller batch, of which this rank has no samples
            self._refreshed(stage)
        gradients = self._weight_gradients()
        if trains:
            writer.sum_tied(self.tied, gradients)
            self.loss = writer.share_loss(self.layout.loss_ranks[0], self.loss)
            self._take_numbers()
        carries = self.frozen.carries() if self.frozen is not None else {}
        results: tuple[Any, ...] = (self.loss, list(gradients.values()))
        results += (list(carries.values()),) if self.frozen is not None else ()
        writer.graph.output((*results, list(self.parts.values())) if self.parts else results)
        writer.graph.lint()
        held = {str(n.target) for graph in writer.modules.values() for n in graph.nodes if n.op == "get_attr"}
        held |= {g.name for g in self.tied if writer.rank in g.holders}
        names = {name: writer.step.state[name] for name in sorted(held)}
        nexts = writer.next_batch.inputs if writer.next_batch else ()
        carried = tuple(carried_name(*key) for key in writer.carried)
        mine = [reduction for reduction in self.reductions.values() if writer.rank in reduction.ranks]
        refreshed = tuple(n for of in mine for n in of.parameters if n not in of.owned(writer.rank))
        others = (of.others(writer.rank) for of in self.gatherings.values() if writer.rank in of.ranks)
        gathered = tuple(dict.fromkeys(name for names in others for name in names))
        return RankProgram(
            writer.rank, writer.graph, writer.modules, writer.batch.inputs, tuple(gradients), names,
            nexts, carried, tuple(carries), self.frozen is not None, writer.scaled, refreshed, gathered,
            tuple(self.parts),
        )  # fmt: skip

    def _act(self, action: Action, ahead: Sequence[Action]) -> None:
        emit = {"F": self._forward, "T": self._forward, "B": self._backward, "I": self._backward, "W": self._weight}
        emit["R"] = self._reduce
        for following in ahead:
            self.writer.post_all(following)
        self._await(action)
        emit[action.kind](action)

    def _gather(self, action: Action | None) -> None:
        """Start to bring the parameters here that are awaited soon: of turns in which this rank has nothing to do, one
        at a time."""
        for turn in self.turns.started.get(action, ()):
            for idle in self.turns.idle_before(action, turn):
                self._wait_gathered(idle)
            gathering = self.gatherings[turn.ranks, turn.number]
            values = self.writer.parameters(f"stage_{turn.stage}_parameters", gathering.parameters)
            args = (self.writer.transport, values, [*turn.ranks], gathering.edge, [*gathering.owners])
            node = self.gathering[turn.number] = self.writer.call(ops.gather, args, f"gathering_{turn.stage}")
            node.meta["gathering"] = gathering

    def _await(self, action: Action | None) -> None:
        for turn in self.turns.awaited.get(action, ()):
            self._wait_gathered(turn)

    def _wait_gathered(self, turn: Turn) -> None:
        """Once."""
        started = self.gathering[turn.number]
        if started.target is not ops.wait_gathered:
            self.gathering[turn.number] = self.writer.call(ops.wait_gathered, (started,), f"weights_{turn.stage}")

    def _refresh(self) -> None:
        """Start to bring the parameters of this rank's stages from the replicas that train them, first stages first."""
        for (stage, _), reduction in sorted(self.reductions.items()):
            if self.writer.rank not in reduction.ranks or reduction.values_edge < 0:
                continue
            values = self.writer.parameters(f"stage_{stage}_parameters", reduction.parameters)
            args = (self.writer.transport, values, [*reduction.ranks], reduction.values_edge, [*reduction.owners])
            self.refreshing[stage] = self.writer.call(ops.broadcast, args, f"refreshing_{stage}")
            self.refreshing[stage].meta["reduction"] = reduction

    def _refreshed(self, stage: int) -> None:
        self.writer.call(ops.wait_values, (self.refreshing.pop(stage),), f"refreshed_{stage}")

    def _forward(self, action: Action) -> None:
        key = action.kind, action.stage
        border = self.layout.border(key, action.microbatch)
        for stage, node in [*self.refreshing.items()] if action.kind == "F" else ():
            if stage == action.stage or not border.state.keys().isdisjoint(node.meta["reduction"].parameters):
                self._refreshed(stage)
        args = tuple(self.writer.read(name, action.microbatch) for name in border.unit.reads)
        returns, saved = self._call(key, "forward", args, ("returns", "saved"), action)
        for index, value in enumerate(border.returns):
            is_loss = value.name == self.layout.loss
            node = self.writer.item(returns, index, name_at("loss" if is_loss else value.name, action.microbatch))
            node.meta["val"] = shape_only(value.shape, value.dtype)
            self.writer.values[value.name, action.microbatch] = node
            if is_loss and not self.numbers:
                weighted = (self.loss, node, self.weights[action.microbatch])
                self.loss = self.writer.call(ops.add_weighted, weighted, "loss_total")
            output = self.outputs.get(value.name)
            if output is not None and not output.is_number and not self._is_gone(output):
                self.parts[output.name, action.microbatch] = node
        if self.numbers and any(value.name == self.layout.loss for value in border.returns):
            self._add_numbers(action.microbatch)
        if border.has_backward:
            self.saved[Action(action.stage, "B", action.microbatch)] = saved
        for message in self.writer.sends_after(action):
            self.writer.send(message, self.writer.values[message.value, message.microbatch])

    def _add_numbers(self, microbatch: int) -> None:
        """The loss and the numbers beside it, of one more micro-batch."""
        names = [self.layout.loss, *(number.value for number in self.numbers)]
        weights = [self.weights[microbatch], *(number.weights[microbatch] for number in self.numbers)]
        added = (self.loss, [self.writer.values[name, microbatch] for name in names], weights)
        self.loss = self.writer.call(ops.add_numbers, added, "loss_total")
        self.loss.meta["val"] = shape_only(self.writer.step.told.shape, self.writer.step.told.dtype)

    def _take_numbers(self) -> None:
        """The loss, and what came with it."""
        if not self.numbers:
            return
        total, dtype = self.loss, self.writer.step.capture.result.meta["val"].dtype
        self.loss = self.writer.call(ops.number, (total, 0, dtype), "whole_loss")
        self.loss.meta["val"] = shape_only((), dtype)
        for index, number in enumerate(self.numbers, start=1):
            node = self.writer.call(ops.number, (total, index, number.dtype), f"whole_{number.value}")
            node.meta["val"] = shape_only((), number.dtype)
            if not self._is_gone(number):
                self.parts[number.name, WHOLE] = node

    def _is_gone(self, output: Output) -> bool:
        """Whether it is made of what this form of the step leaves out."""
        nodes = self.writer.step.capture.nodes

        def sources(name: str) -> list[str]:
            return [source.name for source in nodes[name].all_input_nodes] if nodes[name].meta.get("extra") else []

        return any(name in self.layout.zeros for name in reached([output.value], sources))

    def _backward(self, action: Action) -> None:
        key, microbatch = ("F", action.stage), action.microbatch
        border = self.layout.border(key, microbatch)
        tangents = [self._tangent(value, microbatch) for value in border.returns if value.requires_grad]
        args = (self.saved.pop(Action(action.stage, "B", microbatch)), *tangents)
        if action.kind == "I" and border.splits:
            input_grads, kept = self._call(key, "backward_input", args, ("input_grads", "kept"), action)
            self.saved[Action(action.stage, "W", microbatch)] = kept
        else:
            input_grads, new = self._call(key, "backward", args, ("input_grads", "weight_grads"), action)
            self._accumulate(action.stage, border.weight_grads, new)
        reads = {value.name: value for value in border.reads}
        for index, name in enumerate(border.input_grads):
            node = self.writer.item(input_grads, index, name_at(f"grad_{name}", microbatch))
            node.meta["val"] = shape_only(reads[name].shape, reads[name].dtype)
            self.writer.gradients.setdefault((name, microbatch), []).append(node)
        for message in self.writer.sends_after(action):
            self.writer.send(message, self.writer.summed(message.value, microbatch))

    def _weight(self, action: Action) -> None:
        key = "F", action.stage
        (new,) = self._call(key, "backward_weight", (self.saved.pop(action),), ("weight_grads",), action)
        self._accumulate(action.stage, self.layout.border(key, action.microbatch).weight_grads, new)

    def _call(
        self, key: Key, part: str, args: tuple[fx.Node, ...], results: tuple[str, ...], action: Action
    ) -> list[fx.Node]:
        """Call one of a unit's graphs; its results are lists."""
        graphs = self.writer.step.graphs(key, self.layout.sizes[action.microbatch])
        name = graph_name(self.layout.sizes, graphs.border, part)
        turn = self.turns.of.get(action)
        whole = () if turn is None else (self.gathering[turn.number],)
        result = self.writer.call_module(name, getattr(graphs, part), (*args, *whole))
        return [self.writer.item(result, i, f"{kind}_{action}") for i, kind in enumerate(results)]

    def _tangent(self, value: Value, microbatch: int) -> fx.Node:
        """The gradient of a returned value: the loss's own weight, or the sum of what its readers give."""
        if value.name == self.layout.loss:
            return self.writer.loss_gradient(value, float(self.weights[microbatch]), name_at("grad_loss", microbatch))
        found = self.writer.gradient(value.name, microbatch)
        if found is not None:
            return found
        return self.writer.filled(value, 0.0, name_at(f"no_grad_{value.name}", microbatch))

    def _accumulate(self, stage: int, names: tuple[str, ...], new: fx.Node) -> None:
        if not names:
            return
        self.stages[stage] = None
        if stage in self.totals:
            assert self.totals[stage][0] == names, f"stage {stage} trains the same for every micro-batch"
            new = self.writer.call(ops.accumulate, (self.totals[stage][1], new), f"grads_{stage}")
        self.totals[stage] = names, new

    def _reduce(self, action: Action) -> None:
        """Start to sum this replica's gradients with the others'."""
        reduction = self.reductions.get((action.stage, action.turn))
        if reduction is None:  # all its parameters are tied to other stages'
            return
        in_turn = bool(reduction.owners) and sums_in_turn(self.layout.summing)  # so that what is sent for them goes
        for other in [*self.reducing]:
            if in_turn or other == action.stage:
                self._wait_reduced(other)
        given, rest = self._given(reduction)
        args = (self.writer.transport, given, list(reduction.ranks), reduction.edge)
        function, owners = (ops.reduce_scatter, ([*reduction.owners],)) if reduction.owners else (ops.all_reduce, ())
        node = self.reducing[action.stage] = self.writer.call(function, (*args, *owners), f"reducing_{action.stage}")
        node.meta["reduction"] = reduction
        if rest:
            self._keep(action.stage, rest)

    def _given(self, reduction: Reduction) -> tuple[Any, Mapping[str, fx.Node]]:
        """The gradients of a stage that have come since the last reduction: those to be summed, zeros where there are
        none, and the others by name."""
        self.stages[reduction.stage] = None
        if reduction.stage not in self.totals:
            state = self.layout.border(("F", reduction.stage), 0).state
            return [
                self.writer.filled(state[n], 0.0, f"no_grad_{n.replace('.', '_')}") for n in reduction.parameters
            ], {}
        names, total = self.totals.pop(reduction.stage)
        if reduction.parameters == names:
            return total, {}
        items = dict(self._named(names, total))
        given = [items.pop(name) for name in reduction.parameters]
        return given, items

    def _keep(self, stage: int, new: Mapping[str, fx.Node]) -> None:
        """Of weights that other stages have, too."""
        nodes: Any = [*new.values()]
        if stage in self.rest:
            nodes = self.writer.call(ops.accumulate, (self.rest[stage][1], nodes), f"tied_grads_{stage}")
        self.rest[stage] = tuple(new), nodes

    def _wait_reduced(self, stage: int) -> None:
        """Wait for the sums of a stage that have been started, and add them to those of earlier turns."""
        started = self.reducing.pop(stage)
        reduction: Reduction = started.meta["reduction"]
        new = self.writer.call(ops.wait_reduced, (started,), f"reduced_{stage}")
        new.meta["reduction"] = reduction
        if stage not in self.sums:
            self.sums[stage] = new
        elif reduction.owned(self.writer.rank):
            self.sums[stage] = self.writer.call(ops.accumulate, (self.sums[stage], new), f"grads_{stage}")
            self.sums[stage].meta["reduction"] = reduction

    def _named(self, names: Sequence[str], gradients: fx.Node) -> Iterator[tuple[str, fx.Node]]:
        for index, name in enumerate(names):
            node = self.writer.item(gradients, index, f"grad_{name.replace('.', '_')}")
            node.meta["val"] = self.writer.step.state[name]
            yield name, node

    def _weight_gradients(self) -> dict[str, fx.Node]:
        """The gradient of every parameter that this rank trains, summed over its stages, and over replicas where
        reduced."""
        parts: dict[str, list[fx.Node]] = {}
        for stage in self.stages:
            if stage in self.reducing:
                self._wait_reduced(stage)
            found = list[tuple[tuple[str, ...], Any]]()
            if stage in self.sums:
                reduction: Reduction = self.sums[stage].meta["reduction"]
                found.append((reduction.owned(self.writer.rank), self.sums[stage]))
            found += [of[stage] for of in (self.rest, self.totals) if stage in of]
            for names, nodes in found:
                pairs = self._named(names, nodes) if isinstance(nodes, fx.Node) else zip(names, nodes, strict=True)
                for name, node in pairs:
                    parts.setdefault(name, []).append(node)
        return {name: self.writer.add(nodes) for name, nodes in parts.items()}
