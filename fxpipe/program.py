"""A compiled program: what the user inspects, verifies and runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxpipe.capture import Capture, capture
from fxpipe.capture.kept_tables import tables_apart
from fxpipe.capture.known import Read
from fxpipe.capture.model_call import ModelCall
from fxpipe.capture.randomness import SeededDraws
from fxpipe.capture.same import same_constants
from fxpipe.capture.snapshot import Snapshot
from fxpipe.capture.surroundings import Surroundings
from fxpipe.capture.weights import tensors_of
from fxpipe.cluster import Cluster
from fxpipe.costs.model import CostModel
from fxpipe.errors import CompileError
from fxpipe.options import given_cluster, held_cost_model
from fxpipe.plan.block_graph import BlockGraph
from fxpipe.plan.explanation import Explanation
from fxpipe.plan.plan import Plan
from fxpipe.plan.rank_program import Traffic
from fxpipe.plan.schedule import Schedule
from fxpipe.plan.step import FilledPlan, StepPlan
from fxpipe.plan.timeline import Timeline
from fxpipe.run.agreement import told
from fxpipe.run.engine import Engine
from fxpipe.run.kinds import BatchKind, Kinds
from fxpipe.run.local_engine import LocalEngine
from fxpipe.run.nearness import Distance, Nearness, noise_of, values_of
from fxpipe.run.observe import Observe
from fxpipe.run.one_device import IN_FLOAT32, IN_FLOAT64, StepResult, one_device, one_device_wider
from fxpipe.run.saves.base import Base
from fxpipe.run.state_updates import put_back
from fxpipe.run.unchanged import Unchanged, require_strides
from fxpipe.run.verification import (
    TOLERANCES,
    Tolerance,
    Verification,
    compare,
    compare_outputs,
    compare_written,
    tolerance_of,
)
from fxpipe.run.weights import Weights, readers, without_memory
from fxpipe.shapes import Shapes
from fxpipe.show.explain import Replanned, explain
from fxpipe.simulate import timeline
from fxpipe.simulate.op_lists import ADAMW_BYTES

if TYPE_CHECKING:
    from fxpipe.analysis import CostedStep

Form = Literal["step", "prologue", "steady", "epilogue"]
AnEngine = TypeVar("AnEngine", Engine, LocalEngine)
Lower = Callable[[Form, Sequence[int] | None, int | None], StepPlan]
"""The programs of one form of the step, of some ranks or of all; of a smaller batch where its size is given."""


@dataclass(frozen=True, eq=False)
class Program:
    """The result of `fxpipe.compile`; a batch is passed to its methods as to the model's own forward.

    `ranks` are those whose programs this process holds, all where None; what needs the others makes them. `shapes` has
    the programs for batches of other shapes; what is given a batch takes the one for it. `again` makes other plans,
    `settings` are the model's when it was captured; `tables` what has to keep its value since forward keeps tables of
    it, or no longer does.
    """

    costed: "CostedStep"
    plan: Plan
    cluster: Cluster
    lower: Lower
    ranks: tuple[int, ...] | None = None
    shapes: Shapes | None = None
    again: Replanned | None = None
    settings: Snapshot | None = None
    tables: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @cached_property
    def step(self) -> StepPlan:
        """The step that does its own frozen work."""
        return self.lower("step", self.ranks, None)

    @cached_property
    def filled(self) -> FilledPlan | None:
        """The step that does the next batch's frozen work; None where that is no faster, or nothing is frozen.

        Made when it is first asked for: by `engine.train`, `engine.step(batch, next_batch)` or here.
        """
        if self.plan.steady is None:
            return None
        forms: tuple[Form, ...] = ("prologue", "steady", "epilogue")
        return FilledPlan(*(self.lower(form, self.ranks, None) for form in forms))

    def smaller(self, batch_size: int) -> StepPlan:
        """The step of a smaller batch, such as the last of an epoch: the plan's micro-batches of its first samples.

        Raises:
            CompileError: the batch is larger, or the model decides otherwise on so few samples.
        """
        self.step.require_size(batch_size)
        return self.step if batch_size == self.step.batch_size else self.lower("step", self.ranks, batch_size)

    @cached_property
    def whole(self) -> "Program":
        """The program with all ranks'."""
        return self if self.ranks is None else replace(self, ranks=None)

    @property
    def model(self) -> nn.Module:
        """The step whose forward returns the loss."""
        return self.costed.example.step

    @property
    def _own_model(self) -> nn.Module:
        """The model as the user gave it, whose names are those that are shown."""
        return self.model.get_submodule(self.costed.example.prefix.removesuffix("."))

    @property
    def capture(self) -> Capture:
        return self.costed.captured

    @property
    def blocks(self) -> BlockGraph:
        return self.costed.graph

    @property
    def block_seconds(self) -> tuple[float, ...]:
        """Of every block, forward and backward, for the largest micro-batch."""
        return self.costed.blocks.at(self.plan.microbatch_sizes[0]).total

    @property
    def schedule(self) -> Schedule:
        return self.plan.step

    @property
    def world_size(self) -> int:
        return self.plan.staged.world_size

    def traffic(self) -> Traffic:
        """Bytes per step, by directed channel and by kind."""
        return Traffic(self.step.messages)

    def simulate(
        self,
        cost_model: CostModel | None = None,
        cluster: Cluster | str | None = None,
        optimizer_bytes: int = ADAMW_BYTES,
        filled: bool = False,
    ) -> Timeline:
        """Predict one step of all ranks: time, bubbles, traffic and memory of each.

        Args:
            filled: the steady step, which does the next batch's frozen work, where there is one.
            cost_model: seconds of compute; the one compiled for where left out.
            cluster: seconds of transfers, a `Cluster` or its text; the one compiled for where left out.
            optimizer_bytes: of optimizer state per trained parameter; AdamW's two float32 averages where left out.
        """
        step = self.costed if cost_model is None else self.costed.priced(held_cost_model(cost_model))
        network = given_cluster(self.cluster if cluster is None else cluster, self.world_size)
        order = self.plan.steady if filled and self.plan.steady is not None else self.plan.step
        return timeline(step.ops(self.plan, order, network, optimizer_bytes), network)

    def explain(self) -> Explanation:
        """Why the plan is what it is: what a step would take on a free network, with more memory, in better balance,
        otherwise cut, and what ruled other layouts out. It prints."""
        ops = self.costed.ops(self.plan, self.plan.steady or self.plan.step, self.cluster)
        return explain(self.plan, ops, self.cluster, self.again)

    def run_local(self, *args: Any, **kwargs: Any) -> StepResult:
        """One step of all ranks in this process; `.grad` stays as it is.

        The keywords `seed` and `step` choose the random draws; both are 0 where left out, or where forward itself has
        arguments of these names.
        """
        seed, step = self._draws(kwargs)
        args, kwargs = self._placed(args, kwargs)
        return self.of(args, kwargs)._run_local(args, kwargs, seed, step)

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "Program":
        """The program for a call: this one, or that for other shapes."""
        return self if self.shapes is None else self.shapes.of(args, kwargs)

    def _run_local(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: int, step: int) -> StepResult:
        tensors, size = self.step.tensors(args, kwargs)
        plan = replace(self.whole.smaller(size), offloaded=False)  # no optimizer will step
        engine = LocalEngine(BatchKind(plan, self.whole.state), self._own_model, seed, self._shown)
        with put_back(self._rewritten) as written:
            loss, gradients = engine.run(tensors, step)
            outputs = {name: value.clone() for name, value in (engine.gather_outputs() or {}).items()}
        return StepResult(loss, gradients, outputs, written)

    @property
    def _rewritten(self) -> dict[str, torch.Tensor]:
        """The model's own tensors that forward writes to, by name."""
        named = tensors_of(self.model)
        return {update.name: named[update.name] for update in self.capture.updates}

    def _placed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A call's tensors, on the device where they have values."""
        device = self.step.device
        moved = pytree.tree_map_only(torch.Tensor, lambda t: t if t.is_meta else t.to(device), (args, kwargs))
        return cast(tuple[tuple[Any, ...], dict[str, Any]], moved)

    def _draws(self, kwargs: dict[str, Any]) -> tuple[int, int]:
        inputs = self.step.inputs  # of which some may be by name alone, **batch
        own = {*inputs.signature.parameters, *(leaf.name.partition(".")[0] for leaf in inputs.leaves)}
        seed, step = (0 if name in own else kwargs.pop(name, 0) for name in ("seed", "step"))
        return seed, step

    def verify(self, *args: Any, **kwargs: Any) -> Verification:
        """One step of all ranks in this process against the uncompiled model, with the same random draws: the loss,
        every gradient, and what forward returns beside the loss.

        Where it computes in bfloat16 or float16, both are also set against the model in float32, and judged by that; so
        are gradients in float32 that differ, against float64, for they may be rounding noise.
        `seed` and `step` as in `run_local`.
        """
        seed, step = self._draws(kwargs)
        args, kwargs = self._placed(args, kwargs)
        return self.of(args, kwargs)._verify(args, kwargs, seed, step)

    def _verify(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: int, step: int) -> Verification:
        result = self._run_local(args, kwargs, seed, step)
        draws, autocast = SeededDraws(seed, step, self.step.device), self.costed.example.autocast
        with put_back(self._rewritten) as written:
            own = self._shown_step(one_device(self.model, args, kwargs, draws, autocast))
        reference = own.loss, own.gradients, draws.count
        found = compare(result.loss, result.gradients, reference, len(self.capture.draws), self.tolerance)
        errors = compare_outputs(result.outputs, own.outputs, self.step.returned)
        limit = tolerance_of(self.capture.graph, self.blocks.local, outputs=True)
        all_errors = {**errors, **compare_written(result.written, written)}
        found = replace(found, outputs=all_errors, output_tolerance=limit.value)
        is_low = self.tolerance.is_low
        if not is_low and not found.doubtful:
            return found
        try:
            with put_back(self._rewritten):
                wide = one_device_wider(self.model, args, kwargs, draws, IN_FLOAT32 if is_low else IN_FLOAT64)
        except Exception:
            if is_low:
                raise
            return found  # its forward is for float32 alone
        wide = self._shown_step(wide)
        if not is_low:
            return replace(found, nearness=noise_of(result, own, wide, found.doubtful))
        expected = replace(wide, outputs={name: wide.outputs[name] for name in errors})
        rounding = {name: TOLERANCES.get(value.dtype.to_real(), 0.0) for name, value in values_of(expected).items()}
        return replace(found, nearness=Nearness(Distance.of(result, expected), Distance.of(own, expected), rounding))

    def _shown_step(self, step: StepResult) -> StepResult:
        return replace(step, gradients={self._shown(name): gradient for name, gradient in step.gradients.items()})

    def local_engine(self, seed: int = 0, observe: Observe | None = None) -> LocalEngine:
        """All ranks as threads of this process, training the model's own parameters; `observe` sees every event."""
        given = self.whole.kind, self._own_model, seed, self._shown, observe
        return self._completed(LocalEngine(*given, self._kinds(whole=True)))

    def engine(
        self,
        device: str | torch.device | None = None,
        seed: int = 0,
        observe: Observe | None = None,
        timeout: float | timedelta = 1800.0,
        weights: Weights | None = None,
    ) -> Engine:
        """This process as one rank, under torchrun, training its part of the model's own parameters in place.

        Args:
            device: where this rank computes: gloo on the CPU, NCCL on CUDA; the compiled one where left out.
            observe: sees this rank's events.
            timeout: seconds that a rank waits for another, which may sample or save meanwhile; one that is lost is
                noticed within seconds, whatever this is.
            weights: of a model on the meta device, by its names: a checkpoint of `save`, a safetensors file or a folder
                of such; a dict of these by component ({"unet": "model/unet", "vae": "model/vae"}), or of tensors. A
                rank reads what it trains or computes with, and holds nothing else; what is not on the meta device stays
                as it is. Make optimizers after it.
        """
        from fxpipe.run.transport.distributed import DistributedTransport

        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if not seconds > 0:
            raise CompileError(f"timeout={timeout}: give seconds, more than 0")
        where = self.step.device if device is None else torch.device(device)
        if where.type != self.step.device.type:
            raise CompileError(f"compiled for {self.step.device}, not for {where}: compile(..., device={where.type!r})")
        transport = DistributedTransport(where, seconds)
        if transport.world_size != self.world_size:
            transport.close()
            raise CompileError(f"compiled for {self.world_size} ranks, started with {transport.world_size} processes")
        with told(transport):
            found = None if weights is None else readers(weights)
            if found is not None:
                without_memory(self._own_model, found, where)
            given = self.kind, self._own_model, transport, seed, self._shown, observe
        return self._completed(Engine(*given, self._kinds(whole=False), weights=found))

    def _completed(self, engine: AnEngine) -> AnEngine:
        """It can write what is predicted beside what it measures, and sees what of the model was changed since."""
        engine.write_trace = lambda measured, path, filled: self.trace(path, filled, measured)
        read = {*self.capture.tensors.values()}
        used = {name: tensor for name, tensor in self.state.items() if name in read}
        used |= {name: used[first] for name, first in self.capture.tied.items() if first in used}
        given = self.model, used, self.settings, self._is_as_captured
        engine.unchanged = Unchanged(*given, self._values_read)
        engine.base = Base(self._own_model)
        return engine

    def _values_read(self) -> list[Read]:
        return [read for program in self._of_all_shapes() for read in (program.capture.read, program.tables)]

    def _of_all_shapes(self) -> "list[Program]":
        return [self] if self.shapes is None else [*self.shapes.programs.values()]

    def _is_as_captured(self) -> bool:
        """Whether forward, traced again for every shape, makes the steps that it made."""
        return all(program._makes_the_same() for program in self._of_all_shapes())

    def _makes_the_same(self) -> bool:
        now = self._captured_now()
        if self._is_alike(now):
            return True
        assert self.settings is not None  # of which something has changed
        with self.settings.as_at_first():
            then = self._captured_now()
        apart = tables_apart(now, then, dict(self.model.named_buffers())) if self._is_alike(then) else None
        self.tables.update(apart or {})
        return apart is not None

    def _captured_now(self) -> Capture:
        example = self.costed.example
        surroundings = Surroundings(self.step.device, example.autocast)
        return capture(ModelCall(self.model, self.capture.inputs, example.tensors, surroundings))

    def _is_alike(self, now: Capture) -> bool:
        before = self.capture
        alike = (now.fingerprint, now.tensors) == (before.fingerprint, before.tensors)
        return alike and same_constants(now.constants, before.constants)

    def _kinds(self, whole: bool) -> Kinds | None:
        """How an engine finds the programs for batches of other shapes."""
        if self.shapes is None:
            return None
        shapes = self.shapes

        def made(args: Sequence[Any], kwargs: Mapping[str, Any]) -> BatchKind:
            program = shapes.of(args, kwargs)
            return program.whole.kind if whole else program.kind

        return Kinds(next(iter(shapes.programs)), shapes.key, made)

    @property
    def kind(self) -> BatchKind:
        """What an engine runs for batches of these shapes."""
        filled = None if self.plan.steady is None else lambda: cast(FilledPlan, self.filled)
        return BatchKind(self.step, self.state, filled, self.smaller)

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """Parameters, buffers and lifted constants by the names the programs use."""
        named = tensors_of(self.model)
        meta = [name for name, tensor in named.items() if tensor.is_meta]
        if meta:
            raise CompileError(
                f"{len(meta)} tensors are on the meta device ({meta[0]}, ...): the program can be inspected, and run "
                "by ranks that read their weights from files, program.engine(weights=...); for all ranks in one "
                "process materialise the model (to_empty and load a state dict) and compile again"
            )
        self._require_unchanged(named)
        read = {*self.capture.tensors.values()}
        named = {name: tensor for name, tensor in named.items() if name in read}
        return named | {f"_constants.{name}": tensor for name, tensor in self.capture.constants.items()}

    def _require_unchanged(self, named: Mapping[str, torch.Tensor]) -> None:
        """The programs hold for the shapes, types and trained weights that were captured, and for no others."""
        expected = {name: like for p in self.step.programs for name, like in p.state.items() if name in named}
        for name, like in expected.items():
            now = named[name]
            if self.settings is not None:
                require_strides(name, now, self.settings.strides)
            trains = isinstance(now, nn.Parameter) and now.requires_grad
            was = (tuple(like.shape), like.dtype, name in self.capture.trainable)
            if (tuple(now.shape), now.dtype, trains) != was:
                raise CompileError(
                    f"{self._shown(name)} was {list(was[0])} {was[1]}, requires_grad={was[2]}, when compiled, "
                    f"and is now {list(now.shape)} {now.dtype}, requires_grad={trains}; put it back, or compile again"
                )

    @cached_property
    def tolerance(self) -> Tolerance:
        """The relative error that rounding alone can cause, by the least precise type the step computes in."""
        return tolerance_of(self.capture.graph, self.blocks.local)

    def dump(self, directory: str | Path, filled: bool = False) -> Path:
        """Write plan, schedule, traffic, and per rank the program and its stage graphs as readable Python.

        With `filled` also the three forms of the step that does the next batch's frozen work in its idle time.
        """
        from fxpipe.show.dump import dump

        return dump(self.whole, Path(directory), filled)

    def trace(self, path: str | Path, filled: bool = False, measured: Timeline | None = None) -> Path:
        """Write the predicted step as a Chrome trace, for Perfetto, beside a `measured` one where it is given, as
        `engine.trace` does.

        `filled` as in `simulate`.
        """
        from fxpipe.show.trace_format import write_trace

        return write_trace(self.simulate(filled=filled), path, measured)

    def report(self, path: str | Path, memory_limit_bytes: int | None = None) -> Path:
        """Write the predicted step as one HTML page: timeline, load, memory, blocks, traffic, plan."""
        from fxpipe.show.report import write_report

        return write_report(self.whole, path, memory_limit_bytes=memory_limit_bytes)

    def __str__(self) -> str:
        others = list(self.shapes.programs)[1:] if self.shapes is not None else []
        lines = [str(self.capture), self.plan.summary(), f"traffic per step: {self.traffic().moved}"]
        return "\n".join(lines + [f"also for batches of {shapes}" for shapes in others])

    def _shown(self, name: str) -> str:
        """A parameter's name as the user knows it: without the step that wraps a bare backbone."""
        return name.removeprefix(self.costed.example.prefix)
