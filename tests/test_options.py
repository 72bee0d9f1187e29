"""Wrong options of `fxpipe.compile` and what the user is told."""

import pydoc
import textwrap
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.costs.model import CostModel, NodeSeconds
from fxpipe.costs.table import CostTable
from fxpipe.options import asked_microbatches, given_bytes
from fxpipe.plan.plan import microbatch_sizes
from tests.models import PEER_CASES
from tests.unet import TinyUNet


def _step() -> nn.Module:
    return PEER_CASES["crossed_skips"](torch.float64)


class Silent(nn.Linear):
    """A module without example inputs."""


class Free(CostModel):
    def seconds(self, table: CostTable, num_samples: int) -> NodeSeconds:
        return NodeSeconds(*np.zeros((3, len(table))))


class OneSize(Free):
    def seconds(self, table: CostTable) -> NodeSeconds:  # type: ignore[override]
        return super().seconds(table, 1)


class Seconds:
    memory_bytes = None

    def seconds(self, table: CostTable, num_samples: int) -> NodeSeconds:
        return Free().seconds(table, num_samples)


class Small(Free):
    memory_bytes = "80 GB"  # type: ignore[assignment]


def test_the_example_of_a_cost_model_compiles() -> None:
    text = str(CostModel.__doc__)
    example = textwrap.dedent(text[text.index("        class ") :])
    names: dict[str, Any] = {"fxpipe": fxpipe, "model": TinyUNet()}
    exec(example.replace("fxpipe.compile", "program = fxpipe.compile"), names)
    table, found = names["program"].costed.costs, names["MemoryBound"]().seconds(names["program"].costed.costs, 3)
    moved = table.counts(3).bytes_read + table.counts(3).bytes_written
    assert found.forward.tolist() == (moved / 1e12).tolist()
    assert names["program"].world_size == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 0}, r"world_size must be a positive integer, got 0"),
        ({"world_size": 2.0}, r"world_size must be a positive integer, got 2\.0"),
        ({"world_size": True}, r"world_size must be a positive integer, got True"),
        ({"batch_size": -4}, r"batch_size must be a positive integer, got -4"),
        ({"microbatches": 0}, r"microbatches must be a positive integer, got 0"),
        ({"microbatches": 9}, r"microbatches=9 exceeds the batch of 4"),
        ({"stages": 3, "schedule": "1f1b"}, r"stages=3 is no multiple of the 2 ranks of a pipeline"),
        ({"data_parallel": 3, "schedule": "1f1b"}, r"data_parallel=3 does not divide world_size=2"),
        ({"data_parallel": 2, "microbatches": 1}, r"no way to use world_size=2 with data_parallel=2"),
        ({"memory_limit": "lots"}, r"memory_limit='lots' is no number of bytes"),
        ({"collocation": "yes"}, r"collocation='yes'; give 'hard' or 'soft'"),
        (
            {"stages": 6, "schedule": "wave"},
            r"schedule 'wave' goes there and back: its stages are a multiple of 4, not 6",
        ),
        ({"schedule": "fastest"}, r"unknown schedule 'fastest'; choose one of auto, gpipe, 1f1b"),
        ({"schedule": 7}, r"schedule must be a name, a schedule's text or a Schedule, got int"),
        ({"schedule": "rank 0: 0F0 0Q0"}, r"'0Q0' on rank 0 is no action"),
        ({"schedule": "rank 0: 0F0 0B0"}, r"the schedule has 1 ranks, world_size is 2"),
        (
            {"schedule": "rank 0: 0F0 0B0\nrank 1: 1F0 1B0", "microbatches": 2},
            r"microbatches=2, but the schedule has 1",
        ),
        ({"device": "tpu9"}, r"device 'tpu9' is no torch device"),
        ({"device": "meta"}, r"device 'meta' is not supported; use 'cpu' or 'cuda'"),
        ({"cost_model": "abacus"}, r"abacus"),
        ({"cost_model": 7}, r"cost_model is 7, a int without seconds, moving_seconds, .*; give a device's name"),
        (
            {"cost_model": Free},
            r"cost_model is the class Free; give .* an object of a class that inherits from fxpipe.C",
        ),
        ({"cost_model": Seconds()}, r"a Seconds without moving_seconds, drawing_seconds; give .* fxpipe.CostModel"),
        ({"cost_model": OneSize()}, r"a OneSize without seconds; .* has a method seconds\(table, num_samples\)"),
        ({"cost_model": Small()}, r"memory_bytes of cost_model Small is '80 GB'; give a positive integer, or None"),
        ({"observe": "print"}, r"observe is 'print', a str; give a function of \(step's name, its result\)"),
        ({"observe": lambda name: None}, r"observe is <function .*; give a function of"),
        ({"recompute": "yes"}, r"recompute='yes'; give True or False, 'auto'"),
        (
            {"shard": "weights", "schedule": "gpipe", "data_parallel": 2, "microbatches": 3, "batch_size": 6},
            r"shard='weights' with microbatches=3, data_parallel=2: replicas exchange .* multiple of 2, or shard='opt",
        ),
        ({"shard": True}, r"shard=True; give one of 'none', 'optimizer', 'gradients', 'weights', 'all'"),
        ({"cache": 7}, r"cache=7; give True, False or a folder"),
        ({"budget": "2s"}, r"budget='2s' is no number of seconds"),
        ({"budget": float("nan")}, r"budget=nan is no number of seconds"),
        ({"example_inputs": 7}, r"example_inputs is 7, a int; give one batch"),
        ({"example_inputs": (t for t in ())}, r"example_inputs is <generator.*; give one batch"),
        ({"schedule": " "}, r"the schedule is empty; give a name"),
        (
            {"schedule": "0F0 0B0"},
            r"actions \(0F0\) but no ranks; begin each line with its rank, as in 'rank 0: 0F0 0B0'",
        ),
        ({"schedule": "Rank 0: 0F0"}, r"actions \(0F0\) but no ranks"),
        ({"world_size": None}, r"world_size must be a positive integer, got None"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_captured(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fxpipe.analysis.cached_capture", lambda *args: pytest.fail("captured"))
    arguments: dict[str, Any] = {"world_size": 2, "batch_size": 4, **options}
    with pytest.raises(ValueError, match=message):
        fxpipe.compile(_step(), arguments.pop("world_size"), **arguments)


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(
        fxpipe.CompileError, match=r"no plan fits into memory_limit=10 B per rank: the least tried needs"
    ):
        fxpipe.compile(_step(), 2, batch_size=4, memory_limit=10)


def test_unknown_options_are_errors() -> None:
    with pytest.raises(TypeError, match="micro_batches"):
        fxpipe.compile(_step(), 2, micro_batches=2)  # type: ignore[call-arg]


def test_a_model_without_inputs_is_told_how_to_give_them() -> None:
    with pytest.raises(fxpipe.CompileError, match=r"Silent has no method example_inputs.*pass example_inputs="):
        fxpipe.compile(Silent(2, 2), 2)


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(fxpipe.CompileError, match=r"model must be an nn.Module.*got str"):
        fxpipe.compile("unet", 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("batch_size", "microbatches", "world_size", "sizes"),
    [
        (8, 4, 2, (2, 2, 2, 2)),
        (5, 3, 2, (2, 2, 1)),
        (7, 7, 2, (1,) * 7),
        (16, None, 4, (2,) * 8),
        (12, None, 4, (2,) * 6),
        (7, None, 2, (2, 2, 2, 1)),
        (1, None, 8, (1,)),
    ],
)
def test_microbatch_sizes(batch_size: int, microbatches: int | None, world_size: int, sizes: tuple[int, ...]) -> None:
    count = asked_microbatches(microbatches, batch_size, world_size, "1f1b")
    assert count is not None
    assert microbatch_sizes(batch_size, count) == sizes
    assert sum(sizes) == batch_size


@pytest.mark.parametrize(
    ("batch_size", "multiple", "count"), [(3, 2, 2), (8, 2, 4), (5, 2, 4), (9, 3, 3), (7, 3, 3), (2, 3, 2)]
)
def test_replicas_that_share_weights_have_as_many_microbatches(batch_size: int, multiple: int, count: int) -> None:
    assert asked_microbatches(None, batch_size, 2, "1f1b", multiple) == count


@pytest.mark.parametrize(
    ("text", "num_bytes"), [(None, None), (1000, 1000), ("40GiB", 40 * 2**30), ("1.5 kB", None), ("80 GB", 80 * 10**9)]
)
def test_memory_limits_have_units(text: str | int | None, num_bytes: int | None) -> None:
    if text == "1.5 kB":
        with pytest.raises(fxpipe.CompileError, match=r"memory_limit='1.5 kB' is no number of bytes"):
            given_bytes(text)
    else:
        assert given_bytes(text) == num_bytes


class Detached(nn.Module):
    """Nothing to train: the loss is cut off from the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).detach().square().mean()


def test_a_loss_without_gradient_is_refused() -> None:
    with pytest.raises(fxpipe.CompileError, match="nothing to train"):
        fxpipe.compile(Detached(), 2, example_inputs=(torch.randn(4, 4),))


@pytest.mark.parametrize(
    ("model", "x", "says"),
    [
        (nn.Flatten(), torch.ones(0, 3), r"the example has no samples: \{'input': \[0, 3\]\}; give at least one"),
        (nn.Sequential(torch.jit.trace(nn.Tanh(), torch.ones(2, 3))), torch.ones(2, 3), "0 is a script of torch.jit"),
    ],
    ids=["no samples", "script"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_examples_without_samples_and_scripts_are_refused(model: nn.Module, x: torch.Tensor, says: str) -> None:
    with pytest.raises(fxpipe.CompileError, match=says):
        fxpipe.compile(model, 2, example_inputs=(x,), schedule="1f1b")
    with pytest.raises(fxpipe.CompileError, match=says):
        fxpipe.compile_sampler(model, 2, example={"input": x}, sample={"input": 1}, patches=2)


def test_help_and_completion_know_what_is_loaded_on_first_use() -> None:
    text = pydoc.plain(pydoc.render_doc(fxpipe))
    assert all(said in text for said in ("class Program(", "class Sampler(", "\n    compile(", fxpipe.__version__))
    assert {*fxpipe.__all__} <= {*dir(fxpipe)}


@pytest.mark.parametrize(
    ("options", "pipelines"),
    [
        ({"schedule": "1f1b", "stages": 2, "shard": "all"}, 2),  # replicas in uneven numbers share nothing
        ({"schedule": "wave", "stages": 4}, 2),
        ({"schedule": "zero-bubble", "stages": 1}, 4),
        ({"schedule": "1f1b", "stages": 4, "shard": "weights"}, 1),
    ],
)
def test_fewer_stages_than_ranks_have_are_those_of_several_pipelines(options: Any, pipelines: int) -> None:
    step = _step()
    program = fxpipe.compile(step, 4, batch_size=8, **options)
    assert len(program.plan.staged.pipelines) == pipelines
    assert program.verify(**step.example_inputs(8)).ok  # type: ignore[operator]
