"""Transforms of functions (`torch.vmap`, `torch.func.jvp`, `grad`) inside forward, as plain operations.

    vmap(dot)(x, y)   ->   dot traced apart on a wrapped row       ->   mul, sum
                           whose wrapper is known only inside

The step's own trace would see the wrappers. So a transform is traced by itself, below them, and what it recorded is
run again where the step's trace sees it. What such a trace cannot hand over (a function to be called later) is refused.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from fxpipe.capture import private
from fxpipe.capture.calls import Calls, Table
from fxpipe.capture.formulas import EXACT, IN_A_TRACE
from fxpipe.capture.random_calls import RANDOM_CALLS
from fxpipe.capture.written_out import WRITTEN_OUT
from fxpipe.errors import CaptureError

aten = torch.ops.aten


@contextmanager
def plain_transforms() -> Iterator[None]:
    """Transforms called inside are traced by themselves."""
    inside = False

    def outermost(instead: Callable[..., Any]) -> Callable[..., Any]:
        def around(transform: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal inside
                if inside:
                    return transform(*args, **kwargs)
                inside = True
                try:
                    return instead(transform, args, kwargs)
                finally:
                    inside = False

            return call

        return around

    later = private.TRANSFORMS_OF_LATER_CALLS
    with _around(private.TRANSFORMS, outermost(_traced_apart)), _around(later, outermost(_refuse_later)):
        yield


def _refuse_later(transform: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    raise CaptureError(
        "torch.func.vjp, jacrev, jacfwd and linearize inside forward cannot be captured; use jvp, grad or vmap, or "
        "write the derivative out"
    )


@contextmanager
def _around(transforms: Sequence[tuple[Any, str]], wrap: Callable[[Callable[..., Any]], Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for module, name in transforms:
            stack.enter_context(private.replaced(module, name, wrap(getattr(module, name))))
        yield


# Tangents that are known to be zero are tensors of a kind of their own, which a trace cannot add to others.
_DECOMPOSED: dict[Any, Callable[..., Any]] = {
    aten._efficientzerotensor.default: torch.zeros,
    aten._new_zeros_with_same_feature_meta.default: lambda tensor, other, **_: torch.empty_strided(
        other.shape, other.stride(), dtype=tensor.dtype, device=tensor.device
    ).zero_(),
}


def _refuse_cut(func: Any, *args: Any, **kwargs: Any) -> Any:
    if func is torch._C._set_grad_enabled and args[0]:
        return func(*args)
    raise CaptureError(
        "detach and no_grad inside a function that torch.func or vmap transforms cannot be captured; detach what goes "
        "in or what comes out"
    )


def exact_transforms() -> AbstractContextManager[None]:
    """Transforms called inside see operations as their formulas whose kernels give a wrong derivative, or none."""

    def exact(transform: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with Calls(EXACT):
                return transform(*args, **kwargs)

        return call

    return _around(private.TRANSFORMS, exact)


_WITHIN: Table = {
    **dict.fromkeys((torch.Tensor.detach, torch.Tensor.detach_, torch.detach, torch._C._set_grad_enabled), _refuse_cut),
    torch.Tensor.data.__get__: _refuse_cut,  # type: ignore[attr-defined]
}


def _traced_apart(transform: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    leaves, tree = pytree.tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    shape: list[Any] = []

    def run(*tensors: torch.Tensor) -> list[Any]:
        given = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            given[place] = tensor
        again, named = pytree.tree_unflatten(given, tree)
        results, form = pytree.tree_flatten(transform(*again, **named))
        shape.append(form)
        return results

    tensors = [leaves[place] for place in places]
    with private.outside_trace(), Calls(RANDOM_CALLS, WRITTEN_OUT, EXACT, IN_A_TRACE, _WITHIN):
        # A view has an offset, which forward derivatives ask for and no symbolic size has.
        module = make_fx(run, _DECOMPOSED)(*[t.clone() if t._is_view() else t for t in tensors])
    _join(module.graph)
    _drop_zeros(module.graph)
    return pytree.tree_unflatten(list(fx.Interpreter(module).run(*tensors)), shape[-1])


def _join(graph: fx.Graph) -> None:
    """Undo the detaches of autograd's bookkeeping: what is differentiated inside may be so again outside."""
    for node in graph.find_nodes(op="call_function", target=aten.detach.default):
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)


_ZERO_IF_ANY = {aten.mm.default, aten.bmm.default, aten.mul.Tensor}
_ZERO_IF_FIRST = {aten.alias.default, aten.t.default, aten.view.default, aten.expand.default, aten.neg.default}


def _drop_zeros(graph: fx.Graph) -> None:
    """Drop products with tangents that are known to be zero: most of a jvp's terms."""
    zeros = set(graph.find_nodes(op="call_function", target=aten.zeros.default))
    for node in graph.nodes:
        operands = [n for n in node.args if isinstance(n, fx.Node)]
        if node.target in _ZERO_IF_ANY and zeros & set(operands):
            zeros.add(node)
        elif node.target in _ZERO_IF_FIRST and operands[0] in zeros:
            zeros.add(node)
        elif node.target is aten.add.Tensor and len(operands) == 2 and zeros & set(operands):
            other = operands[1 if operands[0] in zeros else 0]
            if other.meta["val"].shape == node.meta["val"].shape and other.meta["val"].dtype == node.meta["val"].dtype:
                node.replace_all_uses_with(other)
                if other in zeros:
                    zeros.add(node)
    graph.eliminate_dead_code()
