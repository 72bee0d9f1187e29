"""ZeRO-3: data parallel training whose weights, gradients and optimizer states are spread over all ranks.

    rank 0: 0F0 1F0 1B0 0B0     begin 0F0 | gather 0, gather 1 | wait 0 | run | let 0 go | begin 1F0 | wait 1 | run ...
                                begin 0B0 | wait 0 | run | let 0 go | wait scatter 1 | scatter 0

Weights are gathered stage by stage, the next stage's while one computes; gradients are scattered as they come, one
stage's at a time. The last stage's backward follows its forward: its weights are still there.

Sources: Rajbhandari et al., "ZeRO", SC 2020 (stage 3); Zhao et al., "PyTorch FSDP", VLDB 2023 (prefetch, rate limits).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fxpipe.plan.actions import Action
from fxpipe.plan.schedule import Schedule
from fxpipe.plan.staged import Staged
from fxpipe.simulate.collectives import Collective
from fxpipe.simulate.memory import ADAMW_BYTES
from fxpipe.simulate.op_lists import StepOps
from passes.case import Case
from passes.step_ops import step_of
from passes.step_ops.closing import Closing
from passes.step_ops.step import Step
from passes.step_ops.writer import RankWriter


def sharded_ops(case: Case, staged: Staged, schedule: Schedule, sizes: Sequence[int]) -> StepOps:
    """One step of all ranks, each of which trains all stages on micro-batches of its own."""
    step = step_of(case, staged, schedule.where(lambda action: action.kind != "R"), sizes)
    closing = Closing(step)
    collectives = _Collectives(step, len(step.messages) + len(closing.messages) + staged.num_stages)
    ranks = [_ShardedWriter(step, closing, rank, collectives).write() for rank in range(case.world_size)]
    return StepOps(ranks, [_held(case)] * case.world_size)


def sharded_seconds(case: Case, staged: Staged, num_microbatches: int) -> float:
    """All collectives of so many micro-batches a rank, which follow each other."""
    ranks, costs, total = tuple(range(case.world_size)), case.costs, 0.0
    for stage in range(staged.num_stages):
        weights, is_last = costs.weights_of(staged.blocks(stage)), stage == staged.num_stages - 1
        gathered = case.cluster.all_gather_seconds(ranks, sum(w.num_bytes for w in weights))
        scattered = case.cluster.all_gather_seconds(ranks, sum(w.num_bytes for w in weights if w.trained))
        total += (1 if is_last else 2) * gathered + scattered
    return num_microbatches * total


def _held(case: Case) -> Mapping[str, int]:
    """A share of what is trained, frozen components whole."""
    weights, ranks = case.costs.weights, case.world_size
    whole = sum(weight.num_bytes for weight in weights if weight.components)
    shared = sum(weight.num_bytes for weight in weights if not weight.components)
    trained = sum(weight.num_elements for weight in weights if weight.trained)
    return {"state": whole + -(-shared // ranks), "optimizer": -(-ADAMW_BYTES * trained // ranks)}


@dataclass(frozen=True, eq=False)
class _Collectives:
    """The collectives of all ranks, by the turn of the action they are for: every rank has as many."""

    step: Step
    first_edge: int
    _known: dict[tuple[str, int], Collective] = field(default_factory=dict)

    def of(self, kind: str, turn: int, num_bytes: int) -> Collective:
        if (kind, turn) not in self._known:
            ranks = tuple(range(len(self.step.schedule.ranks)))
            self._known[kind, turn] = Collective(self.first_edge + len(self._known), kind, ranks, num_bytes)
        return self._known[kind, turn]


class _ShardedWriter(RankWriter):
    """Writes one rank: its forwards and backwards gather what they read and scatter what they make."""

    def __init__(self, step: Step, closing: Closing, rank: int, collectives: _Collectives) -> None:
        super().__init__(step, closing, rank)
        self._collectives, self._num_ranks = collectives, len(step.schedule.ranks)
        self._uses = [action for action in step.schedule.ranks[rank] if action.kind in "FB"]
        self._turn = 0
        self._gathered: dict[int, tuple[Collective | None, int]] = {}  # by turn: until awaited, and the weights
        self._scattering: tuple[Collective, int, int] | None = None  # the last one, its gradients, their stage

    def _act(self, action: Action) -> None:
        if action.kind == "T":
            super()._act(action)
            return
        turn = self._turn
        self._bring(turn)
        self._bring(turn + 1)
        gathering, weights = self._gathered.pop(turn, (None, None))
        if gathering is not None:
            self.ops.wait_for(gathering)
        super()._act(action)
        if weights is not None:
            self.ops.use(weights)
            if self._is_kept(turn + 1):
                self._gathered[turn + 1] = None, weights
        self._turn += 1

    def _is_kept(self, turn: int) -> bool:
        """Whether an action reads the weights that the one before has gathered."""
        if not 0 < turn < len(self._uses):
            return False
        before, action = self._uses[turn - 1 : turn + 1]
        return (before.stage, before.microbatch) == (action.stage, action.microbatch)

    def _bring(self, turn: int) -> None:
        """Start to gather what an action reads, unless that is under way or here."""
        if turn in self._gathered or turn >= len(self._uses) or self._is_kept(turn):
            return
        weights = self.step.case.costs.weights_of(self.step.units.staged.blocks(self._uses[turn].stage))
        size = sum(weight.num_bytes for weight in weights)
        if size:
            gathering = self._collectives.of("all_gather", turn, size)
            self.ops.issue(gathering)
            self._gathered[turn] = gathering, self.ops.make("gathered weights", size)

    def _accumulate(self, stage: int, num_bytes: int) -> None:
        """Scatter a stage's gradients when the one before is over."""
        if not num_bytes:
            return
        gradients = self.ops.make("gradients", num_bytes)
        self._wait_scattered()
        scattering = self._collectives.of("reduce_scatter", self._turn, num_bytes)
        self.ops.issue(scattering)
        self.ops.use(gradients)
        self._scattering = scattering, gradients, stage

    def _wait_scattered(self) -> None:
        """Keep this rank's share of the last scattered gradients, added to that of earlier micro-batches."""
        if self._scattering is None:
            return
        scattering, gradients, stage = self._scattering
        share = -(-scattering.num_bytes // self._num_ranks)
        self.ops.wait_for(scattering)
        self.ops.use(gradients)
        if stage in self.totals:
            self.ops.run(self.step.seconds.adding(share))
        else:
            self.totals[stage] = self.ops.make("gradients", share)
        self._scattering = None

    def _close(self) -> None:
        self._wait_scattered()
        super()._close()
