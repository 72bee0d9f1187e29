"""DistributedDataParallel: the whole step on half of the samples a rank, gradients reduced while others are made."""

from collections.abc import Iterator, Mapping

import torch.distributed as dist  # noqa: TID251 (a peer)
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.racing.contestant import optimizer_of, taken_gradients
from benchmarks.racing.model import Batch, RacedStep

BUCKETS = (8, 25)  # MiB, tried


class Replicas:
    """This rank's replica. Frozen work is under no_grad, gradients are views of buckets."""

    def __init__(self, step: RacedStep, bucket: int) -> None:
        self.name, self._step = f"DDP, buckets of {bucket} MiB", step
        self._net = DistributedDataParallel(step, bucket_cap_mb=bucket, gradient_as_bucket_view=True, static_graph=True)
        self._optimizer = optimizer_of(step.parameters())

    def gradients(self, batch: Batch) -> Iterator[tuple[Tensor | None, Mapping[str, Tensor]]]:
        loss = self.run(batch)
        dist.all_reduce(loss)
        found = {name: p.grad.clone() for name, p in self._step.named_parameters() if p.grad is not None}
        taken_gradients(self._step)
        yield loss / 2, found

    def step(self, batch: Batch) -> None:
        self.run(batch)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def run(self, batch: Batch) -> Tensor:
        """Forward and backward; the loss of this rank's half."""
        loss: Tensor = self._net(**{name: value.chunk(2)[dist.get_rank()] for name, value in batch.items()})
        loss.backward()
        return loss.detach()
