"""Wave schedules in the memory of 1F1B (Hanayo: Liu et al., "Harness Wave-like Pipeline Parallelism", SC 2023).

    stages 0 1 2 3 on ranks 0 1 1 0       rank 0: 0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1
    2 micro-batches at most on a rank ->  rank 1: 1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1

With W waves a rank owns 2 W stages and holds at most 2 W x ranks activations of one stage each, of whichever stages.
"""

from collections.abc import Mapping, Sequence

from fxpipe.schedule import Action, Work
from passes.schedules.job_shop import job_shop, run
from passes.schedules.list_rules import list_orders, rules
from passes.schedules.problem import Problem

_RULES = "forward first, in flight 1.0", "backward first, in flight 1.0"


def wave_orders(
    work: Work,
    stage_rank: Sequence[int],
    seconds: Mapping[str, Sequence[float]],
    world_size: int,
    frozen_ranks: tuple[tuple[int, ...], ...] = (),
) -> tuple[tuple[Action, ...], ...] | None:
    """The shorter of "forward first" and "backward first", where transfers are free.

    None where that memory stops both, which it never does to a chain of stages.
    """
    ranks = tuple(stage_rank[stage] for stage in work.stages)
    room = [len(set(ranks)) * ranks.count(rank) for rank in range(world_size)]
    problem = Problem(
        work,
        tuple(stage_rank),
        seconds,
        world_size,
        activation_bytes=(1,) * work.num_stages,
        memory_limit_bytes=tuple(room),
        frozen_ranks=frozen_ranks,
    )
    shop = job_shop(problem, frozenset())
    found = [list_orders(shop, rule) for rule in rules(shop) if rule.name in _RULES]
    orders = min((o for o in found if o is not None), key=lambda o: run(shop, o).ticks, default=None)
    return None if orders is None else shop.schedule("", work.num_stages, orders).ranks
