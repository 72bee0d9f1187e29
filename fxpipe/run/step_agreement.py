"""Whether the ranks of a launch make the same predictions, found out beside them: numbers that nobody waits for.

rank 0: numbers of 1 | predict 1 | numbers of 2; those of 1 are alike | predict 2 | end; those of 2 are not: rank 1 ...

What is predicted (shapes, form, stream) is told when it begins, so that a rank with more steps than the others ends
them, and does not wait. Of inputs a few products with fixed random vectors are told with the next prediction: other
values have other ones, while what rounds otherwise on another device is within a few roundings.
"""

import hashlib
from collections.abc import Iterable
from functools import cache

import torch

from fxpipe.errors import RunError
from fxpipe.plan.transport import Pending, Transport
from fxpipe.run.patched import settled

_ENDED = 0.0
_NUM_VECTORS, _LENGTH = 3, 1024
_ROUNDINGS = 8.0
_SKETCH = 2 + _NUM_VECTORS  # rounding, the norm, and the products
_NOTHING = torch.zeros(_SKETCH, dtype=torch.float64)

_REMEDY = {
    "prediction": "give every rank the same call: as many steps, the same size, guidance, callbacks and weights",
    "time": "give every rank the same scheduler and number of steps",
    "input": "give every rank the same generators, torch.manual_seed and guidance, and change latents on all or none",
}


class StepAgreement:
    """One rank's part in it, over the predictions of a call; all ranks must be told alike what they do."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._count, self._pending = 0, list[Pending[list[torch.Tensor]]]()
        self._sketches = [_NOTHING, _NOTHING]  # of times, and of other inputs; read as late as can be

    def begin(self, what: object) -> None:
        """A prediction begins: of which kind. Raises RunError where the one before was not alike on all ranks."""
        digest = hashlib.sha256(repr(what).encode()).digest()
        self._tell(1.0 + int.from_bytes(digest[:6], "big"))

    def inputs(self, tensors: Iterable[torch.Tensor]) -> None:
        """Of the prediction that has begun, when all of them are there."""
        of_time: list[torch.Tensor] = []
        others: list[torch.Tensor] = []
        for tensor in tensors:
            (of_time if tensor.ndim < 2 else others).append(settled(tensor))
        self._sketches = [_sketch(of_time), _sketch(others)]

    def end(self) -> None:
        """No further prediction in this call."""
        self._tell(_ENDED)
        self.settle()
        self._count, self._sketches = 0, [_NOTHING, _NOTHING]

    def passed(self) -> None:
        """What has begun is no prediction, and all ranks are there."""
        self.settle()
        self._count -= 1

    def settle(self) -> None:
        """Wait until every rank is where this one is. Raises RunError where one is elsewhere."""
        for pending in self._pending:
            self._compare([numbers.tolist() for numbers in pending.wait()])
        self._pending = []

    def _tell(self, kind: float) -> None:
        self.settle()
        numbers = torch.cat([torch.tensor([kind], dtype=torch.float64), *(sketch.cpu() for sketch in self._sketches)])
        self._pending = [self._transport.all_gather(numbers, "what every rank predicts")]
        self._count += 1

    def _compare(self, told: list[list[float]]) -> None:
        before, now = self._count - 1, self._count
        self._require("time", before, [one[1 : 1 + _SKETCH] for one in told])
        self._require("input", before, [one[1 + _SKETCH :] for one in told])
        self._require("prediction", now, [[0.0, 0.0, one[0]] for one in told])

    def _require(self, what: str, number: int, told: list[list[float]]) -> None:
        first, bound = told[0], _ROUNDINGS * told[0][0] * told[0][1]
        alike = [all(abs(a - b) <= bound for a, b in zip(one, first, strict=True)) for one in told]
        others = [rank for rank, same in enumerate(alike) if not same]
        if others:
            ended = [rank for rank, one in enumerate(told) if what == "prediction" and one[-1] == _ENDED]
            more = f" (ranks {ended} make no further one)" if ended else ""
            raise RunError(f"ranks {others} have another {what} {number} of a call than rank 0{more}; {_REMEDY[what]}")


def _sketch(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Rounding of these types, the norm of all values, and their products with vectors."""
    if not tensors:
        return _NOTHING
    rounding = max([1e-12, *(torch.finfo(one.dtype).eps for one in tensors if one.is_floating_point())])
    real = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
    values = torch.cat([tensor.detach().flatten().double() for tensor in real])
    blocks = torch.nn.functional.pad(values, (0, -len(values) % _LENGTH)).view(-1, _LENGTH)
    vectors, weights = _vectors(len(blocks), values.device)
    found = torch.cat([values.new_tensor([rounding]), values.norm().reshape(1), weights @ (blocks @ vectors)])
    return found.nan_to_num(nan=-1.0)


@cache
def _vectors(num_blocks: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one block, and how much of every block counts."""
    draw = torch.Generator().manual_seed(0)
    shapes = (_LENGTH, _NUM_VECTORS), (num_blocks,)
    vectors, weights = (torch.randn(shape, generator=draw, dtype=torch.float64).to(device) for shape in shapes)
    return vectors, weights
