"""Caches of keys and values among a denoiser's arguments: forward fills them, reads them, and returns new ones."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from tests.distributed import run_processes
from tests.tiny_pipelines import noise

IMAGE = torch.arange(12) >= 3


class Layer:
    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.seen: list[Tensor] = []


class Cache:
    def __init__(self, num_layers: int) -> None:
        self.layers, self.mode, self.num_written = [Layer() for _ in range(num_layers)], "fill", 0


class Cached(nn.Module):
    """Tokens of a text and an image; in the first step the text's keys are kept, by which later ones go."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 4)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(
        self, x: Tensor, time: Tensor, text: Tensor, image: Tensor | None, cache: Cache | None = None, more: Any = None
    ) -> Any:
        h, size = self.first(x) * time[:, None, None], text.shape[1]
        joint = torch.cat([text, h], 1)
        if image is not None:
            places = torch.zeros_like(image)
            places[image.nonzero()[:, 0]] = True
            size, joint = int((~places).sum()), x.new_zeros(len(x), len(image), 8)
            joint[:, ~places], joint[:, places] = text, h
        made = Cache(len(self.layers)) if cache is None else cache
        for layer, kept in zip(self.layers, made.layers, strict=True):
            keys = layer(joint)
            if made.mode == "fill":
                kept.keys = keys[:, :size].clone()
                kept.seen.append(kept.keys.mean(1))
            else:
                keys = torch.cat([kept.keys, keys[:, size:]], 1)
            joint = joint + F.scaled_dot_product_attention(joint, keys, keys) + kept.seen[0][:, None]
        made.num_written += 1
        if more is not None:
            more["last"] = joint[:, :size].mean(1)
        return self.last(joint[:, size:]), made if cache is None else None


def model() -> nn.Module:
    torch.manual_seed(0)
    return Cached().double()


def steps(predict: Any, image: Tensor | None = IMAGE, size: int = 2, given: bool = True) -> list[Tensor]:
    """A loop whose first step fills the cache; what it ends with, and what is in the cache."""
    x, text = noise(size, 9, 4), noise(size, 3, 8, seed=1)
    cache, more = Cache(2) if given else None, {"last": text[:, 0]}
    layers = cache and [*cache.layers]
    with torch.no_grad():
        for step in range(3):
            found, made = predict(x, torch.full((size,), 1.0 - step / 4, dtype=torch.float64), text, image, cache, more)
            cache = made or cache
            assert cache is not None
            cache.mode, text, x = "read", text * 2, x - found / 4
    assert layers is None or all(one is other for one, other in zip(layers, cache.layers, strict=True))
    assert cache.num_written == 3
    return [x, more["last"], *(one for layer in cache.layers for one in (layer.keys, *layer.seen))]


def sampler(image: Tensor | None = IMAGE, **options: Any) -> fxpipe.Sampler:
    example = {"x": noise(2, 9, 4), "time": torch.ones(2, dtype=torch.float64), "text": noise(2, 3, 8)}
    example |= {"image": image, "cache": Cache(2), "more": {"last": noise(2, 8)}}
    given = {"example": example, "sample": {"x": 1}, **options}
    return fxpipe.compile_sampler(model(), given.pop("ranks", 2), **given)


def require_same(found: list[Tensor], wanted: list[Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


LAYOUTS: dict[str, dict[str, Any]] = {
    "patches": {"ranks": 3, "patches": 3}, "stages": {"stages": 2}, "groups": {"cfg": 2, "image": None},
    "displaced": {"patches": 2, "mode": "displaced", "warmup": 9},
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_they_are_filled_and_read(layout: str) -> None:
    of, one = sampler(**{"cfg": 1, **LAYOUTS[layout]}), model()
    image = LAYOUTS[layout].get("image", IMAGE)
    assert of.verify().ok
    for given in ({}, {"given": False}, {"size": 3}):
        require_same(steps(of.predict, image, **given), steps(one, image, **given))
    assert of.example[1]["cache"].layers[0].keys is None
    assert not any("gathered" in note for note in of.notes)


class Turning(nn.Module):
    def forward(self, x: Tensor, kept: list[Tensor], said: dict[str, Any], more: dict[str, Any]) -> Tensor:
        kept.append(kept.pop(0))
        x = x * kept[0][:, None] + said.pop("text", torch.zeros(())).mean()
        said["done"], more["many"] = True, more.get("many", 0) + 1
        return x * more["many"]


def test_what_is_taken_out_or_changes_places_is_so_for_the_caller() -> None:
    def call() -> tuple[Any, ...]:
        said = {"text": noise(2, 3, 8), "first": True}
        return noise(2, 9, 4), [noise(2, 4, seed=1), noise(2, 4, seed=2)], said, {}

    example = dict(zip(("x", "kept", "said", "more"), call(), strict=True))
    of = fxpipe.compile_sampler(Turning(), 2, example=example, sample={"x": 1}, cache=False)
    mine, plain = call(), call()
    for _ in range(3):
        require_same([of.predict(*mine), *mine[1]], [Turning()(*plain), *plain[1]])
        assert [*mine[2]] == [*plain[2]] == ["first", "done"]
    assert mine[3] == plain[3] == {"many": 3}


def test_tensors_of_other_dimensions_are_another_call() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, by: Tensor) -> Tensor:
            return x * by.mean()

    example = {"x": noise(2, 9, 4), "by": noise(2, 3)}
    of = fxpipe.compile_sampler(Scaled(), 2, example=example, sample={"x": 1}, cache=False)
    for by in (noise(2, 3), noise(2, 3, 8), noise(2), noise(1)[0], noise(2, 5)):
        require_same([of.predict(noise(2, 9, 4), by)], [Scaled()(noise(2, 9, 4), by)])


def test_lists_that_are_there_twice_are_refused() -> None:
    of = sampler(patches=2, cfg=1)
    args, given = of.example
    first, second = given["cache"].layers
    second.seen = first.seen
    with pytest.raises(fxpipe.CompileError, match=r"changes its inputs cache, more, in which .* is twice"):
        of.predict(*args, **given)


def launched() -> list[Tensor]:
    of = sampler(patches=2, cfg=1, mode="displaced", warmup=1)
    found = steps(of.predict)
    of.close()
    return found


def test_processes_fill_them_as_threads_do() -> None:
    wanted = launched()
    for found in run_processes(2, launched):
        assert all(map(torch.equal, found, wanted))
