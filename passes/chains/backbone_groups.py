"""More than two backbones: two groups of equal work, each joined to one chain, to pipeline in opposite directions.

three cascades of 5, 3 and 2 seconds       ->      down: 5       up: 3 then 2
"""

from collections.abc import Sequence
from itertools import product

from fxpipe.errors import CompileError
from passes.chains.chain import Chain

_MOST = 16  # backbones, so that all divisions can be looked at


def two_groups(work: Sequence[float]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which backbones go together: the division whose larger group has least work, the larger group first.

    `work` are seconds of every backbone. Of equal divisions the first one in order of the backbones. All 2**(n - 1)
    are looked at.

    Raises:
        CompileError: fewer than two backbones, or more than 16.
    """
    if not 2 <= len(work) <= _MOST:
        raise CompileError(f"{len(work)} backbones cannot be divided into two groups: give 2 to {_MOST}")
    sides = ((0, *rest) for rest in product((0, 1), repeat=len(work) - 1) if any(rest))
    best = min(sides, key=lambda side: max(_sum(work, side, 0), _sum(work, side, 1)))
    groups = sorted((0, 1), key=lambda group: -_sum(work, best, group))
    first, second = (tuple(k for k, side in enumerate(best) if side == group) for group in groups)
    return first, second


def _sum(work: Sequence[float], sides: Sequence[int], group: int) -> float:
    return sum(seconds for seconds, side in zip(work, sides, strict=True) if side == group)


def joined(chains: Sequence[Chain]) -> Chain:
    """One chain of the blocks of several backbones, one after another; nothing is sent between them.

    Local batches are those of the joined chain: all its backbones get equally many samples.

    Raises:
        CompileError: no chains, or chains on different links.
    """
    if not chains:
        raise CompileError("no backbones to join")
    first = chains[0]
    if any((chain.p2p, chain.all_reduce) != (first.p2p, first.all_reduce) for chain in chains):
        raise CompileError("backbones to join run on the same devices, but were given different links; use the same")

    def seconds(num_samples: int) -> tuple[Sequence[float], Sequence[float]]:
        forward, backward = zip(*(chain.block_seconds(num_samples) for chain in chains), strict=True)
        return [s for part in forward for s in part], [s for part in backward for s in part]

    return Chain(
        seconds,
        _cut_bytes([chain.forward_bytes for chain in chains]),
        _cut_bytes([chain.backward_bytes for chain in chains]),
        tuple(b for chain in chains for b in chain.gradient_bytes),
        tuple(b for chain in chains for b in chain.saved_bytes),
        tuple(b for chain in chains for b in chain.state_bytes),
        first.p2p,
        first.all_reduce,
    )


def _cut_bytes(parts: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Bytes across every cut; between two backbones none."""
    inner = [b for part in parts for b in (*part[1:-1], 0.0)]
    return (parts[0][0], *inner[:-1], parts[-1][-1])
