"""What every engine reads: which samples of a batch are its own, and loaders of just those."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader, Dataset

from fxpipe.errors import CompileError, RunError
from fxpipe.run.engine_base import EngineBase
from fxpipe.run.loader import Loader, arguments_of


class EngineData(EngineBase):
    """`_loaders` are those that were made, in order; `_positions` what was loaded for those still to be made."""

    _loaders: list[Loader]
    _positions: list[Mapping[str, Any]]

    def samples(self, batch_size: int | None = None) -> tuple[int, ...]:
        """The places in a batch, of the program's size where left out, of the samples that this rank reads.

        These are what `fxpipe.LocalBatch` takes, in this order; a rank may read none.
        """
        size = self._plan.batch_size if batch_size is None else batch_size
        return tuple(sample for sample in self._reads() if sample < size)

    def dataloader(
        self,
        dataset: Dataset[Any] | DataLoader[Any],
        batch_size: int | None = None,
        shuffle: bool = False,
        *,
        seed: int = 0,
        drop_last: bool = False,
        **options: Any,
    ) -> Loader:
        """Batches of a map-style dataset for `train` and `step`, of which every rank loads the samples it reads.

        Every rank calls it alike. Batches are those of a DataLoader of one device, whatever the layout; shuffled as
        torch's DistributedSampler of one process does, by seed and epoch. What a sample draws from torch's, numpy's or
        Python's generator depends on seed, epoch and sample alone. `save` and `load` keep the positions of loaders in
        the order in which they were made: make each once, not one for every epoch.

        Args:
            dataset: or a DataLoader of one, of one device's batches, whose other arguments are taken over.
            batch_size: samples of a batch, over all ranks: the program's.
            drop_last: leave out an epoch's last batch where it is smaller; else a program is made when it comes.
            options: of torch's DataLoader, such as `collate_fn` and `num_workers`.

        Raises:
            CompileError: the dataset has no length, other batches are asked for than the program's, or the last one is
                too small for the graph that was compiled.
        """
        if isinstance(dataset, DataLoader):
            of_loader = {"batch_size": batch_size, "shuffle": shuffle, "drop_last": drop_last}
            if given := [*(name for name, value in of_loader.items() if value), *options]:
                raise CompileError(f"{', '.join(given)}: a DataLoader has its own; leave it out, or give its dataset")
            return self.dataloader(seed=seed, **arguments_of(dataset))
        size = self._plan.batch_size
        if batch_size not in (None, size):
            raise CompileError(
                f"batch_size={batch_size}: a batch has the samples of all ranks together, and the program was compiled "
                f"for {size}; leave it out, or compile with batch_size={batch_size}"
            )
        loader = Loader(dataset, self.samples, size, shuffle, seed, drop_last, **options)
        self._plan.require_size(loader.last_size)
        if self._positions:
            loader.load_state_dict(self._positions[0])
            self._positions.pop(0)
        self._loaders.append(loader)
        return loader

    def loader_states(self) -> list[dict[str, Any]]:
        """The positions of all loaders, in the order in which they were made."""
        return [loader.state_dict() for loader in self._loaders]

    def require_loaders(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Raises RunError where these are positions of other loaders."""
        if len(states) < len(self._loaders):
            raise RunError(
                f"this engine has made {len(self._loaders)} loaders, and {len(states)} were saved; make those alone "
                "before it is loaded, in the same order"
            )
        for loader, state in zip(self._loaders, states, strict=False):
            loader.require(state)

    def restore_loaders(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Put loaders back to their positions; those that are still to be made begin there."""
        for loader, state in zip(self._loaders, states, strict=False):
            loader.load_state_dict(state)
        self._positions = list(states[len(self._loaders) :])
