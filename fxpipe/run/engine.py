"""Engines run rank programs: this process as one rank under torchrun, or (`local_engine`) all ranks as its threads.

An engine reads the program and decides nothing. `step` does what `loss.backward()` does on one device: it adds to the
`.grad` of every trainable parameter and returns the loss; the optimizer is the user's.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from fxpipe.capture.fingerprint import draw_fingerprint
from fxpipe.errors import RunError
from fxpipe.plan.outputs import WHOLE, Parts
from fxpipe.plan.reads import batched_inputs, samples_read
from fxpipe.plan.staged import equal_pipelines
from fxpipe.plan.state_update import StateUpdate
from fxpipe.plan.step import StepPlan
from fxpipe.plan.transport import Channel, Transport
from fxpipe.run.accumulation import Accumulation
from fxpipe.run.agreement import agree, agree_on_state, checksum, everyones, sampled, told
from fxpipe.run.compiled import runnable
from fxpipe.run.kinds import BatchKind, Kinds
from fxpipe.run.marks import Marks, marks_of
from fxpipe.run.observe import Observe
from fxpipe.run.optimizer_steps import OptimizerSteps
from fxpipe.run.ownership import at, empty, is_empty, is_outdated, owners
from fxpipe.run.read_ahead import Inputs, ReadAhead, ReadBatch
from fxpipe.run.run_rank import Draws, NextBatch, run_rank
from fxpipe.run.scaler import GradScaler
from fxpipe.run.shared_model import SharedModel
from fxpipe.run.shared_samples import agree_on_samples
from fxpipe.run.state_updates import routes
from fxpipe.run.training import Ahead, Executed, Training
from fxpipe.run.weights import Readers, read_own

_WROTE_TRAINED, _NOTHING_MADE, _WROTE_FROZEN, _STEPPED, _LEFT_OUT = 1, 2, 4, 8, 16  # what one rank does to all
_WRITTEN = "call engine.sync_model() before frozen weights are computed of trained ones, and write the same on all"


class _NumBatches(int):
    """That a rank has read, and why no more: which ranks need not have alike."""

    why = ""

    def __str__(self) -> str:
        return f"{int(self)}{self.why}"


_Made = tuple[int, tuple[int, ...], torch.dtype]  # the first rank that has a part, its shape and type


class Engine(Training):
    """This process as one rank, which trains its part of the model's own parameters, in place.

    Every rank calls every method, with the same batches, or its samples of each. A parameter tied across ranks is
    trained on each of them, with the same gradient; what other ranks train has no gradient here, see `sync_model`.
    Every step compares the batch's checksums over the ranks; set `check_batches` to False where that is too slow.
    """

    def __init__(
        self,
        own: BatchKind,
        model: nn.Module,
        transport: Transport,
        seed: int = 0,
        shown: Callable[[str], str] = str,
        observe: Observe | None = None,
        kinds: Kinds | None = None,
        *,
        opened: tuple[set[Channel], set[tuple[int, ...]]] | None = None,
        weights: Readers | None = None,
    ) -> None:
        plan, state = own.plan, own.state
        self._held: dict[str, torch.Tensor] = {}
        self._opened = opened or (set(), set())  # channels and groups, by all engines on the transport
        super().__init__(replace(own, state=self._held), model, seed, shown, observe, kinds)
        self._transport, self._given, self.rank = transport, state, transport.rank
        self._accumulation, self._as_left = Accumulation(), False
        self._optimizer_steps = OptimizerSteps(model, self.rank)
        self._makers: dict[int, dict[tuple[str, int], _Made]] = {}  # of what a form of the step writes into the model
        self._brought: StepPlan | None = None  # the one whose replicas have been told each other's values
        self._num_writers = plan.world_size
        self._sums: tuple[ReadBatch, Mapping[str, Any]] | None = None
        self._own_samples: tuple[int, ...] | None = None
        self._all_reads: list[tuple[int, ...]] | None = None
        with told(transport):
            drawn = [(index, draw_fingerprint(draw)) for index, draw in plan.draws.items()]
            made = {"plan": plan.fingerprint, "random operation, as a dropout of another p,": drawn}
            agree(transport, made, "engine")
            here = {n: t for n, t in state.items() if not (t.is_meta or is_empty(t) or is_outdated(t) or owners(t))}
            agree_on_state(transport, {name: sampled(tensor) for name, tensor in here.items()})
            self._take(plan)
            self._shared = self._shared_by(plan)
            self._shared_smaller: dict[int, SharedModel] = {}  # by the number of samples
            if weights is not None:
                self._shared.release()
                read_own(model, weights, lambda parameter: self.rank in owners(parameter))
            self._agree_on_state()
            self._let_go((plan,))
            self._open(plan.channels, plan.groups)

    def _agree_on_state(self) -> None:
        agree_on_state(self._transport, {name: t for name, t in self._state.items() if not is_outdated(t)})
        self._frozen_marks = marks_of(self._frozen().values())

    def _frozen(self) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in self._state.items() if not _is_trained(tensor)}

    def _agree_on_written(self, now: Marks) -> None:
        """What a rank has written, of what it reads, must be alike wherever it is: a rank that writes the same without
        reading it may know better what it was computed of."""
        names = [*self._frozen()]
        written = {names[number] for number in now.differing(self._frozen_marks)}
        everywhere = {name: self._given[name] for name in sorted(written.union(*everyones(self._transport, written)))}
        here = {n: t for n, t in everywhere.items() if t.device.type == self.device.type and not is_empty(t)}
        agree_on_state(self._transport, here, _WRITTEN)

    def _open(self, channels: Mapping[Channel, int], groups: Iterable[tuple[int, ...]]) -> None:
        """Those that no engine on this transport has opened."""
        new = {channel: size for channel, size in channels.items() if channel not in self._opened[0]}
        self._transport.open_channels(new, sorted({*groups} - self._opened[1]))
        self._opened[0].update(channels)
        self._opened[1].update(groups)

    def _another(self, kind: BatchKind) -> "Engine":
        given = self._model, self._transport, self.seed, self._shown, self._observe
        other = Engine(kind, *given, opened=self._opened)
        other._optimizer_steps = self._optimizer_steps
        return other

    def step(self, batch: Any, next_batch: Any = None, scaler: GradScaler | None = None) -> torch.Tensor:
        """One training step on a batch, whole or in parts, on every rank: returns the loss, adds to `.grad`.

        `batch`, `next_batch` and `scaler` as in `Training.step`.
        """
        self._require_open("step")
        with told(self._transport):
            self._transport.set_action("step")
            return super().step(batch, next_batch, scaler)

    def _step(self, batch: ReadBatch, following: ReadBatch | None) -> torch.Tensor:
        with told(self._transport):
            return super()._step(batch, following)

    def _bring_values(self, plan: StepPlan) -> None:
        shared = self._shared_of(plan)
        shared.let_go()
        if shared.borrows:
            if not self.check_batches:
                self._agree("step", {})
            shared.borrow()

    def _read(self, reader: ReadAhead) -> tuple[ReadBatch, ReadBatch | None] | None:
        with told(self._transport):
            return super()._read(reader)

    def _reads(self) -> Sequence[int]:
        if self._own_samples is None:
            forms = (self._plan,) if self._make_filled is None else (self._plan, *self._make_filled())
            self._own_samples = samples_read(forms, self.rank)
        return self._own_samples

    def _check(self, batch: ReadBatch, following: ReadBatch | None, has_made: bool) -> bool:
        """Work for this batch counts where all ranks have it; what they hold alike must still be so once written."""
        self._as_left = False
        frozen = marks_of(self._frozen().values())
        mine = _NOTHING_MADE * (not has_made) + _WROTE_FROZEN * (frozen != self._frozen_marks)
        if not self.check_batches:
            return not self._agree("step", {}, mine) & _NOTHING_MADE if self._make_filled is not None else has_made
        scale = None if self._loss_scale is None else float(self._loss_scale)
        parts: dict[str, Any] = {"shape of the batch": self._kind}
        parts |= {"seed or step index": (self.seed, self.step_index), "scale of losses": scale}
        parts |= self._told_of("batch", batch)
        parts["number of batches"] = self._num_batches(following)
        if following is not None:
            parts |= self._told_of("next batch", following)
        mine += _WROTE_TRAINED * (not self._accumulation.goes_on(self._trained()))
        stepped, options = self._optimizer_steps.taken()
        mine += 0 if stepped is None else _STEPPED if stepped else _LEFT_OUT
        found = self._agree("step", parts, mine, options)
        if found & _STEPPED and found & _LEFT_OUT:
            self._refuse_some_steps(stepped)
        self._as_left = not found & _WROTE_TRAINED
        if found & _WROTE_FROZEN:
            self._agree_on_written(frozen)
            self._frozen_marks = frozen
        if batch.part is not None:
            self._agree_on_samples(batch)
        return not found & _NOTHING_MADE

    def _refuse_some_steps(self, stepped: bool | None) -> None:
        found = everyones(self._transport, stepped)
        with_step, without = ([rank for rank, one in enumerate(found) if one is which] for which in (True, False))
        raise RunError(
            f"ranks {with_step} have stepped an optimizer since the step before, and ranks {without} have not; step it "
            "on every rank or on none, whatever its own gradients are"
        )

    def _num_batches(self, following: ReadBatch | None) -> "_NumBatches":
        if following is not None:
            return _NumBatches(2)
        found = _NumBatches(1)
        found.why = "" if self._loader_failure is None else f": its loader raised {self._loader_failure!r}"
        return found

    def _told_of(self, what: str, batch: ReadBatch) -> dict[str, Any]:
        """What all ranks must have alike of a batch."""
        if batch.part is not None:
            told = {f"{what} (place of a LocalBatch)": repr(batch.part.place)}
            return told | {f"{what} (whole, or samples)": batch.size}
        part = "; a rank's own samples come from engine.dataloader"
        sums = {f"{what} (its {name}{part})": found for name, found in self._checksums(batch).items()}
        return {f"{what} (whole, or samples)": "whole", **sums}

    def _checksums(self, batch: ReadBatch) -> Mapping[str, Any]:
        """Of a batch's tensors by input; one that was read ahead is not summed up again."""
        if self._sums is None or self._sums[0] is not batch or not batch.intact:
            names = self._plan.input_names
            self._sums = batch, {names[name]: checksum(tensor) for name, tensor in batch.tensors.items()}
        return self._sums[1]

    def _agree_on_samples(self, batch: ReadBatch) -> None:
        if self._all_reads is None:
            self._all_reads = everyones(self._transport, tuple(self._reads()))
        reads = [[sample for sample in of_rank if sample < batch.size] for of_rank in self._all_reads]
        names, batched = self._plan.input_names, batched_inputs(self._plan)
        agree_on_samples(self._transport, reads, batch.tensors, names, batched)

    def _agree(self, call: str, parts: Mapping[str, Any], mine: int = 0, some: Mapping[str, Any] | None = None) -> int:
        self._transport.set_action(call)
        return agree(self._transport, parts, call, mine, some)

    def _trained_here(self) -> Mapping[str, nn.Parameter]:
        return self._shared.trained_here

    def _norm(self, norm_type: float, max_norm: float, names: Collection[str] | None) -> torch.Tensor:
        with told(self._transport):
            asked = {"norm_type": norm_type, "max_norm": max_norm, "parameters": names}
            self._agree("clip_grad_norm_", asked)
            norms = self._shared.norms(norm_type, names)
        return torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.tensor(0.0)

    def _bring(self, call: str, ranks: Sequence[int], *asked: object) -> None:
        with told(self._transport):
            self._agree(call, {"trainable_only": asked})
            self._shared.bring(ranks)

    def _bring_averages(self, averages: Mapping[str, Sequence[torch.Tensor]]) -> None:
        with told(self._transport):
            self._agree("sync_model", {"average": [(name, len(tensors)) for name, tensors in averages.items()]})
            self._shared.bring_averages(averages)

    def _released(self) -> int:
        with told(self._transport):
            self._agree("release", {})
            return self._shared.release()

    def _gathered(self, parts: Parts) -> Parts:
        with told(self._transport):
            self._agree("gather_outputs", {})
            mine = {key: part for key, part in parts.items() if key[1] != WHOLE}
            place = self.device if self._is_first() else torch.device("meta")
            wanted = {key: made for key, made in self._owned(mine).items() if made[0]}
            values = {key: torch.empty(shape, dtype=dtype, device=place) for key, (_, shape, dtype) in wanted.items()}
            values |= mine
            self._transport.copy_values([(values[key], src, 0) for key, (src, *_) in wanted.items()], "outputs")
        return {**values, **parts}

    def _everywhere(self, parts: Parts) -> Parts:
        """Which ranks have which is asked once for every form of the step."""
        mine, form = {key: part for key, part in parts.items() if key[1] != WHOLE}, id(self._brought)
        if form not in self._makers:
            self._makers[form] = self._owned(mine)
        makers = self._makers[form]
        others = {key: made for key, made in makers.items() if key not in mine}
        values = mine | {key: torch.empty(s, dtype=t, device=self.device) for key, (_, s, t) in others.items()}
        ranks = range(self._plan.world_size)
        copies = [(values[key], src, dst) for key, (src, *_) in makers.items() for dst in ranks if dst != src]
        self._transport.copy_values(copies, "what forward writes into the model")
        return {**values, **parts}

    def _owned(self, mine: Parts) -> dict[tuple[str, int], _Made]:
        """Collective: the first rank that has a part, the part's shape and type."""
        found = everyones(self._transport, {key: (tuple(part.shape), part.dtype) for key, part in mine.items()})
        return {key: (src, *of) for src, of_rank in reversed([*enumerate(found)]) for key, of in of_rank.items()}

    def _is_first(self) -> bool:
        return self.rank == 0

    def _owners(self, parameter: nn.Parameter) -> tuple[int, ...]:
        return owners(parameter)

    def _everyones(self, mine: Any) -> list[Any]:
        with told(self._transport):
            return everyones(self._transport, mine)

    def _on_any(self, mine: bool) -> bool:
        with told(self._transport):
            self._agree("scaler.unscale_ or step", {})
            found = self._transport.all_gather(torch.tensor([float(mine)]), "overflows of every rank")
            return any(bool(number) for number in found.wait())

    def _alike(self, call: str, parts: Mapping[str, Any]) -> None:
        with told(self._transport):
            self._agree(call, parts)

    def _add_gradients(self, gradients: Mapping[str, torch.Tensor], plan: StepPlan) -> None:
        super()._add_gradients(self._shared_of(plan).give(gradients), plan)
        self._accumulation.leave(self._trained())

    def _shared_of(self, plan: StepPlan) -> SharedModel:
        return self._shared_smaller.get(plan.batch_size, self._shared)

    def _shared_by(self, plan: StepPlan) -> SharedModel:
        """The model as this form of the step shares it; of fewer samples, ranks may be idle and others train more."""
        given = [self._shown(name) for name in plan.program(self.rank).gradients]
        shared = {self._shown(name): owner for of in plan.gatherings for name, owner in of.owned}
        return SharedModel(self._model, self._transport, self._kept(), self._refreshed_by(plan), given, shared)

    def _prepare(self, forms: Sequence[StepPlan]) -> None:
        agree(self._transport, {"plan of this form of the step": [form.fingerprint for form in forms]}, "step")
        for form in forms:
            self._take(form)
            if form.batch_size < self._plan.batch_size:
                self._shared_smaller[form.batch_size] = self._shared_by(form)
        self._shared.hold(self._kept(), self._refreshed_by(self._plan))
        self._agree_on_state()
        self._let_go(forms)
        channels = {channel: size for form in forms for channel, size in form.channels.items()}
        groups = {group for form in forms for group in form.groups}
        self._open(channels, groups)

    def _execute(
        self, plan: StepPlan, step: int, tensors: Inputs, ahead: Ahead | None = None, carried: Any = None
    ) -> Executed:
        draws = Draws(plan, self.seed, step, self.device)
        nexts = None if ahead is None else NextBatch(Draws(plan, self.seed, ahead[0], self.device), ahead[1])
        self._transport.begin_form(lambda: plan.sends)
        has_values = self._as_left and self._brought is plan and not plan.updates
        result = run_rank(
            self._modules[id(plan)], plan.program(self.rank), self._transport, draws, tensors,
            self._observe, nexts, carried, self._loss_scale, has_values,
        )  # fmt: skip
        self._brought = plan
        self._parts = result.outputs
        return result.loss, {self._shown(name): g for name, g in result.gradients.items()}, result.carries

    def _write_state(self, plan: StepPlan, is_first: bool) -> None:
        mine, copies = list[StateUpdate](), list[tuple[torch.Tensor, int, int]]()
        for update in (one for one in plan.updates if one.is_first == is_first):
            by, to = routes(update, self._given, plan.world_size)
            copies += [(self._given[update.name], by[0], rank) for rank in to]
            if self.rank in by:
                mine.append(update)
                for name in (*update.reads, update.name):
                    at(self.device, self._given[name])
        self._updates_of(plan).write(mine, self._seen(plan, mine))
        self._transport.copy_values(copies, "what forward writes into the model")
        if plan.updates:
            self._frozen_marks = marks_of(self._frozen().values())

    def _take(self, plan: StepPlan) -> None:
        """Hold the state of one more program of this rank; what it gathers never goes to the device whole."""
        program = plan.program(self.rank)
        gathered = {*program.gathered}
        for name in program.state:
            given = self._given[name]
            self._held[name] = given if name in gathered else at(plan.device, given)
        self._modules[id(plan)] = runnable(program, {name: self._state[name] for name in program.state}, plan.backend)
        if plan.without is not None:
            self._take(plan.without)

    def _let_go(self, plans: Iterable[StepPlan]) -> None:
        """What their programs gather is on the device from now on, without memory where others own it."""
        for name in dict.fromkeys(name for plan in plans for name in plan.program(self.rank).gathered):
            parameter = self._held[name]
            assert isinstance(parameter, nn.Parameter), "parameters alone are gathered"
            if self.rank in owners(parameter):
                at(self.device, parameter)
            else:
                empty([parameter], self.device)

    @cached_property
    def mesh(self) -> Any:
        """A torch `DeviceMesh` of the ranks, "data" (pipelines) x "pipeline" (their ranks); collective when it is first
        asked for. Its groups are for what is computed between steps, as `engine.mesh.get_group("data")`.

        Raises:
            RunError: stages differ in their replicas, so that ranks are no grid.
        """
        from fxpipe.run.transport.mesh import device_mesh

        self._require_open("mesh")
        stage_ranks = [ranks for ranks in self._plan.schedule.stage_ranks if ranks]  # none where a stage is empty
        pipelines = equal_pipelines(stage_ranks, self._plan.world_size)
        if not pipelines:
            raise RunError(
                f"mesh: stages are on the ranks {[list(ranks) for ranks in stage_ranks]}, which are no equal pipelines "
                f"of all {self._plan.world_size} ranks: a mesh is a grid; compile with data_parallel=..."
            )
        with told(self._transport):
            self._agree("mesh", {})
            return device_mesh(pipelines, self.rank, self.device)

    def sent_bytes(self) -> dict[tuple[int, int], int]:
        """Bytes this rank has sent on each channel since the engine was made."""
        return self._transport.sent_bytes()

    @property
    def bytes_sent(self) -> int:
        return sum(self._transport.sent_bytes().values())

    def _trained(self) -> list[nn.Parameter]:
        return [t for t in self._held.values() if isinstance(t, nn.Parameter) and t.requires_grad]

    def _kept(self) -> list[str]:
        """The parameters that this rank holds, and not only while it computes with them; also frozen ones that it
        writes by what it trains."""
        program = self._plan.program(self.rank)
        gathered, trained = {*program.gathered}, {*program.gradients}
        held = [n for n, tensor in self._held.items() if isinstance(tensor, nn.Parameter)]
        updates = [update for update in self._plan.updates if not trained.isdisjoint(update.reads)]
        written = [n for update in updates for n in (*update.reads, update.name) if _is_frozen(self._given[n])]
        return [self._shown(name) for name in dict.fromkeys((*held, *written)) if name not in gathered]

    def _refreshed_by(self, plan: StepPlan) -> list[str]:
        """What its program brings here: of replicas that train it for this one."""
        return [self._shown(name) for name in plan.program(self.rank).refreshed]

    def close(self) -> None:
        """As in `Training.close`. What other ranks train is not in this rank's model unless `sync_model` brought it."""
        try:
            super().close()
        finally:
            self._transport.close()


def _is_trained(tensor: torch.Tensor) -> bool:
    """Or held by some ranks alone, as what is shared out."""
    return tensor.requires_grad or (isinstance(tensor, nn.Parameter) and bool(owners(tensor)))


def _is_frozen(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and not tensor.requires_grad
