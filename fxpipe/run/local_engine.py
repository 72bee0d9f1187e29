"""All ranks as threads of this process."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from fxpipe.capture.weights import tensors_of
from fxpipe.plan.step import StepPlan
from fxpipe.plan.transport import Transport
from fxpipe.run.compiled import runnable
from fxpipe.run.kinds import BatchKind
from fxpipe.run.local_batch import placed
from fxpipe.run.ownership import at, require_new
from fxpipe.run.read_ahead import Inputs, ReadBatch, Tensors
from fxpipe.run.run_rank import NextBatch, RankResult, SharedDraws, run_rank
from fxpipe.run.training import Ahead, Executed, Training
from fxpipe.run.transport import run_ranks


class LocalEngine(Training):
    """All ranks in this process, on the model's own parameters, which are moved to the program's device."""

    sent_bytes: Mapping[tuple[int, int], int] = {}
    """Bytes of the last step's messages, by channel."""
    _bytes_here = 0

    def __init__(self, own: BatchKind, model: nn.Module, *others: Any) -> None:
        device = own.plan.device
        for tensor in tensors_of(model).values():
            at(device, tensor)
        super().__init__(replace(own, state=placed(own.state, device)), model, *others)

    @property
    def bytes_sent(self) -> int:
        return self._bytes_here + sum(engine.bytes_sent for engine in self._others.values())

    def _another(self, kind: BatchKind) -> "LocalEngine":
        return LocalEngine(kind, self._model, self.seed, self._shown, self._observe)

    def _by_kind(self, batch: ReadBatch, following: ReadBatch | None) -> torch.Tensor:
        loss = super()._by_kind(batch, following)
        if batch.kind in self._others:
            self.sent_bytes = cast(LocalEngine, self._others[batch.kind]).sent_bytes
        return loss

    def run(self, tensors: Tensors, step: int) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Loss and gradients by name, leaving `.grad` alone; the draws are those of step `step`."""
        self._write_state(self._plan, is_first=True)
        loss, gradients, _ = self._execute(self._plan, step, tensors)
        self._write_state(self._plan, is_first=False)
        assert loss is not None
        return loss, gradients

    def _execute(
        self, plan: StepPlan, step: int, tensors: Inputs, ahead: Ahead | None = None, carried: Any = None
    ) -> Executed:
        require_new(self._model)
        modules = self._bound(plan)
        draws = SharedDraws(plan, self.seed, step, plan.device)
        nexts = None if ahead is None else NextBatch(SharedDraws(plan, self.seed, ahead[0], plan.device), ahead[1])

        def body(transport: Transport) -> tuple[RankResult, dict[tuple[int, int], int]]:
            rank = transport.rank
            mine, scale = carried[rank] if carried else None, self._loss_scale
            program = plan.program(rank)
            result = run_rank(modules[rank], program, transport, draws, tensors, self._observe, nexts, mine, scale)
            return result, transport.sent_bytes()

        results = run_ranks(plan.world_size, body)
        self._bytes_here += sum(size for _, sent in results for size in sent.values())
        gradients: dict[str, torch.Tensor] = {}
        self.sent_bytes = {channel: size for _, sent in results for channel, size in sent.items()}
        for result, _ in results:
            for name, gradient in result.gradients.items():
                gradients.setdefault(self._shown(name), gradient)
        self._parts = {key: part for result, _ in results for key, part in result.outputs.items()}
        return results[0][0].loss, gradients, [result.carries for result, _ in results]

    def _bound(self, plan: StepPlan) -> list[nn.Module]:
        if id(plan) not in self._modules:
            threads = plan.world_size > 1 and plan.backend == "cudagraphs"  # which are a thread's own
            backend = "eager" if threads else plan.backend
            states = ({name: self._state[name] for name in p.state} for p in plan.programs)
            self._modules[id(plan)] = [runnable(p, s, backend) for p, s in zip(plan.programs, states, strict=True)]
        modules: list[nn.Module] = self._modules[id(plan)]
        return modules

    def _trained_here(self) -> Mapping[str, nn.Parameter]:
        used = {self._shown(name) for program in self._plan.programs for name in program.state}
        return {name: p for name, p in self._parameters.items() if name in used and p.requires_grad}
