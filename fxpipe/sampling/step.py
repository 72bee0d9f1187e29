"""What a kind of call becomes: its graph, and the programs of ranks with their plan."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from fxpipe.capture import Capture
from fxpipe.capture.any_size import AnySize
from fxpipe.capture.inputs import Dims
from fxpipe.capture.trees import Returned
from fxpipe.errors import CompileError
from fxpipe.plan.lanes import SendOrder
from fxpipe.plan.rank_program import Message, Traffic
from fxpipe.plan.sample_grid import Grid
from fxpipe.plan.sample_plan import SamplePlan
from fxpipe.plan.sample_program import SampleProgram
from fxpipe.plan.transport import Channel
from fxpipe.remembered import remembered
from passes.rows.sized import Sized, at_batch_size, require_shapes


@dataclass(eq=False)
class Traced:
    """A module's call as one graph, for any number of samples; `rows` are the inputs that have rows, and where.

    `any_size` is the graph with free sizes, or why there is none; None as long as none was asked for. `apart` says why
    the call's sizes have a trace of their own where there were such graphs. `of_all_sizes`: what planning has found
    that holds at every size of one trace; it grows. `sized`: the graph for the call's own number of samples, where it
    is known.
    """

    captured: Capture
    returned: Returned
    rows: Mapping[str, int]
    any_size: AnySize | str | None = None
    apart: str | None = None
    of_all_sizes: dict[str, Any] = field(default_factory=dict)
    sized: Sized | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """What had to be given up."""
        one_by_one = self.any_size.fixed if isinstance(self.any_size, AnySize) else self.any_size
        why = {"sizes are traced one by one": one_by_one, "this size was traced apart": self.apart}
        of_call = *self.captured.notes, *self.captured.unchecked
        return (*of_call, *(f"{what}: {reason}" for what, reason in why.items() if reason))

    def num_samples(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
        """Of a call that has this graph; None of another. Of tensors only shapes and types are used,
        and what the graph's guards are about."""
        try:
            tensors, size = self.captured.inputs.bind(args, kwargs, shapes_alone=True)
        except CompileError:
            return None
        if not all(guard.holds(tensors) for guard in self.captured.guards):
            return None
        if not size:
            raise CompileError("the call has no samples; give at least one")
        return size if self.holds(size) else None

    def other_sizes(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Dims | None:
        """The dimensions of inputs that a trace must leave free for a call for which this one, which has no free sizes,
        does not do; None where that does not help."""
        if isinstance(self.any_size, AnySize) or self.sized is not None:
            return None
        try:
            other = self.captured.inputs.of_other_sizes(args, kwargs)
        except CompileError:
            return None
        leaves = zip(self.captured.inputs.leaves, other.leaves, strict=True)
        pairs = [pair for one, two in leaves for pair in list(zip(one.shape, two.shape, strict=True))[one.batched :]]
        tensors, _ = other.bind(args, kwargs, shapes_alone=True)
        for guard in self.captured.guards:
            found = guard.found(tensors)
            if found is None or found.shape != guard.value.shape or not (guard.are_sizes or guard.holds(tensors)):
                return None
            pairs += (
                zip(guard.value.flatten().tolist(), found.flatten().tolist(), strict=True) if guard.are_sizes else ()
            )
        others = [pair for pair in pairs if pair[0] != pair[1]]
        if not others or min(map(min, others)) <= 1:  # a size of one is another trace
            return None
        return self.captured.inputs.other_sizes(other)

    def holds(self, size: int) -> bool:
        """Whether forward does the same with so many samples."""
        captured = self.captured
        if size == captured.inputs.batch_size:
            return True
        return bool(captured.batch) and self._fewest <= size <= (captured.most or size)

    @cached_property
    def _fewest(self) -> int:
        """A trace knows no single sample: of it operations must give what the graph says."""
        if self.captured.fewest == 1:
            try:
                require_shapes(at_batch_size(self.captured, 1))
            except CompileError:
                return 2
        return self.captured.fewest


@dataclass(frozen=True, eq=False)
class SampleStep:
    """The programs for calls with `plan.num_samples` samples: those of all ranks, or of this process's alone; messages
    are all ranks'. `inputs` has the module's input that each input of a program is, by name, `likes` its shape and
    type; `about` says where the rows lie, `again` makes all ranks' programs of a plan."""

    traced: Traced
    plan: SamplePlan
    inputs: Mapping[str, str]
    likes: Mapping[str, torch.Tensor]
    programs: tuple[SampleProgram, ...]
    messages_of: Mapping[str, tuple[Message, ...]]
    about: str
    again: Callable[[SamplePlan], "SampleStep"]

    @cached_property
    def whole(self) -> "SampleStep":
        """With the programs of all ranks."""
        return self if len(self.programs) == self.plan.world_size else self.again(self.plan)

    def program(self, rank: int) -> SampleProgram:
        """A rank's program; KeyError where this process has not lowered it."""
        return {program.rank: program for program in self.programs}[rank]

    @cached_property
    def digest(self) -> str:
        """Of the plan, but for what it tells of others, and of all messages: ranks with the same one make the same
        step."""
        plan = replace(self.plan, notes=(), expects=None, considered=())
        sent = [(m.edge, m.channel, str(m), m.dtype) for form in self.forms for m in self.messages_of[form]]
        return hashlib.sha256(repr((str(plan), self.forms, sent)).encode()).hexdigest()

    @property
    def batch_size(self) -> int:
        return self.plan.num_samples

    @property
    def grid(self) -> Grid:
        return self.plan.grid

    @property
    def warmup(self) -> int:
        """Exact steps before displaced ones."""
        return self.plan.how.warmup

    @property
    def num_warm(self) -> int:
        """Exact steps that another layout makes, before this one's own."""
        return self.plan.how.num_warm if "warm" in self.forms else 0

    @property
    def forms(self) -> tuple[str, ...]:
        return tuple(self.programs[0].forms)

    @property
    def samples(self) -> set[str]:
        """The inputs of programs that have rows."""
        return {name for name, argument in self.inputs.items() if argument in self.traced.rows}

    @property
    def messages(self) -> tuple[Message, ...]:
        """Of the fresh form, in the order of every channel."""
        return self.messages_of["fresh"]

    @property
    def channels(self) -> dict[Channel, int]:
        """The bytes that each carries, in a step of the form that sends the most there."""
        forms = [Traffic(messages).channels for messages in self.messages_of.values()]
        return {
            channel: max(form.get(channel, 0) for form in forms) for channel in sorted(set[Channel]().union(*forms))
        }

    @remembered
    def sends(self, form: str) -> SendOrder:
        """The order in which all ranks' messages can be sent: as they are told, which every program is checked
        against."""
        sent = self.messages_of[form]
        return SendOrder.of(sent, [message.edge for message in sent])

    def sequence(self, num_steps: int) -> list[str]:
        """The forms of a call's steps."""
        if "displaced" not in self.forms:
            return ["fresh"] * num_steps
        again = ["again" if "again" in self.forms else "fresh"] * (self.warmup - self.num_warm - 1)
        forms = ["warm"] * self.num_warm + ["fresh", *again] + ["displaced"] * num_steps
        return forms[:num_steps]

    def bind(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A call's tensors by the programs' names."""
        return {name: tensors[argument].contiguous() for name, argument in self.inputs.items()}
