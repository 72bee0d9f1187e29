"""Lanes: components that have each sample on the same rank.

    vae -> adapter      all ranks           lane 0: vae, adapter, clip      after nothing
    clip                all ranks     ->    lane 1: t5                      after nothing
    t5                  ranks 0 1           lane 2: merge                   after lanes 0, 1
    merge(clip, t5)     all ranks

A component is in the lane of those it depends on where they may run on the same ranks. Between lanes samples are
redistributed, so a lane starts when those it depends on have ended everywhere.
"""

from dataclasses import dataclass

from passes.fill.bound import least_device_seconds
from passes.fill.problem import FillProblem


@dataclass(frozen=True)
class Lane:
    """Components on `ranks`, each after those it reads; `after` are the positions of the lanes they read.

    Where `whole`, it is one component that runs on a single rank.
    """

    components: tuple[int, ...]
    ranks: tuple[int, ...]
    whole: bool
    after: tuple[int, ...]


_Key = tuple[int, int, float, tuple[int, ...], int, int]
"""How many redistributions are before a lane, how many ranks it has; less the work of its family where families are
apart; its ranks, its family, and its component where it is whole."""


def lanes(problem: FillProblem, apart: bool) -> tuple[Lane, ...]:
    """All components in lanes, each after those it reads; of lanes at equal depth first the one on the fewest ranks.

    Where `apart`, families (components joined by dependencies) have lanes of their own, the one with most work first.
    """
    keys: list[_Key] = []
    family = _families(problem) if apart else [0] * len(problem.components)
    work = [0.0] * len(problem.components)
    for index, name in enumerate(family):
        work[name] += least_device_seconds(problem, index)
    for index, component in enumerate(problem.components):
        ranks, whole = problem.ranks_of(index), index if component.whole else -1
        own = -work[family[index]], ranks, family[index], whole
        depths = [keys[source][0] + (whole >= 0 or keys[source][2:] != own) for source in component.depends]
        keys.append((max(depths, default=0), len(ranks), *own))
    order = sorted(set(keys))
    return tuple(_lane(problem, keys, order, key) for key in order)


def _families(problem: FillProblem) -> list[int]:
    """Every component's family, by the number of a component in it."""
    family = list(range(len(problem.components)))
    for index, component in enumerate(problem.components):
        for source in component.depends:
            old, new = family[source], family[index]
            family = [new if name == old else name for name in family]
    return family


def _lane(problem: FillProblem, keys: list[_Key], order: list[_Key], key: _Key) -> Lane:
    members = [index for index, other in enumerate(keys) if other == key]
    sources = {keys[source] for index in members for source in problem.components[index].depends}
    before = tuple(place for place, other in enumerate(order) if other in sources and other != key)
    return Lane(tuple(members), key[3], key[-1] >= 0, before)
