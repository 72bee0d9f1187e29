"""Denoisers that predict several tensors: each is put together as on one device, those with rows and others."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from tests.distributed import run_processes
from tests.tiny_pipelines import noise


@dataclass
class Both:
    sample: Tensor
    audio: dict[str, Tensor]
    kind: str = "both"


class VideoAndAudio(nn.Module):
    """A video [B, C, F, H, W] and audio [B, T, C], which attend to each other; a mask puts one token in some places."""

    def __init__(self) -> None:
        super().__init__()
        self.video, self.audio, self.token = nn.Linear(4, 8), nn.Linear(6, 8), nn.Parameter(torch.ones(1, 8))
        self.of_video, self.of_audio = (nn.ModuleList(nn.Linear(8, 8) for _ in range(2)) for _ in range(2))
        self.last = nn.Linear(8, 4)
        self.heard = nn.Linear(8, 2, dtype=torch.float32)

    def forward(self, x: Tensor, audio: Tensor, time: Tensor, mask: Tensor) -> Both:
        v, a = self.video(x.permute(0, 2, 3, 4, 1).flatten(1, 3)), self.audio(audio) * time[:, None, None]
        v[:, mask] = self.token
        a[:, -1] = 0
        for seen, heard in zip(self.of_video, self.of_audio, strict=True):
            both = torch.cat([v, a], 1)
            v = v + F.scaled_dot_product_attention(seen(v), both, both)
            a = a + heard(F.scaled_dot_product_attention(a, both, both)).tanh()
        v = self.last(v).unflatten(1, x.shape[2:]).permute(0, 4, 1, 2, 3)
        return Both(v, {"wave": a, "loud": self.heard(a.mean(1).float())})


def model() -> nn.Module:
    torch.manual_seed(0)
    made = VideoAndAudio().double()
    made.heard.float()
    return made


def call(size: int = 2, seed: int = 0, rows: int = 6) -> dict[str, Tensor]:
    video, audio = noise(size, 4, 2, rows, 3, seed=seed), noise(size, 5, 6, seed=seed + 1)
    mask = torch.arange(2 * rows * 3) % 4 == seed % 3
    return {"x": video, "audio": audio, "time": torch.full((size,), 0.5 + seed, dtype=torch.float64), "mask": mask}


def sampler(**options: Any) -> fxpipe.Sampler:
    given = {"example": call(), "sample": {"x": 3}, **options}
    return fxpipe.compile_sampler(model(), given.pop("ranks", 2), **given)


@torch.no_grad()
def predicted(by: Callable[..., Both]) -> list[Tensor]:
    """Of more samples with another mask, another size, and again."""
    found = [by(**given) for given in (call(), call(3, 1), call(rows=7), call())]
    return [one for both in found for one in (both.sample, *both.audio.values())]


def require_same(found: list[Tensor]) -> None:
    for one, wanted in zip(found, predicted(model()), strict=True):
        exact = wanted.dtype == torch.float64
        torch.testing.assert_close(one, wanted, rtol=0, atol=1e-12 if exact else 1e-6)


LAYOUTS: dict[str, dict[str, Any]] = {
    "patches": {"ranks": 3, "patches": 3, "cfg": 1}, "groups": {"cfg": 2}, "stages": {"stages": 2, "cfg": 1},
    "any size": {"patches": 2, "cfg": 1, "sizes": "any"},
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_is_one_devices(layout: str) -> None:
    of = sampler(**LAYOUTS[layout])
    assert of.verify().ok
    require_same(predicted(of.predict))


@pytest.mark.parametrize(
    "layout", [{"ranks": 3, "patches": 3}, {"stages": 2, "patches": 3}, {"ranks": 4, "stages": 2, "patches": 4}]
)
def test_so_it_is_where_nothing_moves(layout: dict[str, Any], tmp_path: Path) -> None:
    of = sampler(**layout, cfg=1, mode="displaced", warmup=1)
    assert of.verify().ok
    assert of.verify(**call(rows=7)).ok
    of.dump(tmp_path)
    assert of.simulate(steps=3).makespan_seconds > 0
    with of.call():
        first = of.predict(**call())
        of.predict(**call(seed=1))
    assert torch.equal(first.audio["wave"], of.predict(**call()).audio["wave"])


def test_a_kept_capture_knows_them(tmp_path: Path) -> None:
    for _ in range(2):
        made = sampler(cache=tmp_path, patches=2).predict(**call())
        assert torch.equal(made.audio["loud"], model()(**call()).audio["loud"])


def launched(stages: str) -> list[Tensor]:
    of = sampler(stages=int(stages), patches=2, cfg=1, mode="displaced", warmup=1)
    with of.call():
        found = [of.predict(**{**call(), "x": call()["x"] * size}) for size in (1, 0.9, 0.8)]
    of.close()
    return [one for both in found for one in (both.sample, *both.audio.values())]


@pytest.mark.parametrize("stages", "12")
def test_processes_predict_what_threads_do(stages: str) -> None:
    wanted = launched(stages)
    for found in run_processes(2, launched, stages):
        assert all(map(torch.equal, found, wanted))
