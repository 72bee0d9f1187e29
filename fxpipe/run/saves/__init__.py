"""A run on the disk, and back, into any layout.

    engine.save   contents   what a rank writes, by name    ->  parts      its file (values: what is no tensor)
                                                            ->  folders    named when the last part is there
    engine.load   choice     the newest that is whole       ->  restoring  what a rank reads of a checkpoint

engine_saves   both, as every engine offers them            writing      at once, or while training goes on
run            what belongs to a run                        optimizers   their state, by name
"""
