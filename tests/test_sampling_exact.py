"""Denoisers over patches of rows: every rank's prediction is one device's, in float64, or the model is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import CompileError
from fxpipe.models.backbones import prediction_of
from fxpipe.plan.program_check import check_programs
from fxpipe.run.sampling import SampleRun
from tests.conftest import GOLDEN
from tests.denoisers import KEYS, Case, small
from tests.distributed import run_processes
from tests.row_programs import RowPrograms, row_programs

NOTES = GOLDEN / "sampling" / "notes.txt"
# Round to float32 on the way, whatever the type of their weights: sums over rows then differ in its last bit.
FLOAT32_INSIDE = {"UVit2DModel", "SanaTransformer2DModel", "SanaVideoTransformer3DModel"}
# Does not run in float64: its time embedding is float32.
FLOAT32_ONLY = {"Kandinsky5Transformer3DModel"}
# Their variants' conditions touch no rows.
CONDITIONS = {
    "UNet2DModel/classes", "UNet2DModel/identity", "UNet2DConditionModel/classes", "UNet2DConditionModel/timestep",
    "UNet2DConditionModel/projection", "UNet2DConditionModel/image", "UNet2DConditionModel/text_image",
    "PixArtTransformer2DModel/conditions", "FluxTransformer2DModel/guidance",
}  # fmt: skip
REFUSED = {"PriorTransformer": "its hidden_states \\[2, 16\\] has no rows"}


def one_device(given: Case) -> Tensor:
    with torch.no_grad():
        return prediction_of(given.model(**given.example))


def relative_error(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    assert wanted.isfinite().all()
    assert wanted.std() > 0
    return float((found - wanted).abs().max() / wanted.abs().max())


def uneven(count: int) -> tuple[int, ...]:
    """Bounds of three patches of different sizes, of two where there are few units."""
    return (0, count // 2, count - max(1, count // 5), count) if count >= 4 else (0, 1, count)


def notes_of(programs: RowPrograms) -> list[str]:
    kinds = {kind: size for kind, size in programs.traffic().kinds.items() if size}
    units = programs.rows.units
    head = f"{units.count} units of {units.each} rows; bytes {', '.join(f'{k} {n}' for k, n in kinds.items())}"
    return [head, *(f"note: {note}" for note in programs.rows.notes)]


@pytest.fixture
def said(request: pytest.FixtureRequest) -> Callable[[str, list[str]], None]:
    """Compares what is said of one model with its lines of a golden file, or writes them under --update-golden."""

    def check(key: str, lines: list[str]) -> None:
        sections: dict[str, list[str]] = {}
        for line in NOTES.read_text().splitlines() if NOTES.exists() else ():
            if line.startswith("  "):
                sections[next(reversed(sections))].append(line.strip())
            else:
                sections[line] = []
        if request.config.getoption("--update-golden"):
            sections[key] = lines
            text = [
                f"{name}\n" + "".join(f"  {line}\n" for line in sections[name])
                for name in KEYS
                if name in sections and name not in CONDITIONS
            ]
            NOTES.parent.mkdir(exist_ok=True)
            NOTES.write_text("".join(text))
        assert lines == sections.get(key), f"differs from {NOTES}; pytest --update-golden accepts the new lines"

    return check


@pytest.mark.parametrize("key", [key for key in KEYS if key not in CONDITIONS])
def test_patches_predict_what_one_device_predicts(key: str, said: Callable[[str, list[str]], None]) -> None:
    given = small(key, torch.float32 if key in FLOAT32_ONLY else torch.float64)
    if key in REFUSED:
        with pytest.raises(CompileError, match=REFUSED[key]):
            row_programs(given.model, given.example, 2, sample=given.sample)
        said(key, ["refused: it has no rows"])
        return
    wanted, bound = one_device(given), 1e-5 if key in FLOAT32_INSIDE | FLOAT32_ONLY else 1e-10
    programs = row_programs(given.model, given.example, uneven, sample=given.sample)
    said(key, notes_of(programs))
    positions = {message.edge: position for position, message in enumerate(programs.messages)}
    assert not check_programs(programs.programs, programs.messages, positions)
    found = programs.predict(**given.example)
    assert all(torch.equal(other, found[0]) for other in found[1:])
    assert relative_error(found[0], wanted) <= bound, programs.bounds


def rank_main(key: str, num_patches: str) -> tuple[float, int]:
    """One rank's error, and the bytes it has sent."""
    from fxpipe.run.transport.distributed import DistributedTransport

    given = small(key)
    programs = row_programs(given.model, given.example, int(num_patches), sample=given.sample)
    transport = DistributedTransport()
    transport.open_channels(programs.channels, [])
    run, mine = SampleRun(transport), programs.bound()[transport.rank]
    found = run.predict(mine, programs.bind(**given.example))
    again = run.predict(mine, programs.bind(**given.example))
    assert torch.equal(found, again)
    transport.close()
    sent = sum(transport.sent_bytes().values())
    planned = 2 * sum(m.num_bytes for m in programs.messages if m.src == transport.rank)
    assert sent == planned
    return relative_error(found, one_device(given)), sent


def test_processes_predict_what_one_device_predicts() -> None:
    for error, sent in run_processes(3, rank_main, "UNet2DConditionModel/timestep", "3"):
        assert error <= 1e-10
        assert sent > 0


class Added(nn.Module):
    """Rows beside their sums, by channel."""

    def forward(self, sample: Tensor) -> Tensor:
        return sample + sample.sum((2, 3), keepdim=True) + sample.mean(2, keepdim=True)


@pytest.mark.parametrize("how", [{}, {"mode": "displaced", "warmup": 1}], ids=["exact", "displaced"])
def test_sums_of_half_precision_have_room_for_their_parts(how: Any) -> None:
    """Those of the upper rows alone are no number of float16."""
    sample = torch.full((1, 2, 8, 16), 3000.0, dtype=torch.float16)
    sample[:, :, 4:] *= -1
    sample[:, :, 0, 0] = 1.0
    given: dict[str, Any] = {"example": {"sample": sample}, "sample": {"sample": 2}, "cache": False}
    sampler = fxpipe.compile_sampler(Added(), 2, patches=2, **how, **given)
    wanted = Added()(sample)
    assert wanted.isfinite().all()
    with sampler.call():
        for _ in range(2):
            assert torch.equal(sampler.predict(sample=sample), wanted)


class Scaled(nn.Module):
    """A video's frames beside a condition's, both scaled, under a window."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 2, 5, padding=2).double()

    def forward(self, sample: Tensor, condition: Tensor, sigma: Tensor) -> Tensor:
        given = torch.cat([sample * (sigma**2 + 1).rsqrt(), condition * 2 - 1], 1)
        frames: Tensor = self.conv(given.transpose(1, 2).flatten(0, 1))
        made: Tensor = frames.unflatten(0, (len(sample), -1)).transpose(1, 2)
        return made


@pytest.mark.parametrize("how", [{"patches": 3}, {"patches": 3, "mode": "displaced", "warmup": 1}])
def test_a_window_on_what_is_made_of_inputs_asks_nobody(how: Any) -> None:
    torch.manual_seed(0)
    model, given = Scaled(), {name: torch.randn(2, 2, 3, 9, 5).double() for name in ("sample", "condition")}
    given["sigma"] = torch.full((), 2.0).double()
    sampler = fxpipe.compile_sampler(model, 3, example=given, cfg=1, cache=False, **how)
    assert {message.kind for message in sampler.step.messages} == {"prediction"}
    with torch.no_grad(), sampler.call():
        for step in range(3):
            given |= {"sample": given["sample"] + step, "sigma": given["sigma"] / 2}
            assert relative_error(sampler.predict(**given), model(**given)) <= 1e-12
