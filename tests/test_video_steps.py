"""Video pipelines' training steps: equal to those written by hand, eager and compiled, adapters included."""

import diffusers
import pytest
import torch
from diffusers.pipelines.hunyuan_video import pipeline_hunyuan_video
from torch import Tensor

import fxpipe
from fxpipe.capture.randomness import SeededDraws
from fxpipe.errors import CompileError
from tests.test_pipeline_steps import STEP, Gradients, assert_compiled_is_by_hand, assert_equal, gradients
from tests.trained_pipelines import CAPTIONS, T5_TOKENS
from tests.trained_videos import MADE, trainable_video, video_loss_by_hand, videos

DROPOUT = {"wan": 0.5, "ltx": 0.5, "animatediff": 0.5, "hunyuan": 0.5}


@pytest.fixture(autouse=True)
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Video models compute in float32 on the way, whatever the type of their weights."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.fixture(autouse=True)
def short_template(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of one of 95 tokens."""
    template = pipeline_hunyuan_video.DEFAULT_PROMPT_TEMPLATE
    for key, value in {"template": "h {} g", "crop_start": 2}.items():
        monkeypatch.setitem(template, key, value)


class Case:
    """A family's pipeline, its step and a batch."""

    def __init__(self, family: str, main: str = "transformer") -> None:
        self.pipe, self.dropout, self.main = trainable_video(family), DROPOUT.get(family, 0.0), main
        self.step = fxpipe.training_step(
            self.pipe,
            caption_dropout=self.dropout,
            max_sequence_length=T5_TOKENS,
            train=[main] if family == "wan/two" else None,
        )
        self.batch = videos() | fxpipe.tokenize(self.pipe, CAPTIONS, T5_TOKENS)

    def by_hand(self) -> tuple[Tensor, Gradients]:
        with SeededDraws(0, STEP, torch.device("cpu")):
            loss = video_loss_by_hand(self.pipe, self.batch["pixel_values"], CAPTIONS, self.dropout, self.main)
        return loss.detach(), gradients(self.step, loss)


@pytest.mark.parametrize("family", MADE)
def test_a_step_is_the_one_written_by_hand(family: str) -> None:
    for main in ("transformer", "transformer_2")[: 1 + (family == "wan/two")]:
        case = Case(family, main)
        with SeededDraws(0, STEP, torch.device("cpu")):
            loss = case.step(**case.batch)
        assert_equal((loss.detach(), gradients(case.step, loss)), case.by_hand())


@pytest.mark.parametrize("family", MADE)
def test_compiled_it_is_the_one_written_by_hand(family: str) -> None:
    assert_compiled_is_by_hand(Case(family))


def test_a_pipeline_with_adapters_trains_on_two_ranks_as_on_one_device() -> None:
    peft = pytest.importorskip("peft")
    found = []
    for ranks in (1, 2):
        pipe = trainable_video("wan")
        torch.manual_seed(3)
        pipe.transformer.requires_grad_(False)
        pipe.transformer.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
        pipe.transformer.double()
        batch = videos() | fxpipe.tokenize(pipe, CAPTIONS, 512)
        trained = {name: p for name, p in pipe.transformer.named_parameters() if p.requires_grad}
        optimizer, losses = torch.optim.AdamW(trained.values(), lr=0.01), []
        if ranks == 2:
            engine = fxpipe.compile(pipe, 2, example_inputs=batch, microbatches=2, schedule="1f1b").local_engine()
        for index in range(3):
            if ranks == 2:
                losses.append(float(engine.step(batch)))
            else:
                with SeededDraws(0, index, torch.device("cpu")):
                    loss = video_loss_by_hand(pipe, batch["pixel_values"], CAPTIONS, length=512)
                loss.backward()
                losses.append(float(loss.detach()))
            optimizer.step()
            optimizer.zero_grad()
        found.append((losses, {name: p.detach() for name, p in trained.items()}))
    assert {"lora_A", "lora_B"} == {name.split(".")[-3] for name in trained}
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-10)
    for name, weight in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], weight, rtol=1e-10, atol=1e-12)


def test_a_scheduler_told_of_flow_has_the_times_of_a_flow_matching_one() -> None:
    noise = fxpipe.training_step(trainable_video("wan")).noise
    wanted = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    for name in ("sigmas", "timesteps"):
        torch.testing.assert_close(getattr(noise, name).to(torch.float32), getattr(wanted, name))


def test_an_example_is_made_at_the_pipelines_own_size() -> None:
    pipe = trainable_video("cogvideo")
    step = fxpipe.training_step(pipe)
    shapes = {name: list(value.shape) for name, value in step.example_inputs(2).items()}
    assert shapes == {"pixel_values": [2, 3, 9, 16, 16], "input_ids": [2, 226]}
    pipe.vae, pipe.text_encoder = None, None
    step = fxpipe.training_step(pipe)
    step.embeds = ()
    assert list(step.example_inputs(2)["latents"].shape) == [2, 5, 4, 8, 8]


def test_a_text_encoder_may_be_trained_alone() -> None:
    step = fxpipe.training_step(trainable_video("wan"), train=["text_encoder"])
    assert (step.trained, step.frozen) == (("text_encoder",), ("vae", "transformer"))


def test_a_video_of_other_channels_is_refused() -> None:
    pipe = trainable_video("wan")
    pipe.transformer.register_to_config(in_channels=9)
    with pytest.raises(CompileError, match=r"transformer of WanPipeline takes 9 channels, its VAE makes 4"):
        fxpipe.training_step(pipe)
