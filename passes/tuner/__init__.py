"""The tuner: which way to use the ranks, of all that the user leaves open, as a plan.

    request  ->  candidates, each with a lower bound  ->  trials: placed, ordered, simulated, filled  ->  Plan

request      what is asked for, what is open          candidates   every way to use the ranks (bounds)
search       best first, until no bound beats what    trials       what a candidate would take, ever more closely
             was found                                             (trial: what is known of one)
stand_ins    of equal pipelines those that are walked orders       the order of a placement, named or searched (lags)
finals       those in front, with searched orders     simulate     one step on the clock
memory       ways to need less with the same shape    plans        the best as a plan, and why
"""
