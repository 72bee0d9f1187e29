"""Calls of a spread module, run by its ranks' programs: all of them as threads of this process, or this process's own.

with ranks.call():                                      a call of the user's pipeline: its steps belong together
    ranks.predict(step, state, tensors, "cond")         step 0 of a stream: fresh, or warm
    ranks.predict(step, state, tensors, "cond")         after `step.warmup` steps: displaced, where it has that form

with ranks.compiling(what):                             all ranks of a launch are about to compile this
    plan = ranks.of_rank_zero(make)                     rank 0's
    ranks.agreed(lowered(plan))                         this rank's programs, if all have theirs
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Lock, RLock, get_ident
from time import monotonic
from typing import TYPE_CHECKING

import torch

from fxpipe.capture.inputs import is_time
from fxpipe.errors import CompileError, RunError
from fxpipe.plan.transport import T
from fxpipe.run.sampling import BoundProgram, LocalRun, Tensors

if TYPE_CHECKING:
    from fxpipe.sampling.step import SampleStep

_log = logging.getLogger(__name__)

_TOLD_SECONDS, _IDLE_SECONDS = 60.0, 1800.0
"""How long a call waits for an open one in which nothing is done, until it says so, and until it is an error."""
_MOST_STREAMS = 8
"""Predictions of one step, with different conditions."""
_MANY_TURNS = 3
"""As many displaced steps of a call that follow another program's as are made exact without a word."""

Counts = Counter[tuple[str, "SampleStep"]]
"""Steps of streams by programs."""


class Ranks(ABC):
    """What in-process ranks and a launch's have in common: which step of a call it is, and so which form is run.

    `rank` is this process's, None where it has all of them. `turn` is held to compile or to make one prediction,
    whatever the thread; who waits for a call holds no turn.
    """

    rank: int | None

    def __init__(self) -> None:
        self._num_steps: Counts | None = None  # None outside of calls
        self._num_predictions = 0
        self.turn = RLock()
        self._one_call = Lock()  # until a call ends, on whichever thread
        self._opened_by, self._for_all = 0, False  # the thread; whether others predict in it
        self._position, self._time = 0, dict[str, torch.Tensor]()
        self._conditions: list[dict[str, torch.Tensor]] = []  # of the streams, where no input is a time
        self._last_of, self._num_turns = dict[str, "SampleStep"](), 0  # of every stream; how often it was another one
        self._told = set[str]()

    @contextmanager
    def call(self, for_all: bool = False) -> Iterator[None]:
        """A call of the user's pipeline: its steps belong together. One within a call, as of a callback, is a call of
        its own, after which the outer one's next step is exact; those of other threads wait for its end. `for_all`:
        what other threads predict until then is part of it, and any may end it.

        Raises:
            RunError: nothing is predicted in the open call of another thread, and it does not end.
        """
        if self._num_steps is not None and self._opened_by == get_ident():
            with self._ended():
                pass
            with self._steps():
                yield
            return
        self._begin_alone()
        try:
            self._opened_by, self._for_all = get_ident(), for_all
            with self._steps():
                yield
        finally:
            self._one_call.release()

    @contextmanager
    def _steps(self) -> Iterator[None]:
        """Those of one call, with nothing of the call that it is within."""
        outer = self._num_steps, self._position, self._time, self._conditions
        self._num_steps, self._position, self._time, self._conditions = Counter(), 0, {}, []
        self._last_of, self._num_turns = {}, 0
        try:
            with self._ended():
                yield
        finally:
            with self.turn:
                self._num_steps, self._position, self._time, self._conditions = outer

    def _begin_alone(self) -> None:
        """Wait for the end of another thread's call, which may in turn wait for this one."""
        seen, since = self._num_predictions, monotonic()
        while not self._one_call.acquire(timeout=_TOLD_SECONDS):
            if self._num_predictions != seen or self._compiles():
                seen, since = self._num_predictions, monotonic()
                continue
            seconds = monotonic() - since
            text = (
                f"a call waits for another thread's, in which nothing has been predicted for {seconds:.0f} s; where "
                "that one waits for this, call sampler.predict, or this pipeline on the thread that opened it"
            )
            if seconds >= _IDLE_SECONDS:
                raise RunError(text)
            _log.warning("%s", text)

    def _compiles(self) -> bool:
        if self.turn.acquire(blocking=False):
            self.turn.release()
            return False
        return True

    @abstractmethod
    def forget(self, step: SampleStep) -> None:
        """Let go of what is held to run these programs, which no call is made by any more, or not soon."""

    def predict(self, step: SampleStep, state: Tensors, tensors: Tensors, stream: str | None = None) -> torch.Tensor:
        """The whole prediction.

        Args:
            state: the module's tensors by their original names.
            stream: where one step predicts more than once: which of these it is; by its position where left out.
        """
        with self.turn:
            if self._num_steps is not None and (self._for_all or self._opened_by == get_ident()):
                return self._next(self._num_steps, step, state, tensors, stream)
        with self.call(), self.turn:
            assert self._num_steps is not None
            return self._next(self._num_steps, step, state, tensors, stream)

    def begin_at(self, count: int, step: SampleStep, stream: str) -> None:
        """In the call that is open, after so many steps of a stream, which are left out."""
        assert self._num_steps is not None
        self._num_steps[stream, step] = count

    def _next(
        self, num_steps: Counts, step: SampleStep, state: Tensors, tensors: Tensors, stream: str | None
    ) -> torch.Tensor:
        """The next prediction of the call that is open."""
        self._num_predictions += 1
        form, name = "fresh", ""
        if "displaced" in step.programs[0].forms:
            name = self.stream(step, tensors) if stream is None else stream
            count = num_steps[name, step]
            form = "displaced" if count >= step.warmup else "warm" if count < step.num_warm else "fresh"
            num_steps[name, step] += 1
            self._turned(name, step, form)
        return self._predict(step, state, tensors, form, name)

    def _turned(self, stream: str, step: SampleStep, form: str) -> None:
        """A step of another program than the one before it has nothing to read of that, and is exact."""
        before, self._last_of[stream] = self._last_of.get(stream, step), step
        self._num_turns += form == "displaced" and before is not step
        if self._num_turns == _MANY_TURNS:
            self._tell_once(
                "calls of other arguments or sizes take turns: a displaced step is exact after one of another kind; "
                "call a pipeline's denoiser for each inside its cache_context('a name') of its own"
            )

    def _tell_once(self, text: str) -> None:
        if text not in self._told and not self.rank:
            _log.warning("%s", text)
        self._told.add(text)

    def stream(self, step: SampleStep, tensors: Tensors) -> str:
        """The position among the predictions of one step, as with and without a prompt.

        A step goes on while its times do not change. Where no input is called a time, predictions of equal conditions
        are a stream. No value of a sample decides it, so that every rank says the same while patches are on their way.
        """
        given = {name: tensor for name, tensor in tensors.items() if name not in step.samples}
        time = {name: tensor.clone() for name, tensor in given.items() if is_time(step.inputs[name])}
        if not time:
            return self._stream_of(given)
        self._position, self._time = self._position + 1 if _equal(time, self._time) else 0, time
        if self._position == _MOST_STREAMS:
            times = ", ".join(step.inputs[name] for name in time)
            self._tell_once(
                f"more than {_MOST_STREAMS} predictions at one time ({times}): displaced steps take them for parts of "
                "one step, and hold what each tells its next one; where they are steps that follow each other, call a "
                "pipeline's denoiser inside its cache_context('a name'), or use mode='exact'"
            )
        return str(self._position)

    def _stream_of(self, conditions: Tensors) -> str:
        for number, known in enumerate(self._conditions):
            if _equal(conditions, known):
                return f"conditions {number}"
        if len(self._conditions) == _MOST_STREAMS:
            raise RunError(
                f"displaced steps cannot be told from each other: none of the inputs {list(conditions)} is called a "
                f"time, and they have had {_MOST_STREAMS} different values in this call; call the input that changes "
                "with the step 'time' or 'timestep', or use mode='exact'"
            )
        self._conditions.append({name: tensor.clone() for name, tensor in conditions.items()})
        return f"conditions {len(self._conditions) - 1}"

    @abstractmethod
    def _predict(self, step: SampleStep, state: Tensors, tensors: Tensors, form: str, stream: str) -> torch.Tensor: ...

    @abstractmethod
    @contextmanager
    def _ended(self) -> Iterator[None]:
        """Around a call: nothing of it is left to the next, however it ends."""
        ...

    @contextmanager
    def compiling(self, what: Mapping[str, object]) -> Iterator[None]:
        """Collective over a launch, around what all ranks compile: `what` each is about to, by name.

        Raises:
            RunError: another rank does something else. What is raised inside ends the other ranks too, but for what all
                of them raise: CompileErrors and `Stopped`, and within a call what they raise alike.
        """
        yield

    def of_rank_zero(self, make: Callable[[], T]) -> T:
        """Collective over a launch: what `make` gives on rank 0, where alone it is called; its CompileError is raised
        on all ranks."""
        return make()

    def agreed(self, made: SampleStep | CompileError) -> SampleStep | CompileError:
        """Collective over a launch: what each rank has made of the same plan, or the error of the first that could
        not."""
        return made

    @abstractmethod
    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank of a launch."""
        ...

    @abstractmethod
    def close(self) -> None:
        """Leave the network."""
        ...


def _equal(some: Tensors, others: Tensors) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


class LocalRanks(Ranks):
    """All ranks as threads of this process; CUDA graphs, which are a thread's own, are of a rank alone."""

    rank = None

    def __init__(self, backend: str = "eager") -> None:
        super().__init__()
        self._backend = backend
        self._runs: dict[int, LocalRun] = {}  # by the number of ranks
        self._bound: dict[int, tuple[SampleStep, Tensors, list[BoundProgram]]] = {}

    def _predict(self, step: SampleStep, state: Tensors, tensors: Tensors, form: str, stream: str) -> torch.Tensor:
        known = self._bound.get(id(step))
        if known is None or known[1] is not state:
            backend = "eager" if self._backend == "cudagraphs" and len(step.programs) > 1 else self._backend
            bound = [BoundProgram(program, state, backend=backend) for program in step.programs]
            known = self._bound[id(step)] = step, state, bound
        count = len(step.programs)
        if count not in self._runs:
            self._runs[count] = LocalRun(count)
        return self._runs[count].predict(known[2], tensors, form, stream)[0]

    def forget(self, step: SampleStep) -> None:
        self._bound.pop(id(step), None)

    @contextmanager
    def _ended(self) -> Iterator[None]:
        try:
            yield
        finally:
            for run in self._runs.values():
                run.reset()

    def broadcast(self, value: T) -> T:
        return value

    def close(self) -> None:
        pass


def shapes_of(tensors: Tensors) -> dict[str, object]:
    """Which inputs a call has, and of which shapes and types, as ranks compare them."""
    shapes = {f"shape of {name}": f"{str(tensor.dtype)[6:]}{list(tensor.shape)}" for name, tensor in tensors.items()}
    return {"inputs": sorted(tensors), **shapes}
