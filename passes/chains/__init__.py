"""Exact partition of a chain of blocks into replicated stages.

chain        what blocks cost, the objectives, a plan           costs      prefix sums: what any stage costs
equal        the same replicas everywhere, all (S, M) at once   layers     dynamic programming over cuts
unequal      replicas that sum to the devices                   moves      bit masks over device counts
boxes        several maxima at once, exactly                    terms, choices   objectives as tables

bidirectional      two chains in opposite directions (two_ways: their plans; two_maxima: several lines, two bottlenecks)
backbone_groups    more than two, in two groups                 self_conditioning   the expectation over a first pass
"""

from passes.chains.chain import Chain, ChainPlan, Objective, tabulated
from passes.chains.equal import all_plans, solve_equal
from passes.chains.unequal import best_unequal, solve_unequal

__all__ = ["Chain", "ChainPlan", "Objective", "all_plans", "best_unequal", "solve_equal", "solve_unequal", "tabulated"]
