"""Calls of other image sizes by one trace with free sizes: one device's result, or a trace of their own."""

import contextvars
import functools
import gc
import math
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from diffusers.hooks import HookRegistry, ModelHook
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from fxpipe.capture import any_size, export
from fxpipe.models.backbones import prediction_of
from fxpipe.sampling import spread
from tests.denoisers import case, noise, small

TABLE = {"12": 3.0}
WIDTHS = {(12, 8): 2.0, (8, 10): 3.0}
SCALE = contextvars.ContextVar("scale", default=1.0)


def picture(height: int, width: int) -> dict[str, Tensor]:
    return {"picture": noise(2, 4, height, width), "text": noise(2, 3, 8)}


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """One entry for every trace from here on."""
    found: list[object] = []

    def counted(trace: Callable[..., object]) -> Callable[..., object]:
        def traced(*args: object, **kwargs: object) -> object:
            found.append(args)
            return trace(*args, **kwargs)

        return traced

    monkeypatch.setattr(export, "_trace", counted(export._trace))
    monkeypatch.setattr(any_size, "export_any_size", counted(export.export_any_size))
    return found


def require_equal(sampler: fxpipe.Sampler, model: nn.Module, call: dict[str, Any]) -> None:
    with torch.no_grad():
        wanted = prediction_of(model(**call))
    found = prediction_of(sampler.predict(**call))
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= 1e-10 * wanted.abs().max()


class Levels(nn.Module):
    """A picture on two levels with a skip, positions made of its sizes, and text that its tokens read."""

    def __init__(self) -> None:
        super().__init__()
        self.top, self.down = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.norm, self.query = nn.GroupNorm(2, 8), nn.Linear(8, 8)
        self.low, self.last = nn.Parameter(torch.randn(1, 8, 4, 4)), nn.Conv2d(16, 4, 3, padding=1)

    def forward(self, picture: Tensor, text: Tensor) -> Tensor:
        height = picture.shape[2]
        rows = torch.sin(torch.arange(height, dtype=picture.dtype) / height)[:, None]
        top = self.norm(self.top(picture + rows))
        below = self.down(top)
        below = below + F.interpolate(self.low, size=below.shape[-2:], mode="bilinear")
        tokens = self.query(below.flatten(2).transpose(1, 2))
        tokens = F.scaled_dot_product_attention(*[torch.cat([text, tokens], 1).unsqueeze(1)] * 3)[:, 0, 3:]
        below = F.interpolate(tokens.transpose(1, 2).reshape(below.shape), scale_factor=2.0)
        return self.last(torch.cat([top, below], 1))  # type: ignore[no-any-return]


def test_one_trace_serves_other_sizes(traces: list[object]) -> None:
    torch.manual_seed(0)
    model = Levels().double()
    options = {"sample": {"picture": 2}, "patches": 2, "sizes": "any", "cache": False}
    sampler = fxpipe.compile_sampler(model, 2, example=picture(12, 8), **options)  # type: ignore[arg-type]
    del traces[:]
    for height, width in ((12, 8), (16, 16), (20, 10), (8, 24)):
        require_equal(sampler, model, picture(height, width))
    one = {name: value[:1] for name, value in picture(20, 10).items()}
    require_equal(sampler, model, one)
    assert not traces
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        model(**picture(13, 8))
    with pytest.raises(fxpipe.FxpipeError, match="Sizes of tensors must match"):
        sampler.predict(**picture(13, 8))  # by a trace of its own: no half result of the one with free sizes


@pytest.mark.parametrize("sizes", ["auto", "any"])
def test_a_second_start_traces_nothing(sizes: str, tmp_path: Path, traces: list[object]) -> None:
    def started(first: int = 8, **changes: object) -> tuple[nn.Module, fxpipe.Sampler]:
        torch.manual_seed(0)
        del traces[:]
        model = Forward(squares, **changes).double()  # type: ignore[arg-type]
        options = {"sample": {"picture": 2}, "sizes": sizes, "cache": tmp_path}
        return model, fxpipe.compile_sampler(model, 2, example=picture(first, 6), **options)  # type: ignore[arg-type]

    def require_traced(count: bool, first: int = 8, **changes: object) -> None:
        model, sampler = started(first, **changes)
        require_equal(sampler, model, picture(first, 6))
        if sizes == "any":
            require_equal(sampler, model, picture(12, 10))
        assert bool(traces) == count

    require_traced(True)
    require_traced(False)
    require_traced(True, scale=2.0)  # a setting
    require_traced(True, width=6)  # a weight's shape
    require_traced(True, first=14)
    entries = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for path, content in entries.items():
        path.write_bytes(content[: len(content) // 2])
    require_traced(True)
    require_traced(False)
    assert sum(path.read_bytes() == content for path, content in entries.items()) == 2  # as its text mixes samples


def of_size(call: dict[str, Any], height: int, width: int) -> dict[str, Any]:
    """A backbone's call at another size of its latents."""
    if "img_ids" in call:
        places = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        ids = torch.stack([torch.zeros(height, width), *places], -1).flatten(0, 1).double()
        return {**call, "img_ids": ids, "hidden_states": noise(2, height * width, call["hidden_states"].shape[-1])}
    name = "sample" if "sample" in call else "hidden_states"
    return {**call, name: noise(*call[name].shape[:-2], height, width)}


@pytest.mark.parametrize(
    ("key", "sizes"),
    [
        ("UNet2DModel", [(16, 24), (20, 8)]),
        ("PixArtTransformer2DModel", [(12, 10), (16, 16)]),  # at 8 rows it would read its stored positions
        ("FluxTransformer2DModel", [(6, 5), (4, 8)]),
    ],
)
def test_backbones_are_one_devices_at_other_sizes(key: str, sizes: list[tuple[int, int]], traces: list[object]) -> None:
    given = case(key)
    first, *others = [of_size(dict(given.example), *size) for size in sizes]
    sampler = fxpipe.compile_sampler(given.model, 2, example=first, patches=2, sizes="any")
    del traces[:]
    for call in others:
        require_equal(sampler, given.model, call)
    assert not traces, str(sampler)


DECISIONS: dict[str, Callable[[Tensor], int]] = {
    "one sample": lambda x: 2 if x.shape[0] == 1 else 1,
    "a dimension less": lambda x: x.squeeze(0).ndim,
    "few samples": lambda x: 2 if x.shape[0] < 4 else 1,
    "many samples": lambda x: 2 if x.shape[0] > 2 else 1,
    "even numbers": lambda x: 2 if x.shape[0] % 2 == 0 else 1,
    "frames": lambda x: len([0] * (x.shape[0] // 2 + 1)),
    "the largest": lambda x: max(len(x), 3) + min([2, len(x)]) + max([x.shape[0], 3], key=lambda size: -size),
}


class Deciding(nn.Module):
    def __init__(self, decide: Callable[[Tensor], int]) -> None:
        super().__init__()
        self.conv, self.decide = nn.Conv2d(2, 2, 3, padding=1).double(), decide

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) * self.decide(x)


@pytest.mark.parametrize("sizes", ["auto", "any"])
@pytest.mark.parametrize("decides_by", DECISIONS)
def test_numbers_of_samples_by_which_forward_decides_have_graphs_of_their_own(decides_by: str, sizes: Any) -> None:
    model = Deciding(DECISIONS[decides_by])
    for first in (1, 2, 4):
        example = {"x": noise(first, 2, 9, 5)}
        sampler = fxpipe.compile_sampler(model, 2, example=example, sample={"x": 2}, cfg=1, patches=2, sizes=sizes)
        for number in (1, 2, 3, 4, 6):
            x = noise(number, 2, 9, 5)
            with torch.no_grad():
                assert (sampler.predict(x=x) - model(x)).abs().max() <= 1e-12, (first, number)


def test_a_size_at_which_the_trace_does_not_hold_is_traced_apart(traces: list[object]) -> None:
    torch.manual_seed(0)
    model = Forward(branch).double()
    options = {"sample": {"picture": 2}, "patches": 2, "sizes": "any", "cache": False}
    sampler = fxpipe.compile_sampler(model, 2, example=picture(8, 6), **options)  # type: ignore[arg-type]
    del traces[:]
    require_equal(sampler, model, picture(14, 8))
    assert traces
    assert any("traced apart" in note for note in sampler.denoiser.step((), picture(14, 8)).plan.notes)
    del traces[:]
    require_equal(sampler, model, picture(16, 8))  # another of those: their trace is freed
    require_equal(sampler, model, picture(18, 6))
    assert len(traces) == 1


def test_sizes_are_free_from_the_second_on(traces: list[object]) -> None:
    torch.manual_seed(0)
    model = Levels().double()
    options = {"sample": {"picture": 2}, "patches": 2, "cache": False}
    sampler = fxpipe.compile_sampler(model, 2, example=picture(12, 8), **options)  # type: ignore[arg-type]
    counts = []
    for height, width in ((12, 8), (16, 16), (20, 10), (12, 8), (8, 24)):
        del traces[:]
        require_equal(sampler, model, picture(height, width))
        counts.append(len(traces))
    assert counts == [0, 1, 0, 0, 0]


def test_texts_of_other_lengths_need_no_trace(traces: list[object]) -> None:
    """Where the size of the image is a number: it is written in an argument."""
    given = small("QwenImageTransformer2DModel")
    sampler = fxpipe.compile_sampler(given.model, 2, example=given.example, patches=2, cache=False)
    counts = []
    for more in (0, 2, 5, 1):
        text, mask = (given.example[f"encoder_hidden_states{name}"] for name in ("", "_mask"))
        longer = {"encoder_hidden_states": torch.cat([text, text[:, :more]], 1)}
        call = {**given.example, **longer, "encoder_hidden_states_mask": torch.cat([mask, mask[:, :more]], 1)}
        del traces[:]
        require_equal(sampler, given.model, call)
        counts.append(len(traces))
    assert counts == [0, 1, 0, 0]


class Forward(nn.Module):
    """A net whose forward is given: x [2, 4, H, W] and the net, which has a table [16, 4] of rows."""

    def __init__(self, forward: Callable[[Tensor, "Forward"], Tensor], scale: float = 1.0, width: int = 4) -> None:
        super().__init__()
        self.mix, self.way, self.scale = nn.Conv2d(4, width, 3, padding=1), forward, scale
        self.rows = torch.randn(16, 1, dtype=torch.float64)
        self.kept: Tensor | None = None

    def forward(self, picture: Tensor, text: Tensor) -> Tensor:
        return self.mix(self.way(picture, self)) * self.scale + text.mean()  # type: ignore[no-any-return]


def test_settings_that_are_back_are_known(traces: list[object]) -> None:
    """The last five; their programs keep no weights that were replaced since."""
    torch.manual_seed(0)
    model = Forward(squares).double()
    options = {"sample": {"picture": 2}, "patches": 2, "cache": False}
    sampler = fxpipe.compile_sampler(model, 2, example=picture(8, 6), **options)  # type: ignore[arg-type]

    def traced(scale: float) -> bool:
        del traces[:]
        model.scale = scale
        require_equal(sampler, model, picture(8, 6))
        return bool(traces)

    assert [traced(scale) for scale in (2.0, 1.0, 2.0, 3.0, 4.0, 5.0, 1.0)] == [1, 0, 0, 1, 1, 1, 0]
    assert [traced(scale) for scale in (6.0, 1.0, 2.0)] == [1, 0, 1]
    before = weakref.ref(model.mix.weight)
    model.mix = nn.Conv2d(4, 4, 1).double()
    assert traced(1.0)
    gc.collect()
    assert before() is None


class Loop:
    """Of no library, with a denoiser of diffusers."""

    def __init__(self, net: nn.Module) -> None:
        self.net, self.components = net, {"net": net}

    def __call__(self, x: Tensor) -> Tensor:
        for time in (9, 8):
            x = x - 0.1 * self.net(x, torch.tensor(time)).sample
        return x


def test_hooks_of_guiders_are_known_when_they_are_back(traces: list[object]) -> None:
    """They are put on a pipeline's denoiser for one prediction of a step, and hold it then."""
    torch.manual_seed(0)
    one = small("UNet2DModel")
    pipe, x = Loop(one.model), one.example["sample"]
    fast = fxpipe.compile_sampler(pipe, 2, example={"x": x}, patches=2).pipeline()
    registry, counts = HookRegistry.check_if_exists_or_initialize(fast.net), []
    for _ in range(2):
        del traces[:]
        registry.register_hook(ModelHook(), "guided")
        with torch.no_grad():
            hooked = fast(x)
            registry.remove_hook("guided")
            assert torch.allclose(hooked, fast(x), rtol=0, atol=1e-10)
            assert torch.allclose(hooked, pipe(x), rtol=0, atol=1e-10)
        counts.append(len(traces))
    assert counts[1] == 0


class Elsewhere(nn.Module):
    """Scales by what lies where attributes of modules do not."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.others = nn.Conv2d(4, 4, 1), [nn.Sequential(nn.Identity())]
        self.deep = functools.reduce(
            lambda inside, _: SimpleNamespace(one=inside), range(5), SimpleNamespace(scale=1.0)
        )

    def forward(self, picture: Tensor, text: Tensor) -> Tensor:
        scale = float(os.environ.get("SCALE", "1")) * SCALE.get() * getattr(self.others[0][0], "scale", 1.0)
        return self.mix(picture) * scale * self.deep.one.one.one.one.one.scale + text.mean()  # type: ignore[no-any-return]


def test_what_is_set_elsewhere_is_seen() -> None:
    """In the environment, a context, a module that is no part of the model, and deep in objects."""
    model = Elsewhere().double()
    sampler = fxpipe.compile_sampler(model, 2, example=picture(8, 6), sample={"picture": 2}, patches=2, cache=False)
    for change in (
        lambda: os.environ.__setitem__("SCALE", "2"),
        lambda: os.environ.pop("SCALE"),
        lambda: SCALE.set(3.0),
        lambda: setattr(model.others[0][0], "scale", 5.0),
        lambda: setattr(model.deep.one.one.one.one.one, "scale", 7.0),
    ):
        change()
        require_equal(sampler, model, picture(8, 6))


def wrapped(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: function(x)


@pytest.mark.parametrize("own", [lambda mix: mix.forward, lambda mix: wrapped(mix.forward)])
def test_modules_that_were_replaced_are_not_kept_by_a_forward_of_their_own(own: Any, traces: list[object]) -> None:
    """As hooks set it; settings that are back are known all the same."""
    torch.manual_seed(0)
    model = Forward(squares).double()
    options = {"sample": {"picture": 2}, "patches": 2, "cache": False}
    sampler = fxpipe.compile_sampler(model, 2, example=picture(8, 6), **options)  # type: ignore[arg-type]
    known = []
    for _ in range(4):
        model.mix = nn.Conv2d(4, 4, 1).double()
        model.mix.forward = own(model.mix)
        known.append(weakref.ref(model.mix.weight))
        require_equal(sampler, model, picture(8, 6))
    gc.collect()
    assert [one() is None for one in known] == [True, True, True, False]
    for scale in (2.0, 1.0):
        model.scale = scale
        del traces[:]
        require_equal(sampler, model, picture(8, 6))
    assert not traces


def test_traces_are_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all that torch knows of their sizes, which it would keep for ever."""
    monkeypatch.setattr(spread, "_MOST_KINDS", 1)
    monkeypatch.setattr(spread, "_MOST_UNFREE", 0)
    torch.manual_seed(0)
    model = Levels().double()
    options = {"sample": {"picture": 2}, "patches": 2, "cache": False}
    sampler = fxpipe.compile_sampler(model, 2, example=picture(12, 8), **options)  # type: ignore[arg-type]

    def sizes_of(height: int) -> weakref.ref[Any]:
        captured = sampler.denoiser.step((), picture(height, 8)).traced.captured
        return weakref.ref(next(iter(captured.graph.nodes)).meta["val"].fake_mode.shape_env)

    known = [sizes_of(height) for height in (16, 20, 24)]
    for _ in range(2):  # graphs, then the sizes that their tensors had
        gc.collect()
    assert [one() is None for one in known] == [True, True, False]


def branch(x: Tensor, net: Forward) -> Tensor:
    return x.sin() if x.shape[2] > 12 else x


def branch_of_integers(x: Tensor, net: Forward) -> Tensor:
    height = x.shape[2]
    return x.sin() if isinstance(height, int) and height > 12 else x


def branch_of_types(x: Tensor, net: Forward) -> Tensor:
    return x.sin() if type(x.shape[2]) is int and x.shape[2] > 12 else x


def by_text(x: Tensor, net: Forward) -> Tensor:
    return x * TABLE.get(f"{x.shape[2]}", 1.0)


def by_text_of_a_form(x: Tensor, net: Forward) -> Tensor:
    return x * TABLE.get(f"{x.shape[2]:d}", 1.0)


def by_sizes(x: Tensor, net: Forward) -> Tensor:
    return x * WIDTHS.get(tuple(x.shape[2:]), 1.0)  # type: ignore[call-overload, no-any-return]


def by_sizes_if_they_are_keys(x: Tensor, net: Forward) -> Tensor:
    try:
        return x * WIDTHS[int(x.shape[2]), x.shape[3]]
    except Exception:
        return x


def tensor_of_sizes(x: Tensor, net: Forward) -> Tensor:
    return x * torch.tensor([x.shape[2], x.shape[3]], dtype=x.dtype).mean()


def root(x: Tensor, net: Forward) -> Tensor:
    return x / math.sqrt(x.shape[2] * x.shape[3])


def numpys_root(x: Tensor, net: Forward) -> Tensor:
    return x / numpy.sqrt(x.shape[2] / x.shape[3]) + numpy.maximum(x.shape[2] * 0.1, 0.5)


def fraction(x: Tensor, net: Forward) -> Tensor:
    return x / x.shape[2] + (x.shape[2] * x.shape[3]) / 7 + x.shape[2] % 5


def fraction_of_fraction(x: Tensor, net: Forward) -> Tensor:
    """Of 18 it is 53, not the 54 of 18 * 3.0."""
    return x * int(x.shape[2] * 0.3 * 10)


def plain_tensor(x: Tensor, net: Forward) -> Tensor:
    return x + net.rows[: x.shape[2]].sum()


def middle(x: Tensor, net: Forward) -> Tensor:
    """From the end where there are more rows than in the table."""
    first = (16 - x.shape[2]) // 2
    return x + net.rows[first : first + x.shape[2]].reshape(-1)[:, None]


def kept(x: Tensor, net: Forward) -> Tensor:
    if net.kept is None or net.kept.shape[0] != x.shape[2]:
        net.kept = torch.arange(x.shape[2], dtype=x.dtype)
    return x + net.kept[:, None]


def squares(x: Tensor, net: Forward) -> Tensor:
    return x.transpose(2, 3) + x if x.shape[2] == x.shape[3] else x


def lists(x: Tensor, net: Forward) -> Tensor:
    return x + torch.tensor([math.cos(i) for i in range(x.shape[2])], dtype=x.dtype)[:, None]


WAYS = (
    branch, branch_of_integers, branch_of_types, by_text, by_text_of_a_form, by_sizes,
    by_sizes_if_they_are_keys, tensor_of_sizes, root, numpys_root, fraction, fraction_of_fraction, plain_tensor,
    middle, kept, squares, lists,
)  # fmt: skip
FREE = {
    branch, branch_of_integers, branch_of_types, root, numpys_root, fraction, fraction_of_fraction, plain_tensor,
    middle, kept, squares,
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_nothing_of_a_size_is_kept_for_another(way: Callable[[Tensor, Forward], Tensor]) -> None:
    torch.manual_seed(0)
    model = Forward(way).double()
    options = {"sample": {"picture": 2}, "patches": 2, "sizes": "any", "cache": False}
    sampler = fxpipe.compile_sampler(model, 2, example=picture(8, 6), **options)  # type: ignore[arg-type]
    assert (way in FREE) == ("sizes are traced" not in str(sampler)), str(sampler)
    for height, width in ((8, 6), (12, 8), (14, 8), (18, 18), (12, 6), (8, 10)):
        require_equal(sampler, model, picture(height, width))
