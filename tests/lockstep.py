"""The reference of displaced sampling: all patches one after the other in one thread, without messages or forms.

Patch graphs run up to their next exchange, patch by patch; then each is given, of every patch, its value of this step
(its own, and others' where the exchange is fresh) or of the step before, moved on where programs advance.
"""

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.plan import displaced_ops, row_ops
from passes.rows.layout import Rows
from passes.sampling.exchanges import Exchange
from passes.sampling.fresh import CONSTANTS
from passes.sampling.messages import halo_of
from passes.sampling.patch_graph import patch_graph
from passes.sampling.patches import all_own, patches_of
from passes.sampling.text import shared_text, text_graph
from passes.sampling.times import late_values
from tests.row_programs import RowPrograms

Run = Generator[tuple[fx.Node, Tensor], Tensor, Tensor]
Latest = dict[tuple[str, str], list[Tensor]]


class Lockstep:
    """The patches of `programs`, and what each exchange has seen in the step before."""

    def __init__(self, programs: RowPrograms) -> None:
        self.patches = patches_of(programs.rows, programs.bounds)
        self.graphs = [patch_graph(programs.rows, patch) for patch in self.patches]
        if programs.step.plan.text_first:
            self.patches = patches_of(programs.rows, programs.bounds, "first")
            shared = shared_text(programs.rows, late_values(programs.rows.sized, programs.traced.rows))
            made = [text_graph(programs.rows, shared, self.patches, patch.index) for patch in self.patches]
            self.graphs = [graph for graph in made if graph is not None]
            assert len(self.graphs) == len(self.patches)
        self.norms, self.state, self.rows = programs.step.plan.how.norms, programs.state(), programs.rows
        self.advance = programs.step.plan.how.advance
        self.before: Latest = {}
        self.earlier: Latest = {}

    def step(self, tensors: Mapping[str, Tensor], displaced: bool) -> list[Tensor]:
        """Every patch's prediction; the first step is never displaced."""
        runs = [self._run(graph, tensors) for graph in self.graphs]
        given = [next(run) for run in runs]
        now: Latest = {}
        while True:
            exchange: Exchange = given[0][0].meta["exchange"]
            key = exchange.key
            now[key] = [self._told(node, value) for node, value in given]
            crosses = displaced and self.before and exchange.kind != "prediction"
            old = self.before[key] if crosses else None
            ends, told = [], given
            given = []
            for index, run in enumerate(runs):
                node, value = told[index]
                try:
                    given.append(run.send(self._result(node, value, index, now[key], old)))
                except StopIteration as stop:
                    ends.append(stop.value)
            if ends:
                self.before, self.earlier = now, self.before or now
                return ends

    def _run(self, graph: fx.Graph, tensors: Mapping[str, Tensor]) -> Run:
        env: dict[fx.Node, Any] = {}
        for node in graph.nodes:
            if node.op == "placeholder":
                name = self.rows.sized.capture.tensors.get(node.name, CONSTANTS + node.name)
                env[node] = tensors[node.name] if node.meta["kind"] == "input" else self.state[name]
            elif node.op == "output":
                return env[node.args[0]]  # type: ignore[no-any-return]
            elif "exchange" in node.meta:
                env[node] = yield node, env[node.args[0]]
            else:
                args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), env.__getitem__)
                with torch.no_grad():
                    env[node] = node.target(*args, **kwargs)
        raise AssertionError("no output")

    def _told(self, node: fx.Node, value: Tensor) -> Tensor:
        return row_ops.moments(value, node.args[1]) if node.meta["exchange"].kind == "moments" else value  # type: ignore[arg-type]

    def _result(
        self, node: fx.Node, value: Tensor, index: int, now: Sequence[Tensor], old: Sequence[Tensor] | None
    ) -> Tensor:
        exchange: Exchange = node.meta["exchange"]
        if exchange.kind == "moments":
            return self._moments(node, index, now, old)
        if old is not None and self.advance and getattr(node.args[0], "target", None) is not row_ops.power:
            old = self._advanced(node, index, now)
        latest = [now[i] if old is None or i == index else old[i] for i in range(len(now))]
        if exchange.kind == "sum":
            return row_ops.add_up(latest)
        assert exchange.state is not None
        if exchange.kind == "halo":
            return self._halo(node, index, latest)
        return self._joined(exchange.state, value, index, latest)

    def _moments(self, node: fx.Node, index: int, now: Sequence[Tensor], old: Sequence[Tensor] | None) -> Tensor:
        state = node.meta["exchange"].state
        counts = [patch.size(state) for patch in self.patches]  # in one unit for all, which is enough
        if old is None or self.norms == "sync":
            return row_ops.merge_moments(now, counts)
        latest = [now[i] if i == index else old[i] for i in range(len(now))]
        if self.norms == "separate":
            return now[index]
        if self.norms == "merged":
            return row_ops.merge_moments(latest, counts)
        return displaced_ops.corrected(latest, [old[index]], [index], counts)[0]

    def _advanced(self, node: fx.Node, index: int, now: Sequence[Tensor]) -> list[Tensor]:
        key = node.meta["exchange"].key
        before, earlier = self.before[key], self.earlier[key]
        own = [self._sent(node, index, values[index]) for values in (now, before, earlier)]
        if not own[0]:
            return before
        latest, last, first = (torch.cat([value.flatten() for value in values]) for values in own)
        alpha = displaced_ops.kept_going(latest - last, last - first)
        return [displaced_ops.advanced(old, old - older, alpha) for old, older in zip(before, earlier, strict=True)]

    def _sent(self, node: fx.Node, index: int, value: Tensor) -> list[Tensor]:
        """What of its value a patch tells the others."""
        exchange: Exchange = node.meta["exchange"]
        state = exchange.state
        if exchange.kind == "halo":
            sizes = [halo_of(node, patch, self.patches).get(index) for patch in self.patches if patch.index != index]
            assert state is not None
            return [value.narrow(state.dim, start % value.shape[state.dim], n) for start, n in filter(None, sizes)]
        if state is None or not all_own(self.patches):
            return [value]
        sizes = [part.outer * self.patches[index].of_part(part) for part in state.parts]
        pieces = value.split(sizes, state.dim)
        rows = [piece for piece, part in zip(pieces, state.parts, strict=True) if part.kind == "rows"]
        return [torch.cat(rows, state.dim)]

    def _halo(self, node: fx.Node, index: int, latest: Sequence[Tensor]) -> Tensor:
        args: Any = node.args
        _, dim, above, below, end, fill = args
        start = sum([value.shape[dim] for value in latest[:index]])
        stop = start + latest[index].shape[dim]
        below = end if index == len(latest) - 1 else below
        whole = torch.cat(list(latest), dim)
        border = whole.new_full([*whole.shape[:dim], 1, *whole.shape[dim + 1 :]], fill)
        rows = [row if 0 <= row < whole.shape[dim] else whole.shape[dim] for row in range(start - above, stop + below)]
        return torch.cat([whole, border], dim).index_select(dim, torch.tensor(rows))

    def _joined(self, state: Rows, value: Tensor, index: int, latest: Sequence[Tensor]) -> Tensor:
        """Part by part: of rows every patch's, of the others one's own, or their owner's."""
        sizes = [[part.outer * patch.of_part(part) for part in state.parts] for patch in self.patches]
        pieces = [one.split(size, state.dim) for one, size in zip(latest, sizes, strict=True)]
        joined = []
        for place, part in enumerate(state.parts):
            if part.kind == "whole":
                joined.append(pieces[index if self.patches[index].owns else 0][place])
                continue
            copies = [piece[place].unflatten(state.dim, (part.outer, -1)) for piece in pieces]
            joined.append(torch.cat(copies, state.dim + 1).flatten(state.dim, state.dim + 1))
        return torch.cat(joined, state.dim)
