"""Costs as data, and the roofline's seconds, by hand."""

import dataclasses
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import sympy
import torch

from cost_models.roofline import Roofline
from fxpipe.capture.sizes import evaluate
from fxpipe.costs import COUNT_NAMES, NodeCost, total_cost
from fxpipe.costs.model import CostModel, NodeSeconds
from fxpipe.costs.table import CostTable
from fxpipe.errors import CompileError
from fxpipe.options import held_cost_model
from tests.node_numbers import counts_of, seconds_of
from tests.test_sample_plan import compiled

S = sympy.Symbol("s", integer=True, positive=True)
TOY = Roofline(
    peak_flops={torch.float32: 100.0, torch.float16: 400.0},
    bandwidth=10.0,
    matrix_efficiency=0.5,
    memory_efficiency=0.25,
    launch_seconds=1.0,
)


def cost(flops: sympy.Expr, read: sympy.Expr, written: sympy.Expr, dtype: torch.dtype | None = None) -> NodeCost:
    return NodeCost(
        forward_flops=flops,
        backward_input_flops=2 * flops,
        backward_weight_flops=3 * flops,
        bytes_read=read,
        bytes_written=written,
        backward_input_bytes=4 * read,
        backward_weight_bytes=5 * read,
        dtype=dtype,
    )


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


def test_tables_count_in_the_order_of_their_nodes() -> None:
    table = CostTable({"a": cost(10 * S, 3 * S + 1, S), "b": NodeCost(), "c": cost(S**2, S, sympy.S.One)})
    counts = table.counts(2)
    assert {field.name for field in dataclasses.fields(counts)} == set(COUNT_NAMES)
    for name in COUNT_NAMES:
        assert getattr(counts, name).tolist() == [getattr(counts_of(table[node], 2), name) for node in table]
    assert counts.forward_flops.tolist() == [20, 0, 4]
    assert table.by_name(counts.bytes_read) == {"a": 7, "b": 0, "c": 2}
    assert table.positions(["c", "a"]).tolist() == [2, 0]


def test_costs_add_up_field_by_field() -> None:
    terms = [cost(k * S, sympy.Integer(k), k * S**2) for k in (1, 2, 3)]
    total = total_cost(terms)
    assert total == cost(6 * S, sympy.Integer(6), 6 * S**2)
    assert total_cost([]) == NodeCost()


def test_a_sum_computes_in_the_widest_type() -> None:
    none, half, full = NodeCost(), NodeCost(dtype=torch.float16), NodeCost(dtype=torch.float32)
    assert total_cost([none, half]).dtype is torch.float16
    assert total_cost([half, full, none]).dtype is torch.float32
    assert total_cost([none, none]).dtype is None


def test_roofline_takes_the_lower_ceiling_and_adds_the_launch() -> None:
    compute_bound = cost(100 * S, sympy.S.One, S, torch.float32)
    assert seconds_of(TOY, compute_bound, 2).forward == 200 / 50 + 1
    assert seconds_of(TOY, compute_bound, 2).backward_input == 400 / 50 + 1
    assert seconds_of(TOY, compute_bound, 2).backward_weight == 600 / 50 + 1
    assert seconds_of(TOY, compute_bound, 2).backward == 1000 / 50 + 2
    memory_bound = cost(sympy.S.Zero, 10 * S, 5 * S)
    assert seconds_of(TOY, memory_bound, 2).forward == 30 / 2.5 + 1
    assert seconds_of(TOY, memory_bound, 2).backward == (80 + 100) / 2.5 + 2


def test_roofline_peak_is_that_of_the_type() -> None:
    half, double = (cost(400 * S, S, S, dtype) for dtype in (torch.float16, torch.float64))
    assert seconds_of(TOY, half, 1).forward == 400 / 200 + 1
    assert seconds_of(TOY, double, 1).forward == 400 / 50 + 1  # not in the table: the lowest
    assert seconds_of(replace(TOY, peak_flops=100.0, launch_seconds=0.0), double, 1).forward == 400 / 50


def test_what_moves_nothing_takes_no_time() -> None:
    assert seconds_of(TOY, NodeCost(), 8).forward == seconds_of(TOY, NodeCost(), 8).backward == 0.0


def test_a_summed_cost_is_a_lower_bound_on_the_sum_of_seconds() -> None:
    nodes = [cost(100 * S, S, S, torch.float32), cost(sympy.S.Zero, 40 * S, S)]
    assert seconds_of(TOY, total_cost(nodes), 2).forward < sum(seconds_of(TOY, node, 2).forward for node in nodes)


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
        replace(TOY, **{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [float("nan"), -1.0, float("inf"), None, "1"])
@pytest.mark.parametrize("method", ["moving_seconds", "chain_seconds", "drawing_seconds", "operation_seconds"])
def test_answers_of_a_model_of_ones_own_are_held_against_what_seconds_are(method: str, wrong: object) -> None:
    def answer(self: CostModel, *_: object) -> object:
        return [wrong] if method == "operation_seconds" else wrong

    seconds = {"seconds": lambda self, table, num_samples: TOY.seconds(table, num_samples)}
    held = held_cost_model(type("Mine", (CostModel,), {**seconds, method: answer})())
    asked: dict[str, tuple[object, ...]] = {
        "moving_seconds": (8, 8), "chain_seconds": ([(8, 8)],), "drawing_seconds": ("", 8),
        "operation_seconds": ([...],),
    }  # fmt: skip
    if (method, wrong) == ("operation_seconds", None):  # not timed
        assert held.operation_seconds([...]) == [None]  # type: ignore[list-item]
        return
    with pytest.raises(CompileError, match=f"cost_model Mine: {method} is .*; seconds are finite, and 0 or more"):
        getattr(held, method)(*asked[method])


class Plain:
    """Inherits nothing, and answers with an array."""

    memory_bytes = None

    def seconds(self, table: CostTable, num_samples: int) -> NodeSeconds:
        return TOY.seconds(table, num_samples)

    def moving_seconds(self, bytes_read: int, bytes_written: int) -> float:
        return 2.0

    def drawing_seconds(self, target: str, num_bytes: int) -> float:
        return 0.0

    def operation_seconds(self, operations: Sequence[object]) -> object:
        return np.ones(len(operations))


def test_models_of_any_class_answer_with_any_numbers() -> None:
    held = held_cost_model(Plain())
    assert held.operation_seconds([...]) == [1.0]  # type: ignore[list-item]
    assert held.chain_seconds([(8, 8), (8, 8)]) == 4.0


def test_a_device_on_which_everything_is_free_is_planned_for() -> None:
    class Free(CostModel):
        def seconds(self, table: CostTable, num_samples: int) -> NodeSeconds:
            return NodeSeconds(*(np.zeros(len(table)) for _ in range(3)))

    made = compiled(2, cost_model=Free())
    assert made.plan.expects is not None
    assert made.verify().ok
