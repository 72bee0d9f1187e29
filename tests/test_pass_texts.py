"""What every pass does, as text: what goes in, an arrow, what comes out. One small step goes through all of them.

`pytest tests/test_pass_texts.py --update-golden` writes the files anew; read the difference before committing it.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxpipe.analysis import CostedStep, costed
from fxpipe.capture import Capture
from fxpipe.cluster import Cluster
from fxpipe.plan.actions import Work
from fxpipe.plan.schedule import Schedule
from fxpipe.plan.staged import Staged
from passes.batch import BatchLayout
from passes.batch import analyse as analyse_batch
from passes.blocks import analyse as analyse_blocks
from passes.blocks.freeze import freeze
from passes.case import Case
from passes.fill.ahead import filled
from passes.fill.per_device import no_fill, per_device
from passes.placement.place import place
from passes.placement.shape import shape
from passes.schedules.named import make_schedule
from passes.schedules.problem import Problem
from passes.schedules.synthesis import synthesise
from passes.tuner.orders import Orders
from passes.tuner.simulate import simulate
from tests.captured import captured, work
from tests.frozen_steps import SLOW
from tests.refusals import refusals
from tests.unet import TinyUNet

Golden = Callable[[str, str], None]
ARROW = "\n\n  |\n  v\n\n"


class Step(nn.Module):
    """A frozen encoder, three layers with a skip over the middle one, a loss that every sample has a weight in."""

    def __init__(self) -> None:
        super().__init__()
        self.vae = nn.Linear(4, 4).requires_grad_(False)
        self.down, self.mid, self.up = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        with torch.no_grad():
            z = self.vae(x).tanh()
        skip = F.silu(self.down(z))
        y = self.up(F.silu(self.mid(skip)) + skip)
        return (weight * (y - z).square().mean(1)).sum() / weight.sum()

    def example_inputs(self, batch_size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(batch_size, 4), torch.rand(batch_size)


@pytest.fixture
def capture() -> Capture:
    torch.manual_seed(0)
    return captured(Step())


def operations(capture: Capture) -> Iterator[str]:
    for node in capture.graph.nodes:
        if node.op == "call_function":
            arguments = ", ".join(str(a) for a in node.args)
            yield f"{node.name:8} = {str(node.target).removeprefix('aten.')}({arguments})"


def columns(rows: list[tuple[str, str]]) -> str:
    width = max(len(left) for left, _ in rows)
    return "\n".join(f"{left:<{width}}  {right}".rstrip() for left, right in rows)


def test_batch(capture: Capture, golden: Golden) -> None:
    before = "\n".join(operations(capture))
    plan = analyse_batch(capture, 2)
    rows = [(f"loss_scale {plan.loss_scale}", "")]
    for name, layout in plan.layouts.items():
        if capture.nodes[name].op == "call_function":
            what = f"samples in dim {layout.dim}" if isinstance(layout, BatchLayout) else "the same for every sample"
            rows.append((name, "computed on the whole batch" if name in plan.whole_batch else what))
    golden("passes/batch.txt", before + ARROW + columns(rows) + "\n")


def test_freeze(capture: Capture, golden: Golden) -> None:
    split = freeze(capture)
    kinds = dict.fromkeys(split.frozen, "frozen") | dict.fromkeys(split.local, "local")
    lines = list(operations(capture))
    after = columns([(name, kinds.get(name, "backbone")) for name in (line.split()[0] for line in lines)])
    parts = "\n".join(f"component {component.name}: {' '.join(component.nodes)}" for component in split.components)
    golden("passes/freeze.txt", "\n".join(lines) + ARROW + after + "\n" + parts + "\n")


def test_blocks(capture: Capture, golden: Golden) -> None:
    seconds = work(capture)
    rows = [(line, f"{seconds[line.split()[0]]:g} s") for line in operations(capture)]
    graph = analyse_blocks(capture, seconds, 3)
    nodes = "\n".join(f"{block.index}: {' '.join(block.nodes)}" for block in graph.blocks)
    golden("passes/blocks.txt", columns(rows) + ARROW + f"{graph}\n\n{nodes}\n")


@pytest.fixture(scope="module")
def unet() -> CostedStep:
    model = TinyUNet("no_grad")
    return costed(model, model.example_inputs(4), 4, SLOW, 8, 2)


def on_two(unet: CostedStep) -> Case:
    return unet.on(Cluster.parse("2xV100"), 2)


def placed(unet: CostedStep, name: str, data_parallel: int = 1) -> Staged:
    return place(on_two(unet), unet.blocks.at(2), shape(name, 2, None, data_parallel), 2)


def test_place(unet: CostedStep, golden: Golden) -> None:
    texts = [str(unet.graph)]
    for name, copies in (("1f1b", 1), ("wave", 1), ("gpipe", 2)):
        staged = placed(unet, name, copies)
        rows = []
        for stage, ranks in enumerate(staged.stage_ranks):
            blocks = " ".join(map(str, staged.blocks(stage)))
            rows.append((f"stage {stage} on rank {', '.join(map(str, ranks))}", f"blocks {blocks}"))
        texts.append(f"{name} x {copies}{', skips collocated' * staged.collocated}\n{columns(rows)}")
    golden("passes/place.txt", texts[0] + ARROW + "\n\n".join(texts[1:]) + "\n")


LINE = Work(
    3, 3, backward=frozenset({0, 1, 2}), input_grad=frozenset({1, 2}), weight_grad=frozenset({0, 1, 2}),
    edges=frozenset({(0, 1), (1, 2)}), grad_edges=frozenset({(2, 1), (1, 0)}),
)  # fmt: skip
SECONDS = {"F": (1.0, 1.0, 1.0), "B": (2.0, 2.0, 2.0), "I": (1.0, 1.0, 1.0), "W": (1.0, 1.0, 1.0)}
STAGES = """stages 0, 1, 2 in line on ranks 0, 1, 2; 3 micro-batches
F 1 s, B 2 s, or I 1 s and W 1 s"""


def test_schedule(golden: Golden) -> None:
    named = [make_schedule(name, LINE, (0, 1, 2), SECONDS["F"], SECONDS["B"]) for name in ("gpipe", "1f1b", "zb-h1")]
    found = synthesise(Problem(LINE, (0, 1, 2), SECONDS), budget_seconds=0)
    texts = [*map(str, named), f"{found}\n{found.schedule}"]
    golden("passes/schedule.txt", STAGES + ARROW + "\n\n".join(texts) + "\n")


def test_fill(unet: CostedStep, golden: Golden) -> None:
    case, staged, sizes = on_two(unet), placed(unet, "1f1b"), (2, 2)
    schedule = Orders(case, staged, 2, True).named()
    training = simulate(case, staged, schedule, sizes)
    layers = "\n".join(
        f"component {number}, {name}: {count} layers for 4 samples of the next batch"
        for number, (name, count) in enumerate(zip(case.frozen.names, case.frozen.num_layers, strict=True))
    )
    before = f"{schedule.text()}\n{training.seconds:.3g} s, idle {idle(training.clock.idle_seconds)}\n{layers}"
    texts = []
    for title, how in (("in idle time", per_device), ("after", no_fill)):
        steady = filled(training.training, case.frozen, staged, sizes, how)
        seconds = simulate(case, staged, steady, sizes)
        texts.append(f"{title}\n{steady.text()}\n{seconds.seconds:.3g} s, idle {idle(seconds.clock.idle_seconds)}")
    golden("passes/fill.txt", before + ARROW + "\n\n".join(texts) + "\n")


def idle(seconds: object) -> str:
    return ", ".join(f"{s:.3g} s" for s in seconds)  # type: ignore[attr-defined]


REFUSED: dict[str, Callable[[], object]] = {
    "batch": lambda: analyse_batch(captured(Centred()), 2),
    "freeze": lambda: freeze(captured(Step().requires_grad_(False))),
    "place": lambda: shape("wave", 2, 6, 1),
    "schedule": lambda: make_schedule("sideways", LINE, (0, 1, 2), SECONDS["F"], SECONDS["B"]),
    "schedule text": lambda: Schedule.parse("rank 0: 0F0 0Q0"),
}


class Centred(Step):
    """Samples are mixed by a trained value."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        y = self.down(x)
        return (y - y.mean(0)).square().mean() + 0 * weight.mean()


def test_refusals(golden: Golden) -> None:
    golden("passes/refusals.txt", refusals(REFUSED))
