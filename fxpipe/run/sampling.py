"""One call of a denoiser after the other, run by its ranks' programs: threads of this process, or this process's own.

    run = SampleRun(transport)
    run.predict(mine, tensors, "fresh")           state: nothing   ->  what others sent
    run.predict(mine, tensors, "displaced")       state: taken     ->  receives on their way
    run.predict(mine, tensors, "last")            state: taken     ->  nothing
    run.reset()                                   whatever is on its way is received and dropped

State belongs to a stream of one call: pipelines that predict twice a step, with and without the prompt, have two. What
programs compute `once` belongs to the call.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from fxpipe.capture.surroundings import no_autocast
from fxpipe.errors import RunError
from fxpipe.plan.displaced_ops import USABLE
from fxpipe.plan.lanes import SendOrder
from fxpipe.plan.row_ops import join_patches
from fxpipe.plan.sample_program import PatchParts, SampleProgram
from fxpipe.plan.transport import Pending, T, Transport
from fxpipe.remembered import remembered
from fxpipe.run.once import Once, OnceValues
from fxpipe.run.patched import Lazy, Patched, settled
from fxpipe.run.segments import runnable_form
from fxpipe.run.transport import RankThreads

_log = logging.getLogger(__name__)

_MUCH = 0.01
"""Of the moments that are to be corrected: a warning where more cannot be."""

Tensors = Mapping[str, torch.Tensor]


def _unknown(form: str) -> SendOrder:
    raise RunError(f"no order of the messages of form {form!r}, which communicators that channels share need")


class BoundProgram:
    """A rank's program with the state it reads, which is shared; its forms are made runnable when they first run.

    `sends` gives the order in which all ranks' messages of a form can be sent, for transports that need one; `backend`,
    one of `fxpipe.options.BACKENDS`, runs what is between messages, from a form's second step on: in the first one
    constants are made that operations keep.
    """

    def __init__(
        self, program: SampleProgram, state: Tensors, sends: Callable[[str], SendOrder] = _unknown,
        backend: str = "eager",
    ) -> None:  # fmt: skip
        self.program, self.sends, self._backend = program, sends, backend
        self._state = {name: state[name] for name in program.state}
        self._has_run = set[str]()

    def known(self, tensors: Tensors, once: Once) -> list[OnceValues]:
        """The argument of forms that has what is computed once in a call; none where nothing is."""
        if self.program.once is None:
            return []
        read = settled([tensors[name] for name in self.program.conditions])
        weights = [self._state[str(node.target)] for node in self.program.once.find_nodes(op="get_attr")]
        return [once.values(self, read, weights, lambda: self.module("once")(*read))]

    def run(self, form: str, *arguments: Any) -> Any:
        """What a form returns."""
        as_is = self._backend == "eager" or form not in self._has_run
        self._has_run.add(form)
        return (self.module if as_is else self._by_backend)(form)(*arguments)

    @remembered
    def module(self, form: str) -> fx.GraphModule:
        return self.program.bind(self._state, form)

    @remembered
    def _by_backend(self, form: str) -> nn.Module:
        return runnable_form(self.program, form, self._state, self._backend)


@dataclass
class _Stream:
    """What crosses to the next step, and the program that has carried it."""

    bound: BoundProgram
    carried: dict[str, Any]
    num_displaced: int = 0


class SampleRun:
    """One rank over the steps of calls.

    All ranks make the same calls in the same order. The first step of a stream, and the first of another program
    (another size, batch or number of patches), is fresh whatever is asked for.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._streams: dict[str, _Stream] = {}
        self._coming: list[Lazy] = []
        self._once = Once()

    def predict(self, bound: BoundProgram, tensors: Tensors, form: str = "fresh", stream: str = "") -> torch.Tensor:
        """The whole prediction; a `Patched` one where patches follow each other through stages, of which some may still
        be on their way. `tensors` are the whole inputs by the program's names, which may be such, too.

        Args:
            form: "fresh", "displaced" or "last", one that the program has; nothing may follow "last" but "fresh".
            stream: whose state it is, where one step predicts more than once.
        """
        inputs = [tensors[name] for name in bound.program.inputs]
        carried, num_displaced = self._carried(bound, stream)
        form = _form(bound.program, form, bool(carried))
        wanted = bound.program.forms[form]
        _drop({name: carried.pop(name) for name in sorted(carried.keys() - {*wanted.carried})})
        inputs = inputs if wanted.carried else settled(inputs)
        with torch.no_grad(), no_autocast():  # casts are in the programs
            known = bound.known(tensors, self._once)
            arguments: list[Any] = [self._transport, *inputs, *known, *([carried] if wanted.carried else [])]
            self._transport.begin_form(lambda: bound.sends(form))
            result = bound.run(form, *arguments)
            prediction, carries = result if wanted.carries else (result, {})
            if carries:
                self._streams[stream] = _Stream(bound, carries, num_displaced + 1 if form == "displaced" else 0)
            settled(inputs)  # of the step before, which is over where this one's work is done
            self._arrive()
            if wanted.parts is not None:
                prediction = self._in_parts(prediction, wanted.parts)
        self._end_step()
        found: torch.Tensor = prediction
        return found

    def _in_parts(self, pieces: Sequence[Sequence[Any]], parts: PatchParts) -> torch.Tensor:
        """The patches of a prediction, each of pieces that are there or on their way."""
        if parts.joined:
            return join_patches([*map(_come, pieces)], parts.along, parts.joined)
        self._coming = [Lazy(lambda of_patch=of_patch: _come(of_patch)) for of_patch in pieces]  # type: ignore[misc]
        return Patched.of(self._coming, parts.like, parts.along, parts.sizes, self._transport.device)

    def _arrive(self) -> None:
        """Wait for what a step before has left on its way."""
        for lazy in self._coming:
            lazy.get()
        self._coming = []

    def reset(self) -> tuple[float, int]:
        """End a call: what is on its way is received and dropped, so that the next one begins with nothing.

        Returns:
            Of every displaced step that corrects moments the share that could be used, added up; how many steps.
        """
        self._arrive()
        counts = [(one.carried[USABLE], one.num_displaced) for one in self._streams.values() if USABLE in one.carried]
        for stream in self._streams.values():
            _drop(stream.carried)
        self._streams.clear()
        self._once.forget()
        self._transport.flush()
        return sum(float(usable) for usable, steps in counts if steps), sum(steps for _, steps in counts)

    def _carried(self, bound: BoundProgram, stream: str) -> tuple[dict[str, Any], int]:
        """What the last step has carried for this program, and forgotten here: a step that raises leaves nothing."""
        last = self._streams.pop(stream, None)
        if last is None:
            return {}, 0
        if last.bound is not bound:
            _drop(last.carried)
        return last.carried, last.num_displaced if last.carried else 0

    def _end_step(self) -> None:
        """Nothing is waited for while something is on its way."""
        if self._streams:
            self._transport.advance()
        else:
            self._transport.flush()


def _form(program: SampleProgram, asked: str, carried: bool) -> str:
    """What is asked for, if what it takes is there; a fresh step that follows another one is `again`."""
    if asked == "fresh":
        return "again" if carried and "again" in program.forms else asked
    return asked if carried or not program.forms[asked].carried else "fresh"


def _come(pieces: Sequence[Any]) -> torch.Tensor:
    there: list[torch.Tensor] = [piece.wait() if isinstance(piece, Pending) else piece for piece in pieces]
    return there[0] if len(there) == 1 else torch.cat(there)


def _drop(carried: dict[str, Any]) -> None:
    for value in carried.values():
        if isinstance(value, Pending):
            value.wait()
    carried.clear()


def tell_unusable(counts: Sequence[tuple[float, int]]) -> None:
    """Say of a call how many of its corrected moments could not be used, by what `SampleRun.reset` gives."""
    usable, steps = map(sum, zip(*counts, strict=True))
    unusable = 1 - usable / steps if steps else 0.0
    if unusable > 0:
        _log.log(
            logging.WARNING if unusable > _MUCH else logging.INFO,
            "norms='corrected': %.3g %% of a call's displaced moments are used as norms='merged' has them, as their "
            "corrected variances fall too far; more warm-up steps, or norms='sync', come nearer to one device",
            100 * unusable,
        )


class LocalRun:
    """All ranks as threads of this process, over the steps of calls."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._start()

    def predict(
        self, bound: Sequence[BoundProgram], tensors: Tensors, form: str = "fresh", stream: str = ""
    ) -> list[torch.Tensor]:
        """Every rank's prediction, which are equal. After an exception the next step begins with nothing."""
        return self._each(lambda rank, run: settled(run.predict(bound[rank], tensors, form, stream)))

    def reset(self) -> None:
        """End a call."""
        tell_unusable(self._each(lambda rank, run: run.reset()))

    def _start(self) -> None:
        self._threads = RankThreads(self._world_size)
        self._runs: list[SampleRun] = self._threads.run(SampleRun)

    def _each(self, fn: Callable[[int, SampleRun], T]) -> list[T]:
        try:
            return self._threads.run(lambda transport: fn(transport.rank, self._runs[transport.rank]))
        except BaseException:
            self._start()
            raise
