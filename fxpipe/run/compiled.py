"""Stage graphs by another back end than eager: each is compiled when it first runs, for the strides it is then given.

    stage_1_backward(saved, grad_h)   ->   compiled(saved, grad_h, weight, bias): weights are the model's own, read anew
                                           in every call; the list of saved values is emptied before its values are used

A graph that does not compile runs eagerly, and a warning says why.
"""

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fxpipe.capture import private
from fxpipe.plan import ops
from fxpipe.plan.rank_program import RankProgram

_log = logging.getLogger(__name__)

_CLONE = torch.ops.aten.clone.default


class Compiled:
    """The graph as a function of its placeholders and then of its state."""

    def __init__(self, graph: fx.Graph, given: Sequence[Any]) -> None:
        (output,) = graph.find_nodes(op="output")
        outputs, self._form = pytree.tree_flatten(_plain(output.args[0]))
        self._clones = [node.target is _CLONE for node in outputs]
        self._call = private.inductor(fx.GraphModule(nn.Module(), _lifted(graph, outputs)), list(given))
        self._copied: list[int] | None = None  # outputs that own their memory in the graph, and share it here

    def __call__(self, *given: Any) -> Any:
        places = [_place(tensor) for tensor in pytree.tree_leaves(given)] if self._copied is None else []
        found = list(self._call(*given))
        if self._copied is None:
            self._copied = self._shared(found, places)
        for index in self._copied:
            found[index] = found[index].clone()
        return pytree.tree_unflatten(found, self._form)

    def _shared(self, found: Sequence[torch.Tensor], given: Sequence[int]) -> list[int]:
        """Outputs that the graph clones, in memory of something else: sums are made in them, in place."""
        pairs = list(zip(found, self._clones, strict=True))
        seen, shared = {*given, *(_place(tensor) for tensor, clone in pairs if not clone)}, list[int]()
        for index, (tensor, clone) in enumerate(pairs):
            shared += [index] if clone and _place(tensor) in seen else []
            seen.add(_place(tensor))
        return shared


def _plain(value: Any) -> Any:
    """With lists for fx's own, which no caller may change."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return [*map(_plain, value)] if isinstance(value, list) else value


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


_compiled: "WeakKeyDictionary[fx.Graph, dict[object, Compiled | None]]" = WeakKeyDictionary()
"""By graph, which replicas and forms of a step share, and by the layout of its inputs; None where it runs eagerly."""
_lock = threading.Lock()


def runnable(program: RankProgram, state: Mapping[str, torch.Tensor], backend: str) -> fx.GraphModule:
    """The runnable module of a rank, its stage graphs by a back end, "eager" or "inductor"."""
    module = program.bind(state)
    if backend == "inductor":
        for name, graph in program.modules.items():
            if any(node.op == "call_function" and node.target is not ops.release for node in graph.nodes):
                module.add_module(name, InductorStage(name, graph, getattr(module, name)))
    return module


class InductorStage(nn.Module):
    """A stage graph, called as its eager module is."""

    def __init__(self, name: str, graph: fx.Graph, eager: fx.GraphModule) -> None:
        super().__init__()
        self._name, self._graph, self._eager = name, graph, eager
        paths = [str(node.target).rpartition(".") for node in eager.graph.find_nodes(op="get_attr")]
        self._weights = [(eager.get_submodule(path), leaf) for path, _, leaf in paths]

    def forward(self, *args: Any) -> Any:
        given = [*args, *(getattr(holder, leaf) for holder, leaf in self._weights)]
        key = tuple((tuple(t.shape), t.stride(), t.dtype) for t in pytree.tree_leaves(given))
        with _lock:
            found = _compiled.setdefault(self._graph, {})
            if key not in found:
                found[key] = self._compile(given)
            call = found[key]
        return self._eager(*args) if call is None else call(*given)

    def _compile(self, given: Sequence[Any]) -> Compiled | None:
        try:
            return Compiled(self._graph, given)
        except Exception as error:
            (first, *_) = str(error).strip().splitlines() or [""]
            _log.warning("%s runs eagerly: inductor: %s: %s", self._name, type(error).__name__, first)
            return None


def _lifted(graph: fx.Graph, outputs: Sequence[fx.Node]) -> fx.Graph:
    """The graph with its state as inputs, after the others; a tuple of outputs; and without releases."""
    new, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.find_nodes(op="placeholder"):
        env[node] = new.placeholder(node.name)
        env[node].meta["steal_arg"] = any(user.target is ops.release for user in node.users)
    for node in graph.find_nodes(op="get_attr"):
        env[node] = new.placeholder(f"state_{node.name}")
    for node in graph.nodes:
        if node.op == "call_function" and node.target is not ops.release:
            env[node] = new.node_copy(node, env.__getitem__)
            env[node].meta = {}  # values of another fake mode
    new.output(tuple(env[node] for node in outputs))
    return new
