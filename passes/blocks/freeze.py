"""Freeze: which operations train, which only feed those that train, and which are too cheap to send.

    z  = conv2d(x, vae.weight)      frozen     no trained weight behind it, some frozen weight: component "vae"
    a  = index(ac, t)               local      inputs, draws, buffers only: recomputed wherever it is needed
    n  = add(mul(a, z), draw_0)     frozen     glue on a frozen value stays with its producer
    y  = conv2d(n, unet.weight)     backbone   a trained weight is behind it
    d  = detach(y)                  backbone   without gradient, but after training weights all the same
    b  = sym_size(y, 0)             local      a number every rank can work out from its micro-batch
    p  = detach(z)                  backbone   what forward returns beside the loss, and what only that needs

Dataflow alone decides. A weight that requires grad, but is read under `no_grad` only, is not trained. What is made of
frozen weights only (a transposed weight) is local too, unless it is a large product; what is made of trained weights
only (a reshaped weight, a LoRA product) is backbone: where its one reader is far it moves there, and where two blocks
read it, it crosses as an edge without a batch, whose gradient comes back like any other.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch
from torch import fx

from fxpipe.capture import Capture
from fxpipe.capture.sizes import concrete
from fxpipe.errors import CompileError
from fxpipe.plan.block_graph import Component, is_size
from passes.blocks.paths import common, label, parts

_PRODUCTS = ("linear", "bilinear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "tensordot")
_PRODUCT_PREFIXES = ("conv", "scaled_dot_product", "_scaled_dot_product", "fft_")

# A message costs some 10 microseconds before its first byte; below this many multiply-adds computing again is faster.
_LARGE_PRODUCT = 2**20


@dataclass(frozen=True)
class Freeze:
    """Node names, each in trace order. Every operation is in exactly one of the three."""

    backbone: tuple[str, ...]
    frozen: tuple[str, ...]
    local: frozenset[str]
    components: tuple[Component, ...]


def freeze(capture: Capture) -> Freeze:
    """Classify every operation and group the frozen ones.

    Raises:
        CompileError: no trained weight reaches the loss.
    """
    kinds = _classify(capture)
    if kinds.get(capture.result.name) != "backbone" or not capture.result.meta["requires_grad"]:
        raise CompileError(
            f"none of the {len(capture.trainable)} trainable parameters that are read reaches the loss: nothing to "
            "train; call .requires_grad_() on what should learn, and use it outside of torch.no_grad()"
        )
    named = {kind: tuple(n for n, k in kinds.items() if k == kind) for kind in ("backbone", "frozen", "local")}
    return Freeze(named["backbone"], named["frozen"], frozenset(named["local"]), components(capture, named["frozen"]))


def _classify(capture: Capture) -> dict[str, str]:
    facts: dict[fx.Node, set[str]] = {}
    kinds: dict[str, str] = {}
    for node in capture.graph.nodes:
        if node.op == "placeholder":
            facts[node] = _origin(node)
        elif node.op == "call_function" and is_size(node.meta["val"]):
            kinds[node.name] = "local"
        elif node.op == "call_function":
            facts[node] = set().union(*(facts.get(a, ()) for a in node.all_input_nodes))
            kinds[node.name] = _kind(node, facts[node])
            if "output" in node.meta or (node.meta.get("extra") and kinds[node.name] == "frozen"):
                kinds[node.name] = "backbone"
            facts[node].add(kinds[node.name])
    return kinds


def _origin(node: fx.Node) -> set[str]:
    kind = node.meta["kind"]
    if kind == "parameter":
        learns = node.meta["requires_grad"] and any(user.meta["requires_grad"] for user in node.users)
        return {"weight", "backbone"} if learns else {"weight"}
    return {"data"} if kind in ("input", "draw") else set()


def _kind(node: fx.Node, facts: set[str]) -> str:
    if "backbone" in facts:
        return "backbone"
    if "frozen" in facts or {"weight", "data"} <= facts or _is_large_product(node):
        return "frozen"
    return "local"


def _is_large_product(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or not isinstance(node.meta["val"], torch.Tensor):
        return False
    name = node.target.overloadpacket.__name__
    operands = [a.meta["val"] for a in node.all_input_nodes if isinstance(a.meta["val"], torch.Tensor)]
    if not operands or not (name in _PRODUCTS or name.startswith(_PRODUCT_PREFIXES)):
        return False
    length = max((int(concrete(o.shape[-1], 1)) for o in operands if o.ndim), default=1)
    return bool(prod(concrete(node.meta["val"].shape, 1)) * length > _LARGE_PRODUCT)


def components(capture: Capture, frozen: Iterable[str]) -> tuple[Component, ...]:
    """Frozen operations by top-level module, glue with its producer, no cycles between the groups.

    A module whose later part reads what another component made of its earlier part becomes two components.
    """
    wanted = set(frozen)
    nodes = [n for n in capture.graph.nodes if n.name in wanted]
    depth = _wrapper_depth(capture)
    group_of: dict[fx.Node, str] = {}
    depends: dict[str, set[str]] = {}
    for node in nodes:
        sources = [group_of[a] for a in node.all_input_nodes if a in group_of]
        name = _module(node, depth) or (sources[-1] if sources else _reader(node, depth))
        while any(_reaches(depends, s, name) for s in sources if s != name):
            name += "+"
        group_of[node] = name
        depends.setdefault(name, set()).update(s for s in sources if s != name)
    order = _ordered(depends)
    members = {g: [n for n in nodes if group_of[n] == g] for g in order}
    names = _names(capture, members, depth)
    return tuple(
        Component(names[g], tuple(n.name for n in members[g]), tuple(names[d] for d in order if d in depends[g]))
        for g in order
    )


def _wrapper_depth(capture: Capture) -> int:
    """How many modules merely wrap the whole model."""
    paths = {parts(n.meta["path"]) for n in capture.graph.nodes if n.op == "call_function" and n.meta["path"]}
    return min((common(p, q) for p, q in pairwise(paths)), default=0)


def _module(node: fx.Node, depth: int) -> str:
    steps = parts(node.meta["path"])
    return ".".join((*steps[:depth], steps[depth].split(".")[0])) if len(steps) > depth else ""


def _reader(node: fx.Node, depth: int) -> str:
    """For glue that reads no frozen value: the first module that reads it."""
    return next((m for user in node.users if (m := _module(user, depth))), "frozen")


def _reaches(depends: Mapping[str, set[str]], group: str, goal: str) -> bool:
    return group == goal or any(_reaches(depends, d, goal) for d in depends[group])


def _ordered(depends: Mapping[str, set[str]]) -> list[str]:
    order: list[str] = []
    while len(order) < len(depends):
        order.append(next(g for g in depends if g not in order and depends[g] <= set(order)))
    return order


def _names(capture: Capture, members: Mapping[str, Sequence[fx.Node]], depth: int) -> dict[str, str]:
    """A module frozen as a whole lends its name; of one that trains in part, the name says which part."""
    trained = {n.meta["path"] for n in capture.graph.nodes if n.op == "call_function" and n.meta["requires_grad"]}
    names: dict[str, str] = {}
    for group, nodes in members.items():
        module = group.rstrip("+")
        inside = [p for p in trained if p == module or p.startswith(f"{module}.")]
        paths = [n.meta["path"] for n in nodes if _module(n, depth) == module]
        name = label(paths[0], paths[-1], inside) if inside and paths else module
        while name in names.values():
            name += "+"
        names[group] = name
    return names
