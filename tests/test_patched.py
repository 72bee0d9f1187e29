"""Tensors whose patches come one by one: any scheduler steps them as it steps dense ones, and nothing waits in vain."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import diffusers
import pytest
import torch
from diffusers.pipelines.stable_diffusion import StableDiffusionPipelineOutput
from torch import Tensor

from fxpipe.errors import RunError
from fxpipe.run.patched import Lazy, Patched, finished, settled

SIZES = (3, 1, 6, 2)  # of rows
SHAPE = (2, 4, 12, 5)


def noise(seed: int = 0, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def patched(value: Tensor, asked: list[int] | None = None, along: int = 2) -> Patched:
    """The same in patches; `asked` is told of each when it is asked for."""

    def lazy(index: int, piece: Tensor) -> Lazy:
        def make() -> Tensor:
            if asked is not None:
                asked.append(index)
            return piece.clone()

        return Lazy(make)

    parts = [lazy(index, piece) for index, piece in enumerate(value.split(list(SIZES), along))]
    return Patched.of(parts, value, along, SIZES, value.device)


SCHEDULERS: dict[str, Callable[[], Any]] = {
    "flow Euler": diffusers.FlowMatchEulerDiscreteScheduler,
    "flow Euler, stochastic": lambda: diffusers.FlowMatchEulerDiscreteScheduler(stochastic_sampling=True),
    "flow Heun": diffusers.FlowMatchHeunDiscreteScheduler,
    "DPM++": diffusers.DPMSolverMultistepScheduler,
    "DPM++ SDE": lambda: diffusers.DPMSolverMultistepScheduler(algorithm_type="sde-dpmsolver++"),
    "DPM++ single step": diffusers.DPMSolverSinglestepScheduler,
    "DPM++ thresholded": lambda: diffusers.DPMSolverMultistepScheduler(thresholding=True),
    "DDIM": diffusers.DDIMScheduler,
    "DDIM, eta": diffusers.DDIMScheduler,
    "DDIM thresholded": lambda: diffusers.DDIMScheduler(thresholding=True),
    "DDPM": diffusers.DDPMScheduler,
    "DEIS": diffusers.DEISMultistepScheduler,
    "Euler": diffusers.EulerDiscreteScheduler,
    "Euler ancestral": diffusers.EulerAncestralDiscreteScheduler,
    "UniPC": diffusers.UniPCMultistepScheduler,
    "PNDM": diffusers.PNDMScheduler,
    "LMS": diffusers.LMSDiscreteScheduler,
    "Heun": diffusers.HeunDiscreteScheduler,
    "LCM": diffusers.LCMScheduler,
    "EDM Euler": diffusers.EDMEulerScheduler,
    "EDM DPM++": diffusers.EDMDPMSolverMultistepScheduler,
    "SA": diffusers.SASolverScheduler,
    "TCD": diffusers.TCDScheduler,
}


def looped(name: str, wrap: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
    """Latents after every step of a loop as pipelines have it: guidance, scaling, the scheduler."""
    scheduler, generator = SCHEDULERS[name](), torch.Generator().manual_seed(3)
    torch.manual_seed(4)
    scheduler.set_timesteps(7)
    latents = noise(1, (1, *SHAPE[1:])) * getattr(scheduler, "init_noise_sigma", 1.0)
    more = {"eta": 0.7} if name.endswith("eta") else {}
    if "generator" in scheduler.step.__code__.co_varnames:
        more["generator"] = generator
    for index, t in enumerate(scheduler.timesteps):
        given = torch.cat([latents] * 2)
        if hasattr(scheduler, "scale_model_input"):
            given = scheduler.scale_model_input(given, t)
        prediction = wrap((settled(given) * 0.7 + 0.3 * noise(index)).cos())
        without, with_text = prediction.chunk(2)
        prediction = without + 3.0 * (with_text - without)
        latents = scheduler.step(prediction, t, latents, **more, return_dict=False)[0]
        yield latents


@pytest.mark.parametrize("name", SCHEDULERS)
def test_any_scheduler_steps_patches_as_it_steps_dense_tensors(name: str) -> None:
    wanted = [latents.clone() for latents in looped(name, lambda value: value)]
    for found, dense in zip(looped(name, patched), wanted, strict=True):
        assert torch.equal(settled(found), dense)
    assert not any(isinstance(latents, Patched) for latents in wanted)


def test_one_patch_waits_for_no_other() -> None:
    asked: list[int] = []
    value = patched(noise(), asked)
    made = torch.cat([value.float()] * 2).chunk(2)[1].permute(0, 2, 3, 1) * 2 + noise(1).permute(0, 2, 3, 1)
    assert isinstance(made, Patched)
    assert made.along == 1
    assert asked == []
    wanted = (noise() * 2 + noise(1)).permute(0, 2, 3, 1)
    assert torch.equal(made.part(2), wanted[:, 4:10])
    assert asked == [2]
    assert torch.equal(made.part(2), wanted[:, 4:10])
    assert asked == [2]
    assert repr(value) == "Patched([2, 4, 12, 5], 1 of 4 patches there)"
    assert torch.equal(settled(made), wanted)


OPERATIONS: dict[str, Callable[[Tensor], Any]] = {
    "along the rows": lambda x: torch.cat([x, x], 2),
    "stacked": lambda x: torch.stack([x, x], 2),
    "chunks of rows": lambda x: x.chunk(2, 2),
    "every second row": lambda x: x[:, :, ::2],
    "some rows": lambda x: x[:, :, 2:7],
    "a row": lambda x: x[:, :, 4],
    "unbound": lambda x: x.unbind(2),
    "one channel": lambda x: x[:, 1],
    "squeezed": lambda x: x[:, :1].squeeze(),
    "a sum": lambda x: x.sum(),
    "softmax": lambda x: x.softmax(2),
    "cumulated": lambda x: x.cumsum(2),
    "flat": lambda x: x.reshape(2, -1) + 1,
    "a product": lambda x: torch.einsum("bchw,bdhw->bcd", x, x),
    "turned": lambda x: x + x.transpose(2, 3)[:, :, :1].sum(3, keepdim=True).transpose(2, 3),
    "of other rows": lambda x: x[:, :, :5] * x[:, :, 5:10],
    "shifted": lambda x: x + x.flip(2),
    "where": lambda x: torch.where(x > 0, x, noise(5)),
    "by row": lambda x: x * noise(6, (12, 1)),
    "by column": lambda x: x * noise(6, (5,)),
    "a number": lambda x: float(x.abs().max()),
    "another type": lambda x: x.half().to(torch.float64),
    "a mask": lambda x: x.masked_fill(x > 0, 2.0),
    "an array": lambda x: torch.from_numpy(x.numpy() * 2),
    "an array of what was computed": lambda x: torch.from_numpy((x[:, 1] + 1).numpy()),
    "a list": lambda x: torch.tensor(x.tolist()),
    "by DLPack": lambda x: torch.from_dlpack(x) + 1,
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid(), generator=torch.Generator().manual_seed(2)),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_whatever_is_asked_of_a_patched_tensor_is_exact(name: str) -> None:
    operation = OPERATIONS[name]
    found, wanted = settled(operation(patched(noise()))), operation(noise())
    if isinstance(wanted, Tensor):
        found, wanted = [found], [wanted]
    if isinstance(wanted, float):
        assert found == wanted
        return
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_draws_are_those_of_one_device() -> None:
    asked: list[int] = []
    torch.manual_seed(0)
    found = torch.randn_like(patched(noise(), asked))
    torch.manual_seed(0)
    assert torch.equal(found, torch.randn_like(noise()))
    assert asked == []


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "all": lambda x: x.add_(1),
    "rows": lambda x: x[:, :, 2:7].mul_(3),
    "a channel": lambda x: x[:, 1].zero_(),
    "an item": lambda x: x.__setitem__((0, 1, 4), 7.0),
    "a channel, set": lambda x: x.__setitem__((slice(None), 1), noise(7)[:, 0]),
    "flat": lambda x: x.view(-1).narrow(0, 3, 5).fill_(2.0),
    "a view of a view": lambda x: x.permute(0, 2, 3, 1)[..., 0].exp_(),
    "detached": lambda x: x.detach().mul_(2),
    "chunks": lambda x: x.chunk(2)[1].add_(5),
    "twice, through dense views": lambda x: (x[:, :, 2:7], x.view(-1).add_(1))[0].mul_(2),
    "from another": lambda x: x.copy_(noise(9)),
    "an array": lambda x: x.numpy().__setitem__((0, 1), 5.0),
    "an array of a view": lambda x: x[:, 1].numpy().__setitem__(0, 5.0),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_in_place_is_seen_where_eager_torch_shows_it(name: str) -> None:
    """By views made before and after; not by what was computed before."""
    seen = []
    for value in (patched(noise()), noise()):
        before, view = value * 2 + 1, value[:, :2]
        computed = view - 1
        WRITES[name](value)
        seen.append([settled(one) for one in (before, view, computed, value, value[:, 1:], value + view.sum())])
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))


def test_what_a_pipeline_returns_is_dense() -> None:
    made = finished(StableDiffusionPipelineOutput(images=patched(noise()), nsfw_content_detected=None))
    assert torch.equal(made.images, noise())
    assert torch.equal(made["images"], noise())
    assert not isinstance(made.images, Patched)
    assert torch.equal(finished((patched(noise()), None))[0], noise())


def test_what_is_detached_in_place_stays_on_its_way() -> None:
    asked: list[int] = []
    with torch.inference_mode():
        value = patched(noise(), asked)
        assert value.detach_() is value
        assert not asked
        assert torch.equal(settled(value), noise())


LATER: dict[str, Callable[[Tensor], Callable[[], Any]]] = {
    "itself": lambda x: x.zero_,
    "by its data": lambda x: x.data.zero_,
    "a view": lambda x: x.view(-1).zero_,
    "an array": lambda x: partial(x.numpy().fill, 0),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", LATER)
def test_an_operand_that_is_written_before_its_use_is_read_as_it_was(name: str, mode: Any) -> None:
    """Whether torch counts that or not."""
    with mode():
        for other in (noise(1), patched(noise(1))):
            write = LATER[name](other)
            total = patched(noise()) + other
            write()
            assert torch.equal(settled(total), noise() + noise(1))


@pytest.mark.parametrize(
    "change", [lambda x: x.squeeze_(0), lambda x: x.resize_(5), lambda x: setattr(x, "data", noise())]
)
def test_another_shape_or_memory_of_the_same_tensor_is_refused(change: Any) -> None:
    with pytest.raises(RunError, match=r"is given another shape or memory by "):
        change(patched(noise()))
