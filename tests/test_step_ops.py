"""Planned ops take what rank programs take: seconds, messages and bytes, with nothing traced but single operations."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import fxpipe
import passes.step_ops
from cost_models.devices import device
from fxpipe.analysis import CostedStep, StepCut, costed_step, example_of
from fxpipe.back_end import BackEnd
from fxpipe.capture.cache import cache_folder
from fxpipe.cluster import Cluster, Level
from fxpipe.cluster.links import Link
from fxpipe.collector import held_collector
from fxpipe.plan.plan import Plan, microbatch_sizes
from fxpipe.plan.schedule import Schedule
from fxpipe.plan.staged import PlannedCut, Run, Staged, whole_stages
from fxpipe.simulate import simulate
from fxpipe.simulate.op_lists import Op, StepOps
from passes.case import Case
from passes.fill.ahead import filled
from passes.fill.per_device import per_device
from passes.placement.place import place
from passes.placement.shape import shape
from passes.schedules.policies import POLICIES
from passes.step_ops import step_ops
from passes.step_ops.writer import OpWriter
from passes.tuner.orders import Orders
from passes.tuner.simulate import simulate as simulate_plan
from tests.models import ZOO
from tests.program_ops import back_of, program_step_ops
from tests.strategies import cuts
from tests.test_block_costs import Tied
from tests.test_outputs import Returning
from tests.test_self_conditioned import Step as SelfConditioned
from tests.unet import TinyUNet

BUS = Cluster("A100-80GB", (Level(8, Link("bus", 2e9, 2e-6, duplex=False, shared=True)),))
CLUSTERS = (Cluster.parse("8xA100-80GB"), Cluster.parse("4x2xA100-80GB+Ethernet-10"), BUS, Cluster.parse("8xCPU"))
"""The last one keeps what is sent to the end of the step."""

BATCH_SIZE, NUM_BLOCKS = 8, 12
FEW_BYTES = 64
"""A loss and its sums, 4 or 8 bytes each, are planned a moment shorter than programs hold them: of a toy's step of
10 KiB that can be more than the share that is allowed."""
BYTES, SECONDS = 0.02, 0.01
"""By what plans may be wrong."""
FUZZED = 0.03
"""The same for bytes of toys cut anywhere: of 100 KiB, where the order of a backward's last operations shows."""


@dataclass(frozen=True)
class Layout:
    """How a step is laid out; `recompute` says what backwards compute again: whole stages, most blocks or runs."""

    schedule: str
    world_size: int
    stages: int
    microbatches: int
    replicas: int = 1
    recompute: str | tuple[Run, ...] = ()
    sharded: bool = True

    def place(self, case: Case) -> Staged:
        """Its stages on ranks."""
        wanted = shape(self.schedule, self.world_size, self.stages, self.replicas)
        times = case.costs.at(microbatch_sizes(case.batch_size, self.microbatches)[0])
        staged = place(case, times, wanted, self.microbatches)
        runs = {"stages": whole_stages(staged.boundaries), "blocks": tuple((b, b + 1) for b in case.blocks if b % 3)}
        recompute = runs[self.recompute] if isinstance(self.recompute, str) else self.recompute
        sharded = self.sharded and self.replicas > 1
        return replace(staged, schedule=self.schedule, recompute=recompute, sharded=sharded)


@dataclass(frozen=True)
class Gathered(Layout):
    """With weights shared out over replicas."""

    def place(self, case: Case) -> Staged:
        return super().place(case).sharing("weights")


@dataclass(frozen=True)
class Scattered(Layout):
    """With gradients of every micro-batch shared out over replicas, and weights."""

    def place(self, case: Case) -> Staged:
        return super().place(case).sharing("all")


@dataclass(frozen=True)
class Summed(Layout):
    """With gradients of every micro-batch shared out, weights on all replicas."""

    def place(self, case: Case) -> Staged:
        return super().place(case).sharing("gradients")


@cache
def costed(name: str) -> CostedStep:
    torch.manual_seed(0)
    own = {"unet": lambda: TinyUNet("no_grad"), "tied": Tied, "returning": Returning}
    model = own.get(name, ZOO.get(name))()  # type: ignore[misc]
    example, cut = example_of(model, None, BATCH_SIZE), StepCut(NUM_BLOCKS, None, 4)
    return costed_step(example, device("A100-80GB"), cut, cache=cache_folder(True))


def plan_of(name: str, case: Case, staged: Staged, microbatches: int) -> Plan:
    """With the order that the placement is named after, and where something is frozen its steady form."""
    sizes = microbatch_sizes(case.batch_size, microbatches)
    steady = None
    if case.frozen.names and case.divisible:
        alone = simulate_plan(case, staged, Orders(case, staged, microbatches, ahead=True).named(), sizes)
        steady = filled(alone.training, case.frozen, staged, sizes, per_device)
    order, cut = Orders(case, staged, microbatches, ahead=False).named(), PlannedCut(NUM_BLOCKS, sizes[0])
    labels = ("",) * staged.num_stages
    return Plan(
        costed(name).fingerprint, "", "", case.batch_size, microbatches, cut, staged, labels, case.frozen.names, order,
        steady,
    )  # fmt: skip


def sent(ops: Sequence[Op]) -> list[tuple[int, int, int]]:
    """(source, target, bytes) of a rank's sends, in order."""
    messages = [op.message for op in ops if op.kind == "send" and op.message is not None]
    return [(message.src, message.dst, message.num_bytes) for message in messages]


def assert_equal(plan: StepOps, real: StepOps, by: float = BYTES) -> None:
    """Messages and what is held all step long, to the byte; memory and time nearly."""
    for mine, theirs in zip(plan.ranks, real.ranks, strict=True):
        assert sent(mine) == sent(theirs)
    assert plan.wire_bytes == real.wire_bytes
    assert list(map(dict, plan.held)) == list(map(dict, real.held))
    for cluster in CLUSTERS:
        found, expected = simulate(plan, cluster), simulate(real, cluster)
        assert found.rank_bytes == pytest.approx(expected.rank_bytes, rel=by, abs=FEW_BYTES)
        assert found.seconds == pytest.approx(expected.seconds, rel=SECONDS)
        assert found.idle_seconds == pytest.approx(expected.idle_seconds, rel=0.02, abs=SECONDS * expected.seconds)


def check(name: str, layout: Layout, staged: Staged | None = None, by: float = BYTES) -> None:
    """Of every form of the step, what is planned against the programs."""
    step = costed(name)
    case = step.on(CLUSTERS[0], layout.world_size)
    plan = plan_of(name, case, staged or layout.place(case), layout.microbatches)
    back = BackEnd(step, plan, torch.device("cpu"), None)
    orders: dict[str, Schedule | None] = {"step": plan.step, "steady": plan.steady}
    for form, order in orders.items():
        if order is not None:
            programs = back.lower(form, None)  # type: ignore[arg-type]
            real = program_step_ops(programs, step, back, case.cluster)
            assert_equal(step_ops(case, plan.staged, order, plan.microbatch_sizes), real, by)


CASES: list[tuple[str, Layout]] = [
    *(("unet", Layout(name, 2, 2 * policy.stages_per_rank[0], 4)) for name, policy in POLICIES.items()),
    ("unet", Layout("gpipe", 4, 2, 4, 2)),
    ("unet", Layout("wave", 4, 4, 8, 2)),
    ("unet", Layout("wave", 4, 4, 8, 2, sharded=False)),
    ("unet", Layout("wave", 8, 4, 8, 4)),
    ("unet", Layout("zero-bubble", 3, 3, 3, 1, "stages")),
    ("unet", Layout("1f1b", 1, 1, 2)),
    ("tied", Layout("1f1b", 3, 3, 5)),
    ("tied", Layout("1f1b", 8, 2, 4, 4)),
    ("returning", Layout("wave", 2, 4, 4)),
    ("unet", Gathered("gpipe", 2, 1, 4, 2)),
    ("unet", Gathered("interleaved", 3, 6, 6, 3, "blocks")),
    ("unet", Gathered("wave", 4, 4, 8, 2)),
    ("unet", Gathered("zero-bubble", 4, 2, 4, 2)),
    ("tied", Gathered("interleaved", 2, 4, 4, 2)),
    ("lora", Gathered("interleaved", 2, 4, 2, 2)),
    ("unet", Scattered("gpipe", 2, 1, 4, 2)),
    ("unet", Scattered("interleaved", 3, 6, 6, 3, "blocks")),
    ("unet", Scattered("wave", 4, 4, 8, 2)),
    ("unet", Scattered("zero-bubble", 4, 2, 8, 2)),
    ("tied", Scattered("interleaved", 2, 4, 6, 2)),
    ("tied", Summed("1f1b", 8, 2, 8, 4)),
    ("lora", Scattered("interleaved", 2, 4, 4, 2)),
    ("unet", Summed("wave", 4, 4, 8, 2)),
    ("sd", Layout("zb-v", 2, 4, 3)),
    ("unet", Layout("zb-v", 2, 4, 4, 1, "blocks")),
    ("unet2d", Layout("zb-v", 2, 4, 4, 1, "blocks")),
    ("uvit", Layout("1f1b", 2, 2, 5, 1, "stages")),
    ("lora", Layout("wave", 4, 4, 4, 2)),
    ("controlnet", Layout("zero-bubble", 2, 2, 4)),
    ("sd3", Layout("zero-bubble", 3, 3, 3)),
    ("flux", Layout("zb-v", 2, 4, 4)),
    ("hunyuan_dit", Layout("wave", 2, 4, 8)),
]


@pytest.mark.parametrize(("name", "layout"), CASES, ids=str)
def test_planned_steps_are_as_their_programs(name: str, layout: Layout) -> None:
    check(name, layout)


OPTIONS: dict[str, tuple[Callable[[], torch.nn.Module], dict[str, Any]]] = {
    "low precision": (lambda: ZOO["uvit"](torch.float32), {"precision": "bf16", "schedule": "1f1b"}),
    "offloaded": (lambda: TinyUNet("no_grad"), {"offload_optimizer": True, "schedule": "wave", "recompute": True}),
    "two passes": (lambda: fxpipe.SelfConditioning(SelfConditioned(), 0.5), {"schedule": "interleaved"}),
    "two passes, replicas": (SelfConditioned, {"schedule": "interleaved", "data_parallel": 2, "batch_size": 64}),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_planned_steps_are_as_the_programs_of(option: str) -> None:
    """By another device than the step was planned for, too."""
    make, options = OPTIONS[option]
    program = fxpipe.compile(make(), 2, **{"batch_size": 8, "microbatches": 4, **options})
    forms = [(program.schedule, program.step)]
    if program.plan.steady is not None and program.filled is not None:
        forms.append((program.plan.steady, program.filled.steady))
    for costed in (program.costed, program.costed.priced(device("V100-32GB"))):
        for order, form in forms:
            real = program_step_ops(form, costed, back_of(program), CLUSTERS[0])
            assert_equal(costed.ops(program.plan, order, CLUSTERS[0]), real)


@pytest.mark.parametrize(("name", "microbatches", "written"), [("unet", 8, 6), ("tied", 4, 6), ("tied", 6, 8)])
def test_equal_pipelines_are_copied(
    name: str, microbatches: int, written: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four pipelines three are written, and the other is the same as if it were; all where sizes differ."""
    layout, ranks = Layout("1f1b", 8, 2, microbatches, 4), list[int]()
    case = costed(name).on(CLUSTERS[0], layout.world_size)
    plan = plan_of(name, case, layout.place(case), microbatches)
    write = OpWriter.write
    monkeypatch.setattr(OpWriter, "write", lambda writer: (ranks.append(writer.rank), write(writer))[1])
    copied = step_ops(case, plan.staged, plan.step, plan.microbatch_sizes)
    assert len(ranks) == written
    monkeypatch.setattr(passes.step_ops, "models", lambda step, closing: {})
    assert copied.ranks == step_ops(case, plan.staged, plan.step, plan.microbatch_sizes).ranks


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Every schedule for one backbone, pipelines of one to three ranks, micro-batches of one size or two."""
    policy = draw(st.sampled_from([policy for policy in POLICIES.values() if not policy.reverses]))
    places, replicas = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    stages = places * draw(st.sampled_from(policy.stages_per_rank))
    return Layout(policy.name, places * replicas, stages, replicas * draw(st.integers(1, 4)), replicas)


@given(st.data())
@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_any_stages_are_planned_as_their_programs(data: st.DataObject) -> None:
    name, layout = data.draw(st.sampled_from(("unet", "tied", "uvit"))), data.draw(layouts())
    case = costed(name).on(CLUSTERS[0], layout.world_size)
    assume(layout.stages <= len(case.blocks))
    boundaries, runs = data.draw(cuts(len(case.blocks), layout.stages))
    check(name, layout, replace(layout.place(case), boundaries=boundaries, recompute=runs), FUZZED)


def test_what_arrives_lies_in_a_row() -> None:
    """The last block reads a slice of tokens that one device copies and a second rank does not."""
    layout = Layout("gpipe", 2, 2, 1)
    placed = layout.place(costed("uvit").on(CLUSTERS[0], 2))
    last = placed.boundaries[-1]
    check("uvit", layout, replace(placed, boundaries=(0, last - 1, last)))


def test_planned_steps_leave_no_cycles() -> None:
    """So that memory does not grow while the collector is held."""
    case = costed("unet").on(CLUSTERS[0], 2)
    plan = plan_of("unet", case, Layout("1f1b", 2, 2, 4).place(case), 4)
    gc.collect()
    gc.freeze()  # what other tests keep is looked at no more
    for _ in range(2):  # the first time costs are worked out, which the case remembers
        gc.collect()
        with held_collector():
            assert not gc.isenabled()
            for order in (plan.step, plan.steady):
                assert order is not None
                simulate(step_ops(case, plan.staged, order, plan.microbatch_sizes), CLUSTERS[0])
            left = gc.collect()
    assert left == 0
    assert gc.isenabled()
