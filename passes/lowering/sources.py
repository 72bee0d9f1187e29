"""Where values that no unit makes come from: the whole batch's inputs, draws, and what is computed of them once."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from passes.batch.layout import Layout


@dataclass(frozen=True)
class Sources:
    """`inputs` and `draws` (with their index) are whole-batch values; of `whole_batch` the first names are read once to
    make the others; `slices` says how each is cut into micro-batches, None where all samples share it."""

    inputs: tuple[str, ...]
    draws: Mapping[str, int]
    whole_batch: tuple[tuple[str, ...], tuple[str, ...]]
    slices: Mapping[str, Layout | None]

    def inputs_for(self, reads: Collection[str]) -> list[str]:
        """The inputs among what is read, and those that are needed for it."""
        wanted, (given, made) = set(reads), self.whole_batch
        if wanted.intersection(made):
            wanted.update(given)
        return [name for name in self.inputs if name in wanted]
