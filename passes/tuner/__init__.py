"""The tuner: which way to use the ranks, of all that the user leaves open, as a plan.

    request  ->  candidates, each with a lower bound  ->  trials: placed, ordered, simulated, filled  ->  Plan

request      what is asked for, what is open          candidates   every way to use the ranks (bounds)
search       best first, until no bound beats what    trials       what a candidate would take, ever more closely
             was found                                             (trial: what is known of one)
placements   stages on ranks for a shape              walks        a trial's step, action by action
orders       the order of a placement, named or       stand_ins    of equal pipelines those that are walked
             searched (lags)
thrift       the same in less memory (memory, recut,  ahead        the next batch's frozen work in idle time (room)
             recompute)
finals       those in front, with searched orders     simulate     one step on the clock
plans        the best as a plan, and why
"""
