"""What can be reached from some nodes of a graph, of whatever kind.

reached([loss], lambda node: node.all_input_nodes)     loss, mse_loss, pred, conv2d, x, weight, ...
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


def reached(starts: Iterable[T], following: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """The starts, and all that follows from them directly or through others; each once, as they are found."""
    found = dict.fromkeys(starts)
    pending = list(found)
    while pending:
        one = pending.pop()
        yield one
        new = dict.fromkeys(other for other in following(one) if other not in found)
        found |= new
        pending += new
