"""Orders of every rank's actions: those with a name, and those that are searched for.

problem         what is asked for, and which schedules answer it      job_shop   the same in whole ticks, by number

named           the field's schedules, by name                        hanayo     waves in the memory of 1F1B
building_block  one micro-batch, repeated                             repetition what that means for list schedules
list_rules      a dozen quick rules                                   portfolio  all of these, within a moment

synthesis       a schedule, its lower bound and method (search: with OR-tools, which solver loads)
schedule_cache  what was found before
steady          shortest patterns that repeat (periodic: one; unrolling, ramps: whole schedules from it)
windows         one window after another, each solved (exact)         bounds, window_bound   no schedule is shorter
"""
