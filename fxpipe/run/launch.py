"""Processes that a launcher has started for the same program: which rank this one is, and what rank 0 makes for all."""

import json
import os
from collections.abc import Callable, Mapping

from fxpipe.errors import RunError
from fxpipe.plan.plan import Plan

PLAN_SECONDS = 1800.0
"""How long ranks wait for a plan: rank 0 may have captured nothing yet when they have all, and plan for minutes."""


def join(world_size: int) -> int | None:
    """This process's rank where torchrun, or whoever set its variables, has started as many as ranks; else None.

    Raises:
        RunError: there is no rank 0.
    """
    launched = world_size > 1 and os.environ.get("WORLD_SIZE") == str(world_size)
    if not launched or not {"MASTER_ADDR", "RANK"} <= os.environ.keys():
        return None
    from fxpipe.run.transport.launched import join_launch

    return join_launch()


def made_by_rank_zero(make: Callable[[], Plan], asked: Mapping[str, object], rank: int | None) -> Plan:
    """The plan that rank 0 makes, or was given, on every rank of a launch; made here where there is none.

    Raises:
        RunError: rank 0 has made none, or was `asked` for something else, an option's value by its name.
    """
    if rank is None:
        return make()
    mine = {name: str(value) for name, value in asked.items()}
    there, plan = json.loads(text_of_rank_zero(lambda: json.dumps((mine, make().as_dict()))))
    for name in mine:
        if mine[name] != there[name]:
            raise RunError(
                f"{name}={mine[name]} on rank {rank} asks for another plan than rank 0, where it is {there[name]}; "
                "start all ranks with the same options"
            )
    return Plan.from_dict(plan)


def text_of_rank_zero(make: Callable[[], str]) -> str:
    """Collective over the ranks of a launch: what `make` gives on rank 0, where alone it is called.

    Raises:
        RunError: rank 0 raised, or gave nothing in time.
    """
    from fxpipe.run.transport.launched import from_rank_zero

    return from_rank_zero(make, PLAN_SECONDS)
