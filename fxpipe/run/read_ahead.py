"""Reading one batch ahead: none is lost and none is given twice, whatever ends the loop.

    pair()          (b0, b1)   (b1, b2)   ...   (b8, b9)   (b9, None)   None
    trained()            b0         b1               b8         b9

What has been read and not trained on stays here, for the next loop over the same iterator.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fxpipe.errors import RunError
from fxpipe.plan.ops import BatchRows

Tensors = Mapping[str, torch.Tensor]
Inputs = Mapping[str, torch.Tensor | BatchRows]
_END = object()


@dataclass(frozen=True)
class ReadBatch:
    """A batch as it was given. Tensors that are written to later no longer hold it, and tell so by their version.

    Args:
        size: samples of the whole batch.
        part: what was given, where `tensors` are one rank's samples alone; it is known by that object, since a rank may
            have none of its values.
        given: the tensors as programs take them.
        kind: of its shapes, which says what engine takes it, see `fxpipe.run.kinds`.
    """

    tensors: Tensors
    versions: Mapping[str, int]
    size: int
    part: Any
    given: Inputs
    kind: str = ""

    @staticmethod
    def of(tensors: Tensors, size: int, part: Any = None, given: Inputs | None = None) -> "ReadBatch":
        versions = {name: version(tensor) for name, tensor in tensors.items()}
        return ReadBatch(tensors, versions, size, part, tensors if given is None else given)

    @property
    def intact(self) -> bool:
        return all(version(tensor) == self.versions[name] for name, tensor in self.tensors.items())

    def equals(self, other: "ReadBatch") -> bool:
        """Whether these are the values that were given."""
        if other.part is not self.part or other.tensors.keys() != self.tensors.keys() or not self.intact:
            return False
        return all(t is self.tensors[n] or torch.equal(t, self.tensors[n]) for n, t in other.tensors.items())


def version(tensor: torch.Tensor) -> int:
    """A number that rises with every write into a tensor that torch can see."""
    return 0 if tensor.is_inference() else tensor._version


class ReadAhead:
    """A loader's batches, each with the one after it.

    Args:
        bind: turns a batch into tensors by name; what it raises counts as the loader's own exception.
    """

    def __init__(self, batches: Iterator[Any], bind: Callable[[Any], ReadBatch]) -> None:
        self._batches, self._bind = batches, bind
        self._waiting: deque[ReadBatch] = deque()
        self.failure: Exception | None = None

    def pair(self) -> tuple[ReadBatch, ReadBatch | None] | None:
        """The batch to train on and the next one; None at the end.

        Raises:
            Exception: the loader's, once all it gave before has been trained on.
            RunError: the loader has written into a batch that it gave.
        """
        self._read()
        if not self._waiting:
            failure, self.failure = self.failure, None
            if failure is not None:
                raise failure
            return None
        if not all(given.intact for given in self._waiting):
            raise RunError(
                "the loader wrote into a batch that it had given before; batches are read one ahead: "
                "give new tensors each time, for example clone() them"
            )
        first, *others = self._waiting
        return first, others[0] if others else None

    @property
    def is_ahead(self) -> bool:
        """Whether more was read than has been trained on."""
        return bool(self._waiting)

    def trained(self) -> None:
        """The first batch of the last pair is done with."""
        self._waiting.popleft()

    def _read(self) -> None:
        while len(self._waiting) < 2 and self.failure is None:
            try:
                batch = next(self._batches, _END)
                if batch is _END:
                    return
                self._waiting.append(self._bind(batch))
            except Exception as error:
                self.failure = error
