"""Whole pipelines spread over ranks: the user's own call, scheduler and settings give one device's image."""

import copy
import inspect
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import CompileError, RunError
from fxpipe.plan.sample_grid import Grid
from fxpipe.sampler import Sampler
from tests.tiny_pipelines import PIPELINES, Call, noise, tiny

# Their loops round to float32, whatever the type of the weights: a difference may be its last bit.
FLOAT32_LOOPS = {"sana", "cogvideo", "wan", "z_image"}
# Ranks, groups of samples, and what comes out; three ranks with every sample and the latents elsewhere.
LAYOUTS = {
    "sd/image": (2, None, "pt"), "sdxl": (4, None, "latent"), "sd3": (4, 2, "latent"), "flux": (2, None, "pt"),
    "dit": (3, None, "pt"), "ddim": (2, 1, "np"), "pixart": (2, 2, "latent"),
    "z_image": (2, None, "latent"),
}  # fmt: skip


def sample(pipe: Any, call: Call, seed: int = 5, **changes: Any) -> Tensor:
    out = pipe(**{"output_type": "latent", **call, "generator": torch.Generator().manual_seed(seed), **changes})
    return torch.as_tensor(out.frames if hasattr(out, "frames") else out.images)


def error(found: Tensor, wanted: Tensor) -> float:
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    assert wanted.isfinite().all()
    assert wanted.std() > 0.1
    return float((found - wanted).abs().max() / wanted.abs().max())


# The others are sampled in tests of their own, below.
KEYS = [key for key in PIPELINES if key not in {"sd/small", "flux", "wan"}]


@pytest.mark.parametrize("key", KEYS)
def test_a_pipeline_is_one_devices(key: str) -> None:
    pipe, call = tiny(key)
    ranks, cfg, kind = LAYOUTS.get(key, (3, None, "latent"))
    sampler = fxpipe.compile_sampler(pipe, ranks, example=call, cfg=cfg, patches=ranks // (cfg or 1))
    found = sample(sampler.pipeline(), call, output_type=kind)
    assert error(found, sample(pipe, call, output_type=kind)) <= (1e-6 if key in FLOAT32_LOOPS else 1e-10)


def test_two_denoisers_and_a_decoder_that_is_given_its_caches(caplog: pytest.LogCaptureFixture) -> None:
    pipe, call = tiny("wan")
    sampler = fxpipe.compile_sampler(pipe, 2, example=call, patches=2, cfg=1)
    with caplog.at_level(logging.WARNING):
        found = sample(sampler.pipeline(), call, output_type="pt")
    assert error(found, sample(pipe, call, output_type="pt")) <= 1e-6
    assert sampler.name == "transformer"
    assert list(sampler.others) == ["transformer_2"]
    assert "runs whole on every rank" not in caplog.text
    latents = noise(1, 4, 3, 24, 16)
    with torch.no_grad():
        spread, alone = (one.vae.decode(latents).sample for one in (sampler.pipeline(), pipe))
    assert error(spread, alone) <= 1e-12


class Remembering(nn.Module):
    """A decoder that adds what it had before."""

    last: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        x, self.last = x + self.last, x.sin()
        return x


def test_a_decoder_that_keeps_what_it_had_is_not_traced_in_every_call(caplog: pytest.LogCaptureFixture) -> None:
    found = []
    for spread in (True, False):
        pipe, call = tiny("sd/small")
        pipe.vae.decoder = Remembering()
        one = fxpipe.compile_sampler(pipe, 2, example=call).pipeline() if spread else pipe
        with torch.no_grad(), caplog.at_level(logging.WARNING):
            found.append(torch.stack([one.vae.decode(noise(1, 4, 8, 8)).sample for _ in range(5)]))
    assert torch.equal(*found)
    assert caplog.text.count("Remembering runs whole on every rank") == 2


class Shared:
    """A pipeline and its spread copy on 3 ranks, for tests that leave both as they are."""

    def __init__(self) -> None:
        self.pipe, self.call = tiny("sd/small")
        self.sampler: Sampler = fxpipe.compile_sampler(self.pipe, 3, example=self.call)
        self.fast = self.sampler.pipeline()

    def error(self, changes: Callable[[], Call] = dict) -> float:
        return error(*(sample(pipe, self.call, **changes()) for pipe in (self.fast, self.pipe)))


@pytest.fixture(scope="module")
def shared() -> Shared:
    return Shared()


def test_compiling_leaves_the_pipeline_as_it_is(shared: Shared) -> None:
    pipe, _ = tiny("sd/small")
    before = {name: id(part) for name, part in pipe.components.items()}
    schedule = dict(pipe.scheduler.__dict__)
    config, modes = dict(pipe.config), [module.training for module in pipe.unet.modules()]
    gradients = [parameter.requires_grad for parameter in pipe.unet.parameters()]
    fxpipe.compile_sampler(pipe, 2, example=shared.call).pipeline()
    assert {name: id(part) for name, part in pipe.components.items()} == before
    assert pipe.scheduler.__dict__ == schedule
    assert dict(pipe.config) == config
    assert [module.training for module in pipe.unet.modules()] == modes
    assert [parameter.requires_grad for parameter in pipe.unet.parameters()] == gradients


def test_rows_that_are_decoded_go_by_the_speed_of_their_ranks() -> None:
    pipe, call = tiny("sd/small")
    sampler = fxpipe.compile_sampler(pipe, 2, example=call, cluster="2xA100*1,0.4", cfg=1, patches=2)
    assert error(sample(sampler.pipeline(), call), sample(pipe, call)) <= 1e-10
    assert sampler.decoder is not None
    config = pipe.vae.config
    plan = sampler.decoder.step((noise(1, config.latent_channels, 8, 8),), {}).plan
    first, second = (stop - start for start, stop in pairwise(plan.bounds))
    assert 0 < second <= 0.5 * first


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "Euler": diffusers.EulerDiscreteScheduler.from_config,
    "Euler ancestral": diffusers.EulerAncestralDiscreteScheduler.from_config,
    "DPM++": diffusers.DPMSolverMultistepScheduler.from_config,
    "DPM++ SDE": lambda config: diffusers.DPMSolverMultistepScheduler.from_config(
        config, algorithm_type="sde-dpmsolver++", use_karras_sigmas=True
    ),
    "Heun": diffusers.HeunDiscreteScheduler.from_config,
    "UniPC": diffusers.UniPCMultistepScheduler.from_config,
    "PNDM": diffusers.PNDMScheduler.from_config,
    "LCM": diffusers.LCMScheduler.from_config,
    "DDPM, thresholded": lambda config: diffusers.DDPMScheduler.from_config(config, thresholding=True),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_any_scheduler(name: str, shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for pipe in (shared.pipe, shared.fast):
            monkeypatch.setattr(pipe, "scheduler", SCHEDULERS[name](shared.pipe.scheduler.config))
        assert shared.error(lambda: {"num_inference_steps": 5}) <= 1e-10


def test_a_scheduler_that_draws_of_itself() -> None:
    pipe, call = tiny("sd3")
    pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(stochastic_sampling=True, shift=3.0)
    fast = fxpipe.compile_sampler(pipe, 2, example=call, patches=2).pipeline()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        wanted = sample(pipe, call)
        torch.manual_seed(1)
        assert error(sample(fast, call), wanted) <= 1e-10


def changed(pipe: Any, step: int, time: Any, kwargs: Call) -> Call:
    return {"latents": kwargs["latents"] * (1 + 0.01 * step)}


def unguided(pipe: Any, step: int, time: Any, kwargs: Call) -> Call:
    """Guidance ends halfway, as diffusers' own `SDCFGCutoffCallback` does it."""
    if step == 1:
        pipe._guidance_scale = 0.0
        return {"prompt_embeds": kwargs["prompt_embeds"][-1:]}
    return {}


CALLS: dict[str, Callable[[], Call]] = {
    "decoded": lambda: {"output_type": "pt"},
    "no guidance": lambda: {"guidance_scale": 1.0, "negative_prompt": None},
    "two images": lambda: {"num_images_per_prompt": 2, "output_type": "pt"},
    "two prompts": lambda: {"prompt": ["a b", "c d e f g"], "negative_prompt": ["", "h"]},
    "a generator each": lambda: {
        "prompt": ["a b", "c"], "negative_prompt": None,
        "generator": [torch.Generator().manual_seed(seed) for seed in (1, 2)],
    },
    "embeddings": lambda: {
        "prompt": None, "negative_prompt": None, "prompt_embeds": noise(1, 7, 8),
        "negative_prompt_embeds": noise(1, 7, 8, seed=1),
    },
    "its own latents": lambda: {"latents": noise(1, 4, 20, 12, seed=9)},
    "a callback": lambda: {"callback_on_step_end": changed},
    "guidance that ends": lambda: {
        "callback_on_step_end": unguided, "callback_on_step_end_tensor_inputs": ["latents", "prompt_embeds"],
    },
    "rescaled, noisy": lambda: {"guidance_rescale": 0.7, "eta": 0.6},
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_any_call(name: str, shared: Shared) -> None:
    assert shared.error(CALLS[name]) <= 1e-10


def test_calls_leave_nothing_to_each_other(shared: Shared) -> None:
    one, wide, other = {"prompt": "a"}, {"height": 24, "width": 40}, {"prompt": "h g f", "num_inference_steps": 5}
    alone = {id(given): sample(shared.pipe, shared.call, **given) for given in (one, wide, other)}
    first = sample(shared.fast, shared.call, **other)
    for given in (one, wide, other, one, wide, other):
        assert error(sample(shared.fast, shared.call, **given), alone[id(given)]) <= 1e-10
    with pytest.raises(ZeroDivisionError):
        sample(shared.fast, shared.call, callback_on_step_end=lambda *_: 1 // 0)
    assert torch.equal(sample(shared.fast, shared.call, **other), first)


def test_modules_in_training_mode_are_told(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Dropout(0.0), nn.Dropout(0.5), nn.BatchNorm2d(2)).double()
    x = noise(1, 2, 9, 5)
    for mode, told in [(True, 1), (False, 0)]:
        model.train(mode)
        with caplog.at_level(logging.WARNING):
            sampler = fxpipe.compile_sampler(model, 2, example={"input": x}, sample={"input": 2})
        assert caplog.text.count("2 and 1 more modules: in training mode") == told
        caplog.clear()
        lowering: Any = sampler.denoiser.lowering
        replace(lowering.tracing, tells=False).traced(model, (), {"input": x})  # as ranks that are not the first
        assert not caplog.text
    with torch.no_grad():
        assert error(sampler.predict(input=x), model(x)) <= 1e-10


class Merging(nn.Conv2d):
    """An adapter that goes into the weight in eval, as loralib's do."""

    merged = False

    def train(self, mode: bool = True) -> "Merging":
        if mode == self.merged:
            with torch.no_grad():
                self.weight.mul_(0.5 if mode else 2.0)
            self.merged = not mode
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 if self.merged else 2)


def test_a_mode_is_set_and_not_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    model, x = nn.Sequential(Merging(2, 2, 3, padding=1, bias=False)).double(), noise(1, 2, 9, 5)
    for one in (model, torch.export.export(model, (), {"input": x}).module()):  # whose own eval() refuses
        weight = next(one.parameters()).detach().clone()
        sampler = fxpipe.compile_sampler(one, 2, example={"input": x}, sample={"input": 2}, patches=2)
        with torch.no_grad():
            assert error(sampler.predict(input=x), one(input=x)) <= 1e-10
        assert torch.equal(next(one.parameters()), weight)
        assert one.training
    assert not model[0].merged
    assert caplog.text.count("0: in training mode, which its own train() or eval() sets; neither is called") == 1


def test_half_precision() -> None:
    pipe, call = tiny("sd/small", torch.bfloat16)
    wide, _ = tiny("sd/small", torch.float64)
    fast = fxpipe.compile_sampler(pipe, 2, example=call, patches=2).pipeline()
    found, wanted, exact = (sample(one, call) for one in (fast, pipe, wide))
    assert found.dtype == torch.bfloat16
    assert (found - wanted).double().norm() < (wanted - exact).norm()  # nearer than rounding has brought it


def test_the_copy_is_a_pipeline_like_any_other(shared: Shared, tmp_path: Path) -> None:
    pipe, fast = shared.pipe, shared.fast
    assert isinstance(fast, diffusers.StableDiffusionPipeline)
    assert inspect.signature(fast.__call__) == inspect.signature(pipe.__call__)
    assert isinstance(fast.unet, diffusers.UNet2DConditionModel)
    assert fast.components.keys() == pipe.components.keys()
    assert (fast.device, fast.dtype, fast.unet.dtype) == (pipe.device, pipe.dtype, pipe.unet.dtype)
    assert fast.unet.config is pipe.unet.config
    assert dict(fast.config) == dict(pipe.config)
    assert fast.unet.state_dict().keys() == pipe.unet.state_dict().keys()
    fast.save_pretrained(tmp_path / "fast")
    pipe.save_pretrained(tmp_path / "own")
    for own in (tmp_path / "own").rglob("*"):
        if own.is_file():
            assert (tmp_path / "fast" / own.relative_to(tmp_path / "own")).read_bytes() == own.read_bytes()


def test_another_pipeline_of_its_components_is_spread_too(shared: Shared) -> None:
    _, call = tiny("sd/image")
    own, fast = (diffusers.StableDiffusionImg2ImgPipeline(**one.components) for one in (shared.pipe, shared.fast))
    for pipe in (own, fast):
        pipe.set_progress_bar_config(disable=True)
    assert fast.unet is shared.fast.unet
    wanted = sample(own, call)
    assert error(sample(fast, call), wanted) <= 1e-10
    fast = diffusers.StableDiffusionImg2ImgPipeline.from_pipe(shared.fast, torch_dtype=torch.float64)
    assert (fast.unet, fast.vae) == (shared.fast.unet, shared.fast.vae)
    assert error(sample(fast, call), wanted) <= 1e-10


def test_a_spread_module_that_is_compiled() -> None:
    pipe, x = OwnLoop(Written()), noise(2, 2, 9, 5)
    fast = fxpipe.compile_sampler(pipe, 2, example={"x": x}, patches=2).pipeline()
    fast.net = torch.compile(fast.net, backend="eager")
    with torch.no_grad():
        assert error(fast(x), pipe(x)) <= 1e-10


class Added(nn.Module):
    """A low-rank adapter, as libraries of adapters put in place of a layer."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer, self.scale = layer, 1.0
        self.down = nn.Linear(layer.in_features, 2, bias=False, dtype=layer.weight.dtype)
        self.up = nn.Linear(2, layer.out_features, bias=False, dtype=layer.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.scale * self.up(self.down(x))


def test_what_is_changed_after_compiling_counts() -> None:
    pipe, call = tiny("sd/small")
    call |= {"num_inference_steps": 2}
    fast = fxpipe.compile_sampler(pipe, 2, example=call, patches=2).pipeline()
    attention = pipe.unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1
    adapter = Added(attention.to_q)

    def halve() -> None:
        with torch.no_grad():
            pipe.unet.conv_in.weight.mul_(0.5)

    def replace() -> None:
        pipe.unet.conv_out.weight = nn.Parameter(pipe.unet.conv_out.weight * 2)

    changes: dict[str, Callable[[], object]] = {
        "in place": halve,
        "replaced": replace,
        "an adapter": lambda: setattr(attention, "to_q", adapter),
        "its scale": lambda: setattr(adapter, "scale", 3.0),
        "a setting": lambda: pipe.enable_freeu(0.5, 0.4, 1.4, 1.6),
        "an adapter of the copy": lambda: setattr(
            fast.unet.down_blocks[0].attentions[0].transformer_blocks[0].attn2, "to_q", nn.Linear(8, 8).double()
        ),
    }
    before = sample(pipe, call)
    for what, change in changes.items():
        change()
        wanted = sample(pipe, call)
        assert error(wanted, before) > 1e-6, what
        assert error(sample(fast, call), wanted) <= 1e-10, what
        before = wanted


def test_tiles_are_told_to_either_and_a_second_call_is_the_first() -> None:
    """Tiles at the edge have fewer rows than there are ranks: they alone run whole."""
    pipe, call = tiny("sd/small")
    sampler = fxpipe.compile_sampler(pipe, 3, example=call)
    fast, call = sampler.pipeline(), {**call, "num_inference_steps": 1, "output_type": "pt"}
    untiled = sample(pipe, call)
    assert error(sample(fast, call), untiled) <= 1e-10
    pipe.vae.tile_sample_min_size, pipe.vae.tile_latent_min_size = 16, 8
    pipe.vae.enable_tiling()
    wanted = sample(pipe, call)
    assert error(wanted, untiled) > 1e-3
    found = sample(fast, call)
    assert error(found, wanted) <= 1e-10
    assert torch.equal(sample(fast, call), found)
    assert "Decoder, where a call is like this one, runs whole on every rank: 3 patches of 2 units" in str(sampler)
    fast.vae.disable_tiling()
    assert torch.equal(sample(pipe, call), untiled)
    decoder = pipe.vae.decoder
    pipe.vae.decoder = nn.Upsample(scale_factor=2)
    assert fast.vae.decoder is pipe.vae.decoder
    fast.vae.decoder = decoder
    assert error(sample(fast, call), sample(pipe, call)) <= 1e-10


def test_another_type_after_compiling() -> None:
    pipe, call = tiny("sd/small")
    fast = fxpipe.compile_sampler(pipe, 2, example=call, patches=2).pipeline()
    fast.to(torch.float32)
    wanted = sample(pipe, call, output_type="pt")
    assert wanted.dtype == torch.float32
    assert error(sample(fast, call, output_type="pt"), wanted) <= 5e-5


def test_calls_of_two_threads_wait_for_each_other(shared: Shared) -> None:
    prompts = ["a b", "c d e"]
    alone = [sample(shared.pipe, shared.call, prompt=prompt) for prompt in prompts]
    others = [copy.copy(shared.fast) for _ in prompts]
    for one in others:  # a scheduler counts its steps
        one.scheduler = copy.deepcopy(shared.pipe.scheduler)
    with ThreadPoolExecutor(2) as pool:
        found = [
            pool.submit(sample, one, shared.call, prompt=prompt) for one, prompt in zip(others, prompts, strict=True)
        ]
    assert all(error(one.result(), wanted) <= 1e-10 for one, wanted in zip(found, alone, strict=True))


def threaded(mode: str = "displaced") -> tuple[Sampler, Callable[[int], Call]]:
    """A sampler of one's own, and what its steps are given; one later than the first is displaced."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.SiLU(), nn.Conv2d(4, 2, 3, padding=1)).double()
    how: dict[str, Any] = {"mode": mode, "warmup": 1, "patches": 2, "sample": {"input": 2}}
    sampler = fxpipe.compile_sampler(model, 2, example={"input": noise(1, 2, 12, 5)}, **how)
    return sampler, lambda seed: {"input": noise(1, 2, 12, 5, seed=seed)}


def test_a_call_goes_on_and_ends_on_any_thread() -> None:
    """As a stream of a server's is, whose steps come from a pool; or a prediction for which a step waits."""
    sampler, given = threaded()

    def stream() -> Iterator[Tensor]:
        with sampler.call():
            for step in range(3):
                yield sampler.predict(**given(step))

    wanted = [*stream()]
    assert not torch.equal(wanted[1], sampler.predict(**given(1)))  # which is exact
    found = list[Tensor]()
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        for _ in range(2):
            steps, found = stream(), []
            for pool in (one, other, one):
                found.append(pool.submit(next, steps).result(20))
            other.submit(steps.close).result(20)  # type: ignore[attr-defined]
            assert all(map(torch.equal, found, wanted))
        with sampler.call():
            found = [pool.submit(sampler.predict, **given(step)).result(20) for step, pool in enumerate((one, other))]
        assert all(map(torch.equal, found, wanted))
    assert all(map(torch.equal, stream(), wanted))


def test_a_call_that_waits_for_one_that_waits_for_it_is_told(monkeypatch: pytest.MonkeyPatch, shared: Shared) -> None:
    told = list[str]()
    monkeypatch.setattr("fxpipe.run.ranks._log.warning", lambda form, text: told.append(text))
    monkeypatch.setattr("fxpipe.run.ranks._TOLD_SECONDS", 0.05)
    monkeypatch.setattr("fxpipe.run.ranks._IDLE_SECONDS", 1.5)
    with ThreadPoolExecutor(1) as pool:
        with shared.sampler.call(), pytest.raises(RunError, match=r"nothing has been predicted for \d s; where that"):
            pool.submit(sample, shared.fast, shared.call).result(20)
        assert "a call waits for another thread's" in told[0]
        assert pool.submit(sample, shared.fast, shared.call).result(20).isfinite().all()


class Scaled(nn.Module):
    """By a number of the call, and one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.scale = nn.Conv2d(2, 2, 3, padding=1).double(), 1.0

    def forward(self, x: Tensor, scale: float) -> Tensor:
        return self.conv(x) * (scale * self.scale)


def test_programs_of_old_scales_are_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxpipe.sampling.spread._MOST_KINDS", 2)
    model, x = Scaled(), noise(2, 2, 9, 5)
    sampler = fxpipe.compile_sampler(model, 2, example={"x": x, "scale": 1.0}, sample={"x": 2}, patches=2)
    ranks: Any = sampler.ranks
    first = sampler.step
    with torch.no_grad():
        for scale in (1.0, 2.0, 3.0, 2.0, 4.0, 5.0, 2.0, 1.0):
            assert error(sampler.predict(x=x, scale=scale), model(x, scale)) <= 1e-12
            assert len(ranks._bound) <= 3
        assert sampler.step is first
        for scale in (1.5, 2.5, 3.5):
            model.scale = scale
            assert error(sampler.predict(x=x, scale=1.0), model(x, 1.0)) <= 1e-12
            assert len(ranks._bound) == 1


def test_numbers_that_are_others_in_every_call_are_told(caplog: pytest.LogCaptureFixture) -> None:
    model, x = Scaled(), noise(2, 2, 9, 5)
    sampler = fxpipe.compile_sampler(model, 2, example={"x": x, "scale": 1.0}, sample={"x": 2}, patches=2)
    with caplog.at_level(logging.WARNING):
        for scale, told in ((2.0, 0), (1.0, 0), (3.0, 1), (4.0, 1)):
            sampler.predict(x=x, scale=scale)
            assert caplog.text.count("Scaled: input scale is a number, traced and compiled anew") == told


FACTOR = 1.0


class Named(nn.Module):
    """By numbers that its code names."""

    factor, config = 1.0, SimpleNamespace(factors=[1.0])
    of_closure: Callable[["Named"], float]

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) * (self.factor * FACTOR * self.config.factors[0] * self.of_closure())


def closed(factors: list[float]) -> Callable[[Named], float]:
    return lambda self: factors[0]


def test_what_the_models_code_names_is_as_it_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    factors = [1.0]
    monkeypatch.setattr(Named, "of_closure", closed(factors), raising=False)
    model, x = Named(), noise(2, 2, 9, 5)
    sampler = fxpipe.compile_sampler(model, 2, example={"x": x}, sample={"x": 2}, patches=2)

    def doubled(module: nn.Module, given: object, output: Any) -> Any:
        return output * 2 if isinstance(module, nn.Conv2d) else output

    with torch.no_grad():
        for where, name in ((Named, "factor"), (sys.modules[__name__], "FACTOR")):
            first = sampler.step
            assert sampler.step is first
            monkeypatch.setattr(where, name, 3.0)
            assert error(sampler.predict(x=x), model(x)) <= 1e-12
        monkeypatch.setattr(Named.config, "factors", [2.0])
        assert error(sampler.predict(x=x), model(x)) <= 1e-12
        factors[0] = 0.5
        assert error(sampler.predict(x=x), model(x)) <= 1e-12
        forward = nn.Conv2d.forward
        monkeypatch.setattr(nn.Conv2d, "forward", lambda self, x: forward(self, x) * 2)
        assert error(sampler.predict(x=x), model(x)) <= 1e-12
        hook = nn.modules.module.register_module_forward_hook(doubled)
        try:
            assert error(sampler.predict(x=x), model(x)) <= 1e-12
        finally:
            hook.remove()
        assert error(sampler.predict(x=x), model(x)) <= 1e-12


class Scale:
    """What hangs on a model, and names more."""

    more = 1.0

    def __init__(self) -> None:
        self.own, self.array, self.others = 1.0, np.ones(1), deque([1.0])

    def __call__(self, module: nn.Module, given: object, output: Any) -> Any:
        return output * (FACTOR * self.more * self.own * self.array[0] * self.others[0])

    def hook(self, *given: Any) -> Any:
        return self(*given)


HOOKS: dict[str, Callable[[Scale], Callable[..., Any]]] = {
    "an object": lambda scale: scale,
    "a method": lambda scale: scale.hook,
    "a closure": lambda scale: lambda *given: scale(*given),
    "a partial": lambda scale: partial(Scale.hook, scale),
}


@pytest.mark.parametrize("name", HOOKS)
def test_what_hooks_read_is_as_it_is_now(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, scale = nn.Conv2d(2, 2, 3, padding=1).double(), noise(2, 2, 9, 5), Scale()
    model.register_forward_hook(HOOKS[name](scale))
    sampler = fxpipe.compile_sampler(model, 2, example={"input": x}, sample={"input": 2}, patches=2)
    changes: list[Callable[[], object]] = [
        lambda: monkeypatch.setitem(globals(), "FACTOR", 3.0),
        lambda: monkeypatch.setattr(Scale, "more", 3.0),
        lambda: setattr(scale, "own", 3.0),
        lambda: scale.array.fill(3.0),
        lambda: scale.others.appendleft(3.0),
    ]
    with torch.no_grad():
        for change in changes:
            first = sampler.step
            assert sampler.step is first
            change()
            assert error(sampler.predict(input=x), model(x)) <= 1e-12


class Ramp(nn.Module):
    """Numbers of the type that is torch's default when it is called."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.tensor(0.1) + torch.arange(3).sum() * 0.1)


def test_torchs_default_type_is_as_it_is_now() -> None:
    model, x = Ramp(), noise(2, 2, 9, 5)
    sampler = fxpipe.compile_sampler(model, 2, example={"x": x}, sample={"x": 2}, patches=2)
    before, found = torch.get_default_dtype(), []
    for dtype in (torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            found.append(error(sampler.predict(x=x), model(x)))
        finally:
            torch.set_default_dtype(before)
    assert max(found) <= 1e-12


def test_a_forward_that_is_wrapped_on_the_module_has_its_class_arguments() -> None:
    pipe, call = tiny("sd/small")
    forward = pipe.unet.forward
    pipe.unet.forward = lambda *args, **kwargs: tuple(1.5 * one for one in forward(*args, **kwargs))
    fast = fxpipe.compile_sampler(pipe, 2, example=call, patches=2, cfg=1).pipeline()
    assert error(sample(fast, call), sample(pipe, call)) <= 1e-10


def test_new_sizes_of_several_threads_are_compiled_one_by_one() -> None:
    sampler, _ = threaded("exact")
    inputs = [noise(1, 2, height, width) for height, width in ((14, 5), (16, 6), (12, 7), (10, 8))]
    with ThreadPoolExecutor(4) as pool:
        together = Barrier(4)
        found = [*pool.map(lambda x: (together.wait(20), sampler.predict(input=x))[1], inputs)]
    with torch.no_grad():
        assert all(error(one, sampler.model(x)) <= 1e-10 for one, x in zip(found, inputs, strict=True))


def test_new_kinds_of_calls_in_inference_mode(shared: Shared) -> None:
    given: Call = {"height": 56, "width": 16, "output_type": "pt"}
    wanted = sample(shared.pipe, shared.call, **given)
    with torch.inference_mode():
        found = sample(shared.fast, shared.call, **given)
        made = fxpipe.compile_sampler(shared.pipe, 2, example=shared.call).pipeline()
    assert error(found.clone(), wanted) <= 1e-10
    assert error(sample(made, shared.call, **given), wanted) <= 1e-10


class Taking(nn.Module):
    """Takes a residual out of the list it is given, as U-Nets with adapters do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1).double()

    def forward(self, x: Tensor, residuals: list[Tensor]) -> Tensor:
        return self.conv(x) + residuals.pop(0) * residuals[0]


def test_a_list_that_forward_empties() -> None:
    model, x = Taking(), noise(2, 2, 9, 5)
    sampler = fxpipe.compile_sampler(model, 2, example={"x": x, "residuals": [x, x]}, sample={"x": 2}, patches=2)
    with torch.no_grad():
        wanted = model(x, [x + 1, 2 * x])
    assert error(sampler.predict(x=x, residuals=[x + 1, 2 * x]), wanted) <= 1e-10
    assert all(sampler.verify().ok for _ in range(2))


class Written(nn.Module):
    """A denoiser of no library, by names that others use, and a pipeline of it."""

    def __init__(self) -> None:
        super().__init__()
        self.config: Call = {}
        self.conv = nn.Conv2d(2, 2, 3, padding=1).double()

    def forward(self, x: Tensor, t: Tensor, img_ids: Tensor | None = None) -> Tensor:
        return self.conv(self.conv(x.flatten(0, -4))).reshape(x.shape) * t


class OwnLoop:
    def __init__(self, net: nn.Module) -> None:
        self.net, self.components = net, {"net": net}

    def __call__(self, x: Tensor, steps: int = 3) -> Tensor:
        for step in range(steps):
            x = x - 0.1 * self.net(x, torch.full((), 1.0 - step / steps, dtype=x.dtype))
        return x


@pytest.mark.parametrize("shape", [(2, 2, 9, 5), (2, 3, 2, 9, 5)])
def test_a_pipeline_of_no_library(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    pipe, x = OwnLoop(Written()), noise(*shape)
    sampler = fxpipe.compile_sampler(pipe, 3, example={"x": x}, patches=3)
    with torch.no_grad():
        assert error(sampler.pipeline()(x), pipe(x)) <= 1e-10
    assert sampler.step.traced.rows == {"x": len(shape) - 2}


class Storing(Written):
    """Leaves what somebody may look for, as attention maps."""

    last: Tensor | None = None

    def forward(self, x: Tensor, t: Tensor, img_ids: Tensor | None = None) -> Tensor:
        self.last = super().forward(x, t)
        return self.last.sin()


class Looking(OwnLoop):
    def __call__(self, x: Tensor, steps: int = 3) -> Tensor:
        return super().__call__(x, steps) + self.net.last.mean()


def test_what_a_pipeline_misses_is_told() -> None:
    pipe, x = Looking(Storing()), noise(2, 2, 9, 5)
    for _ in range(2):  # the second trace is of the cache
        with pytest.warns(UserWarning, match="forward sets its attribute 'last'"):
            fast = fxpipe.compile_sampler(pipe, 2, example={"x": x}, patches=2).pipeline()
        with pytest.raises(AttributeError) as raised:
            fast(x)
        (note,) = raised.value.__notes__
        assert "forward sets its attribute 'last', new, to a tensor, which engines and samplers leave as it is" in note


class Previewing(OwnLoop):
    def __call__(self, x: Tensor, steps: int = 5, callback: Callable[[], object] = lambda: None) -> Tensor:
        x = super().__call__(x, steps - 2)
        callback()
        return super().__call__(x, 2)


def test_a_call_within_a_call_is_one_of_its_own() -> None:
    torch.manual_seed(0)
    x, y, found = noise(2, 2, 9, 5), noise(2, 2, 9, 5, seed=1), list[Tensor]()
    sampler = fxpipe.compile_sampler(Previewing(Written()), 2, example={"x": x}, patches=2, mode="displaced", warmup=1)
    fast = sampler.pipeline()
    alone = fast(x), fast(y)
    others = [fast(x, callback=lambda: found.append(fast(y))) for _ in range(2)]
    assert all(torch.equal(one, alone[1]) for one in found)
    assert torch.equal(*others)
    assert 0 < error(others[0], alone[0]) < 0.1


def test_a_deep_copy_has_weights_of_its_own(shared: Shared) -> None:
    torch.manual_seed(0)
    pipe, x = OwnLoop(Written()), noise(2, 2, 9, 5)
    fast = fxpipe.compile_sampler(pipe, 2, example={"x": x}, patches=2).pipeline()
    with torch.no_grad():
        wanted, own = pipe(x), copy.deepcopy(fast)
        own.net.conv.weight.mul_(2)
        assert error(fast(x), wanted) <= 1e-10
        pipe.net.conv.weight.mul_(2)
        assert error(own(x), pipe(x)) <= 1e-10
        assert error(pipe(x), wanted) > 1e-2
    vae = copy.deepcopy(shared.fast.vae)
    assert vae.decoder.conv_in.weight is vae.state_dict(keep_vars=True)["decoder.conv_in.weight"]
    assert vae.decoder.conv_in.weight is not shared.pipe.vae.decoder.conv_in.weight


class Controlled(Written):
    """Backbone and ControlNet in one."""

    def forward(self, x: Tensor, t: Tensor, controlnet_cond: Tensor | None = None) -> Tensor:
        return super().forward(x, t) * 2


class GoingOn(OwnLoop):
    """Takes what fails for a bad sample."""

    def __call__(self, x: Tensor, steps: int = 3) -> Tensor:
        try:
            return super().__call__(x, steps)
        except Exception:
            return torch.zeros_like(x)


@pytest.mark.parametrize("made", [lambda: OwnLoop(Controlled()), lambda: GoingOn(Written())])
def test_own_controlnets_and_own_handling_of_errors(made: Any) -> None:
    torch.manual_seed(0)
    pipe, x = made(), noise(2, 2, 9, 5)
    fast = fxpipe.compile_sampler(pipe, 2, example={"x": x}, patches=2).pipeline()
    with torch.no_grad():
        assert error(fast(x), pipe(x)) <= 1e-10


class Prior(nn.Module):
    """Predicts an embedding, which has no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.config: Call = {}
        self.linear = nn.Linear(2, 2).double()

    def forward(self, hidden_states: Tensor, timestep: Tensor) -> Tensor:
        return self.linear(hidden_states) * timestep


class Ratio(Written):
    """A denoiser that calls its time r."""

    def forward(self, x: Tensor, r: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, r)


class Combined:
    """A pipeline of a pipeline, whose denoiser it names otherwise."""

    def __init__(self) -> None:
        self.prior, self.decoder_net = Prior(), Ratio()
        self.decoder = OwnLoop(self.decoder_net)
        self.components = {"prior": self.prior, "decoder_net": self.decoder_net}

    def __call__(self, x: Tensor) -> Tensor:
        return self.decoder(x * self.prior(x.mean((2, 3)), torch.ones(2, 1))[:, :, None, None])


def test_a_pipeline_of_pipelines(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    pipe, x = Combined(), noise(2, 2, 9, 5)
    with caplog.at_level(logging.WARNING):
        sampler = fxpipe.compile_sampler(pipe, 2, example={"x": x}, cfg=1, patches=2)
    assert "prior runs whole on every rank: Prior: its hidden_states [2, 2] has no rows" in caplog.text
    assert (sampler.name, [*sampler.others]) == ("decoder_net", [])
    fast = sampler.pipeline()
    assert fast.decoder.net is fast.decoder_net
    assert pipe.decoder.net is pipe.decoder_net
    with torch.no_grad():
        assert error(fast(x), pipe(x)) <= 1e-10


class Setting(OwnLoop):
    """Sets its module otherwise for a call, and back at the call's end, as perturbed attention does."""

    def __call__(self, x: Tensor, steps: int = 3, perturbed: bool = True) -> Tensor:
        if perturbed:
            own, self.net.conv = self.net.conv, nn.Sequential(self.net.conv, nn.SiLU())
        found = super().__call__(x, steps)
        if perturbed:
            self.net.conv = own
        return found


def test_what_a_call_sets_for_itself_is_back_after_compiling() -> None:
    torch.manual_seed(0)
    pipe, x = Setting(Written()), noise(2, 2, 9, 5)
    before, keys = repr(pipe.net), pipe.net.state_dict().keys()
    with torch.no_grad():
        wanted = [pipe(x), pipe(x, perturbed=False)]
        assert error(*wanted) > 1e-2
        fast = fxpipe.compile_sampler(pipe, 2, example={"x": x}, patches=2).pipeline()
        assert (repr(pipe.net), pipe.net.state_dict().keys()) == (before, keys)
        for perturbed in (True, False, True):
            assert error(fast(x, perturbed=perturbed), wanted[not perturbed]) <= 1e-10


class Listed(Taking):
    """Samples come as a list, and what is predicted of each goes as one, a pair each."""

    def forward(self, x: list[Tensor], time: Tensor) -> Any:
        return {"pairs": [(self.conv(one[None])[0].sin() * time, 1, one) for one in x]}


def test_lists_of_samples() -> None:
    torch.manual_seed(0)
    model, given = Listed(), {"x": [noise(2, 9, 5), noise(2, 9, 5, seed=1)], "time": noise(1)}
    sampler = fxpipe.compile_sampler(model, 3, example=given, sample={"x.0": 1, "x.1": 1}, patches=3)
    for order in (1, -1):
        call = {**given, "x": given["x"][::order]}
        with torch.no_grad():
            pairs = [(found, wanted) for one, other in zip(sampler.predict(**call)["pairs"], model(**call)["pairs"],
                      strict=True) for found, wanted in zip(one, other, strict=True)]  # fmt: skip
        assert len(pairs) == 6
        assert all(error(found, wanted) <= 1e-10 for found, wanted in pairs if isinstance(found, Tensor))


class Double(Taking):
    def forward(self, x: Tensor) -> Any:
        hidden = self.conv(x)
        return hidden.sin(), x + hidden.mean((1, 2, 3), keepdim=True)


@pytest.mark.parametrize("how", [{"cfg": 2, "patches": 2}, {"cfg": 1, "stages": 2, "patches": 2}])
def test_several_predictions_of_one_shape(how: Call) -> None:
    torch.manual_seed(0)
    model, x = Double(), noise(2, 2, 9, 5)
    sampler = fxpipe.compile_sampler(model, 4, example={"x": x}, sample={"x": 2}, **how)
    with torch.no_grad():
        both = zip(sampler.predict(x=x), model(x), strict=True)
        assert all(error(found, wanted) <= 1e-10 for found, wanted in both)


class Guided(Taking):
    """Reads one half of the batch for the other, as perturbed attention does."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.conv(x).chunk(2)
        return torch.cat([first, first - second])


def test_samples_that_read_each_other_are_not_split() -> None:
    model, x = Guided(), noise(2, 2, 9, 5)
    sampler = fxpipe.compile_sampler(model, 2, example={"x": x}, patches=2, sample={"x": 2})
    assert sampler.grid == Grid(1, 2)
    with torch.no_grad():
        assert error(sampler.predict(x=x), model(x)) <= 1e-10


class Perturbed(Taking):
    """Thirds of the batch, of which fewer samples are none."""

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.conv(x).chunk(3)
        return torch.cat([first, second, third - second])


@pytest.mark.parametrize("how", [{"cfg": 2}, {"cfg": 3}, {"cfg": 2, "patches": 1}])
def test_groups_of_samples_that_read_each_other_are_refused(how: Call) -> None:
    x, groups = noise(3, 2, 9, 5), how["cfg"]
    with pytest.raises(CompileError, match=f"{groups} groups of samples, .* cannot be computed apart; use cfg=1. mod"):
        fxpipe.compile_sampler(Perturbed(), groups, example={"x": x}, sample={"x": 2}, **how)


class Apart(Taking):
    """Samples come as a list."""

    def forward(self, x: list[Tensor]) -> Tensor:
        return torch.stack([self.conv(one[None])[0] for one in x])


def test_groups_of_samples_in_a_list_are_refused() -> None:
    x = [noise(2, 9, 5), noise(2, 9, 5, seed=1)]
    with pytest.raises(CompileError, match=r"2 groups of samples, .* use cfg=1. .*: x is a list of tensors"):
        fxpipe.compile_sampler(Apart(), 2, example={"x": x}, sample={"x.0": 1, "x.1": 1}, cfg=2)


class Framed(Taking):
    """Reads a text for every frame of every sample, and numbers that are no sample's."""

    def forward(self, x: Tensor, text: Tensor, table: Tensor) -> Tensor:
        frames = x.transpose(1, 2).flatten(0, 1)
        mixed = nn.functional.scaled_dot_product_attention(self.conv(frames).flatten(2).mT, text, text)
        return mixed.mT.reshape(-1, x.shape[2], 2, *x.shape[3:]).transpose(1, 2) * table.sum()


@pytest.mark.parametrize("how", [{"cfg": 2, "patches": 2}, {"cfg": 1, "stages": 2, "patches": 2, "sizes": "any"}])
def test_inputs_with_several_rows_to_a_sample(how: Call) -> None:
    torch.manual_seed(0)
    model, table = Framed(), noise(8)
    sampler = fxpipe.compile_sampler(model, 4, example=framed(2, 3, table), sample={"x": 3}, **how)
    several = {leaf.name: leaf.each for leaf in sampler.capture.inputs.leaves}
    assert several == {"x": 1, "text": 3, "table": 1}
    assert sampler.verify().ok
    for samples, frames in ((2, 3), (4, 3), (2, 5), (3, 2)):
        call = framed(samples, frames, table)
        with torch.no_grad():
            assert error(sampler.predict(**call), model(**call)) <= 1e-10


class Tabled(Taking):
    """Looks rows up in a table, which are no sample's, however many they are."""

    def forward(self, x: Tensor, table: Tensor, places: Tensor) -> Tensor:
        result: Tensor = self.conv(x) + nn.functional.embedding(places, table).mean(0)[:, None, None]
        return result


def test_a_table_of_as_many_rows_as_samples() -> None:
    model = Tabled()
    call = {"x": noise(2, 2, 9, 5), "table": noise(2, 2, seed=1), "places": torch.tensor([0, 1, 1])}
    sampler = fxpipe.compile_sampler(model, 2, example=call, sample={"x": 2}, cfg=2, patches=1)
    assert sampler.verify().ok
    for samples, rows in ((4, 2), (2, 2), (2, 3)):
        call |= {"x": noise(samples, 2, 9, 5), "table": noise(rows, 2, seed=1)}
        with torch.no_grad():
            assert error(sampler.predict(**call), model(**call)) <= 1e-10


def test_one_sample_and_a_table_of_two_rows() -> None:
    model = Tabled()
    call = {"x": noise(1, 2, 9, 5), "table": noise(2, 2, seed=1), "places": torch.tensor([0, 1, 1])}
    sampler = fxpipe.compile_sampler(model, 2, example=call, sample={"x": 2}, patches=2, cache=False)
    for samples in (1, 2):
        call["x"] = noise(samples, 2, 9, 5)
        with torch.no_grad():
            assert error(sampler.predict(**call), model(**call)) <= 1e-10


class Behind(Taking):
    """Adds what is left of its table behind two rows, which is nothing."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        left = (x.mean((2, 3))[:, None] * table[2:]).unflatten(2, (2, -1)).sum((1, 2, 3))
        return self.conv(x) + left[:, None, None, None]


def test_values_without_entries() -> None:
    example = {"x": noise(3, 2, 9, 5), "table": noise(2, 2)}
    assert fxpipe.compile_sampler(Behind(), 2, example=example, sample={"x": 2}, cfg=2, cache=False).verify().ok


class Pieces(Taking):
    """Reads the faces of all samples eight at a time, which are two pieces of two samples or three, not of one."""

    def forward(self, x: Tensor, faces: Tensor) -> Tensor:
        read = torch.cat([piece.tanh() for piece in faces.flatten(0, 1).split(8)])
        return self.conv(x) + read.unflatten(0, (len(x), -1)).mean(1)[..., None, None]


def test_values_in_pieces_of_a_given_size() -> None:
    model = Pieces()
    calls = [{"x": noise(samples, 2, 9, 5), "faces": noise(samples, 5, 2)} for samples in (2, 1, 3, 4)]
    sampler = fxpipe.compile_sampler(model, 2, example=calls[0], sample={"x": 2}, patches=2, cfg=1, cache=False)
    for call in calls:
        with torch.no_grad():
            assert error(sampler.predict(**call), model(**call)) <= 1e-10


def framed(samples: int, frames: int, table: Tensor) -> Call:
    return {"x": noise(samples, 2, frames, 9, 5), "text": noise(samples * frames, 4, 2, seed=1), "table": table}
