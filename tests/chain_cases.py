"""Small chains as plain numbers, judged from the definitions in code that shares nothing with the passes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, product
from math import ceil
from random import Random

from hypothesis import strategies as st

from fxpipe.cluster.links import Link
from passes.chains import Chain

OBJECTIVES = ("simulated", "paper", "paper-clamped")


@dataclass(frozen=True)
class Case:
    """Blocks and links; n samples take launch + n * forward seconds, and launch + n * backward."""

    launch: tuple[float, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    cuts: tuple[float, ...]  # bytes of the forward cut before every block but the first
    gradients: tuple[float, ...]
    saved: tuple[float, ...]
    state: tuple[float, ...]
    bandwidths: tuple[float, float]
    latencies: tuple[float, float]
    backward_cuts: float = 1.0  # times the forward's

    @property
    def size(self) -> int:
        return len(self.forward)

    def seconds(self, n: int) -> tuple[list[float], list[float]]:
        pairs = list(zip(self.launch, self.forward, self.backward, strict=True))
        return [a + n * f for a, f, _ in pairs], [a + n * b for a, _, b in pairs]

    def chain(self) -> Chain:
        forward_cuts = (0.0, *self.cuts, 0.0)
        p2p, all_reduce = (Link("test", *pair) for pair in zip(self.bandwidths, self.latencies, strict=True))
        return Chain(
            self.seconds,
            forward_cuts,
            tuple(self.backward_cuts * c for c in forward_cuts),
            self.gradients,
            self.saved,
            self.state,
            p2p,
            all_reduce,
        )


def judge(
    case: Case, cuts: Sequence[int], replicas: Sequence[int], num_microbatches: int, batch_size: int, objective: str
) -> tuple[float, list[float]]:
    """The objective and every stage's bytes, from the definitions."""
    stages = [range(a, b) for a, b in pairwise(cuts)]
    periods, computes, transfers, syncs, backwards, peaks = [], [], [], [], [], []
    for index, (blocks, r) in enumerate(zip(stages, replicas, strict=True)):
        n = ceil(ceil(batch_size / num_microbatches) / r)
        forward, backward = case.seconds(n)
        compute = sum(forward[b] + backward[b] for b in blocks)
        last = index == len(stages) - 1
        sent = 0.0 if last else case.cuts[blocks[-1]] * (1 + case.backward_cuts) * n
        transfer = 0.0 if last else sent / case.bandwidths[0] + 2 * case.latencies[0]
        computes.append(compute)
        transfers.append(transfer)
        periods.append(max(compute, transfer))
        backwards.append(sum(backward[b] for b in blocks))
        syncs.append(sum(case.gradients[b] for b in blocks) / case.bandwidths[1] + case.latencies[1] if r > 1 else 0.0)
        held = min(num_microbatches, len(stages) - index)
        peaks.append(sum(case.state[b] + case.saved[b] * n * held for b in blocks))
    if objective == "simulated":
        late = max(sync - sum(backwards[:s]) for s, sync in enumerate(syncs))
        flow = (num_microbatches - 1) * max(periods) + sum(computes) + sum(transfers)
        return flow + max(0.0, late), peaks
    late = max(sync - own for sync, own in zip(syncs, backwards, strict=True))
    late = max(0.0, late) if objective == "paper-clamped" else late
    return (num_microbatches + 2 * len(stages) - 2) * max(periods) + late, peaks


def all_cuts(size: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    return ((0, *inner, size) for inner in combinations(range(1, size), num_stages - 1))


def best_of_all(
    case: Case,
    layouts: Sequence[tuple[int, ...]],
    num_stages: int,
    num_microbatches: int,
    batch_size: int,
    objective: str,
    limit: float | None,
) -> float | None:
    """The least objective over all cuts and the given replicas; None where nothing fits."""
    best = None
    for cuts, replicas in product(all_cuts(case.size, num_stages), layouts):
        seconds, peaks = judge(case, cuts, replicas, num_microbatches, batch_size, objective)
        if (limit is None or max(peaks) <= limit) and (best is None or seconds < best):
            best = seconds
    return best


def random_case(rng: Random, size: int, whole: bool) -> Case:
    """Small numbers, so that ties are common, or fractions, so that rounding is."""

    def row(length: int = size) -> tuple[float, ...]:
        return tuple(float(rng.randint(0, 6)) if whole else 6 * rng.random() for _ in range(length))

    return Case(
        launch=row(),
        forward=row(),
        backward=row(),
        cuts=row(size - 1),
        gradients=row(),
        saved=row(),
        state=row(),
        bandwidths=(rng.choice([0.2, 1.0, 5.0]), rng.choice([0.05, 0.3, 2.0])),
        latencies=(rng.choice([0.0, 0.5]), rng.choice([0.0, 2.0])),
        backward_cuts=rng.choice([0.0, 1.0]),
    )


def cases(most_blocks: int = 7) -> st.SearchStrategy[Case]:
    """Drawn whole from a seed: drawing number by number takes longer than solving and trying all."""
    sizes = st.integers(1, most_blocks)
    return st.builds(random_case, st.integers(0, 2**32).map(Random), sizes, st.booleans())


LIMITS = st.one_of(st.none(), st.integers(5, 120).map(float))
