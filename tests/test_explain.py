"""Why a plan is what it is: every number is the simulator's, of the step itself or of one in which a thing differs."""

import pytest
import torch

import fxpipe
from fxpipe.cluster import Cluster
from fxpipe.plan.explanation import WhatIf
from tests.test_cli import invoke
from tests.toy_model import ToyStep, frozen

SLOW = "4xV100-PCIe"


@pytest.fixture(scope="module")
def program() -> fxpipe.Program:
    return fxpipe.compile(frozen(), 4, batch_size=16, cluster=SLOW, budget=0.0, fill="none", memory_limit="1GiB")


def found(program: fxpipe.Program) -> dict[str, WhatIf]:
    return {what.what: what for what in program.explain().what_ifs}


def test_what_would_be_otherwise_is_simulated(program: fxpipe.Program) -> None:
    explained, by_name = program.explain(), found(program)
    assert explained.seconds == program.simulate().makespan_seconds
    busy = program.simulate().busy_seconds
    assert explained.mean_busy == pytest.approx(sum(busy) / 4, rel=1e-6)
    assert explained.most_busy == pytest.approx(max(busy), rel=1e-6)
    free = Cluster.parse(
        'device = "V100"\n[[level]]\nsize = 4\nbandwidth_bytes_per_second = 1e30\nlatency_seconds = 0.0\n'
    )
    assert by_name["network infinitely fast"].seconds == program.simulate(cluster=free).makespan_seconds
    assert by_name["frozen work free"].seconds <= explained.seconds  # type: ignore[operator]
    assert by_name["twice the memory"].seconds is not None
    assert list(explained.what_ifs) == sorted(explained.what_ifs, key=lambda what: (what.seconds is None, what.seconds))


def test_one_more_micro_batch_is_planned_as_it_would_be(program: fxpipe.Program) -> None:
    plan = program.plan
    again = fxpipe.compile(
        frozen(), 4, batch_size=16, cluster=SLOW, budget=0.0, fill="none", memory_limit="1GiB",
        microbatches=plan.num_microbatches + 1, stages=plan.staged.num_stages, data_parallel=plan.staged.replicas,
    ).plan  # fmt: skip
    assert again.best is not None
    assert found(program)["one more micro-batch"].seconds == again.best.seconds


def test_rivals_are_those_that_lost(program: fxpipe.Program) -> None:
    explained = program.explain()
    assert explained.num_considered == len(program.plan.outcomes)
    assert 1 <= len(explained.rivals) <= 4
    assert all(rival.why for rival in explained.rivals)
    assert len(str(explained).splitlines()) <= 24


def test_a_balanced_step_on_one_rank_can_gain_nothing() -> None:
    with torch.device("meta"):
        alone = fxpipe.compile(ToyStep(), 1, batch_size=4)
    by_name, seconds = found(alone), alone.explain().seconds
    assert by_name["network infinitely fast"].why == "nothing is sent"
    assert by_name["perfect balance"].seconds == pytest.approx(seconds, rel=1e-9)
    assert by_name["network infinitely fast"].seconds == seconds


def test_more_than_the_batch_has_is_no_plan() -> None:
    by_name = found(fxpipe.compile(ToyStep(), 2, batch_size=2, microbatches=2, schedule="1f1b"))
    assert by_name["one more micro-batch"].seconds is None
    assert by_name["one more micro-batch"].why


def test_the_command(program: fxpipe.Program) -> None:
    code, out, _ = invoke("explain", "tests/toy_model.py:frozen", "--world-size", "2", "--budget", "0")
    assert code == 0
    assert "what if" in out
    assert "network infinitely fast" in out
