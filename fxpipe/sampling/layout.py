"""What estimates of all layouts share."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fxpipe.cluster import Cluster
from fxpipe.plan import displaced_ops, row_ops
from fxpipe.remembered import remembered
from fxpipe.sampling.case import SampleCase
from fxpipe.sampling.planning import Choices
from fxpipe.sampling.seconds import own_seconds


@dataclass(frozen=True)
class Estimate:
    """Seconds of a call, bytes that the busiest rank receives in a steady step, bytes that the fullest one holds;
    seconds of an exact step, bytes of the most weights that a rank has, and of the most that it holds beside."""

    seconds: float
    wire_bytes: int
    memory_bytes: int
    fresh_seconds: float
    weight_bytes: int
    other_bytes: int

    def warmed(self, by: "Estimate", steps: int) -> "Estimate":
        """With so many of its exact steps made by another layout, whose ranks have all weights."""
        seconds = self.seconds + steps * (by.fresh_seconds - self.fresh_seconds)
        memory = max(by.memory_bytes, by.weight_bytes + self.other_bytes)
        return replace(self, seconds=seconds, memory_bytes=memory, weight_bytes=by.weight_bytes)


class LayoutCosts:
    """A layout of a case, on a cluster's links."""

    def __init__(self, case: SampleCase, made: Choices, cluster: Cluster, shares: Sequence[float] = ()) -> None:
        self.case, self.made, self.grid = case, made, made.grid
        self.links = case.links(cluster, self.grid, tuple(shares))
        self.size = case.group_size(self.grid)

    def moving(self, num_bytes: float) -> float:
        """Seconds of a kernel that reads and writes so many bytes."""
        return self.case.cost_model.moving_seconds(int(num_bytes), int(num_bytes))

    def own(self, operation: Callable[..., Any], *arguments: Any) -> float:
        """Seconds of one of a patch's own operations."""
        return own_seconds(self.case.cost_model, operation, *arguments)

    @remembered
    def correction(self, own_bytes: int, num_patches: int, num_fresh: int) -> float:
        """Seconds by which moments that are corrected take longer than those that are merged."""
        if self.made.how.norms != "corrected":
            return 0.0
        part, counts = of_bytes(own_bytes).view(2, 1, -1), [1] * num_patches
        parts, fresh = [part] * num_patches, [*range(num_fresh)]
        corrected = self.own(displaced_ops.corrected, parts, parts[:num_fresh], fresh, counts)
        return corrected - self.own(row_ops.merge_moments, parts, counts)

    def watched(self, seconds: float, steps: int) -> float:
        """Of a call of so many seconds, until those that watch have the last prediction."""
        if not self.made.watching:
            return seconds
        shown = self.links.to_watching(self.result_bytes(self.case.num_samples), self.made.watching)
        return max(seconds, seconds / steps + (steps - 1) * shown.until_there) + shown.until_there

    def inputs_bytes(self, names: Collection[str] | None = None) -> int:
        """Of the whole call, or those that these operations read; those that tell whether conditions have changed are
        there twice."""
        likes, of_call, nodes = self.case.likes, self.case.of_call, self.case.rows(self.case.num_samples).sized.nodes
        read = [n for n in likes if names is None or any(user.name in names for user in nodes[n].users)]
        return sum(likes[name].nbytes * (2 if name in of_call else 1) for name in read)

    def result_bytes(self, num_samples: int) -> int:
        return int(self.case.rows(num_samples).sized.result.meta["val"].nbytes)


def of_bytes(num_bytes: int) -> torch.Tensor:
    """Any value of this size."""
    return torch.empty(max(num_bytes // 4, 1), device="meta")
