"""A compiled sampler: a user's pipeline or denoiser, spread over ranks, and what they inspect of it.

sampler.pipeline()(prompt="...")     the user's own loop; its denoiser's calls are spread
  pipe.unet(sample, t, text)    ->   Spread: programs for this kind of call   ->   ranks   ->   the whole prediction
"""

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from fxpipe.capture import Capture
from fxpipe.capture.any_size import AnySize
from fxpipe.capture.settings import Settings, settings_of
from fxpipe.capture.trees import Returned
from fxpipe.cluster import Cluster
from fxpipe.errors import CompileError, FxpipeError
from fxpipe.models.pipelines import shell, with_components, with_submodule
from fxpipe.options import check_counts
from fxpipe.plan.block_graph import human_bytes
from fxpipe.plan.rank_program import Message, Traffic
from fxpipe.plan.sample_grid import Grid
from fxpipe.plan.sample_plan import SamplePlan
from fxpipe.plan.sample_program import SampleProgram
from fxpipe.plan.schedule import Schedule
from fxpipe.plan.timeline import Timeline
from fxpipe.plan.transport import Channel
from fxpipe.run.patched import finished
from fxpipe.run.ranks import Ranks
from fxpipe.simulate import timeline
from fxpipe.simulate.op_lists import StepOps

_TOLERANCES = {torch.float64: 1e-10, torch.float32: 5e-5}
"""Of one call, relative to the prediction's largest value; rounding alone gave 9e-14 and, in one of 47 models, 5e-5."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Traced:
    """A module's call as one graph, for any number of samples; `rows` are the inputs that have rows, and where.

    `any_size` is the graph with free sizes, or why there is none; None where none was asked for. `apart` says why the
    call's sizes have a trace of their own where there were such graphs.
    """

    captured: Capture
    returned: Returned
    rows: Mapping[str, int]
    any_size: AnySize | str | None = None
    apart: str | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """What had to be given up."""
        one_by_one = self.any_size if isinstance(self.any_size, str) else None
        why = {"image sizes are traced one by one": one_by_one, "this image size was traced apart": self.apart}
        return (*self.captured.notes, *(f"{what}: {reason}" for what, reason in why.items() if reason))

    def num_samples(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
        """Of a call that has this graph; None of another. Of tensors only shapes and types are used."""
        try:
            _, size = self.captured.inputs.bind(args, kwargs, shapes_alone=True)
        except CompileError:
            return None
        return size if self.captured.batch or size == self.captured.inputs.batch_size else None


@dataclass(frozen=True, eq=False)
class SampleStep:
    """The programs of all ranks for calls with `plan.num_samples` samples. `inputs` has the module's input that each
    input of a program is, by name, `likes` its shape and type; `about` says where the rows lie."""

    traced: Traced
    plan: SamplePlan
    inputs: Mapping[str, str]
    likes: Mapping[str, torch.Tensor]
    programs: tuple[SampleProgram, ...]
    messages_of: Mapping[str, tuple[Message, ...]]
    about: str

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
    def channels(self) -> list[Channel]:
        return sorted({message.channel for of_form in self.messages_of.values() for message in of_form})

    def sequence(self, num_steps: int) -> list[str]:
        """The forms of a call's steps."""
        if "displaced" not in self.forms:
            return ["fresh"] * num_steps
        warm = ["fresh", *["again" if "again" in self.forms else "fresh"] * (self.warmup - 1)]
        return (warm + ["displaced"] * num_steps)[:num_steps]

    def bind(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A call's tensors by the programs' names."""
        return {name: tensors[argument].contiguous() for name, argument in self.inputs.items()}


class Lowering(Protocol):
    """What the compiler does for a spread module."""

    def traced(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], num_free: int) -> Traced:
        """The module's call as a graph; `num_free`: graphs with free sizes that do not hold for it."""
        ...

    def resized(self, traced: Traced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
        """The graph with free sizes at this call's; CompileError where it does not hold for them."""
        ...

    def step(self, traced: Traced, batch_size: int) -> SampleStep:
        """The programs of all ranks for so many samples."""
        ...

    def ops(self, step: SampleStep, num_steps: int) -> StepOps:
        """What every rank does in so many steps of a call, for how long, and in how many bytes."""
        ...


class Spread:
    """A module whose calls run on all ranks. Programs are made when a kind of call is first seen: other shapes, other
    conditions, other settings; another number of samples needs no new trace. With `or_whole`, a module for which there
    are no programs runs whole on every rank, and `whole` says why.

    Several calls in one step of a pipeline, such as with the prompt and without, are streams of their own: by the name
    that the pipeline gives them (`cache_context`), else by their order among calls at the same time (an input of a name
    like timestep, sigma or t); where there is none, by their conditions.
    """

    def __init__(self, module: nn.Module, lowering: Lowering, ranks: Ranks, or_whole: bool = False) -> None:
        self.module, self.lowering, self.ranks, self.or_whole = module, lowering, ranks, or_whole
        self.whole: str | None = None
        self.stream_name: str | None = None
        self._traced: list[Traced] = []
        self._steps: dict[tuple[int, int], SampleStep] = {}
        self._states: dict[int, dict[str, torch.Tensor]] = {}
        self._weights: list[tuple[Any, ...]] = []
        self._settings: Settings = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's forward; without gradients."""
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
        prediction = self.ranks.predict(step, self.state(step.traced), step.bind(tensors), own)
        return step.traced.returned.rebuilt(prediction)

    def step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SampleStep:
        """The programs for a call; of its tensors only shapes and types are used."""
        self._forget_other_weights()
        for traced in self._traced:
            size = traced.num_samples(args, kwargs)
            if size is not None:
                return self._of_size(traced, size)
        traced = self._resized(args, kwargs)
        size = traced.num_samples(args, kwargs)
        assert size is not None
        self._traced.append(traced)
        self._settings = settings_of(self.module)  # as tracing has left them
        return self._of_size(traced, size)

    def _resized(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
        """A call's graph by one with free sizes, if one holds for it, else by a trace."""
        apart: str | None = None
        for traced in self._traced:
            if isinstance(traced.any_size, AnySize):
                try:
                    return self.lowering.resized(traced, args, kwargs)
                except CompileError as error:
                    apart = str(error)
        tried = sum(traced.any_size is not None for traced in self._traced)
        return replace(self.lowering.traced(self.module, args, kwargs, tried), apart=apart)

    def _step_or_none(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SampleStep | None:
        """None where the module runs whole: as soon as one of its calls must, for calls may follow from each other."""
        if self.whole is not None:
            self._forget_other_weights()  # others may do
        if self.whole is not None:
            return None
        try:
            return self.step(args, kwargs)
        except FxpipeError as error:
            if not self.or_whole:
                raise
            self.whole = f"{type(self.module).__name__} runs whole on every rank: {error}"
            _log.warning("%s", self.whole)
            return None

    def _of_size(self, traced: Traced, size: int) -> SampleStep:
        key = id(traced), size
        if key not in self._steps:
            self._steps[key] = self.lowering.step(traced, size)
        return self._steps[key]

    def state(self, traced: Traced) -> dict[str, torch.Tensor]:
        """The module's tensors and the graph's constants, by the programs' names."""
        if id(traced) not in self._states:
            constants = {f"_constants.{name}": tensor for name, tensor in traced.captured.constants.items()}
            self._states[id(traced)] = _tensors_of(self.module) | constants
        return self._states[id(traced)]

    def _forget_other_weights(self) -> None:
        """Tensors that were put in place of others are read from now on; others by name, shape or type are another
        model, as with an adapter loaded or fused, and so are other settings."""
        now = [(name, tuple(t.shape), t.dtype, t.device, id(t)) for name, t in _tensors_of(self.module).items()]
        if now != self._weights:
            self._states.clear()
        settings = settings_of(self.module)
        if settings != self._settings or [one[:-1] for one in now] != [one[:-1] for one in self._weights]:
            self._traced.clear()
            self._steps.clear()
            self.whole = None
        self._weights, self._settings = now, settings


def _tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


@dataclass(frozen=True)
class SampleVerification:
    """The largest difference from the uncompiled model, relative to its largest value."""

    error: float
    tolerance: float
    dtype: torch.dtype
    grid: Grid

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance

    def __str__(self) -> str:
        what = "exact" if self.ok else "NOT EXACT"
        where = f"{self.grid} {self.grid.axes}, {str(self.dtype).removeprefix('torch.')}"
        return f"{what}: prediction {self.error:.1e} off one device's, tolerance {self.tolerance:.0e} ({where})"


@dataclass(frozen=True, eq=False)
class Sampler:
    """The result of `fxpipe.compile_sampler`.

    `denoiser` predicts; `decoder` is the VAE's, spread by the same passes. `example` is the call of the denoiser that
    was compiled for; calls of other shapes are compiled when they come, as are those of the pipeline's `others`, by
    name: denoisers of later steps.
    """

    model: Any
    name: str | None
    denoiser: Spread
    others: Mapping[str, Spread]
    decoder: Spread | None
    example: tuple[tuple[Any, ...], dict[str, Any]]
    ranks: Ranks
    cluster: Cluster

    @property
    def step(self) -> SampleStep:
        """The programs for calls like the example."""
        return self.denoiser.step(*self.example)

    @property
    def grid(self) -> Grid:
        return self.step.grid

    @property
    def plan(self) -> SamplePlan:
        """Which rank has which samples, stages and patches of calls like the example, and why."""
        return self.step.plan

    @property
    def schedule(self) -> Schedule:
        """The order of a steady step."""
        return self.plan.step

    @property
    def capture(self) -> Capture:
        return self.step.traced.captured

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """One call of the denoiser on all ranks: what its forward returns. Inside `call()` it is the next step."""
        return self.denoiser(*args, **kwargs)

    def call(self) -> AbstractContextManager[None]:
        """Around the steps of a loop of one's own, which belong together, as those of a pipeline's call do."""
        return self.ranks.call()

    def pipeline(self) -> Any:
        """The user's pipeline, same call, scheduler and callbacks, with its denoiser spread over the ranks.

        It is a shallow copy: schedulers, encoders and weights are shared. Under torchrun every rank runs the same
        script, and every rank gets the whole result.
        """
        if self.name is None:
            raise CompileError(f"{type(self.model).__name__} is no pipeline; call sampler.predict as its forward")
        spread = {self.name: self.denoiser, **self.others}
        parts: dict[str, object] = {name: shell(one.module, one) for name, one in spread.items()}
        if self.decoder is not None:
            decoder = shell(self.decoder.module, self.decoder)
            parts["vae"] = with_submodule(self.model.vae, "decoder", decoder)
        return with_components(self.model, parts, self.ranks.call, finished)

    def verify(self, *args: Any, **kwargs: Any) -> SampleVerification:
        """One call of all ranks against the uncompiled model; the example where no arguments are given.

        In displaced mode the same call is made again after the exact steps: where nothing changes between steps, what
        was so a step before is what is so now, and the prediction is exact but for norms that are "separate".
        """
        if not args and not kwargs:
            args, kwargs = self.example
        step = self.denoiser.step(args, kwargs)
        with torch.no_grad():
            wanted = step.traced.returned.tensor(self.denoiser.module(*args, **kwargs))
        found = step.traced.returned.tensor(self._again(step, args, kwargs))
        wide = torch.promote_types(wanted.dtype, torch.float32)
        scale = float(wanted.to(wide).abs().max()) or 1.0
        error = float((found.to(wide) - wanted.to(wide)).abs().max()) / scale
        return SampleVerification(error, _TOLERANCES.get(wanted.dtype, 5e-2), wanted.dtype, step.grid)

    def _again(self, step: SampleStep, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the last of a few equal steps predicts, a displaced one where there are such."""
        count = step.warmup + 1 if "displaced" in step.forms else 1
        with self.call():
            for _ in range(count):
                found = self.denoiser.predict(step, args, kwargs, "verify")
        return found

    def traffic(self, form: str = "fresh") -> Traffic:
        """Bytes of one call of the denoiser, by directed channel and by kind; of one of `step.forms`."""
        if form not in self.step.forms:
            raise CompileError(f"form={form!r}: the programs have the forms {', '.join(self.step.forms)}")
        return Traffic(self.step.messages_of[form])

    def simulate(self, steps: int = 1, cluster: Cluster | str | None = None) -> Timeline:
        """Predict the denoiser's part of a call from the programs of all ranks: time, traffic and memory of each.

        Args:
            steps: of the call, from its first; what follows displaced ones is as long as the last of them.
            cluster: seconds of transfers, a `Cluster` or its text; the one compiled for where left out.
        """
        network = Cluster.parse(cluster) if isinstance(cluster, str) else cluster or self.cluster
        check_counts(steps=steps)
        ops = self.denoiser.lowering.ops(self.step, steps)
        return timeline(ops, network.require(self.grid.world_size))

    def trace(self, path: str | Path, steps: int = 1) -> Path:
        """Write what `simulate` predicts as a Chrome trace, for Perfetto."""
        from fxpipe.show.trace_format import write_trace

        return write_trace(self.simulate(steps), path)

    def dump(self, directory: str | Path) -> Path:
        """Write plan, rows, traffic and every rank's program as readable Python."""
        from fxpipe.show.sample_dump import dump

        return dump(self, Path(directory))

    def report(self, path: str | Path, steps: int = 1) -> Path:
        """Write what is predicted of a call's first steps as one HTML page: timeline, load, memory, traffic, plan."""
        from fxpipe.show.report import write_sample_report

        check_counts(steps=steps)
        return write_sample_report(self, path, steps)

    @property
    def notes(self) -> tuple[str, ...]:
        """What is to be known: of the plan, and of what runs whole."""
        whole = (one.whole for one in [self.decoder] if one is not None and one.whole)
        return (*self.plan.notes, *whole)

    def close(self) -> None:
        """Leave the network, where this process is one rank of a launch."""
        self.ranks.close()

    def __str__(self) -> str:
        step = self.step
        lines = [
            str(self.capture),
            self.plan.summary(),
            *(
                f"traffic of a {form} step: {self._moved(form)}"
                for form in ("fresh", "displaced")
                if form in step.forms
            ),
            *(f"note: {one.whole}" for one in [self.decoder] if one is not None and one.whole),
        ]
        return "\n".join(lines)

    def _moved(self, form: str) -> str:
        kinds = {kind: size for kind, size in self.traffic(form).kinds.items() if size}
        return ", ".join(f"{kind} {human_bytes(size)}" for kind, size in kinds.items()) or "none"
