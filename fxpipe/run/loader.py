"""Batches of a dataset, of each of which a rank loads the samples that it reads.

    epoch 0 of 10 samples    4 1 8 0 | 5 9 2 3 | 7 6      by the seed and the epoch, for any number of ranks
    rank 0 reads 0, 1        4 1     | 5 9     | 7 6      of the dataset, by the place in the batch
    rank 1 reads none        -       | -       | -

A sample's own draws (a crop, a flip) are those of (seed, epoch, sample), whoever loads it and in which process.
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from fxpipe.capture.randomness import GENERATOR_LOCK
from fxpipe.errors import CompileError, RunError
from fxpipe.run.local_batch import LocalBatch

Key = tuple[int, int]
"""An epoch and a sample of the dataset."""


@dataclass(frozen=True)
class BatchPlace:
    """Which batch it is, the same on every rank that has a part of it."""

    num_samples: int
    seed: int | None
    epoch: int
    batch: int


class Loader:
    """Iterates over the batches of an epoch, each a `LocalBatch`, behind the last that an engine has trained on.

    When all of an epoch's have been trained on, the next epoch begins. Batches that were read, but not trained on, are
    read again; `engine.save` and `engine.load` keep the position, as do `state_dict` and `load_state_dict`.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        samples: Callable[[int], Sequence[int]],
        batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        **options: Any,
    ) -> None:
        """Args:
        samples: the places in a batch of so many samples that this rank loads.
        options: of torch's DataLoader.
        """
        _require_usable(dataset, options)
        self._dataset, self._samples, self._options = dataset, samples, options
        self._num_samples = len(dataset)  # type: ignore[arg-type]
        self.batch_size, self.shuffle, self.seed, self.drop_last = batch_size, shuffle, seed, drop_last
        self.epoch, self._next = 0, 0
        if not len(self):
            raise CompileError(
                f"the dataset has {self._num_samples} samples, fewer than a batch of {batch_size}; with drop_last=True "
                "no batch is left"
            )

    def __len__(self) -> int:
        """Batches of an epoch."""
        return (self._num_samples if self.drop_last else self._num_samples + self.batch_size - 1) // self.batch_size

    @property
    def last_size(self) -> int:
        """Samples of an epoch's last batch."""
        return self._size(len(self) - 1)

    def set_epoch(self, epoch: int) -> None:
        """Begin that epoch, unless it is the one that is under way: after `load`, count from `loader.epoch`."""
        if epoch != self.epoch:
            self.epoch, self._next = epoch, 0

    def __iter__(self) -> Iterator[LocalBatch]:
        epoch, first = self.epoch, self._next
        sizes = [self._size(number) for number in range(first, len(self))]
        loaded = iter(self._loader if any(map(self._samples, {*sizes})) else ())
        for number, size in enumerate(sizes, start=first):
            batch = next(loaded) if self._samples(size) else None
            place = BatchPlace(self._num_samples, self.seed if self.shuffle else None, epoch, number)
            yield LocalBatch(batch, size, place, partial(self._trained, epoch, number))

    def state_dict(self) -> dict[str, Any]:
        return {**self._kind, "epoch": self.epoch, "batch": self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.require(state)
        self.epoch, self._next = state["epoch"], state["batch"]

    def require(self, state: Mapping[str, Any]) -> None:
        """Raises RunError where the state is of a loader with other batches."""
        for name, value in self._kind.items():
            if state[name] != value:
                raise RunError(f"the loader has {name}={value}, and was saved with {state[name]}: give it the same")

    @property
    def _kind(self) -> dict[str, Any]:
        """What the batches of an epoch depend on."""
        return {
            "samples": self._num_samples, "batch_size": self.batch_size, "shuffle": self.shuffle, "seed": self.seed,
            "drop_last": self.drop_last,
        }  # fmt: skip

    @cached_property
    def _loader(self) -> DataLoader[Any]:
        """One for all epochs, so that its workers may persist; it begins where this loader is."""
        own = {"batch_sampler": _Batches(self._keys), "generator": torch.Generator().manual_seed(self.seed)}
        return DataLoader(_Drawn(self._dataset, self.seed), **own, **self._options)  # type: ignore[arg-type]

    def _keys(self) -> Iterator[list[Key]]:
        """What is to be loaded on this rank, from here to the end of the epoch."""
        return self._keys_from(self.epoch, self._next)

    def _keys_from(self, epoch: int, first: int) -> Iterator[list[Key]]:
        order = self._order(epoch)
        for number in range(first, len(self)):
            start = number * self.batch_size
            if own := self._samples(self._size(number)):
                yield [(epoch, int(order[start + sample])) for sample in own]

    def _order(self, epoch: int) -> Sequence[int] | torch.Tensor:
        """The samples of the dataset, as torch's DistributedSampler of one process shuffles them."""
        if not self.shuffle:
            return range(self._num_samples)
        return torch.randperm(self._num_samples, generator=torch.Generator().manual_seed(self.seed + epoch))

    def _size(self, number: int) -> int:
        """Samples of a batch; of the last there may be fewer."""
        return min(self.batch_size, self._num_samples - number * self.batch_size)

    def _trained(self, epoch: int, number: int) -> None:
        ended = number + 1 == len(self)
        self.epoch, self._next = (epoch + 1, 0) if ended else (epoch, number + 1)


@dataclass(frozen=True)
class _Batches:
    """A batch sampler that begins anew, wherever that is, with every iteration."""

    begin: Callable[[], Iterator[list[Key]]]

    def __iter__(self) -> Iterator[list[Key]]:
        return self.begin()


class _Drawn(Dataset[Any]):
    """A dataset whose samples draw from torch's, numpy's and Python's generators as (seed, epoch, sample) says."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __getitems__(self, keys: Sequence[Key]) -> list[Any]:
        with GENERATOR_LOCK:
            before = torch.get_rng_state(), np.random.get_state(), random.getstate()
            try:
                return [self._drawn(*key) for key in keys]
            finally:
                torch.set_rng_state(before[0])
                np.random.set_state(before[1])
                random.setstate(before[2])

    def _drawn(self, epoch: int, sample: int) -> Any:
        digest = hashlib.sha256(f"{self._seed}/{epoch}/{sample}".encode()).digest()
        number = int.from_bytes(digest[:4], "little")
        torch.default_generator.manual_seed(number)
        np.random.seed(number)
        random.seed(number)
        return self._dataset[sample]


_KEPT = (
    "collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
    "prefetch_factor", "persistent_workers",
)  # fmt: skip


def arguments_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """What a loader of one device would be made from by `Loader`: its batches, shuffled by another seed.

    Raises:
        CompileError: its order is not that of the dataset, nor a shuffled one.
    """
    _require_usable(loader.dataset, {})
    sampler = loader.sampler
    shuffled = type(sampler) is RandomSampler and not sampler.replacement
    is_known = shuffled or type(sampler) is SequentialSampler  # one that is made from these has an order of its own
    if not is_known or len(sampler) != len(loader.dataset) or loader.batch_size is None:  # type: ignore[arg-type]
        order = sampler if loader.batch_size is not None else loader.batch_sampler
        raise CompileError(
            f"the DataLoader reads by a {type(order).__name__}; which samples a rank loads follows from shuffle and "
            "seed: give the dataset, or read what engine.samples() says of each batch, for fxpipe.LocalBatch(...)"
        )
    own = {"dataset": loader.dataset, "batch_size": loader.batch_size, "shuffle": shuffled}
    return {**own, "drop_last": loader.drop_last, **{name: getattr(loader, name) for name in _KEPT}}


_DECIDED = ("sampler", "batch_sampler", "generator", "in_order")


def _require_usable(dataset: Any, options: Mapping[str, Any]) -> None:
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise CompileError(
            f"the dataset is a {type(dataset).__name__} without a length, or items by number, so that every rank would "
            "have to read all of it; read what engine.samples() says of each batch, and give fxpipe.LocalBatch(...)"
        )
    if wrong := [name for name in _DECIDED if name in options]:
        raise CompileError(
            f"{', '.join(wrong)}: which samples a rank loads, in which order, follows from shuffle and seed; leave it "
            "out, or give batches of your own as fxpipe.LocalBatch(...)"
        )
