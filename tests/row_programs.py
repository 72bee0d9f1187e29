"""A denoiser over patches of its rows, as the sampling compiler lowers it: other patches, other forms of one trace."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.analysis import given_cost_model
from fxpipe.capture.cache import cache_folder
from fxpipe.models.backbones import row_inputs
from fxpipe.plan.rank_program import Message, Traffic
from fxpipe.plan.sample_plan import How
from fxpipe.plan.sample_program import SampleProgram
from fxpipe.plan.transport import Channel
from fxpipe.run.ranks import LocalRanks
from fxpipe.run.sampling import BoundProgram, LocalRun
from fxpipe.sampling.case import SampleCase
from fxpipe.sampling.lowering import SampleLowering
from fxpipe.sampling.planning import SampleRequest
from fxpipe.sampling.spread import Spread
from fxpipe.sampling.step import SampleStep, Traced
from fxpipe.sampling.trace import Tracing
from passes.rows import RowPlan


@dataclass(frozen=True, eq=False)
class RowPrograms:
    """The programs of all ranks for one number of samples."""

    model: nn.Module
    lowering: SampleLowering
    traced: Traced
    num_samples: int

    @cached_property
    def step(self) -> SampleStep:
        return self.lowering.step(self.traced, self.num_samples)

    @cached_property
    def rows(self) -> RowPlan:
        return SampleCase(self.traced, self.num_samples, self.lowering.cost_model).rows(self.num_samples)

    def cut(self, patches: int | Sequence[int], **how: Any) -> "RowPrograms":
        """Other patches, of the same trace; `how` a step reads otherwise."""
        return replace(self, lowering=of_patches(self.lowering, patches, **how))

    def of_samples(self, num_samples: int) -> "RowPrograms":
        """For another number of them, of the same trace."""
        return replace(self, num_samples=num_samples)

    @property
    def bounds(self) -> Sequence[int]:
        return self.step.plan.bounds

    @property
    def programs(self) -> tuple[SampleProgram, ...]:
        return self.step.programs

    @property
    def messages_of(self) -> Mapping[str, tuple[Message, ...]]:
        return self.step.messages_of

    @property
    def messages(self) -> tuple[Message, ...]:
        return self.step.messages

    @property
    def channels(self) -> Mapping[Channel, int]:
        return self.step.channels

    def traffic(self, form: str = "fresh") -> Traffic:
        """What one step sends."""
        return Traffic(self.messages_of[form])

    def state(self) -> dict[str, Tensor]:
        """The model's tensors and the graph's constants, by the programs' names."""
        return Spread(self.model, self.lowering, LocalRanks()).state(self.traced)

    def bind(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """A call's tensors by the programs' names."""
        return self.step.bind(self.traced.captured.inputs.bind(args, kwargs)[0])

    def bound(self) -> list[BoundProgram]:
        """Every rank's program with the model's own tensors, to run."""
        state = self.state()
        return [BoundProgram(program, state, self.step.sends) for program in self.programs]

    def predict(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        """Every rank's prediction, all ranks being threads of this process."""
        return LocalRun(len(self.programs)).predict(self.bound(), self.bind(*args, **kwargs))


def of_patches(lowering: SampleLowering, patches: int | Sequence[int], **how: Any) -> SampleLowering:
    """For other patches, a rank each; `how` a step reads otherwise."""
    count = patches if isinstance(patches, int) else len(patches) - 1
    asked = replace(lowering.request, world_size=count, patches=patches, how=replace(lowering.request.how, **how))
    return replace(lowering, request=asked)


def row_programs(
    model: nn.Module, example: Mapping[str, Any], patches: int | Sequence[int] | Callable[[int], Sequence[int]], *,
    sample: Mapping[str, int] | None = None, **how: Any,
) -> RowPrograms:  # fmt: skip
    """A denoiser over patches of its rows, a rank each.

    Args:
        patches: how many, or their bounds in units, or what makes these of the number of units.
        sample: the row dimension of every input that has rows; a diffusers backbone's own where left out.
        how: mode, norms, advance.
    """
    rows_of = row_inputs if sample is None else lambda module, call: sample
    asked = SampleRequest(1, 1, None, None, 1, replace(How("exact", 1, "corrected", True), **how))
    tracing = Tracing(rows_of, "auto", cache_folder(True), _unobserved)
    lowering = SampleLowering(asked, tracing, torch.device("cpu"), given_cost_model("A100-80GB"), _unobserved)
    traced = tracing.traced(model, (), dict(example))
    count = traced.num_samples((), example)
    assert count is not None
    whole = RowPrograms(model, lowering, traced, count)
    made = whole.cut(patches(whole.rows.units.count) if callable(patches) else patches)
    _ = made.step  # refused here, if it is
    return made


def _unobserved(name: str, artefact: Any) -> None:
    pass
