"""The units of a step and their graphs, each traced when it is first asked for: a rank's process traces its own alone.

stages [0, 3), [3, 8)    ->    ("F", 0), ("F", 1)           stages, at every micro-batch size
components vae, text           ("T", 0), ("T", 1)           components, in the step that trains on their batch
layers of them                 ("L", 0), ("L", 1), ...      layers, in the step before, at the samples of their pieces
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch
from torch import fx

from fxpipe.capture import Capture, private
from fxpipe.capture.fingerprint import graph_fingerprint
from fxpipe.capture.outputs import is_number
from fxpipe.plan.actions import Action, Work
from fxpipe.plan.block_graph import BlockGraph
from fxpipe.plan.outputs import Output
from fxpipe.plan.staged import Staged
from passes.batch import BatchPlan
from passes.batch.layout import BatchLayout, State
from passes.costs.frozen_layers import LayerValue, layer_values
from passes.costs.gradient_flow import GradientFlow
from passes.costs.local import STATE_KINDS
from passes.costs.work import StepWork
from passes.lowering.borders import Border, border
from passes.lowering.joint import Recompute, StageGraphs
from passes.lowering.stage_graphs import trace_stage
from passes.lowering.state_updates import held_whole
from passes.lowering.units import CapturedUnit, Value, make_units, state_name, whole_batch_unit
from passes.step_ops.sharding import owners
from passes.step_ops.units import Units

Key = tuple[str, int]
"""("F", stage), ("T", component), ("L", layer of a component) or ("whole batch", 0)."""
WHOLE_BATCH = "whole batch", 0


@dataclass(frozen=True, eq=False)
class StepGraphs:
    """A captured step cut into stages, for micro-batches of `sizes` samples.

    `layers` are the nodes of every layer of every component, as the next batch's frozen work is taken apart.
    """

    capture: Capture
    batch: BatchPlan
    known: StepWork
    staged: Staged
    sizes: tuple[int, ...]
    layers: tuple[tuple[tuple[str, ...], ...], ...]
    device: torch.device
    _borders: dict[tuple[Key, int], Border] = field(default_factory=dict)
    _traced: dict[tuple[Key, int], StageGraphs] = field(default_factory=dict)

    @property
    def graph(self) -> BlockGraph:
        return self.known.graph

    @property
    def flow(self) -> GradientFlow:
        return self.known.flow

    @cached_property
    def crossing(self) -> Units:
        """What stages and components read of each other."""
        return Units(self, self.staged)

    @cached_property
    def layer_values(self) -> Mapping[str, LayerValue]:
        """What the layers of components make for others."""
        return {value.name: value for value in layer_values(self.capture, self.graph, self.layers)}

    @cached_property
    def work(self) -> Work:
        """What a schedule of the step must contain, frozen work in every micro-batch."""
        return self.known.of(self.staged, len(self.sizes))

    @property
    def batch_size(self) -> int:
        return sum(self.sizes)

    @cached_property
    def fingerprint(self) -> str:
        """Of all that the programs of a schedule are made from."""
        blocks = [block.nodes for block in self.graph.blocks]
        text = (
            f"{graph_fingerprint(self.capture.graph)} {blocks} {self.layers} {self.staged} {self.sizes} {self.device}"
        )
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def loss_weights(self) -> list[float]:
        """The factor of every micro-batch's loss in the whole batch's."""
        return [size / self.batch_size if self.batch.loss_scale == "mean" else 1.0 for size in self.sizes]

    @cached_property
    def has_half_gradients(self) -> bool:
        """Whether some gradient is in float16, too small a type for most: the loss is then scaled before its backward.

        Not where a trained weight is in float16 itself, which no scaler takes; one that is read without gradients alone
        is none.
        """
        wanted = {node for node in self.capture.graph.nodes if node.meta.get("requires_grad")}
        trained = [node for node in wanted if node.op != "placeholder" or not wanted.isdisjoint(node.users)]
        types = {node.op == "placeholder": set[torch.dtype]() for node in trained}
        for node in trained:
            types[node.op == "placeholder"] |= {tensor.dtype for tensor in private.tensors_in(node.meta.get("val"))}
        return torch.float16 in types.get(False, ()) and torch.float16 not in types.get(True, ())

    @cached_property
    def outputs(self) -> tuple[Output, ...]:
        """What the step returns beside the loss."""
        sinks = self.capture.outputs
        return tuple(self._output(name, sinks[name], state) for name, state in self.batch.outputs.items())

    def _output(self, name: str, sink: fx.Node, state: State) -> Output:
        weights = [(size / self.batch_size) ** state.power for size in self.sizes]
        where = state.layout
        if where is None and state.form == "value":  # the same for every sample
            weights[1:] = [0.0] * (len(weights) - 1)
        samples = None if where is None else (where.dim, where.outer, where.inner)
        return Output(name, sink.name, tuple(weights), samples, sink.meta["val"].dtype, is_number(sink))

    @cached_property
    def told(self) -> Value:
        """What ranks tell each other at the end of a step: the loss, or a row of it and the numbers beside it."""
        loss, numbers = self.capture.result, [output for output in self.outputs if output.is_number]
        if numbers:
            return Value(loss.name, (1 + len(numbers),), torch.float64, False)
        return Value(loss.name, (), loss.meta["val"].dtype, False)

    @cached_property
    def units(self) -> Mapping[Key, CapturedUnit]:
        """Stages that are not empty, and components."""
        components = {("T", i): (f"frozen_{i}", c.nodes) for i, c in enumerate(self.graph.components)}
        return self._units({**components, **self._stages})

    @cached_property
    def layer_units(self) -> Mapping[Key, CapturedUnit]:
        """The layers of components, numbered through."""
        flat = [nodes for of_component in self.layers for nodes in of_component]
        groups = {("L", i): (f"frozen_{i}", nodes) for i, nodes in enumerate(flat)}
        return {key: unit for key, unit in self._units({**groups, **self._stages}).items() if key[0] == "L"}

    @cached_property
    def first_layer(self) -> list[int]:
        """The number of every component's first layer."""
        return [0, *accumulate(map(len, self.layers))]

    def layers_of(self, piece: Action) -> list[Key]:
        """The layers of a piece of frozen work, in order."""
        return [("L", self.first_layer[piece.stage] + layer) for layer in range(*piece.layers)]

    @cached_property
    def _stages(self) -> dict[Key, tuple[str, Sequence[str]]]:
        stages = {s: self.staged.blocks(s) for s in range(self.staged.num_stages)}
        nodes = {s: [name for b in blocks for name in self.graph.blocks[b].nodes] for s, blocks in stages.items()}
        return {("F", s): (f"stage_{s}", names) for s, names in nodes.items() if names}

    def _units(self, groups: Mapping[Key, tuple[str, Sequence[str]]]) -> Mapping[Key, CapturedUnit]:
        made = make_units(self.capture, groups.values(), self.graph.local, self.batch.whole_batch)
        return dict(zip(groups, made, strict=True))

    @cached_property
    def whole_batch(self) -> CapturedUnit | None:
        """What computes values once for the whole batch, where some unit reads such."""
        reads = {name for unit in (*self.units.values(), *self.layer_units.values()) for name in unit.reads}
        wanted = [name for name in self.batch.whole_batch if name in reads]
        return whole_batch_unit(self.capture, wanted, self.graph.local) if wanted else None

    def unit(self, key: Key) -> CapturedUnit:
        if key == WHOLE_BATCH:
            assert self.whole_batch is not None, "nothing is computed for the whole batch"
            return self.whole_batch
        return (self.layer_units if key[0] == "L" else self.units)[key]

    def border(self, key: Key, size: int) -> Border:
        """What comes into a unit and goes out at so many samples; nothing is traced."""
        if (key, size) not in self._borders:
            self._borders[key, size] = border(self.capture, self.known.flow, self.unit(key), size)
        return self._borders[key, size]

    def graphs(self, key: Key, size: int) -> StageGraphs:
        """A unit's graphs at so many samples."""
        if (key, size) not in self._traced:
            self._traced[key, size] = trace_stage(
                self.capture,
                self.border(key, size),
                self.device,
                self.recompute(key),
                tuple(self.gathered.get(key[1], ())) if key[0] == "F" else (),
            )
        return self._traced[key, size]

    def recompute(self, key: Key) -> Recompute:
        """What a unit's backward computes again."""
        if key[0] != "F":
            return Recompute()
        blocks = self.graph.blocks
        runs = (range(*run) for run in self.staged.recomputed(key[1]))
        return Recompute(tuple(frozenset(n for b in run for n in blocks[b].nodes) for run in runs), self.graph.local)

    @cached_property
    def gathered(self) -> Mapping[int, Mapping[str, int]]:
        """By stage with replicas, where weights are shared out over these: the owners of the parameters that no other
        stage and no component reads, trained and frozen ones in equal shares each."""
        staged, own = self.staged, dict[int, dict[str, int]]()
        if not staged.gathered:
            return {}
        readers = Counter(name for key in self.units for name in self.border(key, self.sizes[0]).state)
        parameters = {state_name(self.capture, n.name) for n in self._placeholders if n.meta["kind"] == "parameter"}
        parameters -= held_whole(self.capture)
        for stage, ranks in enumerate(staged.stage_ranks):
            if len(ranks) > 1 and staged.blocks(stage):
                state = self.border(("F", stage), self.sizes[0]).state.items()
                own[stage] = {n: value.num_bytes for n, value in state if readers[n] == 1 and n in parameters}
        trained = {name for stage in own for name in self.border(("F", stage), self.sizes[0]).weight_grads}
        found = owners({s: {n: b for n, b in of.items() if n in trained} for s, of in own.items()}, staged.stage_ranks)
        rest = {s: {n: b for n, b in of.items() if n not in trained} for s, of in own.items()}
        found |= owners(rest, staged.stage_ranks)
        return {stage: {name: found[name] for name in of} for stage, of in own.items() if of}

    @property
    def _placeholders(self) -> Sequence[fx.Node]:
        return self.capture.graph.find_nodes(op="placeholder")

    def inputs_for(self, reads: Collection[str]) -> list[str]:
        """The inputs among what is read, and those that are needed for it."""
        wanted, whole = set(reads), self.whole_batch
        if whole is not None and wanted.intersection(whole.returns):
            wanted.update(whole.reads)
        return [n.name for n in self._placeholders if n.meta["kind"] == "input" and n.name in wanted]

    def samples(self, name: str) -> BatchLayout | None:
        """Where the samples of a whole-batch value lie; None where all share it."""
        layout = self.batch.layouts[name]
        assert not isinstance(layout, tuple), f"{name} is a single value"
        return layout

    @cached_property
    def state(self) -> dict[str, torch.Tensor]:
        """Shapes and types of parameters, buffers and constants by name."""
        found = {}
        for node in self._placeholders:
            if node.meta["kind"] in STATE_KINDS:
                value = node.meta["val"]
                found[state_name(self.capture, node.name)] = torch.empty(value.shape, dtype=value.dtype, device="meta")
        return found
