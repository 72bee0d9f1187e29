"""What forward writes into the model's own parameters and buffers: once in a step.

    with no_grad(): w.copy_(unit(w))       update: w = unit(w), before the step
    y = linear(x, w)                       y = linear(x, w)
    u.copy_(power(w, u))                   update: u = power(w, u), after the step
    return y / sigma(w, u)                 return y / sigma(w, power(w, u))
    n.add_(1)                              update: n = add(n, 1), after the step
    m.lerp_(x.mean(0), 0.1)                output: seen = mean(x, 0);  update: m = lerp(m, seen, 0.1), after the step

The gradient of a trained parameter is that of what forward reads, so a parameter that it reads as written is written
before the step. All else is written after it, and computed in it wherever forward reads what it has written. What a
buffer is made of beside the model's own tensors, of the batch or drawn, is what the step returns as outputs of its own.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn

from fxpipe.capture import private
from fxpipe.capture.functionalise import Rewritten, refusal
from fxpipe.capture.randomness import is_random
from fxpipe.capture.reach import reached
from fxpipe.capture.weights import by_memory
from fxpipe.errors import CaptureError

_LATER = "; do that after the optimizer's step"
_OUTSIDE = "; make it a buffer (register_buffer), or keep it outside forward (return what it is made of)"
OUTPUT = "output"
"""The kind of a placeholder that stands for an output."""
_SEEN = "<seen %d>"  # no name that a mapping of logged values has
_CHECKPOINT = "within a checkpoint, whose backward would write again; leave that out, and compile with recompute=True"


@dataclass(frozen=True)
class Update:
    """The new value of the parameter or buffer `name`: `graph` returns it, and has what it reads as placeholders: the
    model's own tensors, and outputs of the step.

    `is_first`: it is written before the step, which reads it; otherwise after it.
    """

    name: str
    graph: fx.Graph
    is_first: bool

    @property
    def seen(self) -> tuple[str, ...]:
        """The outputs that it is made of."""
        placeholders = self.graph.find_nodes(op="placeholder")
        return tuple(node.meta["output"] for node in placeholders if node.meta["kind"] == OUTPUT)


def taken_out(
    graph: fx.Graph, rewritten: Sequence[Rewritten], tensors: Mapping[str, str]
) -> tuple[tuple[Update, ...], tuple[str, ...]]:
    """Take the writes of a functional graph out of it, whose nodes know whether they require grad; `tensors` are the
    names of its placeholders.

    Returns: the updates, and the names of the outputs that they are made of, which the graph returns last.

    Raises:
        CaptureError: what is written cannot be written once in a step, or is read both before and after.
    """
    for one in rewritten:
        _require_of_own(one)
    (output,) = graph.find_nodes(op="output")
    loss = output.args[0][0] if isinstance(output.args[0], tuple) else output.args[0]
    needed = {*reached([loss], lambda node: [one for one in node.all_input_nodes if one.meta["requires_grad"]])}
    for one in rewritten:
        _require_no_longer_needed(one, needed)
    trained = {one.new: one for one in rewritten if one.placeholder.meta["requires_grad"]}
    ends = [output, *(one.new for one in rewritten if one.new not in trained)]
    read = set(reached(ends, lambda node: () if node in trained else node.all_input_nodes))
    for new, one in trained.items():
        if not read.isdisjoint(one.values[:-1]) or {new, one.placeholder} <= read:
            why = ", which forward also reads as it was before, or between two writes: write it once, before it is read"
            raise refusal(one.write, f"it changes the parameter {one.state!r}{why}")
    places = {node: place for place, node in enumerate(graph.nodes)}
    seen = _Seen(graph)

    def update(one: Rewritten, is_first: bool) -> Update:
        return Update(tensors[one.placeholder.name], _graph_of(one.new, places, seen.behind(one.new)), is_first)

    first = [one for one in trained.values() if one.placeholder not in read]
    updates = [update(one, True) for one in first]
    for one in first:
        one.new.replace_all_uses_with(one.placeholder)
    updates += [update(one, False) for one in rewritten if one not in first]
    return tuple(updates), seen.returned()


class _Seen:
    """What writes are made of that is of the batch, or drawn: where the samples' dimension ends, so that micro-batches'
    parts may be put together before anything else is made of them."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph, self.names = graph, dict[fx.Node, str]()
        self.of_batch, self.of_weights = set[fx.Node](), set[fx.Node]()
        for node in graph.nodes:
            kind = node.meta.get("kind") if node.op == "placeholder" else ""
            if kind == "input" or _is_drawn(node) or not self.of_batch.isdisjoint(node.all_input_nodes):
                self.of_batch.add(node)
            elif kind == "parameter" or not self.of_weights.isdisjoint(node.all_input_nodes):
                self.of_weights.add(node)  # which not all ranks have
        self.has_symbols = any(_has_samples(node) for node in graph.find_nodes(op="placeholder"))

    def behind(self, value: fx.Node) -> Mapping[fx.Node, str]:
        """The names of the outputs to make a value of, by the nodes that they take the place of."""
        found, later = list[fx.Node](), [value] if value in self.of_batch else []
        while later:
            node = later.pop()
            made_of = [one for one in node.all_input_nodes if one in self.of_batch and not _is_drawn(node)]
            is_end = not made_of or any(_has_samples(one) for one in made_of) or not self.has_symbols
            if is_end or not self.of_weights.isdisjoint(node.all_input_nodes):
                found.append(node)
            else:
                later += made_of
        if any(not isinstance(node.meta.get("val"), torch.Tensor) or _has_samples(node) for node in found):
            found = [value]
        return {node: self.names.setdefault(node, _SEEN % len(self.names)) for node in dict.fromkeys(found)}

    def returned(self) -> tuple[str, ...]:
        """Let the graph return them; their names."""
        (output,) = self.graph.find_nodes(op="output")
        before = output.args[0] if isinstance(output.args[0], tuple | list) else (output.args[0],)
        if self.names:
            output.args = ((*before, *self.names),)
        return tuple(self.names.values())


def _is_drawn(node: fx.Node) -> bool:
    return node.op == "call_function" and is_random(node.target, node.args)


def _has_samples(node: fx.Node) -> bool:
    """Whether a value is a size, or has one that is not known."""
    value = node.meta.get("val")
    sizes = [size for tensor in private.tensors_in(value) for size in tensor.shape]
    return isinstance(value, torch.SymInt | torch.SymFloat) or any(not isinstance(size, int) for size in sizes)


def require_seen(updates: Iterable[Update], left_out: Collection[str]) -> None:
    """Refuse writes that are made of outputs that a step does not return."""
    for update in updates:
        if not set(update.seen).isdisjoint(left_out):
            raise CaptureError(
                f"forward writes into {update.name!r} by tensors whose size depends on what others hold; keep them of "
                "fixed size (torch.where instead of a mask index)"
            )


def refuse_all(rewritten: Iterable[Rewritten]) -> None:
    """Refuse a denoiser's writes."""
    for one in rewritten:
        why = "which sampling leaves as it is; call .eval() on the model, or write it outside of forward"
        raise refusal(one.write, f"it changes the {one.placeholder.meta['kind']} {one.state!r}, {why}")


def _require_of_own(one: Rewritten) -> None:
    """Refuse what no step can write once for all of its micro-batches."""
    kind, is_trained = one.placeholder.meta["kind"], one.placeholder.meta["requires_grad"]
    made_of = [*reached([one.new], lambda node: node.all_input_nodes)]
    given = [node for node in made_of if node.op == "placeholder"]
    others = [node for node in given if node.meta["kind"] == "parameter" and node is not one.placeholder]
    changes = f"it changes the {kind} {one.state!r}"
    is_seen = any(map(_is_drawn, made_of)) or any(node.meta["kind"] == "input" for node in given)
    if is_seen and kind == "parameter":
        raise refusal(one.write, f"{changes} by what the batch holds, or is drawn{_LATER if is_trained else _OUTSIDE}")
    if "checkpoint" in one.write.meta:
        raise refusal(one.write, f"{changes} {_CHECKPOINT}")
    if is_trained and others:
        raise refusal(one.write, f"{changes} by another, {others[0].meta['state']!r}{_LATER}")
    learning = [repr(node.meta["state"]) for node in others if node.meta["requires_grad"]]
    if len(learning) > 1 and not is_seen:
        why = (
            f"by {len(learning)} parameters that are trained, maybe on different ranks ({', '.join(learning[:2])}, ...)"
        )
        raise refusal(one.write, f"{changes} {why}; do that after the optimizer's step and engine.sync_model()")
    if one.new.meta["requires_grad"] and not is_trained:
        why = "to a value that requires grad, whose gradient goes on into the step before"
        raise refusal(one.write, f"{changes} {why}; write it under torch.no_grad()")


def _require_no_longer_needed(one: Rewritten, needed: Collection[fx.Node]) -> None:
    """Refuse writes over what a gradient needs as it was, which one device computes by what is there, or fails at."""
    memory, before = private.storages(one.placeholder), [one.placeholder, *one.values[:-1]]

    def shows(user: fx.Node) -> bool:
        return user is not one.new and not memory.isdisjoint(private.storages(user, of_all=True))

    shown = reached(before, lambda node: [user for user in node.users if shows(user)])
    for node in dict.fromkeys(user for value in shown for user in value.users if user in needed):
        if node.meta.get("requires_grad") and not memory.isdisjoint(private.kept_for_gradient(node)):
            why = f"which the gradient of {node.target} needs as it was, in {private.where(node)}; clone it there"
            raise refusal(one.write, f"it changes the {one.placeholder.meta['kind']} {one.state!r}, {why}")


def _graph_of(value: fx.Node, places: Mapping[fx.Node, int], seen: Mapping[fx.Node, str]) -> fx.Graph:
    """What makes it, as a graph of its own, of the outputs `seen` instead of what these are made of."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    made_of = reached([value], lambda node: () if node in seen else node.all_input_nodes)
    for node in sorted(made_of, key=lambda node: (node not in seen and node.op != "placeholder", places[node])):
        if node in seen:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = {"val": node.meta["val"], "kind": OUTPUT, "output": seen[node], "path": ""}
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta = dict(node.meta)
        copies[node].meta["requires_grad"] = False
    if value in seen:  # a stage graph returns none of what it is given
        copies[value] = graph.call_function(torch.ops.aten.alias.default, (copies[value],))
        copies[value].meta = {"val": value.meta["val"], "path": "", "requires_grad": False}
    graph.output(copies[value])
    return graph


def require_plain(
    model: nn.Module, updates: Sequence[Update], read: Mapping[str, object], constants: Mapping[str, torch.Tensor]
) -> None:
    """Refuse writes that something else shows than the tensor itself: others in its memory, also `constants` by their
    names, or numbers that forward has `read` of it."""
    memory = by_memory(model, constants) if updates else {}
    for update in updates:
        if update.name in read:
            raise CaptureError(
                f"forward reads {update.name!r} as a number, and writes into it, so that the next step would be "
                "another; keep it a tensor (torch.where instead of if, no .item())"
            )
        shared = next(names for names in memory.values() if update.name in names)
        own = shared[update.name]
        others = [name for name, tensor in shared.items() if tensor is not own or name in constants]
        if others:
            raise CaptureError(
                f"forward writes into {update.name!r}, in whose memory {others[0]!r} is, too: clone it in __init__, or "
                "write it outside of forward"
            )
