"""A call of so many samples, analysed as far as planning or lowering asks: what both must see alike."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from fxpipe.capture.fingerprint import graph_fingerprint
from fxpipe.costs.model import CostModel
from fxpipe.errors import CompileError
from fxpipe.plan.sample_grid import Grid
from fxpipe.sampling.seconds import operation_seconds
from fxpipe.sampling.step import Traced
from passes.batch import require_independent
from passes.rows import RowPlan, analyse
from passes.rows.sized import at_batch_size
from passes.sampling.groups import Span
from passes.sampling.stages import LateBlocks, late_blocks
from passes.sampling.text import Cut, first_has_text


@dataclass(frozen=True, eq=False)
class SampleCase:
    """A traced call with `num_samples` samples, and what its operations cost."""

    traced: Traced
    num_samples: int
    cost_model: CostModel

    @cached_property
    def _rows(self) -> dict[int, RowPlan]:
        return {}

    def rows(self, num_samples: int) -> RowPlan:
        """Where the rows lie, of so many of the samples."""
        if num_samples not in self._rows:
            self._rows[num_samples] = analyse(self.traced.captured, self.traced.rows, num_samples)
        return self._rows[num_samples]

    def rows_of(self, spans: Sequence[Span]) -> dict[int, RowPlan]:
        """By the number of samples of each span."""
        return {size: self.rows(size) for size in dict.fromkeys(stop - start for start, stop in spans)}

    @cached_property
    def dependent(self) -> CompileError | None:
        """Why its samples cannot be computed apart, if they cannot."""
        try:
            require_independent(self.traced.captured)
        except CompileError as error:
            return error
        return None

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
        nodes = at_batch_size(self.traced.captured, self.num_samples).nodes
        return {name: nodes[name].meta["val"] for name in self.rows(self.num_samples).inputs}

    @cached_property
    def batched(self) -> Mapping[str, torch.Tensor]:
        """Those whose dimension 0 is the batch."""
        leaves = {leaf.name for leaf in self.traced.captured.inputs.leaves if leaf.batched}
        inputs = self.rows(self.num_samples).inputs
        return {name: like for name, like in self.likes.items() if inputs[name] in leaves}

    def blocks(self, num_samples: int, count: int) -> LateBlocks:
        """What depends on the patch of so many samples, as about so many blocks, from which stages are made."""
        return late_blocks(self.rows(num_samples), self.traced.rows, self.node_seconds(num_samples), count)

    def node_seconds(self, num_samples: int) -> dict[str, float]:
        """Of every operation on so many samples, by its name."""
        seconds = operation_seconds(self.cost_model, self.rows(num_samples).sized.graph.nodes)
        return {node.name: s for node, s in seconds.items()}

    def first_has_text(self, num_samples: int, bounds: Sequence[int]) -> Cut | None:
        """Patches of so many samples with the text at the first, and their graphs; None where that cannot be."""
        key = num_samples, tuple(bounds)
        if key not in self._with_text:
            self._with_text[key] = first_has_text(self.rows(num_samples), self.traced.rows, bounds)
        return self._with_text[key]

    @cached_property
    def _with_text(self) -> dict[tuple[int, tuple[int, ...]], Cut | None]:
        return {}

    def fingerprint(self, blocks: LateBlocks | None) -> str:
        """Of the call's graph with its sizes, the inputs that have rows, and the blocks: plans hold for no other."""
        sized = self.rows(self.num_samples).sized
        text = [graph_fingerprint(sized.graph), str(self.num_samples), str(dict(self.traced.rows))]
        text += [" ".join(block.nodes) for block in blocks.blocks] if blocks else []
        return hashlib.sha256("\n".join(text).encode()).hexdigest()[:12]
