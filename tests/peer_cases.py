"""Small training steps, one per case at which pipeline compilers fail: wrong order, lost values, missing gradients.

Each is ten or so layers on [batch, 6] or [batch, 5, 6], so that every number of ranks up to 8 has something to cut.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 6


class Case(nn.Module):
    """A chain of layers; a case changes what goes in, on and out. `example_inputs` gives x and target, shaped alike."""

    extra: tuple[str, ...] = ()  # more inputs, shaped as x
    shape: tuple[int, ...] = (WIDTH,)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU()) for _ in range(8))

    def run(self, x: Tensor, start: int = 0, stop: int = 8) -> Tensor:
        for layer in self.layers[start:stop]:
            x = x + layer(x)
        return x

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.run(x), target)

    def example_inputs(self, batch_size: int) -> Any:
        return {name: self.noise(batch_size) for name in ("x", *self.extra, "target")}

    def noise(self, batch_size: int) -> Tensor:
        return torch.randn(batch_size, *self.shape, dtype=next(self.parameters()).dtype)


class SwappedArguments(Case):
    """Two arguments of equal shape, first used in the other order."""

    extra = ("c",)

    def forward(self, x: Tensor, c: Tensor, target: Tensor) -> Tensor:
        condition = torch.tanh(c)
        return F.mse_loss(self.run(self.run(x, 0, 4) - condition, 4), target)


class InputInEveryStage(Case):
    """A model input that every layer reads."""

    extra = ("c",)

    def forward(self, x: Tensor, c: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x + c)
        return F.mse_loss(x, target)


class ValueUsedTwice(Case):
    """One value read by two later stages, neither the next."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        early = self.run(x, 0, 2)
        middle = self.run(early, 2, 5) * early
        return F.mse_loss(self.run(middle, 5, 7) - early + self.layers[7](middle), target)


class TransposedValue(Case):
    """A value that is not contiguous wherever the chain is cut, as in token mixers."""

    shape = (WIDTH, WIDTH)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).transpose(1, 2)
        return F.mse_loss(x, target)


class NoGradEncoder(Case):
    """A frozen encoder under no_grad, with a draw inside."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)).requires_grad_(False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            latent = self.encoder(x)
            latent = latent + 0.1 * torch.randn_like(latent)
        return F.mse_loss(self.run(latent), target)


class NoGradTrainable(NoGradEncoder):
    """An encoder that no_grad alone makes frozen: its parameters require grad and get none."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder.requires_grad_(True)


class OwnTarget(Case):
    """A target that the trained layers make themselves, detached at its end, as in consistency distillation: a stage
    may have the end of one pass and the start of the other."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.run(x), (self.run(target) + target).detach())


class FrozenStart(Case):
    """The first layers are frozen: no gradient goes there, none may be sent."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[:3].requires_grad_(False)


class FrozenMiddle(Case):
    """Frozen layers between trainable ones: an input gradient, no weight gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[3:6].requires_grad_(False)


class FrozenEnd(Case):
    """The last layers are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[5:].requires_grad_(False)


class CrossedSkips(Case):
    """Skips of one shape read in the order in which they were made, not nested."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        skips = []
        for layer in self.layers[:4]:
            x = layer(x)
            skips.append(x)
        for layer, skip in zip(self.layers[4:], skips, strict=True):
            x = layer(x) - 2 * skip
        return F.mse_loss(x, target)


class NestedSkips(Case):
    """Skips as in a U-Net: last made, first read."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        skips = []
        for layer in self.layers[:4]:
            x = layer(x)
            skips.append(x)
        for layer in self.layers[4:]:
            x = layer(x) - 2 * skips.pop()
        return F.mse_loss(x, target)


class TiedParameters(Case):
    """One weight at both ends, as in tied embeddings; integer inputs."""

    shape = (5,)

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, WIDTH)
        self.head = nn.Linear(WIDTH, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.run(self.embedding(x))).flatten(0, 1), target.flatten())

    def noise(self, batch_size: int) -> Tensor:
        return torch.randint(9, (batch_size, *self.shape))


class SharedLayer(Case):
    """One module called near the start and near the end."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.layers[0](self.run(self.run(x, 0, 2), 2)), target)


class NestedInputs(Case):
    """Inputs in dicts and lists, and a flag."""

    def forward(self, batch: dict[str, Any], scaled: bool = False) -> Tensor:
        x = batch["x"] + batch["conditions"]["text"]
        first, second = batch["conditions"]["images"]
        x = self.run(self.run(x, 0, 4) * first, 4) + second
        return F.mse_loss(x * 2 if scaled else x, batch["target"])

    def example_inputs(self, batch_size: int) -> Any:
        x, text, first, second, target = (self.noise(batch_size) for _ in range(5))
        return {
            "batch": {"x": x, "conditions": {"text": text, "images": [first, second]}, "target": target},
            "scaled": True,
        }


class PositionalInputs(Case):
    """Example inputs as a tuple."""

    def example_inputs(self, batch_size: int) -> Any:
        return (self.noise(batch_size), self.noise(batch_size))


class SharedTable(Case):
    """An input without a batch dimension, read by an early and a late stage."""

    def forward(self, x: Tensor, table: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.run(self.run(x * table[0], 0, 6) + table[1], 6), target)

    def example_inputs(self, batch_size: int) -> Any:
        table = torch.randn(2, WIDTH, dtype=next(self.parameters()).dtype)
        return {"x": self.noise(batch_size), "table": table, "target": self.noise(batch_size)}


class Dropout(Case):
    """Dropout in every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.drops = nn.ModuleList(nn.Dropout(0.3) for _ in self.layers)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer, drop in zip(self.layers, self.drops, strict=True):
            x = x + drop(layer(x))
        return F.mse_loss(x, target)


class Buffers(Case):
    """A buffer that is saved, one that is not, and a constant made in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(WIDTH))
        self.register_buffer("shift", torch.rand(WIDTH), persistent=False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        powers = torch.tensor([1.0, 2.0, 3.0] * 2, dtype=x.dtype)
        x = self.run(x * self.scale, 0, 4) + powers
        return F.mse_loss(self.run(x, 4) * self.shift + self.scale, target)


class InPlace(Case):
    """In-place arithmetic on intermediate values."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x)
            y += x
            x = y.mul_(0.7).flip(-1)
        return F.mse_loss(x, target)


class UnusedParameter(Case):
    """A parameter that no loss depends on: its gradient is None on one device too."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)


class OutputWithLoss(Case):
    """The loss inside a dataclass."""

    @dataclass
    class Output:
        loss: Tensor
        prediction: Tensor

    def forward(self, x: Tensor, target: Tensor) -> Any:
        prediction = self.run(x)
        return self.Output(F.mse_loss(prediction, target), prediction)


class Loss(Case):
    """A reduction of per-sample losses [batch] and weights [batch], that a division into micro-batches must keep."""

    def __init__(self, reduce: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.reduce = reduce

    def forward(self, x: Tensor, target: Tensor, weights: Tensor) -> Tensor:
        losses = F.mse_loss(self.run(x), target, reduction="none").mean(dim=1)
        return self.reduce(losses, weights)

    def example_inputs(self, batch_size: int) -> Any:
        weights = torch.rand(batch_size, dtype=next(self.parameters()).dtype) + 0.1
        return {**super().example_inputs(batch_size), "weights": weights}


_CASES: dict[str, Callable[[], Case]] = {
    "swapped_arguments": SwappedArguments,
    "input_in_every_stage": InputInEveryStage,
    "value_used_twice": ValueUsedTwice,
    "transposed_value": TransposedValue,
    "no_grad_encoder": NoGradEncoder,
    "no_grad_trainable": NoGradTrainable,
    "frozen_start": FrozenStart,
    "frozen_middle": FrozenMiddle,
    "frozen_end": FrozenEnd,
    "crossed_skips": CrossedSkips,
    "nested_skips": NestedSkips,
    "tied_parameters": TiedParameters,
    "shared_layer": SharedLayer,
    "nested_inputs": NestedInputs,
    "positional_inputs": PositionalInputs,
    "shared_table": SharedTable,
    "dropout": Dropout,
    "buffers": Buffers,
    "in_place": InPlace,
    "unused_parameter": UnusedParameter,
    "output_with_loss": OutputWithLoss,
    "loss_sum": lambda: Loss(lambda losses, weights: losses.sum()),
    "loss_mean": lambda: Loss(lambda losses, weights: losses.mean()),
    "loss_weighted_sum": lambda: Loss(lambda losses, weights: (weights * losses).sum()),
    "loss_weighted_mean": lambda: Loss(lambda losses, weights: (weights * losses).mean()),
    "loss_normalised": lambda: Loss(lambda losses, weights: (weights * losses).sum() / weights.sum()),
    "own_target": OwnTarget,
}


def _seeded(make: Callable[[], Case]) -> Callable[..., Case]:
    def build(dtype: torch.dtype = torch.float32) -> Case:
        torch.manual_seed(0)
        return make().to(dtype)

    return build


PEER_CASES: dict[str, Callable[..., Case]] = {name: _seeded(make) for name, make in _CASES.items()}
