"""Partition: cut a line of blocks into stages, each a run of neighbours, so that the busiest rank has least to do.

    blocks    0  1  2  3  4  5  6  7      skips 0-7 1-6 2-5
    linear    [ s0 ][ s1 ][ s2 ][ s3 ]    stage s on rank s: every skip crosses ranks
    wave      [s0][ s1 ][  s2 ][ s3 ]     stages s and 2N-1-s on rank s: s0 and s3 on rank 0, s1 and s2 on rank 1,
                                          every skip starts and ends on one rank

Empty stages are allowed; weights are seconds, skips pairs of blocks.
"""

from passes.partition.chain import interleaved, linear
from passes.partition.many_waves import WavesPartition, waves
from passes.partition.memory import StageMemory
from passes.partition.pair_prices import PricedWave, priced_wave
from passes.partition.wave import WavePartition, wave

__all__ = [
    "PricedWave",
    "StageMemory",
    "WavePartition",
    "WavesPartition",
    "interleaved",
    "linear",
    "priced_wave",
    "wave",
    "waves",
]
