"""Numbers that forward reads of its inputs: graphs for the calls that are alike in that."""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import singledispatch
from typing import Any

import diffusers
import numpy
import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.capture import export
from tests.tiny_backbones import VALUE_DEPENDENT
from tests.tiny_pipelines import noise


class Reading(nn.Module):
    """Choices by truth values, lengths and places by a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.late = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.text, self.last = nn.Linear(6, 8), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: Tensor, timestep: Tensor, text: Tensor, mask: Tensor, image: Tensor) -> Tensor:
        h = self.first(x) * timestep.cos()[:, None, None, None]
        h = self.late(h) if (timestep > 0.5).all() else h
        h = h + (1 if torch.all(image == 0) else image.mean())
        h = h * 2 if x.abs().max() > 1 else h
        lengths = mask.bool().sum(1).tolist()
        h = h + torch.stack([self.text(one[:n]).mean(0) for one, n in zip(text, lengths, strict=True)])[..., None, None]
        h = h + self.text(text[mask]).sum(0)[:, None, None] + torch.masked_select(text[..., 0], mask).sum()
        h = h + text[torch.where(mask)].sum() + len(torch.argwhere(mask)) + text[0, mask[0].nonzero()].mean()
        h = h + text.repeat_interleave(torch.where(mask, 3, 1)[0], dim=1).cos().mean()
        h = h + torch.repeat_interleave(timestep, mask[0].sum()).sum()
        changed, places = text.clone(), torch.zeros(5, dtype=torch.bool)
        changed[mask] = changed[mask] * 2
        places[mask[0].nonzero()[:, 0]] = True
        changed[:, places], changed[:, ~places] = changed[:, places] + int(places.sum()), 0.0
        return self.last(torch.tanh(h + changed.mean()))  # type: ignore[no-any-return]


def call(
    time: float = 0.3, lengths: tuple[int, int] = (2, 3), image: float = 0.0, scale: float = 0.1
) -> dict[str, Tensor]:
    return {
        "x": scale * noise(2, 4, 8, 8), "timestep": torch.full((2,), time, dtype=torch.float64),
        "text": noise(2, 5, 6), "mask": torch.arange(5)[None] < torch.tensor(lengths)[:, None],
        "image": torch.full((2, 3), image, dtype=torch.float64),
    }  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"mode": "displaced"}, {"sizes": "any"}])
def test_calls_that_read_other_numbers_have_other_graphs(options: dict[str, str]) -> None:
    torch.manual_seed(0)
    model = Reading().double().eval()
    sampler = fxpipe.compile_sampler(
        model, 2, example=call(), sample={"x": 2}, patches=2, cfg=1, cache=False, **options
    )
    alike = call(), call(time=0.4, image=0.0)
    others = call(time=0.7), call(lengths=(5, 1)), call(image=0.5), call(scale=2.0), call(image=0.7)
    for given in (*alike, *others, *alike):
        with torch.no_grad():
            torch.testing.assert_close(sampler.predict(**given), model(**given), rtol=1e-10, atol=1e-10)
    assert len(sampler.denoiser._known.traced) == 5


def test_many_numbers_of_an_input_are_told(caplog: pytest.LogCaptureFixture) -> None:
    model = Reading().double().eval()
    sampler = fxpipe.compile_sampler(model, 2, example=call(), sample={"x": 2}, patches=2, cfg=1, cache=False)
    with caplog.at_level(logging.WARNING):
        for lengths in ((1, 1), (1, 2), (3, 3)):
            sampler.predict(**call(lengths=lengths))
    assert caplog.text.count("traced and compiled anew") == 1


def test_examples_without_values_are_refused() -> None:
    example = {name: one.to("meta") for name, one in call().items()}
    model = Reading().double().to("meta")
    with pytest.raises(fxpipe.CaptureError, match="decides by the value"):
        fxpipe.compile_sampler(model, 2, example=example, sample={"x": 2}, patches=2, cache=False)


_HUNYUAN = "HunyuanVideo15Transformer3DModel"
_CONFIGS: dict[str, dict[str, Any]] = VALUE_DEPENDENT | {
    _HUNYUAN: {
        "in_channels": 9, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2,
        "num_refiner_layers": 1, "mlp_ratio": 2.0, "text_embed_dim": 8, "text_embed_2_dim": 8, "image_embed_dim": 8,
        "rope_axes_dim": (2, 2, 4), "target_size": 16,
    }
}  # fmt: skip
_has_hunyuan = pytest.mark.skipif(not hasattr(diffusers, _HUNYUAN), reason="diffusers has no such model")


def _lumina(length: int, rows: int) -> dict[str, Tensor]:
    return {
        "hidden_states": noise(1, 4, rows, 8), "timestep": torch.tensor([0.3], dtype=torch.float64),
        "encoder_hidden_states": noise(1, 8, 8), "encoder_attention_mask": torch.arange(8)[None] < length,
    }  # fmt: skip


def _mochi(length: int, rows: int) -> dict[str, Tensor]:
    return _lumina(length, rows) | {"hidden_states": noise(1, 4, 2, rows, 8)}


def _hunyuan(length: int, rows: int) -> dict[str, Tensor]:
    return {
        "hidden_states": noise(1, 9, 3, rows, 6), "timestep": torch.tensor([300.0], dtype=torch.float64),
        "encoder_hidden_states": noise(1, 8, 8), "encoder_attention_mask": torch.arange(8)[None] < length,
        "encoder_hidden_states_2": noise(1, 6, 8), "encoder_attention_mask_2": torch.arange(6)[None] < 3,
        "image_embeds": torch.zeros(1, 5, 8, dtype=torch.float64),
    }  # fmt: skip


# Ranks, lengths and rows; other rows are another trace where numbers are computed of them.
@pytest.mark.parametrize(
    ("name", "ranks", "call_of", "sizes", "traces_of"),
    [
        ("Lumina2Transformer2DModel", 2, _lumina, ((5, 8), (7, 8), (3, 12)), "010"),
        ("MochiTransformer3DModel", 3, _mochi, ((5, 8), (7, 8), (3, 8)), "010"),
        pytest.param(_HUNYUAN, 2, _hunyuan, ((5, 8), (7, 8), (3, 8)), "010", marks=_has_hunyuan),
    ],
)
def test_lengths_that_are_read_are_free_from_the_second_on(
    name: str,
    ranks: int,
    call_of: Callable[[int, int], dict[str, Tensor]],
    sizes: Sequence[tuple[int, int]],
    traces_of: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traces: list[int] = []
    trace = export._traced_once

    def counted(*args: Any, **named: Any) -> Any:
        traces.append(1)
        return trace(*args, **named)

    monkeypatch.setattr(export, "_traced_once", counted)
    torch.manual_seed(0)
    model = getattr(diffusers, name)(**_CONFIGS[name]).to(torch.float64).eval()
    counts, sampler = [], None
    for length, rows in sizes:
        given = call_of(length, rows)
        if sampler is None:
            sampler = fxpipe.compile_sampler(model, ranks, example=given, patches=ranks, cache=False)
            assert "gathered" not in str(sampler.notes)
            assert sampler.verify(**given).error < 1e-12
        del traces[:]
        with torch.no_grad():
            wanted = model(**given).sample
        assert (sampler.predict(**given).sample - wanted).abs().max() <= 1e-10 * wanted.abs().max()
        counts.append("01"[bool(traces)])
    assert "".join(counts) == traces_of


class Lengths(nn.Module):
    """Goes by numbers of an input, in several ways."""

    def __init__(self, way: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.mix, self.way = nn.Conv2d(4, 4, 3, padding=1), way

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.mix(x) + self.way(x, mask.sum(1))  # type: ignore[no-any-return]


_TABLE = {3: 2.0, 5: 7.0}


def _if_it_is_a_key(x: Tensor, n: Tensor) -> Tensor:
    with suppress(TypeError):
        return x * _TABLE.get(n[0].item(), 1.0)  # type: ignore[call-overload, no-any-return]
    return x


def _filled_up_to(x: Tensor, n: Tensor) -> Tensor:
    kept = torch.zeros(x.shape[0], x.shape[3], dtype=torch.bool)
    for place in range(len(n)):
        kept[place, : n[place]] = True
    return x * kept[:, None, None]


@singledispatch
def _of_kind(number: Any) -> float:
    return 0.0


@_of_kind.register
def _(number: int) -> float:
    return number + 0.5


@pytest.mark.parametrize(
    "way",
    [
        lambda x, n: x * n[0].item() + int(n[1]),
        lambda x, n: x.sin() if n[0].item() > 3 else x.cos(),
        lambda x, n: x * _TABLE.get(int(n[0]), 1.0),
        lambda x, n: x * sum(range(n[0].item())),
        lambda x, n: x * len(set(n.tolist())) + max(n.tolist()),
        lambda x, n: x * next(iter(set(n.tolist()))) + (set(n.tolist()) == {4, 6}),
        lambda x, n: x * ([0] * n[0].item() == [0] * 5) + len([2] * n[1].item() + [3]),
        lambda x, n: x * int(n[0].item() * 0.41 * 100),
        lambda x, n: x * ((n[0] * 10**12).item() % 7),
        lambda x, n: x * n[0].item() + ("%d" % n[0] == "5"),  # noqa: UP031
        _if_it_is_a_key,
        lambda x, n: x * _of_kind(n[0].item()) if numpy.isscalar(n[1].item()) else x,
        lambda x, n: x * divmod(n[0].item(), 2)[0] + ~n[1].item() + getattr(n[0].item(), "numerator", 0),
        lambda x, n: x * 2 if isinstance(n[0].item(), int) and type(n[1].item()) is int else x,
        lambda x, n: x + x[..., n[1] : n[0] + 1].sum(-1, keepdim=True) + x[..., :: n[1]].shape[-1],
        _filled_up_to,
    ],
)
def test_nothing_of_a_number_is_kept_for_another(way: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = Lengths(way).double()
    x, sampler = noise(2, 4, 8, 6), None
    for lengths in ((3, 5), (4, 6), (5, 3), (2, 2), (7, 1), (0, 4), (3, 5)):
        call = {"x": x, "mask": torch.arange(9)[None] < torch.tensor(lengths)[:, None]}
        options: Any = {"example": call, "sample": {"x": 2}, "patches": 2, "cfg": 1, "cache": False}
        sampler = sampler or fxpipe.compile_sampler(model, 2, **options)
        with torch.no_grad():
            torch.testing.assert_close(sampler.predict(**call), model(**call), rtol=1e-10, atol=1e-10)


@_has_hunyuan
def test_an_image_that_is_there_or_not() -> None:
    torch.manual_seed(0)
    model = getattr(diffusers, _HUNYUAN)(**_CONFIGS[_HUNYUAN]).to(torch.float64).eval()
    given = _hunyuan(5, 8)
    sampler = fxpipe.compile_sampler(model, 2, example=given, patches=2, cache=False)
    assert "gathered" not in str(sampler.notes)
    for scale in (0.0, 1.0, 0.5):
        given["image_embeds"] = scale * noise(1, 5, 8)
        assert sampler.verify(**given).error < 1e-12
    assert len(sampler.denoiser._known.traced) == 2


class Apart(nn.Module):
    """Reads a count of what a draw that decides nothing has a part in, in an autocast of its own or in none."""

    def __init__(self, autocast: bool) -> None:
        super().__init__()
        self.mix, self.autocast = nn.Conv2d(4, 4, 1), autocast

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            kept = (mask & (torch.rand(5) >= 0)).float() @ torch.full((5, 3), 1 / 3)
            return self.mix(x) * int(kept.sum())  # type: ignore[no-any-return]


def test_numbers_that_no_lookup_gives_are_refused() -> None:
    """A lookup is in no autocast; of a draw that decides nothing it needs none."""
    model, examples = Apart(False).double(), [{"x": noise(2, 4, 8, 8), "mask": torch.ones(2, 5) > n} for n in (0, 1)]
    sampler = fxpipe.compile_sampler(model, 2, example=examples[0], sample={"x": 2}, patches=2, cfg=1, cache=False)
    for given in examples:
        with torch.no_grad():
            torch.testing.assert_close(sampler.predict(**given), model(**given))
    with pytest.raises(fxpipe.CaptureError, match="decides by the value"):
        fxpipe.compile_sampler(Apart(True).double(), 2, example=examples[0], sample={"x": 2}, patches=2, cache=False)


class Itself(nn.Module):
    """Attends to a text, or to the image itself."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        return self.conv(x) + (2 * x if text is x else text.mean((2, 3), keepdim=True))


@pytest.mark.parametrize("first", [True, False])
def test_inputs_that_are_one_tensor_are_one_in_forward(first: bool) -> None:
    model, calls = Itself().double(), {}
    for height in (8, 12):
        x = noise(2, 2, height, 5)
        calls |= {(height, True): {"x": x, "text": x}, (height, False): {"x": x, "text": x.clone()}}
    sampler = fxpipe.compile_sampler(model, 2, example=calls[8, first], sample={"x": 2, "text": 2}, patches=2, cfg=1)
    for given in [*calls.values(), *calls.values()]:
        with torch.no_grad():
            assert (sampler.predict(**given) - model(**given)).abs().max() <= 1e-12
