"""Decisions: one pass per file, readable on its own.

of a captured step    batch         what may be cut into micro-batches, and how
                      blocks        frozen components, blocks, the values between them
                      block_costs   what every block costs and keeps (saved, kept), frozen_layers what frozen ones do
planning              plan          the plan, from the tuner (tuner, rehearsal, estimate, room) or as asked for
                      placement     which blocks form a stage, which ranks hold it; cut by partition (skips) or
                                    chains (replicas, two directions, self-conditioning)
                      order         the order of every rank's actions: schedules
                      fill          frozen work of the next batch in idle time
making programs       lowering      stage graphs, messages, rank programs; filled is all three forms of a step,
                                    call_costs what each of their calls is made of
beside it             comparison    what other ways to train the same step would take
"""
