"""Processes that a launcher has started for the same program: which rank this one is, and what rank 0 makes for all."""

import json
import os
from collections.abc import Callable, Mapping

from fxpipe.errors import RunError
from fxpipe.plan.plan import Plan

_PLAN_SECONDS = 1800.0
"""How long ranks wait for a plan: rank 0 may have captured nothing yet when they have all, and plan for minutes."""


def launched_rank(world_size: int) -> int | None:
    """This process's rank where torchrun, or whoever set its variables, has started as many as ranks; else None."""
    if world_size > 1 and os.environ.get("WORLD_SIZE") == str(world_size) and "MASTER_ADDR" in os.environ:
        return int(os.environ["RANK"]) if "RANK" in os.environ else None
    return None


def join(world_size: int) -> int | None:
    """`launched_rank`, once it has found rank 0.

    Raises:
        RunError: there is no rank 0.
    """
    rank = launched_rank(world_size)
    if rank is not None:
        from fxpipe.run.transport.distributed import join_launch

        join_launch()
    return rank


def made_by_rank_zero(make: Callable[[], Plan], asked: Mapping[str, object], world_size: int) -> Plan:
    """The plan that rank 0 makes, or was given, on every rank of a launch; made here where there is none.

    Raises:
        RunError: rank 0 has made none, or was `asked` for something else, an option's value by its name.
    """
    rank = launched_rank(world_size)
    if rank is None:
        return make()
    from fxpipe.run.transport.distributed import from_rank_zero

    mine = {name: str(value) for name, value in asked.items()}
    there, plan = json.loads(from_rank_zero(lambda: json.dumps((mine, make().as_dict())), _PLAN_SECONDS))
    for name in mine:
        if mine[name] != there[name]:
            raise RunError(
                f"{name}={mine[name]} on rank {rank} asks for another plan than rank 0, where it is {there[name]}; "
                "start all ranks with the same options"
            )
    return Plan.from_dict(plan)
