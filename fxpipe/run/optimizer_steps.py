"""Whether all ranks step the same optimizer between steps of an engine, with the same options.

    rank 0   engine.step   optimizer.step   engine.step        told: stepped, {"lr of group 0": 0.1, ...}
    rank 1   engine.step                    engine.step        told: left out

Were ranks to differ, the parts of a model would be of different runs. Optimizers over parts of a model, such as what a
rank trains itself, may differ, and are not compared.

    rank 0   state = optimizer.state_dict()       told: without the states of what rank 1 trains, whose places it notes
    rank 1   optimizer.load_state_dict(state)     refused at the next step: what is trained here would begin anew
"""

import warnings
import weakref
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fxpipe.errors import RunError
from fxpipe.run.ownership import is_idle, num_claims, owners, uses_as_is

_PLAIN = (type(None), bool, int, float, str, tuple)
ELSEWHERE = "trained on other ranks"  # of a group whose state was taken: the places of these parameters
_BY_NAME = "engine.save and engine.load keep all states, by the names of parameters"
_watching: "weakref.WeakSet[OptimizerSteps]" = weakref.WeakSet()
_telling: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()


class OptimizerSteps:
    """Those of optimizers over a whole model, of which this rank trains a part."""

    def __init__(self, model: nn.Module, rank: int) -> None:
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._rank, self._has_parts = rank, False
        self._count, self._options = 0, dict[str, Any]()
        self._known: weakref.WeakKeyDictionary[Optimizer, tuple[Any, bool]] = weakref.WeakKeyDictionary()
        _watching.add(self)

    def saw(self, optimizer: Optimizer) -> None:
        state = num_claims(), [len(group["params"]) for group in optimizer.param_groups]
        known, is_of_all = self._known.get(optimizer, (None, False))
        if known != state:
            is_of_all = self._is_of_all(optimizer)
            self._known[optimizer] = state, is_of_all
        if not is_of_all:
            return
        self._count += 1
        self._options = {"optimizer": type(optimizer).__name__, "number of optimizer steps since": self._count}
        for number, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                if type(value) in _PLAIN and name != "param_names":
                    told = float(value) if type(value) is int else value
                    self._options[f"{name} of group {number} of its optimizer"] = told

    def _is_of_all(self, optimizer: Optimizer) -> bool:
        """Whether it is over all that is trained. Of one over a part, which may be what this rank trains, it is noted
        that there is such a one."""
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        trained = [parameter for parameter in self._trained if owners(parameter) and not is_idle(parameter)]
        of_these = sum(id(parameter) in held for parameter in trained)
        self._has_parts |= 0 < of_these < len(trained)
        if of_these:
            tell_parts(optimizer, self._rank)
        return 0 < of_these == len(trained)

    def taken(self) -> tuple[bool | None, dict[str, Any]]:
        """Whether one was stepped since the last call, None where that is not compared, and the last one's options;
        forgets both."""
        options, self._options, self._count = self._options, {}, 0
        is_told = options or (not self._has_parts and any(self._rank in owners(p) for p in self._trained))
        return bool(options) if is_told else None, options


def tell_parts(optimizer: Any, rank: int) -> None:
    """From now on, whoever takes its state by `state_dict` is told what that is without."""
    if isinstance(optimizer, Optimizer) and optimizer not in _telling:
        optimizer.register_state_dict_post_hook(partial(_tell_part, rank))
        _telling.add(optimizer)


def _tell_part(rank: int, optimizer: Optimizer, state: dict[str, Any]) -> None:
    if uses_as_is():
        return
    num_trained = num_elsewhere = 0
    for group, taken in zip(optimizer.param_groups, state["param_groups"], strict=True):
        trained = {place: owners(p) for place, p in enumerate(group["params"]) if owners(p) and not is_idle(p)}
        elsewhere = [place for place, ranks in trained.items() if rank not in ranks]
        num_trained, num_elsewhere = num_trained + len(trained), num_elsewhere + len(elsewhere)
        here = [group["params"][place] for place in trained.keys() - elsewhere]
        if elsewhere and optimizer.state and (not here or any(p in optimizer.state for p in here)):
            taken[ELSEWHERE] = elsewhere
    if num_elsewhere:
        warnings.warn(
            f"optimizer.state_dict() on rank {rank} is without the states of {num_elsewhere} parameters of "
            f"{num_trained}, which other ranks train and a checkpoint of it would lack: engine.save writes all, by "
            "name",
            stacklevel=5,
        )


def _refuse_part(optimizer: Optimizer, *_: Any) -> None:
    """What a rank has of an optimizer's state has been loaded where other parameters are trained."""
    begun = []  # the groups of which a gradient has come of what was trained elsewhere
    num_here = 0
    for group in optimizer.param_groups:
        marked = [group["params"][place] for place in group.get(ELSEWHERE, ())]
        here = sum(p.grad is not None for p in marked)
        if here and not any(p in optimizer.state for p in marked):
            raise RunError(
                f"the optimizer was given a rank's states, which are without those of {here} parameters that are "
                f"trained here and were on other ranks: they would begin anew; {_BY_NAME}"
            )
        begun += [group] * bool(here)
        num_here += here
    for group in begun:
        del group[ELSEWHERE]
    if num_here:
        warnings.warn(
            f"the optimizer was given a rank's states, and {num_here} parameters that are trained here were on other "
            "ranks: unless these were put together by hand, theirs are out of date, and what is without any begins "
            f"anew; {_BY_NAME}",
            stacklevel=1,
        )


def _stepped(optimizer: Optimizer, *_: Any) -> None:
    for steps in [*_watching]:
        steps.saw(optimizer)


register_optimizer_step_pre_hook(_refuse_part)
register_optimizer_step_post_hook(_stepped)
