"""Engines run rank programs: this process as one rank under torchrun, or (`local_engine`) all ranks as its threads.

An engine reads the program and decides nothing. `step` does what `loss.backward()` does on one device: it adds to the
`.grad` of every trainable parameter and returns the loss; the optimizer is the user's.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from fxpipe.plan.outputs import WHOLE, Parts
from fxpipe.plan.step import FilledPlan, StepPlan
from fxpipe.plan.transport import Channel, Transport
from fxpipe.run.agreement import agree, agree_on_state, checksum, everyones, told
from fxpipe.run.kinds import Bound, Kind, Kinds
from fxpipe.run.observe import Observe
from fxpipe.run.ownership import owners
from fxpipe.run.read_ahead import ReadAhead, ReadBatch, Tensors
from fxpipe.run.run_rank import Draws, NextBatch, run_rank
from fxpipe.run.shared_model import SharedModel
from fxpipe.run.training import Ahead, Executed, Training


class Engine(Training):
    """This process as one rank, which trains its part of the model's own parameters, in place.

    Every rank calls every method, with the same batches. A parameter tied across ranks is trained on each of them, with
    the same gradient; what other ranks train has no gradient here, see `sync_model`. Every step compares the batch's
    checksums over the ranks; set `check_batches` to False where that is too slow.
    """

    def __init__(
        self,
        plan: StepPlan,
        model: nn.Module,
        state: Mapping[str, torch.Tensor],
        transport: Transport,
        seed: int = 0,
        shown: Callable[[str], str] = str,
        observe: Observe | None = None,
        filled: Callable[[], FilledPlan] | None = None,
        kinds: Kinds | None = None,
        opened: tuple[set[Channel], set[tuple[int, ...]]] | None = None,
    ) -> None:
        self._held: dict[str, torch.Tensor] = {}
        self._opened = opened or (set(), set())  # channels and groups, by all engines on the transport
        super().__init__(plan, model, self._held, seed, shown, observe, filled, kinds)
        self._transport, self._given, self.rank = transport, state, transport.rank
        self._sums: tuple[ReadBatch, Mapping[str, Any]] | None = None
        with told(transport):
            agree(transport, {"plan": plan.fingerprint}, "engine")
            self._take(plan)
            given = [shown(name) for name in plan.program(self.rank).gradients]
            self._shared = SharedModel(model, transport, self._trainable(), given)
            agree_on_state(transport, self._state)
            self._open(plan.channels, plan.groups)

    def _open(self, channels: Iterable[Channel], groups: Iterable[tuple[int, ...]]) -> None:
        """Those that no engine on this transport has opened."""
        self._transport.open_channels(sorted({*channels} - self._opened[0]), sorted({*groups} - self._opened[1]))
        self._opened[0].update(channels)
        self._opened[1].update(groups)

    def _another(self, kind: Kind) -> "Engine":
        given = self._model, kind.state, self._transport, self.seed, self._shown, self._observe, kind.filled
        return Engine(kind.plan, *given, None, self._opened)

    def step(self, batch: Any, next_batch: Any = None) -> torch.Tensor:
        """One training step on the whole batch, the same on every rank: returns the loss, adds to `.grad`.

        `next_batch` as in `Training.step`.
        """
        self._require_open("step")
        with told(self._transport):
            return super().step(batch, next_batch)

    def _step(self, tensors: Tensors, nexts: Tensors | None) -> torch.Tensor:
        with told(self._transport):
            if self._shared.borrows:
                self._agree("step", {})
                self._shared.borrow()
            return super()._step(tensors, nexts)

    def _read(self, reader: ReadAhead) -> tuple[Bound, Bound | None] | None:
        with told(self._transport):
            return super()._read(reader)

    def _bind(self, batch: Any) -> Bound:
        bound = super()._bind(batch)
        return Bound({name: tensor.to(self.device) for name, tensor in bound.items()}, bound.engine)

    def _check(self, tensors: Tensors, nexts: Tensors | None, has_made: bool) -> None:
        if self.check_batches:
            parts: dict[str, Any] = {"shape of the batch": self._kind}
            parts["seed or step index"] = self.seed, self.step_index
            parts |= {f"batch (its {name})": found for name, found in self._checksums(tensors).items()}
            parts["number of batches"] = 1 if nexts is None else 2
            if nexts is not None:
                parts |= {f"next batch (its {name})": found for name, found in self._checksums(nexts).items()}
            self._agree("step", parts | {"state of frozen work": has_made})

    def _checksums(self, tensors: Tensors) -> Mapping[str, Any]:
        """Of a batch's tensors by input; one that was read ahead is not summed up again."""
        if self._sums is None or self._sums[0].tensors is not tensors or not self._sums[0].intact:
            names = self._plan.input_names
            self._sums = ReadBatch.of(tensors), {names[name]: checksum(tensor) for name, tensor in tensors.items()}
        return self._sums[1]

    def _agree(self, call: str, parts: Mapping[str, Any]) -> None:
        self._transport.set_action(call)
        agree(self._transport, parts, call)

    def _trained_here(self) -> Mapping[str, nn.Parameter]:
        return self._shared.trained_here

    def _norm(self, norm_type: float, max_norm: float) -> torch.Tensor:
        with told(self._transport):
            self._agree("clip_grad_norm_", {"norm_type": norm_type, "max_norm": max_norm})
            norms = self._shared.norms(norm_type)
        return torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.tensor(0.0)

    def _bring(self, dst: int | None, *asked: object) -> None:
        with told(self._transport):
            self._agree("sync_model" if dst is None else "gather_state_dict", {"dst or trainable_only": (dst, asked)})
            self._shared.bring(range(self._plan.world_size) if dst is None else [dst])

    def _gathered(self, parts: Parts, dst: int) -> Parts:
        with told(self._transport):
            self._agree("gather_outputs", {"dst": dst})
            mine = {key: part for key, part in parts.items() if key[1] != WHOLE}
            found = everyones(self._transport, {key: (tuple(part.shape), part.dtype) for key, part in mine.items()})
            place = self.device if self.rank == dst else torch.device("meta")
            wanted = {key: (src, *of) for src, of_rank in enumerate(found) for key, of in of_rank.items() if src != dst}
            values = {key: torch.empty(shape, dtype=dtype, device=place) for key, (_, shape, dtype) in wanted.items()}
            values |= mine
            self._transport.copy_values([(values[key], src, dst) for key, (src, *_) in wanted.items()], "outputs")
        return {**values, **parts}

    def _is_at(self, rank: int) -> bool:
        return self.rank == rank

    @property
    def _num_writers(self) -> int:
        return self._plan.world_size

    def _owners(self, parameter: nn.Parameter) -> tuple[int, ...]:
        return owners(parameter)

    def _everyones(self, mine: Any) -> list[Any]:
        with told(self._transport):
            return everyones(self._transport, mine)

    def _alike(self, call: str, parts: Mapping[str, Any]) -> None:
        with told(self._transport):
            self._agree(call, parts)

    def _add_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        super()._add_gradients(self._shared.give(gradients))

    def _prepare(self, forms: FilledPlan) -> None:
        agree(self._transport, {"plan of frozen work": [form.fingerprint for form in forms]}, "step")
        for form in forms:
            self._take(form)
        self._shared.hold(self._trainable())
        agree_on_state(self._transport, self._state)
        channels = {channel for form in forms for channel in form.channels}
        groups = {group for form in forms for group in form.groups}
        self._open(channels, groups)

    def _execute(
        self, plan: StepPlan, step: int, tensors: Tensors, ahead: Ahead | None = None, carried: Any = None
    ) -> Executed:
        draws = Draws(plan, self.seed, step, self.device)
        nexts = None if ahead is None else NextBatch(Draws(plan, self.seed, ahead[0], self.device), ahead[1])
        result = run_rank(
            self._modules[id(plan)], plan.program(self.rank), self._transport, draws, tensors,
            self._observe, nexts, carried,
        )  # fmt: skip
        self._parts = result.outputs
        return result.loss, {self._shown(name): g for name, g in result.gradients.items()}, result.carries

    def _take(self, plan: StepPlan) -> None:
        """Hold the state of one more program of this rank."""
        program = plan.program(self.rank)
        for name in program.state:
            if name not in self._held:
                self._held[name] = _at(plan.device, self._given[name])
        self._modules[id(plan)] = program.bind({name: self._state[name] for name in program.state})
        if plan.without is not None:
            self._take(plan.without)

    def sent_bytes(self) -> dict[tuple[int, int], int]:
        """Bytes this rank has sent on each channel since the engine was made."""
        return self._transport.sent_bytes()

    def _trainable(self) -> list[str]:
        """What this rank holds of the parameters that require gradients."""
        return [self._shown(n) for n, t in self._held.items() if isinstance(t, nn.Parameter) and t.requires_grad]

    def close(self) -> None:
        """As in `Training.close`. What other ranks train is not in this rank's model unless `sync_model` brought it."""
        try:
            super().close()
        finally:
            self._transport.close()


def _at(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, moved in place where it is elsewhere, as `model.to(device)` moves it: optimizers keep it."""
    if tensor.device != device:
        tensor.data = tensor.data.to(device)
    return tensor
