"""Placement: which blocks form a stage, which ranks hold it.

    blocks   0  1  2  3  4  5  6  7        line   [0 1 2 3] on rank 0   [4 5 6 7] on rank 1
    skips    0-7 1-6 2-5             ->    wave   [0 1] [6 7] on rank 0   [2 3] [4 5] on rank 1

shape           how ranks are used: lines, folds, loops, replicas
place           every shape there is, several backbones, given orders
collocation     skips with both ends on a rank
lines, waves    the two ways to cut: stages in line, and skips collocated
cascade         backbones in opposite directions, and one that runs twice
frozen_ranks    who holds a frozen component     ports     the least that messages take
memory          what stages may hold             buckets   of gradients, for pipelines of one rank
"""
