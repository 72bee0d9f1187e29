"""Calls of a spread module, run by its ranks' programs: all of them as threads of this process, or this process's own.

with ranks.call():                 a call of the user's pipeline: its steps belong together
    ranks.predict(step, state, tensors)
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from fxpipe.plan.sample_program import SampleProgram
from fxpipe.plan.transport import Channel, Transport
from fxpipe.run.agreement import agree, agree_on_state, checksum, told
from fxpipe.run.sampling import BoundProgram, SampleRun, Tensors
from fxpipe.run.transport import run_ranks


class Programs(Protocol):
    """The programs of all ranks for one kind of call."""

    @property
    def programs(self) -> Sequence[SampleProgram]: ...

    @property
    def channels(self) -> list[Channel]: ...


def _run(bound: Sequence[BoundProgram], tensors: Tensors) -> torch.Tensor:
    def body(transport: Transport) -> torch.Tensor:
        return SampleRun(transport).predict(bound[transport.rank], tensors)

    return run_ranks(len(bound), body)[0]


class LocalRanks:
    """All ranks as threads of this process."""

    def __init__(self) -> None:
        self._bound: dict[int, tuple[Programs, Tensors, list[BoundProgram]]] = {}

    @contextmanager
    def call(self) -> Iterator[None]:
        """A call of the user's pipeline: its steps belong together."""
        yield

    def predict(self, step: Programs, state: Tensors, tensors: Tensors) -> torch.Tensor:
        """The whole prediction; `state` has the module's tensors by their original names."""
        known = self._bound.get(id(step))
        if known is None or known[1] is not state:
            known = self._bound[id(step)] = step, state, [BoundProgram(program, state) for program in step.programs]
        return _run(known[2], tensors)

    def close(self) -> None:
        """Nothing to leave."""


class LaunchedRank:
    """This process as one rank of a launch, which all run the same loop. The first step of every call is compared over
    them: what is called, with which inputs; so are weights, when they are first used."""

    def __init__(self, connect: Callable[[], Transport]) -> None:
        self._transport = connect()
        self._run = SampleRun(self._transport)
        self._bound: dict[int, tuple[Programs, Tensors, BoundProgram]] = {}
        self._opened: set[Channel] = set()
        self._inside, self._compared = False, False

    @property
    def rank(self) -> int:
        return self._transport.rank

    @contextmanager
    def call(self) -> Iterator[None]:
        """As `LocalRanks.call`; what is raised inside ends the other ranks too."""
        self._inside, self._compared = True, False
        try:
            with told(self._transport):
                yield
        finally:
            self._inside = False

    def predict(self, step: Programs, state: Tensors, tensors: Tensors) -> torch.Tensor:
        """As `LocalRanks.predict`."""
        with told(self._transport):
            if not (self._inside and self._compared):
                self._compare(tensors)
            known = self._bound.get(id(step))
            if known is None or known[1] is not state:
                known = self._bound[id(step)] = step, state, self._take(step, state)
            return self._run.predict(known[2], tensors)

    def close(self) -> None:
        self._transport.close()

    def _compare(self, tensors: Tensors) -> None:
        shapes = {name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()}
        agree(self._transport, {"call": shapes} | {name: checksum(tensor) for name, tensor in tensors.items()})
        self._compared = True

    def _take(self, step: Programs, state: Tensors) -> BoundProgram:
        """Hold this rank's program; all ranks are here at once, for they have agreed on the call."""
        own = step.programs[self.rank]
        mine = {name: state[name].to(self._transport.device) for name in own.state}
        agree_on_state(self._transport, mine)
        channels = sorted(set(step.channels) - self._opened)
        self._transport.open_channels(channels, [])
        self._opened.update(channels)
        return BoundProgram(own, mine)
