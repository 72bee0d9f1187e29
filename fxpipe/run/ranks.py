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
from fxpipe.run.sampling import BoundProgram, LocalRun, SampleRun, Tensors


class Programs(Protocol):
    """The programs of all ranks for one kind of call."""

    @property
    def programs(self) -> Sequence[SampleProgram]: ...

    @property
    def channels(self) -> list[Channel]: ...

    @property
    def warmup(self) -> int:
        """How many steps of a call are fresh."""
        ...


class _Call:
    """Which form each step of a call has: the first `warmup` of a stream are fresh, and so is what is outside of calls.

    Several predictions of one step, as with and without a prompt, are streams by their position. A step goes on while
    its time does not change: the inputs without rows or channels. No value of a sample decides it, so that every rank
    says the same while patches are on their way.
    """

    def __init__(self) -> None:
        self.begin(False)

    def begin(self, inside: bool) -> None:
        self.inside, self._done = inside, dict[tuple[int, int], int]()
        self._position, self._time = 0, dict[str, torch.Tensor]()

    def next(self, step: Programs, tensors: Tensors) -> tuple[str, str]:
        """Form and stream of the call that comes."""
        if "displaced" not in step.programs[0].forms or not self.inside:
            return "fresh", ""
        time = {name: tensor.clone() for name, tensor in tensors.items() if tensor.ndim < 2}
        same = time and time.keys() == self._time.keys() and all(torch.equal(time[n], self._time[n]) for n in time)
        self._position, self._time = self._position + 1 if same else 0, time
        key = self._position, id(step)
        self._done[key] = self._done.get(key, 0) + 1
        return "fresh" if self._done[key] <= step.warmup else "displaced", str(self._position)


class LocalRanks:
    """All ranks as threads of this process."""

    def __init__(self) -> None:
        self._bound: dict[int, tuple[Programs, Tensors, list[BoundProgram]]] = {}
        self._runs: dict[int, LocalRun] = {}
        self._call = _Call()

    @contextmanager
    def call(self) -> Iterator[None]:
        """A call of the user's pipeline: its steps belong together."""
        self._call.begin(True)
        try:
            yield
        finally:
            self._call.begin(False)
            for run in self._runs.values():
                run.reset()

    def predict(self, step: Programs, state: Tensors, tensors: Tensors) -> torch.Tensor:
        """The whole prediction; `state` has the module's tensors by their original names."""
        known = self._bound.get(id(step))
        if known is None or known[1] is not state:
            known = self._bound[id(step)] = step, state, [BoundProgram(program, state) for program in step.programs]
        run = self._runs.setdefault(len(step.programs), LocalRun(len(step.programs)))
        return run.predict(known[2], tensors, *self._call.next(step, tensors))[0]

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
        self._call, self._compared = _Call(), False

    @property
    def rank(self) -> int:
        return self._transport.rank

    @contextmanager
    def call(self) -> Iterator[None]:
        """As `LocalRanks.call`; what is raised inside ends the other ranks too."""
        self._compared = False
        self._call.begin(True)
        try:
            with told(self._transport):
                yield
                self._run.reset()
        finally:
            self._call.begin(False)

    def predict(self, step: Programs, state: Tensors, tensors: Tensors) -> torch.Tensor:
        """As `LocalRanks.predict`."""
        with told(self._transport):
            if not (self._call.inside and self._compared):
                self._compare(tensors)
            known = self._bound.get(id(step))
            if known is None or known[1] is not state:
                known = self._bound[id(step)] = step, state, self._take(step, state)
            return self._run.predict(known[2], tensors, *self._call.next(step, tensors))

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
