"""Samples that several ranks read must be the same on all of them.

    rank 0 reads 0-3      rank 1 reads 2-5      samples 2, 3: a number of rank 0 and one of rank 1, told to all

What no other rank reads cannot be wrong in another way than on one device.
"""

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from fxpipe.errors import RunError
from fxpipe.plan.transport import Transport
from fxpipe.run.agreement import checksum, digest_of, everyones
from fxpipe.run.local_batch import said
from fxpipe.run.read_ahead import Tensors

Group = tuple[tuple[int, ...], tuple[int, ...]]
"""Samples, and the ranks that read them; no samples for what all of them share."""


def agree_on_samples(
    transport: Transport,
    reads: Sequence[Sequence[int]],
    tensors: Tensors,
    names: Mapping[str, str],
    batched: Collection[str],
) -> None:
    """Collective: RunError where ranks were given different values of a sample of this batch.

    Args:
        reads: the samples that every rank was given.
        tensors: this rank's inputs; those in `batched` have a row for each of its samples, others are shared by all.
        names: of all inputs, what users call them.
    """
    groups = _groups(reads, any(name not in batched for name in names))
    if not groups:
        return
    own = reads[transport.rank]
    mine = [group for group in groups if transport.rank in group[1]]
    sums = {group: _sums(group[0], own, tensors, batched) for group in mine}
    numbers = torch.tensor([digest_of(sorted(sums[group].items())) if group in sums else 0 for group in groups])
    told = torch.stack(transport.all_gather(numbers, "every rank's samples of the batch").wait())
    if all(len(told[list(ranks), place].unique()) == 1 for place, (_, ranks) in enumerate(groups)):
        return
    everything: list[dict[Group, dict[str, Any]]] = everyones(transport, sums)
    for samples, ranks in groups:
        first = everything[ranks[0]][samples, ranks]
        for rank in ranks[1:]:
            other = everything[rank][samples, ranks]
            if different := [names[name] for name in first if first[name] != other.get(name)]:
                raise RunError(
                    f"{said(samples) if samples else 'inputs'} of the batch ({', '.join(different)}) differ between "
                    f"ranks {ranks[0]} and {rank}; a sample must be the same on every rank that reads it: load it from "
                    "the same data, and draw in it from the generators that engine.dataloader seeds for every sample"
                )


def _groups(reads: Sequence[Sequence[int]], shared: bool) -> list[Group]:
    """The samples of more than one rank, by their readers; and what is `shared` by all samples."""
    readers: dict[int, list[int]] = {}
    for rank, samples in enumerate(reads):
        for sample in samples:
            readers.setdefault(sample, []).append(rank)
    alike: dict[tuple[int, ...], list[int]] = {}
    for sample in sorted(readers):
        alike.setdefault(tuple(readers[sample]), []).append(sample)
    readers_of = {tuple(samples): ranks for ranks, samples in alike.items()}
    if shared:
        readers_of[()] = tuple(rank for rank, samples in enumerate(reads) if samples)
    return [(samples, ranks) for samples, ranks in readers_of.items() if len(ranks) > 1]


def _sums(samples: Sequence[int], own: Sequence[int], tensors: Tensors, batched: Collection[str]) -> dict[str, Any]:
    """Of these samples of every input, or of what all share."""
    if not samples:
        return {name: checksum(tensor) for name, tensor in tensors.items() if name not in batched}
    places = [bisect_left(own, sample) for sample in samples]
    first, stop = places[0], places[-1] + 1
    rows = slice(first, stop) if len(places) == stop - first else places
    return {name: checksum(tensor[rows]) for name, tensor in tensors.items() if name in batched}
