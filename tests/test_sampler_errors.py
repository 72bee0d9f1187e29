"""What cannot be sampled over ranks is refused in words for the person who must act."""

from collections.abc import Callable, Mapping
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import fxpipe
from fxpipe.errors import FxpipeError
from tests.test_sampler_caches import Cache
from tests.tiny_pipelines import Call, noise, tiny


class Denoiser(nn.Module):
    """Rows of no library; `predict` says what else it does."""

    def __init__(
        self, predict: Callable[[nn.Module, Tensor, Tensor], Any] = lambda self, x, time: self.conv(x)
    ) -> None:
        super().__init__()
        self.conv, self.predict = nn.Conv2d(2, 2, 3, padding=1).double(), predict
        self.register_buffer("count", torch.zeros(()))

    def forward(self, sample: Tensor, timestep: Tensor, kept: Any = None) -> Any:
        return self.predict(self, sample, timestep)


def counting(model: nn.Module, sample: Tensor, time: Tensor) -> Tensor:
    """Every call after the first is another one."""
    conv: Any = model.conv
    conv.calls = getattr(conv, "calls", 0) + 1
    result: Tensor = conv(sample) * conv.calls
    return result


def remembering(model: nn.Module, sample: Tensor, time: Tensor) -> Tensor:
    """What it sets changes nothing."""
    conv: Any = model.conv
    conv.calls, conv.height = getattr(conv, "calls", 0) + 1, int(sample.shape[2])
    result: Tensor = conv(sample)
    return result


GIVEN: Call = {"sample": noise(2, 2, 12, 5), "timestep": noise(2)}
ROWS = {"sample": 2}
TWICE = Cache(1)

# What is compiled, for how many ranks and with which options; and what the error says.
MODULES: dict[str, tuple[Any, int, dict[str, Any], str]] = {
    "no module": (None, 2, {}, "NoneType is neither a pipeline nor a module"),
    "unknown rows": (
        Denoiser(), 2, {"sample": None, "example": {"sample": torch.zeros(1, 4, 8), "timestep": torch.zeros(1)}},
        r"pass sample=\{name of the input: row dimension\}",
    ),
    "no such input": (Denoiser(), 2, {"sample": {"x": 2}}, r"'x' is no input .* which are \['sample'\]"),
    "no such dimension": (Denoiser(), 2, {"sample": {"sample": 4}}, "it has no dimension 4"),
    "no dimension": (Denoiser(), 2, {"sample": {"sample": "H"}}, "dimensions are integers"),
    "no call": (Denoiser(), 2, {"example": {}}, "has no tensor; give keyword arguments of Denoiser"),
    "no example": (Denoiser(), 2, {"example": None}, "example is missing, and Denoiser has no config to make one from"),
    "another call": (Denoiser(), 2, {"example": {**GIVEN, "noise": 1}}, "unexpected keyword argument 'noise'"),
    "no ranks": (Denoiser(), 0, {}, "world_size must be a positive integer, got 0"),
    "more ranks than rows": (Denoiser(), 13, {"cfg": 1}, "13 patches of 12 units .* use 12 patches or fewer"),
    "ranks left over": (Denoiser(), 4, {"cfg": 3}, "cfg=3 can't be world_size=4 ranks"),
    "ranks left over of displaced stages": (
        Denoiser(), 8, {"cfg": 3, "stages": 2, "mode": "displaced"}, "cfg=3 x stages=2 can't be world_size=8 ranks",
    ),
    "more groups than samples": (Denoiser(), 4, {"cfg": 4}, "cfg=4 groups of samples, but a call has 2; leave cfg out"),
    "more by its patches": (Denoiser(), 4, {"patches": 1}, "cfg=4 groups of samples, but a call has 2; leave patches"),
    "random numbers": (
        Denoiser(lambda self, x, time: self.conv(x) + torch.randn_like(x)), 2, {},
        "forward draws random numbers .* pass them as an input",
    ),
    "its own input": (Denoiser(lambda self, x, time: x), 2, {"cfg": 1}, "forward returns sample as it is"),
    "no entries": (Denoiser(lambda self, x, time: self.conv(x)[:, :, :0]), 2, {"cfg": 1}, "a tensor without entries"),
    "mixed samples": (
        Denoiser(lambda self, x, time: self.conv(x) - x.mean(0, keepdim=True)), 2, {"cfg": 2}, "it mixes samples",
    ),
    "several tensors": (
        Denoiser(lambda self, x, time: (self.conv(x), x[0, :1])), 2, {},
        r"returns 2 tensors in a tuple \(\[\w+, 2, 12, 5\] float64, \[1, 12, 5\] .* wrap the model in a module",
    ),
    "a size as a key": (
        Denoiser(lambda self, x, time: self.conv(x) * len({*(time > 0).sum(0, True).tolist()})), 2,
        {}, "unhashable type.* it takes as a key, or into a set, a size or a number read from a tensor",
    ),
    "a number that changes": (
        Denoiser(lambda self, x, time: self.conv(x) * float(time[0])), 2, {}, "decides by the value",
    ),
    "weights that are cast": (
        Denoiser(lambda self, x, time: self.conv.float()(x.float())), 2, {},
        "forward casts or moves its module's own weights .*cast or move the whole model before compiling",
    ),
    "a buffer that counts": (
        Denoiser(lambda self, x, time: self.conv(x) * self.count.add_(1)), 2, {},
        r"changes the buffer 'count', which sampling leaves as it is; call .eval\(\)",
    ),
    "an attribute that counts": (
        Denoiser(counting), 2, {},
        r"module conv: forward sets its attribute 'calls', new, to 1, and computes something else the next",
    ),
    "an object that is there twice": (
        Denoiser(), 2, {"example": {**GIVEN, "kept": [TWICE, TWICE]}}, "kept.1 is a Cache: an input must be",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", MODULES)
def test_a_module_that_is_refused(what: str) -> None:
    model, ranks, options, message = MODULES[what]
    with pytest.raises(FxpipeError, match=message):
        fxpipe.compile_sampler(model, ranks, **{"example": GIVEN, "sample": ROWS, **options})


def test_derivatives_of_a_prediction_are_refused() -> None:
    """Of guidance by gradients a part goes past the denoiser: without this error it would be all there is."""
    sampler = fxpipe.compile_sampler(Denoiser(), 2, example=GIVEN, sample=ROWS)
    noisy = GIVEN["sample"].clone().requires_grad_()
    why = r"input sample of shape \[2, 2, 12, 5\] requires a gradient.* under torch.no_grad"
    with pytest.raises(FxpipeError, match=why):
        (noisy - sampler.predict(**{**GIVEN, "sample": noisy})).square().sum().backward()
    with forward_ad.dual_level(), pytest.raises(FxpipeError, match=r"input sample .* has a tangent"):
        sampler.predict(**{**GIVEN, "sample": forward_ad.make_dual(noisy.detach(), torch.ones_like(noisy))})
    assert torch.equal(sampler.predict(**{**GIVEN, "sample": noisy.detach()}), sampler.predict(**GIVEN))
    with torch.no_grad():
        assert torch.equal(sampler.predict(**{**GIVEN, "sample": noisy}), sampler.predict(**GIVEN))


def test_a_call_inside_a_vmap_is_refused() -> None:
    sampler = fxpipe.compile_sampler(Denoiser(), 2, example=GIVEN, sample=ROWS)
    with pytest.raises(FxpipeError, match=r"inside torch.vmap.* all samples as one batch"):
        torch.vmap(lambda sample: sampler.predict(**{**GIVEN, "sample": sample}))(GIVEN["sample"][None])
    assert sampler.verify().ok


def test_attributes_that_change_nothing_are_no_fault() -> None:
    model = Denoiser(remembering)
    sampler = fxpipe.compile_sampler(model, 2, example=GIVEN, sample=ROWS)
    with torch.no_grad():
        assert torch.allclose(sampler.predict(**GIVEN), model(**GIVEN), rtol=0, atol=1e-12)


@pytest.fixture(scope="module")
def sd() -> tuple[Any, Call]:
    return tiny("sd/small")


EXAMPLES: dict[str, tuple[Mapping[str, Any] | None, str]] = {
    "none": (None, "example is missing: keyword arguments of one call of the pipeline"),
    "one that fails": ({"height": 41}, "fails before it calls its unet: ValueError: .*divisible by 8 but are 41"),
    "one of no steps": ({"num_inference_steps": 0}, "fails before it calls its unet: ZeroDivisionError"),
    "one of another size": ({"height": 8}, "5 patches of 4 units .* use 4 patches or fewer, or a larger image"),
}


@pytest.mark.parametrize("what", EXAMPLES)
def test_an_example_that_is_refused(what: str, sd: tuple[Any, Call]) -> None:
    pipe, call = sd
    changes, message = EXAMPLES[what]
    with pytest.raises(FxpipeError, match=message):
        fxpipe.compile_sampler(pipe, 5, example=None if changes is None else {**call, **changes}, patches=5)


def test_a_pipeline_that_never_predicts(sd: tuple[Any, Call]) -> None:
    pipe, call = sd

    class Idle(type(pipe)):  # type: ignore[misc]
        def __call__(self, **call: Any) -> None:
            return None

    with pytest.raises(FxpipeError, match="never calls its unet; give an example that samples"):
        fxpipe.compile_sampler(Idle(**pipe.components, requires_safety_checker=False), 2, example=call)


def test_a_pipeline_without_a_denoiser(sd: tuple[Any, Call]) -> None:
    pipe, call = sd
    without = type(pipe)(**{**pipe.components, "unet": None}, requires_safety_checker=False)
    with pytest.raises(FxpipeError, match=r"has no denoiser among its components .*vae: AutoencoderKL"):
        fxpipe.compile_sampler(without, 2, example=call)


def test_a_later_call_of_fewer_samples(sd: tuple[Any, Call]) -> None:
    pipe, call = sd
    fast = fxpipe.compile_sampler(pipe, 2, example=call, cfg=2).pipeline()
    with pytest.raises(FxpipeError, match=r"cfg=2 groups .* a call has 1; leave cfg out: .* this one cfg=1"):
        fast(**{**call, "guidance_scale": 1.0})


def test_a_cache_of_steps_is_refused() -> None:
    pipe, call = tiny("flux")
    pipe.transformer.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.2))
    with pytest.raises(FxpipeError, match=r"keeps values from step to step.* disable_cache\(\)"):
        fxpipe.compile_sampler(pipe, 2, example=call)


def test_weights_that_accelerate_holds_elsewhere_are_refused() -> None:
    pipe, call = tiny("flux")
    pytest.importorskip("accelerate").cpu_offload(pipe.transformer, torch.device("cpu"))
    with pytest.raises(FxpipeError, match=r"accelerate holds its weights elsewhere .* remove_all_hooks\(\) first"):
        fxpipe.compile_sampler(pipe, 2, example=call)
    pipe.remove_all_hooks()
    fxpipe.compile_sampler(pipe, 2, example=call)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"sample": "x"}, "sample is a str; give a dict"),
        ({"example": (1,)}, "example is a tuple; give a dict"),
        ({"observe": 5}, "observe=5; give a function"),
        ({"fold": "yes"}, "fold='yes'; give True or False"),
    ],
)
def test_arguments_of_wrong_types(given: dict[str, Any], says: str) -> None:
    with pytest.raises(fxpipe.CompileError, match=says):
        fxpipe.compile_sampler(torch.nn.Identity(), 2, **given)
