"""Decisions: one pass per file, readable on its own.

    Capture  ->  batch, blocks, costs  ->  placement, schedules, fill, as the tuner asks  ->  Plan  ->  lowering

of a captured step    batch         what may be cut into micro-batches, and how
                      blocks        frozen components, blocks, the values between them
                      costs         what every block, layer and call costs and keeps
planning              case          a costed step on its machines
                      tuner         which way to use the ranks: the plan
                      placement     which blocks form a stage, which ranks hold it: lines and waves
                      schedules     the order of every rank's actions, by a name or searched for
                      step_ops      a placement and an order as what every rank does, to be simulated
                      fill          frozen work of the next batch among the actions of this one
making programs       lowering      stage graphs, messages, one program per rank
sampling              rows          where an image's rows lie in a denoiser's values, what a patch needs of others
                      sampling      patches of rows: one graph each, their exchanges, one program per rank
                      operations    names and arguments of ATen's operations, for whoever follows something through them
beside it             comparison    what other ways to train the same step would take
"""
