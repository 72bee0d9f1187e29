"""Denoisers whose forward has an autocast, and calls inside of one: patches compute in the types that one device
computes in."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import fxpipe
from fxpipe.capture.autocasts import written_out
from fxpipe.capture.surroundings import autocasts, no_autocast
from fxpipe.errors import FxpipeError, RunError
from tests.distributed import run_processes
from tests.tiny_pipelines import noise

aten = torch.ops.aten


class Autocast(nn.Module):
    """Attention in the way of `attend`, with norms in float32, types mixed and an autocast switched off again."""

    def __init__(self, attend: str, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.attend, self.dtype = attend, dtype
        self.into, self.norm, self.time = nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Linear(1, 8)
        self.qkv, self.out, self.up = nn.Linear(8, 24), nn.Linear(8, 8), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        with torch.autocast(sample.device.type, self.dtype):
            return self.predict(sample, timestep)

    def predict(self, sample: Tensor, timestep: Tensor) -> Tensor:
        hidden = self.into(sample) + self.time(timestep[:, None])[:, :, None, None]
        hidden = F.interpolate(F.silu(self.norm(hidden)), scale_factor=2.0)
        q, k, v = self.qkv(hidden.flatten(2).transpose(1, 2)).chunk(3, -1)
        with torch.autocast("cpu", enabled=False):
            k = F.layer_norm(k.float(), (8,))
        if self.attend == "fused":
            mixed = F.scaled_dot_product_attention(q[:, None], k[:, None].to(q.dtype), v[:, None])[:, 0]
        elif self.attend == "einsum":
            mixed = torch.einsum("bij,bjd->bid", torch.einsum("bid,bjd->bij", q, k).softmax(-1), v)
        else:
            mixed = (q @ k.transpose(1, 2)).softmax(-1) @ v
        hidden = hidden + self.out(mixed).transpose(1, 2).reshape(hidden.shape)
        result: Tensor = self.up(torch.cat([hidden, hidden.float()], 1)[:, 4:12])
        return result


def call(height: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {"sample": noise(2, 4, height, 6).to(dtype), "timestep": torch.tensor([3.0, 7.0]).to(dtype)}


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("attend", ["fused", "einsum", "products"])
def test_patches_cast_what_one_device_casts(attend: str, ranks: int) -> None:
    """In float32 the prediction is another one in its third digit."""
    torch.manual_seed(0)
    model = Autocast(attend)
    sampler = fxpipe.compile_sampler(model, ranks, example=call(12), sample={"sample": 2}, sizes="any")
    for height in (12, 8):
        with torch.no_grad():
            expected, plain = model(**call(height)), model.predict(**call(height))
            found = sampler.predict(**call(height))
        assert found.dtype == expected.dtype == torch.bfloat16
        apart, cast = ((one.float() - expected.float()).abs().mean() for one in (found, plain))
        assert apart < 0.05 * cast  # sums of another order may round to another number


def test_an_autocast_of_a_model_without_weights() -> None:
    model, example = Autocast("fused").to("meta"), {name: one.to("meta") for name, one in call(12).items()}
    graph = fxpipe.compile_sampler(model, 2, example=example, sample={"sample": 2}).step.traced.captured.graph
    assert any(getattr(node.meta.get("val"), "dtype", None) == torch.bfloat16 for node in graph.nodes)


def test_an_autocast_that_casts_nothing() -> None:
    model = Autocast("fused").double()
    sampler = fxpipe.compile_sampler(model, 2, example=call(12, torch.float64), sample={"sample": 2})
    assert sampler.verify().ok
    assert not any(node.meta.get("autocast") for node in sampler.step.traced.captured.graph.nodes)


class Plain(Autocast):
    """The same in the types of its tensors."""

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        return self.predict(sample, timestep)


def inside(predict: Any, on: bool, height: int = 12) -> Tensor:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=on):
        result: Tensor = predict(**call(height))
        return result


def test_calls_inside_of_an_autocast() -> None:
    """Programs of their own, beside those of calls outside; threads that run them are in none."""
    torch.manual_seed(0)
    model = Plain("fused")
    sampler = fxpipe.compile_sampler(model, 2, example=call(12), sample={"sample": 2}, sizes="any")
    for on, height in ((False, 12), (True, 12), (True, 8), (False, 12), (True, 12)):
        expected, found, plain = (
            inside(one, on, height) for one, on in ((model, on), (sampler.predict, on), (model, not on))
        )
        assert found.dtype == expected.dtype == (torch.bfloat16 if on else torch.float32)
        apart, cast = ((one.float() - expected.float()).abs().mean() for one in (found, plain))
        assert apart < 0.05 * cast
    assert inside(sampler.predict, True).float().equal(inside(sampler.predict, True).float())


class Encoded(nn.Module):
    """With torch's encoder, which in evaluation is one kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Conv2d(4, 8, 1), nn.Conv2d(8, 4, 1)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        hidden = self.into(sample).float()
        found = self.layer(hidden.flatten(2).transpose(1, 2)).transpose(1, 2)
        return self.out(found.reshape(hidden.shape)).to(found.dtype)  # type: ignore[no-any-return]


def test_an_encoder_of_one_kernel_in_an_autocast() -> None:
    """Whose type is another one than that of its operations."""
    model = Encoded().eval()
    sampler = fxpipe.compile_sampler(model, 2, example=call(12), sample={"sample": 2})
    with pytest.raises(FxpipeError, match=r"call torch.backends.mha.set_fastpath_enabled"):
        inside(sampler.predict, True)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        assert inside(sampler.predict, True).dtype == inside(model, True).dtype == torch.float32
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_autocasts_of_any_device_are_seen() -> None:
    torch.set_autocast_enabled("mps", True)
    try:
        assert autocasts() == {"mps": torch.float16}
        with no_autocast():
            assert not autocasts()
    finally:
        torch.set_autocast_enabled("mps", False)


def launched() -> tuple[float, str]:
    """How far the ranks' prediction is from one device's, and what is said where one rank alone is in an autocast."""
    torch.manual_seed(0)
    model = Plain("fused")
    sampler = fxpipe.compile_sampler(model, 2, example=call(12), sample={"sample": 2})
    expected, found = inside(model, True), inside(sampler.predict, True)
    with pytest.raises(RunError) as said:
        inside(sampler.predict, os.environ["RANK"] == "1")
    return float((found - expected).abs().max()), str(said.value)


def test_ranks_in_other_autocasts_are_told() -> None:
    for apart, said in run_processes(2, launched, timeout_seconds=100):
        assert apart < 1e-2
        assert "ranks [1] have another plan than rank 0" in said


ON_GPUS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "softmax": (aten.softmax.int, (-1,)),
    "sum": (aten.sum.dim_IntList, ([1],)),
    "norm": (aten.norm.ScalarOpt_dim, (2, [1])),
    "power": (aten.pow.Tensor_Scalar, (2,)),
    "layer norm": (aten.layer_norm.default, ([8],)),
    "silu": (aten.silu.default, ()),
}


@pytest.mark.parametrize("what", ON_GPUS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_an_autocast_for_gpus_casts(what: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """It tells some operations to compute in float32; traced on tensors without memory, which need no GPU."""
    for asked in ("is_available", "is_bf16_supported"):
        monkeypatch.setattr(torch.cuda, asked, lambda *args: True)
    target, rest = ON_GPUS[what]
    graph, mode = fx.Graph(), FakeTensorMode()
    x = graph.placeholder("x")
    node = graph.call_function(target, (x, *rest))
    graph.output(node)
    with mode:
        x.meta["val"] = torch.empty(4, 8, device="cuda", dtype=dtype)
        with torch.autocast("cuda", dtype):
            node.meta = {"val": target(x.meta["val"], *rest), "path": "", "autocast": ("cuda", dtype, True)}
    value = noise(4, 8).to(dtype)
    found = fx.GraphModule(nn.Module(), written_out(graph))(value)
    wide = node.meta["val"].dtype == torch.float32
    expected = target(value.float() if wide else value, *rest)
    assert found.dtype == node.meta["val"].dtype == (dtype if what == "silu" else torch.float32)
    assert torch.equal(found, expected)


class Recurrent(Autocast):
    """Its cell's products are cast, and its state, added to them, is not."""

    def __init__(self) -> None:
        super().__init__("fused")
        self.cell = nn.GRUCell(8, 8)

    def predict(self, sample: Tensor, timestep: Tensor) -> Tensor:
        hidden = self.time(timestep[:, None])
        return self.up(self.into(sample) + self.cell(hidden, hidden.float())[:, :, None, None])  # type: ignore[no-any-return]


def test_what_an_operation_casts_on_its_way_is_refused() -> None:
    with pytest.raises(
        FxpipeError, match=r"casts inside of gru_cell.* leave it out, and load the denoiser in bfloat16"
    ):
        fxpipe.compile_sampler(Recurrent(), 2, example=call(12), sample={"sample": 2})
