"""What every block costs at any number of samples, from the captured graph alone: seconds, weights, activations.

    block                      0          1          2             at 4 samples
    forward / backward ms      1.2 / 2.3  ...                      seconds of a stage: the sum over its blocks
    weights, trained           12 MB, 12 MB                        a tied weight: once per stage
    saved, or its inputs       80 MB, 20 MB                        a value that two blocks keep: once per stage

Planners sum over blocks; where blocks share values and weights, the bytes of a stage come from its set of blocks.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import sympy

from fxpipe.costs.block_values import BatchValue, Values, Weight
from fxpipe.costs.polynomials import Polynomials


@dataclass(frozen=True, slots=True)
class BlockSeconds:
    """Seconds of every block, and of every frozen component, for one micro-batch of `num_samples` samples."""

    num_samples: int
    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    input_gradient_seconds: tuple[float, ...]
    weight_gradient_seconds: tuple[float, ...]
    component_seconds: tuple[float, ...]

    @property
    def total(self) -> tuple[float, ...]:
        """Of forward and backward."""
        return tuple(f + b for f, b in zip(self.forward_seconds, self.backward_seconds, strict=True))


@dataclass(frozen=True, eq=False)
class LocalCosts:
    """Operations that belong to no block, by number: whoever reads their results computes them, a stage once.

    `of_block` and `of_component` are those that each needs, `at` the seconds of all by "F", "B", "I" and "W", as the
    letters of actions, at a number of samples.
    """

    of_block: tuple[frozenset[int], ...]
    of_component: tuple[frozenset[int], ...]
    at: Callable[[int], Mapping[str, Sequence[float]]]


@dataclass(frozen=True, eq=False)
class BlockCosts:
    """Costs by block and by component, in the order of the block graph. Made by `passes.costs.block_costs`.

    `at` gives the seconds of every block and component at a number of samples; `whole_seconds_at` those of what is
    computed on a whole batch of so many.
    """

    weights: tuple[Weight, ...]
    given: tuple[BatchValue, ...]
    values: Values
    num_components: int
    at: Callable[[int], BlockSeconds]
    local: LocalCosts | None = None
    whole_seconds_at: Callable[[int], float] = lambda num_samples: 0.0
    loss_bytes: int = 4

    @property
    def num_blocks(self) -> int:
        return len(self.values.kept)

    # -- weights

    @cached_property
    def parameter_bytes(self) -> tuple[int, ...]:
        """Bytes of the weights and buffers that each block reads; a tied one counts in every block that reads it."""
        return self._by_block(lambda weight: weight.num_bytes)

    @cached_property
    def trained_bytes(self) -> tuple[int, ...]:
        """Bytes of the weights that get a gradient, which is as large."""
        return self._by_block(lambda weight: weight.num_bytes * weight.trained)

    @cached_property
    def trained_elements(self) -> tuple[int, ...]:
        """Numbers in the weights that get a gradient, for optimizer states."""
        return self._by_block(lambda weight: weight.num_elements * weight.trained)

    @cached_property
    def component_bytes(self) -> tuple[int, ...]:
        """Bytes of each frozen component's weights."""
        sums = [0] * self.num_components
        for weight in self.weights:
            for component in weight.components:
                sums[component] += weight.num_bytes
        return tuple(sums)

    @cached_property
    def shared(self) -> Mapping[str, tuple[int, ...]]:
        """The weights that several blocks read, by name: two stages that have one each hold it and sum its gradient."""
        return {weight.name: weight.blocks for weight in self.weights if len(weight.blocks) > 1}

    def weights_of(self, blocks: Collection[int]) -> tuple[Weight, ...]:
        """The weights of a stage of these blocks, each once."""
        of_block = self._weights_of_block
        places = sorted({place for block in set(blocks) for place in of_block[block]})
        return tuple([self.weights[place] for place in places])

    @cached_property
    def _weights_of_block(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in range(self.num_blocks)]
        for place, weight in enumerate(self.weights):
            for block in weight.blocks:
                found[block].append(place)
        return found

    def _by_block(self, size: Callable[[Weight], int]) -> tuple[int, ...]:
        sums = [0] * self.num_blocks
        for weight in self.weights:
            for block in weight.blocks:
                sums[block] += size(weight)
        return tuple(sums)

    # -- activations

    @cached_property
    def saved_formulas(self) -> tuple[sympy.Expr, ...]:
        """Bytes that a micro-batch leaves in each block for the backward, as expressions of the batch.

        A value counts in the block that makes it, even where only another block's backward reads it; what frozen
        components make, in the first block whose backward does.
        """
        values = self.values
        terms: list[list[sympy.Expr]] = [[] for _ in values.kept]
        for value, (maker, num_bytes) in enumerate(zip(values.maker, values.num_bytes, strict=True)):
            keeping = [block for block, kept in enumerate(values.kept) if value in kept]
            if keeping:
                terms[keeping[0] if maker is None else maker].append(num_bytes)
        return tuple(sympy.Add(*of_block) for of_block in terms)

    @cached_property
    def input_formulas(self) -> tuple[sympy.Expr, ...]:
        """Bytes of what comes into each block, as expressions of the batch: all that is saved of a recomputed block.

        A value that several blocks read counts in each, one of a frozen component's in the first.
        """
        values = self.values
        seen: set[int] = set()
        sums = []
        for read in values.read:
            sums.append(sympy.Add(*(values.num_bytes[value] for value in read - seen)))
            seen |= {value for value in read if values.maker[value] is None}
        return tuple(sums)

    def saved_bytes(self, num_samples: int) -> tuple[int, ...]:
        """`saved_formulas` at a number of samples."""
        return tuple(map(int, self._saved.at(num_samples)))

    def saved_bytes_recomputed(self, num_samples: int) -> tuple[int, ...]:
        """`input_formulas` at a number of samples."""
        return tuple(map(int, self._inputs.at(num_samples)))

    def made_bytes(self, blocks: Collection[int], num_samples: int) -> int:
        """What frozen components make for a stage of these blocks."""
        read = _union(self.values.read, blocks)
        return self._bytes([value for value in read if self.values.maker[value] is None], num_samples)

    def stage_saved_bytes(self, blocks: Collection[int], num_samples: int, recomputed: bool = False) -> int:
        """What a micro-batch leaves in a stage of these blocks for its backward, each value once.

        Values from other stages and components are with it, as are received. Of a stage that is recomputed as a whole
        only these stay.
        """
        if not recomputed:
            return self._bytes(_union(self.values.kept, blocks), num_samples)
        read = _union(self.values.read, blocks)
        return self._bytes([value for value in read if self.values.maker[value] not in blocks], num_samples)

    def _bytes(self, values: Collection[int], num_samples: int) -> int:
        sizes = self.values.sizes.at(num_samples)
        return sum(int(sizes[value]) for value in values)

    @cached_property
    def _saved(self) -> Polynomials:
        return Polynomials(self.saved_formulas)

    @cached_property
    def _inputs(self) -> Polynomials:
        return Polynomials(self.input_formulas)


def _union(of_blocks: Sequence[frozenset[int]], blocks: Collection[int]) -> frozenset[int]:
    return frozenset[int]().union(*(of_blocks[block] for block in blocks))
