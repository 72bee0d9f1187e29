"""Seconds of what ranks run: a stage's forward, backward or part of one; a component; sums; draws.

1F0    blocks 4 to 7, and the local operations they share        1B0    the same backward, runs to recompute anew
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from fxpipe.plan.actions import Action
from fxpipe.plan.staged import Staged
from passes.case import Case


@dataclass(frozen=True, eq=False)
class ActionSeconds:
    """Seconds of every action of a placement; each is worked out once per number of samples."""

    case: Case
    staged: Staged
    _known: dict[tuple[str, int, int], float] = field(default_factory=dict)
    _adding: dict[int, float] = field(default_factory=dict)

    def of(self, action: Action, num_samples: int) -> float:
        """Of F, B, I, W or T on a micro-batch of so many samples, or of a piece."""
        if action.is_piece:
            layers = self.case.frozen.seconds_at(num_samples)[action.stage]
            return sum(layers[slice(*action.layers)])
        key = action.kind, action.stage, num_samples
        if key not in self._known:
            self._known[key] = self._of(action.kind, action.stage, num_samples)
        return self._known[key]

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

    def adding(self, num_bytes: int) -> float:
        """Of the sum of two tensors, or lists of them, of so many bytes."""
        if num_bytes not in self._adding:
            self._adding[num_bytes] = self.case.adding_seconds(num_bytes)
        return self._adding[num_bytes]
