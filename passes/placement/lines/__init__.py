"""Lines: stages one after another, each at a place of its own.

    blocks      0  1  2  3  4  5  6  7
    stages      [ s0 ][ s1 ][ s2 ][ s3 ]

shortest    the cuts of the shortest step        costs     what stages cost on a cluster (traffic: bytes in and out)
balanced    the least busy stages, cheapest cuts uneven    fewer stages than ranks: replicas in uneven numbers
"""

from passes.placement.lines.balanced import linear
from passes.placement.lines.costs import LineCosts, cut_line, part
from passes.placement.lines.uneven import uneven_line

__all__ = ["LineCosts", "cut_line", "linear", "part", "uneven_line"]
