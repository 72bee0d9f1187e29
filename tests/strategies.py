"""Random training steps, and random ways to lay them out, for hypothesis.

A `StepSpec` is plain data whose repr builds it again, so a failing example can be pasted into a regression test. Values
are numbered: the inputs first, then one per layer; all have one shape, [batch, width] or [batch, width, width], so that
every mistaken identity goes unnoticed by shapes and shows in the numbers alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from fxpipe.plan.staged import Run

WEIGHTED = ("linear", "conv", "glu", "norm", "group_norm", "film", "cat", "adapter")
PLAIN = ("silu", "tanh", "gelu", "square", "chunk", "detach", "cond", "shared")
SQUARE = ("transpose", "attention")  # of [batch, width, width] only
RANDOM = ("dropout", "noise", "same_noise")
TWO_VALUES = ("add", "sub", "gate", "in_place", "cat")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "wave", "zero-bubble", "auto", "custom", "custom")
LOSSES = ("mean", "sum", "weighted", "mean of sums", "two terms", "weighted sum")


@dataclass(frozen=True)
class Layer:
    """One operation on earlier values `args`. `tied` is an earlier layer's number whose weights it uses, as a module
    or, where `tied_parameter`, as one more module with the same parameter; `no_grad` runs it under torch.no_grad()."""

    kind: str
    args: tuple[int, ...]
    frozen: bool = False
    no_grad: bool = False
    tied: int | None = None
    tied_parameter: bool = False


@dataclass(frozen=True)
class StepSpec:
    """A whole training step; `outputs` are the values the loss reads, in order."""

    num_inputs: int
    layers: tuple[Layer, ...]
    outputs: tuple[int, ...]
    loss: str = "mean"
    square: bool = False
    width: int = 4
    returns: str = "tensor"
    frozen_condition: bool = False
    seed: int = 0


class RandomStep(nn.Module):
    """The module of a spec. Inputs: x_0 .. x_n, a condition [batch, width], a class per sample, the target, weights."""

    def __init__(self, spec: StepSpec) -> None:
        super().__init__()
        self.spec = spec
        torch.manual_seed(spec.seed)
        width = spec.width
        self.time = nn.Linear(width, width).requires_grad_(not spec.frozen_condition)
        self.classes = nn.Embedding(5, width)
        self.register_buffer("table", torch.linspace(0.5, 1.5, width))
        self.scale = nn.Parameter(torch.rand(width))
        self.layers = nn.ModuleList()
        for layer in spec.layers:
            self.layers.append(self._module(layer))
        self.to(torch.float64)

    def _module(self, layer: Layer) -> nn.Module:
        width = self.spec.width
        if layer.tied is not None and not layer.tied_parameter:
            return self.layers[layer.tied]
        module: nn.Module = {
            "linear": lambda: nn.Linear(width, width),
            "conv": lambda: nn.Conv1d(width, width, 3, padding=1) if self.spec.square else nn.Linear(width, width),
            "glu": lambda: nn.Linear(width, 2 * width),
            "norm": lambda: nn.LayerNorm(width),
            "group_norm": lambda: nn.GroupNorm(2, width),
            "film": lambda: nn.Linear(width, 2 * width),
            "cat": lambda: nn.Linear(2 * width, width),
            "adapter": lambda: nn.Linear(width, width, bias=False),
            "dropout": lambda: nn.Dropout(0.3),
        }.get(layer.kind, nn.Identity)()
        if layer.tied is not None:
            module.weight = self.layers[layer.tied].weight
        elif layer.frozen:
            module.requires_grad_(False)
        return module

    def forward(self, xs: Sequence[Tensor], condition: Tensor, label: Tensor, target: Tensor, weight: Tensor) -> object:
        spec = self.spec
        shared = Shared(F.silu(self.time(condition)) + self.classes(label), self.scale + self.table)
        values = list(xs)
        for layer, module in zip(spec.layers, self.layers, strict=True):
            with torch.set_grad_enabled(not layer.no_grad):
                values.append(self._run(layer, module, [values[i] for i in layer.args], shared))
        loss = self._loss([values[i] for i in spec.outputs], target, weight)
        if spec.returns == "tensor":
            return loss
        return {"loss": loss, "unused": values[-1]} if spec.returns == "dict" else (loss, values[-1])

    def _run(self, layer: Layer, module: nn.Module, args: list[Tensor], shared: "Shared") -> Tensor:
        x = args[0]
        match layer.kind:
            case "glu":
                a, b = module(x).chunk(2, dim=-1)
                return a * torch.sigmoid(b)
            case "film":
                scale, shift = module(shared.condition).chunk(2, dim=-1)
                scale, shift = (t[:, :, None] if self.spec.square else t for t in (scale, shift))
                return x * (1 + 0.1 * scale) + shift
            case "cat":
                return module(torch.cat(args, dim=-1))
            case "add":
                return (args[0] + args[1]) * self.table
            case "sub":
                return args[0] - args[1]
            case "gate":
                return args[0] * torch.sigmoid(args[1])
            case "cond":
                return x + (shared.condition[:, :, None] if self.spec.square else shared.condition)
            case "shared":
                return x * shared.scale
            case "adapter":
                return F.linear(x, module.weight.detach() + module.weight[:, :1] @ module.weight[:1])
            case "in_place":
                y = args[0] * 0.5
                y += args[1]
                return y.mul_(0.9)
            case "silu" | "tanh" | "gelu":
                return getattr(F, layer.kind)(x)
            case "square":
                return torch.sin(x) ** 2
            case "chunk":
                a, b = x.chunk(2, dim=-1)
                return torch.cat([b, a], dim=-1)
            case "detach":
                return x.detach()
            case "transpose":
                return x.transpose(1, 2)
            case "attention":
                return F.scaled_dot_product_attention(x, x, x)
            case "noise":
                return x + 0.1 * torch.randn_like(x)
            case "same_noise":
                shared.noise = torch.randn_like(x) if shared.noise is None else shared.noise
                return x + 0.1 * shared.noise
        return module(x)

    def _loss(self, outputs: list[Tensor], target: Tensor, weight: Tensor) -> Tensor:
        square = sum((out - (i + 1) * target) ** 2 for i, out in enumerate(outputs))
        per_sample = square.flatten(1).mean(1)
        match self.spec.loss:
            case "sum":
                return square.sum()
            case "weighted":
                return (weight * per_sample).mean()
            case "weighted sum":
                return (weight * per_sample).sum() / weight.sum()
            case "mean of sums":
                return square.flatten(1).sum(1).mean()
            case "two terms":
                return square.mean() + 0.1 * F.l1_loss(outputs[0], target)
        return square.mean()

    def example_inputs(self, batch_size: int) -> dict[str, object]:
        """Keyword arguments of forward, the same for the same spec."""
        spec, generator = self.spec, torch.Generator().manual_seed(self.spec.seed + 1)
        shape = (batch_size, spec.width, spec.width) if spec.square else (batch_size, spec.width)
        xs = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(spec.num_inputs + 1)]
        return {
            "xs": tuple(xs[:-1]),
            "condition": torch.randn(batch_size, spec.width, generator=generator, dtype=torch.float64),
            "label": torch.randint(5, (batch_size,), generator=generator),
            "target": xs[-1],
            "weight": torch.rand(batch_size, generator=generator, dtype=torch.float64) + 0.1,
        }

    @property
    def draws(self) -> bool:
        """Whether a step makes random draws."""
        return any(layer.kind in RANDOM for layer in self.spec.layers)


@dataclass
class Shared:
    """What layers far apart read: a condition [batch, width], a scale [width], one draw of noise."""

    condition: Tensor
    scale: Tensor
    noise: Tensor | None = None


class _Writer:
    """Layers so far, and the number of the value that goes on."""

    def __init__(self, draw: st.DrawFn, square: bool) -> None:
        self.draw, self.layers = draw, list[Layer]()
        self.num_inputs = draw(st.integers(1, 3))
        self.main = 0
        self.kinds = tuple(dict.fromkeys((*WEIGHTED, *PLAIN, *(SQUARE if square else ()), *RANDOM, *TWO_VALUES)))

    def run(self, most: int) -> None:
        for _ in range(self.draw(st.integers(0, most))):
            kind = self.draw(st.sampled_from(self.kinds))
            self.add(kind, self.draw(st.integers(0, self.last)) if kind in TWO_VALUES else None)

    def add(self, kind: str, other: int | None = None) -> None:
        args = (self.main,) if other is None else (self.main, other)
        self.layers.append(Layer(kind, args))
        self.main = self.last

    @property
    def last(self) -> int:
        return self.num_inputs + len(self.layers) - 1


@st.composite
def step_specs(draw: st.DrawFn) -> StepSpec:
    """U-shaped steps: skips pop nested or in any order, some twice or never; then weights are frozen and tied."""
    square = draw(st.booleans())
    writer = _Writer(draw, square)
    skips = []
    for _ in range(draw(st.integers(1, 4))):
        writer.add(draw(st.sampled_from(("linear", "conv", "glu"))))
        writer.run(2)
        skips.append(writer.main)
    writer.run(3)
    nested = st.just(skips[::-1])
    for skip in draw(st.one_of(nested, st.permutations(skips), st.lists(st.sampled_from(skips), max_size=4))):
        writer.add(draw(st.sampled_from(TWO_VALUES)), skip)
        writer.run(2)
    writer.add("linear")
    outputs = (writer.main, *draw(st.lists(st.integers(0, writer.last), max_size=1)))
    spec = StepSpec(writer.num_inputs, tuple(writer.layers), outputs, square=square)
    layers = _tied(draw, _frozen(draw, spec.layers))
    return replace(
        spec,
        layers=layers,
        loss=draw(st.sampled_from(LOSSES)),
        returns=draw(st.sampled_from(("tensor", "dict", "tuple"))),
        frozen_condition=draw(st.booleans()),
        seed=draw(st.integers(0, 9)),
    )


def _frozen(draw: st.DrawFn, layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """Stretches of frozen layers anywhere, under no_grad or with requires_grad_(False)."""
    result = list(layers)
    for _ in range(draw(st.integers(0, 2))):
        start, length = draw(st.integers(0, len(layers) - 1)), draw(st.integers(1, 4))
        how = draw(st.sampled_from(("frozen", "no_grad")))
        for i in range(start, min(start + length, len(layers))):
            result[i] = replace(result[i], **{how: True})
    return tuple(result)


def _tied(draw: st.DrawFn, layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """One pair of layers of a kind shares its weights."""
    pairs = [
        (i, j)
        for j, layer in enumerate(layers)
        for i in range(j)
        if layer.kind in WEIGHTED and layers[i].kind == layer.kind
    ]
    if not pairs or not draw(st.booleans()):
        return layers
    first, second = draw(st.sampled_from(pairs))
    tied = replace(layers[second], tied=first, tied_parameter=draw(st.booleans()))
    return (*layers[:second], tied, *layers[second + 1 :])


@dataclass(frozen=True)
class Split:
    """How a step is laid out. `schedule` is a name, or "custom" for any correct order, drawn from `seed`; so are the
    runs of blocks to recompute where that is "blocks"."""

    world_size: int
    batch_size: int
    microbatches: int | None
    schedule: str
    stages: int | None = None
    data_parallel: int | None = None
    recompute: bool | str | None = None
    seed: int = 0


@st.composite
def splits(draw: st.DrawFn) -> Split:
    """Every schedule, few micro-batches or many, of equal size or not, and now and then more stages than blocks."""
    world_size = draw(st.sampled_from((1, 2, 3, 4, 5, 8)))
    batch_size = draw(st.integers(1, 9))
    schedule = draw(st.sampled_from(SCHEDULES))
    microbatches = draw(st.one_of(st.none(), st.integers(1, min(8, batch_size))))
    per_rank = {"wave": st.just(None), "zero-bubble": st.sampled_from((None, 1, 2))}.get(
        schedule, st.sampled_from((None, 1, 2, 3))
    )
    chosen, copies = draw(per_rank), None
    if schedule not in ("custom", "auto"):
        copies = draw(st.sampled_from([d for d in range(1, world_size + 1) if world_size % d == 0]))
        copies = copies if copies <= (microbatches or batch_size) else 1
    places = world_size // (copies or 1)
    stages = draw(st.integers(1, 8)) if schedule == "custom" else None if chosen is None else chosen * places
    recompute = draw(st.sampled_from((None, True, "blocks") if schedule != "custom" else (None, "blocks")))
    return Split(world_size, batch_size, microbatches, schedule, stages, copies, recompute, draw(st.integers(0, 99)))


@st.composite
def cuts(draw: st.DrawFn, num_blocks: int, num_stages: int | None = None) -> tuple[tuple[int, ...], tuple[Run, ...]]:
    """Stages, and runs within them that are computed again."""
    fewest, most = (0, 3) if num_stages is None else (num_stages - 1, num_stages - 1)
    inner = draw(st.sets(st.integers(1, num_blocks - 1), min_size=fewest, max_size=most))
    boundaries = (0, *sorted(inner), num_blocks)
    runs: list[Run] = []
    for start, stop in pairwise(boundaries):
        marks = sorted(draw(st.sets(st.integers(start, stop), max_size=4)))
        runs += [run for run in pairwise(marks) if draw(st.booleans())]
    return boundaries, tuple(runs)
