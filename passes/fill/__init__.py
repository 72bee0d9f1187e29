"""Fill: the frozen work of the next iteration, put into the idle time of this one.

    rank 0  |0F0 0F1 0F2|     |0B0 |   |0B1 |    |0B2 |        |0F0 0F1 0F2|vae..|0B0 |vae|0B1 |text|0B2 |vae|
    rank 1  |   |1F0 1B0 1F1 1B1 1F2 1B2|             |   ->   |vae|1F0 1B0 1F1 1B1 1F2 1B2|vae.. text...    |
                                                                                                  pipeline ^ ^ tail

A filler takes a `FillProblem` (idle intervals, frozen components with a time per layer and number of samples) and
returns a `Fill` (pieces of work per rank). What does not fit runs after the pipeline, on all ranks: the tail.

problem           what a filler is given        per_device   every rank its own samples in its own idle time
result            what it returns               shares, lanes, pack    how samples are shared out and packed
bound             no filling is shorter         ahead        the pieces as actions of a schedule
"""
