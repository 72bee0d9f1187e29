"""Seconds of every block of a step, and of every layer of what is frozen, on the device at hand, for
`cost_model="profile.json"`.

round 1     block 0 forward, block 1 forward, ...; block 1 backward, block 0 backward; of both the gradients of
            activations, and of weights, apart; random draws; adding tensors
round 2     the same

As in a step, a backward comes long after its forward: what it reads is no longer in the caches, which is a tenth of the
time of small models. Rounds spread a block's runs over time: a machine that others use is slower for seconds at a time.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from cost_models import devices, profiled, timing
from fxpipe.analysis import CostedStep
from fxpipe.capture.randomness import Draw
from fxpipe.errors import CompileError
from fxpipe.plan.block_graph import bytes_at
from fxpipe.plan.rank_program import bound, nest
from fxpipe.plan.staged import Staged
from passes.costs.work import StepWork
from passes.lowering.borders import Border
from passes.lowering.joint import StageGraphs
from passes.lowering.step_graphs import Key, StepGraphs
from passes.lowering.units import Value

ROUNDS = 15  # on a busy machine a U-Net's total varied by 13 % (standard deviation), after 5 rounds by 17 %
_WAITING_BYTES = 1 << 30  # kept for backwards at most, beside one block's: more than caches hold
_ADDED = 1 << 19  # float32 numbers, some MiB

Label = tuple[str, int | str, int]
"""What is run: forward, backward, input or weight, a part's number and samples; draw, an operation and 0; add and 0."""


class Profiler:
    """Times every block, forward and backward, and every layer of frozen components, at every batch size; all weights
    and inputs are made up.

    The explicit graphs that rank programs are made of run on `device`, one block at a time. Of a `share` (r, N) only
    parts r, r + N, ... are timed; `gathered` puts the profiles of all N together. The weights of a share are held, and
    what backwards need up to a GiB.

    Raises:
        CompileError: a batch size is not positive, or the step holds for another one only.
    """

    def __init__(
        self, step: CostedStep, batch_sizes: Sequence[int], device: torch.device, share: tuple[int, int] = (0, 1)
    ) -> None:
        self._step, self._device, self._sizes = step, device, sorted(set(batch_sizes))
        if not self._sizes or self._sizes[0] < 1:
            raise CompileError(f"batch sizes to profile must be positive, got {list(batch_sizes)}")
        fixed = step.captured.inputs.batch_size
        if not step.captured.batch and self._sizes != [fixed]:
            raise CompileError(f"the graph holds for batches of {fixed} only; profile that size")
        num_blocks = len(step.graph.blocks)
        alone = Staged(tuple(range(num_blocks + 1)), ((0,),) * num_blocks, "1f1b", False, 1)
        work = StepWork.in_capture(step.captured, step.graph, device)
        parts = StepGraphs(step.captured, step.batch, work, alone, tuple(self._sizes), step.frozen.nodes, device)
        layers = [
            (f"{component.name} {layer}", nodes)
            for component, of_component in zip(step.graph.components, step.frozen.nodes, strict=True)
            for layer, nodes in enumerate(of_component)
        ]
        self._names = [*layers, *((block.name, block.nodes) for block in step.graph.blocks)]
        self._mine = range(share[0], len(self._names), share[1])
        count = len(layers)
        self._parts = {n: _bound(parts, ("L", n) if n < count else ("F", n - count)) for n in self._mine}
        self._taken: dict[Label, list[float]] = defaultdict(list)

    @property
    def num_timings(self) -> int:
        """How often a round calls `progress`."""
        return len(self._mine) * len(self._sizes)

    def round(self, progress: Callable[[str], None] = lambda name: None) -> None:
        """Run everything once; `progress` is called with a part's name before it is timed. The first round warms up."""
        with torch.no_grad():
            for size in self._sizes:
                self._time_parts(size, progress)
            for name, (draw, _) in self._draws().items():
                self._time(("draw", name, 0), partial(draw.sample, self._sizes[-1], 0, 0, self._device))
            total, addend = (torch.ones(_ADDED, device=self._device) for _ in range(2))
            self._time(("add", "", 0), partial(total.add_, addend))

    def profile(self) -> profiled.Profile:
        """What is to be expected after the rounds until now.

        Raises:
            CompileError: there were none.
        """
        if not self._taken:
            raise CompileError("nothing has been timed yet; call round() before profile()")
        taken = {label: timing.expected(seconds[1:] or seconds) for label, seconds in self._taken.items()}

        def of(kind: str, number: int) -> tuple[float, ...]:
            return tuple(taken.get((kind, number, size), 0.0) for size in self._sizes)

        entries = []
        for number in self._mine:
            times = of("forward", number), of("backward", number)
            cut = (of("input", number), of("weight", number)) if ("input", number, self._sizes[0]) in taken else ()
            entries.append(profiled.Entry(*self._names[number], tuple(self._sizes), *times, *cut))
        speeds = profiled.Speeds(
            moving=3 * torch.float32.itemsize * _ADDED / taken["add", "", 0],
            drawing=tuple((name, size / taken["draw", name, 0]) for name, (_, size) in self._draws().items()),
        )
        key, memory = profiled.key_of(self._step.costs, self._device), timing.device_bytes(self._device)
        return profiled.Profile(devices.device(), key, tuple(entries), speeds, memory)

    def _time_parts(self, size: int, progress: Callable[[str], None]) -> None:
        """Forwards in order, and backwards in the opposite one as soon as much waits for them."""
        waiting: list[tuple[int, list[torch.Tensor], list[torch.Tensor]]] = []
        for number in self._mine:
            progress(self._names[number][0])
            part = self._parts[number][size]
            reads = [_made_up(value, self._device) for value in part.border.reads]
            made = self._time(("forward", number, size), partial(part.forward, *reads))
            if part.backward is not None:
                returns, saved = made
                pairs = zip(part.border.returns, returns, strict=True)
                tangents = [torch.ones_like(value) for border, value in pairs if border.requires_grad]
                waiting.append((number, list(saved), tangents))
            held = sum(value.nbytes for _, saved, _ in waiting for value in saved if isinstance(value, torch.Tensor))
            if held > _WAITING_BYTES or number == self._mine[-1]:
                self._time_backwards(size, waiting)

    def _time_backwards(self, size: int, waiting: list[tuple[int, list[torch.Tensor], list[torch.Tensor]]]) -> None:
        """Whole ones, and again in two parts, of which the second ones come once all of the first are done."""
        for number, saved, tangents in reversed(waiting):
            if (whole := self._parts[number][size].backward) is not None:
                self._time(("backward", number, size), partial(whole, list(saved), *tangents))
        kept = []
        while waiting:
            number, saved, tangents = waiting.pop()
            part = self._parts[number][size]
            if part.backward_input is not None and part.backward_weight is not None:
                _, values = self._time(("input", number, size), partial(part.backward_input, saved, *tangents))
                kept.append((("weight", number, size), partial(part.backward_weight, list(values))))
        for label, run in kept:
            self._time(label, run)

    def _time(self, label: Label, run: Callable[[], Any]) -> Any:
        started = timing.now(self._device)
        made = run()
        self._taken[label].append(timing.now(self._device) - started)
        return made

    def _draws(self) -> dict[str, tuple[Draw, int]]:
        """The largest random draw of every operation, and its bytes."""
        captured = self._step.captured
        nodes = {draw.index: captured.nodes[name] for name, draw in captured.draws.items()}
        sizes = {index: bytes_at(node.meta["val"], self._sizes[-1]) for index, node in nodes.items()}
        ascending = sorted(captured.draws.values(), key=lambda draw: sizes[draw.index])
        return {draw.target: (draw, sizes[draw.index]) for draw in ascending}


def gathered(profiles: Sequence[profiled.Profile]) -> profiled.Profile:
    """One profile of the N shares that N ranks have timed, in rank order.

    Raises:
        CompileError: they are of different graphs or devices.
    """
    first = profiles[0]
    for other in profiles[1:]:
        profiled.require_key(other.key, first.key)
    most = max(len(one.entries) for one in profiles)
    entries = [one.entries[turn] for turn in range(most) for one in profiles if turn < len(one.entries)]
    return replace(first, entries=tuple(entries))


@dataclass(frozen=True)
class _Part:
    """The graphs of one part at one batch size, to be run."""

    border: Border
    forward: fx.GraphModule
    backward: fx.GraphModule | None
    backward_input: fx.GraphModule | None
    backward_weight: fx.GraphModule | None


def _bound(parts: StepGraphs, key: Key) -> dict[int, _Part]:
    """The graphs of one part by size, with weights made up."""
    graphs = [parts.graphs(key, size) for size in parts.sizes]
    names = {name: value for of_size in graphs for name, value in of_size.border.state.items()}
    state = nest({name: _made_up(value, parts.device) for name, value in names.items()})

    def part(of: StageGraphs) -> _Part:
        border = of.border
        whole = (of.backward,) if border.has_backward else (None,)
        halves = (of.backward_input, of.backward_weight) if border.splits else (None, None)
        made = (None if graph is None else bound(state, graph, "part") for graph in (*whole, *halves))
        return _Part(border, bound(state, of.forward, "part"), *made)

    return {of.border.batch_size: part(of) for of in graphs}


def _made_up(value: Value, device: torch.device) -> torch.Tensor:
    """Small positive numbers: no infinities, and integers that are valid as indices."""
    if value.dtype.is_floating_point:
        return torch.rand(value.shape, device=device).mul_(0.1).add_(0.01).to(value.dtype)
    return torch.zeros(value.shape, dtype=value.dtype, device=device)
