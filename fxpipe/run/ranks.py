"""Calls of a spread module, run by its ranks' programs: all of them as threads of this process, or this process's own.

with ranks.call():                                      a call of the user's pipeline: its steps belong together
    ranks.predict(step, state, tensors, "cond")         step 0 of a stream: fresh
    ranks.predict(step, state, tensors, "cond")         after `step.warmup` steps: displaced, where it has that form
"""

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import RLock
from typing import Protocol

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fxpipe.errors import RunError, Stopped
from fxpipe.plan.lanes import SendOrder
from fxpipe.plan.sample_program import SampleProgram
from fxpipe.plan.transport import Channel, T, Transport
from fxpipe.run.agreement import agree, agree_on_state, checksum, everyones, told
from fxpipe.run.ownership import is_empty, is_released
from fxpipe.run.read_ahead import version
from fxpipe.run.sampling import BoundProgram, LocalRun, SampleRun, Tensors
from fxpipe.run.step_agreement import StepAgreement

_MOST_STREAMS = 8
"""Predictions of one step, with different conditions."""


class Programs(Protocol):
    """The programs of all ranks for one kind of call; displaced ones run after `warmup` steps."""

    @property
    def programs(self) -> Sequence[SampleProgram]: ...

    @property
    def channels(self) -> Mapping[Channel, int]: ...

    def sends(self, form: str) -> SendOrder: ...

    @property
    def warmup(self) -> int: ...

    @property
    def inputs(self) -> Mapping[str, str]:
        """The module's input that each input of a program is."""
        ...

    @property
    def samples(self) -> Collection[str]:
        """The inputs of programs that have rows."""
        ...


class Ranks(ABC):
    """What in-process ranks and a launch's have in common: which step of a call it is, and so which form is run.

    `rank` is this process's, None where it has all of them.
    """

    rank: int | None

    def __init__(self) -> None:
        self._num_steps: Counter[tuple[str, int]] | None = None  # of a stream by a program; None outside of calls
        self._one_at_a_time = RLock()
        self._position, self._time = 0, dict[str, torch.Tensor]()
        self._conditions: list[dict[str, torch.Tensor]] = []  # of the streams, where no input is a time

    @contextmanager
    def call(self) -> Iterator[None]:
        """A call of the user's pipeline: its steps belong together. Calls within a call are part of it; those of other
        threads wait for its end."""
        with self._one_at_a_time:
            if self._num_steps is not None:
                yield
                return
            self._num_steps = Counter()
            self._position, self._time, self._conditions = 0, {}, []
            try:
                with self._ended():
                    yield
            finally:
                self._num_steps = None

    @abstractmethod
    def forget(self, step: Programs) -> None:
        """Let go of what is held to run these programs, which no call is made by any more, or not soon."""

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
                name = self.stream(step, tensors) if stream is None else stream
                form = "displaced" if self._num_steps[name, id(step)] >= step.warmup else "fresh"
                self._num_steps[name, id(step)] += 1
            return self._predict(step, state, tensors, form, name)

    def stream(self, step: Programs, tensors: Tensors) -> str:
        """The position among the predictions of one step, as with and without a prompt.

        A step goes on while its times do not change. Where no input is called a time, predictions of equal conditions
        are a stream. No value of a sample decides it, so that every rank says the same while patches are on their way.
        """
        given = {name: tensor for name, tensor in tensors.items() if name not in step.samples}
        time = {name: tensor.clone() for name, tensor in given.items() if _is_time(step.inputs[name])}
        if not time:
            return self._stream_of(given)
        self._position, self._time = self._position + 1 if _equal(time, self._time) else 0, time
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
    def _predict(self, step: Programs, state: Tensors, tensors: Tensors, form: str, stream: str) -> torch.Tensor: ...

    @abstractmethod
    @contextmanager
    def _ended(self) -> Iterator[None]:
        """Around a call: nothing of it is left to the next, however it ends."""
        ...

    @abstractmethod
    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank of a launch."""
        ...

    @abstractmethod
    def close(self) -> None:
        """Leave the network."""
        ...


def _is_time(name: str) -> bool:
    """Whether an input of this name tells the step: timestep, sigma, t; others may differ between two calls of one."""
    last = name.rpartition(".")[2].lower()
    told = last in ("t", "r", "tau") or any(word in last for word in ("time", "sigma", "noise_level"))
    return told and not last.endswith(("_ids", "_cond"))


def _equal(some: Tensors, others: Tensors) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


class LocalRanks(Ranks):
    """All ranks as threads of this process."""

    rank = None

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

    def forget(self, step: Programs) -> None:
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


class Launched(Transport, Protocol):
    """The network of a launch."""

    def met(self, what: str) -> bool:
        """Whether every rank says the same, within a bounded time."""
        ...


class LaunchedRank(Ranks):
    """This process as one rank of a launch, which all run the same loop.

    The first prediction of every call is compared over them to the bit, the others as `StepAgreement` says; weights
    when they are first used, and again once they have changed on any rank.
    """

    def __init__(self, connect: Callable[[], Launched]) -> None:
        super().__init__()
        self._transport = connect()
        self.rank: int = self._transport.rank
        self._num_calls, self._num_begun, self._num_made = 0, 0, 0  # predictions since the last call began
        self._run = SampleRun(self._transport)
        self._agreement = StepAgreement(self._transport)
        self._bound: dict[int, _Held] = {}
        self._opened: set[Channel] = set()
        self._used: list[Tensors] = []  # states, in this call
        self._compared = WeakTensorKeyDictionary()  # tensor -> its version when it was

    def _predict(self, step: Programs, state: Tensors, tensors: Tensors, form: str, stream: str) -> torch.Tensor:
        self._transport.set_action("predict")
        self._num_begun += 1
        held = self._bound.get(id(step)) or _Held(step, _plan_of(step))
        shapes = {name: f"{str(tensor.dtype)[6:]}{list(tensor.shape)}" for name, tensor in tensors.items()}
        self._agreement.begin((held.plan, shapes, form, stream))
        if not self._used:
            of_inputs = {f"shape of {name}": shape for name, shape in shapes.items()}
            sums = {name: checksum(tensor) for name, tensor in tensors.items()}
            agree(self._transport, {"plan": held.plan, "inputs": sorted(tensors)} | of_inputs | sums)
        if held.state is not state or all(state is not used for used in self._used):
            self._take(held, state)
        assert held.bound is not None
        found = self._run.predict(held.bound, tensors, form, stream)
        self._agreement.inputs(tensors.values())
        self._transport.set_action("the loop around predictions")
        self._num_made += 1
        return found

    def forget(self, step: Programs) -> None:
        self._bound.pop(id(step), None)

    @contextmanager
    def _ended(self) -> Iterator[None]:
        """What is raised inside ends the other ranks too; but for `Stopped`, and for what all of them raise at the same
        place, between predictions: that ends the call alone."""
        raised: Exception | None = None
        self._used, self._num_begun, self._num_made = [], 0, 0
        self._num_calls += 1
        with told(self._transport):
            try:
                yield
            except Exception as error:
                if not isinstance(error, Stopped) and not self._all_raise(error):
                    raise
                raised = error
            self._agreement.end()
            self._run.reset()
        if raised is not None:
            raise raised

    def _all_raise(self, error: Exception) -> bool:
        if isinstance(error, RunError) or self._num_begun != self._num_made:
            return False
        return self._transport.met(f"{self._num_calls}/{self._num_made}/{type(error).__qualname__}")

    def broadcast(self, value: T) -> T:
        self._transport.set_action("what rank 0 has for all")
        return self._transport.broadcast_object(value)

    def close(self) -> None:
        self._transport.close()

    def _take(self, held: "_Held", state: Tensors) -> None:
        """Hold this rank's program; all ranks are here at once, for they make the same prediction."""
        self._agreement.settle()
        self._agree_on_weights(state)
        self._used.append(state)
        if held.state is state:
            return
        own = held.step.programs[self.rank]
        gone = [name for name in own.state if is_released(state[name])]
        if gone:
            raise RunError(
                f"this call reads {len(gone)} weights ({gone[0]}, ...) that rank {self.rank} has released; make every "
                "kind of call, or sampler.prepare it, before sampler.release()"
            )
        channels = {c: size for c, size in held.step.channels.items() if c not in self._opened}
        self._transport.open_channels(channels, [])
        self._opened.update(channels)
        mine = {name: state[name].to(self._transport.device) for name in own.state}
        held.state, held.bound = state, BoundProgram(own, mine, held.step.sends)
        self._bound[id(held.step)] = held

    def _agree_on_weights(self, state: Tensors) -> None:
        """Those that are new on some rank, also where only another rank's program reads them."""
        there = {name: tensor for name, tensor in state.items() if not (tensor.is_meta or is_empty(tensor))}
        new = {name for name, tensor in there.items() if self._compared.get(tensor) != version(tensor)}
        on_any = set[str]().union(*everyones(self._transport, new))
        if on_any:
            compared = {name: there[name] for name in sorted(on_any) if name in there}
            agree_on_state(self._transport, compared)
            self._compared.update({tensor: version(tensor) for tensor in compared.values()})


@dataclass
class _Held:
    """Programs that are kept, and so is their id; with what this rank runs by which state."""

    step: Programs
    plan: str
    state: Tensors | None = None
    bound: BoundProgram | None = None


def _plan_of(step: Programs) -> str:
    """A digest of what all ranks do: of the first rank's program, and of who sends to whom."""
    graphs = [(form, of_form.graph) for form, of_form in step.programs[0].forms.items()]
    nodes = [(form, [(node.name, name_of(node.target)) for node in graph.nodes]) for form, graph in graphs]
    return hashlib.sha256(repr((step.warmup, sorted(step.channels), nodes)).encode()).hexdigest()


def name_of(target: object) -> str:
    """The same in every process, where the text of a function has its address."""
    return getattr(target, "__qualname__", None) or str(target)
