"""Calls of a spread module, run by its ranks' programs: all of them as threads of this process, or this process's own.

with ranks.call():                                      a call of the user's pipeline: its steps belong together
    ranks.predict(step, state, tensors, "cond")         step 0 of a stream: fresh
    ranks.predict(step, state, tensors, "cond")         after `step.warmup` steps: displaced, where it has that form
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from fxpipe.plan.sample_program import SampleProgram
from fxpipe.plan.transport import Channel, Transport
from fxpipe.run.agreement import agree, agree_on_state, checksum, told
from fxpipe.run.sampling import BoundProgram, LocalRun, SampleRun, Tensors


class Programs(Protocol):
    """The programs of all ranks for one kind of call; displaced ones run after `warmup` steps."""

    @property
    def programs(self) -> Sequence[SampleProgram]: ...

    @property
    def channels(self) -> list[Channel]: ...

    @property
    def warmup(self) -> int: ...


class Ranks(ABC):
    """What in-process ranks and a launch's have in common: which step of a call it is, and so which form is run."""

    def __init__(self) -> None:
        self._num_steps: Counter[tuple[str, int]] | None = None  # of a stream by a program; None outside of calls
        self._position, self._time = 0, dict[str, torch.Tensor]()

    @contextmanager
    def call(self) -> Iterator[None]:
        """A call of the user's pipeline: its steps belong together. Calls within a call are part of it."""
        if self._num_steps is not None:
            yield
            return
        self._num_steps = Counter()
        self._position, self._time = 0, {}
        try:
            with self._ended():
                yield
        finally:
            self._num_steps = None

    def predict(self, step: Programs, state: Tensors, tensors: Tensors, stream: str | None = None) -> torch.Tensor:
        """The whole prediction.

        Args:
            state: the module's tensors by their original names.
            stream: where one step predicts more than once: which of these it is; by its position where left out.
        """
        with self.call():
            form, name = "fresh", ""
            if "displaced" in step.programs[0].forms:
                assert self._num_steps is not None
                name = self._stream(tensors) if stream is None else stream
                form = "displaced" if self._num_steps[name, id(step)] >= step.warmup else "fresh"
                self._num_steps[name, id(step)] += 1
            return self._predict(step, state, tensors, form, name)

    def _stream(self, tensors: Tensors) -> str:
        """The position among the predictions of one step, as with and without a prompt.

        A step goes on while its time does not change: the inputs without rows or channels. No value of a sample decides
        it, so that every rank says the same while patches are on their way.
        """
        time = {name: tensor.clone() for name, tensor in tensors.items() if tensor.ndim < 2}
        same = time and time.keys() == self._time.keys() and all(torch.equal(time[n], self._time[n]) for n in time)
        self._position, self._time = self._position + 1 if same else 0, time
        return str(self._position)

    @abstractmethod
    def _predict(self, step: Programs, state: Tensors, tensors: Tensors, form: str, stream: str) -> torch.Tensor: ...

    @abstractmethod
    @contextmanager
    def _ended(self) -> Iterator[None]:
        """Around a call: nothing of it is left to the next, however it ends."""
        ...

    @abstractmethod
    def close(self) -> None:
        """Leave the network."""
        ...


class LocalRanks(Ranks):
    """All ranks as threads of this process."""

    def __init__(self) -> None:
        super().__init__()
        self._runs: dict[int, LocalRun] = {}  # by the number of ranks
        self._bound: dict[int, tuple[Programs, Tensors, list[BoundProgram]]] = {}

    def _predict(self, step: Programs, state: Tensors, tensors: Tensors, form: str, stream: str) -> torch.Tensor:
        known = self._bound.get(id(step))
        if known is None or known[1] is not state:
            known = self._bound[id(step)] = step, state, [BoundProgram(program, state) for program in step.programs]
        run = self._runs.setdefault(len(step.programs), LocalRun(len(step.programs)))
        return run.predict(known[2], tensors, form, stream)[0]

    @contextmanager
    def _ended(self) -> Iterator[None]:
        try:
            yield
        finally:
            for run in self._runs.values():
                run.reset()

    def close(self) -> None:
        pass


class LaunchedRank(Ranks):
    """This process as one rank of a launch, which all run the same loop. The first step of every call is compared over
    them: what is called, with which inputs; so are weights, when they are first used."""

    def __init__(self, connect: Callable[[], Transport]) -> None:
        super().__init__()
        self._transport = connect()
        self._run = SampleRun(self._transport)
        self._bound: dict[int, tuple[Programs, Tensors, BoundProgram]] = {}
        self._opened: set[Channel] = set()
        self._compared = False

    @property
    def rank(self) -> int:
        return self._transport.rank

    def _predict(self, step: Programs, state: Tensors, tensors: Tensors, form: str, stream: str) -> torch.Tensor:
        if not self._compared:
            self._compare(tensors)
        known = self._bound.get(id(step))
        if known is None or known[1] is not state:
            known = self._bound[id(step)] = step, state, self._take(step, state)
        return self._run.predict(known[2], tensors, form, stream)

    @contextmanager
    def _ended(self) -> Iterator[None]:
        """What is raised inside ends the other ranks too."""
        self._compared = False
        with told(self._transport):
            yield
            self._run.reset()

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
