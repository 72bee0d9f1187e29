"""A call of so many samples, analysed as far as planning or lowering asks: what both must see alike."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from itertools import chain
from typing import Any, TypeVar, TypeVarTuple

import numpy as np
import torch
from torch import fx

from fxpipe.capture.fingerprint import graph_fingerprint
from fxpipe.capture.reach import reached
from fxpipe.cluster import Cluster
from fxpipe.costs.model import CostModel
from fxpipe.costs.polynomials import Floats
from fxpipe.errors import CompileError
from fxpipe.plan.sample_grid import Grid
from fxpipe.plan.sample_plan import AttentionKind
from fxpipe.sampling.links import Links
from fxpipe.sampling.seconds import operation_seconds
from fxpipe.sampling.step import Traced
from passes.batch import require_independent
from passes.rows import RowPlan, analyse
from passes.sampling.alike import Alike, PatchForm, ends_apart
from passes.sampling.alike import alike as alike_but_for_units
from passes.sampling.attention import Shared, alike, layers, with_most_heads
from passes.sampling.groups import Span
from passes.sampling.lives import shown
from passes.sampling.patch_graph import attention_piece
from passes.sampling.patches import Patch, even_bounds, patches_of
from passes.sampling.stages import LateBlocks, StageLine, StageSpan, late_blocks, line_of, num_blocks, stage_spans
from passes.sampling.text import alike as exchange_alike
from passes.sampling.text import has_text, one_of_every_sort, shared_text, text_graph
from passes.sampling.times import CALL, PATCH, binding_times, inputs_of_call, late_values
from passes.sampling.work import PatchWork, Tellers, graph_work, patch_work, value_bytes, with_layers

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def _once(method: Callable[["SampleCase", *Ts], T]) -> Callable[["SampleCase", *Ts], T]:
    """What a method finds of some arguments is found once, for all numbers of samples of a call."""

    @wraps(method)
    def known(case: "SampleCase", *args: *Ts) -> T:
        return case.found_once((method.__name__, *args), lambda: method(case, *args))

    return known


def _of_all_sizes(method: Callable[["SampleCase", *Ts], T]) -> Callable[["SampleCase", *Ts], T]:
    """What a method finds of one number of samples holds for all, and at every size of the image."""

    @wraps(method)
    def known(case: "SampleCase", *args: *Ts) -> T:
        of_all = case.traced.of_all_sizes
        if method.__name__ not in of_all:
            of_all[method.__name__] = method(case, *args)
        found: T = of_all[method.__name__]
        return found

    return known


@dataclass(frozen=True, eq=False)
class SampleCase:
    """A traced call with `num_samples` samples, and what its operations cost."""

    traced: Traced
    num_samples: int
    cost_model: CostModel
    _known: dict[Any, Any] = field(default_factory=dict)

    def of(self, num_samples: int) -> "SampleCase":
        """The call with another number of samples; what is known of both is found once."""
        return SampleCase(self.traced, num_samples, self.cost_model, self._known)

    def found_once(self, key: Any, make: Callable[[], T]) -> T:
        """What is found under this key, made where it is first asked for."""
        if key not in self._known:
            self._known[key] = make()
        found: T = self._known[key]
        return found

    @_once
    def rows(self, num_samples: int) -> RowPlan:
        """Where the rows lie, of so many of the samples."""
        traced, sized = self.traced, self.traced.sized
        known = sized if sized is not None and sized.batch_size == num_samples else None
        others: list[RowPlan] = self.found_once("row plans", list)
        others.append(analyse(traced.captured, traced.rows, num_samples, known, *others[-1:]))
        return others[-1]

    def rows_of(self, spans: Sequence[Span]) -> dict[int, RowPlan]:
        """By the number of samples of each span."""
        return {size: self.rows(size) for size in dict.fromkeys(stop - start for start, stop in spans)}

    @property
    @_of_all_sizes
    def dependent(self) -> CompileError | None:
        """Why its samples cannot be computed apart, if they cannot."""
        try:
            require_independent(self.traced.captured)
        except CompileError as error:
            return error
        return None

    def require_apart(self, groups: int) -> None:
        """Refuse groups of samples that need each other."""
        if self.dependent and 1 < groups <= self.num_samples:
            why = f"those of this call cannot be computed apart; use cfg=1. {self.dependent}"
            raise CompileError(f"{groups} groups of samples, but {why}")

    def runs(self, start: int, stop: int) -> list[Span]:
        """The samples that pass through stages one after the other: each by itself, if none needs another."""
        if self.dependent:
            return [(start, stop)]
        return [(sample, sample + 1) for sample in range(start, stop)]

    def group_size(self, grid: Grid) -> int:
        """Samples of the first group."""
        start, stop = grid.spans(self.num_samples)[0]
        return stop - start

    def run_size(self, grid: Grid) -> int:
        """Samples of the first run through stages."""
        start, stop = self.runs(*grid.spans(self.num_samples)[0])[0]
        return stop - start

    @cached_property
    def likes(self) -> Mapping[str, torch.Tensor]:
        """Shape and type of every input by the programs' names, on the meta device."""
        rows = self.rows(self.num_samples)
        return {name: rows.sized.nodes[name].meta["val"] for name in rows.inputs}

    @property
    def result_shape(self) -> tuple[int, ...]:
        return tuple(self.rows(self.num_samples).sized.result.meta["val"].shape)

    @cached_property
    def batched(self) -> Mapping[str, torch.Tensor]:
        """Those whose dimension 0 is the batch."""
        leaves = {leaf.name for leaf in self.traced.captured.inputs.leaves if leaf.batched}
        inputs = self.rows(self.num_samples).inputs
        return {name: like for name, like in self.likes.items() if inputs[name] in leaves}

    @_once
    def blocks(self, num_samples: int, count: int) -> LateBlocks:
        """What depends on the patch of so many samples, as about so many blocks, from which stages are made."""
        given = self.traced.rows, self.late(num_samples), self.node_seconds(num_samples)
        return late_blocks(self.rows(num_samples), *given, count)

    @_once
    def spans(
        self, num_samples: int, columns: int, fold: bool | None, speeds: tuple[float, ...]
    ) -> tuple[StageSpan, ...]:
        """Stages of so many samples for so many columns of ranks, of these speeds if these are not all the same."""
        return stage_spans(self.blocks(num_samples, num_blocks(columns)), columns, fold, speeds)

    def node_seconds(self, num_samples: int) -> dict[str, float]:
        """Of every operation on so many samples, by its name."""
        return {node.name: s for node, s in self.seconds(num_samples).items()}

    @_once
    def seconds(self, num_samples: int) -> dict[fx.Node, float]:
        return self._seconds(self.rows(num_samples).sized.graph)

    @_once
    def step_seconds(self, num_samples: int) -> tuple[Floats, Floats]:
        """Of all operations that are done in every step; of those on text alone, which one patch may have for all."""
        once = self.once(num_samples)
        of_text = self.shared_text(num_samples) if self.has_text(num_samples) else frozenset[str]()
        found = {name: s for name, s in self.node_seconds(num_samples).items() if name not in once}
        return (
            np.array([s for name, s in found.items() if name not in of_text]),
            np.array([s for name, s in found.items() if name in of_text]),
        )

    @_of_all_sizes
    def late(self, num_samples: int) -> frozenset[str]:
        """The values that depend on the patch."""
        return late_values(self.rows(num_samples).sized, self.traced.rows)

    def attention_seconds(self, num_samples: int, parts: int) -> dict[str, float]:
        """Of every layer of attention what one of so many patches takes at least, of whatever kind it is."""
        kernel, seconds = self.cost_model.moving_seconds(1, 1), self.node_seconds(num_samples)
        named = self.found_once(("attention", num_samples), lambda: [n.name for n in layers(self.rows(num_samples))])
        whole = {name: seconds.get(name, 0.0) for name in named}
        return {name: min(s, kernel) + max(s - kernel, 0.0) / parts for name, s in whole.items()}

    @_once
    def has_text(self, num_samples: int) -> bool:
        """Whether some value is rows and text in one sequence."""
        return has_text(self.rows(num_samples))

    def may_give_text(self, num_samples: int) -> bool:
        """Whether of three patches, one of every sort, the first one may have the text alone; then of more."""
        bounds = even_bounds(count := self.rows(num_samples).units.count, min(3, count))
        known, key = self.traced.of_all_sizes, f"text of {len(bounds) - 1} patches"
        if key not in known:
            known[key] = self.has_text(num_samples) and self.first_has_text(num_samples, bounds)
        return bool(known[key])

    def first_has_text(self, num_samples: int, bounds: Sequence[int], kinds: Sequence[AttentionKind] = ()) -> bool:
        """Whether the first of these patches may have the text of so many samples alone, told by one of every sort."""
        sorts = one_of_every_sort(len(bounds) - 1)
        graphs = [self.text_graph(num_samples, bounds, index, kinds) for index in sorts]
        made = [graph for graph in graphs if graph is not None]
        return len(made) == len(graphs) and exchange_alike(made)

    def text_graph(
        self, num_samples: int, bounds: Sequence[int], index: int, kinds: Sequence[AttentionKind] = ()
    ) -> fx.Graph | None:
        """What a patch of so many samples computes where the first one has the text; None where that cannot be."""
        kinds = tuple(kinds) if {*kinds} - {"gather"} else ()

        def made() -> fx.Graph | None:
            plan = self.rows(num_samples)
            patches = patches_of(plan, bounds, "first")
            return text_graph(plan, self.shared_text(num_samples), patches, index, kinds)

        return self.found_once(("text", num_samples, tuple(bounds), index, kinds), made)

    def work(
        self, num_samples: int, bounds: Sequence[int], index: int, text_first: bool | None,
        kinds: Sequence[AttentionKind] = (), for_all: bool = True, turns: int = 1,
    ) -> PatchWork:  # fmt: skip
        """What the patch of that index does with so many samples, one of those between `bounds`.

        `text_first`: whether the first one has the text alone; None of patches in turn, so many `turns` on every rank,
        which tell those of the same turn alone, and by the numbers of their ranks.
        `kinds`: of attention, which gathers where there are none; `for_all` as for `layer`.
        """
        plan, in_turn = self.rows(num_samples), text_first is None
        patches = patches_of(plan, bounds, "first" if text_first else "all")
        if in_turn:
            patches = [replace(one, owns=one.index % turns == 0) for one in patches]
        patch, count = patches[index], len(patches) // turns
        at_end = patch.stop == patch.count and self.found_once(("ends apart", num_samples), lambda: ends_apart(plan))
        where = num_samples, patch.owns or not self.has_text(num_samples), patch.is_whole, at_end
        told: tuple[object, ...] = (tuple(bounds), index)
        if in_turn:
            turn = index % turns
            sizes = (one.stop - one.first for one in patches[turn::turns])
            told = (*sizes, turn == 0, turn == turns - 1) if count > 1 else ()
        key = "work", where, patch.stop - patch.first, text_first, told

        # whichever was asked for first: others have the padding of one at the image's border, which takes longest
        like = patch if at_end else replace(patch, first=0, stop=1)

        def read() -> PatchWork:
            shared = frozenset[str]() if patch.owns else self.shared_text(num_samples)
            if patch.is_whole:  # the captured graph
                return graph_work(plan, plan.sized.graph, (), self.seconds(num_samples))
            beside = [patches] * count if not in_turn else _of_turn(plan, patches, index % turns, turns)
            others = self.found_once(("alike", where), lambda: self._alike(where, plan, like, shared))
            if others is not None:
                with suppress(ArithmeticError):  # then it has its own graph, too
                    return others.work(patch.stop - patch.first, beside, self._seconds)
            return patch_work(plan, patch, beside, shared, self._seconds)

        found = self.found_once(key, read)
        if not kinds:
            return found
        named, there = zip(layers(plan), kinds, strict=False), frozenset(found.owners.values())
        of = {n.name: (n.name, kind) for n, kind in named if kind != "gather" and n.name in there}
        if not of:
            return found
        given = num_samples, bounds, index, bool(text_first)
        return self.found_once(
            (*key, *of.values(), for_all),
            lambda: with_layers(found, {n: self.layer(*given, *one, for_all) for n, one in of.items()}),
        )

    def _alike(self, where: object, plan: RowPlan, patch: Patch, shared: frozenset[str]) -> Alike | None:
        """What patches there do; a graph of all operations is written at one size."""
        known: dict[object, PatchForm] = self.traced.of_all_sizes.setdefault("alike", {})
        found = alike_but_for_units(plan, patch, shared, known.get(where))
        if found is not None:
            known[where] = found.form
        return found

    @_once
    def shared_text(self, num_samples: int) -> frozenset[str]:
        """What is the first patch's where that has the text alone."""
        return shared_text(self.rows(num_samples), self.late(num_samples))

    def layer(
        self, num_samples: int, bounds: Sequence[int], index: int, text_first: bool, name: str, kind: AttentionKind,
        for_all: bool = True,
    ) -> PatchWork:  # fmt: skip
        """What the patch of that index does in one layer of attention of this kind; where patches share its heads, and
        it stands `for_all` of them, what the one does that has the most."""
        plan = self.rows(num_samples)
        if kind == "ulysses" and for_all:
            index = with_most_heads(plan.sized.nodes[name], len(bounds) - 1)
        patches = patches_of(plan, bounds, "first" if text_first else "all")

        def read() -> PatchWork:
            attended, piece = Shared({name: kind}, patches), attention_piece(plan, name)
            tellers = [patches] * len(patches)
            return patch_work(plan, patches[index], tellers, frozenset(), self._seconds, attended, piece)

        key = "layer", num_samples, tuple(bounds), index, text_first, alike(plan, plan.sized.nodes[name]), kind
        return self.found_once(key, read)

    def _seconds(self, graph: fx.Graph) -> dict[fx.Node, float]:
        return operation_seconds(self.cost_model, graph.nodes, self.found_once("seconds of calls", dict))

    @cached_property
    def of_call(self) -> frozenset[str]:
        """The inputs that are taken to stay as they are in a call."""
        return inputs_of_call(self.rows(self.num_samples), self.traced.rows)

    @_of_all_sizes
    def once(self, num_samples: int) -> frozenset[str]:
        """The operations that depend on a call's conditions alone, and are computed once in it."""
        plan = self.rows(num_samples)
        times = {plan.inputs[name]: CALL for name in inputs_of_call(plan, self.traced.rows)}
        found = binding_times(plan.sized, times | dict.fromkeys(self.traced.rows, PATCH))
        return frozenset(name for name, time in found.items() if time == CALL and name not in plan.inputs)

    def kept_bytes(self, num_samples: int, names: frozenset[str] | None = None, runs: int = 1) -> int:
        """Of what is computed once and read in every step, by these operations or by any: of so many runs, which share
        what no sample changes."""
        nodes, once = self.rows(num_samples).sized.nodes, self.once(num_samples)
        late = nodes.keys() - once if names is None else names - once
        read = (nodes[name] for name in once if any(user.name in late for user in nodes[name].users))
        kept, of_samples = (node for node in {*map(shown, read)} if node.name in once), self._of_samples(num_samples)
        return sum(value_bytes(node) * (runs if node.name in of_samples else 1) for node in kept)

    @_of_all_sizes
    def _of_samples(self, num_samples: int) -> frozenset[str]:
        """Of what is computed once, what each sample has its own of."""
        found, once = set(self.batched), self.once(num_samples)
        for name, read in self.rows(num_samples).sized.reads.items():
            if name in once and not found.isdisjoint(read):
                found.add(name)
        return frozenset(found)

    def links(self, cluster: Cluster, grid: Grid, shares: tuple[float, ...] = ()) -> Links:
        """A cluster's, as a grid's ranks use them; of what one group's patches tell those of each send `shares`."""
        return self.found_once(("links", cluster, grid, shares), lambda: Links(cluster, grid, shares))

    @_once
    def columns(
        self, num_samples: int, columns: int, spans: tuple[StageSpan, ...]
    ) -> tuple[StageLine, list[frozenset[str]]]:
        """Stages of so many samples; of every column their operations, and those before the patch that they need."""
        line, reads = line_of(self.blocks(num_samples, num_blocks(columns)), spans), self.rows(num_samples).sized.reads

        def needed(late: frozenset[str]) -> frozenset[str]:
            first = line.early.intersection(chain.from_iterable(map(reads.__getitem__, late)))
            return late.union(reached(first, lambda one: line.early.intersection(reads[one])))

        late = (frozenset[str]().union(*(s.nodes for s in line.stages if s.column == c)) for c in range(columns))
        return line, [*map(needed, late)]

    @_once
    def _of_graph(self, num_samples: int) -> str:
        return graph_fingerprint(self.rows(num_samples).sized.graph)

    def fingerprint(self, blocks: LateBlocks | None) -> str:
        """Of the call's graph with its sizes, the inputs that have rows, and the blocks: plans hold for no other."""
        text = [self._of_graph(self.num_samples), str(self.num_samples), str(dict(self.traced.rows))]
        text += [" ".join(block.nodes) for block in blocks.blocks] if blocks else []
        return hashlib.sha256("\n".join(text).encode()).hexdigest()[:12]


def _of_turn(plan: RowPlan, patches: Sequence[Patch], turn: int, turns: int) -> Tellers:
    """Of the patches of one turn what ranks beside each other have: theirs in all turns."""
    bands = patches_of(plan, [patches[0].first, *(patch.stop for patch in patches[turns - 1 :: turns])])
    now = [replace(patch, index=place) for place, patch in enumerate(patches[turn::turns])]
    return [[one if band.index == one.index else band for band in bands] for one in now] if len(now) > 1 else ()
