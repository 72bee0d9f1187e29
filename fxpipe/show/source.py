"""An FX graph as Python that people read; it computes what the graph computes.

    stage_0_forward = self.stage_0_forward(x_mb0)
    returns_0F0 = stage_0_forward[0]                   [h_mb0], saved_0F0 = self.stage_0_forward(x_mb0)  # float64[2, 8]
    saved_0F0 = stage_0_forward[1]             ->      send(transport, h_mb0, dst=1, edge=0)  # h[0] main, 128 bytes
    h_mb0 = returns_0F0[0]
    send_h_mb0 = send(transport, h_mb0, 1, 0)

State is read where it is used, results are unpacked where they are made. FX frees every value after its last use, which
is not shown.
"""

import inspect
import json
import keyword
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpipe.plan import displaced_ops, ops, row_ops
from fxpipe.plan.actions import KINDS
from fxpipe.plan.rank_program import Message

_WIDTH = 112  # of a line inside a method
_OWN = (ops.__name__, row_ops.__name__, displaced_ops.__name__)


def method(name: str, graph: fx.Graph, bodies: Mapping[str, fx.Graph]) -> str:
    """The graph as a method; `bodies` are the graphs it calls by name, as methods of the same class."""
    inputs = [node.name for node in graph.find_nodes(op="placeholder")]
    lines = list[str]()
    unpacked: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op not in ("placeholder", "get_attr") and node not in unpacked:
            lines += [line and f"    {line}" for line in _statement(node, bodies, unpacked)]
    head = f"def {name}({', '.join(['self', *inputs])}):"
    return "\n".join([head, *(lines if lines[0] else lines[1:])])


def _statement(node: fx.Node, bodies: Mapping[str, fx.Graph], unpacked: set[fx.Node]) -> list[str]:
    if node.op == "output":
        return _folded(["return ", *_returned(node)])
    if node.op == "call_module":
        pattern = _pattern(node, bodies[str(node.target)], unpacked)
        return _folded([*pattern, f" = self.{node.target}(", _Group(tuple(map(_value, node.args))), ")"])
    if node.target is ops.begin:
        action = str(node.args[1])
        return ["", f"begin({_value(node.args[0])}, {_value(action)}){_meaning(action)}"]
    assigned = "" if node.target in (ops.send, ops.release, ops.wait_values) else f"{node.name} = "
    return [f"{assigned}{_expression(node)}{_comment(node)}"]


def _returned(node: fx.Node) -> list["str | _Group"]:
    if isinstance(node.args[0], fx.Node):
        return [_value(node.args[0])]
    parts: list[Any] = list(node.args[0])  # type: ignore[arg-type]
    shown = [_Group(tuple(map(_value, p)), ("[", "]")) if isinstance(p, Sequence) else _value(p) for p in parts]
    return _separated(shown) if len(parts) > 1 else [*shown, ","]


def _separated(parts: Sequence["str | _Group"]) -> list["str | _Group"]:
    return [piece for part in parts for piece in (", ", part)][1:]


def _meaning(action: str) -> str:
    match = re.fullmatch(r"(\d+)(\w)(\d+)", action)
    if match is None:
        return ""
    unit = "frozen component" if match[2] == "T" else f"{KINDS[match[2]]} of stage"
    return f"  # {unit} {match[1]}, micro-batch {match[3]}"


def _comment(node: fx.Node) -> str:
    message = node.meta.get("message")
    if isinstance(message, Message):
        return f"  # {message.kind}, {message.num_bytes:,} bytes"
    return f"  # {_shape(node)}" if _shape(node) else ""


def _shape(node: fx.Node) -> str:
    value = node.meta.get("val")
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" if isinstance(value, torch.Tensor) else ""


# -- what a call's results are unpacked into


def _pattern(node: fx.Node, body: fx.Graph, unpacked: set[fx.Node]) -> list["str | _Group"]:
    """A name for each result; the names in it for a list of which only items are used."""
    (output,) = body.find_nodes(op="output")
    items, parts = _items(node), list[str | _Group]()
    returned: list[Any] = list(output.args[0])
    for index, results in enumerate(returned):
        item = items.get(index)
        if item is None or not item.users:
            parts.append("_")
        elif len(_items(item)) < len(item.users):  # it is read as a whole, or a part of it twice
            parts.append(item.name)
        else:
            values = _items(item)
            nodes = [values.get(i) for i in range(len(results))]
            notes = tuple("" if n is None else _shape(n) for n in nodes)
            parts.append(_Group(tuple("_" if n is None else n.name for n in nodes), ("[", "]"), notes))
            unpacked.update(values.values())
    unpacked.update(items.values())
    return _separated(parts) if len(parts) > 1 else ["[", *parts, "]"]


def _items(node: fx.Node) -> dict[Any, fx.Node]:
    return {user.args[1]: user for user in node.users if user.target is operator.getitem}


@dataclass(frozen=True)
class _Group:
    """A comma-separated list, which may be written one item a line, each with its note."""

    items: tuple[str, ...]
    brackets: tuple[str, str] = ("", "")
    notes: tuple[str, ...] = ()

    def flat(self) -> str:
        return self.brackets[0] + ", ".join(self.items) + self.brackets[1]

    def folded(self) -> list[str]:
        notes = self.notes or ("",) * len(self.items)
        lines = [f"    {item}," + (f"  # {note}" if note else "") for item, note in zip(self.items, notes, strict=True)]
        return [self.brackets[0], *lines, self.brackets[1]]


def _folded(pieces: Sequence[str | _Group]) -> list[str]:
    """One line, with notes at its end; the longest groups one item a line where that is too long."""
    groups = sorted((p for p in pieces if isinstance(p, _Group)), key=lambda g: len(g.flat()), reverse=True)
    for count in range(len(groups) + 1):
        lines = [""]
        for piece in pieces:
            shown = piece.folded() if piece in groups[:count] else [piece if isinstance(piece, str) else piece.flat()]
            lines[-1] += shown[0]
            lines += shown[1:]
        notes = [note for group in groups[count:] for note in group.notes if note]
        note = f"  # {', '.join(notes)}" if notes else ""
        # As on any line, one note may stand beyond the width; several may not.
        if max(len(line) for line in [*lines, lines[-1] + note * (len(notes) > 1)]) <= _WIDTH:
            break
    return [*lines[:-1], lines[-1] + note]


# -- expressions


def _expression(node: fx.Node) -> str:
    if node.target is operator.getitem:
        return f"{_value(node.args[0])}[{_value(node.args[1])}]"
    if own_name(node) is not None:
        return f"{own_name(node)}({', '.join(_own_arguments(node))})"
    arguments = [*map(_value, node.args), *(f"{key}={_value(value)}" for key, value in node.kwargs.items())]
    return f"{_function(node.target)}({', '.join(arguments)})"


def _function(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        name = str(target).removesuffix(".default")
        return name if name.startswith("aten.") else f"torch.ops.{name}"
    return f"{target.__module__.lstrip('_')}.{target.__name__}"


def own_name(node: fx.Node) -> str | None:
    """The name of one of fxpipe's own operations; None for any other node."""
    return node.target.__name__ if getattr(node.target, "__module__", "") in _OWN else None  # type: ignore[union-attr]


def _own_arguments(node: fx.Node) -> Iterator[str]:
    """Values as they are, the settings after them by name."""
    names = list(inspect.signature(node.target).parameters)  # type: ignore[arg-type]
    last = max((i for i, a in enumerate(node.args) if isinstance(a, fx.Node)), default=-1)
    for index, (name, value) in enumerate(zip(names, node.args, strict=False)):  # others have their defaults
        yield _value(value) if index <= last else f"{name}={_value(value)}"


def _value(value: Any) -> str:
    """An argument as Python source."""
    match value:
        case fx.Node(op="get_attr"):
            return "self" + "".join(map(_step, str(value.target).split(".")))
        case fx.Node():
            return value.name
        case list():
            return f"[{', '.join(map(_value, value))}]"
        case tuple():
            return f"({', '.join(map(_value, value))}{',' if len(value) == 1 else ''})"
        case slice():
            return f"slice({_value(value.start)}, {_value(value.stop)}, {_value(value.step)})"
        case torch.device():
            return f'torch.device("{value}")'
        case str():
            return json.dumps(value)
        case float() if value != value or abs(value) == float("inf"):
            return f'float("{value}")'
    return repr(value)


def _step(part: str) -> str:
    """One step along a module's path: an attribute, or an item of a list or dict of modules."""
    if part.isidentifier() and not keyword.iskeyword(part):
        return f".{part}"
    return f"[{part}]" if part.isdigit() else f"[{json.dumps(part)}]"
