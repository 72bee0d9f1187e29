"""Autograd functions of a model's own: what their backwards compute, as graphs.

y = Round.apply(x)     ->     z = round(x)                               forward, of which no gradient is asked
                              y = own_gradient("5f2c..", [z], [x], ...)  z; its gradient goes on to x by a graph

A backward runs once in the trace, on gradients that stand for any; what depends on these is its graph, and what else it
reads is saved: values of the step as any others.
"""

import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxpipe.capture import functionalise, private
from fxpipe.capture.backwards import GRAPHS, OWN_GRADIENT, TRACED
from fxpipe.capture.calls import Calls
from fxpipe.capture.fingerprint import step_fingerprint
from fxpipe.capture.formulas import IN_A_TRACE
from fxpipe.capture.randomness import is_random
from fxpipe.capture.written_out import WRITTEN_OUT
from fxpipe.errors import CaptureError

aten = torch.ops.aten
_way: ContextVar[str] = ContextVar("way", default="")
"""How the backward that runs is traced: "as it runs", or "below autograd"; empty outside of one."""


class _OfAutograd(Exception):
    """A backward asks autograd for gradients of what it computes again."""


def asks_autograd() -> None:
    """To be called where anyone does: in a backward, it is recorded in another way then."""
    if _way.get():
        raise _OfAutograd


def is_autograds() -> bool:
    """Whether autograd itself is traced, which knows of autograd functions."""
    return _way.get() == "below autograd"


# In the trace


def traced(kind: Any, out: Any, args: Sequence[Any]) -> Any:
    """What a function of `kind` has returned for `args`, with its own gradient in the trace that is going on.

    Raises:
        CaptureError: its backward cannot be traced; says why.
    """
    outs = [one for one in _listed(out) if isinstance(one, torch.Tensor)]
    ends = [one for one in outs if one.requires_grad]
    if not ends:
        return out
    node = ends[0].grad_fn
    if not private.is_node_of(node, kind) or any(one is given for one in outs for given in args):
        raise _refusal(kind.__name__, "it writes into what it is given")
    with torch.no_grad(), _no_autocast():
        tangents = [torch.empty_like(one) if one.requires_grad else torch.zeros_like(one) for one in outs]
        grads = _backward(kind, _Context(node, outs), tangents)
    pairs = [
        (given, grad)
        for given, grad in zip(args, grads, strict=False)
        if isinstance(given, torch.Tensor) and given.requires_grad and isinstance(grad, torch.Tensor)
    ]
    of_ends = [tangent for tangent, one in zip(tangents, outs, strict=True) if one.requires_grad]
    called = kind.__name__, ends, [given for given, _ in pairs], of_ends, [grad for _, grad in pairs]
    results = iter(private.traced_call(TRACED, called, ends))
    made = tuple(next(results) if any(one is end for end in ends) else one for one in _listed(out))
    return made if isinstance(out, tuple) else made[0]


def _no_autocast() -> AbstractContextManager[object]:
    """Inside, none: backwards run outside of that of their forwards."""
    stack = ExitStack()
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, enabled=False))
    return stack


def _backward(kind: Any, context: "_Context", tangents: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """What the backward of `kind` returns, recorded as it runs; one that asks autograd for gradients, below that."""
    vjp = kind.vjp is not torch.autograd.Function.vjp

    def run(*tangents: torch.Tensor) -> tuple[Any, ...]:
        found = (kind.vjp if vjp else kind.backward)(context, *tangents)
        return tuple(found) if isinstance(found, tuple | list) else (found,)

    before = private.num_traced()
    token = _way.set("as it runs")
    try:
        found = run(*tangents)
    except _OfAutograd:
        context.renew()
        _way.set("below autograd")
        found = _recorded_below(run, tangents)
    finally:
        _way.reset(token)
    if any(map(_draws, private.traced_since(before))):
        raise _refusal(kind.__name__, "its backward draws random numbers")
    return found


def _recorded_below(run: Callable[..., tuple[Any, ...]], tangents: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Traced by itself, below autograd, and run again where the trace that is going on sees it."""
    with private.outside_trace(), Calls(WRITTEN_OUT, IN_A_TRACE):
        module = make_fx(run)(*tangents)
    return tuple(fx.Interpreter(module).run(*tangents))


def _draws(node: fx.Node) -> bool:
    return is_random(node.target, node.args) or bool(private.argument(node, "dropout_p"))


def _listed(out: Any) -> tuple[Any, ...]:
    return out if isinstance(out, tuple) else (out,)


class _Context:
    """The context of a backward; results that were saved are those that the trace knows."""

    def __init__(self, node: Any, outs: Sequence[torch.Tensor]) -> None:
        self._own = {"_node": node, "saved_tensors": tuple(_known(one, outs) for one in node.saved_tensors)}
        self.renew()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def renew(self) -> None:
        """As forward left it."""
        own = self._own
        vars(self).clear()
        vars(self).update({"_own": own, **own, **vars(own["_node"])})


def _known(saved: Any, outs: Sequence[torch.Tensor]) -> Any:
    if not isinstance(saved, torch.Tensor) or private.is_traced(saved):
        return saved
    return next((one for one in outs if private.is_alike(one, saved)), saved)


def _refusal(name: str, why: str) -> CaptureError:
    return CaptureError(
        f"the autograd function {name} hides its gradient from the trace: {why}; use operations of torch, such as "
        "y + (x - y).detach()"
    )


# In the graph


def cut_out(graph: fx.Graph) -> None:
    """Make a graph of its own of every backward that was traced.

    Raises:
        CaptureError: a backward draws random numbers, or has an effect beside its result.
    """
    for node in graph.find_nodes(op="call_function", target=TRACED):
        name, outs, inputs, tangents, grads = node.args
        for tangent, out in zip(tangents, outs, strict=True):
            for user in list(tangent.users):
                if not isinstance(user.meta.get("val"), torch.Tensor | list | tuple):
                    user.replace_input_with(tangent, out)
        inner = _between(name, graph, tangents, node)
        own, saved, sizes = _graph_of(name, inner, tangents, grads)
        key = f"{name} {step_fingerprint(own, {})}"
        GRAPHS[key] = own
        with graph.inserting_before(node):
            args = key, _cut_off(graph, outs), inputs, _cut_off(graph, saved), sizes
            made = graph.call_function(OWN_GRADIENT, args)
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        for one in (node, *reversed(inner), *tangents):
            graph.erase_node(one)


def _between(name: str, graph: fx.Graph, tangents: Sequence[fx.Node], end: fx.Node) -> list[fx.Node]:
    """What depends on the tangents, and on nothing behind `end`."""
    nodes = list(graph.nodes)
    behind = nodes[nodes.index(tangents[-1]) + 1 : nodes.index(end)]
    inner = dict.fromkeys(tangents)
    for node in behind:
        if any(one in inner for one in node.all_input_nodes):
            inner[node] = None
    if any(user is not end and user not in inner for node in inner for user in node.users):
        raise _refusal(name, "its backward keeps what it computes")
    if any(node.target is TRACED for node in inner):
        raise _refusal(name, "its backward has another one inside")
    depends = set(inner)
    for node in reversed(behind):  # what it computes for itself, or again
        if node.users and all(user is end or user in inner for user in node.users):
            inner[node] = None
    for node in behind:  # of a list, which nothing saves, all or none
        if node.target is operator.getitem and node not in depends and node.args[0] not in inner:
            inner.pop(node, None)
    return [node for node in behind if node in inner]


def _graph_of(
    name: str, inner: Sequence[fx.Node], tangents: Sequence[fx.Node], grads: Sequence[fx.Node]
) -> tuple[fx.Graph, list[fx.Node], list[fx.Node]]:
    """The graph of these nodes, the values that it reads beside the tangents, and the sizes."""
    own, read = {*inner, *tangents}, dict[fx.Node, None]()
    read |= dict.fromkeys(one for node in inner for one in node.all_input_nodes if one not in own)
    read |= dict.fromkeys(one for one in grads if one not in own)
    saved = [node for node in read if isinstance(node.meta["val"], torch.Tensor)]
    sizes = [node for node in read if node not in set(saved)]
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for number, node in enumerate((*tangents, *saved, *sizes)):
        env[node] = graph.placeholder(f"given_{number}")
        env[node].meta = {**node.meta, "kind": "constant", "state": f"of the backward of {name}"}
    for node in inner:
        if not private.is_assertion(node.target):
            env[node] = graph.node_copy(node, lambda one: env[one])
            env[node].meta = dict(node.meta)
    graph.output(tuple(env[node] for node in grads))
    graph, _ = functionalise.run(graph)
    graph.eliminate_dead_code()
    return graph, saved, sizes


def _cut_off(graph: fx.Graph, nodes: Sequence[fx.Node]) -> list[fx.Node]:
    found = []
    for node in nodes:
        found.append(graph.call_function(aten.detach.default, (node,)))
        found[-1].meta = dict(node.meta)
    return found
