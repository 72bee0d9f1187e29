"""What people read of plans and programs; nothing here decides or runs.

    program -> out/plan.txt, grid.txt, rank_0.py     program -> report.html     timeline -> trace.json, for Perfetto

dump           a folder of texts (source: a graph as Python)    report         one page: figures and texts
trace_format   timelines as Chrome traces                       comparison     ways to train a step, a row each
cost_report    what blocks cost                                 progress       which step of the compiler runs
"""
