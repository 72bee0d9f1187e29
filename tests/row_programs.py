"""A denoiser over patches of its rows, as the sampling compiler lowers it: other patches, other forms of one trace."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.analysis import given_cost_model
from fxpipe.models.backbones import row_inputs
from fxpipe.plan.rank_program import Message, Traffic
from fxpipe.plan.sample_program import SampleProgram
from fxpipe.plan.transport import Channel
from fxpipe.run.ranks import LocalRanks
from fxpipe.run.sampling import BoundProgram, LocalRun
from fxpipe.sampler import SampleStep, Spread, Traced
from fxpipe.sampling.case import SampleCase
from fxpipe.sampling.lowering import SampleLowering
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
        """Other patches, of the same trace; `how` are other options of its lowering."""
        count = patches if isinstance(patches, int) else len(patches) - 1
        return replace(self, lowering=replace(self.lowering, world_size=count, patches=patches, **how))

    def of_samples(self, num_samples: int) -> "RowPrograms":
        """For another number of them, of the same trace."""
        return replace(self, num_samples=num_samples)

    @property
    def bounds(self) -> Sequence[int]:
        assert isinstance(self.lowering.patches, Sequence)
        return self.lowering.patches

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
    def channels(self) -> list[Channel]:
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
        return [BoundProgram(program, state) for program in self.programs]

    def predict(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        """Every rank's prediction, all ranks being threads of this process."""
        return LocalRun(len(self.programs)).predict(self.bound(), self.bind(*args, **kwargs))


def row_programs(
    model: nn.Module, example: Mapping[str, Any], patches: int | Sequence[int], *,
    sample: Mapping[str, int] | None = None, **how: Any,
) -> RowPrograms:  # fmt: skip
    """A denoiser over patches of its rows, a rank each.

    Args:
        patches: how many, or their bounds in units.
        sample: the row dimension of every input that has rows; a diffusers backbone's own where left out.
        how: mode, norms, advance.
    """
    options = {"mode": "exact", "warmup": 1, "norms": "corrected", "advance": True, **how}
    lowering = SampleLowering(
        0, 1, None, None, None, **options, rows_of=row_inputs if sample is None else lambda module, call: sample,
        device=torch.device("cpu"), cost_model=given_cost_model("A100-80GB"), observe=lambda name, artefact: None,
    )  # fmt: skip
    traced = lowering.traced(model, (), dict(example))
    count = traced.num_samples((), example)
    assert count is not None
    made = RowPrograms(model, lowering, traced, count).cut(patches)
    _ = made.step  # refused here, if it is
    return made
