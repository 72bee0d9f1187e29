"""A candidate plan as op lists, before any stage is traced: what every rank computes, sends and waits for, simulated.

case          a costed step and the machines it runs on      pipeline_ops  a schedule as op lists
flows         bytes between the points of a pipeline         memory        peak bytes of every rank
pieces        frozen work between actions                    rehearse      a candidate, ordered, filled, simulated
"""
