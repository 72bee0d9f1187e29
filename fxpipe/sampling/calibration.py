"""Which exchanges of a displaced step stay fresh: by how much they change in a call, and how long they take.

    one device     steps of the call     change of every exchanged value from step to step, relative
    clock          fresh messages        seconds until they are there

    gather linear_7     0.9 % change   210 us     displaced
    halo conv2d_3       8.1 % change    16 us     fresh: more change for its time, and no step is longer than allowed

A patch reads of a fresh exchange what the others have in this step, so all of them fresh is the exact mode; none is
what it was.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import torch
from rich.table import Table
from torch import fx

from fxpipe.cluster import Cluster
from fxpipe.errors import CompileError
from fxpipe.plan import row_ops
from fxpipe.plan.sample_plan import SamplePlan
from fxpipe.plan.timeline import human_seconds
from fxpipe.run.ownership import require_new
from fxpipe.run.ranks import LocalRanks, Ranks
from fxpipe.sampling.spread import Spread, returned
from fxpipe.sampling.step import SampleStep
from fxpipe.simulate import timeline
from passes.rows import RowPlan, analyse
from passes.rows.how import Moments
from passes.sampling.buckets import ExchangeKey, key_of
from passes.sampling.forms import told

_TRIES = 5
"""Numbers of fresh exchanges that are looked at."""
_STEPS = 3
_ROUNDING = 1e-6


@dataclass(frozen=True)
class MeasuredExchange:
    """An exchange that may be displaced: its relative change from step to step, the mean over a call's displaced steps;
    seconds until a fresh one is there; whether it is one."""

    name: str
    change: float
    seconds: float
    fresh: bool


@dataclass(frozen=True)
class Calibration:
    """What was measured over so many `steps`, exchanges that are worth most first; seconds of a steady step before it,
    with what is fresh now, and with all fresh."""

    exchanges: tuple[MeasuredExchange, ...]
    steps: int
    before_seconds: float
    after_seconds: float
    exact_seconds: float

    @property
    def fresh(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.exchanges if one.fresh)

    @property
    def note(self) -> str:
        return (
            f"{len(self.fresh)} of {len(self.exchanges)} exchanges are kept fresh, those that changed most in "
            f"{self.steps} steps for their time: a steady step is predicted to take {human_seconds(self.after_seconds)}"
            f", {human_seconds(self.before_seconds)} without, {human_seconds(self.exact_seconds)} where all are"
        )

    def table(self, rows: int | None = None) -> Table:
        table = Table(title=self.note, title_justify="left")
        for column in ("exchange", "change in a step", "takes", ""):
            table.add_column(column, justify="left" if column in ("exchange", "") else "right")
        for one in self.exchanges[:rows]:
            table.add_row(one.name, f"{one.change:.2%}", human_seconds(one.seconds), "fresh" if one.fresh else "")
        return table


class ExchangeRecorder:
    """A denoiser on one device that keeps, of every exchange that steps displace, how much it changes."""

    def __init__(self, spread: Spread) -> None:
        self.spread, self.streams, self.stream_name = spread, LocalRanks(), None
        self.step: SampleStep | None = None
        self.num_steps = 0
        self._before: dict[str, list[torch.Tensor]] = {}
        self._changes: dict[str, list[list[float]]] = defaultdict(list)  # by stream, of every step but the first

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        require_new(self.spread.module)
        step = self.spread.step(args, kwargs)
        if self.step is None:
            require_displaced(step.plan)
            self.step, self.keys = step, displaced_keys(step)
            self._module = recording(analyse(step.traced.captured, step.traced.rows, step.batch_size), self.keys)
        elif step is not self.step:
            raise CompileError("the call has steps of several kinds; calibrate a call whose steps are alike")
        tensors, _ = step.traced.captured.inputs.bind(args, kwargs)
        inputs = {name: tensor.clone() for name, tensor in step.bind(tensors).items()}  # a loop may write into its own
        state = self.spread.state(step.traced)
        stream = self.stream_name or self.streams.stream(step, inputs)
        with torch.no_grad():
            prediction, values = self._module(inputs, state)
        if stream in self._before:
            self._changes[stream].append([*map(_change, values, self._before[stream])])
        self._before[stream] = values
        self.num_steps = 1 + max(map(len, self._changes.values()), default=0)
        return returned(step, prediction, args, kwargs)

    def changes(self) -> list[float]:
        """Of every one of `keys`, over the steps that are displaced, or all where there are none.

        Raises:
            CompileError: there were no two steps, or values in them that are no numbers.
        """
        if self.step is None or not self._changes:
            raise CompileError("nothing changes in a call of one step: calibrate one of several steps")
        of_steps = [
            change for of_stream in self._changes.values() for change in of_stream[self.step.warmup - 1 :] or of_stream
        ]
        found = [sum(one) / len(one) for one in zip(*of_steps, strict=True)]
        if not all(map(isfinite, found)):
            raise CompileError("the call's steps have values that are no finite numbers, whose change tells nothing")
        return found


def require_displaced(plan: SamplePlan) -> None:
    """Refuse a plan of which nothing can be kept fresh."""
    if plan.how.mode == "exact" or plan.in_turn:
        why = "patches in turn, of which the later ones have not been computed" if plan.in_turn else str(plan.how)
        raise CompileError(
            f"the plan has {why}: no exchange of it can be kept fresh; calibrate patches beside each other with "
            "mode='displaced', patches=..."
        )


def displaced_keys(step: SampleStep) -> list[ExchangeKey]:
    """The exchanges that cross from a step to the next, or would, were they not kept fresh."""
    members = (member for message in step.messages_of["displaced"] for member in message.members)
    crossing, kept = set(map(key_of, members)), step.plan.how.fresh
    keys = dict.fromkeys(map(key_of, step.messages_of["fresh"]))
    return [key for key in keys if key in crossing or told(key) in kept]


def recording(rows: RowPlan, keys: Sequence[ExchangeKey]) -> Callable[..., tuple[torch.Tensor, list[torch.Tensor]]]:
    """The graph on one device, of inputs and state by name: the prediction, and what each exchange tells."""
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    result = graph.graph_copy(rows.sized.graph, env)
    of_name = {node.name: copied for node, copied in env.items()}
    told_of = []
    for name, kind in keys:
        node, how = rows.sized.nodes[name], rows.found[name].how if name in rows.found else None
        value = node.all_input_nodes[0] if kind in ("halo", "moments") else node
        found = of_name[value.name]
        if isinstance(how, Moments) and kind == "moments":
            found = graph.call_function(row_ops.moments, (found, how.num_groups))
        told_of.append(found)
    graph.output((result, told_of))
    module = fx.GraphModule({}, graph)
    names = [node.name for node in rows.sized.graph.find_nodes(op="placeholder")]
    of_state = rows.sized.capture.tensors

    def run(inputs: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> Any:
        given = [inputs[n] if n in inputs else state[of_state.get(n, f"_constants.{n}")] for n in names]
        return module(*given)

    return run


def _change(now: torch.Tensor, before: torch.Tensor) -> float:
    wide = torch.promote_types(now.dtype, torch.float32)
    size = float(now.to(wide).norm())
    return float((now.to(wide) - before.to(wide)).norm()) / size if size else 0.0


def calibrated(
    spread: Spread, step: SampleStep, keys: Sequence[ExchangeKey], changes: Sequence[float], num_steps: int,
    slower: float, cluster: Cluster,
) -> tuple[Calibration, SamplePlan]:  # fmt: skip
    """As many exchanges kept fresh, those that are worth most first, as a steady step is not longer for than allowed,
    nor than an exact one; and the plan that does."""
    step = step.whole
    bare = replace(step.plan, how=replace(step.plan.how, fresh=()))
    seconds = [_seconds(step, key, cluster) for key in keys]
    order = sorted(range(len(keys)), key=lambda at: (-changes[at] / max(seconds[at], 1e-12), at))

    def kept(count: int) -> tuple[SampleStep, float]:
        """The programs with so many fresh, and seconds of a steady step."""
        names = tuple(told(keys[at]) for at in sorted(order[:count]))
        made = made_of(spread, step, replace(bare, how=replace(bare.how, fresh=names)))
        return made, _steady_seconds(spread, made, cluster)

    fits, too_many, (made, after) = 0, len(keys) + 1, kept(0)
    before, count = after, len(keys) if slower else 0
    now = _steady_seconds(spread, step, cluster) if step.plan.how.fresh else before
    exact = _steady_seconds(spread, made, cluster, warmup=_STEPS)
    most = min((1 + slower) * before, max(before, exact * (1 + _ROUNDING)))
    for _ in range(_TRIES):  # all, then half of what is left open, ...
        if count == fits:
            break
        another, took = kept(count)
        if took <= most:
            fits, made, after = count, another, took
        else:
            too_many = count
        count = (fits + too_many) // 2
    fresh = {*order[:fits]}
    exchanged = (MeasuredExchange(told(keys[at]), changes[at], seconds[at], at in fresh) for at in order)
    found = Calibration(tuple(exchanged), num_steps, before, after, exact)
    return found, _noted(made.plan, step.plan, found, after - now)


def made_of(spread: Spread, step: SampleStep, plan: SamplePlan, ranks: Ranks | None = None) -> SampleStep:
    """The programs of a plan for the calls of a step: of all ranks, or of these."""
    return replace(spread.lowering, plan=plan).step(step.traced, step.batch_size, ranks)


def _noted(made: SamplePlan, before: SamplePlan, found: Calibration, longer: float) -> SamplePlan:
    """It says what was measured, and what is expected now that a steady step is so much longer."""
    expects = before.expects
    if expects is not None:
        seconds = expects.seconds + max(expects.steps - before.how.warmup, 0) * longer
        expects = replace(expects, seconds=float(f"{seconds:.4g}"))
    notes = tuple(note for note in before.notes if "kept fresh, those that changed" not in note)
    return replace(made, expects=expects, notes=(*notes, found.note))


def _seconds(step: SampleStep, key: ExchangeKey, cluster: Cluster) -> float:
    """Until what all patches tell in a fresh exchange is there."""
    sent = [(m.src, m.dst, m.num_bytes) for m in step.messages_of["fresh"] if key_of(m) == key]
    return max(cluster.concurrent_seconds(sent), default=0.0)


def _steady_seconds(spread: Spread, step: SampleStep, cluster: Cluster, warmup: int = 1) -> float:
    """Of a step that follows another one: of three, the first `warmup` are exact."""
    soon = replace(step.plan, how=replace(step.plan.how, warmup=warmup))
    events = timeline(spread.lowering.ops(replace(step, plan=soon), _STEPS), cluster).actions
    ends = [[event.end_seconds for event in events if event.rank == rank] for rank in range(step.plan.world_size)]
    return max(of_rank[-1] for of_rank in ends) - max(of_rank[-2] for of_rank in ends)
