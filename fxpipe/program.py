"""A compiled program: what the user inspects, verifies and runs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from fxpipe.block_graph import BlockGraph, human_bytes
from fxpipe.capture import Capture
from fxpipe.cluster import Cluster
from fxpipe.costs import CostModel
from fxpipe.engine import Engine, LocalEngine
from fxpipe.errors import CompileError
from fxpipe.memory import ADAMW_BYTES
from fxpipe.observe import Observe
from fxpipe.prediction import Costing, peak_bytes, predict
from fxpipe.rank_program import Traffic
from fxpipe.schedule import Schedule
from fxpipe.staged import Staged
from fxpipe.step import FilledPlan, StepPlan
from fxpipe.timeline import Timeline
from fxpipe.tuning import Outcome
from fxpipe.verification import TOLERANCES, Verification, compare, reference_step


@dataclass(frozen=True)
class Plan:
    """Which rank runs which blocks, for which micro-batches, and what the compiler has to say about it."""

    staged: Staged
    blocks: BlockGraph
    microbatch_sizes: tuple[int, ...]
    block_seconds: tuple[float, ...]
    notes: tuple[str, ...]
    outcomes: tuple[Outcome, ...] = ()

    def __str__(self) -> str:
        sizes = self.microbatch_sizes
        lines = [
            f"plan: {sum(sizes)} samples in {len(sizes)} micro-batches of {', '.join(map(str, sorted(set(sizes))))}, "
            f"{self.staged.num_stages} stages on {self.staged.world_size} ranks ({self.staged.schedule})"
        ]
        total = sum(self.block_seconds) or 1.0
        for stage in range(self.staged.num_stages):
            blocks = self.staged.blocks(stage)
            share = sum(self.block_seconds[b] for b in blocks) / total
            names = [self.blocks.blocks[b].name for b in blocks]
            span = "(empty)" if not names else names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
            ranks = self.staged.stage_ranks[stage]
            where = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
            lines.append(f"  stage {stage:2} on {where}: {len(blocks):3} blocks, {share:5.1%}  {span}")
        for number, component in enumerate(self.blocks.components):
            where = "the rank of each micro-batch"
            if self.staged.frozen_ranks and len(ranks := self.staged.frozen_ranks[number]) < self.staged.world_size:
                where = (
                    f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}, where there is room for its weights"
                )
            lines.append(f"  frozen {component.name}: {len(component.nodes)} operations, on {where}")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        staged = self.staged
        return {
            "world_size": staged.world_size,
            "schedule": staged.schedule,
            "microbatch_sizes": list(self.microbatch_sizes),
            "boundaries": list(staged.boundaries),
            "stage_ranks": [list(ranks) for ranks in staged.stage_ranks],
            "recompute": sorted(staged.recompute),
            "frozen_ranks": [list(ranks) for ranks in staged.frozen_ranks],
            "collocated": staged.collocated,
            "blocks": [{"name": b.name, "operations": len(b.nodes)} for b in self.blocks.blocks],
            "components": [{"name": c.name, "operations": len(c.nodes)} for c in self.blocks.components],
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class StepResult:
    """One step of all ranks: the whole batch's loss, the gradient of every trainable parameter that has one."""

    loss: torch.Tensor
    gradients: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Program:
    """The result of `fxpipe.compile`; a batch is passed to its methods as to the model's own forward."""

    model: nn.Module
    capture: Capture
    plan: Plan
    step: StepPlan
    costing: Costing
    make_filled: Callable[[], FilledPlan] | None = None
    prefix: str = ""

    @property
    def schedule(self) -> Schedule:
        return self.step.schedule

    @cached_property
    def filled(self) -> FilledPlan | None:
        """The step with the next batch's frozen work in its idle time; None where nothing is frozen.

        Made when it is first asked for: by `engine.train`, `engine.step(batch, next_batch)` or here.
        """
        return None if self.make_filled is None else self.make_filled()

    @property
    def world_size(self) -> int:
        return len(self.step.programs)

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
        """Predict one step: time, bubbles, traffic and memory of every rank.

        Args:
            filled: the steady step, which does the next batch's frozen work in its idle time, where there is any.
            cost_model: seconds of compute; the one compiled for where left out.
            cluster: seconds of transfers, a `Cluster` or its text; the one compiled for where left out.
            optimizer_bytes: of optimizer state per trained parameter; AdamW's two float32 averages where left out.
        """
        network = Cluster.parse(cluster) if isinstance(cluster, str) else cluster or self.costing.cluster
        network.require(self.world_size)
        step, costing = self._priced(filled)
        costing = replace(costing, model=cost_model or costing.model, cluster=network)
        return predict(step, self.capture, costing, optimizer_bytes)

    @property
    def needed_bytes(self) -> int:
        """The most memory that any rank needs at once, in a step alone or with the next batch's frozen work."""
        return max(max(peak_bytes(step, self.capture, costing)) for step, costing in map(self._priced, (False, True)))

    def _priced(self, filled: bool) -> tuple[StepPlan, Costing]:
        """One of the two steps, where there are two, and what prices it."""
        if not filled or self.filled is None:
            return self.step, self.costing
        return self.filled.steady, replace(self.costing, calls={**self.costing.calls, **self.filled.calls})

    def run_local(self, *args: Any, **kwargs: Any) -> StepResult:
        """One step of all ranks in this process; `.grad` stays as it is.

        The keywords `seed` and `step` choose the random draws; both are 0 where left out, or where forward itself has
        arguments of these names.
        """
        seed, step = self._draws(kwargs)
        return self._run_local(args, kwargs, seed, step)

    def _run_local(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: int, step: int) -> StepResult:
        engine = LocalEngine(self.step, self.state, seed, self._shown)
        return StepResult(*engine.run(self.step.bind(args, kwargs), step))

    def _draws(self, kwargs: dict[str, Any]) -> tuple[int, int]:
        own = self.step.inputs.signature.parameters
        seed, step = (0 if name in own else kwargs.pop(name, 0) for name in ("seed", "step"))
        return seed, step

    def verify(self, *args: Any, **kwargs: Any) -> Verification:
        """One step of all ranks in this process against the uncompiled model, with the same random draws.

        `seed` and `step` as in `run_local`.
        """
        seed, step = self._draws(kwargs)
        result = self._run_local(args, kwargs, seed, step)
        loss, gradients, draws = reference_step(self.model, args, kwargs, seed, step, self.step.device)
        shown = {self._shown(name): g for name, g in gradients.items()}
        return compare(result.loss, result.gradients, (loss, shown, draws), len(self.capture.draws), self.tolerance)

    def local_engine(self, seed: int = 0, observe: Observe | None = None) -> LocalEngine:
        """All ranks as threads of this process, training the model's own parameters; `observe` sees every event."""
        return LocalEngine(self.step, self.state, seed, self._shown, observe, self._filling)

    def engine(self, device: str | torch.device | None = None, seed: int = 0, observe: Observe | None = None) -> Engine:
        """This process as one rank, under torchrun (gloo on the CPU, NCCL on CUDA); `observe` sees its events."""
        from fxpipe.transport.distributed import DistributedTransport

        transport = DistributedTransport.from_environment(device=device)
        if transport.world_size != self.world_size:
            transport.close()
            raise CompileError(f"compiled for {self.world_size} ranks, started with {transport.world_size} processes")
        return Engine(self.step, self.state, transport, seed, self._shown, observe, self._filling)

    @property
    def _filling(self) -> Callable[[], FilledPlan] | None:
        return None if self.make_filled is None else lambda: cast(FilledPlan, self.filled)

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """Parameters, buffers and lifted constants by the names the programs use."""
        named = {
            **dict(self.model.named_parameters(remove_duplicate=False)),
            **dict(self.model.named_buffers(remove_duplicate=False)),
        }
        meta = [name for name, tensor in named.items() if tensor.is_meta]
        if meta:
            raise CompileError(
                f"{len(meta)} tensors are on the meta device ({meta[0]}, ...): the program can be inspected, not run; "
                "materialise the model (to_empty and load a state dict) and compile again to run it"
            )
        self._require_unchanged(named)
        return named | {f"_constants.{name}": tensor for name, tensor in self.capture.constants.items()}

    def _require_unchanged(self, named: Mapping[str, torch.Tensor]) -> None:
        """The programs hold for the shapes, types and trained weights that were captured, and for no others."""
        expected = {name: like for p in self.step.programs for name, like in p.state.items() if name in named}
        for name, like in expected.items():
            now = named[name]
            trains = isinstance(now, nn.Parameter) and now.requires_grad
            was = (tuple(like.shape), like.dtype, name in self.capture.trainable)
            if (tuple(now.shape), now.dtype, trains) != was:
                raise CompileError(
                    f"{self._shown(name)} was {list(was[0])} {was[1]}, requires_grad={was[2]}, when compiled, "
                    f"and is now {list(now.shape)} {now.dtype}, requires_grad={trains}; compile again"
                )

    @cached_property
    def tolerance(self) -> float:
        """The relative error that rounding alone can cause, by the least precise type the step computes in."""
        local = self.plan.blocks.local
        types = {
            node.meta["val"].dtype
            for node in self.capture.graph.nodes
            if node.op == "call_function" and node.name not in local and isinstance(node.meta["val"], torch.Tensor)
        }
        return max(tolerance for dtype, tolerance in TOLERANCES.items() if dtype in types)

    def dump(self, directory: str | Path, filled: bool = False) -> Path:
        """Write plan, schedule, traffic, and per rank the program and its stage graphs as readable Python.

        With `filled` also the three forms of the step that does the next batch's frozen work in its idle time.
        """
        from fxpipe.dump import dump

        return dump(self, Path(directory), filled)

    def trace(self, path: str | Path, filled: bool = False) -> Path:
        """Write the predicted step as a Chrome trace, for Perfetto; `write_trace` does it for a recorded one.

        `filled` as in `simulate`.
        """
        from fxpipe.trace_format import write_trace

        return write_trace(self.simulate(filled=filled), path)

    def report(self, path: str | Path, memory_limit_bytes: int | None = None) -> Path:
        """Write the predicted step as one HTML page: timeline, load, memory, blocks, traffic, plan."""
        from fxpipe.report import write_report

        return write_report(self, path, memory_limit_bytes=memory_limit_bytes)

    def __str__(self) -> str:
        traffic = self.traffic()
        moved = ", ".join(f"{kind} {human_bytes(size)}" for kind, size in traffic.kinds.items() if size)
        return "\n".join([str(self.capture), str(self.plan), f"traffic per step: {moved or 'none'}"])

    def _shown(self, name: str) -> str:
        """A parameter's name as the user knows it: without the step that wraps a bare backbone."""
        return name.removeprefix(self.prefix)
