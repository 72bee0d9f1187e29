"""What stages of a chain cost, for any arrays of first and last blocks, from prefix sums.

    start = [0, 3], stop = [3, 8]        period_seconds(start, stop) -> [T0 of blocks 0-2, T0 of blocks 3-7]

One `Costs` holds for one number of replicas and of samples on each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from fxpipe.cluster.links import Link
from passes.chains.chain import Chain, ChainPlan, Objective, local_batch

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Costs:
    """Sums over the blocks before every position, and seconds to cross every position; all of shape [L + 1]."""

    forward: Floats
    backward: Floats
    forward_message: Floats  # of a micro-batch; nothing is sent after the last block
    backward_message: Floats
    sync: Floats  # all-reduce without its latency
    sync_latency: float
    state: Floats
    saved: Floats  # bytes of one micro-batch

    @property
    def transfer(self) -> Floats:
        return self.forward_message + self.backward_message

    def compute_seconds(self, start: Ints, stop: Ints) -> Floats:
        return self.forward[stop] - self.forward[start] + self.backward_seconds(start, stop)

    def backward_seconds(self, start: Ints, stop: Ints) -> Floats:
        return self.backward[stop] - self.backward[start]

    def period_seconds(self, start: Ints, stop: Ints) -> Floats:
        """T0: seconds between two micro-batches."""
        return np.maximum(self.compute_seconds(start, stop), self.transfer[stop])

    def sync_seconds(self, start: Ints, stop: Ints) -> Floats:
        """T_S."""
        return self.sync[stop] - self.sync[start] + self.sync_latency

    def peak_bytes(self, start: Ints, stop: Ints, in_flight: Ints | int) -> Floats:
        """Bytes of a rank with the activations of `in_flight` micro-batches."""
        return self.state[stop] - self.state[start] + (self.saved[stop] - self.saved[start]) * in_flight


class CostTable:
    """The `Costs` of a chain by number of replicas and of samples on each; every local batch is asked for once."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self._block_seconds = cache(chain.block_seconds)
        self._gradients, self._state = prefix(chain.gradient_bytes), prefix(chain.state_bytes)
        self._saved = prefix(chain.saved_bytes)
        self._crossing = np.asarray(chain.forward_bytes), np.asarray(chain.backward_bytes)
        self.at = cache(self._at)

    def of(self, batch_size: int, num_microbatches: int, replicas: int) -> Costs:
        return self.at(replicas, local_batch(batch_size, num_microbatches, replicas))

    def _at(self, replicas: int, num_samples: int) -> Costs:
        chain = self.chain
        forward, backward = self._block_seconds(num_samples)
        p2p, all_reduce = chain.links(replicas)
        sync, (forth, back) = self._gradients, self._crossing
        return Costs(
            prefix(forward),
            prefix(backward),
            _message_seconds(forth, num_samples, p2p),
            _message_seconds(back, num_samples, p2p),
            sync / all_reduce.bandwidth_bytes_per_second if all_reduce else np.zeros_like(sync),
            all_reduce.latency_seconds if all_reduce else 0.0,
            self._state,
            self._saved * num_samples,
        )


def _message_seconds(crossing: Floats, num_samples: int, link: Link) -> Floats:
    seconds = crossing * num_samples / link.bandwidth_bytes_per_second + link.latency_seconds
    seconds[[0, -1]] = 0.0
    return np.asarray(seconds)


def prefix(values: Sequence[float]) -> Floats:
    """Sums of the first 0, 1, .. values."""
    return np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=float))])


def in_flight(num_stages: int, num_microbatches: int) -> Ints:
    """Micro-batches whose activations each stage holds at most, in 1F1B."""
    return np.minimum(np.arange(num_stages, 0, -1), num_microbatches)


def evaluate(
    table: CostTable,
    boundaries: Sequence[int],
    replicas: Sequence[int],
    num_microbatches: int,
    batch_size: int,
    objective: Objective,
) -> ChainPlan:
    """The plan of these stages, with its seconds by the objective and its bytes."""
    start, stop, counts = np.array(boundaries[:-1]), np.array(boundaries[1:]), np.array(replicas)
    period, compute, backward, sync, crossing, peak = np.zeros((6, len(counts)))
    held = in_flight(len(counts), num_microbatches)
    for r in set(replicas):
        at, costs = counts == r, table.of(batch_size, num_microbatches, r)
        stage = start[at], stop[at]
        period[at], compute[at] = costs.period_seconds(*stage), costs.compute_seconds(*stage)
        backward[at], sync[at] = costs.backward_seconds(*stage), costs.sync_seconds(*stage)
        crossing[at], peak[at] = costs.transfer[stop[at]], costs.peak_bytes(*stage, held[at])
    if objective == "simulated":
        late = max(0.0, float((sync - (np.cumsum(backward) - backward)).max()))
        seconds = (num_microbatches - 1) * period.max() + compute.sum() + crossing.sum() + late
    else:
        late = float((sync - backward).max())
        late = max(0.0, late) if objective == "paper-clamped" else late
        seconds = (num_microbatches + 2 * len(counts) - 2) * period.max() + late
    return ChainPlan(
        tuple(int(p) for p in boundaries),
        tuple(int(r) for r in replicas),
        num_microbatches,
        objective,
        float(seconds),
        float(period.max()),
        late,
        tuple(peak.tolist()),
    )
