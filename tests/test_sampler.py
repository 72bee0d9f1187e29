"""Samplers: a denoiser and a whole pipeline spread over ranks, in this process and over gloo."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import diffusers
import pytest
import torch
from diffusers import StableDiffusionPipeline, UNet2DConditionModel
from diffusers.models.unets.unet_2d import UNet2DOutput
from torch import Tensor, nn

import fxpipe
from cost_models.devices import device
from fxpipe.errors import CompileError
from fxpipe.models.backbones import row_inputs
from fxpipe.plan.sample_grid import Grid, grid_for
from fxpipe.plan.transport import Transport
from fxpipe.run.sampling import BoundProgram, SampleRun
from fxpipe.run.transport import run_ranks
from fxpipe.sampling.spread import Spread
from tests.distributed import run_processes
from tests.live_bytes import LiveBytes
from tests.test_memory import OwnBuffers
from tests.tiny_pipelines import noise, tiny

_STEPS = 4


def pipeline() -> StableDiffusionPipeline:
    pipe, _ = tiny("sd/small")
    return pipe  # type: ignore[no-any-return]


def call(samples: int = 1, height: int = 32, width: int = 24) -> dict[str, object]:
    embeds = {"prompt_embeds": noise(samples, 7, 8, seed=1), "negative_prompt_embeds": noise(samples, 7, 8, seed=3)}
    return {**embeds, "height": height, "width": width}


def image(pipe: StableDiffusionPipeline, **changes: object) -> Tensor:
    given = {**call(), "num_inference_steps": _STEPS, "output_type": "pt", **changes}
    found: Tensor = pipe(**given, generator=torch.Generator().manual_seed(5)).images
    return found


@cache
def one() -> StableDiffusionPipeline:
    return pipeline()


@cache
def exact(world_size: int, cfg: int | None = None) -> fxpipe.Sampler:
    return fxpipe.compile_sampler(one(), world_size, example=call(), cfg=cfg, patches=world_size // (cfg or 1))


@pytest.fixture(scope="module")
def pipe() -> StableDiffusionPipeline:
    return one()


@pytest.fixture(scope="module")
def wanted(pipe: StableDiffusionPipeline) -> Tensor:
    return image(pipe)


def same(found: Tensor, wanted: Tensor) -> bool:
    return bool((found - wanted).abs().max() <= 1e-10 * wanted.abs().max())


@pytest.mark.parametrize(("world_size", "cfg"), [(3, None), (4, 2)])
def test_a_whole_pipeline_is_one_devices(
    world_size: int, cfg: int | None, pipe: StableDiffusionPipeline, wanted: Tensor
) -> None:
    sampler = exact(world_size, cfg)
    assert sampler.grid == grid_for(world_size, 2, cfg, None)
    assert sampler.verify().ok
    fast = sampler.pipeline()
    assert same(image(fast), wanted)
    assert same(image(fast), wanted)  # again: nothing of a call is left to the next
    assert pipe.unet is sampler.denoiser.module


def test_other_prompts_and_sizes_are_compiled_when_they_come(pipe: StableDiffusionPipeline) -> None:
    fast = exact(3).pipeline()
    for given in (call(2), call(1, 40, 16), call(1), call(2)):
        assert same(image(fast, **given), image(pipe, **given))


def test_weights_are_those_of_now(wanted: Tensor) -> None:
    pipe = pipeline()
    fast = fxpipe.compile_sampler(pipe, 2, example=call()).pipeline()
    assert same(image(fast), wanted)
    with torch.no_grad():
        pipe.unet.conv_in.weight.mul_(1.5)
    changed = image(pipe)
    assert not same(changed, wanted)
    assert same(image(fast), changed)
    pipe.unet.conv_in.weight = nn.Parameter(pipe.unet.conv_in.weight.detach() * 0.5)
    assert same(image(fast), image(pipe))


class Tied(nn.Module):
    """Two layers of one weight, and a function of the class's own."""

    between = staticmethod(torch.cos)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(2, 2, 3, padding=1) for _ in range(2))
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("what", ["weight", "function"])
def test_what_is_no_longer_one_weight_or_another_function_is_seen(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, given = Tied().double(), {"x": torch.randn(1, 2, 8, 4).double()}
    sampler = fxpipe.compile_sampler(model, 2, example=given, cfg=1, patches=2)
    sampler.predict(**given)
    if what == "weight":
        model.second.weight = nn.Parameter(model.second.weight.detach().flip(0))
    else:
        monkeypatch.setattr(Tied, "between", staticmethod(torch.sin))
    with torch.no_grad():
        torch.testing.assert_close(sampler.predict(**given), model(**given), rtol=1e-12, atol=1e-12)


def test_dump_shows_what_runs(tmp_path: Path) -> None:
    sampler = exact(4, 2)
    sampler.dump(tmp_path)
    text = (tmp_path / "rank_3.py").read_text()
    compile(text, "rank_3.py", "exec")
    assert "send(transport, group_norm_own, dst=2" in text
    assert "2 groups x 1 stage x 2 patches on 4 ranks" in (tmp_path / "plan.txt").read_text()
    sent: dict[tuple[int, int], int] = {}
    for message in sampler.step.messages:
        sent[message.channel] = sent.get(message.channel, 0) + message.num_bytes
    assert sampler.traffic().channels == sent
    assert sum(sent.values()) > 0


def test_bytes_are_those_that_are_sent() -> None:
    sampler = exact(3)
    args, kwargs = sampler.example
    step = sampler.step
    tensors = step.bind(step.traced.captured.inputs.bind(args, kwargs)[0])
    state = sampler.denoiser.state(step.traced)

    def rank(transport: Transport) -> dict[tuple[int, int], int]:
        SampleRun(transport).predict(BoundProgram(step.programs[transport.rank], state), tensors)
        transport.flush()
        return transport.sent_bytes()

    found = run_ranks(3, rank)
    assert {channel: size for sent in found for channel, size in sent.items()} == sampler.traffic().channels


class Rows(nn.Module):
    """A denoiser of no library."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 8, 3, padding=1), nn.Conv2d(8, 2, 5, padding=2)
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, picture: Tensor, time: Tensor) -> dict[str, Tensor]:
        return {"made": self.last(self.norm(self.first(picture)) * time.reshape(-1, 1, 1, 1).cos())}


def test_any_module_with_named_rows() -> None:
    torch.manual_seed(0)
    model, given = Rows().double(), {"picture": noise(3, 2, 11, 5), "time": noise(3)}
    sampler = fxpipe.compile_sampler(model, 2, example=given, patches=2, sample={"picture": 2})
    assert sampler.grid == Grid(1, 2)
    assert same(sampler.predict(**given)["made"], model(**given)["made"])
    sampler = fxpipe.compile_sampler(model, 6, example=given, patches=2, sample={"picture": -2})
    assert sampler.grid == Grid(3, 2)
    assert same(sampler.predict(**given)["made"], model(**given)["made"])


class Flipped(Rows):
    """With an operation that no rule is known for."""

    def __init__(self, much: bool) -> None:
        super().__init__()
        self.much = much

    def forward(self, picture: Tensor, time: Tensor) -> dict[str, Tensor]:
        made = super().forward(picture, time)["made"]
        return {"made": made + (made if self.much else made[..., :1]).flip(2)}


@pytest.mark.parametrize("cfg", [1, 2])
def test_much_that_is_gathered_for_want_of_a_rule_is_a_warning(cfg: int, caplog: pytest.LogCaptureFixture) -> None:
    for much in (True, False):
        caplog.clear()
        given = {"picture": noise(2, 2, 24, 200), "time": noise(2)}
        options: Any = {"sample": {"picture": 2}, "patches": 2, "cfg": cfg}
        sampler = fxpipe.compile_sampler(Flipped(much).double(), 2 * cfg, example=given, **options)
        (note,) = [note for note in sampler.notes if "gathered" in note]
        assert note.startswith("warning, ") == much
        assert ("of an exact step's traffic: flip (flip) in" in caplog.text) == much
        assert type(sampler.plan).parse(str(sampler.plan)) == sampler.plan


class Named(diffusers.ModelMixin, diffusers.ConfigMixin):  # type: ignore[misc]
    """A denoiser whose arguments have names of its own."""

    @diffusers.configuration_utils.register_to_config
    def __init__(self, sample_size: int = 8, in_channels: int = 2) -> None:
        super().__init__()
        self.rows = Rows()

    def forward(self, noisy: Tensor, when: Tensor) -> UNet2DOutput:
        return UNet2DOutput(sample=self.rows(noisy, torch.as_tensor(when, dtype=noisy.dtype))["made"])


@pytest.mark.parametrize("layout", [{"patches": 2}, {"stages": 2}, {}])
def test_a_pipeline_with_a_denoiser_of_ones_own(layout: dict[str, Any]) -> None:
    torch.manual_seed(0)
    pipe = diffusers.DDPMPipeline(Named().double(), diffusers.DDIMScheduler())
    pipe.set_progress_bar_config(disable=True)
    given = {"batch_size": 2, "num_inference_steps": _STEPS, "output_type": "np"}
    sampler = fxpipe.compile_sampler(pipe, 2, example=given, cfg=1, **layout)
    made = [p(**given, generator=torch.Generator().manual_seed(5)).images for p in (pipe, sampler.pipeline())]
    assert same(*map(torch.from_numpy, made))


def test_full_sizes_compile_without_weights(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = UNet2DConditionModel(
            sample_size=64, block_out_channels=(320,), layers_per_block=1, cross_attention_dim=768,
            down_block_types=("CrossAttnDownBlock2D",), up_block_types=("UpBlock2D",),
        )  # fmt: skip
    sampler = fxpipe.compile_sampler(model, 4, patches=2)
    assert sampler.grid == Grid(2, 2)
    assert "float32[1, 320, 32, 64]" in (sampler.dump(tmp_path) / "rank_0.py").read_text()


@pytest.mark.parametrize(
    ("world_size", "options", "says"),
    [
        (2, {"example": None}, "example is missing"),
        (2, {"cfg": 3}, "cfg=3 can't be world_size=2 ranks"),
        (4, {"cfg": 4}, "a call has 2"),
        (64, {"patches": 64}, "64 patches of"),
    ],
)
def test_refusals(world_size: int, options: dict[str, object], says: str, pipe: StableDiffusionPipeline) -> None:
    with pytest.raises(CompileError, match=says):
        fxpipe.compile_sampler(pipe, world_size, **{"example": call(), **options})  # type: ignore[arg-type]


# -- displaced


@pytest.fixture(scope="module")
def displaced(pipe: StableDiffusionPipeline) -> fxpipe.Sampler:
    return fxpipe.compile_sampler(pipe, 4, example=call(), patches=2, mode="displaced", warmup=1)


def test_displaced_steps_are_near_and_exact_where_nothing_changes(
    displaced: fxpipe.Sampler, pipe: StableDiffusionPipeline, wanted: Tensor
) -> None:
    assert displaced.verify().ok
    fast = displaced.pipeline()
    found = image(fast)
    assert not same(found, wanted)
    assert float((found - wanted).abs().max()) < 0.2
    assert torch.equal(image(fast, **call(2)), image(displaced.pipeline(), **call(2)))
    assert torch.equal(image(fast), found)  # nothing of a call is left to the next
    exact = fxpipe.compile_sampler(pipe, 4, example=call(), patches=2, mode="displaced", warmup=_STEPS)
    assert same(image(exact.pipeline()), wanted)


def test_a_few_steps_of_either_kind_are_verified(
    pipe: StableDiffusionPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fxpipe.compile_sampler(pipe, 4, example=call(), patches=2, mode="displaced", warmup=10**6)
    predict, steps = Spread.predict, list[Any]()

    def spoilt(*given: Any) -> Any:
        steps.append(predict(*given))
        return tuple(value + (len(steps) == 1) for value in steps[-1])

    assert made.verify().ok
    monkeypatch.setattr(Spread, "predict", spoilt)
    assert not made.verify().ok
    assert len(steps) == 5


def test_separate_norms_are_told_apart_from_exact_steps() -> None:
    model = torch.nn.Sequential(torch.nn.GroupNorm(2, 4), torch.nn.Conv2d(4, 4, 3, padding=1)).double()
    x = torch.linspace(-1, 3, 480, dtype=torch.float64).reshape(1, 4, 12, 10)
    how: Any = {"sample": {"input": 2}, "patches": 2, "mode": "displaced", "warmup": 2}
    for norms in ("separate", "merged"):
        found = fxpipe.compile_sampler(model, 2, example={"input": x}, norms=norms, **how).verify()
        assert found.ok
        assert (found.displaced is not None and found.displaced > 0.01) == (norms == "separate")
        assert ("in displaced steps, whose norms are separate" in str(found)) == (norms == "separate")


@pytest.mark.parametrize("layout", [{"advance": False}, {"stages": 2}])
def test_moments_that_cannot_be_corrected_are_counted(layout: Any, caplog: pytest.LogCaptureFixture) -> None:
    """In the second of two displaced steps the first patch moves into the other one, which is taken to move as far."""
    model = torch.nn.Sequential(torch.nn.GroupNorm(1, 2), torch.nn.Conv2d(2, 2, 3, padding=1))
    apart = torch.linspace(-1, 1, 48).reshape(1, 2, 8, 3) + torch.tensor([-8.0] * 4 + [8.0] * 4).reshape(1, 1, 8, 1)
    how: Any = {"sample": {"input": 2}, "patches": 2, "mode": "displaced", "warmup": 1, **layout}
    sampler = fxpipe.compile_sampler(model, 2, example={"input": apart}, **how)
    for last, told in ((apart, ""), (apart.abs(), "25 % of a call's displaced moments"), (apart, "")):
        caplog.clear()
        with sampler.call():
            for x in (apart, apart, last):
                sampler.predict(input=x)
        assert told in caplog.text
        assert bool(caplog.text) == bool(told)


def test_programs_that_take_turns_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Conv2d(2, 2, 3, padding=1)
    how: Any = {"sample": {"input": 2}, "patches": 2, "mode": "displaced", "warmup": 1}
    x = torch.randn(2, 2, 8, 3)
    sampler = fxpipe.compile_sampler(model, 2, example={"input": x}, **how)
    counts = list[int]()
    for sizes in ((2, 2, 1, 1, 2, 2), (2, 1) * 4, (2, 1) * 4):
        caplog.clear()
        with sampler.call():
            for size in sizes:
                assert torch.allclose(sampler.predict(input=x[:size]), model(x[:size]), atol=1e-6)
        counts.append(sum("take turns" in one for one in caplog.messages))
    assert counts == [0, 1, 0]


def test_a_call_that_fails_leaves_nothing(displaced: fxpipe.Sampler) -> None:
    fast = displaced.pipeline()
    before = image(fast)

    def stop(pipe: object, step: int, time: object, values: dict[str, object]) -> dict[str, object]:
        if step == 2:
            raise KeyboardInterrupt
        return values

    with pytest.raises(KeyboardInterrupt):
        image(fast, callback_on_step_end=stop)
    assert torch.equal(image(fast), before)


def test_forms_are_dumped_and_simulated(displaced: fxpipe.Sampler, tmp_path: Path) -> None:
    text = (displaced.dump(tmp_path) / "rank_1.py").read_text()
    compile(text, "rank_1.py", "exec")
    assert "def displaced(self, transport, sample" in text
    assert "displaced after 1 fresh step," in str(displaced)
    assert displaced.simulate(2).makespan_seconds < displaced.simulate(2, "4x1xV100+Ethernet-1").makespan_seconds


def test_unknown_modes_are_refused(pipe: StableDiffusionPipeline) -> None:
    with pytest.raises(CompileError, match="mode='fast' is not known; use one of exact, displaced"):
        fxpipe.compile_sampler(pipe, 2, example=call(), mode="fast")  # type: ignore[arg-type]


# -- processes


def launched() -> tuple[Tensor, Tensor, Tensor]:
    """What one rank of a launch gets: of a pipeline's call, of another after it, and of a displaced one."""
    pipe = pipeline()
    sampler = fxpipe.compile_sampler(pipe, 2, example=call(), patches=2)
    fast = sampler.pipeline()
    first = image(fast)
    second = image(fast, **call(2))
    sampler.close()
    near = fxpipe.compile_sampler(pipe, 2, example=call(), patches=2, mode="displaced", warmup=1)
    third = image(near.pipeline())
    near.close()
    return first, second, third


def test_over_gloo_it_is_one_devices(pipe: StableDiffusionPipeline, wanted: Tensor) -> None:
    near = fxpipe.compile_sampler(pipe, 2, example=call(), patches=2, mode="displaced", warmup=1)
    displaced = image(near.pipeline())
    for first, second, third in run_processes(2, launched):
        assert torch.equal(third, displaced)
        assert same(first, wanted)
        assert same(second, image(pipe, **call(2)))


class OwnSends(OwnBuffers):
    """What is sent is let go of at once; or, as by gloo, at the end of the step, of the next where messages cross."""

    _before: Sequence[Tensor] = ()

    def send(self, tensor: Tensor, dst: int, edge: int) -> None:
        super().send(tensor, dst, edge)
        if not self._keeps_sent:
            self._sent.clear()

    def advance(self) -> None:
        self._before, self._sent = self._sent, []
        self._transport.advance()

    def flush(self) -> None:
        self._before, self._sent = [], []
        self._transport.flush()


@pytest.mark.parametrize("keeps_sent", [False, True])
@pytest.mark.parametrize("mode", ["exact", "displaced"])
def test_memory_is_predicted(mode: Any, keeps_sent: bool, pipe: StableDiffusionPipeline) -> None:
    """Against the bytes that are really alive on every rank."""
    how: dict[str, Any] = {"mode": mode, "warmup": 1, "advance": False, "cluster": "3xCPU" if keeps_sent else None}
    sampler = fxpipe.compile_sampler(pipe, 3, example=call(4, 64, 48), patches=3, **how)
    most = require_predicted(sampler, keeps_sent)
    assert sampler.plan.expects is not None
    assert sampler.plan.expects.memory_bytes == pytest.approx(most, rel=0.05)


def test_so_is_that_of_what_a_last_step_carries_for_nobody(pipe: StableDiffusionPipeline) -> None:
    sampler = fxpipe.compile_sampler(pipe, 3, example=call(2, 64, 48), patches=3, mode="displaced", warmup=2)
    for steps in (1, 2, 3):
        most = require_predicted(sampler, False, steps)
    assert sampler.plan.expects is not None
    assert sampler.plan.expects.memory_bytes == pytest.approx(most, rel=0.05)


class Headless(torch.nn.Module):
    """Attention that no kernel of torch takes: its operands have no heads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(2).mT
        return torch.nn.functional.scaled_dot_product_attention(tokens, tokens, tokens.cos()).mT.reshape(x.shape)


@pytest.mark.parametrize("layout", [{"patches": 3}, {}])
def test_so_is_that_of_scores_that_are_held(layout: dict[str, Any]) -> None:
    sampler = fxpipe.compile_sampler(Headless(), 3, example={"x": torch.zeros(2, 4, 24, 8)}, sample={"x": 2}, **layout)
    most = require_predicted(sampler, False)
    assert most > 4 * 192**2 * (2 / 3 if layout else 2)
    assert sampler.plan.expects is not None
    assert sampler.plan.expects.memory_bytes == pytest.approx(most, rel=0.1)


class Attending(torch.nn.Module):
    """Layers that tell more than any of them computes with."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(2).mT.contiguous()
        for _ in range(8):
            query, key = (one.unflatten(2, (2, 2)).transpose(1, 2) for one in (tokens, tokens.cos()))
            attended = torch.nn.functional.scaled_dot_product_attention(query, key, key)
            tokens = tokens + attended.transpose(1, 2).flatten(2)
        return tokens.mT.reshape(x.shape)


def test_so_is_that_of_what_is_told_last() -> None:
    """What leaves at a step's end is there with what it is made of."""
    how: dict[str, Any] = {"patches": 2, "mode": "displaced", "warmup": 1, "advance": False}
    sampler = fxpipe.compile_sampler(Attending(), 2, example={"x": torch.zeros(2, 4, 24, 8)}, sample={"x": 2}, **how)
    assert sampler.plan.expects is not None
    assert sampler.plan.expects.memory_bytes == pytest.approx(require_predicted(sampler, False), rel=0.1)


class Turned(Attending):
    """With positions, which are the same for all samples, and a convolution, whose borders are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        turned = super().forward(x * positions.cos())
        return self.conv(self.conv(turned).relu()) * positions.sin()


@pytest.mark.parametrize("how", [{}, {"mode": "displaced", "patches": 4, "warmup": 1}])
@pytest.mark.parametrize("world_size", [2, 4])
def test_so_is_that_of_stages(world_size: int, how: dict[str, Any]) -> None:
    """What crosses, what patches know of each other, and what is computed once."""
    example = {"x": torch.zeros(3, 4, 24, 8), "positions": torch.zeros(4, 24, 8)}
    sampler = fxpipe.compile_sampler(Turned(), world_size, stages=2, cfg=1, example=example, sample={"x": 2}, **how)
    assert sampler.plan.expects is not None
    assert sampler.plan.expects.memory_bytes == pytest.approx(max(sampler.simulate(3).peak_bytes), rel=0.1)


def require_predicted(sampler: fxpipe.Sampler, keeps_sent: bool, steps: int = 3) -> int:
    """The most bytes on any rank, each of which has as many as are predicted."""
    args, kwargs = sampler.example
    step = sampler.step
    tensors = step.bind(step.traced.captured.inputs.bind(args, kwargs)[0])
    state = sampler.denoiser.state(step.traced)

    def rank(transport: Transport) -> int:
        program, live = step.programs[transport.rank], LiveBytes()
        run, bound = SampleRun(cast(Transport, OwnSends(transport, keeps_sent))), BoundProgram(program, state)
        live.see([[state[name] for name in program.state], [tensors[name] for name in program.inputs]])
        with live:
            for form in step.sequence(steps):
                run.predict(bound, tensors, form)
        run.reset()
        return live.peak

    found = run_ranks(sampler.plan.world_size, rank)
    timeline = sampler.simulate(steps, cluster="3xCPU" if keeps_sent else None)
    for measured, predicted in zip(found, timeline.memory, strict=True):
        assert measured == pytest.approx(predicted.peak_bytes, rel=0.01)
    return max(found)


def test_time_is_predicted_from_the_programs(pipe: StableDiffusionPipeline, tmp_path: Path) -> None:
    alone = fxpipe.compile_sampler(pipe, 1, example=call(1, 256, 192)).simulate().makespan_seconds
    shared = fxpipe.compile_sampler(pipe, 2, example=call(1, 256, 192))
    assert alone / 2 <= shared.simulate().makespan_seconds < alone
    assert shared.simulate(cluster="2x1xV100+Ethernet-1").makespan_seconds > shared.simulate().makespan_seconds
    assert shared.simulate(cost_model=device("CPU")).makespan_seconds > shared.simulate().makespan_seconds
    assert "predict" in shared.trace(tmp_path / "trace.json").read_text()


class InFloat32(torch.nn.Module):
    """Sums its rows in float32, whatever it is given, as linear attention does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x.float().sum(2, keepdim=True).to(x.dtype)


def test_what_is_computed_in_float32_is_judged_so() -> None:
    x = torch.randn(2, 3, 12, 5, dtype=torch.float64)
    sampler = fxpipe.compile_sampler(InFloat32(), 3, example={"x": x}, sample={"x": 2}, patches=3)
    found = sampler.verify()
    assert (found.ok, found.dtype, found.tolerance) == (True, torch.float32, 5e-5)


class Checkpointed(torch.nn.Module):
    """Computes another way where gradients are on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh() * 2 if torch.is_grad_enabled() else x.tanh()


@pytest.mark.parametrize("sizes", ["auto", "any"])
def test_what_forward_does_without_gradients_is_sampled(sizes: Any) -> None:
    x = torch.randn(2, 3, 12, 5, dtype=torch.float64)
    given: Any = {"example": {"x": x}, "sample": {"x": 2}, "sizes": sizes, "cache": False}
    assert fxpipe.compile_sampler(Checkpointed(), 2, patches=2, **given).verify().ok


_SMALL: Any = {
    "StableAudio3DiTModel": {"io_channels": 4, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_memory_tokens": 2},
    "AceStepTransformer1DModel": {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "in_channels": 12, "audio_acoustic_hidden_dim": 4,
    },
    "JoyImageEditTransformer3DModel": {
        "in_channels": 4, "hidden_size": 24, "num_attention_heads": 2, "text_dim": 8, "num_layers": 1,
        "rope_dim_list": [4, 4, 4],
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("StableAudio3DiTModel", [1, 4, 20]),
        ("AceStepTransformer1DModel", [1, 20, 4]),
        ("JoyImageEditTransformer3DModel", [1, 2, 4, 1, 20, 8]),
    ],
)
def test_rows_of_signals_and_of_several_images(name: str, shape: list[int]) -> None:
    if not hasattr(diffusers, name):
        pytest.skip("diffusers has no such model")
    model = getattr(diffusers, name)(**_SMALL[name])
    assert row_inputs(model, {"hidden_states": torch.zeros(shape)}) == {"hidden_states": shape.index(20)}
