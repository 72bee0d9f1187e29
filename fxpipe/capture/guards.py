"""What a graph takes for granted of a call's inputs, because forward has asked for it while it was traced.

lengths = mask.sum(1).tolist()     sum(mask, [1]) == [17, 9]                      a call with other lengths has its own
if torch.all(image == 0): ...      all(eq(image, 0)) == False                     graph
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fxpipe.capture import private


@dataclass(frozen=True, eq=False)
class Guard:
    """`computed` of the named inputs is `value`; or is zero where that is, of a truth value.

    `are_sizes`: whole numbers that a trace may leave free; where one has, `sizes` are their names, entry by entry, None
    of those that must be as they are.
    """

    computed: fx.GraphModule
    inputs: tuple[str, ...]
    value: torch.Tensor
    is_truth: bool
    are_sizes: bool = False
    sizes: tuple[str | None, ...] = ()

    @staticmethod
    def of(
        node: fx.Node,
        values: Mapping[fx.Node, Any],
        inputs: Mapping[fx.Node, str],
        made: Callable[[torch.Tensor], torch.Tensor],
        is_truth: bool,
        are_sizes: bool,
    ) -> "Guard":
        """About what is `made` of a node, from the `values` of what that is made of, in the order they were
        computed."""
        root, graph, env = nn.Module(), fx.Graph(), dict[fx.Node, Any]()
        anew = any(map(private.writes, values))  # what is written to must be made at every call
        for one, value in values.items():
            if one in inputs:
                env[one] = graph.placeholder(f"input_{len(env)}")
            elif not (anew and one.op == "call_function" and env.keys() >= {*one.all_input_nodes}) and not any(
                isinstance(env.get(argument), fx.Node) for argument in one.all_input_nodes
            ):
                env[one] = value  # a number, or a tensor that no input has a part in
            else:
                args, kwargs = fx.map_arg((one.args, one.kwargs), lambda of: _held(root, graph, env[of]))
                env[one] = graph.call_function(one.target, *on_host((args, kwargs)))  # type: ignore[arg-type]
        graph.output(graph.call_function(made, (_held(root, graph, env[node]),)))
        names = tuple(inputs[one] for one in values if one in inputs)
        return Guard(fx.GraphModule(root, graph), names, made(values[node].detach()).clone(), is_truth, are_sizes)

    def says_what(self, other: "Guard") -> bool:
        """Whether it is about the same as another one."""
        if (self.inputs, self.is_truth, self.are_sizes) != (other.inputs, other.is_truth, other.are_sizes):
            return False
        pairs = zip(self.computed.buffers(), other.computed.buffers(), strict=False)
        return self.computed.code == other.computed.code and all(
            one.dtype == two.dtype and torch.equal(one, two) for one, two in pairs
        )

    def holds(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether it does for a call's tensors; not where they hold no values, or have sizes that it is not for."""
        found = self.found(tensors)
        if found is None or self.is_truth:
            return found is not None and bool(found) == bool(self.value)
        return torch.equal(found, self.value)

    def found(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """What it is of a call's tensors."""
        given = [tensors[name] for name in self.inputs]
        if any(one.is_meta or private.mode_of(one) is not None for one in given):
            return None
        try:
            with torch.no_grad():
                found: torch.Tensor = self.computed.forward(*(one.detach().cpu() for one in given))
        except (RuntimeError, IndexError):  # of tensors of another size
            return None
        return found

    def sizes_of(self, value: torch.Tensor) -> dict[str, tuple[int]] | None:
        """The free sizes by name where it is that; None where what is not free is another."""
        if value.shape != self.value.shape or value.dtype != self.value.dtype:
            return None
        pairs = list(zip(self.sizes, self.value.flatten().tolist(), value.flatten().tolist(), strict=True))
        if any(name is None and one != other for name, one, other in pairs):
            return None
        return {name: (other,) for name, _, other in pairs if name is not None}


def run_of(mask: torch.Tensor) -> torch.Tensor:
    """Where the places of a mask begin and end that follow each other; 0 and 0 of none, nothing of others."""
    places = mask.nonzero().flatten()
    if not len(places):
        return torch.tensor([0, 0])
    first, last = int(places[0]), int(places[-1])
    return torch.tensor([first, last + 1] if last - first + 1 == len(places) else [], dtype=torch.int64)


def on_host(arguments: Any) -> Any:
    """A node's arguments, for the host."""
    host = torch.device("cpu")
    return pytree.tree_map_only(torch.device, lambda _: host, arguments)


def _held(root: nn.Module, graph: fx.Graph, value: Any) -> Any:
    """A tensor as the graph's own; all else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    name = f"known_{len(graph.nodes)}"
    root.register_buffer(name, value)
    return graph.get_attr(name)
