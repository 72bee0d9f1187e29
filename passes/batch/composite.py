"""Operations without a rule of their own that ATen composes of others: each part is followed by its rule.

cosine_embedding_loss(x, y, t)   ->   mul, sum, sqrt, div, sub, where, mean
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fxpipe.capture import private
from passes.batch.layout import Mixed, Result, RuleCall, State

Follow = Callable[[RuleCall], list[Result]]


def follow_parts(call: RuleCall, follow: Follow) -> list[Result]:
    """The state of a composed operation, from its parts run on fake tensors.

    Raises:
        Mixed: it is not composed of others, or one of its parts mixes samples.
    """
    mode = next((private.mode_of(t.meta["val"]) for t in call.operands), None)
    if mode is None or mode.shape_env is None or not isinstance(call.node.target, torch._ops.OpOverload):
        raise no_rule("it")
    values = fx.map_arg((call.node.args, dict(call.node.kwargs)), lambda n: n.meta["val"])
    parts = _Parts(call, follow)
    try:
        with private.quiet(), mode.shape_env.suppress_guards(), parts:
            result = parts.run(call.node.target, *values)
    except (RuntimeError, TypeError, ValueError, KeyError) as error:  # no fake form here, or tensors of its own
        raise no_rule("it") from error
    return [parts.state_of(result)]


def no_rule(part: str) -> Mixed:
    return Mixed(
        f"no rule says whether {part} keeps the samples apart",
        "write it with other operations, or keep it out of what depends on parameters",
    )


class _Parts(TorchDispatchMode):
    """Follows every operation run under it as a node of a graph of its own."""

    def __init__(self, call: RuleCall, follow: Follow) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._target, self._follow, self._graph = call.node.target, follow, fx.Graph()
        self._states: dict[fx.Node, Result] = {}
        self._nodes: dict[int, fx.Node] = {}
        for operand in call.operands:
            self._add(self._graph.placeholder(operand.name), operand.meta["val"], call.states[operand])

    def _add(self, node: fx.Node, value: Any, state: Result) -> None:
        node.meta["val"] = value
        self._states[node] = state
        self._nodes[id(value)] = node

    def run(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The operation's result: as torch composes it, else as torch would decompose it."""
        decomposed = private.decomposition(target)
        return (decomposed or target)(*args, **kwargs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is self._target or torch.Tag.nondeterministic_seeded in func.tags:
            raise no_rule("it")
        before = [self._states[self._nodes[id(t)]] for t in pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
        node = private.create_node(self._graph, "call_function", func, *self._as_nodes((args, kwargs or {})))
        value = func(*args, **(kwargs or {}))
        node.meta["val"] = value
        if not any(isinstance(item, torch.Tensor) for item in pytree.tree_leaves(value)):
            return value  # sizes
        try:
            (state, *_) = self._follow(RuleCall(node, self._states))
        except Mixed as error:
            why = error.why if error.why.startswith("its part") else f"its part {func}: {error.why}"
            raise Mixed(why, error.remedy) from error
        if func._schema.is_mutable and state != before[0]:
            raise no_rule(f"its part {func}")  # views of what it changes would keep the state of before
        self._add(node, value, state)
        if isinstance(value, list | tuple):
            for index, item in enumerate(value):
                part = state[index] if isinstance(state, tuple) else state
                self._add(self._graph.call_function(operator.getitem, (node, index)), item, part)
        return value

    def _as_nodes(self, values: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, lambda t: self._nodes[id(t)], values)

    def state_of(self, result: Any) -> Result:
        if isinstance(result, list | tuple):
            return tuple(self.state_of(item) for item in result)  # type: ignore[misc]
        return State() if result is None else self._states[self._nodes[id(result)]]
