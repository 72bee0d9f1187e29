"""fxpipe's plan is never predicted slower than DDP, ZeRO-3, GPipe or 1F1B on the same machines, in as much memory."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from cost_models.roofline import Roofline
from fxpipe.cluster import Cluster, Level
from fxpipe.cluster.links import Link
from fxpipe.compiler import requested
from fxpipe.plan.plan import microbatch_sizes
from fxpipe.simulate import simulate
from passes.case import Case
from passes.comparison import baselines
from passes.comparison.baselines import LineBaseline
from passes.comparison.data_parallel import accumulated, replicated
from passes.placement import buckets
from passes.step_ops import step_ops
from passes.tuner.plans import tuned
from passes.tuner.request import Request
from tests.frozen_steps import FrozenStep
from tests.models import ZOO
from tests.test_cascade import Several
from tests.test_self_conditioned import Step as SelfConditioned
from tests.unet import TinyUNet

MODELS: dict[str, Callable[[], nn.Module]] = {
    "frozen": FrozenStep,
    "unet": lambda: TinyUNet("no_grad"),
    "cascade": lambda: Several((5, 4)),
    "dit": ZOO["dit"],
    "two passes": SelfConditioned,
}
DEVICES = {
    "busy": Roofline(peak_flops=1e9, bandwidth=1e9, matrix_efficiency=1.0, memory_efficiency=1.0, launch_seconds=0.0),
    "launching": Roofline(
        peak_flops=1e12, bandwidth=1e12, matrix_efficiency=1.0, memory_efficiency=1.0, launch_seconds=1e-5
    ),
}


def nodes(inside: float, across: float | None = None, shared: bool = False) -> Cluster:
    """Four ranks on one link, or two nodes of two; bytes a second."""
    levels = [Level(2 if across else 4, Link("inside", inside, 1e-6, duplex=not shared, shared=shared))]
    return Cluster("A100-80GB", (*levels, *([Level(2, Link("across", across, 1e-5))] if across else [])))


CLUSTERS = {
    "NVSwitch": nodes(3e8),
    "PCIe": nodes(1.6e7, shared=True),
    "2 nodes, 10 Gbit/s": nodes(3e8, 1.25e6),
    "2 nodes, 1 Gbit/s": nodes(3e8, 1.25e5),
    "copying": Cluster("A100-80GB", (Level(4, Link("copies", 8e6, 1e-5, taken_share=0.8, overhead_seconds=1e-5)),)),
}
"""Links a thousandth as fast as their names say, as are the devices."""


@cache
def costed(model: str, device: str) -> Case:
    asked = requested(MODELS[model](), 4, batch_size=16, cost_model=DEVICES[device])
    return asked.case(asked.analysed())[0]


def at_once_bytes(case: Case) -> int:
    """What data parallel training takes with one micro-batch a rank."""
    staged, sizes = replicated(case, False), microbatch_sizes(case.batch_size, case.world_size)
    ops = step_ops(case, staged, accumulated(case, staged, len(sizes)), sizes)
    return simulate(ops, case.cluster).peak_bytes


@settings(max_examples=4)
@given(
    st.sampled_from(sorted(MODELS)),
    st.sampled_from(sorted(DEVICES)),
    st.sampled_from(sorted(CLUSTERS)),
    st.sampled_from([4, 7, 8, 16, 32]),
    st.sampled_from([None, None, 0.9, 0.7, 0.5]),
    st.sampled_from([1, 4, 12]),
)
@example("cascade", "launching", "2 nodes, 1 Gbit/s", 16, 0.9, 1)  # what adds losses up sends a number, not samples
@example("cascade", "busy", "NVSwitch", 32, None, 12)  # a rank alone takes backbones in the order of their sums
@example("two passes", "busy", "NVSwitch", 16, None, 4)  # both read the weights that one has gradients of
def test_never_slower(
    model: str, device: str, cluster: str, batch_size: int, limit: float | None, num_buckets: int
) -> None:
    case = replace(costed(model, device), cluster=CLUSTERS[cluster], batch_size=batch_size)
    gradients = sum(case.costs.trained_bytes)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(buckets, "BUCKET_BYTES", gradients // num_buckets)
        if limit is not None:
            case = replace(case, limit_bytes=int(limit * at_once_bytes(case)))
        found = [row for row in baselines(case) if row.fits]
        if not found:
            return
        best = min(found, key=lambda row: row.seconds)
        request = Request("auto", 4, batch_size, budget_seconds=0.0, memory_limit_bytes=case.limit_bytes)
        ours = tuned(case, request).best
    assert ours.seconds is not None
    assert ours.seconds <= best.seconds * (1 + 1e-9), f"{best.name}, {best.setting}: {best.seconds} s, {ours.outcome}"


HALF = Cluster("A100-80GB", (Level(6, Link("half", 6941437.0, 0.0, duplex=False)),))


@pytest.mark.parametrize(
    ("model", "cluster", "batch_size", "limit"),
    [
        ("cascade", CLUSTERS["PCIe"], 8, None),  # backbones do not wait for each other
        ("cascade", HALF, 64, 0.6833),  # stages cut anew
        ("frozen", CLUSTERS["copying"], 8, None),  # frozen work where it is read
    ],
)
def test_no_step_is_shorter_than_what_it_was_pruned_by(
    model: str, cluster: Cluster, batch_size: int, limit: float | None
) -> None:
    case = replace(costed(model, "launching"), cluster=cluster, batch_size=batch_size, world_size=cluster.num_ranks)
    if limit is not None:
        case = replace(case, limit_bytes=int(limit * at_once_bytes(case)))
    request = Request("auto", case.world_size, batch_size, budget_seconds=0.0, memory_limit_bytes=case.limit_bytes)
    for trial in (trial for trial in tuned(case, request).ranked if trial.done):
        assert trial.simulated is not None
        assert trial.bound_seconds <= trial.simulated.seconds * (1 + 1e-9), trial.outcome


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=list(CLUSTERS))
@pytest.mark.parametrize("model", MODELS)
def test_no_line_is_shorter_than_its_bound(model: str, cluster: Cluster) -> None:
    case = replace(costed(model, "launching"), cluster=cluster, batch_size=70, limit_bytes=None)
    for stages, name in ((2, "gpipe"), (4, "gpipe"), (4, "1f1b")):
        line = LineBaseline(case, name, stages, 4 // stages, recompute=name == "1f1b")
        for attempt in line.attempts([1, 5, 8, 17, 32]):
            seconds = simulate(attempt.write(), cluster).seconds
            assert attempt.bound_seconds <= seconds * (1 + 1e-9), attempt.setting
