"""An optimizer's state by the names of parameters, and back into one that has others of them on this rank."""

from typing import Any

import torch
from torch import nn

from fxpipe.errors import RunError
from fxpipe.run.optimizer_steps import ELSEWHERE
from fxpipe.run.ownership import as_is
from fxpipe.run.saves.checkpoint import Checkpoint
from fxpipe.run.saves.run import Stateful, TrainingRun
from fxpipe.run.saves.values import decode, encode


def _parameter_names(run: TrainingRun, optimizer: torch.optim.Optimizer) -> list[dict[str, nn.Parameter]]:
    """Of every group, its parameters by name; what a rank that trains nothing gives its optimizer is left out."""
    names = {id(parameter): name for name, parameter in run.model.named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        if any(id(parameter) not in names and parameter.numel() for parameter in group["params"]):
            raise RunError(
                f"group {number} of the optimizer has parameters that are not the model's: give them an optimizer of "
                "their own, and save both through extra"
            )
    return [{names[id(p)]: p for p in group["params"] if id(p) in names} for group in optimizer.param_groups]


def optimizer_state(
    run: TrainingRun, called: str, optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Every group's options and parameters; the states of those that this rank writes, whose `tensors` are added."""

    def keep(key: str, name: str, tensor: torch.Tensor) -> str:
        tensors[key] = tensor
        return key

    if not isinstance(optimizer, Stateful) or not hasattr(optimizer, "param_groups"):
        raise RunError(
            f"optimizer is a {type(optimizer).__name__}; give one of torch.optim, and further ones in extra, by name"
        )
    with as_is():
        state = optimizer.state_dict()
    if state.keys() != {"state", "param_groups"}:
        raise RunError(f"the optimizer's state has {', '.join(state)}, not state and param_groups alone: use extra")
    groups, named = [], _parameter_names(run, optimizer)
    for number, (group, parameters) in enumerate(zip(state["param_groups"], named, strict=True)):
        options = {name: value for name, value in group.items() if name not in ("params", "param_names", ELSEWHERE)}
        groups.append({"options": encode(options, f"{called}, group {number}", keep), "parameters": list(parameters)})
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    number_of = {id(p): number for number, p in zip(numbers, _parameters(optimizer), strict=True)}
    states = {
        name: encode(state["state"][number_of[id(p)]], f"{called}.{name}", keep)
        for parameters in named
        for name, p in parameters.items()
        if number_of[id(p)] in state["state"] and run.writes(p)
    }
    return {"type": type(optimizer).__name__, "groups": groups, "states": states}


def saved_state(
    run: TrainingRun, called: str, optimizer: torch.optim.Optimizer, checkpoint: Checkpoint
) -> dict[str, Any]:
    """As `optimizer.load_state_dict` takes it: its options, and the state of those of its parameters that are here.

    Raises:
        RunError: it is of another type, or has other groups than were saved, or lacks a parameter that has a state.
    """
    if any(called not in part.body for part in checkpoint.parts):
        raise RunError(f"no {called} was saved: load without one")
    saved = [part.body[called] for part in checkpoint.parts]
    groups = _parameter_names(run, optimizer)
    if type(optimizer).__name__ != saved[0]["type"]:
        raise RunError(f"the optimizer is a {type(optimizer).__name__}, and a {saved[0]['type']} was saved")
    if len(groups) != len(saved[0]["groups"]):
        raise RunError(f"the optimizer has {len(groups)} groups, and was saved with {len(saved[0]['groups'])}")
    was = {name: number for of in saved for number, group in enumerate(of["groups"]) for name in group["parameters"]}
    number_of = {name: number for number, named in enumerate(groups) for name in named}
    for name, number in number_of.items():
        if was.get(name, number) != number:
            raise RunError(f"{name} is in the optimizer's group {number}, and was saved in group {was[name]}")
    trees = {name: tree for of in saved for name, tree in of["states"].items()}
    here = {name: p for name, p in run.model.named_parameters() if name in trees and run.has(p)}
    lost = here.keys() - number_of.keys()
    if lost:
        raise RunError(f"{min(lost)} has a state in the checkpoint, but is not in the optimizer")
    numbers = {id(p): number for number, p in enumerate(_parameters(optimizer))}
    state = {numbers[id(p)]: _state_of(p, trees[name], checkpoint) for name, p in here.items()}
    loaded = [
        {**decode(of["options"], checkpoint.read_own), "params": [numbers[id(p)] for p in group["params"]]}
        for group, of in zip(optimizer.param_groups, checkpoint.own.body[called]["groups"], strict=True)
    ]
    return {"state": state, "param_groups": loaded}


def load_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """In the types that it was saved in: torch casts all but `step` to the parameter's, as float32 moments of weights
    in bfloat16, and `mu_product` of NAdam."""
    optimizer.load_state_dict(state)
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return  # which knows better
    for number, parameter in enumerate(_parameters(optimizer)):
        held = optimizer.state[parameter] if number in state["state"] else {}
        for name, value in held.items():
            held[name] = _as_saved(value, state["state"][number].get(name))


def _as_saved(value: Any, saved: Any) -> Any:
    """What was loaded, whose tensors, at any depth, have the types of those that were saved."""
    if isinstance(value, torch.Tensor) and isinstance(saved, torch.Tensor):
        return value if value.dtype == saved.dtype else saved.to(value.device)
    if isinstance(value, dict) and isinstance(saved, dict):
        return {key: _as_saved(item, saved.get(key)) for key, item in value.items()}
    if isinstance(value, list | tuple) and isinstance(saved, list | tuple) and len(value) == len(saved):
        return type(value)(map(_as_saved, value, saved))
    return value


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _state_of(parameter: nn.Parameter, tree: Any, checkpoint: Checkpoint) -> Any:
    """Its tensors in memory as the parameter is, where shaped like it: so an optimizer makes them, and adds them up."""

    def read(key: str) -> torch.Tensor:
        tensor = checkpoint.read(key)
        if tensor.shape != parameter.shape:
            return tensor
        return torch.empty_like(parameter, dtype=tensor.dtype, device="cpu", requires_grad=False).copy_(tensor)

    return decode(tree, read)
