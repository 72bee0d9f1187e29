"""Bare backbones: inputs made from configs, one training step of each, and what is refused."""

from types import SimpleNamespace

import diffusers
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from fxpipe.capture import capture
from fxpipe.capture.inputs import describe
from fxpipe.capture.model_call import ModelCall
from fxpipe.errors import CompileError
from fxpipe.models.backbones import PredictionStep, example_inputs, is_backbone
from tests.models import CONFIGS, PEER_CASES, ZOO, backbone
from tests.tiny_backbones import VALUE_DEPENDENT

# Parameters that the models themselves leave without a gradient in the step made here.
NO_GRADIENT = {
    "QwenImageTransformer2DModel": "transformer_blocks.1",  # the text half of the last block
    "LuminaNextDiT2DModel": "pad_token",
    "StableAudioDiTModel": "time_proj.weight",
    "UNet1DModel": "time_proj.weight",
    "PriorTransformer": "clip_",
}


@pytest.mark.parametrize("key", CONFIGS)
def test_one_step_of_each_backbone(key):
    model = backbone(key)
    assert is_backbone(model)
    loss = PredictionStep(model)(**example_inputs(model, batch_size=2))
    assert loss.ndim == 0
    assert loss.isfinite()
    loss.backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    assert [name for name in missing if not name.startswith(NO_GRADIENT.get(key, "(none)"))] == []


@pytest.mark.skipif(not hasattr(diffusers, "HunyuanImageTransformer2DModel"), reason="an older diffusers")
def test_times_of_a_model_that_embeds_them_in_their_own_dtype():
    model = diffusers.HunyuanImageTransformer2DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=8, num_layers=1, num_single_layers=1,
        num_refiner_layers=1, patch_size=(1, 1), text_embed_dim=8, rope_axes_dim=(4, 4),
    )  # fmt: skip
    assert PredictionStep(model)(**example_inputs(model, 2)).isfinite()


@pytest.mark.parametrize("key", ["UNet2DConditionModel/sdxl", "CogVideoXTransformer3DModel/rotary"])
def test_a_model_without_weights_gets_the_same_shapes(key):
    real = pytree.tree_map_only(torch.Tensor, lambda t: (t.shape, t.dtype), example_inputs(backbone(key), 3))
    with torch.device("meta"):
        meta = example_inputs(getattr(diffusers, key.split("/")[0])(**CONFIGS[key]), 3)
    with FakeTensorMode():
        fake_model = getattr(diffusers, key.split("/")[0])(**CONFIGS[key])
    fake = example_inputs(fake_model, 3)
    assert all(t.is_meta for t in pytree.tree_leaves(meta))
    assert pytree.tree_map_only(torch.Tensor, lambda t: (t.shape, t.dtype), meta) == real
    assert pytree.tree_map_only(torch.Tensor, lambda t: (t.shape, t.dtype), fake) == real


def test_values_are_the_same_on_every_call_and_follow_the_models_dtype():
    model = backbone("UNet2DConditionModel", torch.float64)
    first, second = example_inputs(model, 2), example_inputs(model, 2)
    assert first["sample"].dtype == first["target"].dtype == torch.float64
    assert first["timestep"].dtype == torch.int64
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_shapes_of_the_full_size_unet():
    with torch.device("meta"):
        model = diffusers.UNet2DConditionModel(
            cross_attention_dim=1024, attention_head_dim=(5, 10, 20, 20), sample_size=64
        )
    shapes = {name: list(t.shape) for name, t in example_inputs(model, 4).items()}
    assert shapes == {
        "target": [4, 4, 64, 64],
        "sample": [4, 4, 64, 64],
        "timestep": [4],
        "encoder_hidden_states": [4, 77, 1024],
    }


def test_inputs_leave_the_models_caches_alone():
    model = backbone("QwenImageTransformer2DModel")  # keeps rotary factors in an lru_cache
    inputs = example_inputs(model, 2)
    assert type(model(**{k: v for k, v in inputs.items() if k != "target"}).sample) is torch.Tensor


class Toy(nn.Module):
    """A denoiser of no library, whose output is wrapped by `wrap`."""

    def __init__(self, wrap):
        super().__init__()
        self.config = {"in_channels": 3, "sample_size": 4}
        self.conv, self.wrap = nn.Conv2d(3, 3, 1), wrap

    def forward(self, sample, timestep):
        return self.wrap(self.conv(sample) + timestep[:, None, None, None])


@pytest.mark.parametrize(
    "wrap",
    [lambda y: y, lambda y: (y, None), lambda y: SimpleNamespace(sample=y), lambda y: {"sample": y}],
    ids=["tensor", "tuple", "object", "mapping"],
)
def test_kinds_of_output(wrap):
    model = Toy(wrap)
    inputs = example_inputs(model, 2)
    prediction = model.conv(inputs["sample"]) + inputs["timestep"][:, None, None, None]
    assert torch.equal(PredictionStep(model)(**inputs), nn.functional.mse_loss(prediction, inputs["target"]))


def test_return_dict_false_gives_the_same_loss():
    step = PredictionStep(backbone("UNet2DModel"))
    inputs = step.example_inputs(2)
    assert torch.equal(step(**inputs, return_dict=False), step(**inputs))


def test_an_output_without_a_tensor_is_refused():
    with pytest.raises(CompileError, match="returns list, no tensor to compare"):
        example_inputs(Toy(lambda y: [y]), 2)


class Odd(Toy):
    def forward(self, sample, timestep, phase_of_moon):
        return sample


def test_an_error_without_words_is_named():
    def fails(y):
        raise AssertionError

    with pytest.raises(CompileError, match=r"made from its config .*: AssertionError; pass example_inputs"):
        example_inputs(Toy(fails), 2)


def test_an_unknown_argument_is_named():
    with pytest.raises(CompileError, match=r"Odd needs 'phase_of_moon', .* pass example_inputs"):
        example_inputs(Odd(None), 2)


def test_inputs_that_do_not_fit_are_described():
    model = Toy(None)
    model.config["in_channels"] = 5
    with pytest.raises(CompileError, match=r"does not run on the inputs .*sample \[2, 5, 4, 4\].*pass example_inputs"):
        example_inputs(model, 2)


@pytest.mark.parametrize("name", VALUE_DEPENDENT)
def test_models_that_branch_on_values_are_refused(name):
    model = getattr(diffusers, name)(**VALUE_DEPENDENT[name])
    with pytest.raises(CompileError, match=f"{name} takes decisions by tensor values"):
        example_inputs(model, 2)


def test_what_is_no_backbone():
    step = ZOO["controlnet"]()
    vae = ZOO["sd"]().vae
    others = (step, step.controlnet, vae, PredictionStep(step.unet), nn.Linear(2, 2), "UNet2DModel")
    assert not any(map(is_backbone, others))


def test_captured_with_a_dynamic_batch_by_name():
    step = PredictionStep(backbone("UNet2DConditionModel/text_image"))
    inputs = step.example_inputs(2)
    spec, tensors = describe(step, (), inputs, 2)
    captured = capture(ModelCall(step, spec, tensors))
    assert len(captured.batch) == 1
    assert spec.tensor_names[0] == "target"
    assert {name.split(".")[0] for name in spec.tensor_names} == set(inputs)


@pytest.mark.parametrize("name", [*ZOO, *PEER_CASES])
def test_every_training_step_runs_in_float64(name):
    step = {**ZOO, **PEER_CASES}[name](torch.float64)
    inputs = step.example_inputs(3)
    loss = step(*inputs) if isinstance(inputs, tuple) else step(**inputs)
    loss = getattr(loss, "loss", loss)
    assert (loss.dtype, loss.ndim) == (torch.float64, 0)
    assert loss.isfinite()
    loss.backward()
    assert any(p.grad is not None and p.grad.any() for p in step.parameters())
