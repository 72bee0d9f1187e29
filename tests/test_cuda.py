"""On a GPU, where there is one: all ranks on it as threads, one as a process; one device's numbers as on CPUs."""

import logging
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import fxpipe
from cost_models.devices import device
from cost_models.profile_files import load
from fxpipe.analysis import costed
from fxpipe.capture.inputs import call_of
from fxpipe.plan.transport import Pending
from fxpipe.profiling import Profiler
from fxpipe.run.observe import Recording
from fxpipe.run.patched import settled
from fxpipe.run.sampling import BoundProgram, SampleRun
from fxpipe.run.transport import InProcessTransport
from fxpipe.run.transport.distributed import DistributedTransport
from fxpipe.run.transport.mailboxes import Mailboxes
from tests.denoisers import KEYS, small
from tests.distributed import start_torchrun
from tests.models import PEER_CASES, ZOO
from tests.own_models import Adapted, batch
from tests.test_cli import TOY, invoke
from tests.test_exact import FLOAT32_INSIDE as WITH_FLOAT32
from tests.test_exact import _spread
from tests.test_own_model import ROWS
from tests.test_sampler_pipelines import FLOAT32_LOOPS, error, sample
from tests.test_sampler_pipelines import KEYS as PIPELINES
from tests.test_sampling_exact import CONDITIONS, FLOAT32_INSIDE, FLOAT32_ONLY, REFUSED
from tests.tiny_pipelines import tiny
from tests.unet import TinyUNet

pytestmark = pytest.mark.skipif("not __import__('torch').cuda.is_available()", reason="there is no GPU")

GPU = torch.device("cuda", 0)
CASES = {name: make for name, make in {**ZOO, **PEER_CASES}.items() if name != "buffers"}  # makes tensors on the CPU


def verified(program: fxpipe.Program, bound: float) -> None:
    args, kwargs = call_of(program.model.example_inputs(program.step.batch_size))
    report = program.verify(*args, **kwargs)
    assert report.ok, report
    assert report.gradients
    assert max(report.loss_error, report.max_grad_error) <= bound, report
    assert {p.device for p in program.model.parameters()} == {GPU}


@pytest.mark.parametrize(("name", "schedule", "world_size", "microbatches"), _spread(CASES, 2))
def test_steps_are_one_devices(name: str, schedule: str, world_size: int, microbatches: int) -> None:
    torch.manual_seed(0)
    layout = {"batch_size": 5, "microbatches": microbatches, "schedule": schedule}
    program = fxpipe.compile(CASES[name](torch.float64), world_size, device="cuda", **layout)
    verified(program, 1e-5 if name in WITH_FLOAT32 else 1e-10)


OPTIONS: tuple[dict[str, Any], ...] = (
    {"recompute": True},
    {"data_parallel": 2, "shard": "optimizer"},
    {"data_parallel": 2, "shard": "gradients"},
    {"data_parallel": 2, "shard": "all"},
    {"fill": "none"},
)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_equal_plain_autograd(options: dict[str, Any]) -> None:
    """On the model's own device, which is where a step is compiled for."""
    model = TinyUNet("requires_grad").to(GPU)
    given = {name: value.to(GPU) for name, value in model.example_inputs(8).items()}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    loss = model(**given)
    expected = dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True))
    found = fxpipe.compile(model, 4, example_inputs=given, microbatches=4, schedule="1f1b", **options).run_local(
        **given
    )
    torch.testing.assert_close(found.loss, loss.detach(), rtol=1e-12, atol=0.0)
    torch.testing.assert_close(dict(found.gradients), expected, rtol=1e-10, atol=1e-14)


class Attending(nn.Module):
    """Attention over 16 tokens of 2 heads, with a mask or dropout or neither, twice."""

    def __init__(self, dropout: float = 0.0, masked: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dropout, self.masked = dropout, masked
        self.layers = nn.ModuleList(nn.Linear(128, 384) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            q, k, v = layer(x).unflatten(-1, (2, 192)).transpose(1, 2).chunk(3, -1)
            mask = torch.ones(16, 16, dtype=torch.bool, device=x.device).tril() if self.masked else None
            x = x + F.scaled_dot_product_attention(q, k, v, mask, self.dropout).transpose(1, 2).flatten(2)
        return F.mse_loss(x, y)

    def example_inputs(self, size: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(1)
        dtype = self.layers[0].weight.dtype
        return {name: torch.randn(size, 16, 128, generator=draw).to(dtype) for name in "xy"}  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("options", [{}, {"dropout": 0.3}, {"masked": True}], ids=str)
def test_kernels_of_attention(precision: str, options: dict[str, Any]) -> None:
    """Flash and memory-efficient ones, and what they keep for backwards."""
    model = Attending(**options)
    layout = {"microbatches": 3, "schedule": "zero-bubble", "precision": precision}
    program = fxpipe.compile(model, 2, batch_size=6, device="cuda", **layout)
    report = program.verify(**model.example_inputs(6))
    assert report.ok, report
    whole = fxpipe.compile(Attending(**options), 2, batch_size=6, device="cuda", **{**layout, "recompute": True})
    found = whole.run_local(**model.example_inputs(6)).gradients
    expected = program.run_local(**model.example_inputs(6)).gradients
    torch.testing.assert_close(dict(found), dict(expected), rtol=0.0, atol=0.0)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["sd", "dit"])
def test_precisions(name: str, precision: str) -> None:
    torch.manual_seed(0)
    model = ZOO[name](torch.float32)
    layout = {"batch_size": 5, "microbatches": 2, "schedule": "wave"}
    program = fxpipe.compile(model, 2, device="cuda", precision=precision, **layout)
    args, kwargs = call_of(model.example_inputs(5))
    report = program.verify(*args, **kwargs)
    assert report.ok, str(report)
    assert report.nearness is not None


def trained(program: fxpipe.Program, model: nn.Module, steps: int = 3) -> dict[str, Tensor]:
    """Weights after some steps on changing batches; frozen work of the next batch is done where the plan has it."""
    engine = program.local_engine()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    given = model.example_inputs(6)  # type: ignore[operator]
    batches = [{name: value.roll(turn, 0) for name, value in given.items()} for turn in range(steps)]
    for turn, one in enumerate(batches):
        engine.step(one, *batches[turn + 1 : turn + 2])
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().cpu() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "options", [{"fill": "idle"}, {"fill": "after"}, {"fill": "none", "backend": "inductor"}], ids=str
)
def test_training_is_as_on_a_cpu(options: dict[str, Any]) -> None:
    found, layout = [], {"batch_size": 6, "microbatches": 3, "schedule": "1f1b", **options}
    for where in ("cuda", "cpu"):
        model = TinyUNet("requires_grad")
        if where == "cpu":
            layout |= {"backend": "eager"}
        found.append(trained(fxpipe.compile(model, 2, device=where, **layout), model))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


RECORDED: dict[str, dict[str, Any]] = {
    "crossed_skips": {"schedule": "1f1b"},
    "dropout": {"schedule": "zero-bubble"},
    "tied_parameters": {"schedule": "gpipe", "recompute": True},
    "sd": {"fill": "after", "precision": "bf16"},
    "sdxl": {},
}


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_steps_are_those_of_eager_ones(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Bit for bit, where a GPU gives the same bits twice, as it doesn't for SDXL: two batches to an optimizer's step,
    which changes the weights in place."""
    found = []
    for backend in ("eager", "cudagraphs"):
        torch.manual_seed(0)
        dtype = torch.float32 if "precision" in RECORDED[name] else torch.float64
        model = CASES[name](dtype)
        options = {"batch_size": 6, "microbatches": 3, "device": "cuda", "backend": backend, **RECORDED[name]}
        engine = fxpipe.compile(model, 1, **options).local_engine()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        batches = [model.example_inputs(6) for _ in range(8)]
        losses = []
        with caplog.at_level(logging.WARNING):
            for turn, (one, following) in enumerate(pairwise(batches)):
                losses.append(engine.step(one, following))
                if turn % 2:
                    optimizer.step()
                    optimizer.zero_grad()
        found.append([*losses, *(p.detach() for p in model.parameters())])
    bound = 1e-9 if name == "sdxl" else 0.0
    assert all(torch.allclose(one, other, rtol=bound, atol=bound) for one, other in zip(*found, strict=True))
    assert "runs eagerly" not in caplog.text


@pytest.mark.parametrize("offload", [False, True])
def test_a_users_script(offload: bool) -> None:
    """Clipping, accumulation, schedulers, gathered states; with optimizer states on the host."""
    model = Adapted().to(GPU)
    program = fxpipe.compile(
        model, 2, example_inputs=batch(0, ROWS[0]), microbatches=2, schedule="1f1b", offload_optimizer=offload
    )
    engine = program.local_engine()
    assert engine.device.type == "cuda"
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for number in range(3):
        losses.append(engine.step(batch(number, ROWS[0])).detach())
        engine.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    assert all(loss.is_cuda and loss.isfinite() for loss in losses)
    assert any(not torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))
    states = [t.device.type for s in optimizer.state.values() for n, t in s.items() if n != "step"]
    assert {*states} == {"cpu" if offload else "cuda"}


def test_a_graph_is_not_run_elsewhere() -> None:
    """A model on a GPU, inputs on the CPU, and the other way round: both are brought to the program's device."""
    model = TinyUNet().to(GPU)
    program = fxpipe.compile(model, 2, example_inputs=model.example_inputs(4), device="cpu", microbatches=2)
    result = program.run_local(**{name: value.to(GPU) for name, value in model.example_inputs(4).items()})
    assert result.loss.device.type == "cpu"
    assert {p.device.type for p in model.parameters()} == {"cpu"}


@pytest.mark.parametrize("key", [key for key in KEYS if key not in CONDITIONS and key not in REFUSED])
def test_denoisers_over_patches(key: str) -> None:
    given = small(key, torch.float32 if key in FLOAT32_ONLY else torch.float64)
    example = on_gpu(given.example)
    sampler = fxpipe.compile_sampler(given.model.to(GPU), 2, example=example, sample=given.sample, patches=2)
    report = sampler.verify()
    assert report.ok, report
    assert report.error <= (1e-5 if key in FLOAT32_INSIDE | FLOAT32_ONLY else 1e-10)


@pytest.mark.parametrize("key", PIPELINES)
def test_a_pipeline_is_one_devices(key: str) -> None:
    pipe, call = tiny(key)
    pipe.to("cuda")
    call = on_gpu(call)
    wanted = sample(pipe, call)
    for layout in ({"patches": 2}, {"stages": 2}):
        found = sample(fxpipe.compile_sampler(pipe, 2, example=call, **layout).pipeline(), call)
        assert error(found, wanted) <= (1e-5 if key in FLOAT32_LOOPS | {"hunyuan"} else 1e-10)


@pytest.mark.parametrize("key", ["sd/small", "dit", "sd3", "flux"])
def test_displaced(key: str) -> None:
    """The same bits twice, and near one device."""
    pipe, call = tiny(key)
    pipe.to("cuda")
    call = on_gpu(call)
    wanted = sample(pipe, call)
    for layout in ({"patches": 2}, {"patches": 4, "stages": 2}):
        spread = fxpipe.compile_sampler(pipe, 2, example=call, mode="displaced", **layout).pipeline()
        found = sample(spread, call)
        assert torch.equal(found, sample(spread, call))
        assert error(found, wanted) < 1


@pytest.mark.parametrize("attention", ["ulysses", "ring"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_attention_over_ranks(attention: str, dtype: torch.dtype) -> None:
    pipe, call = tiny("sd3", dtype)
    pipe.to("cuda")
    call = on_gpu(call)
    sampler = fxpipe.compile_sampler(pipe, 2, example=call, attention=attention, patches=2)
    assert attention in str(sampler.plan)
    bound = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.1}[dtype]
    assert error(sample(sampler.pipeline(), call).double(), sample(pipe, call).double()) <= bound


@pytest.mark.parametrize("key", ["sd/small", "sdxl", "pixart", "sd3", "flux"])
def test_recorded_sampling_is_that_of_eager_ranks(key: str, caplog: pytest.LogCaptureFixture) -> None:
    """In two calls."""
    pipe, call = tiny(key)
    pipe.to("cuda")
    call = on_gpu(call)
    eager, recorded = (
        fxpipe.compile_sampler(pipe, 1, example=call, backend=backend).pipeline() for backend in ("eager", "cudagraphs")
    )
    for seed in (5, 6):
        assert error(sample(recorded, call, seed), sample(eager, call, seed)) <= 1e-10
    assert "runs eagerly" not in caplog.text


class Echo(InProcessTransport):
    """Rank 0 of several: what the others would send are numbers by edge and step, what it sends is kept."""

    def __init__(self, world_size: int) -> None:
        super().__init__(Mailboxes(world_size, 60), 0)
        self.device, self.kept, self.num_steps = GPU, list[Tensor](), 0

    def send(self, tensor: Tensor, dst: int, edge: int) -> None:
        self.kept.append(tensor)

    def recv(
        self, src: int, edge: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Pending[Tensor]:
        random = torch.Generator().manual_seed(1000 * self.num_steps + edge)
        found = torch.rand(shape, generator=random, dtype=dtype).to(GPU)
        return Pending(lambda: found)

    def advance(self) -> None:
        self.num_steps += 1

    flush = advance


LAYOUTS: dict[str, dict[str, Any]] = {
    "rows": {"patches": 2}, "stages": {"stages": 2}, "advanced": {"patches": 2, "mode": "displaced"},
    "displaced": {"patches": 2, "mode": "displaced", "advance": False},
    "pipeline": {"patches": 4, "stages": 2, "mode": "displaced"},
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("key", ["UNet2DConditionModel/sdxl", "DiTTransformer2DModel"])
def test_recorded_forms_are_eager_ones(key: str, layout: str, caplog: pytest.LogCaptureFixture) -> None:
    """Of one rank of several, to the bit: what is predicted and what is sent, looked at when all steps are over."""
    given = small(key, torch.float64)
    call, found = on_gpu(given.example), []
    sampler = fxpipe.compile_sampler(given.model.to(GPU), 2, example=call, warmup=2, **LAYOUTS[layout])
    step = sampler.step
    state, (tensors, _) = sampler.denoiser.state(step.traced), step.traced.captured.inputs.bind((), call)
    for backend in ("eager", "cudagraphs"):
        bound, run = BoundProgram(step.program(0), state, backend=backend), SampleRun(Echo(2))
        inputs, made = step.bind(tensors), list[Tensor]()
        for form in step.sequence(8):
            made.append(settled(run.predict(bound, inputs, form)))
            inputs = {**inputs, **{name: inputs[name] * 0.9 for name in step.samples}}
        found.append([*made, *run._transport.kept])  # type: ignore[attr-defined]
    assert len(found[0]) > 8
    assert [*map(torch.equal, *found)] == [True] * len(found[0])
    assert "runs eagerly" not in caplog.text


def on_gpu(call: Mapping[str, Any]) -> dict[str, Any]:
    return pytree.tree_map_only(Tensor, lambda value: value.to(GPU), dict(call))  # type: ignore[no-any-return]


def train_in_a_process(folder: str) -> tuple[list[float], list[float]]:
    """Three steps, saved after the second; the third again from the save."""
    model = TinyUNet("requires_grad")
    program = fxpipe.compile(model, 1, batch_size=4, microbatches=2, device="cuda", backend="cudagraphs")
    engine = program.engine()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    given = model.example_inputs(4)
    losses = []
    for turn in range(3):
        losses.append(float(engine.step(given)))
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if turn == 1:
            engine.save(folder, optimizer)
    engine.load(folder, optimizer)
    again = float(engine.step(given))
    engine.close()
    return losses, [again]


def test_one_rank_as_a_process(tmp_path: Path) -> None:
    ended, (result,) = start_torchrun(1, train_in_a_process, str(tmp_path / "run"))
    assert ended.returncode == 0, ended.output
    losses, again = result
    assert losses[2:] == again
    assert losses[2] < losses[0]


def collectives_over_nccl() -> tuple[list[float], str]:
    """One rank by itself."""
    ranks = DistributedTransport("cuda")
    ranks.open_channels({}, [(0,)])
    tensors = [torch.full((3,), 2.0, device=ranks.device), torch.ones(2, device=ranks.device)]
    summed = ranks.all_reduce([*tensors], (0,), 0).wait()
    mine = ranks.reduce_scatter([*tensors], (0, 0), (0,), 1).wait()
    ranks.broadcast([*tensors], (0, 0), (0,), 2).wait()
    whole = ranks.gather([*tensors], (0, 0), (0,), 3).wait()
    found = [float(tensor.sum()) for of in (summed, mine, whole) for tensor in of]
    backend = str(torch.distributed.get_backend(ranks._reducing[(0,)]))
    ranks.close()
    return found, backend


def test_collectives_of_one_rank_over_nccl() -> None:
    ended, (result,) = start_torchrun(1, collectives_over_nccl)
    assert ended.returncode == 0, ended.output
    assert result == ([6.0, 2.0] * 3, "nccl")


def sample_in_a_process() -> float:
    pipe, call = tiny("sd/small")
    pipe.to("cuda")
    call = on_gpu(call)
    wanted = sample(pipe, call)
    sampler = fxpipe.compile_sampler(pipe, 1, example=call)
    found = error(sample(sampler.pipeline(), call), wanted)
    sampler.close()
    return found


def test_sampling_by_one_rank_as_a_process() -> None:
    ended, (result,) = start_torchrun(1, sample_in_a_process)
    assert ended.returncode == 0, ended.output
    assert result <= 1e-10


@pytest.mark.parametrize("name", ["sd", "dit", "pixart"])
def test_predicted_memory(name: str) -> None:
    """Of a step on one rank, by the allocator's own counter, within a tenth."""
    torch.manual_seed(0)
    model = ZOO[name](torch.float32)
    size = 256
    program = fxpipe.compile(model, 1, batch_size=size, microbatches=2, schedule="1f1b", device="cuda")
    engine = program.local_engine()
    given = model.example_inputs(size)
    engine.step(given)
    held = sum(p.nbytes for p in [*model.parameters(), *model.buffers()])
    for p in model.parameters():
        p.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    engine.step(given)
    measured = torch.cuda.max_memory_allocated() - before + held
    (predicted,) = program.simulate(optimizer_bytes=0).peak_bytes
    assert abs(predicted / measured - 1) <= 0.1, (predicted, measured)


def test_profiles(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    code, *said = invoke("profile", TOY + ":toy", *f"--out {out} --batch-sizes 2,4 --device cuda:0".split())
    assert code == 0, said
    profile = load(out, device())
    assert profile.key.device == torch.cuda.get_device_name()
    assert profile.memory_bytes == torch.cuda.get_device_properties(0).total_memory
    program = fxpipe.compile(TinyUNet(), 2, batch_size=4, cost_model="measured", device="cuda")
    assert program.simulate().makespan_seconds > 0
    step = costed(TinyUNet("requires_grad"), None, 4, device(), 8, device=GPU)
    timed = Profiler(step, [4], GPU)
    for _ in range(2):
        timed.round()
    assert all(sum(entry.forward_seconds) > 0 for entry in timed.profile().entries)


def test_the_command_line() -> None:
    code, out, err = invoke("run", TOY + ":toy", *"--world-size 2 --batch-size 4 --steps 2 --device cuda:0".split())
    assert code == 0, out + err


def test_watched_steps() -> None:
    """A measured timeline has every action, and is written beside the predicted one."""
    model = TinyUNet()
    recording = Recording()
    program = fxpipe.compile(model, 2, batch_size=4, microbatches=2, schedule="1f1b", device="cuda")
    program.local_engine(observe=recording).step(model.example_inputs(4))
    assert {event.rank for event in recording.timeline().events} == {0, 1}
