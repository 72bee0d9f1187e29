"""Local operations, which belong to nobody: whoever reads their results computes them for itself.

emb = sin(t)  local        block 3 reads emb         block 3 with local operations    sin, linear, ...
                           block 5 reads emb   ->    t is read by                     blocks 3 and 5
"""

from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

from torch import fx

from fxpipe.capture import Capture
from fxpipe.capture.reach import reached
from fxpipe.plan.block_graph import is_size

STATE_KINDS = ("parameter", "buffer", "constant")
T = TypeVar("T")


def with_local(
    capture: Capture, names: Iterable[str], local: Collection[str], given: Collection[str] = ()
) -> list[str]:
    """These operations and the local ones that they need, in order; those in `given` are made elsewhere."""

    def needs(name: str) -> list[str]:
        read = (n for n in capture.nodes[name].all_input_nodes if n.op == "call_function" and n.name in local)
        return [n.name for n in read if n.name not in given and not is_size(n.meta["val"])]

    starts = [name for name in names if not is_size(capture.nodes[name].meta["val"])]
    return sorted(reached(starts, needs), key=capture.places.__getitem__)


def owners_reading(values: Iterable[fx.Node], owners: Mapping[str, T], without: Collection[fx.Node] = ()) -> set[T]:
    """Whose operations read some of these, directly or through local ones that are not among `without`."""
    pending, seen, found = [*values], {*values, *without}, set[T]()
    while pending:
        for user in pending.pop().users:
            if user.name in owners and not is_size(user.meta["val"]):
                found.add(owners[user.name])
            elif user not in seen and not is_size(user.meta.get("val")):
                seen.add(user)
                pending.append(user)
    return found
