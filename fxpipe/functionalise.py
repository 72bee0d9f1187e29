"""Rewrite in-place operations as functional ones.

    y = slice(x, 1, 0, 2)              y  = slice(x, 1, 0, 2)
    v = view(x, [-1])                  z  = mul(y, 2)
    z = mul_(y, 2)             ->      x1 = slice_scatter(x, z, 1, 0, 2)
    w = add(v, 1)                      v1 = view(x1, [-1])
                                       w  = add(v1, 1)

Tensors that share memory form a family: a root and views of views of it. A write goes up to the root through inverses of
the views (`fxpipe/views.py`); any other member is made again from the new root when it is next read. Which values share
memory is read from the traced tensors. What has no inverse is refused, with its place.
"""

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxpipe import private
from fxpipe.errors import CaptureError
from fxpipe.views import inverse

aten = torch.ops.aten
# In-place operations whose functional form has another name; what only changes a tensor's storage has none.
_RENAMED = {"zero": "zeros_like", "normal": "normal_functional"}
_REFUSED = ("set_", "resize_", "resize_as_")
_DETACHES = {aten.detach.default, aten.detach_.default}


@dataclass
class _Member:
    """A value that may share memory: its present node, which version of the root that node shows, how it was made."""

    node: fx.Node
    source: fx.Node  # as traced: operation, arguments, marks
    made: fx.Node  # its first copy, with the arguments' copies
    parent: "_Member | None" = None
    root_version: list[int] = field(default_factory=lambda: [0])  # one list for the whole family
    version: int = 0


@dataclass(frozen=True)
class Overwritten:
    """A write that autograd does not see (no_grad, detach): `old` must not require grad when `new` is read."""

    old: fx.Node
    new: fx.Node
    write: fx.Node


def run(graph: fx.Graph) -> tuple[fx.Graph, list[Overwritten]]:
    """The functional form of `graph`, and its writes that autograd does not see."""
    rewriter = _Rewriter()
    for node in graph.nodes:
        rewriter.visit(node)
    return rewriter.graph, rewriter.overwritten


def refuse_hidden_writes(overwritten: Iterable[Overwritten]) -> None:
    """Refuse writes under no_grad, or through a detached view, into a value whose gradient goes on flowing.

    One device keeps the gradient as if nothing had been written, which no functional graph says.
    """
    for write in overwritten:
        if write.new.users and write.old.meta["requires_grad"]:
            raise _refusal(
                write.write,
                "it writes under no_grad, or through a detached tensor, into a value that requires grad; "
                "write out of place, for instance x + (new - x).detach()",
            )


class _Rewriter:
    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.members: dict[fx.Node, _Member] = {}
        self.overwritten: list[Overwritten] = []

    def visit(self, node: fx.Node) -> None:
        target = node.target
        if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
            if torch.Tag.inplace_view in target.tags and _name(node) not in _REFUSED:
                node.target = _functional_target(node)
            elif _name(node) == "requires_grad_":
                raise _refusal(node, "gradients inside the forward pass are not supported")
            else:
                self._write(node)
                return
        copy = self._copy(node)
        parent = self._parent(node)
        if parent is None:
            self.members[node] = _Member(copy, node, copy)
        else:
            versions = parent.root_version
            self.members[node] = _Member(copy, node, copy, parent, versions, versions[0])

    def _parent(self, node: fx.Node) -> _Member | None:
        """The argument whose memory a node's result shows, if any."""
        if node.target is operator.getitem:
            pieces = self.members[node.args[0]]  # type: ignore[index]
            return pieces if pieces.parent is not None else None
        if node.op != "call_function" or node.target is aten.lift_fresh_copy.default:
            return None
        shared = (argument for argument in node.all_input_nodes if private.same_memory(argument, node))
        return next((self.members[argument] for argument in shared), None)

    def _copy(self, node: fx.Node) -> fx.Node:
        copy = self.graph.node_copy(node, lambda n: self._read(self.members[n]))
        copy.meta = dict(node.meta)
        return copy

    def _read(self, member: _Member) -> fx.Node:
        """The node that shows the member's present value."""
        if member.version != member.root_version[0]:
            assert member.parent is not None
            self._read(member.parent)
            member.node = self._copy(member.source)
            member.version = member.root_version[0]
        return member.node

    def _write(self, node: fx.Node) -> None:
        written = _written(node)
        member = self.members[written]
        value = self._functional(node, written)
        _refuse_foreign(node, member)
        member.root_version[0] += 1
        version = member.root_version[0]
        hidden = bool(node.meta.get("no_grad"))
        # An in-place operation's result is what it wrote to.
        self.members[node] = member
        below = None
        while member is not None:
            if below is not None:
                old = self._stale(member, version)
                value, hidden = self._up(node, below, old, value, hidden)
            if hidden:
                self.overwritten.append(Overwritten(member.node, value, node))
            member.node, member.version = value, version
            below, member = member, _above(member)  # type: ignore[assignment]

    def _stale(self, member: _Member, version: int) -> fx.Node:
        """The member's value before the write of `version`."""
        member.root_version[0] = version - 1
        node = self._read(member)
        member.root_version[0] = version
        return node

    def _up(
        self, write: fx.Node, view: _Member, base: fx.Node, value: fx.Node, hidden: bool
    ) -> tuple[fx.Node, bool]:
        """The base's new value, from the view's; and whether autograd sees the way."""
        source = view.source
        if source.target in _DETACHES or source.meta.get("no_grad"):
            hidden = True
        new = inverse(self.graph, view.made, base, value)
        if new is None:
            raise _refusal(write, f"a write through the view {source.target} has no functional form; write out of place")
        if new is value:
            new = self.graph.call_function(aten.alias.default, (value,))
        marks = {key: write.meta[key] for key in ("path", "no_grad") if key in write.meta}
        new.meta = {**marks, **({"no_grad": True} if hidden else {}), "val": base.meta["val"]}
        return new, hidden

    def _functional(self, node: fx.Node, written: fx.Node) -> fx.Node:
        target = _functional_target(node)
        schema = node.target._schema  # type: ignore[union-attr]
        outs = {a.name for a in schema.arguments if a.is_out}
        kwargs = {k: v for k, v in node.kwargs.items() if k not in outs}
        args = node.args[:1] if target is aten.zeros_like.default else node.args
        load = lambda n: self._read(self.members[n])  # noqa: E731
        new = self.graph.call_function(target, fx.map_arg(args, load), fx.map_arg(kwargs, load))
        # In-place operations are never cast by autocast, their functional forms may be.
        new.meta = {key: value for key, value in node.meta.items() if key != "autocast"}
        wanted = written.meta["val"]
        value = private.fake_result(target, new.args, new.kwargs, wanted)
        if value.shape != wanted.shape:
            raise _refusal(node, f"it changes the shape of its output from {list(wanted.shape)}; write out of place")
        new.meta["val"] = value
        if value.dtype != wanted.dtype:
            cast = self.graph.call_function(aten.to.dtype, (new, wanted.dtype))
            cast.meta = dict(new.meta)
            new = cast
        new.meta["val"] = wanted
        return new


def _above(member: _Member) -> "_Member | None":
    """The member that a write goes up to: a piece of a list of views (split, unbind) belongs to what was cut."""
    parent = member.parent
    return parent.parent if parent is not None and member.source.target is operator.getitem else parent


def _written(node: fx.Node) -> fx.Node:
    schema = node.target._schema  # type: ignore[union-attr]
    names = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    given = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | dict(node.kwargs)
    if len(names) != 1 or not isinstance(given.get(names[0]), fx.Node) or _name(node) in _REFUSED:
        raise _refusal(node, "no functional form of this in-place operation is known; write out of place")
    return given[names[0]]  # type: ignore[return-value]


def _name(node: fx.Node) -> str:
    return str(node.target.overloadpacket.__name__)  # type: ignore[union-attr]


def _functional_target(node: fx.Node) -> Any:
    """The overload that takes the same arguments and writes to none of them."""
    name = _name(node).removesuffix("_")
    packet = getattr(aten, _RENAMED.get(name, name), None)
    if name == "zero":
        return aten.zeros_like.default
    wanted = [str(a.type) for a in node.target._schema.arguments if not a.is_out]  # type: ignore[union-attr]
    for overload in packet.overloads() if packet is not None else ():
        found = getattr(packet, overload)
        if not found._schema.is_mutable and [str(a.type) for a in found._schema.arguments] == wanted:
            return found
    raise _refusal(node, "no functional form of this in-place operation is known; write out of place")


def _refuse_foreign(node: fx.Node, member: _Member) -> None:
    """Refuse a write into what outlives the step."""
    while member.parent is not None:
        member = member.parent
    root = member.source
    if root.op != "placeholder":
        return
    if root.meta["kind"] == "input":
        raise _refusal(node, f"it writes into the input {root.meta['input']!r} in place; clone it first")
    name = root.meta.get("state", root.name)
    advice = "call .eval() on a normalisation with running statistics, or keep state outside forward"
    raise _refusal(
        node, f"it changes the {root.meta['kind']} {name!r}, which micro-batches would change in another way; {advice}"
    )


def _refusal(node: fx.Node, why: str) -> CaptureError:
    path = node.meta.get("path") or "(the model itself)"
    return CaptureError(f"module {path}: {node.target}: {why}")
