"""The language of plans: what passes decide and engines run, as data with a text form and a check beside it.

    Capture                        BlockGraph              Plan = stages on ranks, a Schedule per form      RankProgram
    linear, silu, linear, mse  ->  | 0 | 1 |  + frozen ->  stage 0 on rank 0   rank 0: 0F0 0F1 0B0 0B1  ->  a graph each

block_graph    blocks, frozen components, edges         staged       which blocks form a stage, on which ranks
actions        2F0, 0T[0:4]x0:9; what must be done      schedule     an order of every rank (schedule_grid draws it)
execution      when each action runs, by durations      plan         all of it, as text and JSON
rank_program   one graph per rank, its messages         step         what an engine needs for one form
ops            what rank programs call                  transport    what they ask of a network
reads          which samples a rank's programs read     fewer_samples   the order of a smaller batch
tuning         what else was considered                 timeline     what every rank does when
..._check      of block graphs, schedules, plans, rank programs: from scratch, without the code that makes them
"""
