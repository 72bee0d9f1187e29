"""What settings are made of is looked at before every call without a look at each: nothing of it may change unseen."""

import functools
from collections import OrderedDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fxpipe.capture.holders import named_by
from fxpipe.capture.settings import Untouched, settings_of

FACTORS = {"a": 1.0}


class Plain:
    x = 1.0


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 1.0


class Own(nn.Module):
    shared = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.number, self.listed, self.kept = 1.0, [[2.0]], {"a": {"b": 1.0}}
        self.waiting, self.known, self.array = deque([1.0]), {1.0}, np.ones(2)
        self.slotted, self.spaced, self.plain = Slotted(), SimpleNamespace(inner=SimpleNamespace(x=1.0)), Plain()
        self.others, self.ordered = [nn.Dropout()], OrderedDict(a=1.0, b=2.0)
        self.partial = functools.partial(max, default=1.0)
        self.mark = torch.zeros(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layer(x) * FACTORS["a"] * self.shared
        return made


CHANGES: dict[str, Callable[[Own], Any]] = {
    "number": lambda m: setattr(m, "number", 2.0),
    "new": lambda m: setattr(m, "another", 2.0),
    "gone": lambda m: delattr(m, "number"),
    "list": lambda m: m.listed[0].append(3.0),
    "dict": lambda m: m.kept["a"].update(b=2.0),
    "deque": lambda m: m.waiting.append(2.0),
    "set": lambda m: m.known.add(2.0),
    "array": lambda m: m.array.__setitem__(0, 2.0),
    "slot": lambda m: setattr(m.slotted, "value", 2.0),
    "object": lambda m: setattr(m.spaced.inner, "x", 2.0),
    "other's class": lambda m: setattr(m.plain, "__class__", type("Other", (Plain,), {})),
    "order": lambda m: m.ordered.move_to_end("a"),
    "forward elsewhere": lambda m: setattr(type(m.others[0]), "forward", lambda self, x: x),
    "module elsewhere": lambda m: setattr(m.others[0], "p", 0.1),
    "keyword": lambda m: m.partial.keywords.update(default=2.0),
    "class": lambda m: setattr(type(m), "shared", 2.0),
    "global": lambda m: FACTORS.update(a=2.0),
    "hook": lambda m: m.layer.register_forward_hook(lambda *_: None),
    "global hook": lambda m: nn.modules.module.register_module_forward_hook(lambda *_: None),
    "module": lambda m: setattr(m, "layer", nn.Linear(2, 2)),
    "its class": lambda m: setattr(m.layer, "__class__", type("Linear", (nn.Linear,), {})),
    "forward": lambda m: setattr(m.layer, "forward", lambda x: x),
    "of its class": lambda m: setattr(type(m), "forward", lambda self, x: x),
    "parameter": lambda m: setattr(m.layer, "bias", nn.Parameter(m.layer.bias.detach().clone())),
    "equal number": lambda m: setattr(m, "mark", torch.zeros(1)),
    "type": lambda m: m.double(),
    "place": lambda m: m.to("meta"),
    "shape": lambda m: setattr(m.layer.weight, "data", torch.zeros(3, 2)),
    "attention": lambda m: setattr(nn.functional, "scaled_dot_product_attention", lambda *_: None),
    "default type": lambda m: torch.set_default_dtype(torch.float64),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_is_seen(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FACTORS, "a", 1.0)
    for owner, name in (
        (Own, "shared"), (Own, "forward"), (nn.Dropout, "forward"), (nn.functional, "scaled_dot_product_attention"),
        (nn.modules.module, "_global_forward_hooks"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(nn.modules.module, "_global_forward_hooks", OrderedDict())
    model, default = Own(), torch.get_default_dtype()
    untouched = Untouched(model, settings_of(model, named_by(model)))
    assert untouched.holds()
    for module in model.modules():
        module.training = module.training  # as train() does
    model.norm.running_mean.add_(1.0)  # type: ignore[union-attr]
    assert untouched.holds()
    try:
        CHANGES[change](model)
        assert not untouched.holds()
    finally:
        torch.set_default_dtype(default)
