"""Engines run rank programs: all ranks as threads of this process, or this process as one rank under torchrun.

An engine reads the program and decides nothing. `step` does what `loss.backward()` does on one device: it adds to the
`.grad` of every trainable parameter and returns the loss; the optimizer is the user's.
"""

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn

from fxpipe.capture.inputs import Batch, call_of
from fxpipe.errors import RunError
from fxpipe.observe import Observe, Observed
from fxpipe.rank_program import RankProgram
from fxpipe.step import StepPlan
from fxpipe.transport import Transport, run_ranks


def run_rank(
    module: fx.GraphModule,
    program: RankProgram,
    transport: Transport,
    random: Callable[[int], torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    observe: Observe | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """One step of one rank: the loss of the whole batch and this rank's gradients by parameter name."""
    if observe is not None:
        transport = Observed(transport, observe)
    with torch.no_grad():
        loss, gradients = module(transport, random, *(tensors[name] for name in program.inputs))
    transport.flush()
    return loss, dict(zip(program.gradients, gradients, strict=True))


class Draws:
    """The random draws of one step, each made once and shared by all ranks of the process that ask."""

    def __init__(self, plan: StepPlan, seed: int, step: int, device: torch.device) -> None:
        self._plan, self._seed, self._step, self._device = plan, seed, step, device
        self._made: dict[int, torch.Tensor] = {}
        self._lock = threading.Lock()

    def __call__(self, index: int) -> torch.Tensor:
        with self._lock:
            if index not in self._made:
                draw = self._plan.draws[index]
                self._made[index] = draw.sample(self._plan.batch_size, self._seed, self._step, self._device)
            return self._made[index]


class _Parameters:
    """What every engine offers an optimizer: trainable parameters under their original names."""

    parameters_by_name: Mapping[str, nn.Parameter]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.parameters_by_name.items()

    def parameters(self) -> Iterator[nn.Parameter]:
        """For an optimizer: never empty, since optimizers refuse that; a rank without any gives one of size zero."""
        yield from self.parameters_by_name.values() or [nn.Parameter(torch.empty(0))]

    def _add_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        for name, gradient in gradients.items():
            parameter = self.parameters_by_name[name]
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


class LocalEngine(_Parameters):
    """All ranks in this process, on the model's own parameters."""

    def __init__(
        self,
        plan: StepPlan,
        state: Mapping[str, torch.Tensor],
        seed: int = 0,
        shown: Callable[[str], str] = str,
        observe: Observe | None = None,
    ) -> None:
        self._plan, self.seed, self.step_index, self._shown, self._observe = plan, seed, 0, shown, observe
        self._modules = [program.bind({n: state[n] for n in program.state}) for program in plan.programs]
        held = {name for program in plan.programs for name in program.state}
        self.parameters_by_name = _trainable({name: state[name] for name in state if name in held}, shown)
        self.sent_bytes: dict[tuple[int, int], int] = {}

    def step(self, batch: Batch) -> torch.Tensor:
        """One training step: returns the loss, a scalar, and adds the gradients to `.grad`."""
        loss, gradients = self.run(self._plan.bind(*call_of(batch)), self.step_index)
        self.step_index += 1
        self._add_gradients(gradients)
        return loss

    def run(self, tensors: Mapping[str, torch.Tensor], step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Loss and gradients by name, leaving `.grad` alone; the draws are those of step `step`."""
        draws = Draws(self._plan, self.seed, step, self._plan.device)

        def body(transport: Transport) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[tuple[int, int], int]]:
            program = self._plan.programs[transport.rank]
            result = run_rank(self._modules[transport.rank], program, transport, draws, tensors, self._observe)
            return *result, transport.sent_bytes()

        results = run_ranks(len(self._plan.programs), body)
        gradients: dict[str, torch.Tensor] = {}
        self.sent_bytes = {}
        for _, of_rank, sent in results:
            self.sent_bytes.update(sent)
            for name, gradient in of_rank.items():
                gradients.setdefault(self._shown(name), gradient)
        return results[0][0], gradients


class Engine(_Parameters):
    """This process as one rank. Every rank calls every method, with the same batch.

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
    ) -> None:
        self._observe, self.check_batches = observe, True
        self._plan, self._transport, self.seed, self.step_index, self._shown = plan, transport, seed, 0, shown
        self.rank, self.device = transport.rank, plan.device
        self._program = plan.programs[self.rank]
        self._state = {name: _own(state[name], plan.device) for name in self._program.state}
        self._module = self._program.bind(self._state)
        self.parameters_by_name = _trainable(self._state, shown)
        self._agree("plan", plan.fingerprint)
        self._check_shared_state()
        transport.open_channels(plan.channels, plan.groups)

    def step(self, batch: Batch) -> torch.Tensor:
        """One training step on the whole batch, the same on every rank: returns the loss, adds to `.grad`."""
        try:
            tensors = {n: t.to(self.device) for n, t in self._plan.bind(*call_of(batch)).items()}
            if self.check_batches:
                self._agree("batch", {name: _checksum(t) for name, t in tensors.items()})
            draws = Draws(self._plan, self.seed, self.step_index, self.device)
            loss, gradients = run_rank(self._module, self._program, self._transport, draws, tensors, self._observe)
        except BaseException as error:
            self._transport.abort(error)
            raise
        self.step_index += 1
        self._add_gradients({self._shown(name): gradient for name, gradient in gradients.items()})
        return loss

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

    def _agree(self, what: str, value: Any) -> None:
        values = self._transport.broadcast_object(self._transport.gather_object(value))
        assert values is not None
        different = [rank for rank, other in enumerate(values) if other != values[0]]
        if different:
            raise RunError(f"ranks {different} have another {what} than rank 0; give every rank the same one")

    def _check_shared_state(self) -> None:
        """State that several ranks hold (frozen modules, tied parameters) must be the same on all of them."""
        sums = {name: _checksum(tensor) for name, tensor in self._state.items()}
        values = self._transport.broadcast_object(self._transport.gather_object(sums))
        assert values is not None
        first: dict[str, tuple[int, Any]] = {}
        for rank, of_rank in enumerate(values):
            for name, checksum in of_rank.items():
                other, expected = first.setdefault(name, (rank, checksum))
                if expected != checksum:
                    raise RunError(
                        f"{name} differs between ranks {other} and {rank}; seed every process alike "
                        "before building the model, or load the same checkpoint on all"
                    )


def _trainable(state: Mapping[str, torch.Tensor], shown: Callable[[str], str]) -> dict[str, nn.Parameter]:
    return {shown(n): p for n, p in state.items() if isinstance(p, nn.Parameter) and p.requires_grad}


def _own(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    copy = tensor.detach().clone().to(device)
    return nn.Parameter(copy, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy


def _checksum(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()
