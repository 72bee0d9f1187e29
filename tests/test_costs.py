"""Costs as data, and the roofline's seconds, by hand."""

import dataclasses

import pytest
import sympy
import torch

from cost_models.roofline import Roofline
from fxpipe.costs import Counts, NodeCost, evaluate, total_cost
from fxpipe.errors import CompileError

S = sympy.Symbol("s", integer=True, positive=True)
TOY = Roofline({torch.float32: 100.0, torch.float16: 400.0}, 10.0, 0.5, 0.25, 1.0)


def cost(flops: sympy.Expr, read: sympy.Expr, written: sympy.Expr, dtype: torch.dtype | None = None) -> NodeCost:
    return NodeCost(flops, 2 * flops, 3 * flops, read, written, 4 * read, 5 * read, dtype)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        (sympy.Integer(7), 7),
        (S, 3),
        (12 * S, 36),
        (4 * S**2 + S + 5, 44),
        (sympy.floor(S / 2) * 10, 10),
        (S * (S + 1), 12),
    ],
)
def test_evaluate(expression: sympy.Expr, value: int) -> None:
    found = evaluate(expression, 3)
    assert found == value
    assert type(found) is int


def test_every_symbol_is_the_batch() -> None:
    assert evaluate(S * 6 + sympy.Symbol("t"), 5) == 35


def test_at_gives_plain_integers() -> None:
    counts = cost(10 * S, 3 * S + 1, S).at(2)
    assert counts == Counts(20, 40, 60, 7, 2, 28, 35)
    assert all(type(value) is int for value in dataclasses.astuple(counts))


def test_costs_add_up_field_by_field() -> None:
    terms = [cost(k * S, sympy.Integer(k), k * S**2) for k in (1, 2, 3)]
    total = total_cost(terms)
    assert total == terms[0] + terms[1] + terms[2] == cost(6 * S, sympy.Integer(6), 6 * S**2)
    assert total_cost([]) == NodeCost()


def test_a_sum_computes_in_the_widest_type() -> None:
    none, half, full = NodeCost(), NodeCost(dtype=torch.float16), NodeCost(dtype=torch.float32)
    assert (none + half).dtype is torch.float16
    assert (half + full + none).dtype is torch.float32
    assert (none + none).dtype is None


def test_roofline_takes_the_lower_ceiling_and_adds_the_launch() -> None:
    compute_bound = cost(100 * S, sympy.S.One, S, torch.float32)
    assert TOY.forward_seconds(compute_bound, 2) == 200 / 50 + 1
    assert TOY.backward_input_seconds(compute_bound, 2) == 400 / 50 + 1
    assert TOY.backward_weight_seconds(compute_bound, 2) == 600 / 50 + 1
    assert TOY.backward_seconds(compute_bound, 2) == 1000 / 50 + 2
    memory_bound = cost(sympy.S.Zero, 10 * S, 5 * S)
    assert TOY.forward_seconds(memory_bound, 2) == 30 / 2.5 + 1
    assert TOY.backward_seconds(memory_bound, 2) == (80 + 100) / 2.5 + 2


def test_roofline_peak_is_that_of_the_type() -> None:
    assert TOY.forward_seconds(cost(400 * S, S, S, torch.float16), 1) == 400 / 200 + 1
    assert TOY.forward_seconds(cost(400 * S, S, S, torch.float64), 1) == 400 / 50 + 1  # not in the table: the lowest
    assert Roofline(100, 1e9, 1, 1, 0).forward_seconds(cost(400 * S, S, S, torch.float64), 1) == 4


def test_what_moves_nothing_takes_no_time() -> None:
    assert TOY.forward_seconds(NodeCost(), 8) == TOY.backward_seconds(NodeCost(), 8) == 0.0


def test_a_summed_cost_is_a_lower_bound_on_the_sum_of_seconds() -> None:
    nodes = [cost(100 * S, S, S, torch.float32), cost(sympy.S.Zero, 40 * S, S)]
    assert TOY.forward_seconds(total_cost(nodes), 2) < sum(TOY.forward_seconds(node, 2) for node in nodes)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("peak_flops", 0.0, "must be positive"),
        ("peak_flops", {}, "must be positive"),
        ("bandwidth", -1.0, "must be positive"),
        ("matrix_efficiency", 1.5, "matrix_efficiency"),
        ("memory_efficiency", 0.0, "memory_efficiency"),
        ("launch_seconds", -1e-6, "launch_seconds"),
    ],
)
def test_impossible_devices_are_refused(field: str, value: object, message: str) -> None:
    with pytest.raises(CompileError, match=message):
        dataclasses.replace(TOY, **{field: value})  # type: ignore[arg-type]
