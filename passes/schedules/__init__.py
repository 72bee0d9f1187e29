"""Orders of every rank's actions: those with a name, and those that are searched for.

policies        what a name means, as data
problem         what is asked for, and which schedules answer it      job_shop   the same in whole ticks, by number

list_scheduler  whenever a rank is idle, the most urgent that is there
rules           what is urgent, what is in flight                     blocks     one micro-batch, repeated
named           a schedule by its name

synthesis       the best of all of these, its lower bound (bounds), and with a budget what is better:
windows         one window after another, each solved (exact: CP-SAT)
"""
