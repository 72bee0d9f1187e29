"""The bytes of calls where only block costs are known: saved values by block, and the largest operation of each."""

from dataclasses import dataclass

from passes.costs.call_bytes import BackwardBytes, ForwardBytes, UnitKey
from passes.step_ops.units import Units


@dataclass(frozen=True, eq=False)
class CoarseBytes:
    """From block costs alone: saved values by block, and the largest operation of each."""

    units: Units

    def forward(self, unit: UnitKey, num_samples: int) -> ForwardBytes:
        case, staged = self.units.case, self.units.staged
        edges = self.units.edges
        of = self.units.table[unit]
        returned = {name: (name, edges[name].num_bytes(num_samples)) for name in of.readers if name in of.own}
        if unit[0] == "T":
            largest = max(case.frozen.largest_at(num_samples)[unit[1]], default=0.0)
            return ForwardBytes(int(largest), 0, returned)
        blocks, runs = staged.blocks(unit[1]), staged.recomputed(unit[1])
        again = {block for run in runs for block in range(*run)}
        saved = case.costs.stage_saved_bytes([b for b in blocks if b not in again], num_samples)
        saved += sum(case.costs.stage_saved_bytes(range(*run), num_samples, True) for run in runs)
        return ForwardBytes(saved + self._largest(unit, num_samples), saved, returned)

    def backward(self, unit: UnitKey, num_samples: int, part: str, given_up: frozenset[str]) -> BackwardBytes:
        case, staged = self.units.case, self.units.staged
        of, blocks = self.units.table[unit], staged.blocks(unit[1])
        names = [name for name in of.makers if name in of.own and self.units.returns_gradient(name)]
        gradients = {name: (f"grad {name}", self.units.edges[name].num_bytes(num_samples)) for name in names}
        weights = sum(w.num_bytes for w in case.costs.weights_of(blocks) if w.trained)
        again = max(
            (case.costs.stage_saved_bytes(range(*r), num_samples) for r in staged.recomputed(unit[1])), default=0
        )
        largest = self._largest(unit, num_samples)
        saved = self.forward(unit, num_samples).saved
        if part == "W":
            return BackwardBytes(largest + weights, weight_gradients=weights)
        if part == "I":
            return BackwardBytes(largest + again, gradients, made=again, saved=saved)
        return BackwardBytes(largest + again + weights, gradients, weights)

    def layers(self, component: int, layers: tuple[int, int], num_samples: int) -> int:
        largest = self.units.case.frozen.largest_at(num_samples)[component]
        return int(max(largest[slice(*layers)], default=0.0))

    def _largest(self, unit: UnitKey, num_samples: int) -> int:
        largest = self.units.case.costs.temporary_bytes(num_samples)
        return max((largest[block] for block in self.units.staged.blocks(unit[1])), default=0)
