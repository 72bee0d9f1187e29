"""The block graph: the backbone as an ordered list of blocks, frozen components beside it, and the values between.

    component text_encoder              49 nodes   3.7%  cond 224 B -> 1, 3
      0 unet.conv_in .. down_blocks.0   31 nodes  12.0%  main 2.0 KiB, skip 2.0 KiB -> 3, cond 128 B -> 1-3
      1 unet.mid_block                  22 nodes  ...

Terms: a *block* is a run of backbone operations that is never cut; a *component* is a group of frozen operations; a
*local* operation is cheap and needs no trained weight, so whoever reads its result computes it; an *edge* is a tensor
that crosses.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import fx

from fxpipe.capture.sizes import evaluate

_WIDTH = 56  # of a name in a listing

Owner = int | str
"""Who computes a value: a block's index or a component's name."""

EdgeKind = Literal["main", "skip", "conditioning"]


@dataclass(frozen=True)
class Block:
    """Backbone operations by node name, in the order they run."""

    index: int
    name: str
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Component:
    """Frozen operations by node name, in the order they run; `depends` names the components whose values they read."""

    name: str
    nodes: tuple[str, ...]
    depends: tuple[str, ...]


@dataclass(frozen=True)
class Edge:
    """A tensor that crosses, by its node's name.

    `kinds` holds one kind per consumer: a ResNet block's output is *main* for the next block, *skip* for the decoder.
    `bytes_per_sample` counts one sample, or the whole tensor where not `batched`.
    """

    name: str
    producer: Owner
    consumers: tuple[Owner, ...]
    kinds: tuple[EdgeKind, ...]
    bytes_per_sample: int
    batched: bool
    requires_grad: bool

    def num_bytes(self, batch_size: int) -> int:
        return self.bytes_per_sample * (batch_size if self.batched else 1)

    def kind_for(self, consumer: Owner) -> EdgeKind:
        return self.kinds[self.consumers.index(consumer)]


@dataclass(frozen=True)
class Fault:
    """What is wrong, and in whose line of the printed block graph (None: the graph as a whole)."""

    place: Owner | None
    message: str


@dataclass(frozen=True)
class BlockGraph:
    """Blocks, components and local operations hold every operation of the capture; edges every tensor between owners.

    `block_seconds` and `component_seconds` are what the analysis balanced by; `unused` are weights nothing reads. The
    first `first_pass` blocks run a backbone under no_grad whose prediction a second pass is fed. `kept` are values that
    the step returns, and ranks keep to its end.
    Placeholders (weights, inputs, draws) are no edges: every rank can make its own.
    """

    blocks: tuple[Block, ...]
    components: tuple[Component, ...]
    local: frozenset[str]
    edges: tuple[Edge, ...]
    block_seconds: tuple[float, ...]
    component_seconds: tuple[float, ...]
    unused: tuple[str, ...]
    first_pass: int = 0
    kept: tuple[str, ...] = ()

    @cached_property
    def owners(self) -> Mapping[str, Owner]:
        """Node name to the block or component that computes it; local operations have none."""
        owners: dict[str, Owner] = {name: c.name for c in self.components for name in c.nodes}
        return owners | {name: b.index for b in self.blocks for name in b.nodes}

    def inputs(self, owner: Owner) -> tuple[Edge, ...]:
        return tuple(e for e in self.edges if owner in e.consumers)

    def outputs(self, owner: Owner) -> tuple[Edge, ...]:
        return tuple(e for e in self.edges if e.producer == owner)

    def __str__(self) -> str:
        return self.text()

    def text(self, faults: Iterable[Fault] = ()) -> str:
        """The table, with each fault shown in its line."""
        faults = tuple(faults)
        lines = [self._head() + _here(faults, None)]
        total = sum(self.block_seconds) or 1.0
        rows: list[tuple[Owner, str, int, float]] = [
            (c.name, f"component {_elide(c.name)}", len(c.nodes), seconds)
            for c, seconds in zip(self.components, self.component_seconds, strict=True)
        ]
        for b, seconds in zip(self.blocks, self.block_seconds, strict=True):
            rows.append((b.index, f"{b.index:3} {_elide(b.name)}", len(b.nodes), seconds))
        width = max(len(label) for _, label, _, _ in rows)
        for owner, label, num_nodes, seconds in rows:
            line = f"{label:<{width}} {num_nodes:4} nodes {seconds / total:6.1%}  {self._sends(owner)}".rstrip()
            lines.append(line + _here(faults, owner))
        return "\n".join(lines)

    def _head(self) -> str:
        head = f"block graph: {len(self.blocks)} blocks, {len(self.components)} components, {len(self.edges)} edges"
        unused = f"; {len(self.unused)} weights are never read" if self.unused else ""
        return f"{head}, {len(self.local)} local operations{unused}"

    def _sends(self, owner: Owner) -> str:
        """What an owner sends, per sample: equal kinds to equal places summed."""
        sums: dict[tuple[EdgeKind, tuple[Owner, ...]], int] = {}
        for edge in self.outputs(owner):
            for kind in ("main", "skip", "conditioning"):
                to = tuple(c for c, k in zip(edge.consumers, edge.kinds, strict=True) if k == kind)
                if to:
                    sums[kind, to] = sums.get((kind, to), 0) + edge.bytes_per_sample
        parts = []
        for (kind, to), num_bytes in sums.items():
            next_door = isinstance(owner, int) and to == (owner + 1,)
            where = "" if kind == "main" and next_door else f" -> {ranges(to)}"
            parts.append(f"{'cond' if kind == 'conditioning' else kind} {human_bytes(num_bytes)}{where}")
        return ", ".join(parts)


def _here(faults: Sequence[Fault], place: Owner | None) -> str:
    return "".join(f"  <-- HERE: {fault.message}" for fault in faults if fault.place == place)


def _elide(name: str) -> str:
    return name if len(name) <= _WIDTH else "…" + name[1 - _WIDTH :]


def human_bytes(num_bytes: float) -> str:
    """`2.0 KiB`; below 1 KiB `128 B`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"


def ranges(owners: Iterable[Owner]) -> str:
    """`text, 1-3, 7` for `("text", 1, 2, 3, 7)`."""
    runs: list[list[int]] = []
    names = []
    for owner in owners:
        if isinstance(owner, str):
            names.append(owner)
        elif runs and owner == runs[-1][-1] + 1:
            runs[-1].append(owner)
        else:
            runs.append([owner])
    return ", ".join([*names, *(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)])


def is_size(value: Any) -> bool:
    """Whether a node's value is a number made from shapes: anyone who knows the micro-batch's size can compute it."""
    return isinstance(value, int | float | torch.SymInt | torch.SymFloat | torch.SymBool)


_SIZES = (2, 3, 10007)  # a prime beyond what batches are divided by: of 3, max(1, B // 2) is 1 still


def tensor_bytes(value: Any) -> tuple[int, bool] | None:
    """(bytes, batched) of a tensor whose size is proportional to the batch, or has nothing to do with it.

    None for what cannot be an edge: no tensor, or a tensor that grows otherwise (a batch-by-batch similarity).
    """
    if not isinstance(value, torch.Tensor):
        return None
    one, *at = (bytes_at(value, batch_size) for batch_size in (1, *_SIZES))
    if at == [one] * len(at):
        return one, False
    return (one, True) if at == [size * one for size in _SIZES] else None


def bytes_at(value: torch.Tensor, batch_size: int) -> int:
    num_bytes = value.dtype.itemsize
    for size in value.shape:
        num_bytes *= evaluate(size.node.expr, batch_size) if isinstance(size, torch.SymInt) else size
    return num_bytes


def crossing(nodes: Iterable[fx.Node], owners: Mapping[str, Owner]) -> dict[str, tuple[Owner, ...]]:
    """Every value that some owner other than its producer reads: its name, and these owners in order."""
    found = {}
    for node in nodes:
        if node.name not in owners or is_size(node.meta["val"]):
            continue
        readers = {owners[u.name] for u in node.users if u.name in owners and not is_size(u.meta["val"])}
        readers -= {owners[node.name]}
        if readers:
            found[node.name] = tuple(sorted(readers, key=lambda o: (isinstance(o, int), o)))
    return found
