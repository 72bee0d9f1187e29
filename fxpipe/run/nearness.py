"""Steps in bfloat16 or float16, judged by their distance to float32, beside one device's own distance; and gradients
in float32 that are rounding noise, as of a bias before a norm, by theirs to float64.

    float32   loss 0.7312   one device, every operation in float32        the numbers that both round
    own       loss 0.7305   one device, as the model computes             at 0.0123 of it
    ours      loss 0.7309   all ranks                                     at 0.0111 of it: no farther

Two low-precision runs differ by as much as each differs from float32, whoever is right, for micro-batches round sums
that one device rounds at the end; a gradient that is missing, doubled or of another sample is at a distance of about 1.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from fxpipe.run.one_device import StepResult

FACTOR = 3.0
"""How much farther than one device a step may be. Its roundings are as many and as large, but others: a gradient's
distance is then that of another draw of the same noise. Of a few values it varies by chance, so that no gradient is
asked to be nearer than this times what all of one device's gradients together are."""
NOISE_SHARE = 1e-4
"""A gradient far below the largest one is rounding noise: errors, too, are relative to at least this share of it."""

_SAME = 1e-4
"""Of the gradients in float32 together: how far from float64 they may be as its roundings alone."""


@dataclass(frozen=True)
class Distance:
    """To the float32 step, relative: of the loss, of every gradient by name, and of all gradients together; and of what
    forward returns beside the loss."""

    loss: float
    gradients: Mapping[str, float]
    together: float
    outputs: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def of(step: StepResult, wide: StepResult) -> "Distance":
        """By root mean squares. Of outputs those of many values: one number's distance is chance, a count's is none."""
        gradients, expected = step.gradients, wide.gradients
        floor = NOISE_SHARE * max((_rms(g) for g in expected.values()), default=0.0)
        names = sorted({*gradients, *expected})
        found = {name: _distance(gradients.get(name), expected.get(name), floor) for name in names}
        squares = {name: (_rms(g) ** 2) * g.numel() for name, g in expected.items()}
        apart = sum((found[name] * max(_rms(g), floor)) ** 2 * g.numel() for name, g in expected.items())
        together = math.sqrt(apart / total) if (total := sum(squares.values())) else 0.0
        many = {name: value for name, value in wide.outputs.items() if value.numel() > 1}
        judged = {name: value for name, value in many.items() if value.is_floating_point() or value.is_complex()}
        beside = {name: _distance(step.outputs.get(name), value, 0.0) for name, value in judged.items()}
        return Distance(_distance(step.loss, wide.loss, 0.0), found, together, beside)


@dataclass(frozen=True)
class Nearness:
    """A step's distance to float32, or to what `wide` says, and one device's own.

    `rounding` is what each of the float32 step's values may round by its own type, by the names of `farther`. It counts
    only where one device's own is at no distance at all, as are gradients where the loss alone is cast: nothing in a
    lower precision has reached them.
    """

    ours: Distance
    own: Distance
    rounding: Mapping[str, float] = field(default_factory=dict)
    wide: str = "float32"

    @property
    def farther(self) -> dict[str, tuple[float, float]]:
        """What is too far, by name: its distance, and what it may be."""
        own = _by_name(self.own)
        pairs = {name: (ours, self._allowed(name, own.get(name))) for name, ours in _by_name(self.ours).items()}
        return {name: pair for name, pair in pairs.items() if not pair[0] <= pair[1]}  # a NaN is too far

    def _allowed(self, name: str, own: float | None) -> float:
        """Nothing where one device has none."""
        if own is None:
            return 0.0
        return max(FACTOR * max(own, self.own.together), 0.0 if own else self.rounding.get(name, 0.0))

    def __str__(self) -> str:
        rounded = [self.rounding.get(name, 0.0) for name, own in _by_name(self.own).items() if own == 0.0]
        return (
            f"distance to {self.wide}: gradients {self.ours.together:.2g}, one device's own {self.own.together:.2g}; "
            f"loss {self.ours.loss:.2g}, its own {self.own.loss:.2g}; allowed is {FACTOR:g} times its own"
            + (f", or {max(rounded):g} where its own is 0" if any(rounded) else "")
        )


def noise_of(ours: StepResult, own: StepResult, wide: StepResult, names: Sequence[str]) -> Nearness | None:
    """How near these gradients of a step in float32 are to those in float64, if as near as one device's; None, too,
    where its own are so far from them that it computes something else, as where rounding decides what is chosen."""

    def of(step: StepResult) -> Distance:
        found = Distance.of(replace(step, outputs={}), replace(wide, outputs={}))
        return replace(found, gradients={name: found.gradients.get(name, math.inf) for name in names})

    found = Nearness(of(ours), of(own), wide="float64")
    is_known = found.own.together <= _SAME and all(map(math.isfinite, found.own.gradients.values()))
    return found if is_known and not found.farther else None


def values_of(step: StepResult) -> dict[str, torch.Tensor]:
    """What is judged of a step, by name."""
    outputs = {f"output {name}": value for name, value in step.outputs.items()}
    return {**step.gradients, "the loss": step.loss, **outputs}


def _by_name(of: Distance) -> dict[str, float]:
    outputs = {f"output {name}": distance for name, distance in of.outputs.items()}
    return {**of.gradients, "the loss": of.loss, **outputs}


def _rms(tensor: torch.Tensor) -> float:
    return float(tensor.detach().abs().double().square().mean().sqrt()) if tensor.numel() else 0.0


def _distance(ours: torch.Tensor | None, expected: torch.Tensor | None, floor: float) -> float:
    if ours is None or expected is None:
        given = expected if ours is None else ours
        return 0.0 if given is None or not given.any() else math.inf
    if ours.shape != expected.shape:
        return math.inf
    apart, scale = _rms(ours.to(expected) - expected), max(_rms(expected), floor)
    return apart / scale if scale else apart
