"""This process as one rank of a launch: it runs its own programs, and what all ranks must have alike is compared.

compiling    every rank says what it compiles; rank 0 plans; each lowers its own, or all hear who cannot
predict      every rank says what it predicts; weights are compared when they are first used
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fxpipe.errors import CompileError, RunError, Stopped
from fxpipe.plan.transport import Channel, T
from fxpipe.run import launch
from fxpipe.run.agreement import agree, agree_on_state, checksum, everyones, told
from fxpipe.run.marks import Marks, marks_of
from fxpipe.run.ownership import is_empty, is_released
from fxpipe.run.ranks import Ranks, shapes_of
from fxpipe.run.read_ahead import version
from fxpipe.run.sampling import BoundProgram, SampleRun, Tensors, tell_unusable
from fxpipe.run.step_agreement import StepAgreement

if TYPE_CHECKING:
    from fxpipe.run.transport.distributed import DistributedTransport
    from fxpipe.sampling.step import SampleStep

_LOOP = "the loop around predictions"
"""What a rank does between them, for errors."""


class LaunchedRank(Ranks):
    """This process as one rank of a launch, which all run the same loop.

    The first prediction of every call is compared over them to the bit, the others as `StepAgreement` says; weights
    when they are first used, and again once they have changed, in a call alike on all ranks. What is written through
    `.data`, which torch does not count, is seen by the next call.
    """

    def __init__(self, transport: DistributedTransport, backend: str = "eager") -> None:
        super().__init__()
        self._transport, self._backend = transport, backend
        self.rank: int = transport.rank
        self._num_calls, self._num_begun, self._num_made = 0, 0, 0  # predictions since the last call began
        self._num_plans = 0
        self._run = SampleRun(self._transport)
        self._agreement = StepAgreement(self._transport)
        self._bound: dict[int, _Held] = {}
        self._opened: set[Channel] = set()
        self._used: list[tuple[Tensors, int]] = []  # states in this call, and how often they had been written
        self._forms: dict[str, str] = {}  # the last of every step's in this call
        self._corrects = False  # moments, in this call, on some rank
        self._compared = WeakTensorKeyDictionary()  # tensor -> its version when it was
        self._marks: list[tuple[Tensors, Marks]] = []  # of states, when they were

    def _predict(self, step: SampleStep, state: Tensors, tensors: Tensors, form: str, stream: str) -> torch.Tensor:
        self._transport.set_action("predict")
        self._num_begun += 1
        held, shapes = self._bound.get(id(step)) or _Held(step), shapes_of(tensors)
        is_taken = held.state is state and self._has_used(state)
        self._agreement.begin((step.digest, shapes, form, stream, is_taken))
        if not self._used:
            sums = {name: checksum(tensor) for name, tensor in tensors.items()}
            agree(self._transport, shapes | {"plan": step.digest} | sums)
        if self._forms.get(step.digest) != form:  # or ranks with another one would wait for messages that none sends
            self._agreement.settle()
        self._forms[step.digest] = form
        self._corrects |= form == "displaced" and step.plan.how.norms == "corrected"
        if not is_taken:
            self._take(held, state)
        assert held.bound is not None
        found = self._run.predict(held.bound, tensors, form, stream)
        self._agreement.inputs(tensors.values())
        self._transport.set_action(_LOOP)
        self._num_made += 1
        return found

    def _has_used(self, state: Tensors) -> bool:
        """Whether weights are as they were compared in this call."""
        return any(state is used and num_writes == _num_writes(state) for used, num_writes in self._used)

    def forget(self, step: SampleStep) -> None:
        self._bound.pop(id(step), None)

    @contextmanager
    def compiling(self, what: Mapping[str, object]) -> Iterator[None]:
        in_call = self._num_steps is not None  # which ends with what is raised
        try:
            self._transport.set_action("compile")
            self._agreement.begin(what)
            if not in_call or not self._used:  # as whoever predicts first in a call does
                agree(self._transport, what)
            self._agreement.passed()
            yield
        except (CompileError, Stopped):  # of all ranks, which go on
            self._transport.set_action(_LOOP)
            raise
        except BaseException as error:
            if not in_call:
                self._transport.abort(error)
            raise
        self._transport.set_action(_LOOP)

    def of_rank_zero(self, make: Callable[[], T]) -> T:
        own = _tried(make) if self.rank == 0 else (None, None)
        self._num_plans += 1
        self._transport.set_action("compile")  # or it raises, where another has failed meanwhile
        self._transport.await_rank_zero(f"plan {self._num_plans} of rank 0", launch.PLAN_SECONDS)
        made, error = self._transport.broadcast_object(own)
        if error is not None:
            everyones(self._transport, None)  # rank 0 stays until all have read it
            raise error
        return cast(T, made)

    def agreed(self, made: SampleStep | CompileError) -> SampleStep | CompileError:
        own = made if isinstance(made, CompileError) else made.digest
        found = everyones(self._transport, own)
        errors = [one for one in found if isinstance(one, CompileError)]
        others = [rank for rank, one in enumerate(found) if one != found[0]]
        if others and not errors:
            return CompileError(
                f"patches of ranks {others} exchange something else than rank 0's, all must exchange the same; make a "
                "plan with text='all' or other patches"
            )
        return errors[0] if errors else made

    @contextmanager
    def _ended(self) -> Iterator[None]:
        """What is raised inside ends the other ranks too; but for `Stopped`, and for what all of them raise at the same
        place, between predictions: that ends the call alone."""
        raised: Exception | None = None
        self._used, self._forms, self._corrects, self._num_begun, self._num_made = [], {}, False, 0, 0
        self._num_calls += 1
        with told(self._transport):
            try:
                yield
            except Exception as error:
                if not isinstance(error, Stopped) and not self._all_raise(error):
                    raise
                raised = error
            self._agreement.end()
            unusable = self._run.reset()
            if self._corrects and (of_all := self._transport.gather_object(unusable)):
                tell_unusable(of_all)
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

    def _take(self, held: _Held, state: Tensors) -> None:
        """Hold this rank's program; all ranks are here at once, for they make the same prediction."""
        self._agreement.settle()
        self._agree_on_weights(state)
        self._used = [(used, num_writes) for used, num_writes in self._used if used is not state]
        self._used.append((state, _num_writes(state)))
        if held.state is state:
            return
        own = held.step.program(self.rank)
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
        held.state, held.bound = state, BoundProgram(own, mine, held.step.sends, self._backend)
        self._bound[id(held.step)] = held

    def _agree_on_weights(self, state: Tensors) -> None:
        """Those that are new on some rank, also where only another rank's program reads them."""
        there = {name: tensor for name, tensor in state.items() if not (tensor.is_meta or is_empty(tensor))}
        new = {name for name, tensor in there.items() if self._compared.get(tensor) != version(tensor)}
        marks = marks_of(there.values())
        if any(known is state and marks != before for known, before in self._marks):
            new = {*there}
        held = [one.state for one in self._bound.values()]
        self._marks = [one for one in self._marks if one[0] is not state and any(one[0] is own for own in held)]
        self._marks.append((state, marks))
        on_any = set[str]().union(*everyones(self._transport, new))
        if on_any:
            compared = {name: there[name] for name in sorted(on_any) if name in there}
            agree_on_state(self._transport, compared)
            self._compared.update({tensor: version(tensor) for tensor in compared.values()})


@dataclass
class _Held:
    """Programs that are kept, and so is their id; with what this rank runs by which state."""

    step: SampleStep
    state: Tensors | None = None
    bound: BoundProgram | None = None


def _num_writes(state: Tensors) -> int:
    return sum(map(version, state.values()))


def _tried(make: Callable[[], T]) -> tuple[T | None, CompileError | None]:
    try:
        return make(), None
    except CompileError as error:
        return None, error
