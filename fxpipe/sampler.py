"""A compiled sampler: a user's pipeline or denoiser, spread over ranks, and what they inspect of it.

sampler.pipeline()(prompt="...")     the user's own loop; its denoiser's calls are spread
  pipe.unet(sample, t, text)    ->   Spread: programs for this kind of call   ->   ranks   ->   the whole prediction
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from fxpipe.capture import Capture
from fxpipe.capture.trees import Returned
from fxpipe.cluster import Cluster
from fxpipe.errors import CompileError
from fxpipe.models.pipelines import Shell, with_components, with_submodule
from fxpipe.plan.block_graph import human_bytes
from fxpipe.plan.rank_program import Message, Traffic
from fxpipe.plan.sample_grid import Grid
from fxpipe.plan.sample_program import SampleProgram
from fxpipe.plan.timeline import Timeline
from fxpipe.plan.transport import Channel
from fxpipe.run.patched import finished
from fxpipe.run.ranks import LaunchedRank, LocalRanks
from fxpipe.run.verification import TOLERANCES
from fxpipe.simulate import timeline
from fxpipe.simulate.op_lists import StepOps


@dataclass(frozen=True, eq=False)
class Traced:
    """A module's call as one graph, for any number of samples; `rows` are the inputs that have rows, and where."""

    captured: Capture
    returned: Returned
    rows: Mapping[str, int]

    def num_samples(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
        """Of a call that has this graph; None of another. Of tensors only shapes and types are used."""
        try:
            _, size = self.captured.inputs.bind(args, kwargs, shapes_alone=True)
        except CompileError:
            return None
        return size if self.captured.batch or size == self.captured.inputs.batch_size else None


@dataclass(frozen=True, eq=False)
class SampleStep:
    """The programs of all ranks for calls with so many samples. `inputs` has the module's input that each input of a
    program is, by name, `likes` its shape and type; `about` says where the rows lie, `notes` what is gathered because
    no rule was known."""

    traced: Traced
    batch_size: int
    grid: Grid
    inputs: Mapping[str, str]
    likes: Mapping[str, torch.Tensor]
    programs: tuple[SampleProgram, ...]
    messages: tuple[Message, ...]
    about: str
    notes: tuple[str, ...]
    warmup: int = 0
    displaced: tuple[Message, ...] = ()
    """The messages of a displaced step, where there are such after `warmup` fresh ones."""

    @property
    def channels(self) -> list[Channel]:
        return sorted({message.channel for message in (*self.messages, *self.displaced)})

    def bind(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A call's tensors by the programs' names."""
        return {name: tensors[argument].contiguous() for name, argument in self.inputs.items()}


class Lowering(Protocol):
    """What the compiler does for a spread module."""

    def traced(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
        """The module's call as a graph."""
        ...

    def step(self, traced: Traced, batch_size: int) -> SampleStep:
        """The programs of all ranks for so many samples."""
        ...

    def ops(self, step: SampleStep) -> StepOps:
        """What every rank does, for how long, and in how many bytes."""
        ...


class Spread:
    """A module whose calls run on all ranks. Programs are made when a kind of call is first seen: other shapes, other
    conditions; another number of samples needs no new trace."""

    def __init__(self, module: nn.Module, lowering: Lowering, ranks: LocalRanks | LaunchedRank) -> None:
        self.module, self.lowering, self.ranks = module, lowering, ranks
        self._traced: list[Traced] = []
        self._steps: dict[tuple[int, int], SampleStep] = {}
        self._states: dict[int, dict[str, torch.Tensor]] = {}
        self._weights: list[tuple[Any, ...]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's forward; without gradients."""
        step = self.step(args, kwargs)
        tensors, _ = step.traced.captured.inputs.bind(args, kwargs)
        prediction = self.ranks.predict(step, self.state(step.traced), step.bind(tensors))
        return step.traced.returned.rebuilt(prediction)

    def step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SampleStep:
        """The programs for a call; of its tensors only shapes and types are used."""
        self._forget_other_weights()
        for traced in self._traced:
            size = traced.num_samples(args, kwargs)
            if size is not None:
                return self._of_size(traced, size)
        traced = self.lowering.traced(self.module, args, kwargs)
        size = traced.num_samples(args, kwargs)
        assert size is not None
        self._traced.append(traced)
        return self._of_size(traced, size)

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
        model, as with an adapter loaded or fused."""
        now = [(name, tuple(t.shape), t.dtype, t.device, id(t)) for name, t in _tensors_of(self.module).items()]
        if now != self._weights:
            self._states.clear()
        if [one[:-1] for one in now] != [one[:-1] for one in self._weights]:
            self._traced.clear()
            self._steps.clear()
        self._weights = now


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
    was compiled for; calls of other shapes are compiled when they come.
    """

    model: Any
    name: str | None
    denoiser: Spread
    decoder: Spread | None
    example: tuple[tuple[Any, ...], dict[str, Any]]
    ranks: LocalRanks | LaunchedRank
    cluster: Cluster

    @property
    def step(self) -> SampleStep:
        """The programs for calls like the example."""
        return self.denoiser.step(*self.example)

    @property
    def grid(self) -> Grid:
        return self.step.grid

    @property
    def capture(self) -> Capture:
        return self.step.traced.captured

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """One call of the denoiser on all ranks: what its forward returns."""
        with self.ranks.call():
            return self.denoiser(*args, **kwargs)

    def pipeline(self) -> Any:
        """The user's pipeline, same call, scheduler and callbacks, with its denoiser spread over the ranks.

        It is a shallow copy: schedulers, encoders and weights are shared. Under torchrun every rank runs the same
        script, and every rank gets the whole result.
        """
        if self.name is None:
            raise CompileError(f"{type(self.model).__name__} is no pipeline; call sampler.predict as its forward")
        parts: dict[str, object] = {self.name: Shell(self.denoiser.module, self.denoiser)}
        if self.decoder is not None:
            shell = Shell(self.decoder.module, self.decoder)
            parts["vae"] = with_submodule(self.model.vae, "decoder", shell)
        return with_components(self.model, parts, self.ranks.call, finished)

    def verify(self, *args: Any, **kwargs: Any) -> SampleVerification:
        """One call of all ranks against the uncompiled model; the example where no arguments are given."""
        if not args and not kwargs:
            args, kwargs = self.example
        step = self.denoiser.step(args, kwargs)
        with torch.no_grad():
            wanted = step.traced.returned.tensor(self.denoiser.module(*args, **kwargs))
        found = step.traced.returned.tensor(self.predict(*args, **kwargs))
        wide = torch.promote_types(wanted.dtype, torch.float32)
        scale = float(wanted.to(wide).abs().max()) or 1.0
        error = float((found.to(wide) - wanted.to(wide)).abs().max()) / scale
        return SampleVerification(error, TOLERANCES.get(wanted.dtype, 5e-2), wanted.dtype, step.grid)

    @property
    def _exchanges(self) -> str:
        if not self.step.displaced:
            return "every exchange of the step itself"
        return f"after {self.step.warmup} fresh steps, patches behind are read as they were in the step before"

    def traffic(self) -> Traffic:
        """Bytes of one call of the denoiser by directed channel and by kind; of a displaced one where there is one."""
        return Traffic(self.step.displaced or self.step.messages)

    def simulate(self, cluster: Cluster | str | None = None) -> Timeline:
        """Predict one call of the denoiser from the programs of all ranks: time, traffic and memory of each.

        Args:
            cluster: seconds of transfers, a `Cluster` or its text; the one compiled for where left out.
        """
        network = Cluster.parse(cluster) if isinstance(cluster, str) else cluster or self.cluster
        return timeline(self.denoiser.lowering.ops(self.step), network.require(self.grid.world_size))

    def trace(self, path: str | Path) -> Path:
        """Write the predicted call as a Chrome trace, for Perfetto."""
        from fxpipe.show.trace_format import write_trace

        return write_trace(self.simulate(), path)

    def dump(self, directory: str | Path) -> Path:
        """Write plan, rows, traffic and every rank's program as readable Python."""
        from fxpipe.show.sample_dump import dump

        return dump(self, Path(directory))

    def close(self) -> None:
        """Leave the network, where this process is one rank of a launch."""
        self.ranks.close()

    def __str__(self) -> str:
        kinds = {kind: size for kind, size in self.traffic().kinds.items() if size}
        moved = ", ".join(f"{kind} {human_bytes(size)}" for kind, size in kinds.items())
        lines = [
            str(self.capture),
            f"sampling: {self.grid} {self.grid.axes}, {self._exchanges}",
            f"traffic per step: {moved or 'none'}",
            *(f"note: {note}" for note in self.step.notes),
        ]
        return "\n".join(lines)
