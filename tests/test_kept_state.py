"""What forward keeps in Python between calls: seen wherever it is, refused where the next call would compute something
else, and as it was before once the model is compiled."""

import functools
import itertools
import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from fxpipe.capture import Capture
from fxpipe.errors import CaptureError
from tests.captured import captured

CALLS = 0
GENERATOR = numpy.random.RandomState(0)


class Keeper(nn.Module):
    """Calls a function between two layers, which finds `kept` and keeps it."""

    calls = 0

    def __init__(self, kept: Any, between: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.kept, self.between = kept, between
        self.register_buffer("written", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.last(self.between(self, self.first(x))).square().mean()
        return loss

    def example_inputs(self, batch_size: int) -> tuple[Tensor, ...]:
        return (torch.ones(batch_size, 4),)


def attribute(s: Keeper, h: Tensor) -> Tensor:
    s.kept = s.kept + h.detach().mean()
    return h * s.kept


def of_object(s: Keeper, h: Tensor) -> Tensor:
    s.kept.calls += 1
    return h * s.kept.calls


def of_second_trace(s: Keeper, h: Tensor) -> Tensor:
    if not torch.compiler.is_compiling() and h.sum() > 1e9:
        raise ValueError
    return of_object(s, h)


def of_class(s: Keeper, h: Tensor) -> Tensor:
    Keeper.calls += 1
    return h * Keeper.calls


def of_globals(s: Keeper, h: Tensor) -> Tensor:
    global CALLS
    CALLS += 1
    return h * CALLS


def in_dict(s: Keeper, h: Tensor) -> Tensor:
    s.kept["calls"] = s.kept.get("calls", 0) + 1
    return h * s.kept["calls"]


def in_list(s: Keeper, h: Tensor) -> Tensor:
    s.kept.append(h.detach().mean())
    return h + s.kept[0]


def in_array(s: Keeper, h: Tensor) -> Tensor:
    s.kept += 1
    return h * float(s.kept[0])


def towards(s: Keeper, h: Tensor) -> Tensor:
    s.kept.now = 0.5 * s.kept.now + 0.5 * s.kept.goal
    return h * s.kept.now


def around() -> Any:
    calls = 0

    def of_variable(s: Keeper, h: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return h * calls

    return of_variable


def of_method(s: Keeper, h: Tensor) -> Tensor:
    return h * s.kept()  # type: ignore[no-any-return]


class Counter:
    """By a method of its own."""

    calls = 0

    def count(self) -> int:
        self.calls += 1
        return self.calls


def of_later_calls(s: Keeper, h: Tensor) -> Tensor:
    """As prompt-to-prompt does, in a window of steps."""
    s.kept.calls = 1 + s.kept.calls
    return h * 2 if 10 <= s.kept.calls < 20 else h


def of_weights(s: Keeper, h: Tensor) -> Tensor:
    if s.kept is None:
        s.kept = s.first.weight.detach()[0]
    return h * s.kept


def of_written(s: Keeper, h: Tensor) -> Tensor:
    if s.kept is None:
        s.kept = s.written * 2
    s.written += 1
    return h * s.kept


def drawn(s: Keeper, h: Tensor) -> Tensor:
    if s.kept is None:
        s.kept = torch.rand(4)
    return h * s.kept


@pytest.mark.parametrize(
    ("kept", "between", "says"),
    [
        (torch.ones(()), attribute, "'kept', a tensor before, to a tensor, and computes something else the next"),
        (SimpleNamespace(calls=0), of_object, "'kept.calls', 0 before, to 1, and computes"),
        (torch.zeros(()), lambda s, h: setattr(s, "kept", s.kept + 1.0) or h * s.kept, "'kept', a tensor before"),
        (SimpleNamespace(now=torch.ones(4), goal=torch.ones(4)), towards, "'kept.now', a tensor before, to a tensor"),
        (Counter().count, of_method, "'Counter.calls', new, to 1, and computes"),
        (SimpleNamespace(calls=0), of_later_calls, "'kept.calls', 0 before, to 1, and may compute .* a later"),
        (SimpleNamespace(calls=0), of_second_trace, "'kept.calls', 0 before, to 1, and computes"),
        (None, of_class, "'Keeper.calls', 0 before, to 1, and computes"),
        (None, of_globals, "'tests.test_kept_state.CALLS', 0 before, to 1, and computes"),
        ({}, in_dict, r"\"kept\['calls'\]\", new, to 1, and computes"),
        ([], in_list, r"'kept\[0\]', new, to a tensor, and computes"),
        (numpy.zeros(2), in_array, "'kept', b.* before, to b.*, and computes"),
        (None, around(), "'of_variable.calls', 0 before, to 1, and computes"),
        (itertools.cycle([1, 2]), lambda s, h: h * next(s.kept), "takes the next of a cycle that the model keeps"),
        (None, of_weights, "'kept', None before, to a tensor, and computes"),
        (None, of_written, "'kept', None before, to a tensor, and computes"),
        (None, drawn, "'kept', None before, to a tensor, and computes"),
        (random.Random(0), lambda s, h: h * s.kept.random(), "draws from Python's or numpy's random"),
        (numpy.random.default_rng(0), lambda s, h: h * s.kept.random(), "draws from Python's or numpy's random"),
        (None, lambda s, h: h * float(GENERATOR.rand()), "draws from Python's or numpy's random"),
    ],
)  # fmt: skip
def test_what_the_next_call_would_read_is_refused_and_put_back(kept: Any, between: Any, says: str) -> None:
    before = repr(kept)
    with pytest.raises(CaptureError, match=says):
        captured(Keeper(kept, between))
    assert (Keeper.calls, CALLS, repr(kept)) == (0, 0, before)


def counted(decides: Callable[[int], Any]) -> Any:
    """Multiplies by two at some later calls."""

    def between(s: Keeper, h: Tensor) -> Tensor:
        s.kept.calls += 1
        return h * 2 if decides(s.kept.calls) else h

    return between


def grown(s: Keeper, h: Tensor) -> Tensor:
    s.kept.append(0)
    return h * 2 if len(s.kept) == 12 else h


def put_anew(s: Keeper, h: Tensor) -> Tensor:
    s.kept = {"calls": [s.kept["calls"][0] + 1]}
    return h * 2 if s.kept["calls"][0] > 9 else h


def taken(s: Keeper, h: Tensor) -> Tensor:
    return h * s.kept.pop(0)  # type: ignore[no-any-return]


def in_array_later(s: Keeper, h: Tensor) -> Tensor:
    s.kept += 1
    return h * 2 if s.kept[0] > 9 else h


def late(s: Keeper, h: Tensor) -> Tensor:
    """By what the call before has set."""
    s.kept.calls, before = s.kept.calls + 1, s.kept.late
    s.kept.late = s.kept.late or s.kept.calls > 9
    return h * 2 if before else h


def modes(s: Keeper, h: Tensor) -> Tensor:
    s.kept = {"a": "b", "b": "c", "c": "a"}[s.kept]
    return h * 2 if s.kept == "a" else h


def of_no_part(s: Keeper, h: Tensor) -> Tensor:
    """In a module that a list holds."""
    s.kept[0][0].calls += 1
    return h * 2 if s.kept[0][0].calls > 9 else h


def no_part() -> list[nn.Module]:
    inside: Any = nn.Identity()
    inside.calls = 0
    return [nn.Sequential(inside)]


FACTORS = [1.0] * 9 + [2.0] * 9
TEXTS = {str(number): factor for number, factor in enumerate(FACTORS)}


@pytest.mark.parametrize(
    "decides",
    [
        lambda n: n % 4 == 3, lambda n: 10 <= n < 20, lambda n: n > 10 and (n % 5 == 3 and n > 100), lambda n: n > 9999,
        lambda n: int(n) > 9, lambda n: float(n) > 9, lambda n: FACTORS[n] > 1, lambda n: TEXTS[str(n)] > 1,
        lambda n: n in {9, 19}, lambda n: n in range(9, 19), lambda n: round(n / 10) == 3, lambda n: -n % 7 == 1,
        lambda n: n >> 3, lambda n: math.sqrt(n) > 9, lambda n: range(n // 9), lambda n: torch.tensor(n).tolist() > 9,
    ],
)  # fmt: skip
def test_whatever_later_calls_decide_by_a_count(decides: Callable[[int], Any]) -> None:
    with pytest.raises(
        CaptureError, match=r"'kept.calls', 0 before, to 1, and may compute something else a later time"
    ):
        captured(Keeper(SimpleNamespace(calls=0), counted(decides)))


@pytest.mark.parametrize(
    ("kept", "between"),
    [
        ([], grown), ({"calls": [0]}, put_anew), ([1.0, 1.0, 1.0, 2.0], taken), (numpy.zeros(1), in_array_later),
        (SimpleNamespace(calls=0, late=False), late), ("a", modes), (no_part(), of_no_part),
    ],
)  # fmt: skip
def test_whatever_else_later_calls_decide_by(kept: Any, between: Any) -> None:
    with pytest.raises(CaptureError, match="may compute something else a later time"):
        captured(Keeper(kept, between))


def logging(s: Keeper, h: Tensor) -> Tensor:
    s.kept["calls"] += 1
    if not s.kept["calls"] % 100 or s.kept["calls"] > 1e6:
        s.kept["told"] = f"{s.kept['calls']}"
    return h


def windows(s: Keeper, h: Tensor) -> Tensor:
    """As prompt-to-prompt counts layers and steps, with no window to edit in."""
    s.kept["layer"] += 1
    if s.kept["layer"] == 2:
        s.kept["layer"], s.kept["calls"] = 0, (s.kept["calls"] + 1) % 50
    return h * 2 if 10 <= s.kept["calls"] < 5 else h


def listing(s: Keeper, h: Tensor) -> Tensor:
    s.kept.setdefault("shapes", []).append(h.shape[1:])
    if len(s.kept["shapes"]) > 20:
        s.kept["shapes"].clear()
    return h


@pytest.mark.parametrize("between", [logging, windows, listing])
def test_what_forward_counts_and_does_not_compute_by(between: Any) -> None:
    captured(Keeper(kept := {"calls": 7, "layer": 1}, between))
    assert kept == {"calls": 7, "layer": 1}


def cosines(s: Keeper, h: Tensor) -> Tensor:
    if h.shape[-1] not in s.kept:
        s.kept[h.shape[-1]] = torch.arange(h.shape[-1]).cos()
    return h * s.kept[h.shape[-1]]


def factors(s: Keeper, h: Tensor) -> Tensor:
    """As rotary factors are kept, with the length that they are for."""
    if s.kept.length < h.shape[-1]:
        s.kept.length, s.kept.tables = h.shape[-1], [torch.arange(h.shape[-1]).cos()]
    return h * s.kept.tables[0]


@functools.lru_cache
def table(size: int) -> Tensor:
    return torch.arange(size).cos()


@pytest.mark.parametrize(
    ("kept", "between"),
    [
        ({}, cosines),
        (SimpleNamespace(length=0, tables=[]), factors),
        (None, lambda s, h: h * table(h.shape[-1])),
        (functools.cache(lambda size: torch.arange(size).cos()), lambda s, h: h * s.kept(h.shape[-1])),
    ],
)
def test_what_constants_make_is_computed_in_every_call_and_not_kept(kept: Any, between: Any) -> None:
    model = Keeper(kept, between)
    graph, again = captured(model), captured(model)
    assert _targets(graph) == _targets(again)
    assert sum("cos" in target for target in _targets(graph)) == 1
    assert type(model(torch.ones(2, 4))) is Tensor


class Installed(nn.Module):
    """As diffusers' NucleusMoEEmbedRope: a table by its size, kept by its class."""

    __module__ = "torch.nn.modules.linear"

    @functools.lru_cache(maxsize=4)  # noqa: B019
    def table(self, size: int) -> Tensor:
        return torch.arange(size).cos()

    @classmethod
    @functools.lru_cache(maxsize=1)
    def last_table(cls, size: int) -> Tensor:
        return torch.arange(size).sin()


def test_tables_of_a_trace_that_classes_of_libraries_keep_go_with_it() -> None:
    """Also where there was one before, and another has no room."""
    inside = Installed()
    inside.last_table(3)
    model = Keeper(inside, lambda s, h: h * s.kept.table(h.shape[-1]) + s.kept.last_table(h.shape[-1]))
    captured(model)
    assert Installed.table.cache_info().currsize == 0
    assert torch.equal(inside.table(4), torch.arange(4).cos())
    assert torch.equal(inside.last_table(4), torch.arange(4).sin())


def test_a_table_that_forward_makes_equal_to_itself_is_no_other() -> None:
    model = Keeper(torch.ones(4), lambda s, h: setattr(s, "kept", s.kept * 1.0) or h * s.kept)
    captured(model)
    assert torch.equal(model.kept, torch.ones(4))


def last_loss(s: Keeper, h: Tensor) -> Tensor:
    s.kept = h.detach().mean()
    return h


def test_what_only_others_read_is_told() -> None:
    model = Keeper(None, last_loss)
    with pytest.warns(UserWarning, match="'kept', None before, to a tensor, which engines and samplers leave as it is"):
        captured(model)
    assert model.kept is None


def test_what_has_its_gradient_from_outside_is_refused() -> None:
    def scaled(s: Keeper, h: Tensor) -> Tensor:
        return h * s.kept  # type: ignore[no-any-return]

    model = Keeper(None, scaled)
    model.kept = torch.ones((), requires_grad=True)
    with pytest.raises(CaptureError, match="forward reads 'kept', a tensor that requires grad and is no parameter"):
        captured(model)
    model.kept = model.kept.detach()
    captured(model)


@pytest.mark.parametrize("show", [lambda weight: [weight], lambda weight: [weight.detach()[:2]]])
def test_a_trained_weight_that_is_read_from_a_list_is_refused(show: Callable[[Tensor], list[Tensor]]) -> None:
    model = Keeper(None, lambda s, h: h + s.kept[0].sum())
    model.kept = show(model.last.weight)
    with pytest.raises(CaptureError, match=r"reads the memory of 'last.weight', which is trained, by another tensor"):
        captured(model)
    model.last.requires_grad_(False)
    captured(model)


def _targets(graph: Capture) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes]
