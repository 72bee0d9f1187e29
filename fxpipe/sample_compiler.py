"""The sampling compiler, top to bottom: a denoiser becomes one program per rank, each with a patch of the rows.

capture     the denoiser in eval, without gradients    -> Capture
rows        where the image's rows lie in every value  -> RowPlan
patches     which rows each rank has                   -> Patch per rank
graphs      one graph per patch, exchanges as nodes
forms       exchanges as messages: of this step, or of the step before  -> SampleProgram per rank
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx, nn

from fxpipe.analysis import Observe
from fxpipe.capture import Capture, capture
from fxpipe.capture.inputs import describe
from fxpipe.errors import CompileError
from fxpipe.models.backbones import prediction_of, row_inputs
from fxpipe.plan.program_check import require_programs
from fxpipe.plan.rank_program import Message, Traffic
from fxpipe.plan.sample_program import SampleProgram
from fxpipe.plan.transport import Channel
from fxpipe.plan.unroll import require_sequence
from fxpipe.run.sampling import BoundProgram, predict_in_process
from passes.rows import RowPlan, analyse
from passes.sampling.displaced import Norms
from passes.sampling.forms import displaced_programs
from passes.sampling.fresh import CONSTANTS, fresh_programs
from passes.sampling.patch_graph import patch_graph
from passes.sampling.patches import Patch, even_bounds, patches_of, require_units

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
        require_programs(programs, messages)
        return programs, {"fresh": messages}
    programs, by_form = displaced_programs(plan, patches, graphs, device, norms, advance)
    require_sequence(programs, by_form)
    if "again" in by_form:
        require_sequence(programs, by_form, ("fresh", "again", "again", "displaced", "again", "last"))
    return programs, by_form


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
