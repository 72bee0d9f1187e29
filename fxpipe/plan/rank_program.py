"""Rank programs: one straight-line FX graph per rank, the stage graphs it calls, and the messages between them."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from keyword import iskeyword
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx, nn

from fxpipe.plan import ops
from fxpipe.plan.actions import Action
from fxpipe.plan.block_graph import human_bytes

KINDS = (
    "main", "skip", "conditioning", "gradient", "loss", "halo", "gather", "ulysses", "ring", "moments", "sum",
    "prediction", "bucket",
)  # fmt: skip


@dataclass(frozen=True)
class Message:
    """One tensor from rank `src` to rank `dst`, once per step; `edge` is its compile-time id, `kind` one of KINDS.

    It is sent right after `action`; after all actions where that is None (the loss, gradients of tied parameters, which
    belong to no micro-batch: `microbatch` is -1). Frozen work of the next batch gives `samples` of it: from, to before.
    It is waited for `crosses` steps after the one that sends it. A bucket is its `members` one after the other.
    """

    edge: int
    src: int
    dst: int
    action: Action | None
    value: str
    microbatch: int
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    samples: tuple[int, int] | None = None
    crosses: int = 0
    members: "tuple[Message, ...]" = ()

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    @property
    def channel(self) -> tuple[int, int]:
        return self.src, self.dst

    def __str__(self) -> str:
        part = f"[{self.microbatch}]" if self.microbatch >= 0 else ""
        if self.samples is not None:
            part = f" of next samples {self.samples[0]}:{self.samples[1]}"
        return f"{self.value}{part} {self.kind} {list(self.shape)}"

    def received(self, transport: fx.Node, device: torch.device, name: str) -> fx.Node:
        """The node that posts its receive."""
        args = transport, self.src, self.edge, list(self.shape), self.dtype, str(device)
        return self._node(transport.graph, ops.recv, args, name)

    def sent(self, transport: fx.Node, value: fx.Node, name: str) -> fx.Node:
        """The node that sends a value as this message."""
        return self._node(transport.graph, ops.send, (transport, value, self.dst, self.edge), name)

    def _node(self, graph: fx.Graph, target: Callable[..., Any], args: tuple[Any, ...], name: str) -> fx.Node:
        node = graph.create_node("call_function", target, args, name=name)
        node.meta["message"] = self
        return node


@dataclass(frozen=True)
class Reduction:
    """The weight gradients of one stage that have come since the last `turn`, summed over the ranks of its replicas;
    `edge` is its compile-time id.

    With `owners`, one for each parameter, a sum is made on its owner alone, which trains the parameter; at the start of
    the next step its value goes to the other replicas, under the id `values_edge`. Without, all of them have all sums.
    """

    edge: int
    stage: int
    ranks: tuple[int, ...]
    parameters: tuple[str, ...]
    num_bytes: int
    owners: tuple[int, ...] = ()
    values_edge: int = -1
    turn: int = 0

    def owned(self, rank: int) -> tuple[str, ...]:
        """The parameters whose sums a rank has."""
        if not self.owners:
            return self.parameters
        return tuple(name for name, owner in zip(self.parameters, self.owners, strict=True) if owner == rank)

    def __str__(self) -> str:
        to = f" to {list(self.owners)}" if self.owners else ""
        turn = f", turn {self.turn}" if self.turn else ""
        return f"stage {self.stage} gradients over ranks {list(self.ranks)}{to}, {self.num_bytes} bytes{turn}"


@dataclass(frozen=True)
class Gathering:
    """The parameters of one stage, each of which is held by its owner alone, brought to all ranks of its replicas for a
    run of actions; `edge` is its compile-time id, `turn` counts those of these ranks."""

    edge: int
    stage: int
    ranks: tuple[int, ...]
    parameters: tuple[str, ...]
    num_bytes: int
    owners: tuple[int, ...]
    turn: int

    @property
    def owned(self) -> list[tuple[str, int]]:
        """The parameters, each with its owner."""
        return list(zip(self.parameters, self.owners, strict=True))

    def others(self, rank: int) -> tuple[str, ...]:
        """The parameters that a rank has from others."""
        return tuple(name for name, owner in self.owned if owner != rank)

    def __str__(self) -> str:
        from_ = f"from {list(self.owners)}, {self.num_bytes} bytes"
        return f"stage {self.stage} parameters to ranks {list(self.ranks)} {from_}, turn {self.turn}"


@dataclass(frozen=True)
class RankProgram:
    """What one rank runs each step.

    `graph` takes (transport, random, the model inputs in `inputs`) and returns (loss, gradients in the order of
    `gradients`); `modules` are the graphs it calls, which read their state by its original name; `state` maps those
    names to shape and type. Of these the program brings the parameters in `refreshed` here itself, before it uses them,
    and of these it holds those in `gathered` only while it does.

    Where it works ahead, on the next batch, it also takes (that batch's random, its inputs in `next_inputs`), and
    returns what it makes for that batch (`carries`) as a third list. Where frozen work has made values for this batch
    before (`carried`), it takes them as a further argument: a dict that it empties. Where gradients are in float16
    (`scaled`) it takes, last, what the loss is multiplied with before its backward. A program without training (a
    *prologue*) returns None as its loss. What the step returns beside the loss comes last, in the order of `outputs`:
    (name, micro-batch), see `fxpipe.plan.outputs`.
    """

    rank: int
    graph: fx.Graph
    modules: Mapping[str, fx.Graph]
    inputs: tuple[str, ...]
    gradients: tuple[str, ...]
    state: Mapping[str, torch.Tensor]
    next_inputs: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()
    carries: tuple[str, ...] = ()
    works_ahead: bool = False
    scaled: bool = False
    refreshed: tuple[str, ...] = ()
    gathered: tuple[str, ...] = ()
    outputs: tuple[tuple[str, int], ...] = ()

    def bind(self, state: Mapping[str, torch.Tensor]) -> fx.GraphModule:
        """The runnable module: stage graphs read `state` (parameters are shared, not copied)."""
        held = nest(state)
        places = nn.ModuleDict({name: nn.Module() for name in self.modules})
        root = fx.GraphModule(places, self.graph, class_name=f"rank_{self.rank}")
        for name, graph in self.modules.items():  # after it, or it would compile each of them again
            root.add_module(name, bound(held, graph, name))
        return root


_OF_FX = frozenset(dir(fx.GraphModule(nn.Module(), fx.Graph()))) - frozenset(dir(nn.Module()))


def _place(name: str) -> str:
    """Where a graph module holds it: under its own name, unless fx has an attribute that is called so, or Python a word
    that cannot follow a dot."""
    plain = ".".join(f"{part} " if iskeyword(part) else part for part in name.split("."))
    return f"_model.{plain}" if plain.partition(".")[0] in _OF_FX else plain


def bound(state: SimpleNamespace, graph: fx.Graph, name: str) -> fx.GraphModule:
    """The graph as a module, with the state of a `nest`."""
    if any(_place(str(node.target)) != node.target for node in graph.find_nodes(op="get_attr")):
        graph = copy.deepcopy(graph)
        for node in graph.find_nodes(op="get_attr"):
            node.target = _place(str(node.target))
    made = fx.GraphModule(nn.Module(), fx.Graph(), class_name=name)
    vars(made).update(vars(state))
    made.graph = graph
    graph.owning_module = None  # a plan's graph outlives the weights that it is bound to
    return made


def nest(state: Mapping[str, torch.Tensor]) -> SimpleNamespace:
    """Each tensor under its dotted name, for `bound`; by plain objects, whose attributes Python reads without the
    search that a module's takes, ten times as long, for every weight of every call."""
    root = SimpleNamespace()
    for name, tensor in state.items():
        *parents, leaf = _place(name).split(".")
        at = root
        for part in parents:
            at = vars(at).setdefault(part, SimpleNamespace())
        vars(at)[leaf] = tensor
    return root


@dataclass(frozen=True)
class Traffic:
    """Bytes per step: on every directed channel, and of every kind. A message counts where it is sent."""

    messages: tuple[Message, ...]

    @property
    def channels(self) -> dict[tuple[int, int], int]:
        return {channel: sum(row.values()) for channel, row in self.by_channel_and_kind().items()}

    @property
    def kinds(self) -> dict[str, int]:
        return {kind: sum(m.num_bytes for m in self._parts() if m.kind == kind) for kind in KINDS}

    def _parts(self) -> list[Message]:
        return [part for message in self.messages for part in message.members or (message,)]

    @property
    def total_bytes(self) -> int:
        return sum(m.num_bytes for m in self.messages)

    @property
    def moved(self) -> str:
        """In words, by kind."""
        return ", ".join(f"{kind} {human_bytes(size)}" for kind, size in self.kinds.items() if size) or "none"

    def by_channel_and_kind(self) -> dict[tuple[int, int], dict[str, int]]:
        rows: dict[tuple[int, int], dict[str, int]] = {}
        for message in self._parts():
            row = rows.setdefault(message.channel, {})
            row[message.kind] = row.get(message.kind, 0) + message.num_bytes
        return dict(sorted(rows.items()))

    def __str__(self) -> str:
        kinds = [kind for kind in KINDS if self.kinds[kind]]
        lines = ["channel   " + "".join(f"{kind:>14}" for kind in kinds) + f"{'bytes':>14}"]
        for (src, dst), row in self.by_channel_and_kind().items():
            cells = "".join(f"{row.get(kind, 0):>14,}" for kind in kinds)
            lines.append(f"{src:>3} -> {dst:<3}" + cells + f"{sum(row.values()):>14,}")
        total = "".join(f"{self.kinds[kind]:>14,}" for kind in kinds)
        return "\n".join([*lines, "total     " + total + f"{self.total_bytes:>14,}"])
