"""What a layout would take, without lowering it: seconds of a call, bytes of a step, memory of the fullest rank.

rows, displaced rows   patches beside each other, by a clock   (`beside`)
stages                 cells of the line by their columns      (`columns`)
first steps elsewhere  the seconds of these instead of its own

Seconds of operations and bytes of messages are those of a patch's own graph (`passes.sampling.work`). A channel has one
message under way at a time.
"""

from collections.abc import Sequence
from dataclasses import replace

from fxpipe.cluster import Cluster
from fxpipe.sampling.beside import estimated
from fxpipe.sampling.case import SampleCase
from fxpipe.sampling.columns import Columns
from fxpipe.sampling.layout import Estimate
from fxpipe.sampling.planning import Choices


def estimate(case: SampleCase, made: Choices, cluster: Cluster, steps: int, speeds: Sequence[float] = ()) -> Estimate:
    """Of a call of so many steps on this cluster, whose ranks have these speeds; all the same where left out."""
    if made.warm is not None:
        own, warm = (estimate(case, one, cluster, steps, speeds) for one in (replace(made, warm=None), made.warm))
        return own.warmed(warm, min(made.how.num_warm, steps))
    if made.spans is not None:
        size, of_copy = made.grid.stages * made.grid.patches, made.grid.of_copy
        firsts = range(0, len(speeds) or 1, size)
        groups = {(tuple(speeds[at : at + size]), at < of_copy): None for at in firsts}
        others = replace(made, watching=0)
        found = [Columns(case, made if shows else others, cluster, own).estimate(steps) for own, shows in groups]
        return max(found, key=lambda one: one.seconds)
    return estimated(case, made, cluster, steps, speeds)
