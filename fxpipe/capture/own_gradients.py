"""Autograd functions of a model's own: what their backwards compute, as graphs.

y = Round.apply(x)     ->     z = round(x)                               forward, of which no gradient is asked
                              y = own_gradient("5f2c..", [z], [x], ...)  z; its gradient goes on to x by a graph

A backward runs once in the trace, on gradients that stand for any; what depends on these is its graph, and what else it
reads is saved: values of the step as any others.
"""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from itertools import combinations, compress
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fxpipe.capture import private
from fxpipe.capture.backwards import TRACED, own_refusal
from fxpipe.capture.calls import Calls
from fxpipe.capture.formulas import IN_A_TRACE
from fxpipe.capture.randomness import is_random
from fxpipe.capture.reach import reached
from fxpipe.capture.surroundings import no_autocast
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


def traced(kind: Any, out: Any, args: Sequence[Any]) -> Any:
    """What a function of `kind` has returned for `args`, with its own gradient in the trace that is going on.

    Raises:
        CaptureError: its backward cannot be traced; says why.
    """
    listed = out if isinstance(out, tuple) else (out,)
    asked = [isinstance(one, torch.Tensor) and one.requires_grad for one in listed]
    if not any(asked):
        return out
    outs = [one for one in listed if isinstance(one, torch.Tensor)]
    ends = list(compress(listed, asked))
    node = ends[0].grad_fn
    none = private.is_given_none(node)
    _require_known(kind, node, outs, args)
    if none and len(ends) > 1:
        raise own_refusal(
            kind.__name__, "by set_materialize_grads(False) its backward may get None for one of its results"
        )
    with torch.no_grad(), no_autocast():  # backwards run outside of that of their forwards
        tangents = [_tangent(one, none) for one in listed]
        grads = _backward(kind, _Context(node, outs), tangents)
    pairs = [
        (given, grad)
        for given, grad in zip(args, grads, strict=False)
        if isinstance(given, torch.Tensor) and given.requires_grad and isinstance(grad, torch.Tensor)
    ]
    called = (
        kind.__name__,
        ends,
        [given for given, _ in pairs],
        [*compress(tangents, asked)],
        [grad for _, grad in pairs],
    )
    results = iter(private.traced_call(TRACED, called, ends))
    made = tuple(next(results) if is_end else one for one, is_end in zip(listed, asked, strict=True))
    return made if isinstance(out, tuple) else made[0]


def _require_known(kind: Any, node: Any, outs: Sequence[torch.Tensor], args: Sequence[Any]) -> None:
    """Refuse what writes into its arguments, and what returns a tensor twice: autograd takes both for one."""
    if not private.is_node_of(node, kind) or any(one is given for one in outs for given in args):
        raise own_refusal(kind.__name__, "it writes into what it is given")
    if any(one is other for one, other in combinations(outs, 2)):
        raise own_refusal(kind.__name__, "it returns one tensor twice")


def _tangent(result: Any, none: bool) -> torch.Tensor | None:
    """What stands for the gradient of a result; `none` where there is none, otherwise zeros."""
    if not isinstance(result, torch.Tensor):
        return None
    return torch.empty_like(result) if result.requires_grad else None if none else torch.zeros_like(result)


def _backward(kind: Any, context: "_Context", tangents: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    """What the backward of `kind` returns, recorded as it runs; one that asks autograd for gradients, below that."""
    vjp = kind.vjp is not torch.autograd.Function.vjp

    def run(*tangents: torch.Tensor | None) -> tuple[Any, ...]:
        found = (kind.vjp if vjp else kind.backward)(context, *tangents)
        return tuple(found) if isinstance(found, tuple | list) else (found,)

    token = _way.set("as it runs")
    with private.traced_inside() as nodes:
        try:
            found = run(*tangents)
        except _OfAutograd:
            context.renew()
            _way.set("below autograd")
            found = _recorded_below(run, tangents)
        finally:
            _way.reset(token)
    if any(map(_draws, nodes)):
        raise own_refusal(kind.__name__, "its backward draws random numbers")
    return found


def _recorded_below(run: Callable[..., tuple[Any, ...]], tangents: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    """Traced by itself, below autograd, and run again where the trace that is going on sees it."""
    with private.outside_trace(), Calls(WRITTEN_OUT, IN_A_TRACE, _INTO_GRAD):
        module = make_fx(run)(*tangents)
    return tuple(fx.Interpreter(module).run(*tangents))


def _into_grad(func: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
    """Autograd's own `backward`, which adds to the leaves, where none of these is a weight."""
    starts: list[Any] = [one.grad_fn for one in private.tensors_in([tensors])]
    for node in reached(starts, lambda one: [before for before, _ in one.next_functions if before is not None]):
        if isinstance(getattr(node, "variable", None), nn.Parameter):
            raise CaptureError(
                "the backward of an autograd function adds to .grad of weights, which is no gradient of the step; give "
                "it the weights, and return their gradients, as torch.autograd.grad computes them"
            )
    return func(tensors, *args, **kwargs)


_INTO_GRAD = dict.fromkeys((torch.autograd.backward, torch.Tensor.backward), _into_grad)


def _draws(node: fx.Node) -> bool:
    return is_random(node.target, node.args) or bool(private.argument(node, "dropout_p"))


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
