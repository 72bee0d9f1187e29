"""A module whose calls run on all ranks; each kind of call is compiled when it first comes.

pipe.unet(sample, t, text)   ->   programs for this kind of call   ->   ranks   ->   the whole prediction
"""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.autograd import forward_ad

from fxpipe.capture import private
from fxpipe.capture.any_size import AnySize
from fxpipe.capture.changed import Changed, put_back
from fxpipe.capture.holders import Holder, named_by
from fxpipe.capture.settings import Untouched, settings_of
from fxpipe.capture.surroundings import Surroundings, no_autocast
from fxpipe.capture.trees import named_leaves
from fxpipe.capture.weights import tensors_of
from fxpipe.collector import held_collector
from fxpipe.errors import CompileError, FxpipeError
from fxpipe.plan.sample_plan import SamplePlan
from fxpipe.run.ownership import is_released, release, require_new
from fxpipe.run.ranks import Ranks
from fxpipe.sampling.lowering import SampleLowering
from fxpipe.sampling.step import SampleStep, Traced

_log = logging.getLogger(__name__)

CallKind = tuple[Traced, int]
"""Calls of one graph, with so many samples."""

_MOST_KINDS = 32
"""As many graphs as are kept, of other sizes and scales, beside the example's; and as many with free sizes."""
_MANY_NUMBERS = 2
"""As many other values of one number as are traced without a word."""
_MOST_UNFREE = 3
"""As many traces with the same sizes free of one module as fail, or do not hold for the call that they are made for,
before every other such size is traced for itself at once."""
_MOST_FAILED = 2
"""As many traces in a row that fail as are made before a module runs whole for good: what it keeps of one call is
another setting for the next."""
_MOST_OTHERS = 4
"""As many other settings as programs are kept of, for when they are back."""


@dataclass
class _Known:
    """What is known of the module as it was set: by its tensors' names, shapes and types, and its settings, among them
    those of what its code `named`."""

    shapes: list[tuple[Any, ...]]
    settings: list[Any]
    named: list[Holder]
    traced: list[Traced] = field(default_factory=list)
    whole: str | None = None
    all_whole: bool = False
    unfree: Counter[str] = field(default_factory=Counter)


class Spread:
    """A module whose calls run on all ranks. Programs are made when a kind of call is first seen: other shapes, other
    conditions, other settings; another number of samples needs no new trace. With `or_whole`, a module for which there
    are no programs runs whole on every rank, as do its calls that are too small for them, and `whole` says why.

    Several calls in one step of a pipeline, such as with the prompt and without, are streams of their own: by the name
    that the pipeline gives them (`cache_context`), else by their order among calls at the same time (an input of a name
    like timestep, sigma or t); where there is none, by their conditions.
    """

    def __init__(self, module: nn.Module, lowering: SampleLowering, ranks: Ranks, or_whole: bool = False) -> None:
        self.module, self.lowering, self.ranks, self.or_whole = module, lowering, ranks, or_whole
        self._whole_kinds, self._failed = set[CallKind](), 0
        self.stream_name: str | None = None
        self._known, self._others = _Known([], [], []), list[_Known]()
        self._steps: dict[CallKind, SampleStep] = {}
        self._states = WeakKeyDictionary[Traced, dict[str, torch.Tensor]]()
        self._weights: list[tuple[Any, ...]] = []
        self._untouched: Untouched | None = None

    @property
    def whole(self) -> str | None:
        return self._known.whole

    def of_copy(self, module: nn.Module) -> "Spread":
        """The same for a copy of the module, whose weights are its own; its programs are made when it is called."""
        return Spread(module, self.lowering, self.ranks, self.or_whole)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's forward; without gradients.

        Raises:
            CompileError: an input asks for its gradient, or the call is inside a vmap.
        """
        _require_plain(args, kwargs)
        with self.ranks.turn, held_collector():
            step = self._step_or_none(args, kwargs)
        if step is None:
            with torch.no_grad():
                return self.module(*args, **kwargs)
        return self.predict(step, args, kwargs)

    def predict(
        self, step: SampleStep, args: tuple[Any, ...], kwargs: dict[str, Any], stream: str | None = None
    ) -> Any:
        """By these programs, as the next step of a stream; which one is found out where it has no name."""
        tensors, _ = step.traced.captured.inputs.bind(args, kwargs)
        own = self.stream_name if stream is None else stream
        with self.ranks.turn:
            state = self.state(step.traced)
        prediction = self.ranks.predict(step, state, step.bind(tensors), own)
        return returned(step, prediction, args, kwargs)

    def step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SampleStep:
        """The programs for a call; of its tensors only shapes and types are used."""
        with self.ranks.turn, held_collector():
            return self._of_size(*self.traced(args, kwargs))

    def traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Traced, int]:
        """A call's graph, and its number of samples."""
        self._forget_other_weights()
        around = Surroundings.of_call(self.module)
        with no_autocast():
            for traced in self._known.traced:
                size = traced.num_samples(args, kwargs)
                if size is not None:
                    self._used_last(traced)
                    return traced, size
            traced = self._resized(args, kwargs, around)
            size = traced.num_samples(args, kwargs)
        assert size is not None
        self._tell_of_numbers(traced)
        self._known.traced.append(traced)
        self._used_last(traced)
        self._known.named = named_by(self.module)
        self._remember()  # as tracing has left them
        return traced, size

    def _tell_of_numbers(self, new: Traced) -> None:
        """Say which number is another one for the third time, with all else the same: every one is a graph of its
        own."""
        others = [one for one in self._known.traced if one.sized is None] if new.sized is None else []
        known = [name for one in others if (name := _other_number(one, new)) is not None]
        for name in {name for name in known if known.count(name) == _MANY_NUMBERS and not self.ranks.rank}:
            _log.warning(
                "%s: input %s is a number, traced and compiled anew for every value, and no displaced step follows one "
                "of another: pass a tensor, of which forward reads no number",
                type(self.module).__name__,
                name,
            )

    def _used_last(self, traced: Traced) -> None:
        """Those that were not used for long are let go of, unless weights are that others would need."""
        if traced is not self._known.traced[0] and traced is not self._known.traced[-1]:
            self._known.traced.remove(traced)
            self._known.traced.append(traced)
        others = self._known.traced[1:]
        free = [one for one in others if isinstance(one.any_size, AnySize)]
        old = [*free[:-_MOST_KINDS], *[one for one in others if one not in free][:-_MOST_KINDS]]
        if old and not any(map(is_released, self.module.parameters())):
            self._known.traced = [one for one in self._known.traced if one not in old]
            self._forget(old)

    def _forget(self, graphs: Sequence[Traced]) -> None:
        """Let go of all that was made of these."""
        for kind in [kind for kind in self._steps if kind[0] in graphs]:
            self.ranks.forget(self._steps.pop(kind))
        self._whole_kinds = {kind for kind in self._whole_kinds if kind[0] not in graphs}

    def _resized(self, args: tuple[Any, ...], kwargs: dict[str, Any], around: Surroundings | None) -> Traced:
        """A call's graph by one with free sizes, if one holds for it, else by a trace. Sizes are free from the first
        call on, or from the second that differs from another in sizes alone."""
        tracing, apart = self.lowering.tracing, list[str]()
        for traced in self._known.traced:
            others, failed = traced.other_sizes(args, kwargs), self._known.unfree
            is_new = others is not None and failed[str(others)] < _MOST_UNFREE
            if others is not None and is_new:
                failed[str(others)] += 1
                traced.any_size = tracing.freed(self.module, traced, others, args, kwargs, around)
            if isinstance(traced.any_size, AnySize):
                try:
                    found = tracing.resized(traced, args, kwargs)
                    failed[str(others)] -= is_new
                    self._used_last(traced)
                    return found
                except CompileError as error:
                    apart.append(str(error))
                    if is_new and traced.any_size.fixed:  # others may be free
                        traced.any_size = str(error)
        first = tracing.sizes == "any" and not self._known.traced
        return replace(tracing.traced(self.module, args, kwargs, first, around), apart=apart[-1] if apart else None)

    def _step_or_none(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SampleStep | None:
        """None where the module runs whole: as soon as one of its calls is no graph, for calls may follow from each
        other; of those that are, one may run whole alone."""
        if self._known.all_whole and self._failed < _MOST_FAILED:
            self._forget_other_weights()  # others may do
        if self._known.all_whole:
            return None
        kind: CallKind | None = None
        try:
            traced, size = self.traced(args, kwargs)
            kind, self._failed = (traced, size), 0
            return None if kind in self._whole_kinds else self._of_size(traced, size)
        except FxpipeError as error:
            if not self.or_whole:
                raise
            self._run_whole(kind, error)
            return None

    def _run_whole(self, kind: CallKind | None, why: FxpipeError) -> None:
        """A kind of call, or all."""
        what = type(self.module).__name__
        if kind is None:
            self._known.all_whole, about = True, what
            self._failed += 1
        else:
            self._whole_kinds.add(kind)
            about = f"{what}, where a call is like this one,"
        self._known.whole = f"{about} runs whole on every rank: {why}"
        if not self.ranks.rank:
            _log.warning("%s", self._known.whole)

    def _of_size(self, traced: Traced, size: int) -> SampleStep:
        if (traced, size) not in self._steps:
            with no_autocast():
                self._steps[traced, size] = self.lowering.step(traced, size, self.ranks)
        return self._steps[traced, size]

    def adopt(self, made: SampleStep) -> None:
        """Run the calls that these programs are for by them from now on."""
        self.lowering = replace(self.lowering, plan=made.plan)
        key = made.traced, made.batch_size
        if (before := self._steps.get(key)) is not None:
            self.ranks.forget(before)
        self._steps[key] = made

    def follow(self, plan: SamplePlan) -> None:
        """Make the programs of calls that another module's plan is for, if there are such, by it from now on."""
        self.lowering = replace(self.lowering, plan=plan)
        for kind in [kind for kind, step in self._steps.items() if step.plan.fingerprint == plan.fingerprint]:
            self.ranks.forget(self._steps.pop(kind))

    @contextmanager
    def by(self, made: SampleStep) -> Iterator[None]:
        """Run the calls that these programs are for by them inside."""
        key = made.traced, made.batch_size
        before = self._steps.get(key)
        self._steps[key] = made
        try:
            with self.ranks.call(for_all=True):
                yield
        finally:
            self._steps.pop(key)
            if before is not None:
                self._steps[key] = before
            if made is not before:
                self.ranks.forget(made)

    def state(self, traced: Traced) -> dict[str, torch.Tensor]:
        """The module's tensors and the graph's constants, by the programs' names."""
        if traced not in self._states:
            constants = {f"_constants.{name}": tensor for name, tensor in traced.captured.constants.items()}
            self._states[traced] = tensors_of(self.module) | constants
        return self._states[traced]

    @property
    def kept(self) -> set[str]:
        """What is told of tensors that forward leaves on the module, and ranks do not."""
        return {text for traced in self._known.traced for text in traced.captured.kept}

    def release(self, rank: int) -> int:
        """Let go of what no program of this rank reads, of all kinds of calls so far; how many bytes that frees."""
        self._forget_other_weights()
        self._forget_others(0)
        if not self._steps or self.whole is not None:
            return 0
        freed = release(self.module, {name for step in self._steps.values() for name in step.program(rank).state})
        self._remember()  # with the hooks that tell of it
        self._untouched = None
        return freed

    def _remember(self) -> None:
        """Settings are as they should be now."""
        settings = settings_of(self.module, self._known.named)
        self._known.settings, self._untouched = [*settings], Untouched(self.module, settings)

    def _forget_other_weights(self) -> None:
        """Tensors that were put in place of others are read from now on; others by name, shape or type are another
        model, as with an adapter loaded or fused, and so are other settings."""
        require_new(self.module, or_released=True)
        if self._untouched is not None and self._untouched.holds():
            return
        self._untouched = None
        now = [(name, tuple(t.shape), t.dtype, t.device, id(t)) for name, t in tensors_of(self.module).items()]
        if now != self._weights:
            self._states.clear()
        self._weights = now
        first = dict[int, int]()  # of those that are one tensor under several names
        shapes = [(*one[:-1], first.setdefault(one[-1], place)) for place, one in enumerate(now)]
        settings = settings_of(self.module, self._known.named)
        if shapes == self._known.shapes and settings == self._known.settings:
            self._untouched = Untouched(self.module, settings)
            return
        for kind, step in self._steps.items():
            if kind[0] in self._known.traced:
                self.ranks.forget(step)  # with the weights it is bound to
        before, self._known.named = self._known.named, []  # with the modules that some are of
        self._others.append(self._known)
        named = named_by(self.module)
        now_set = settings_of(self.module, named)
        back = [one for one in self._others if one.shapes == shapes and one.settings == now_set]
        if back:
            self._known, back[0].named = back[0], named
        else:
            self._known = _Known(shapes, [*settings_of(self.module, before)], before)
        self._others = [one for one in self._others if one is not self._known and one.traced]
        self._forget_others(_MOST_OTHERS)

    def _forget_others(self, but: int) -> None:
        """Let go of what is known of other settings, but for the last few."""
        while len(self._others) > but:
            self._forget(self._others.pop(0).traced)


def returned(step: SampleStep, prediction: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What forward returns with this prediction; what it puts into its arguments is there, too."""
    made = step.traced.returned.rebuilt(prediction)
    if not isinstance(made, Changed):
        return made
    put_back(made, step.traced.captured.inputs.signature, args, kwargs)
    return made.output


def _require_plain(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse what programs would leave out without a word: derivatives, which would be of what else is made of the
    input alone; and a vmap, which ranks know nothing of."""
    if private.under_vmap():
        raise CompileError(
            "the call is inside torch.vmap, of which the other ranks know nothing: call with all samples as one batch, "
            "or one after the other"
        )
    leaves = [(path, leaf) for path, leaf in named_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    for path, leaf in leaves:
        has_tangent = forward_ad.unpack_dual(leaf).tangent is not None
        if has_tangent or (torch.is_grad_enabled() and leaf.requires_grad):
            what = "has a tangent" if has_tangent else "requires a gradient"
            raise CompileError(
                f"input {'.'.join(path[1:])} of shape {list(leaf.shape)} {what}, and what ranks compute together has "
                "none: sample under torch.no_grad(), or pass it as .detach(); guidance by gradients needs the module "
                "that was not compiled"
            )


def _other_number(one: Traced, other: Traced) -> str | None:
    """The input that alone tells calls of two graphs from each other, where it is a number, or numbers are read of
    it."""
    inputs = one.captured.inputs, other.captured.inputs
    if inputs[0].tree != inputs[1].tree:
        return None
    pairs = zip(inputs[0].leaves, inputs[1].leaves, strict=True)
    differing = [pair for pair in pairs if pair[0] != pair[1]]
    if not differing:
        both = zip(one.captured.guards, other.captured.guards, strict=False)
        return next((a.inputs[0] for a, b in both if not torch.equal(a.value, b.value)), None)
    numbers = all(type(leaf.constant) in (int, float) for pair in differing for leaf in pair)
    return differing[0][0].name if len(differing) == 1 and numbers else None
