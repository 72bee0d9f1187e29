"""Who runs what, and what follows the last action: sums of gradients over replicas and tied weights, and the loss.

rank 0: 0F0 .. 0R0     reduce(0, 1) of what only stage 0 has     tied: grad to rank 0, its sum to rank 1
rank 1: 0F1 .. 0R1                                               loss: to rank 0, its sum to rank 1
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count

import torch

from fxpipe.plan.rank_program import Gathering, Reduction
from fxpipe.plan.schedule import Schedule
from passes.lowering.borders import Border
from passes.lowering.units import CapturedUnit, Value
from passes.step_ops.exchange import TiedGradient, closing_sends
from passes.step_ops.sharding import summing_stage
from passes.step_ops.turns import RankTurns, Turn

Key = tuple[str, int]


@dataclass(frozen=True)
class UnitLayout:
    """What is lowered: units, ("F", stage) or ("T", component), what each reads and gives, and who runs them.

    `border_at` tells it of a unit at a number of samples. Replicas that sum gradients of every micro-batch are those of
    a whole batch's order, `planned`, also where one has no samples.
    """

    units: Mapping[Key, CapturedUnit]
    border_at: Callable[[Key, int], Border]
    schedule: Schedule
    sizes: tuple[int, ...]
    loss: str
    planned: Schedule
    zeros: Mapping[str, Key] = field(default_factory=dict)  # values that are zeros, by the unit that would make them

    @property
    def summing(self) -> Schedule:
        """The order whose replicas sum gradients."""
        return self.planned if self.planned.is_scattered else self.schedule

    def without(self, stages: Collection[int]) -> "UnitLayout":
        """The layout without some stages; what they return is zeros to the others."""
        gone = {("F", stage) for stage in stages}
        zeros = {name: key for key in gone & self.units.keys() for name in self.units[key].returns}
        left = {key: unit for key, unit in self.units.items() if key not in gone}
        schedule, planned = (
            of.where(lambda a: a.kind == "T" or a.stage not in stages) for of in (self.schedule, self.planned)
        )
        return replace(self, units=left, schedule=schedule, planned=planned, zeros=zeros)

    def border(self, key: Key, microbatch: int) -> Border:
        return self.border_at(key, self.sizes[microbatch])

    @cached_property
    def producer(self) -> dict[str, Key]:
        return {value: key for key, unit in self.units.items() for value in unit.returns}

    def value(self, name: str, microbatch: int) -> Value:
        """Of a unit's, shape and type for a micro-batch."""
        return next(v for v in self.border(self.producer[name], microbatch).returns if v.name == name)

    @cached_property
    def rank_of(self) -> dict[tuple[Key, int], int]:
        """The rank that runs a unit for a micro-batch."""
        owner = {}
        for rank, actions in enumerate(self.schedule.ranks):
            for action in actions:
                if action.kind in "FT" and not action.is_piece:
                    owner[(action.kind, action.stage), action.microbatch] = rank
        return owner

    @cached_property
    def loss_ranks(self) -> tuple[int, ...]:
        """The ranks that make some micro-batch's loss; the first adds them up."""
        unit = self.producer[self.loss]
        return tuple(dict.fromkeys(self.rank_of[unit, m] for m in range(len(self.sizes))))


@dataclass(frozen=True)
class Exchanged:
    """What ranks exchange beside what actions send: gradients of tied parameters, sums over replicas, and parameters
    that these share out, gathered in `turns`, by rank."""

    tied: Sequence[TiedGradient]
    reductions: Sequence[Reduction]
    gatherings: Sequence[Gathering]
    turns: Mapping[int, RankTurns]


def plan_gatherings(
    all_turns: Sequence[Turn], owners: Mapping[int, Mapping[str, int]], state: Mapping[str, torch.Tensor], edge: int
) -> tuple[Gathering, ...]:
    """One per turn, with edges from `edge` on; `owners` are by stage and parameter."""
    return tuple(
        Gathering(
            edge + number, turn.stage, turn.ranks, tuple(of := owners[turn.stage]), sum(state[n].nbytes for n in of),
            tuple(of.values()), turn.number,
        )
        for number, turn in enumerate(all_turns)
    )  # fmt: skip


def plan_reductions(
    layout: UnitLayout, own: Mapping[int, Mapping[str, int]], first_edge: int, of: Mapping[str, int], gathered: bool
) -> tuple[Reduction, ...]:
    """One per stage with replicas: the gradients of its `own_parameters`; where these have owners, by name, which then
    tell the others their values unless these are `gathered`."""
    reductions: list[Reduction] = []
    for edge, (stage, sizes) in enumerate(own.items(), first_edge):
        ranks, owned = tuple(sorted(layout.summing.stage_ranks[stage])), tuple(of[name] for name in sizes) if of else ()
        values_edge = edge + len(own) if owned and not gathered else -1
        reductions.append(Reduction(edge, stage, ranks, tuple(sizes), sum(sizes.values()), owned, values_edge))
    return tuple(reductions)


def later_turns(reductions: Sequence[Reduction], schedule: Schedule, edge: int) -> Iterator[Reduction]:
    """Those of gradients that come after the first sums of their stage, with edges from `edge` on."""
    firsts, edges = {reduction.stage: reduction for reduction in reductions}, count(edge)
    turns = dict.fromkeys((a.stage, a.turn) for actions in schedule.ranks for a in actions if a.turn)
    for stage, turn in turns:
        if stage in firsts:
            yield replace(firsts[stage], edge=next(edges), values_edge=-1, turn=turn)


def own_parameters(layout: UnitLayout, gathered: bool) -> dict[int, dict[str, int]]:
    """Bytes, by stage with replicas, of the trained parameters whose gradients these sum; see `summing_stage`."""
    holders: dict[str, set[int]] = {}
    givers: dict[str, set[int]] = {}
    for key in layout.units:
        if key[0] == "F":
            border = layout.border(key, 0)
            for name in border.state:
                holders.setdefault(name, set()).add(key[1])
            for name in border.weight_grads:
                givers.setdefault(name, set()).add(key[1])
    ranks_of = layout.summing.stage_ranks
    summed_by = {name: summing_stage(holders[name], of, ranks_of, gathered) for name, of in givers.items()}
    found: dict[int, dict[str, int]] = {}
    for stage, ranks in enumerate(ranks_of):
        if len(ranks) > 1:
            border = layout.border(("F", stage), 0)
            names = (name for name in border.weight_grads if summed_by[name] == stage)
            found[stage] = {name: border.state[name].num_bytes for name in names}
    return found


def tied_gradients(layout: UnitLayout, whole: UnitLayout, reduced: Collection[str]) -> list[TiedGradient]:
    """Trained parameters that more than one rank holds, unless they are reduced with their stage.

    Those hold them, too, that read them in stages of the `whole` step which this one leaves out.
    """
    ranks_of: dict[Key, set[int]] = {}
    for (key, _), rank in whole.rank_of.items():
        ranks_of.setdefault(key, set()).add(rank)
    givers: dict[str, set[int]] = {}
    holders: dict[str, set[int]] = {}
    values: dict[str, Value] = {}
    for key, on in ranks_of.items():
        border = whole.border(key, 0)
        values |= border.state
        for name in border.state:
            holders.setdefault(name, set()).update(on)
        for name in border.weight_grads if key in layout.units else ():
            givers.setdefault(name, set()).update(on)
    return [
        TiedGradient(name, values[name].num_bytes, tuple(sorted(ranks)), tuple(sorted(holders[name])))
        for name, ranks in sorted(givers.items())
        if len(holders[name]) > 1 and name not in reduced
    ]


def closing(layout: UnitLayout, tied: Sequence[TiedGradient]) -> Iterator[tuple[int, int, str, str]]:
    """(source, destination, value, kind), every one after those that it waits for."""
    for src, dst, gradient in closing_sends(tied, layout.loss_ranks, len(layout.schedule.ranks)):
        yield (src, dst, layout.loss, "loss") if gradient is None else (src, dst, gradient.name, "gradient")
