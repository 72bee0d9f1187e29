"""Devices by name, mixed precision, small kernels, kinds of products, and the machine at hand."""

import json
from dataclasses import replace

import pytest
import sympy
import torch
from torch import nn
from torch.nn import functional as F

from cost_models.calibrate import measured
from cost_models.devices import DEVICES, device
from cost_models.flops import node_costs
from cost_models.roofline import Roofline
from fxpipe.costs import COUNT_NAMES, NodeCost, total_cost
from fxpipe.costs.model import CostModel, node_seconds
from fxpipe.costs.table import CostTable
from fxpipe.errors import CompileError
from tests.captured import captured
from tests.conftest import GOLDEN
from tests.node_numbers import seconds_of

S = sympy.Symbol("s", integer=True, positive=True)
TOY = Roofline(
    peak_flops={torch.float32: 100.0, torch.bfloat16: 400.0},
    bandwidth=10.0,
    matrix_efficiency=0.5,
    memory_efficiency=0.25,
    launch_seconds=1.0,
)


def cost(flops: int, num_bytes: int, dtype: torch.dtype = torch.float32, kind: str = "matrix") -> NodeCost:
    return NodeCost(forward_flops=flops * S, bytes_read=num_bytes * S, dtype=dtype, kind=kind)  # type: ignore[arg-type]


def test_devices_are_cost_models_and_faster_than_a_core() -> None:
    models: list[CostModel] = [device(name) for name in DEVICES]
    product = cost(10**12, 10**6, torch.float16)
    seconds = dict(zip(DEVICES, (seconds_of(model, product, 1).forward for model in models), strict=True))
    assert all(100 * value < seconds["CPU"] for name, value in seconds.items() if name != "CPU")
    assert seconds["H100"] == seconds["H200"] < seconds["A100-80GB"] == seconds["A100-40GB"] < seconds["V100-32GB"]
    moved = cost(0, 10**9)
    assert seconds_of(device("H200"), moved, 1).forward < seconds_of(device("H100"), moved, 1).forward


def test_more_of_a_peak_is_reached_where_the_rest_of_a_gpu_is_fast_beside_its_tensor_cores() -> None:
    product, attended = cost(10**16, 10**6, torch.bfloat16), cost(10**16, 10**6, torch.bfloat16, "attention")
    for large in (product, attended):
        reached = {  # of the peaks of their data sheets
            name: 10**16 / seconds_of(device(name), large, 1).forward / peak
            for name, peak in {"A100-80GB": 312e12, "H20": 148e12, "L20": 119.5e12, "B200": 2250e12}.items()
        }
        assert reached["A100-80GB"] < reached["H20"] < reached["L20"] < 0.9
        assert reached["B200"] == pytest.approx(reached["A100-80GB"], rel=0.01)  # no less, whatever its ratio
    # HunyuanVideo, most of it attention, takes an H20 3.5 times as long as an H100 (benchmarks/sampling_published.py),
    # whose peak is 6.7 times as high: 1.9 times as much of it is reached.
    assert 1.6 < device("H20").attention_efficiency / device("H100").attention_efficiency < 2.1  # type: ignore[operator]


@pytest.mark.parametrize("name", ["rtx 4090", "RTX-4090", "Rtx-4090", "4090", "NVIDIA GeForce RTX 4090"])
def test_names_are_spelled_freely(name: str) -> None:
    assert device(name) is DEVICES["RTX-4090"]


def test_precision_in_a_name() -> None:
    assert device("H100@bfloat16") == replace(DEVICES["H100"], compute_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("B300", "unknown device 'B300'; known are A100-80GB, A100-40GB"),
        ("H100@int8", "unknown precision 'int8' after '@'; choose one of bfloat16"),
        ("H100@", "unknown precision ''"),
        ("measured {}", "does not tell a measured device: 'peak_flops'; measure it again"),
        ("measured {", "does not tell a measured device"),
    ],
)
def test_unknown_names_are_refused(name: str, says: str) -> None:
    with pytest.raises(CompileError) as caught:
        device(name)
    assert says in str(caught.value)


def test_mixed_precision_computes_in_the_narrow_type_and_moves_its_bytes() -> None:
    mixed = replace(TOY, compute_dtype=torch.bfloat16)
    assert seconds_of(TOY, cost(400, 1), 1).forward == 400 / 50 + 1
    assert seconds_of(mixed, cost(400, 1), 1).forward == 400 / 200 + 1
    assert seconds_of(mixed, cost(0, 100), 1).forward == 50 / 2.5 + 1
    for dtype in (torch.bfloat16, torch.int64):  # already narrow; an index is not rounded
        assert seconds_of(mixed, cost(0, 100, dtype), 1).forward == seconds_of(TOY, cost(0, 100, dtype), 1).forward
    wide = replace(TOY, compute_dtype=torch.float64)
    assert seconds_of(wide, cost(400, 100), 1).forward == seconds_of(TOY, cost(400, 100), 1).forward


def test_kinds_of_products_have_their_own_efficiency() -> None:
    model = replace(TOY, convolution_efficiency=1.0, attention_efficiency=0.1)
    seconds = {kind: seconds_of(model, cost(400, 1, kind=kind), 1).forward - 1 for kind in KINDS}
    assert seconds == {"convolution": 4, "matrix": 8, "attention": 40}
    left_out = {seconds_of(TOY, cost(400, 1, kind=kind), 1).forward - 1 for kind in KINDS}
    assert left_out == {8}  # that of matrices


KINDS = ("convolution", "matrix", "attention")


class Kinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv1d(4, 4, 3, padding=1), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(self.conv(x))
        return F.scaled_dot_product_attention(x, x, x).mean()

    def example_inputs(self, batch_size: int) -> tuple[torch.Tensor]:
        return (torch.randn(batch_size, 4, 8),)


def test_nodes_know_their_kind() -> None:
    costs = node_costs(captured(Kinds()).graph.nodes)
    found = [cost.kind for cost in costs.values() if cost.bytes_written != 0]
    assert found == ["convolution", "matrix", "attention", None]
    assert total_cost(costs.values()).kind is None
    assert total_cost([cost for cost in costs.values() if cost.kind in (None, "matrix")]).kind == "matrix"


def test_small_kernels_reach_half_the_rate_where_they_take_as_long_as_the_ramp() -> None:
    model = replace(TOY, launch_seconds=0.0, ramp_seconds=4.0)
    rates = [100 * n / seconds_of(model, cost(100, 0), n).forward for n in (1, 2, 4, 1000)]
    assert rates[:2] == [100 / 6, 25]
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(50, rel=0.01)
    assert seconds_of(model, cost(0, 10), 1).forward == 8


def test_stable_diffusions_frozen_share_on_an_a100() -> None:
    """DiffusionPipe's shares (Tian et al., MLSys 2024), each within a percentage point: the slow rise included."""
    parts: dict[str, list[NodeCost]] = {"frozen": [], "trainable": []}
    for row in json.loads((GOLDEN / "sd21_costs.json").read_text()):
        counts = {name: sympy.sympify(row.get(name, "0")) for name in COUNT_NAMES}
        dtype = getattr(torch, row["dtype"].removeprefix("torch."))
        parts[row["part"]] += row["count"] * [NodeCost(**counts, dtype=dtype, kind=row.get("kind"))]
    model = device("A100-80GB@bfloat16")
    shares = []
    for size in (8, 16, 32, 64):
        frozen, trainable = (node_seconds(model, CostTable.of(part), size) for part in parts.values())
        shares.append(frozen.forward.sum() / trainable.both.sum())
    assert shares == pytest.approx([0.38, 0.41, 0.43, 0.44], abs=0.01)


@pytest.mark.parametrize(
    ("field", "value"),
    [("convolution_efficiency", 0.0), ("attention_efficiency", 2.0), ("ramp_seconds", -1.0)],
)
def test_impossible_values_are_refused(field: str, value: float) -> None:
    with pytest.raises(CompileError, match=field):
        replace(TOY, **{field: value})  # type: ignore[arg-type]


def test_computing_in_integers_is_refused() -> None:
    with pytest.raises(CompileError, match="floating type"):
        replace(TOY, compute_dtype=torch.int8)


def test_the_machine_at_hand() -> None:
    model = measured("cpu")
    assert device("measured") is measured()
    assert model.launch_seconds < 1e-3
    assert model.memory_bytes is None
    assert 1e8 < model.bandwidth < 1e13
    large = NodeCost(forward_flops=sympy.Integer(10**11), dtype=torch.float32, kind="matrix")
    small = NodeCost(forward_flops=sympy.Integer(10**3), dtype=torch.float32, kind="matrix")
    assert seconds_of(model, large, 1).forward > seconds_of(model, small, 1).forward > 0
    assert max(model.matrix_efficiency, model.convolution_efficiency, model.attention_efficiency) == 1.0  # type: ignore[type-var]
