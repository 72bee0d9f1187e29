"""Verification: a compiled step against the uncompiled model: loss, every gradient, and what else forward returns."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from fxpipe.capture import private
from fxpipe.errors import CompileError
from fxpipe.plan.outputs import Output
from fxpipe.run.nearness import NOISE_SHARE, Nearness

# Relative errors that rounding alone can cause, by the least precise type in the step.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 5e-2, torch.bfloat16: 5e-2}
_LOOSEST = 5e-2  # of any other floating type


@dataclass(frozen=True)
class Tolerance:
    """The relative error that rounding alone can cause; `widened_by` says what a step less precise in places does so.

    Empty where the whole step computes in one precision.
    """

    value: float
    widened_by: str = ""

    @property
    def is_low(self) -> bool:
        """Whether something computes in a lower precision than float32."""
        return self.value > TOLERANCES[torch.float32]

    def __str__(self) -> str:
        return f"{self.value:.0e}" + (f", for {self.widened_by}" if self.widened_by else "")


def tolerance_of(graph: fx.Graph, local: Collection[str] = (), outputs: bool = False) -> Tolerance:
    """By the least precise type that the graph computes in, or a gradient has; the nodes `local` are left out (cheap,
    on every unit).

    With `outputs` also what is computed for what forward returns beside the loss alone.
    """
    found: dict[torch.dtype, list[fx.Node]] = {}
    for node in sorted(graph.nodes, key=lambda node: node.op == "placeholder"):  # operations tell more
        value = node.meta.get("val")
        counts = node.name not in local and (outputs or not node.meta.get("extra"))
        computes = node.op == "call_function" or (node.op == "placeholder" and node.meta["requires_grad"])
        if computes and counts and isinstance(value, torch.Tensor):
            if value.is_floating_point() or value.is_complex():
                found.setdefault(value.dtype.to_real(), []).append(node)
    values = {dtype: TOLERANCES.get(dtype, _LOOSEST) for dtype in found}
    least = max(values, key=values.__getitem__)
    if len(set(values.values())) == 1:
        return Tolerance(values[least])
    first, *more = found[least]
    where = f"{str(least).removeprefix('torch.')} in {private.where(first)}, {first.meta.get('state', first.target)}"
    return Tolerance(values[least], where + (f", and {len(more)} more operations" if more else ""))


@dataclass(frozen=True)
class Verification:
    """Relative errors against one device. A gradient's error is its largest difference over its largest value; so is
    that of an output, what forward returns beside the loss. Of what is nearly zero, see `NOISE_SHARE`.

    A step that computes in a lower precision than float32 is judged by its `nearness` to float32 alone; one in float32
    of which gradients alone differ, by more than they should, by that of these to float64.
    """

    loss: float
    reference_loss: float
    loss_error: float
    gradients: Mapping[str, float]
    tolerance: float
    widened_by: str = ""
    outputs: Mapping[str, float] = field(default_factory=dict)
    output_tolerance: float = 0.0
    nearness: Nearness | None = None

    @property
    def max_grad_error(self) -> float:
        return _largest(self.gradients.values())

    @property
    def ok(self) -> bool:
        if self.nearness is not None:
            return not self.nearness.farther
        # Written so that a NaN fails.
        trained = all(error <= self.tolerance for error in (self.loss_error, *self.gradients.values()))
        return trained and all(error <= self.output_tolerance for error in self.outputs.values())

    @property
    def doubtful(self) -> list[str]:
        """The gradients in float32 that alone keep a step from being exact, maybe as they are rounding noise."""
        bad = [name for name, error in self.gradients.items() if not error <= self.tolerance]
        others = all(error <= self.output_tolerance for error in self.outputs.values())
        is_float32 = self.tolerance == TOLERANCES[torch.float32] and math.isfinite(self.reference_loss)
        return bad if is_float32 and others and self.loss_error <= self.tolerance else []

    def __str__(self) -> str:
        if self.nearness is not None:
            return self._by_nearness(self.nearness)
        losses = f"loss {self.loss:.12g} against {self.reference_loss:.12g} on one device"
        if not math.isfinite(self.reference_loss):
            return f"NOT EXACT: {losses}, which is not finite; verify with weights and a batch for which it is"
        verdict = "exact" if self.ok else "NOT EXACT"
        others = f"{len(self.outputs)} outputs within {_largest(self.outputs.values()):.1e}, " if self.outputs else ""
        lines = [
            f"{verdict}: {losses} (error {self.loss_error:.1e}), "
            f"{len(self.gradients)} gradients within {self.max_grad_error:.1e}, {others}"
            f"tolerance {Tolerance(self.tolerance, self.widened_by)}"
        ]
        bad = sorted(((e, n) for n, e in self.gradients.items() if not e <= self.tolerance), reverse=True)
        bad += [(e, f"output {n}") for n, e in self.outputs.items() if not e <= self.output_tolerance]
        return "\n".join(lines + [f"  {name}: {error:.2e}  <-- HERE" for error, name in bad[:10]])

    def _by_nearness(self, nearness: Nearness) -> str:
        wide = nearness.wide
        verdict = f"as near to {wide} as one device" if self.ok else f"FARTHER FROM {wide} THAN ONE DEVICE"
        losses = f"loss {self.loss:.6g} against {self.reference_loss:.6g} on one device"
        bad = sorted(((ours, most, name) for name, (ours, most) in nearness.farther.items()), reverse=True)
        lines = [f"  {name}: {ours:.2e}, allowed {most:.2e}  <-- HERE" for ours, most, name in bad[:10]]
        computed = f", {self.widened_by}" if self.widened_by else ""
        return "\n".join([f"{verdict}: {losses}{computed}", f"  {nearness}", *lines])


def _largest(errors: Iterable[float]) -> float:
    found = list(errors)
    return math.nan if any(math.isnan(error) for error in found) else max(found, default=0.0)


def compare(
    loss: torch.Tensor,
    gradients: Mapping[str, torch.Tensor],
    reference: tuple[torch.Tensor, Mapping[str, torch.Tensor], int],
    num_draws: int,
    tolerance: float | Tolerance,
) -> Verification:
    """Compare one step's results; a gradient that only one side has must be zero."""
    reference_loss, reference_gradients, drawn = reference
    if drawn != num_draws:
        raise CompileError(
            f"the uncompiled model made {drawn} random draws, the captured graph {num_draws}; "
            "it draws under a condition that is not captured, so the two cannot be compared"
        )
    largest = max((float(g.abs().max()) for g in reference_gradients.values() if g.numel()), default=0.0)
    errors = {
        name: _error(gradients.get(name), reference_gradients.get(name), NOISE_SHARE * largest)
        for name in sorted({*gradients, *reference_gradients})
    }
    limit = tolerance if isinstance(tolerance, Tolerance) else Tolerance(tolerance)
    # A loss may be noise, too, as that of a policy gradient whose advantages add up to nothing.
    loss_error = _error(loss, reference_loss, NOISE_SHARE * largest)
    return Verification(float(loss), float(reference_loss), loss_error, errors, limit.value, limit.widened_by)


def compare_outputs(
    found: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor], wanted: Sequence[Output]
) -> dict[str, float]:
    """The relative error of every output that a step should have."""
    return {output.name: _output_error(found.get(output.name), reference[output.name]) for output in wanted}


def compare_written(found: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """The relative error of all that forward has written into the model's own tensors; of a norm's running mean, which
    is rounding noise where another norm came before, to a share of its deviation at least."""

    def floor(name: str) -> float:
        module, _, own = name.rpartition("running_mean")
        variance = None if own else reference.get(f"{module}running_var")
        return 0.0 if variance is None else NOISE_SHARE * float(variance.max().sqrt())

    errors = ((name, _output_error(found.get(name), value, floor(name))) for name, value in reference.items())
    return {f"{name}, as written": error for name, error in errors}


def _output_error(ours: torch.Tensor | None, theirs: torch.Tensor, floor: float = 0.0) -> float:
    if ours is None or ours.dtype != theirs.dtype:
        return math.inf
    if ours.is_complex():
        ours, theirs = torch.view_as_real(ours), torch.view_as_real(theirs)
    if torch.equal(ours, theirs.to(ours.device)):  # infinities among them
        return 0.0
    return _error(ours, theirs, floor) if ours.dtype.is_floating_point else math.inf


def _error(ours: torch.Tensor | None, theirs: torch.Tensor | None, floor: float) -> float:
    if ours is None or theirs is None:
        given = ours if theirs is None else theirs
        return 0.0 if given is None or not given.any() else math.inf
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return math.inf
    if not theirs.numel():
        return 0.0
    difference, scale = float((ours.to(theirs.device) - theirs).abs().max()), max(float(theirs.abs().max()), floor)
    return difference / scale if scale else difference
