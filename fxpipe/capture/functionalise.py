"""Rewrite in-place operations as functional ones.

    y = slice(x, 1, 0, 2)              y  = slice(x, 1, 0, 2)
    v = view(x, [-1])                  z  = mul(y, 2)
    z = mul_(y, 2)             ->      x1 = slice_scatter(x, z, 1, 0, 2)
    w = add(v, 1)                      v1 = view(x1, [-1])
                                       w  = add(v1, 1)

Tensors that share memory form a family: a root and views of views of it. A write goes up to the root through inverses
of the views (`fxpipe/capture/views.py`); any other member is made again from the new root when it is next read. What
has no inverse is refused, with its place.
"""

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import fx

from fxpipe.capture import private
from fxpipe.capture.views import inverse, shape_nodes, shows
from fxpipe.errors import CaptureError

aten = torch.ops.aten
# In-place operations whose functional form has another name; what only changes a tensor's storage has none.
_RENAMED = {"normal": "normal_functional"}
_REFUSED = ("set_", "resize_", "resize_as_")


@dataclass
class _Family:
    """All that shows one memory: how often it was written, and under which identities export traced it."""

    root: fx.Node
    version: int = 0
    storages: set[int] = field(default_factory=set)


@dataclass
class _Member:
    """A value: its present node, how it was made, and which version of its family's memory it shows."""

    node: fx.Node
    source: fx.Node  # as traced: operation, arguments, marks
    made: fx.Node  # its first copy, with the arguments' copies
    family: _Family
    parent: "_Member | None" = None
    version: int = 0


@dataclass(frozen=True)
class Overwritten:
    """A write that autograd does not see (no_grad, detach): `old` must not require grad when `new` is read."""

    old: fx.Node
    new: fx.Node
    write: fx.Node


@dataclass(frozen=True)
class Rewritten:
    """One of the model's own tensors that is written to: its placeholder, what it holds after each write, and where it
    is written first."""

    placeholder: fx.Node
    values: list[fx.Node]
    write: fx.Node

    @property
    def state(self) -> str:
        """Its name."""
        return str(self.placeholder.meta["state"])

    @property
    def new(self) -> fx.Node:
        """What it holds in the end."""
        return self.values[-1]


class Functional(NamedTuple):
    """A graph without writes in place: those that autograd does not see, and those into the model's own tensors."""

    graph: fx.Graph
    overwritten: list[Overwritten]
    rewritten: list[Rewritten]


def run(graph: fx.Graph) -> Functional:
    """The functional form of `graph`."""
    rewriter = _Rewriter()
    for node in graph.nodes:
        rewriter.visit(node)
    return Functional(rewriter.graph, rewriter.overwritten, [*rewriter.rewritten.values()])


def refuse_hidden_writes(overwritten: Iterable[Overwritten]) -> None:
    """Refuse writes under no_grad, or through a detached view, into a value whose gradient goes on flowing.

    One device keeps the gradient as if nothing had been written, which no functional graph says.
    """
    for write in overwritten:
        if write.new.users and write.old.meta["requires_grad"]:
            raise refusal(
                write.write,
                "it writes under no_grad, or through a detached tensor, into a value that requires grad; "
                "write out of place, for instance x + (new - x).detach()",
            )


class _Rewriter:
    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.members: dict[fx.Node, _Member] = {}
        self.overwritten: list[Overwritten] = []
        self.rewritten: dict[fx.Node, Rewritten] = {}  # by the tensor's placeholder, as traced

    def visit(self, node: fx.Node) -> None:
        target = node.target
        if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
            if torch.Tag.inplace_view in target.tags and private.packet_name(node.target) not in _REFUSED:
                node.target = _functional_target(node)
            elif private.packet_name(node.target) == "requires_grad_":
                raise refusal(node, "gradients inside the forward pass are not supported")
            else:
                self._write(node)
                return
        copy = self._copy(node)
        parent = self._parent(node)
        family = parent.family if parent is not None else _Family(node)
        family.storages |= private.storages(node)
        self.members[node] = _Member(copy, node, copy, family, parent, family.version)

    def _parent(self, node: fx.Node) -> _Member | None:
        """The value whose memory a node's result shows, if any: of a list of views (split, unbind), what was cut."""
        made_by = cast(fx.Node, node.args[0]) if node.target is operator.getitem else node
        if made_by.op != "call_function":
            return None
        arguments = [self.members[argument] for argument in made_by.all_input_nodes]
        shown = (m for m in arguments if shows(node, made_by, m.source, m.family.storages, m.family.root))
        return next(shown, None)

    def _copy(self, node: fx.Node) -> fx.Node:
        copy = self.graph.node_copy(node, lambda n: self._read(self.members[n]))
        copy.meta = dict(node.meta)
        return copy

    def _read(self, member: _Member) -> fx.Node:
        """The node that shows the member's present value."""
        if member.version != member.family.version:
            assert member.parent is not None
            if member.source.target is operator.getitem:
                pieces = self.members[member.source.args[0]]  # type: ignore[index]
                pieces.node = self._copy(pieces.source)
            member.node = self._copy(member.source)
            member.version = member.family.version
        return member.node

    def _write(self, node: fx.Node) -> None:
        written = written_by(node)
        member = self.members[written]
        value = self._functional(node, written)
        root = member.family.root
        is_own = root.meta.get("kind") in ("parameter", "buffer")
        _refuse_foreign(node, root)
        self.members[node] = member  # an in-place operation's result is what it wrote to
        hidden = bool(node.meta.get("no_grad"))
        lineage: list[_Member] = [member]
        while (above := lineage[-1].parent) is not None:
            lineage.append(above)
        before = [self._read(one) for one in lineage]
        member.family.version += 1
        for index, (one, old) in enumerate(zip(lineage, before, strict=True)):
            if index:
                value, hidden = self._up(node, lineage[index - 1], old, value, hidden)
            if hidden and not is_own:
                self.overwritten.append(Overwritten(old, value, node))
            if not is_own or one.parent is None:  # views of a parameter are made again, with its gradient
                one.node, one.version = value, member.family.version
        if is_own:
            first = Rewritten(self.members[root].made, [], node)
            self.rewritten.setdefault(root, first).values.append(value)

    def _up(self, write: fx.Node, view: _Member, base: fx.Node, value: fx.Node, hidden: bool) -> tuple[fx.Node, bool]:
        """The base's new value, from the view's; and whether autograd sees the way."""
        source = view.source
        if source.target is aten.detach.default or source.meta.get("no_grad"):
            hidden = True
        new = inverse(self.graph, view.made, base, value)
        if new is None:
            why = f"a write through the view {source.target} has no functional form; write out of place"
            raise refusal(write, why)
        if new is value:
            new = self.graph.call_function(aten.alias.default, (value,))
        new.meta = {"path": write.meta["path"], "val": base.meta["val"]} | ({"no_grad": True} if hidden else {})
        return new, hidden

    def _functional(self, node: fx.Node, written: fx.Node) -> fx.Node:
        schema = node.target._schema  # type: ignore[union-attr]
        outs = {a.name for a in schema.arguments if a.is_out}
        given = (node.args, {k: v for k, v in node.kwargs.items() if k not in outs})
        args, kwargs = fx.map_arg(given, lambda n: self._read(self.members[n]))
        target, args, kwargs = self._out_of_place(node, args, kwargs)
        new = self.graph.call_function(target, args, kwargs)
        # In-place operations are never cast by autocast, their functional forms may be.
        new.meta = {key: value for key, value in node.meta.items() if key != "autocast"}
        wanted = written.meta["val"]
        value = private.fake_result(target, new.args, new.kwargs, wanted)
        if value.shape != wanted.shape:
            raise refusal(node, f"it changes the shape of its output from {list(wanted.shape)}; write out of place")
        new.meta["val"] = value
        if value.dtype != wanted.dtype:
            cast = self.graph.call_function(aten.to.dtype, (new, wanted.dtype))
            cast.meta = dict(new.meta)
            new = cast
        new.meta["val"] = wanted
        return new

    def _out_of_place(self, node: fx.Node, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        """The functional call that gives what an in-place call leaves in its first argument."""
        if node.target is aten.copy_.default:
            shape = shape_nodes(self.graph, args[0])
            return aten.expand.default, (args[1], shape), {}
        if node.target is aten.zero_.default:
            return aten.zeros_like.default, args, kwargs
        if node.target is aten.index_put_.default and not kwargs and len(args) == 3 and len(args[1]) == 1:
            (mask,) = args[1]
            if mask.meta["val"].dtype == torch.bool and _is_one_for_all(args[0], mask, args[2]):
                return aten.where.self, (self._trailing(mask, args[0]), args[2], args[0]), {}
        if node.target is aten.fill_diagonal_.default and args[0].meta["val"].ndim == 2 and len(args) == 2:
            diagonal = self._made(aten.diagonal.default, (args[0],), args[0])
            value = self._made(aten.full_like.default, (diagonal, args[1]), diagonal)
            return aten.diagonal_scatter.default, (args[0], value), {}
        target = _functional_target(node)
        return target, _with_defaults(node.target, target, args, kwargs), kwargs

    def _trailing(self, mask: fx.Node, like: fx.Node) -> fx.Node:
        """A mask of the leading dimensions, with dimensions of one for the others."""
        for _ in range(like.meta["val"].ndim - mask.meta["val"].ndim):
            mask = self._made(aten.unsqueeze.default, (mask, -1), mask)
        return mask

    def _made(self, target: Any, args: Any, of: fx.Node) -> fx.Node:
        """A new node, marked as `of` is."""
        node = self.graph.call_function(target, args)
        node.meta = {**of.meta, "val": private.fake_result(target, args, {}, of.meta["val"])}
        return node


def _is_one_for_all(into: fx.Node, mask: fx.Node, values: fx.Node) -> bool:
    """Whether `into[mask] = values` has the same entries wherever the mask is true."""
    value, below = values.meta["val"], into.meta["val"].ndim - mask.meta["val"].ndim
    return value.ndim <= below or (value.ndim == below + 1 and type(value.shape[0]) is int and value.shape[0] == 1)


def written_by(node: fx.Node) -> fx.Node:
    """What an in-place operation writes into.

    Raises:
        CaptureError: several tensors, or none that is known.
    """
    schema = node.target._schema  # type: ignore[union-attr]
    names = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    given = private.arguments(node)
    if len(names) != 1 or not isinstance(given.get(names[0]), fx.Node) or private.packet_name(node.target) in _REFUSED:
        raise refusal(node, "no functional form of this in-place operation is known; write out of place")
    return cast(fx.Node, given[names[0]])


def _functional_target(node: fx.Node) -> Any:
    """The overload that takes the same arguments and writes to none of them."""
    name = private.packet_name(node.target)
    name = name.replace("__i", "__") if name.startswith("__i") else name.removesuffix("_")
    packet = getattr(aten, _RENAMED.get(name, name), None)
    wanted = [str(a.type) for a in node.target._schema.arguments if not a.is_out]  # type: ignore[union-attr]
    for overload in packet.overloads() if packet is not None else ():
        found = getattr(packet, overload)
        if not found._schema.is_mutable and [str(a.type) for a in found._schema.arguments] == wanted:
            return found
    raise refusal(node, "no functional form of this in-place operation is known; write out of place")


def _with_defaults(inplace: Any, functional: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """The arguments, with those that only the in-place form may leave out (`bernoulli_`'s p)."""
    defaults = {a.name: a.default_value for a in inplace._schema.arguments if a.has_default_value()}
    needed = [a for a in functional._schema.arguments[len(args) :] if not a.has_default_value()]
    return (*args, *(defaults[a.name] for a in needed if a.name not in kwargs))


def _refuse_foreign(node: fx.Node, root: fx.Node) -> None:
    """Refuse a write into what outlives the step, and is none of the model's parameters and buffers."""
    kind = root.meta.get("kind")
    if kind == "input":
        raise refusal(node, f"it writes into the input {root.meta['input']!r} in place; clone it first")
    if kind == "given":
        raise refusal(node, f"the backward of {root.meta['state']} writes into what it is given; clone it first")
    if kind == "constant":
        raise refusal(
            node,
            f"it changes the constant {root.meta['state']!r}, which is no buffer; register it as one, or keep what "
            "changes outside forward",
        )


def refusal(node: fx.Node, why: str) -> CaptureError:
    return CaptureError(f"{private.where(node)}: {node.target}: {why}")
