"""The sampling compiler, top to bottom: a denoiser becomes one program per rank, each with a patch of the rows.

capture     the denoiser in eval, without gradients    -> Capture
rows        where the image's rows lie in every value  -> RowPlan
patches     which rows each rank has                   -> Patch per rank
graphs      one graph per patch, exchanges as nodes
forms       exchanges as messages: of this step, or of the step before  -> SampleProgram per rank
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from cost_models.flops import node_costs
from fxpipe.analysis import Observe, given_cost_model
from fxpipe.capture import Capture, capture
from fxpipe.capture.inputs import InputSpec, Leaf, describe
from fxpipe.capture.settings import require_stateless
from fxpipe.capture.trees import Returned
from fxpipe.cluster import Cluster
from fxpipe.costs.model import CostModel, node_seconds
from fxpipe.costs.table import CostTable
from fxpipe.errors import CompileError, FxpipeError
from fxpipe.models.backbones import example_inputs, image_rows, prediction_of, row_inputs
from fxpipe.models.pipelines import denoiser_names, is_pipeline, recorded_call, uncompiled
from fxpipe.options import check_counts, given_cluster
from fxpipe.plan.program_check import require_programs
from fxpipe.plan.rank_program import Message, Traffic
from fxpipe.plan.sample_grid import Grid, grid_for
from fxpipe.plan.sample_program import Form, SampleProgram
from fxpipe.plan.transport import Channel, Transport
from fxpipe.plan.unroll import in_sequence, require_sequence
from fxpipe.run.launch import join
from fxpipe.run.ranks import LaunchedRank, LocalRanks, Ranks
from fxpipe.run.sampling import BoundProgram, predict_in_process
from fxpipe.sampler import Sampler, SampleStep, Spread, Traced
from fxpipe.simulate.op_lists import StepOps
from fxpipe.simulate.sample_ops import sample_ops
from passes.batch import require_independent
from passes.rows import RowPlan, analyse
from passes.rows.sized import at_batch_size
from passes.sampling.displaced import Norms
from passes.sampling.forms import displaced_programs
from passes.sampling.fresh import CONSTANTS, fresh_programs
from passes.sampling.groups import grouped
from passes.sampling.once import with_once
from passes.sampling.patch_graph import patch_graph
from passes.sampling.patches import Patch, even_bounds, patches_of, require_units
from passes.sampling.piped import Piped
from passes.sampling.piped_rank import piped_programs
from passes.sampling.staged import Staged, staged_programs
from passes.sampling.stages import stages as cut_stages
from passes.sampling.text import Text, cut_with_text
from passes.sampling.times import inputs_of_call

_CPU = torch.device("cpu")
Mode = Literal["exact", "displaced"]


@dataclass(frozen=True, eq=False)
class SamplePrograms:
    """The programs of all ranks for one batch size and one size of the image; `rows` says how they were found.

    `sample` has the row dimensions of inputs; patches lie between `bounds`, in units.
    """

    model: nn.Module
    captured: Capture
    rows: RowPlan
    sample: Mapping[str, int]
    bounds: tuple[int, ...]
    programs: tuple[SampleProgram, ...]
    messages_of: Mapping[str, tuple[Message, ...]]
    """By form, in the order of every channel."""
    device: torch.device = _CPU
    mode: Mode = "exact"
    norms: Norms = "corrected"
    advance: bool = True

    def of_batch(self, batch_size: int) -> "SamplePrograms":
        """The same for another number of samples, of the same trace.

        Raises:
            CompileError: it holds for one batch size only.
        """
        if not self.captured.batch and batch_size != self.captured.inputs.batch_size:
            why = next(iter(self.captured.notes), "it was traced with a batch of one sample")
            raise CompileError(f"no programs for {batch_size} samples: {why}")
        plan = analyse(self.captured, self.sample, batch_size)
        return self._lowered(plan, self.bounds)

    def cut(self, patches: int | Sequence[int]) -> "SamplePrograms":
        """Other patches, of the same trace."""
        return self._lowered(self.rows, patches)

    def _lowered(self, plan: RowPlan, patches: int | Sequence[int]) -> "SamplePrograms":
        how = self.mode, self.norms, self.advance, self.device
        return _lowered(self.model, self.captured, plan, self.sample, patches, *how)

    @property
    def messages(self) -> tuple[Message, ...]:
        """Of the fresh form."""
        return self.messages_of["fresh"]

    @property
    def channels(self) -> list[Channel]:
        """Who sends to whom, in one order for all ranks."""
        return sorted({message.channel for message in self.messages})

    def traffic(self, form: str = "fresh") -> Traffic:
        """What one step sends."""
        return Traffic(self.messages_of[form])

    def state(self) -> dict[str, torch.Tensor]:
        """The model's tensors and the graph's constants, by the programs' names."""
        named = (self.model.named_parameters, self.model.named_buffers)
        own = dict(item for names in named for item in names(remove_duplicate=False))
        return {**own, **{CONSTANTS + name: tensor for name, tensor in self.captured.constants.items()}}

    def bind(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        """A call's tensors by the programs' names; CompileError where it is another call than the compiled one."""
        tensors, size = self.captured.inputs.bind(args, kwargs)
        if size != self.rows.sized.batch_size:
            raise CompileError(f"the call has {size} samples, the programs were made for {self.rows.sized.batch_size}")
        return {name: tensors[argument].contiguous() for name, argument in self.rows.inputs.items()}

    def bound(self) -> list[BoundProgram]:
        """Every rank's program with the model's own tensors, to run."""
        state = self.state()
        return [BoundProgram(program, state) for program in self.programs]

    def predict(self, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        """Every rank's prediction, all ranks being threads of this process."""
        return predict_in_process(self.programs, self.state(), self.bind(*args, **kwargs))


def sample_programs(
    model: nn.Module,
    example: Mapping[str, Any],
    patches: int | Sequence[int],
    *,
    sample: Mapping[str, int] | None = None,
    batch_size: int | None = None,
    mode: Mode = "exact",
    norms: Norms = "corrected",
    advance: bool = True,
    device: torch.device = _CPU,
    observe: Observe = lambda name, artefact: None,
) -> SamplePrograms:
    """Compile a denoiser for patches of its rows, a rank each.

    Args:
        model: predicts; its prediction is what forward returns, the first of several.
        example: keyword arguments of one call.
        patches: how many, or the bounds of each in units, from 0 to their number.
        sample: the row dimension of every input that has rows; a diffusers backbone's own where left out.
        batch_size: samples in the example; the first dimension of its first tensor where left out.
        mode: "exact": every step reads what others make in it. "displaced": the programs also have forms that read what
            they made in the step before.
        norms: where displaced group norms take the others' moments from.
        advance: whether other displaced values are moved on by their own last change, at twice the memory for them.

    Raises:
        CaptureError: the model cannot be captured as one graph.
        CompileError: it can, but not be cut into these patches; names the module and what to change.
    """
    rows = sample if sample is not None else row_inputs(model, example)

    # capture: one flat graph
    captured = captured_denoiser(model, example, batch_size)
    observe("capture", captured)

    # rows: where they lie, what each operation needs of other patches
    plan = analyse(captured, rows, captured.inputs.batch_size)
    observe("rows", plan)

    return _lowered(model, captured, plan, rows, patches, mode, norms, advance, device, observe)


def _lowered(
    model: nn.Module, captured: Capture, plan: RowPlan, sample: Mapping[str, int], patches: int | Sequence[int],
    mode: Mode, norms: Norms, advance: bool, device: torch.device, observe: Observe = lambda name, artefact: None,
) -> SamplePrograms:  # fmt: skip
    """The back half: what of one trace every number of patches has of its own."""
    # patches: which rows each rank has
    if isinstance(patches, int):
        require_units(plan, patches)
        patches = even_bounds(plan.units.count, patches)
    parts = patches_of(plan, patches)

    # graphs: one per patch, exchanges as nodes
    graphs = [patch_graph(plan, patch) for patch in parts]
    observe("patch graphs", graphs)

    # forms: exchanges as messages
    programs, messages = _forms(plan, parts, graphs, device, mode, norms, advance)
    programs = with_once(programs, inputs_of_call(plan, sample))
    observe("programs", programs)
    return SamplePrograms(
        model, captured, plan, sample, tuple(patches), programs, messages, device, mode, norms, advance
    )


def _forms(
    plan: RowPlan,
    patches: Sequence[Patch],
    graphs: Sequence[fx.Graph],
    device: torch.device,
    mode: Mode,
    norms: Norms,
    advance: bool,
) -> tuple[tuple[SampleProgram, ...], Mapping[str, tuple[Message, ...]]]:
    if mode == "exact":
        programs, messages = fresh_programs(plan, patches, graphs, device)
        _require(programs, {"fresh": messages})
        return programs, {"fresh": messages}
    programs, by_form = displaced_programs(plan, patches, graphs, device, norms, advance)
    _require(programs, by_form)
    return programs, by_form


def _require(programs: Sequence[SampleProgram], messages: Mapping[str, tuple[Message, ...]]) -> None:
    """Raise CompileError unless the programs are right, in every form and from step to step."""
    if "displaced" not in messages:
        require_programs(programs, messages["fresh"])
        return
    require_sequence(programs, messages)
    if "again" in messages:
        require_sequence(programs, messages, ("fresh", "again", "again", "displaced", "again", "last"))


def captured_denoiser(model: nn.Module, example: Mapping[str, Any], batch_size: int | None = None) -> Capture:
    """The capture of a denoiser as it samples: in eval, without gradients; the model stays as it is."""
    inputs, tensors = describe(model, (), example, batch_size)
    with _sampling(model):
        return capture(model, inputs, tensors, prediction_of)


@contextmanager
def _sampling(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in eval and no parameter requires a gradient."""
    modes = {module: module.training for module in model.modules()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        model.eval()
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
        for module, mode in modes.items():
            module.training = mode


@dataclass(frozen=True)
class _Rows:
    """Patches of rows over ranks; the groups of samples are apart."""

    world_size: int
    cfg: int | None
    stages: int | None
    fold: bool | None
    patches: int | None
    mode: Mode
    warmup: int
    norms: Norms
    advance: bool
    text: Text
    rows_of: Callable[[nn.Module, Mapping[str, torch.Tensor]], Mapping[str, int]]
    device: torch.device
    cost_model: CostModel
    observe: Observe

    def traced(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
        """The call as one flat graph, and which inputs have rows. A single sample is traced as two, since a graph of
        one holds for one alone; where that fails, as it is."""
        inputs, tensors = describe(module, args, kwargs, None)
        if inputs.batch_size == 1:
            with suppress(FxpipeError):
                twice = [torch.cat([t, t]) if leaf.batched else t for leaf, t in _of_tensors(inputs, tensors)]
                traced = self._traced(module, *describe(module, *inputs.rebuild(twice), 2))
                if traced.captured.batch:
                    return traced
        return self._traced(module, inputs, tensors)

    def _traced(self, module: nn.Module, inputs: InputSpec, tensors: Sequence[torch.Tensor]) -> Traced:
        rows = self.rows_of(module, dict(zip(inputs.tensor_names, tensors, strict=True)))
        returned: list[Returned] = []

        def result_of(output: Any) -> torch.Tensor:
            returned[:] = [Returned.of(output)]
            return returned[0].tensor(output)

        require_stateless(module)
        with _sampling(module):
            captured = capture(module, inputs, tensors, result_of)
        self.observe("capture", captured)
        return Traced(captured, returned[0], rows)

    def step(self, traced: Traced, batch_size: int) -> SampleStep:
        """Every group's patches, as if it were alone; then the groups together."""
        in_turn = self.mode == "displaced" and self.stages is not None
        patches = 1 if in_turn else self.patches
        grid = grid_for(self.world_size, batch_size, self.cfg, patches, self.stages)
        if grid.groups > 1:
            try:
                require_independent(traced.captured)
            except CompileError:  # perturbed attention, say, which reads one half of the batch for the other
                if self.cfg is not None or self.patches is not None:
                    raise
                grid = grid_for(self.world_size, batch_size, 1, 1 if in_turn else None, self.stages)
        spans = grid.spans(batch_size)
        plans = {size: analyse(traced.captured, traced.rows, size) for size in {b - a for a, b in spans}}
        self.observe("rows", plans)
        first = plans[spans[0][1] - spans[0][0]]
        whole = at_batch_size(traced.captured, batch_size)
        likes = {name: whole.nodes[name].meta["val"] for name in first.inputs}
        leaves = {leaf.name for leaf in traced.captured.inputs.leaves if leaf.batched}
        batched = {name: likes[name] for name, argument in first.inputs.items() if argument in leaves}
        if in_turn:
            return self._displaced(traced, batch_size, grid, spans, batched, likes)
        alone = {size: self._alone(traced, plan, grid, batched) for size, plan in plans.items()}
        programs, messages = alone[spans[0][1] - spans[0][0]]
        if grid.groups > 1:
            parts = [alone[b - a] for a, b in spans]
            programs, messages = grouped(parts, spans, batched, self.device)
            _require(programs, messages)
        programs = with_once(programs, inputs_of_call(first, traced.rows))
        self.observe("programs", programs)
        notes = (*traced.captured.notes, *map(str, first.notes))
        return SampleStep(
            traced, batch_size, grid, first.inputs, likes, programs, messages, str(first), notes, self.warmup
        )

    def ops(self, step: SampleStep, num_steps: int) -> StepOps:
        """What every rank does in so many steps of a call, for how long, and in how many bytes."""
        rows, sent = in_sequence(step.programs, step.messages_of, step.sequence(num_steps), whole=True)
        forms = [{"fresh": Form(row.graph)} for row in rows]
        programs = [replace(p, forms=form) for p, form in zip(step.programs, forms, strict=True)]
        return sample_ops(programs, sent, step.likes, partial(_seconds_of, self.cost_model))

    def _displaced(
        self, traced: Traced, batch_size: int, grid: Grid, spans: Sequence[tuple[int, int]],
        batched: Mapping[str, torch.Tensor], likes: Mapping[str, torch.Tensor],
    ) -> SampleStep:  # fmt: skip
        """Patches that follow each other through stages."""
        groups = [[(start + a, start + b) for a, b in _runs(traced.captured, stop - start)] for start, stop in spans]
        sizes = {b - a for runs in groups for a, b in runs}
        plans = {size: analyse(traced.captured, traced.rows, size) for size in sizes}
        some = next(iter(plans.values()))
        line = cut_stages(some, traced.rows, _node_seconds(self.cost_model, some), grid.stages, self.fold)
        self.observe("stages", line)
        count = some.units.count
        turns = min(2 * grid.stages, count) if self.patches is None else self.patches
        require_units(some, turns)
        how = self.norms, self.device
        programs, messages = piped_programs(Piped(line, plans, groups, even_bounds(count, turns), batched, *how))
        require_sequence(programs, messages, ("fresh", "fresh", "displaced", "displaced", "displaced"))
        programs = with_once(programs, inputs_of_call(some, traced.rows))
        self.observe("programs", programs)
        notes = (*traced.captured.notes, *map(str, some.notes))
        grid = replace(grid, turns=turns)
        rest = programs, messages, str(some), notes, self.warmup
        return SampleStep(traced, batch_size, grid, some.inputs, likes, *rest)

    def _alone(
        self, traced: Traced, plan: RowPlan, grid: Grid, batched: Mapping[str, torch.Tensor]
    ) -> tuple[tuple[SampleProgram, ...], Mapping[str, tuple[Message, ...]]]:
        """One group's programs: patches beside each other; with stages, samples after each other."""
        require_units(plan, grid.patches)
        if grid.stages == 1:
            node_seconds = partial(_node_seconds, self.cost_model)
            parts, graphs = cut_with_text(plan, traced.rows, grid.patches, self.text, node_seconds)
            return _forms(plan, parts, graphs, self.device, self.mode, self.norms, self.advance)
        spans = _runs(traced.captured, plan.sized.batch_size)
        plans = {size: analyse(traced.captured, traced.rows, size) for size in {b - a for a, b in spans}}
        some = next(iter(plans.values()))
        line = cut_stages(some, traced.rows, _node_seconds(self.cost_model, some), grid.stages, self.fold)
        self.observe("stages", line)
        bounds = even_bounds(plan.units.count, grid.patches)
        programs, messages = staged_programs(Staged(line, plans, spans, bounds, batched, self.device))
        return programs, {"fresh": messages}


def _runs(captured: Capture, batch_size: int) -> list[tuple[int, int]]:
    """The samples that pass through stages one after the other: each by itself, if none needs another."""
    try:
        require_independent(captured)
    except CompileError:
        return [(0, batch_size)]
    return [(sample, sample + 1) for sample in range(batch_size)]


def _node_seconds(model: CostModel, plan: RowPlan) -> dict[str, float]:
    """Of every operation of a denoiser, forward."""
    nodes = [node for node in plan.sized.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    for node in nodes:
        node.meta["requires_grad"] = False
    costs = node_costs(nodes)
    seconds = node_seconds(model, CostTable.of(costs.values()), 1).forward.tolist()
    return {node.name: one for node, one in zip(costs, seconds, strict=True)}


def compile_sampler(
    model: Any,
    world_size: int,
    *,
    example: Mapping[str, Any] | None = None,
    cfg: int | None = None,
    stages: int | None = None,
    fold: bool | None = None,
    patches: int | None = None,
    mode: Mode = "exact",
    warmup: int = 4,
    norms: Norms = "corrected",
    advance: bool = True,
    text: Text = "first",
    sample: Mapping[str, int] | None = None,
    vae: bool = True,
    cluster: Cluster | str | None = None,
    cost_model: CostModel | str | None = None,
    observe: Observe = lambda name, artefact: None,
) -> Sampler:
    """Compile a pipeline, a denoiser, or any module whose inputs have rows, for sampling on `world_size` ranks.

    The rows of the image are cut into patches, a rank each; samples of a call (the halves of classifier-free guidance)
    go to groups of ranks. In exact mode every exchange is of the step itself: any layout gives one device's result.
    Ranks run on the denoiser's own device.

    Args:
        model: a diffusers pipeline, or a module that predicts.
        example: a call: of the pipeline, (it ends where it calls its denoiser), or keyword arguments of the module.
            Left out, a diffusers backbone's is made from its config.
        cfg: groups of samples; as many as divide samples and ranks where left out.
        patches: of the rows in every group, or in every stage of it; of displaced stages how many follow each other,
            twice as many as stages where left out.
        stages: columns of ranks in every group, each with a part of the denoiser and its weights alone; samples follow
            each other through them, in displaced mode patches (Wang et al., "PipeFusion", 2024). One where left out.
        fold: whether every column has two parts, from both ends, so that skip connections stay on their rank; as fewer
            bytes are sent where left out.
        mode: "exact"; or "displaced", which is approximate: after `warmup` exact steps of a call a patch reads of the
            others what they had one step before, so that nobody waits (Li et al., "DistriFusion", CVPR 2024); of those
            that went through a stage before it, what they have now.
        norms: the others' moments of displaced group norms: "corrected" as one's own have moved (the paper's),
            "merged" as they were, "sync" of this step, "separate" none.
        advance: whether the others' displaced values are moved on by their own last change, at twice the memory; not
            with stages.
        text: in models that have text and image in one sequence, whose the text is, of patches without stages: "first",
            the first patch's, which then has fewer rows; "all", every patch's, which all compute it.
        sample: for modules that are no diffusers backbones, {input: its row dimension}.
        vae: whether the decoder of the pipeline's VAE is spread, too; one that cannot be runs whole on every rank.
        cluster: devices and links that predictions are for; one node of A100-80GB where left out.
        cost_model: seconds of compute; the cluster's device where left out.

    Raises:
        CaptureError: the denoiser cannot be captured as one graph.
        CompileError: it can, but not be cut so; names the module and what to change.
        RunError: started by torchrun, and the other ranks cannot be found.
    """
    check_counts(world_size=world_size, cfg=cfg, stages=stages, patches=patches, warmup=warmup)
    _check_choices(mode=mode, norms=norms, text=text)
    if mode == "displaced" and norms == "sync" and stages is not None:
        raise CompileError("norms='sync' waits for patches that come later; use 'corrected' or 'merged' with stages")
    if sample is not None and not all(type(dim) is int for dim in sample.values()):
        raise CompileError(f"sample={dict(sample)}: dimensions are integers, {{'sample': 2}}")

    # denoiser: which module predicts, and what it is called with
    names = denoiser_names(model) if is_pipeline(model) else []
    name, module, args, kwargs = _denoiser_call(model, names, example)

    # ranks: threads of this process, or processes that torchrun has started
    launched = join(world_size) is not None
    where = _device_of(module)
    ranks: Ranks = LaunchedRank(lambda: _connected(where)) if launched else LocalRanks()

    # programs: for the example, and for other calls when they come
    rows_of = row_inputs if sample is None else lambda module, call: sample
    network = given_cluster(cluster, world_size)
    costs = given_cost_model(cost_model or network.device)
    how = mode, warmup, norms, advance, text, rows_of, where, costs, observe
    lowering = _Rows(world_size, cfg, stages, fold, patches, *how)
    denoiser = Spread(module, lowering, ranks)
    denoiser.step(args, kwargs)
    others = {other: Spread(uncompiled(getattr(model, other)), lowering, ranks) for other in names if other != name}
    decoder = _decoder_of(model) if vae and name is not None else None
    of_image = replace(lowering, cfg=None, stages=None, patches=None, mode="exact", rows_of=image_rows)
    spread = None if decoder is None else Spread(decoder, of_image, ranks, or_whole=True)
    return Sampler(model, name, denoiser, others, spread, (args, kwargs), ranks, network)


def _check_choices(**given: str) -> None:
    """Refuse a choice that is none."""
    for name, value in given.items():
        known = get_args({"mode": Mode, "norms": Norms, "text": Text}[name])
        if value not in known:
            raise CompileError(f"{name}={value!r} is not known; use one of {', '.join(known)}")


def _seconds_of(model: CostModel, programs: Sequence[SampleProgram]) -> dict[fx.Node, float]:
    """Of every operation of all programs; those that are none of ATen's move what they read and make."""
    nodes = [node for program in programs for node in program.graph.nodes if node.op == "call_function"]
    for program in programs:
        for node in program.graph.nodes:
            node.meta["requires_grad"] = False
    costs = node_costs([node for node in nodes if isinstance(node.target, torch._ops.OpOverload)])
    table = CostTable.of(costs.values())
    seconds = dict(zip(costs, node_seconds(model, table, 1).forward.tolist(), strict=True))
    for node in nodes:
        value = node.meta.get("val")
        if node not in seconds and isinstance(value, torch.Tensor):
            seconds[node] = model.moving_seconds(value.nbytes, value.nbytes)
    return seconds


def _of_tensors(inputs: InputSpec, tensors: Sequence[torch.Tensor]) -> list[tuple[Leaf, torch.Tensor]]:
    return list(zip((leaf for leaf in inputs.leaves if leaf.is_tensor), tensors, strict=True))


def _denoiser_call(
    model: Any, names: Sequence[str], example: Mapping[str, Any] | None
) -> tuple[str | None, nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The module that predicts first, its name where it is a pipeline's, and its call."""
    if names:
        if example is None:
            raise CompileError("example is missing: keyword arguments of one call of the pipeline, {'prompt': ...}")
        name, args, kwargs = recorded_call(model, names, example)
        return name, uncompiled(getattr(model, name)), args, kwargs
    if not isinstance(model, nn.Module):
        raise CompileError(f"{type(model).__name__} is neither a pipeline nor a module")
    if example is None:
        made = example_inputs(model, 2)
        return None, model, (), {key: value for key, value in made.items() if key != "target"}
    if not any(isinstance(value, torch.Tensor) for value in pytree.tree_leaves(dict(example))):
        raise CompileError(f"example={dict(example)} has no tensor; give keyword arguments of {type(model).__name__}")
    return None, model, (), dict(example)


def _connected(device: torch.device) -> Transport:
    from fxpipe.run.transport.distributed import DistributedTransport

    return DistributedTransport(device)


def _decoder_of(pipe: Any) -> nn.Module | None:
    """The decoder of a VAE whose latents are an image's or a video's."""
    found = getattr(getattr(pipe, "vae", None), "decoder", None)
    return found if isinstance(found, nn.Module) else None


def _device_of(module: nn.Module) -> torch.device:
    found = next((tensor.device for tensor in (*module.parameters(), *module.buffers())), _CPU)
    return _CPU if found.type == "meta" else found
