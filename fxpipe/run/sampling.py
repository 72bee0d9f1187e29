"""One call of a denoiser, run by its ranks' programs: all of them as threads of this process, or this process's own."""

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from fxpipe.plan.sample_program import SampleProgram
from fxpipe.plan.transport import Transport
from fxpipe.run.transport import run_ranks


def predict(
    module: fx.GraphModule, program: SampleProgram, transport: Transport, tensors: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """The whole prediction, on one rank; `tensors` are the whole inputs by the program's names."""
    with torch.no_grad():
        prediction: torch.Tensor = module(transport, *(tensors[name] for name in program.inputs))
    transport.flush()
    return prediction


def predict_in_process(
    programs: Sequence[SampleProgram], state: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]
) -> list[torch.Tensor]:
    """Every rank's prediction, which are equal."""
    modules = [program.bind({name: state[name] for name in program.state}) for program in programs]

    def body(transport: Transport) -> torch.Tensor:
        return predict(modules[transport.rank], programs[transport.rank], transport, tensors)

    return run_ranks(len(programs), body)
