"""Engines run rank programs: all ranks as threads of this process, or this process as one rank under torchrun.

An engine reads the program and decides nothing. `step` does what `loss.backward()` does on one device: it adds to the
`.grad` of every trainable parameter and returns the loss; the optimizer is the user's.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn

from fxpipe.plan.step import FilledPlan, StepPlan
from fxpipe.plan.transport import Transport
from fxpipe.run.agreement import agree, agree_on_state, checksum, told
from fxpipe.run.observe import Observe
from fxpipe.run.read_ahead import ReadAhead, Tensors
from fxpipe.run.run_rank import Draws, NextBatch, RankResult, SharedDraws, run_rank
from fxpipe.run.training import Ahead, Executed, Training
from fxpipe.run.transport import run_ranks


class LocalEngine(Training):
    """All ranks in this process, on the model's own parameters."""

    sent_bytes: Mapping[tuple[int, int], int] = {}
    """Bytes of the last step's messages, by channel."""

    def run(self, tensors: Tensors, step: int) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Loss and gradients by name, leaving `.grad` alone; the draws are those of step `step`."""
        loss, gradients, _ = self._execute(self._plan, step, tensors)
        assert loss is not None
        return loss, gradients

    def _execute(
        self, plan: StepPlan, step: int, tensors: Tensors, ahead: Ahead | None = None, carried: Any = None
    ) -> Executed:
        modules = self._bound(plan)
        draws = SharedDraws(plan, self.seed, step, plan.device)
        nexts = None if ahead is None else NextBatch(SharedDraws(plan, self.seed, ahead[0], plan.device), ahead[1])

        def body(transport: Transport) -> tuple[RankResult, dict[tuple[int, int], int]]:
            rank = transport.rank
            mine = carried[rank] if carried else None
            program = plan.program(rank)
            result = run_rank(modules[rank], program, transport, draws, tensors, self._observe, nexts, mine)
            return result, transport.sent_bytes()

        results = run_ranks(plan.world_size, body)
        gradients: dict[str, torch.Tensor] = {}
        self.sent_bytes = {channel: size for _, sent in results for channel, size in sent.items()}
        for result, _ in results:
            for name, gradient in result.gradients.items():
                gradients.setdefault(self._shown(name), gradient)
        return results[0][0].loss, gradients, [result.carries for result, _ in results]

    def _bound(self, plan: StepPlan) -> list[fx.GraphModule]:
        if id(plan) not in self._modules:
            self._modules[id(plan)] = [p.bind({n: self._state[n] for n in p.state}) for p in plan.programs]
        modules: list[fx.GraphModule] = self._modules[id(plan)]
        return modules

    def _check(self, tensors: Tensors, nexts: Tensors | None, has_made: bool) -> None:
        pass

    def _prepare(self, forms: FilledPlan) -> None:
        pass


class Engine(Training):
    """This process as one rank. Every rank calls every method, with the same batches.

    `parameters()` are this rank's own; a parameter tied across ranks is on each of them, with the same gradient.
    Every step compares the batch's checksums over the ranks; set `check_batches` to False where that is too slow.
    """

    def __init__(
        self,
        plan: StepPlan,
        state: Mapping[str, torch.Tensor],
        transport: Transport,
        seed: int = 0,
        shown: Callable[[str], str] = str,
        observe: Observe | None = None,
        filled: Callable[[], FilledPlan] | None = None,
    ) -> None:
        self._held: dict[str, torch.Tensor] = {}
        super().__init__(plan, self._held, seed, shown, observe, filled)
        self._transport, self._given, self.check_batches = transport, state, True
        self.rank, self.device = transport.rank, plan.device
        self._take(plan)
        agree(self._transport, {"plan": plan.fingerprint})
        agree_on_state(self._transport, self._state)
        transport.open_channels(plan.channels, plan.groups)

    def step(self, batch: Any, next_batch: Any = None) -> torch.Tensor:
        """One training step on the whole batch, the same on every rank: returns the loss, adds to `.grad`.

        `next_batch` as in `Training.step`.
        """
        with told(self._transport):
            return super().step(batch, next_batch)

    def _step(self, tensors: Tensors, nexts: Tensors | None) -> torch.Tensor:
        with told(self._transport):
            return super()._step(tensors, nexts)

    def _read(self, reader: ReadAhead) -> tuple[Tensors, Tensors | None] | None:
        with told(self._transport):
            return super()._read(reader)

    def _bind(self, batch: Any) -> Tensors:
        return {name: tensor.to(self.device) for name, tensor in super()._bind(batch).items()}

    def _check(self, tensors: Tensors, nexts: Tensors | None, has_made: bool) -> None:
        if self.check_batches:
            both = [None if part is None else {n: checksum(t) for n, t in part.items()} for part in (tensors, nexts)]
            parts = {"seed or step index": (self.seed, self.step_index), "batch": both[0], "next batch": both[1]}
            agree(self._transport, parts | {"state of frozen work": has_made})

    def _prepare(self, forms: FilledPlan) -> None:
        agree(self._transport, {"plan of frozen work": [form.fingerprint for form in forms]})
        for form in forms:
            self._take(form)
        agree_on_state(self._transport, self._state)
        channels = {channel for form in forms for channel in form.channels}
        groups = {group for form in forms for group in form.groups}
        self._transport.open_channels(sorted(channels - {*self._plan.channels}), sorted(groups - {*self._plan.groups}))

    def _execute(
        self, plan: StepPlan, step: int, tensors: Tensors, ahead: Ahead | None = None, carried: Any = None
    ) -> Executed:
        draws = Draws(plan, self.seed, step, self.device)
        nexts = None if ahead is None else NextBatch(Draws(plan, self.seed, ahead[0], self.device), ahead[1])
        result = run_rank(
            self._modules[id(plan)], plan.program(self.rank), self._transport, draws, tensors,
            self._observe, nexts, carried,
        )  # fmt: skip
        return result.loss, {self._shown(name): g for name, g in result.gradients.items()}, result.carries

    def _take(self, plan: StepPlan) -> None:
        """Hold the state of one more program of this rank."""
        program = plan.program(self.rank)
        for name in program.state:
            if name not in self._held:
                self._held[name] = _own(self._given[name], plan.device)
        self._modules[id(plan)] = program.bind({name: self._state[name] for name in program.state})
        if plan.without is not None:
            self._take(plan.without)

    def sent_bytes(self) -> dict[tuple[int, int], int]:
        """Bytes this rank has sent on each channel since the engine was made."""
        return self._transport.sent_bytes()

    def gather_state_dict(self, dst: int = 0) -> dict[str, torch.Tensor] | None:
        """Collective: parameters and buffers of all ranks by name, on the CPU of rank `dst`; None elsewhere."""
        mine = {self._shown(n): t.detach().cpu() for n, t in self._state.items() if not n.startswith("_constants.")}
        parts = self._transport.gather_object(mine, dst)
        return None if parts is None else {name: t for part in reversed(parts) for name, t in part.items()}

    def close(self) -> None:
        """Leave the network; every rank calls it when it is done."""
        self._transport.close()


def _own(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    copy = tensor.detach().clone().to(device)
    return nn.Parameter(copy, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy
