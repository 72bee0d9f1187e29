"""Pipelines' training steps: equal to those written by hand, eager and compiled; what is refused."""

import os
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

import fxpipe
from fxpipe.capture.randomness import SeededDraws
from fxpipe.errors import CompileError
from fxpipe.models.pipeline_steps.step import PipelineStep
from tests.distributed import run_processes
from tests.steps import losses_of
from tests.tiny_pipelines import tiny
from tests.trained_pipelines import CAPTIONS, T5_TOKENS, batch_of, loss_by_hand, trainable

STEP = 3
Gradients = dict[str, Tensor]
# How a step is asked for: gamma of Min-SNR, dropout of captions, what is predicted.
VARIANTS = {
    "sd": (5.0, 0.5, "epsilon"), "sd/controlnet": (None, 0.0, "v_prediction"), "sdxl": (0.5, 0.5, "v_prediction"),
    "sd3": (None, 0.5, None), "flux": (None, 0.5, None), "pixart": (5.0, 0.5, "sample"),
    "sdxl/controlnet": (None, 0.0, None), "pixart/alpha": (None, 0.0, None),
}  # fmt: skip


class Case:
    """A family's pipeline, its step and a batch."""

    def __init__(self, family: str) -> None:
        self.pipe = trainable(family)
        self.gamma, self.dropout, kind = VARIANTS[family]
        if kind is not None:
            self.pipe.scheduler = diffusers.DDPMScheduler.from_config(self.pipe.scheduler.config, prediction_type=kind)
        self.step: PipelineStep = fxpipe.training_step(
            self.pipe, snr_gamma=self.gamma, caption_dropout=self.dropout, max_sequence_length=T5_TOKENS
        )
        self.images = batch_of(self.pipe)
        self.batch = self.images | fxpipe.tokenize(self.pipe, CAPTIONS, T5_TOKENS)

    def by_hand(self) -> tuple[Tensor, Gradients]:
        with SeededDraws(0, STEP, torch.device("cpu")):
            loss = loss_by_hand(self.pipe, self.images, CAPTIONS, self.gamma, self.dropout)
        return loss.detach(), gradients(self.step, loss)

    def own(self) -> tuple[Tensor, Gradients]:
        with SeededDraws(0, STEP, torch.device("cpu")):
            loss: Tensor = self.step(**self.batch)
        return loss.detach(), gradients(self.step, loss)


def gradients(step: PipelineStep, loss: Tensor) -> Gradients:
    trained = {name: p for name, p in step.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    return {name: g for name, g in zip(trained, found, strict=True) if g is not None}


def assert_equal(found: tuple[Tensor, Any], wanted: tuple[Tensor, Gradients]) -> None:
    """Within 1e-10, relative to a gradient's largest value, or to 1e-4 of the largest of all."""
    assert float((found[0] - wanted[0]).abs()) <= 1e-10 * float(wanted[0])
    assert found[1].keys() == wanted[1].keys()
    assert wanted[1]
    floor = 1e-4 * max(float(g.abs().max()) for g in wanted[1].values())
    for name, gradient in wanted[1].items():
        error = float((found[1][name] - gradient).abs().max()) / max(float(gradient.abs().max()), floor)
        assert error <= 1e-10, name


def assert_compiled_is_by_hand(case: Any) -> None:
    program = fxpipe.compile(case.step, 2, example_inputs=case.batch, microbatches=2, schedule="1f1b")
    assert program.capture.batch, "micro-batches of any size"
    result = program.run_local(**case.batch, step=STEP)
    assert_equal((result.loss, result.gradients), case.by_hand())


@pytest.mark.parametrize("family", VARIANTS)
def test_a_step_is_the_one_written_by_hand(family: str) -> None:
    case = Case(family)
    assert_equal(case.own(), case.by_hand())


@pytest.mark.parametrize("family", VARIANTS)
def test_compiled_it_is_the_one_written_by_hand(family: str) -> None:
    assert_compiled_is_by_hand(Case(family))


def rank_main() -> tuple[list[float], Gradients]:
    """Three steps of a pipeline itself, under an optimizer over the U-Net alone."""
    pipe = trainable("sd")
    batch = batch_of(pipe) | fxpipe.tokenize(pipe, CAPTIONS)
    program = fxpipe.compile(pipe, 2, example_inputs=batch, microbatches=2, schedule="1f1b")
    engine = program.engine() if "WORLD_SIZE" in os.environ else program.local_engine()
    optimizer = torch.optim.SGD(pipe.unet.parameters(), lr=0.1)
    losses = losses_of(engine, optimizer, [batch] * 3)
    engine.sync_model()
    engine.close()
    return losses, {name: p.detach() for name, p in pipe.unet.named_parameters()}


def test_a_pipeline_trains_on_processes_as_on_one_device() -> None:
    pipe = trainable("sd")
    step = fxpipe.training_step(pipe)
    batch = batch_of(pipe)
    optimizer, losses = torch.optim.SGD(pipe.unet.parameters(), lr=0.1), []
    for index in range(3):
        with SeededDraws(0, index, torch.device("cpu")):
            loss = loss_by_hand(pipe, batch, CAPTIONS)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert not any(p.requires_grad for name in step.frozen for p in step.get_submodule(name).parameters())
    for found, weights in (rank_main(), *run_processes(2, rank_main)):
        assert found == pytest.approx(losses, rel=1e-10)
        for name, weight in pipe.unet.named_parameters():
            torch.testing.assert_close(weights[name], weight.detach(), rtol=1e-10, atol=1e-12)


def test_embeddings_and_latents_may_be_made_beforehand() -> None:
    case = Case("sd/controlnet")
    case.pipe.vae, case.pipe.text_encoder = None, None
    step = fxpipe.training_step(case.pipe)
    assert step.inputs == ("latents", "prompt_embeds", "conditioning_pixel_values")
    latents = torch.randn(4, 4, 12, 8, dtype=torch.float64)
    with torch.no_grad():
        embeds = case.step.encode(case.batch)
    given = {"latents": latents, **embeds, "conditioning_pixel_values": case.batch["conditioning_pixel_values"]}
    losses = []
    for one, batch in ((step, given), (case.step, given | case.batch)):
        batch = {name: value for name, value in batch.items() if name not in ("pixel_values", "input_ids")}
        with SeededDraws(0, 0, torch.device("cpu")):
            losses.append(float(one(**batch).detach()))
    assert losses[0] == losses[1]


def test_images_without_captions_are_trained_on_in_pixels() -> None:
    pipe, _ = tiny("ddim")
    step = fxpipe.training_step(pipe)
    batch = step.example_inputs(4)
    assert {name: list(value.shape) for name, value in batch.items()} == {"pixel_values": [4, 3, 20, 12]}
    with SeededDraws(0, 0, torch.device("cpu")):
        loss = step(**batch)
    with SeededDraws(0, 0, torch.device("cpu")):
        noise, times = torch.randn_like(batch["pixel_values"]), torch.randint(0, 1000, (4,))
        noisy = pipe.scheduler.add_noise(batch["pixel_values"], noise, times)
        by_hand = torch.nn.functional.mse_loss(pipe.unet(noisy, times).sample, noise)
    assert float(loss.detach()) == pytest.approx(float(by_hand.detach()), rel=1e-12)


@pytest.mark.parametrize("family", VARIANTS)
def test_an_example_is_made_at_the_pipelines_own_size(family: str) -> None:
    pipe = trainable(family)
    step = fxpipe.training_step(pipe, max_sequence_length=5)
    batch = step.example_inputs(2)
    assert tuple(batch) == step.inputs
    assert batch["pixel_values"].shape[1:] == (3, *step.image_size)
    lengths = {name: value.shape[1] for name, value in fxpipe.tokenize(pipe, ["a"], 5).items()}
    assert lengths == {name: value.shape[1] for name, value in batch.items() if "pixel" not in name}


def test_what_is_frozen_stays_in_eval_mode() -> None:
    step = fxpipe.training_step(trainable("sd"), train=["text_encoder"])
    assert step.frozen == ("vae", "unet")
    assert [step.unet.training, step.vae.training, step.text_encoder.training] == [False, False, True]
    assert {name.partition(".")[0] for name, p in step.named_parameters() if p.requires_grad} == {"text_encoder"}


def all_frozen(pipe: Any) -> Any:
    pipe.unet.requires_grad_(False)
    return pipe


def edm(pipe: Any) -> Any:
    pipe.scheduler = diffusers.EDMEulerScheduler()
    return pipe


def inverted(pipe: Any) -> Any:
    pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True)
    return pipe


def without_tokenizer(pipe: Any) -> Any:
    pipe.tokenizer = None
    return pipe


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (lambda: tiny("wan")[0], {}, r"WanPipeline has transformer and transformer_2.*train=\['transformer'\]"),
    (lambda: tiny("sana")[0], {}, r"for SanaPipeline \(vae: AutoencoderDC, .* Describe them in a subclass of fxpipe"),
    (lambda: tiny("sd/inpaint")[0], {}, r"no training step is known for StableDiffusionInpaintPipeline"),
    (lambda: all_frozen(trainable("sd")), {}, r"no parameter of unet requires gradients.*add_adapter"),
    (lambda: edm(trainable("sd")), {}, r"not known how to train for EDMEulerScheduler; give the pipeline a DDPM"),
    (lambda: inverted(trainable("sd3")), {}, r"FlowMatchEulerDiscreteScheduler has invert_sigmas"),
    (lambda: trainable("sd3"), {"snr_gamma": 5.0}, r"snr_gamma=5.0 weighs DDPM-like noise, FlowMatch.* leave it out"),
    (lambda: trainable("sd"), {"snr_gamma": 0.0}, r"snr_gamma=0.0 must be more than 0"),
    (lambda: trainable("sd"), {"caption_dropout": 1.0}, r"caption_dropout=1.0 must be from 0 to below 1"),
    (lambda: trainable("sd"), {"train": ["vae"]}, r"train=\['vae'\] names vae; give some of text_encoder, unet"),
    (lambda: without_tokenizer(trainable("sd")), {"caption_dropout": 0.1}, r"has no tokenizer: load it with one"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "options", "says"), REFUSED)
def test_pipelines_that_are_refused(make: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(CompileError, match=says):
        fxpipe.training_step(make(), **options)


def test_batches_that_are_refused() -> None:
    step = fxpipe.training_step(trainable("sd"), caption_dropout=0.5)
    batch = step.example_inputs(2)
    embeds = {"pixel_values": batch["pixel_values"], "prompt_embeds": torch.zeros(2, 7, 8)}
    for given, says in [
        ({"pixel_values": batch["pixel_values"]}, r"lacks input_ids: StableDiffusion takes pixel_values, input_ids"),
        (batch | {"time_ids": torch.zeros(2, 6)}, r"has time_ids, unread"),
        (embeds, r"caption_dropout=0.5 drops captions before they are encoded, and this batch has them encoded"),
    ]:
        with pytest.raises(CompileError, match=says):
            step(**given)
    with pytest.raises(CompileError, match="captions is 'a disc', a text; give a list"):
        fxpipe.tokenize(None, "a disc")
