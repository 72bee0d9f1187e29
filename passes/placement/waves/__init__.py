"""Waves: stages that go there and back over the ranks, so that skips start and end on one rank.

    blocks    0  1  2  3  4  5  6  7      skips 0-7 1-6 2-5
    wave      [s0][ s1 ][  s2 ][ s3 ]     stages s and 2N-1-s on rank s: s0 and s3 on rank 0, s1 and s2 on rank 1

wave        exactly: all skips collocated (fronts), or crossing for a price (soft, crossing: moves)
ties        of the best, the cheapest cuts

Empty stages are allowed; weights are seconds, skips pairs of blocks.
"""

from passes.placement.waves.wave import wave

__all__ = ["wave"]
