"""Run the Python text of rank programs, as `program.dump` writes it, instead of their graphs."""

from collections.abc import Mapping
from typing import Any

import torch

from fxpipe.plan.transport import Transport
from fxpipe.program import Program
from fxpipe.run.run_rank import Draws
from fxpipe.run.transport import run_ranks
from fxpipe.show.dump import rank_text


class _Tree:
    """Tensors under their dotted names: `tree.layers[0].weight`."""

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in state.items():
            *parents, leaf = name.split(".")
            tree = self
            for part in parents:
                tree = tree.__dict__.setdefault(part, _Tree({}))
            tree.__dict__[leaf] = tensor

    def __getitem__(self, name: int | str) -> Any:
        return self.__dict__[str(name)]


def run_dumped(program: Program, batch: Mapping[str, Any], step: int = 0) -> dict[str, torch.Tensor]:
    """Gradients by name, and the loss as "loss", of one step of the dumped text of all ranks."""
    tensors = program.step.tensors((), batch)[0]
    draws = Draws(program.step, 0, step, torch.device("cpu"))

    def body(transport: Transport) -> dict[str, torch.Tensor]:
        rank_program = program.step.programs[transport.rank]
        namespace: dict[str, Any] = {"__name__": "dumped"}
        exec(compile(rank_text(rank_program), f"rank_{transport.rank}.py", "exec"), namespace)
        rank = namespace[f"Rank{transport.rank}"]()
        rank.__dict__.update(_Tree({name: program.state[name] for name in rank_program.state}).__dict__)
        with torch.no_grad():
            loss, gradients, *_ = rank(transport, draws, *(tensors[name] for name in rank_program.inputs))
        transport.flush()
        return {"loss": loss} | dict(zip(rank_program.gradients, gradients, strict=True))

    return {name: value for found in run_ranks(program.world_size, body) for name, value in found.items()}


def assert_text_runs(program: Program, batch: Mapping[str, Any]) -> None:
    """The dumped Python computes what the programs compute, bit for bit."""
    expected = program.run_local(**batch)
    found = run_dumped(program, batch)
    assert torch.equal(found.pop("loss"), expected.loss)
    assert found.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        assert torch.equal(gradient, found[name]), name
