"""Ranks that hold what they train or read, and nothing else: released from a whole model, or read from files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import fxpipe
from fxpipe.run.engine import Engine
from tests.distributed import run_processes
from tests.own_models import SEED, Adapted, Trained, assert_same, batch, script
from tests.test_own_model import LINE, ROWS, WAVE, Layout, on_threads, one_device


def held(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters() if p.untyped_storage().nbytes() >= p.nbytes)


@pytest.mark.parametrize(
    ("world_size", "layouts", "trained"),
    [
        (3, [LINE], "adapters"),
        (2, [LINE, WAVE], "adapters"),  # the second reads other frozen layers on a rank
        (4, [{"schedule": "interleaved", "data_parallel": 2, "stages": 4, "shard": "weights"}], "adapters"),
    ],
)
def test_a_users_script_is_exact(world_size: int, layouts: list[Layout], trained: str) -> None:
    def body(model: nn.Module, engines: Any) -> tuple[Trained, int]:
        sizes = []

        def released(engine: Engine) -> Engine:
            assert engine.release() > 0 or sizes
            sizes.append(held(model))
            return engine

        found = script(model, [lambda one=one: released(one()) for one in engines], ROWS, whole=False)
        return found, sizes[0]

    (first, _), *others = found = on_threads(world_size, layouts, body, trained)
    assert_same(first, one_device(trained, len(layouts)))
    assert all(other.losses == first.losses for other, _ in others)
    everywhere = held(Adapted().layers[0])  # a frozen component of its own
    assert sum(size for _, size in found) == held(Adapted()) + everywhere * (world_size - 1)


def test_what_is_brought_is_let_go_again() -> None:
    before = Adapted("adapters").state_dict()

    def body(model: nn.Module, engines: Any) -> None:
        engine = engines[0]()
        whole, freed = held(model), engine.release()
        engine.step(batch(0, ROWS[0]))
        assert held(model) == whole - freed
        with pytest.raises(fxpipe.RunError, match=r"released here, and are not here yet.*sync_model"):
            model.state_dict()
        engine.sync_model()
        assert held(model) == whole
        torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0.0, atol=0.0)
        engine.step(batch(0, ROWS[0]))
        assert held(model) == whole - freed

    on_threads(2, [WAVE], body, "adapters")


def test_averages_of_what_a_rank_comes_to_hold_later_are_brought() -> None:
    def averages(model: nn.Module, engines: Any) -> list[Tensor]:
        kept, made = [parameter.detach().clone() for parameter in model.parameters()], []
        for number, make in enumerate(engines):
            made.append(make())
            made[0].release()
            made[number].step(batch(number, ROWS[number]))
            for average, parameter in zip(kept, model.parameters(), strict=True):
                average.lerp_(parameter.detach(), 0.5)  # of no numbers, where the rank does not hold them
        made[0].sync_model(kept)
        return kept

    expected = [parameter.detach() for parameter in Adapted().parameters()]
    for found in on_threads(2, [WAVE, LINE], averages, "adapters"):
        torch.testing.assert_close(found, expected, rtol=1e-15, atol=0.0)


def from_files(folder: str) -> dict[str, Any]:
    """One rank of a model that has no memory until its engine is made; and what is said of mistakes."""
    with torch.device("meta"):
        model = Adapted("adapters")
    program = fxpipe.compile(model, 3, example_inputs=batch(0, ROWS[0]), schedule="1f1b", microbatches=2)
    early = torch.optim.AdamW(model.parameters(), lr=0.1)
    said = []
    for weights in (f"{folder}/nothing", {"layers.0": f"{folder}/model.safetensors"}, None):
        with pytest.raises((fxpipe.RunError, fxpipe.CompileError)) as caught:
            program.engine(weights=weights)
        said.append(str(caught.value))
    whole = fxpipe.compile(Adapted(), 3, example_inputs=batch(0, ROWS[0]), schedule="1f1b", microbatches=2)
    with pytest.raises(fxpipe.RunError, match="weights= is for a model on the meta device, and this one has its"):
        whole.engine(weights=folder)
    model.shift = Adapted().shift  # no file has it
    engine = program.engine(seed=SEED, weights=folder)
    sizes = held(model), held(Adapted())
    with pytest.raises(fxpipe.RunError, match="make it after the engine"):
        early.step()
    trained = script(model, [lambda: engine], ROWS, whole=False)
    return {"trained": trained, "sizes": sizes, "said": said}


def test_ranks_read_their_own_weights_from_files(tmp_path: Path) -> None:
    save_file(Adapted().state_dict(), tmp_path / "model.safetensors")
    first, *others = found = run_processes(3, from_files, str(tmp_path))
    assert_same(first["trained"], one_device("adapters", 1))
    assert all(other["trained"].losses == first["trained"].losses for other in others)
    assert all(one["sizes"][0] < 0.7 * one["sizes"][1] for one in found)
    for one in found:
        nothing, other, none = one["said"]
        assert "nothing cannot be read" in nothing
        assert "2 buffers are on the meta device and not among the weights (scale, ...)" in other
        assert "program.engine(weights=...)" in none
