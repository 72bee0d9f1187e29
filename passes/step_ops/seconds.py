"""Seconds of what ranks run: a stage's forward, backward or part of one; a component; sums; draws.

1F0    blocks 4 to 7, and the local operations they share        1B0    the same backward, runs to recompute anew
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from fxpipe.plan.actions import Action
from fxpipe.plan.staged import Staged
from fxpipe.remembered import remembered
from passes.case import Case


@dataclass(frozen=True, eq=False)
class ActionSeconds:
    """Seconds of every action of a placement; each is worked out once per number of samples."""

    case: Case
    staged: Staged

    def of(self, action: Action, num_samples: int) -> float:
        """Of F, B, I, W or T on a micro-batch of so many samples, or of a piece."""
        if action.is_piece:
            layers = self.case.frozen.seconds_at(num_samples)[action.stage]
            return sum(layers[slice(*action.layers)])
        return self._of(action.kind, action.stage, num_samples)

    @remembered
    def _of(self, kind: str, stage: int, num_samples: int) -> float:
        times = self.case.costs.at(num_samples)
        if kind == "T":
            return times.component_seconds[stage] + self._local("F", (), (stage,), num_samples)
        of_kind: Mapping[str, Sequence[float]] = {
            "F": times.forward_seconds,
            "B": times.backward_seconds,
            "I": times.input_gradient_seconds,
            "W": times.weight_gradient_seconds,
        }
        blocks = self.staged.blocks(stage)
        seconds = sum(of_kind[kind][block] for block in blocks) + self._local(kind, blocks, (), num_samples)
        again = {block for run in self.staged.recomputed(stage) for block in range(*run)} if kind in "BI" else set()
        if again:
            seconds += sum(times.forward_seconds[block] for block in again)
            seconds += self._local("F", blocks, (), num_samples) if again.issuperset(blocks) else 0.0
        return seconds

    def _local(self, kind: str, blocks: Collection[int], components: Collection[int], num_samples: int) -> float:
        """Of the local operations that a unit of these computes for itself."""
        local = self.case.costs.local
        if local is None:
            return 0.0
        wanted = frozenset[int]().union(
            *(local.of_block[b] for b in blocks), *(local.of_component[c] for c in components)
        )
        if not wanted:
            return 0.0
        seconds = local.at(num_samples)[kind]
        return float(sum(seconds[node] for node in wanted))

    @remembered
    def adding(self, num_bytes: int) -> float:
        """Of the sum of two tensors, or lists of them, of so many bytes."""
        return self.case.adding_seconds(num_bytes)
