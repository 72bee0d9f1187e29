"""What a rank writes of a run, by the names of the model.

    model.layers.4.weight                 parameters and buffers       of the first rank that trains it, else of rank 0
    optimizer.layers.4.weight.exp_avg     a parameter's state          likewise; extra.muon. ... of another optimizer
    extra.average.layers.4.weight         what goes by a parameter     likewise
    scheduler, random, extra              everything else              every rank its own

Nothing depends on who holds which layer, or on a parameter's number.
"""

from typing import Any

import torch

from fxpipe.run.saves.optimizers import optimizer_state
from fxpipe.run.saves.parts import tensor_sum
from fxpipe.run.saves.run import Stateful, TrainingRun, named_state, state_of
from fxpipe.run.saves.values import encode
from fxpipe.run.saves.weight_names import WeightNames


def contents(run: TrainingRun, trainable_only: bool) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors that this rank writes, and what else its part says."""
    tensors: dict[str, torch.Tensor] = {}
    frozen = {}
    for name, tensor in named_state(run.model).items():
        if not run.writes(tensor):
            continue
        if trainable_only and not tensor.requires_grad and run.base.has(tensor):
            frozen[name] = tensor_sum(tensor)
        else:
            tensors[f"model.{name}"] = tensor
    body = {"layout": run.layout, "frozen": frozen, "sections": _sections(run, tensors)}
    for name, optimizer in run.optimizers.items():
        body[name] = optimizer_state(run, name, optimizer, tensors)
    return tensors, body


def _sections(run: TrainingRun, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    known = WeightNames(run.model, run.own)
    taken: set[str] = set()

    def keep(key: str, name: str, tensor: torch.Tensor) -> str:
        while key in taken:  # of two paths that read alike
            key += "'"
        taken.add(key)
        parameter = known.parameter(name, tensor)
        if parameter is None or run.writes(parameter):
            tensors[key] = tensor
        return key

    found = {}
    for section, value in run.sections.items():
        stateful = isinstance(value, Stateful)
        found[section] = {
            "type": type(value).__name__ if stateful else "",
            "state": encode(state_of(value), section, keep, known.of if stateful else known.of_whole),
        }
    return found
