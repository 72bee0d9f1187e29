"""Operations that are timed at their own sizes; models that do not are asked by counts."""

import pytest
import torch
from torch import fx

from cost_models import timed
from cost_models.roofline import Roofline
from cost_models.timed import Timed
from fxpipe.costs.operations import Operation
from fxpipe.plan import row_ops
from fxpipe.sampling.seconds import operation_seconds

aten = torch.ops.aten
BASE = Roofline(peak_flops=1e12, bandwidth=1e12, matrix_efficiency=1.0, memory_efficiency=1.0, launch_seconds=0.0)


def test_operations_of_equal_arguments_are_one() -> None:
    one, other = (Operation.of(aten.add.Tensor, torch.zeros(2, 3), torch.ones(2, 3), alpha=2) for _ in range(2))
    assert one == other
    assert one != Operation.of(aten.add.Tensor, torch.zeros(3, 2).t(), torch.ones(2, 3), alpha=2)  # other strides


def test_made_up_arguments_have_shape_strides_and_type() -> None:
    seen: list[torch.Tensor] = []
    given = torch.zeros(4, 6, dtype=torch.float64).t(), torch.zeros(3, dtype=torch.int64), torch.zeros(2) > 0
    Operation.of(lambda *tensors: seen.extend(tensors), *given).bound(torch.device("cpu"))()
    for made, like in zip(seen, given, strict=True):
        assert (made.shape, made.stride(), made.dtype) == (like.shape, like.stride(), like.dtype)
    assert seen[0].min() > 0
    assert not seen[1].any()  # valid as indices
    assert seen[2].all()  # a mask that lets all through


def product(rows: int) -> fx.Node:
    graph = fx.Graph()
    made = [graph.placeholder(name) for name in "xy"]
    for node in made:
        node.meta["val"] = torch.empty(rows, rows, device="meta")
    node = graph.call_function(aten.mm.default, tuple(made))
    node.meta["val"] = torch.empty(rows, rows, device="meta")
    return node


def test_what_is_timed_goes_before_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, seconds = [product(64), product(128), product(64)], iter(range(1, 100))
    monkeypatch.setattr(timed, "now", lambda device: float(next(seconds) ** 2))
    found = operation_seconds(Timed("cpu", BASE), nodes)
    # Rounds of both, clocks 1, 4, 9, 16, ...: the first is left out, and equal operations are run once.
    rounds = range(4, 4 * timed.ROUNDS, 4)
    first = sum((at + 2) ** 2 - (at + 1) ** 2 for at in rounds) / len(rounds)
    assert [found[node] for node in nodes] == pytest.approx([first, first + 4, first])


def test_what_cannot_be_run_is_counted() -> None:
    model = Timed("cpu", BASE)
    rows = torch.ones(4, dtype=torch.int64)
    outside = Operation.of(aten.index_select.default, torch.ones(0, 2), 0, rows)
    inside = Operation.of(row_ops.moments, torch.ones(1, 4, 2), 2)
    none, some = model.operation_seconds([outside, inside])
    assert none is None
    assert some is not None
    assert some > 0
    assert operation_seconds(BASE, [product(100)]).popitem()[1] == pytest.approx(2e6 / 1e12)


def test_timing_again_adds_to_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    outside = Operation.of(aten.index_select.default, torch.ones(0, 2), 0, torch.ones(4, dtype=torch.int64))
    inside, clock = Operation.of(aten.neg.default, torch.ones(2)), iter(range(1000))
    model = Timed("cpu", BASE)
    monkeypatch.setattr(timed, "now", lambda device: float(next(clock)))
    assert model.operation_seconds([outside, inside]) == [None, 1.0]
    monkeypatch.setattr(timed, "now", lambda device: 7.0 * next(clock))
    model.time_again()
    assert model.operation_seconds([outside, inside]) == [None, (timed.ROUNDS - 1 + 7) / timed.ROUNDS]
