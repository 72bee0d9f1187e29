"""What a training step's forward returns beside the loss, as nodes of its graph that cost no backward.

    pred = unet(x)                         pred       = unet(x)
    loss = mse(pred, y)             ->     pred_out   = detach(pred)         right where it is made, output "pred"
    return loss, {"pred": pred,            loss       = mse(pred, y)
                  "rmse": mse.sqrt()}      rmse, its own detach              after the loss, output "rmse"

Terms: an *output* is a value with a name; a *number* is one without dimensions, which travels with the loss and is
therefore handed over next to it. Nodes that the loss does not need are marked `extra`: they read what trains through a
detach, and where they need nothing that trains they are made next to the loss.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxpipe.capture import private
from fxpipe.capture.reach import reached
from fxpipe.capture.trees import named_leaves

_DETACH = torch.ops.aten.detach.default
OutputsFound = tuple[dict[str, torch.Tensor], tuple[str, ...]]


def outputs_of(output: Any) -> OutputsFound:
    """Tensors by name that a model's output holds beside the loss, and the names of what is none.

    Entries of a mapping or dataclass go by their names, those of a tuple by their place, values within them by a path;
    of a mapping in a tuple the names alone, where they are the only ones: `(loss, {"mse": m})` has "mse".
    """
    if isinstance(output, Mapping) and "loss" in output:
        entries = {str(name): value for name, value in output.items()}
    elif isinstance(getattr(output, "loss", None), torch.Tensor):
        fields = getattr(output, "_fields", getattr(output, "__dict__", ()))
        entries = {name: getattr(output, name) for name in fields if not name.startswith("_")}
    elif isinstance(output, tuple | list):
        entries = {"loss" if place == 0 else str(place): value for place, value in enumerate(output)}
    else:
        return {}, ()
    found = [
        (entry, path, value)
        for entry, inside in entries.items()
        if entry != "loss"
        for path, value in named_leaves(inside)
        if value is not None
    ]
    short = [".".join(path if _is_place(entry, path) else (entry, *path)) for entry, path, _ in found]
    names = [
        name if short.count(name) == 1 else ".".join((entry, *path))
        for name, (entry, path, _) in zip(short, found, strict=True)
    ]
    named = dict(zip(names, (value for *_, value in found), strict=True))
    tensors = {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}
    return tensors, tuple(name for name in named if name not in tensors)


def _is_place(entry: str, path: Sequence[str]) -> bool:
    """Whether an entry is the place of a mapping in a tuple."""
    return entry.isdecimal() and bool(path) and not path[0].isdecimal()


def sinks(graph: fx.Graph) -> dict[str, fx.Node]:
    """The nodes that hand outputs over, by the outputs' names."""
    (output,) = graph.find_nodes(op="output")
    returned = output.args[0]
    return {node.meta["output"]: node for node in returned[1:]} if isinstance(returned, tuple) else {}


def is_number(sink: fx.Node) -> bool:
    """Whether it travels with the loss."""
    value = sink.meta["val"]
    return value.ndim == 0 and not value.is_complex()


def drop_unknown(graph: fx.Graph, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Take those out of a graph that returns (loss, *values) whose sizes depend on what tensors hold.

    Args:
        names: of the values.

    Returns: the names of the others, and theirs.
    """
    (output,) = graph.find_nodes(op="output")
    if isinstance(output.args[0], fx.Node):
        return [], []
    loss, *values = output.args[0]
    needed = _ancestors(loss)
    unknown = [
        any(private.sizes.depends_on_values(node.meta.get("val")) for node in _ancestors(value) - needed)
        for value in values
    ]
    output.args = ((loss, *(value for value, no in zip(values, unknown, strict=True) if not no)),)
    pairs = list(zip(names, unknown, strict=True))
    return [name for name, no in pairs if not no], [name for name, no in pairs if no]


def separate(graph: fx.Graph, names: Sequence[str]) -> None:
    """Set the outputs of a graph that returns (loss, *values), `names` those of the values, apart as above."""
    (output,) = graph.find_nodes(op="output")
    if isinstance(output.args[0], fx.Node):
        return
    loss, *values = output.args[0]
    needed, trained = _ancestors(loss), _trained(graph)
    extra = [node for node in graph.nodes if node.op == "call_function" and node not in needed]
    for node in extra:
        node.meta["extra"] = True
    _move_to(loss, [node for node in extra if node not in trained])
    for node in extra:
        for source in node.all_input_nodes:
            if source not in extra and source.meta["requires_grad"]:
                node.replace_input_with(source, _detached(graph, source))
    made = [_sink(graph, name, value, loss, value in trained) for name, value in zip(names, values, strict=True)]
    output.args = ((loss, *made) if made else loss,)
    _mark_regions(graph)


def drop(graph: fx.Graph, names: Sequence[str]) -> None:
    """Hand these outputs over no longer."""
    (output,) = graph.find_nodes(op="output")
    if not names:
        return
    left = [sink for name, sink in sinks(graph).items() if name not in names]
    loss = output.args[0][0]
    output.args = ((loss, *left) if left else loss,)
    for node in reversed(list(graph.nodes)):
        if node.meta.get("extra") and not node.users:
            graph.erase_node(node)


def _move_to(loss: fx.Node, untrained: Sequence[fx.Node]) -> None:
    """Put these before the loss, in order, but for those that others read which stay."""
    moved = set[fx.Node]()
    place = loss
    for node in reversed(untrained):
        if all(user in moved or user.op == "output" for user in node.users):
            moved.add(node)
            place.prepend(node)
            place = node


def _sink(graph: fx.Graph, name: str, value: fx.Node, loss: fx.Node, is_trained: bool) -> fx.Node:
    source = _detached(graph, value) if value.meta["requires_grad"] and not value.meta.get("extra") else value
    beside = not is_trained or source.meta["val"].ndim == 0
    with graph.inserting_before(loss) if beside and source in _before(loss) else graph.inserting_after(source):
        made = _detach(graph, source, loss if beside else source, f"out_{name.replace('.', '_')}")
    made.meta["output"] = name
    return made


def _detached(graph: fx.Graph, source: fx.Node) -> fx.Node:
    """The value without its gradient, once for all that is made of it."""
    known = (user for user in source.users if user.target is _DETACH and user.meta.get("detaches"))
    if (found := next(known, None)) is not None:
        return found
    first = next(node for node in graph.nodes if node.op == "call_function")
    with graph.inserting_before(first) if source.op == "placeholder" else graph.inserting_after(source):
        made = _detach(graph, source, source, f"{source.name}_detached")
    made.meta["detaches"] = True
    return made


def _detach(graph: fx.Graph, source: fx.Node, at: fx.Node, name: str) -> fx.Node:
    value = source.meta["val"]
    made = graph.create_node("call_function", _DETACH, (source,), name=name)
    given = private.fake_result(_DETACH, (source,), {}, value)
    made.meta = {"val": given, "path": at.meta["path"], "requires_grad": False, "extra": True}
    return made


def _mark_regions(graph: fx.Graph) -> None:
    """Extra nodes need no gradient anyway; marked as what surrounds them, they do not look like a first pass."""
    around = False
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if not node.meta.get("extra"):
            around = node.meta.get("no_grad", False)
        elif around:
            node.meta["no_grad"] = True
        else:
            node.meta.pop("no_grad", None)


def _before(node: fx.Node) -> Iterator[fx.Node]:
    while (node := node.prev).op != "root":
        yield node


def _ancestors(node: fx.Node) -> set[fx.Node]:
    """With the node itself."""
    return set(reached([node], lambda one: one.all_input_nodes))


def _trained(graph: fx.Graph) -> set[fx.Node]:
    """What a parameter that requires grad is behind."""
    found = set[fx.Node]()
    for node in graph.nodes:
        own = node.op == "placeholder" and node.meta["kind"] == "parameter" and node.meta["requires_grad"]
        if own or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found
