"""Placement: which blocks form a stage, which ranks hold it.

place           all placements there are: lines, folds, waves, replicas, given ones
waves, replicas, cascade    several stages per rank, several ranks per stage, several backbones
frozen_ranks    who holds a frozen component        ports    the least that messages take
"""
