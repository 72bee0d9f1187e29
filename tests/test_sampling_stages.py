"""Stages of a denoiser on columns of ranks: one device's prediction, in process and over gloo."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import CompileError
from fxpipe.models.backbones import prediction_of
from fxpipe.plan.sample_grid import Grid
from fxpipe.sampler import Sampler
from fxpipe.sampling.step import SampleStep
from passes.sampling.stages import StageLine
from tests.denoisers import small
from tests.distributed import run_processes

UNET = "UNet2DConditionModel"
KEYS = (UNET, "DiTTransformer2DModel", "SD3Transformer2DModel", "FluxTransformer2DModel", "HunyuanDiT2DModel")


@cache
def compiled(key: str) -> tuple[Sampler, list[StageLine]]:
    """A sampler of two stages, and the lines it has been cut into so far."""
    lines: list[StageLine] = []
    given = small(key)
    sampler = fxpipe.compile_sampler(
        given.model, 2, stages=2, cfg=1, example=given.example,
        observe=lambda name, artefact: lines.append(artefact) if name == "stages" else None,
    )  # fmt: skip
    return sampler, lines


def laid_out(key: str, world_size: int, **how: Any) -> tuple[SampleStep, StageLine]:
    """The programs of another layout, of the same trace."""
    sampler, lines = compiled(key)
    lowering: Any = sampler.denoiser.lowering
    asked = replace(lowering.request, world_size=world_size, **how)
    step = replace(lowering, request=asked, setting=None).step(sampler.step.traced, 2)
    return step, lines[-1]


def predicted(key: str, step: SampleStep) -> Tensor:
    sampler, _ = compiled(key)
    tensors, _ = step.traced.captured.inputs.bind(*sampler.example)
    return sampler.ranks.predict(step, sampler.denoiser.state(step.traced), step.bind(tensors))


def sample_of(sampler: Sampler, index: int) -> dict[str, Any]:
    """One sample of the example."""
    batched = {leaf.name for leaf in sampler.capture.inputs.leaves if leaf.batched}
    return {k: v[index : index + 1] if k in batched else v for k, v in sampler.example[1].items()}


@cache
def one_device(key: str) -> Tensor:
    """Sample by sample: where a model rounds to float32 inside, the batch changes the last bits of that."""
    sampler, _ = compiled(key)
    with torch.no_grad():
        return torch.cat([prediction_of(sampler.denoiser.module(**sample_of(sampler, index))) for index in range(2)])


def error(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    return float((found - wanted).abs().max() / wanted.abs().max())


LAYOUTS = (
    (2, {"stages": 2, "fold": False}), (2, {"stages": 2, "fold": True}), (3, {"stages": 3}), (4, {"stages": 2}),
    (8, {"stages": 2, "cfg": 2}),
)  # fmt: skip
TELLING = (LAYOUTS[1], LAYOUTS[4])  # both ends of skips on a rank; groups, stages and patches at once


@pytest.mark.parametrize("key", KEYS)
def test_stages_predict_what_one_device_predicts(key: str) -> None:
    whole = sum(tensor.nbytes for tensor in compiled(key)[0].denoiser.module.parameters())
    for world_size, how in LAYOUTS if key == UNET else TELLING:
        step, line = laid_out(key, world_size, **how)
        assert error(predicted(key, step), one_device(key)) <= 1e-10, how
        assert step.grid.stages == how["stages"]
        assert all(sum(t.nbytes for t in program.state.values()) < whole for program in step.programs)
        columns = [sum(s.seconds for s in line.stages if s.column == c) for c in range(line.num_columns)]
        assert max(columns) <= 1.5 * sum(columns) / line.num_columns


class Skips(nn.Module):
    """A U of convolutions with a skip from every one of its first half to the second."""

    def __init__(self, depth: int = 9) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(2, 2, 3, padding=1) for _ in range(depth))
        self.up = nn.ModuleList(nn.Conv2d(4, 2, 3, padding=1) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.down:
            kept.append(x := layer(x).tanh())
        for layer in self.up:
            x = layer(torch.cat([x, kept.pop()], 1)).tanh()
        return x


def test_a_fold_keeps_skips_on_their_rank() -> None:
    torch.manual_seed(0)
    model, x = Skips().double(), torch.randn(3, 2, 8, 8, dtype=torch.float64)
    kinds: dict[bool | None, dict[str, int]] = {}
    for fold in (False, True, None):
        sampler = fxpipe.compile_sampler(model, 3, stages=3, cfg=1, fold=fold, example={"x": x}, sample={"x": 2})
        kinds[fold] = sampler.traffic().kinds
        assert error(sampler.predict(x), model(x).detach()) <= 1e-10
    hidden = x.nbytes
    assert (kinds[True]["main"], kinds[True]["skip"]) == (4 * hidden, 0)
    assert kinds[False]["main"] + kinds[False]["skip"] >= 7 * hidden
    assert kinds[None] == kinds[True]


class Guided(Skips):
    """Both halves of the batch are the first one, as in DiT's forward_with_cfg."""

    def forward(self, x: Tensor) -> Tensor:
        half = x[: len(x) // 2]
        one, other = super().forward(torch.cat([half, half])).chunk(2)
        return torch.cat([other + 3 * (one - other)] * 2)


def test_samples_that_are_mixed_go_through_the_stages_together() -> None:
    torch.manual_seed(0)
    model, x = Guided().double(), torch.randn(4, 2, 8, 8, dtype=torch.float64)
    sampler = fxpipe.compile_sampler(model, 2, stages=2, cfg=1, example={"x": x}, sample={"x": 2})
    assert torch.equal(sampler.predict(x), model(x))


def test_one_sample_is_equal_to_the_last_bit() -> None:
    """Nothing is regrouped: what is cut is the captured graph."""
    sampler, _ = compiled("SD3Transformer2DModel")
    example = sample_of(sampler, 0)
    with torch.no_grad():
        wanted = prediction_of(sampler.denoiser.module(**example))
    assert torch.equal(prediction_of(sampler.predict(**example)), wanted)


def test_a_dump_and_a_prediction_of_time(tmp_path: Path) -> None:
    sampler, _ = compiled("DiTTransformer2DModel")
    text = (sampler.dump(tmp_path) / "rank_1.py").read_text()
    compile(text, "rank_1.py", "exec")
    assert 'begin(transport, "1F0")' in text
    assert "1 group x 2 stages x 1 patch on 2 ranks" in (tmp_path / "plan.txt").read_text()
    assert sampler.verify().ok
    assert sampler.simulate().makespan_seconds > 0
    assert sampler.grid == Grid(1, 1, 2)


@pytest.mark.parametrize(
    ("world_size", "how", "says"),
    [
        (3, {"stages": 2}, "cfg=1 x stages=2 can't be world_size=3 ranks"),
        (200, {"stages": 200}, r"the denoiser divides into \d+ blocks; use stages="),
    ],
)
def test_refusals(world_size: int, how: dict[str, int], says: str) -> None:
    with pytest.raises(CompileError, match=says):
        laid_out("DiTTransformer2DModel", world_size, **how)


def launched(key: str) -> float:
    given = small(key)
    sampler = fxpipe.compile_sampler(given.model, 3, stages=3, example=given.example)
    found = prediction_of(sampler.predict(**given.example))
    with torch.no_grad():
        wanted = prediction_of(given.model(**given.example))
    sampler.close()
    return error(found, wanted)


def test_over_gloo_it_is_one_devices() -> None:
    assert max(run_processes(3, launched, UNET)) <= 1e-10
