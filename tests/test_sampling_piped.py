"""Patches that follow each other through stages: which values they read, and pipelines that overlap their steps."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.capture.inputs import is_time
from fxpipe.errors import CompileError, RunError
from fxpipe.models.backbones import prediction_of
from fxpipe.models.pipelines import shell
from fxpipe.plan.sample_grid import Grid
from fxpipe.run.patched import Patched
from fxpipe.run.sampling import BoundProgram, LocalRun
from fxpipe.sampler import Sampler
from fxpipe.sampling.step import SampleStep
from tests.denoisers import case, noise, revealed
from tests.distributed import run_processes
from tests.tiny_backbones import CONFIGS

UNET = "UNet2DConditionModel"
KEYS = {
    UNET: 1e-10, "DiTTransformer2DModel": 1e-10, "SD3Transformer2DModel": 1e-10, "FluxTransformer2DModel": 1e-10,
    "SanaTransformer2DModel": 1e-6,
}  # fmt: skip
FORMS = ("fresh", "fresh", "displaced", "displaced", "displaced")


@cache
def compiled(key: str) -> Sampler:
    given = case(key)
    return fxpipe.compile_sampler(given.model, 2, stages=2, cfg=1, patches=3, mode="displaced", example=given.example)


def laid_out(sampler: Sampler, world_size: int, **how: Any) -> SampleStep:
    """The programs of another layout, of the same trace."""
    lowering: Any = sampler.denoiser.lowering
    asked = replace(lowering.request, world_size=world_size, **how)
    return replace(lowering, request=asked, setting=None).step(sampler.step.traced, sampler.step.batch_size)


def moving(sampler: Sampler, still: bool = False) -> list[dict[str, Any]]:
    """A call's inputs step by step, the sample a little different in each."""
    (name,), example = sampler.step.traced.rows, sampler.example[1]
    change = noise(*example[name].shape).to(example[name].dtype)
    return [{**example, name: example[name] + 0.05 * step * (not still) * change} for step in range(len(FORMS))]


def sampled(
    sampler: Sampler, steps: Sequence[Mapping[str, Any]], forms: Sequence[str] = FORMS, step: SampleStep | None = None
) -> list[Tensor]:
    """Predictions of one call, which are every rank's."""
    step, found = step or sampler.step, []
    bound = [BoundProgram(program, sampler.denoiser.state(step.traced)) for program in step.programs]
    run = LocalRun(len(bound))
    for given, form in zip(steps, forms, strict=True):
        each = run.predict(bound, step.bind(step.traced.captured.inputs.bind((), given)[0]), form)
        assert all(torch.equal(one, each[0]) for one in each)
        found.append(each[0])
    run.reset()
    return found


def error(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    return float((found - wanted).abs().max() / wanted.abs().max())


def equal(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("key", KEYS)
def test_where_nothing_moves_it_is_exact_and_stages_change_no_bit(key: str) -> None:
    line = compiled(key)
    with torch.no_grad():
        wanted = prediction_of(line.denoiser.module(**line.example[1]))
    assert max(error(found, wanted) for found in sampled(line, moving(line, still=True))) <= KEYS[key]
    steps = moving(line)
    found = sampled(line, steps)
    with torch.no_grad():
        exact = [prediction_of(line.denoiser.module(**given)) for given in steps]
    assert max(error(f, e) for f, e in zip(found[:2], exact[:2], strict=True)) <= KEYS[key]
    assert all(1e-6 < error(f, e) < 0.2 for f, e in zip(found[2:], exact[2:], strict=True))
    assert equal(found, sampled(line, steps, step=laid_out(line, 1, stages=1)))
    fold = laid_out(line, 6, stages=3, fold=True, cfg=2)
    assert fold.grid == Grid(2, 1, 3, 3)
    assert equal(found, sampled(line, steps, step=fold))


@pytest.mark.parametrize(("key", "norms"), [*((key, "merged") for key in KEYS), (UNET, "corrected")])
def test_so_it_is_where_stages_have_ranks_beside_each_other(key: str, norms: str) -> None:
    line = compiled(key)
    lowering: Any = line.denoiser.lowering
    how = replace(lowering.request.how, norms=norms)
    wide = laid_out(line, 4, stages=2, cfg=1, patches=4, how=how)
    assert wide.grid == Grid(1, 2, 2, 2)
    with torch.no_grad():
        wanted = prediction_of(line.denoiser.module(**line.example[1]))
    assert max(error(found, wanted) for found in sampled(line, moving(line, still=True), step=wide)) <= KEYS[key]
    steps = moving(line)
    found = sampled(line, steps, step=wide)
    with torch.no_grad():
        exact = [prediction_of(line.denoiser.module(**given)) for given in steps]
    assert max(error(f, e) for f, e in zip(found[:2], exact[:2], strict=True)) <= KEYS[key]
    assert all(1e-6 < error(f, e) < 0.5 for f, e in zip(found[2:], exact[2:], strict=True))
    if key in (UNET, "SanaTransformer2DModel") and norms == "merged":
        fold = laid_out(line, 12, stages=3, fold=True, cfg=2, patches=4, how=how)
        assert fold.grid == Grid(2, 2, 3, 2)
        assert equal(found, sampled(line, steps, step=fold))


@pytest.mark.parametrize("key", [UNET, "SD3Transformer2DModel"])
def test_ranks_beside_each_other_with_a_patch_each_are_exact(key: str) -> None:
    line = compiled(key)
    steps = moving(line)
    with torch.no_grad():
        exact = [prediction_of(line.denoiser.module(**given)) for given in steps]
    found = sampled(line, steps, step=laid_out(line, 6, stages=2, cfg=1, patches=3))
    assert max(error(f, e) for f, e in zip(found, exact, strict=True)) <= KEYS[key]


class Tokens(nn.Module):
    """Attention over text and rows, twice; the text is none of the prediction."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(4, 4) for _ in range(3))

    def mix(self, x: Tensor, known: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(known), self.v(known)
        return x + torch.nn.functional.scaled_dot_product_attention(q, k, v)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        both = torch.cat([text, x], 1)
        for _ in range(2):
            text, x = self.mix(both, both).split([text.shape[1], x.shape[1]], 1)
            both = torch.cat([text * 0.5, x], 1)
        return both[:, text.shape[1] :]


def by_hand(model: Tokens, x: Tensor, text: Tensor, before: list[Tensor], bounds: Sequence[int], turns: int) -> Tensor:
    """One step, in so many turns: of patches behind what `before` has of them, layer by layer; the text goes first."""
    size, made = text.shape[1], torch.empty_like(x)
    for turn in range(turns):
        rows = torch.tensor([row for start, stop in [*pairwise(bounds)][turn::turns] for row in range(start, stop)])
        own = size + rows if turn else torch.cat([torch.arange(size), size + rows])
        both = torch.cat([text, x], 1)[:, own]
        for layer in range(2):
            before[layer][:, own] = both
            both = model.mix(both, before[layer])
            both = both if turn else torch.cat([both[:, :size] * 0.5, both[:, size:]], 1)
        made[:, rows] = both if turn else both[:, size:]
    return made


@pytest.mark.parametrize(("world_size", "bounds"), [(2, (0, 4, 8, 12)), (4, (0, 1, 3, 6, 9, 11, 12))])
def test_patches_read_those_before_them_of_now_and_those_behind_of_the_step_before(
    world_size: int, bounds: tuple[int, ...]
) -> None:
    """Ranks beside each other have three patches each."""
    torch.manual_seed(0)
    model, x, text = Tokens().double(), noise(1, 12, 4), noise(1, 3, 4)
    sampler = fxpipe.compile_sampler(
        model, world_size, stages=2, mode="displaced", patches=bounds, example={"x": x, "text": text}, sample={"x": 1}
    )
    steps = [{"x": x + 0.3 * step * x.cos(), "text": text} for step in range(4)]
    found = sampled(sampler, steps, ("fresh", "displaced", "displaced", "displaced"))
    before = [torch.zeros(1, 15, 4, dtype=torch.float64) for _ in range(2)]
    with torch.no_grad():
        assert error(found[0], by_hand(model, **steps[0], before=before, bounds=(0, 12), turns=1)) <= 1e-12
        for given, one in zip(steps[1:], found[1:], strict=True):
            assert error(one, by_hand(model, **given, before=before, bounds=bounds, turns=3)) <= 1e-12
            assert error(one, model(**given)) > 1e-6
    texts = [str(program.forms["displaced"].graph) for program in sampler.step.programs]
    assert all(text.count("displaced_ops.put") == 2 * (len(bounds) - 1) for text in texts)
    told = [m for m in sampler.step.messages_of["displaced"] if m.kind == "gather"]
    rows = sum(m.shape[1] for m in told)
    assert rows == 2 * 12 * (world_size // 2 - 1) * 2  # of every layer's keys and values each once to the other rank


def test_state_ends_with_the_call_the_shape_and_an_exception() -> None:
    sampler = compiled(UNET)
    steps, step = moving(sampler), sampler.step
    bound = [BoundProgram(program, sampler.denoiser.state(step.traced)) for program in step.programs]
    tensors = [step.bind(step.traced.captured.inputs.bind((), given)[0]) for given in steps]
    wanted, run = sampled(sampler, steps), LocalRun(2)
    for form, given in zip(FORMS[:4], tensors[::-1], strict=False):
        run.predict(bound, given, form)
    run.reset()
    forms = ("displaced", *FORMS[1:])  # the first is fresh all the same
    assert equal([run.predict(bound, given, form)[0] for given, form in zip(tensors, forms, strict=True)], wanted)
    with pytest.raises(RunError, match="failed in"):
        run.predict(bound, {**tensors[0], "sample": tensors[0]["sample"][:, :3]}, "displaced")
    assert equal([run.predict(bound, given, form)[0] for given, form in zip(tensors, forms, strict=True)], wanted)
    once = [BoundProgram(program, sampler.denoiser.state(step.traced)) for program in step.programs]
    other = [BoundProgram(program, bound[0]._state | bound[1]._state) for program in step.programs]
    run.predict(once, tensors[1], "displaced")
    assert error(run.predict(other, tensors[2], "displaced")[0], sampled(sampler, [steps[2]], ["fresh"])[0]) == 0


# -- pipelines


def pipeline(scheduler: Any) -> Any:
    torch.manual_seed(0)
    config = {**CONFIGS["SD3Transformer2DModel"], "sample_size": 16, "pos_embed_max_size": 16, "num_layers": 2}
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8, 16), norm_num_groups=4, layers_per_block=1, latent_channels=4, shift_factor=0.1,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    nothing = dict.fromkeys(f"{part}{n}" for part in ("text_encoder", "tokenizer") for n in ("", "_2", "_3"))
    pipe = diffusers.StableDiffusion3Pipeline(
        transformer=revealed(diffusers.SD3Transformer2DModel(**config)), scheduler=scheduler,
        vae=vae.double().eval(), **nothing,
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    return pipe


def call(seed: int = 0) -> dict[str, Any]:
    text, pooled = noise(1, 7, 8) + seed, noise(1, 8) - seed
    negative = {"negative_prompt_embeds": -text, "negative_pooled_prompt_embeds": -pooled}
    return {"prompt_embeds": text, "pooled_prompt_embeds": pooled, **negative, "height": 32, "width": 24}


def latents(pipe: Any, steps: int = 6, output: str = "latent", seed: int = 0, **more: Any) -> Tensor:
    given = {"num_inference_steps": steps, "output_type": output, "generator": torch.Generator().manual_seed(5)}
    found: Tensor = pipe(**call(seed), **given, **more).images
    assert not isinstance(found, Patched)
    return found


@cache
def piped(warmup: int = 2, **how: Any) -> Any:
    pipe = pipeline(diffusers.FlowMatchEulerDiscreteScheduler())
    how = {"stages": 2, "patches": 3, **how}
    world_size = how["stages"] * how.get("cfg", 1) * how.pop("beside", 1)
    return fxpipe.compile_sampler(pipe, world_size, mode="displaced", warmup=warmup, example=call(), **how)


def test_a_pipeline_of_one_patch_or_of_fresh_steps_is_one_devices() -> None:
    wanted = latents(pipeline(diffusers.FlowMatchEulerDiscreteScheduler()))
    for sampler in (piped(warmup=6), piped(patches=1)):
        assert error(latents(sampler.pipeline()), wanted) <= 1e-12
    displaced = latents(piped().pipeline())
    assert 1e-4 < error(displaced, wanted) < 0.05


def test_a_call_leaves_nothing_to_the_next() -> None:
    fast = piped().pipeline()
    first = latents(fast)
    other = latents(fast, seed=1)
    assert not torch.equal(first, other)
    with pytest.raises(ZeroDivisionError):
        latents(fast, callback_on_step_end=lambda pipe, step, t, given: {"latents": 1 / (step - 3) * given["latents"]})
    assert torch.equal(latents(fast), first)


def called(fast: Any) -> tuple[list[Tensor], list[bool]]:
    """What three calls give, and whether their loops were handed patches on their way."""
    seen: list[bool] = []

    def look(pipe: Any, step: int, t: Any, given: dict[str, Any]) -> dict[str, Any]:
        seen.append(isinstance(given["latents"], Patched))
        return {}

    def change(pipe: Any, step: int, t: Any, given: dict[str, Any]) -> dict[str, Any]:
        look(pipe, step, t, given)
        return {"latents": given["latents"] * 1.01} if step == 3 else {}

    found = [latents(fast, callback_on_step_end=callback) for callback in (look, change)]
    return [*found, latents(fast, 4, "pt", 1)], seen


LAYOUTS: dict[int, dict[str, Any]] = {2: {}, 4: {"beside": 2, "cfg": 1, "patches": 4}}


def launched(world_size: str) -> tuple[list[Tensor], list[bool]]:
    sampler = piped(**LAYOUTS[int(world_size)])
    found = called(sampler.pipeline())
    sampler.close()
    return found


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_processes_overlap_their_steps_and_give_what_threads_give(world_size: int) -> None:
    wanted, _ = called(piped(**LAYOUTS[world_size]).pipeline())
    for found, seen in run_processes(world_size, launched, str(world_size)):
        assert equal(found, wanted)
        assert seen == [False, False, True, True, True, True] * 2


def test_messages_are_those_of_a_fresh_step() -> None:
    sampler = piped()
    assert sampler.grid == Grid(1, 1, 2, 3)
    hidden = [m for m in sampler.step.messages_of["displaced"] if m.kind in ("main", "skip")]
    assert {message.microbatch for message in hidden} == set(range(2 * 3))
    displaced, fresh = sampler.step.messages_of["displaced"], sampler.step.messages
    assert sum(m.num_bytes for m in displaced) == sum(m.num_bytes for m in fresh)


class Timed(Tokens):
    """The same at some time."""

    def forward(self, x: Tensor, text: Tensor, time: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x * time.reshape(-1, 1, 1), text)


def test_predictions_of_one_step_are_streams_of_their_own() -> None:
    torch.manual_seed(0)
    x, texts = noise(1, 12, 4), (noise(1, 3, 4), -noise(1, 3, 4))
    sampler = fxpipe.compile_sampler(
        Timed().double(), 2, stages=2, mode="displaced", patches=3, warmup=2, sample={"x": 1},
        example={"x": x, "text": texts[0], "time": torch.ones(1, dtype=torch.float64)},
    )  # fmt: skip
    steps = [(x + 0.3 * step * x.cos(), torch.full([1], 1.0 - 0.1 * step, dtype=torch.float64)) for step in range(5)]
    wanted: list[list[Tensor]] = []
    for text in texts:
        with sampler.ranks.call():
            wanted.append([sampler.denoiser(x, text, time) for x, time in steps])
    with sampler.ranks.call():
        for index, (x, time) in enumerate(steps):
            for text, of_text in zip(texts, wanted, strict=True):
                assert torch.equal(sampler.denoiser(x, text, time), of_text[index])
    with torch.no_grad():
        exact = [sampler.denoiser.module(x, texts[0], time) for x, time in steps]
    differs = [error(found, one) > 1e-9 for found, one in zip(wanted[0], exact, strict=True)]
    assert differs == [False, False, True, True, True]


def test_many_predictions_at_one_time_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """And are steps that follow each other where the caller says so."""
    torch.manual_seed(0)
    given = {"x": noise(1, 12, 4), "text": noise(1, 3, 4), "time": torch.ones(1, dtype=torch.float64)}
    how: dict[str, Any] = {"stages": 2, "mode": "displaced", "patches": 3, "warmup": 1, "sample": {"x": 1}}
    sampler = fxpipe.compile_sampler(Timed().double(), 2, example=given, **how)
    named: Any = shell(sampler.denoiser.module, sampler.denoiser)

    def last_error() -> float:
        with sampler.call():
            for step in range(10):
                now = {**given, "x": given["x"] + 0.1 * step}
                found = named(**now)
        return error(found, sampler.denoiser.module(**now).detach())

    with caplog.at_level(logging.WARNING):
        assert last_error() < 1e-12
    assert caplog.text.count("more than 8 predictions at one time (time)") == 1
    with named.cache_context("steps"):
        assert last_error() > 1e-9


class Labelled(Tokens):
    """The same with a label per sample, at some time, or at none."""

    def forward(self, x: Tensor, text: Tensor, label: Tensor, time: Tensor | None = None) -> Tensor:  # type: ignore[override]
        found: Tensor = super().forward(x * label.reshape(-1, 1, 1).cos(), text)
        return found if time is None else found * time.reshape(-1, 1, 1)


@pytest.mark.parametrize("timed", [True, False])
def test_labels_are_no_times(timed: bool) -> None:
    """Two predictions of a step, that differ in a label, read nothing of each other."""
    torch.manual_seed(0)
    x, text = noise(1, 12, 4), noise(1, 3, 4)
    steps: list[dict[str, Tensor]] = [
        {"x": x + 0.3 * step * x.cos(), "text": text} | ({"time": torch.ones(1).double() - 0.1 * step} if timed else {})
        for step in range(4)
    ]
    labels = [torch.full([1], value, dtype=torch.float64) for value in (0.3, 0.9)]
    how: dict[str, Any] = {"stages": 2, "mode": "displaced", "patches": 3, "warmup": 2, "sample": {"x": 1}}
    sampler = fxpipe.compile_sampler(Labelled().double(), 2, example={**steps[0], "label": labels[0]}, **how)

    def predicted(of: list[Tensor]) -> list[Tensor]:
        with sampler.call():
            return [sampler.predict(**step, label=label) for step in steps for label in of]

    both = predicted(labels)
    assert equal(both[::2], predicted(labels[:1]))
    assert equal(both[1::2], predicted(labels[1:]))
    assert not torch.equal(both[-1], both[-2])
    if not timed:
        with pytest.raises(RunError, match="is called a time, and they have had 8 different values"):
            predicted([label + 0.1 * n for n in range(5) for label in labels])


def test_names_of_times() -> None:
    """diffusers', EDM's (`noise_labels`) and score_sde's (`time_cond`); not diffusers' guidance and sizes."""
    told = ["timestep", "timestep_r", "x.t", "sigma", "noise_labels", "time_cond", "log_snr", "c_noise"]
    others = ["timestep_cond", "time_ids", "class_labels", "guidance", "noise_mask", "encoder_hidden_states", "text"]
    others += ["time_embeds_cond", "enc_noise"]
    assert [name for name in (*told, *others) if is_time(name)] == told


class Padded(nn.Module):
    """Convolutions of rows that are padded before them."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.first, self.second, self.mode = nn.Conv2d(2, 3, 4), nn.Conv2d(3, 2, 3, padding=1), mode

    def forward(self, x: Tensor) -> Tensor:
        padded = nn.functional.pad(x.cos(), (2, 1, 2, 1), self.mode)
        return self.second(self.first(padded))  # type: ignore[no-any-return]


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate"])
def test_rows_that_are_padded_before_a_convolution(mode: str) -> None:
    """What the last exact step leaves to displaced ones are rows of the image."""
    torch.manual_seed(0)
    how: dict[str, Any] = {"stages": 2, "patches": 3, "mode": "displaced", "warmup": 1, "sample": {"x": 2}}
    sampler = fxpipe.compile_sampler(Padded(mode).double(), 2, example={"x": noise(1, 2, 12, 5)}, **how)
    assert sampler.verify().ok


class Linear(nn.Module):
    """Attention to sums over all rows, of a softmax over them."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.sin().flatten(2)
        return x + (rows.softmax(-1) @ rows.transpose(1, 2) @ rows.cos()).reshape(x.shape)


def test_sums_of_what_no_patch_can_make_alone() -> None:
    how: dict[str, Any] = {"stages": 2, "patches": 4, "mode": "displaced", "warmup": 1, "sample": {"x": 2}}
    assert fxpipe.compile_sampler(Linear(), 4, example={"x": noise(1, 2, 12, 5)}, cfg=1, **how).verify().ok


class Centred(nn.Module):
    """A number made of all rows, between two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(2, 2, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        made = self.first(x)
        return self.second(made + made.mean()).cos()  # type: ignore[no-any-return]


def test_numbers_that_all_patches_share() -> None:
    torch.manual_seed(0)
    how: dict[str, Any] = {"stages": 2, "patches": 2, "mode": "displaced", "warmup": 1, "sample": {"x": 2}}
    assert fxpipe.compile_sampler(Centred().double(), 2, example={"x": noise(2, 2, 8, 8)}, cfg=1, **how).verify().ok


class Middle(nn.Module):
    """What lies in the middle of all rows, between two layers; an operation without a rule, of two results."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        made = self.first(x)
        return self.second(made * made.median(1, keepdim=True)[0])  # type: ignore[no-any-return]


def test_what_a_patch_makes_of_all_rows_is_its_own() -> None:
    torch.manual_seed(0)
    model, x, bounds = Middle().double(), noise(1, 12, 4), (0, 4, 8, 12)
    how: dict[str, Any] = {"stages": 2, "patches": bounds, "mode": "displaced", "sample": {"x": 1}}
    sampler = fxpipe.compile_sampler(model, 2, example={"x": x}, **how)
    _, found = sampled(sampler, [{"x": x}, {"x": x.cos()}], ("fresh", "displaced"))
    with torch.no_grad():
        known, now = model.first(x), model.first(x.cos())
        for start, stop in pairwise(bounds):
            known[:, start:stop] = now[:, start:stop]
            wanted = model.second(now * known.median(1, keepdim=True)[0])
            assert error(found[:, start:stop], wanted[:, start:stop]) <= 1e-12


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(2, keepdim=True).expand_as(x) * 2


@pytest.mark.parametrize(
    ("model", "how", "says"),
    [
        (Mean(), {"stages": 1}, r"the prediction \(mul\) is not made row by row, .*, or stages=1 with a rank for each"),
        (Tokens(), {"stages": 2, "norms": "sync"}, "waits for patches that come later"),
        (Tokens(), {"stages": 2, "patches": 99}, "99 patches of"),
        (Tokens(), {"stages": 2, "patches": 7, "ranks": 4}, r"7 patches .* of 2 ranks each, .*; use patches=6"),
        (Tokens(), {"stages": 2, "warmup": 0}, "warmup"),
    ],
)
def test_refusals(model: nn.Module, how: dict[str, Any], says: str) -> None:
    given: dict[str, Any] = {"example": {"x": noise(1, 12, 4), "text": noise(1, 3, 4)}, "sample": {"x": 1}}
    if isinstance(model, Mean):
        given = {"example": {"x": noise(1, 2, 8, 4)}, "sample": {"x": 2}}
    world_size = how.get("ranks", how.get("stages", 2))
    how = {name: value for name, value in how.items() if name != "ranks"}
    with pytest.raises(CompileError, match=says):
        fxpipe.compile_sampler(model.double(), world_size, mode="displaced", **given, **how)
