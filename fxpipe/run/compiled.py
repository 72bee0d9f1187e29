"""Stage graphs by another back end than eager: each is compiled when it first runs, for the strides it is then given.

    stage_1_backward(saved, grad_h)   ->   compiled(saved, grad_h, weight, bias): weights are the model's own, read anew
                                           in every call; the list of saved values is emptied before its values are used

"inductor" compiles a graph, "cudagraphs" records its kernels. A graph that cannot be compiled or recorded runs eagerly,
and a warning says why.
"""

import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from operator import attrgetter
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


class Recorded:
    """The graph's kernels in a CUDA graph, as a function of its placeholders and then of its state; `stays` says of the
    latter what is never elsewhere. What it returns holds until the next step."""

    def __init__(self, graph: fx.Graph, given: Sequence[Any], stays: Sequence[bool]) -> None:
        if (node := private.needs_host(graph)) is not None:
            raise ValueError(f"{node} needs the host")
        (output,) = graph.find_nodes(op="output")
        outputs, self._form = pytree.tree_flatten(_plain(output.args[0]))
        module = fx.Interpreter(fx.GraphModule(nn.Module(), _lifted(graph, outputs)))
        leaves, form = pytree.tree_flatten(tuple(given))

        def run(inputs: list[Any]) -> Any:
            arguments = [*pytree.tree_unflatten(inputs, form)]
            inputs.clear()
            found = module.boxed_run(arguments)
            module.env.clear()  # values that nothing reads stay there, and a recording must know of all that is held
            return found

        first = len(leaves) - len(stays)
        static = [first + index for index, one in enumerate(stays) if one]
        self._call = private.recorded(run, leaves, static, len(outputs))
        self._emptied = [_is_emptied(node) for node in graph.find_nodes(op="placeholder")]

    def __call__(self, *given: Any) -> Any:
        leaves = pytree.tree_leaves(given)
        for one in compress(given, self._emptied):
            one.clear()
        return pytree.tree_unflatten([*self._call(leaves)], self._form)


class RecordedRank(nn.Module):
    """A rank's program of recorded graphs: what it returns is copied from their memory, where the next step writes."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__()
        self._module = module

    def forward(self, *args: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return pytree.tree_map_only(torch.Tensor, torch.clone, self._module(*args))


def _plain(value: Any) -> Any:
    """With lists for fx's own, which no caller may change."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return [*map(_plain, value)] if isinstance(value, list) else value


def _is_emptied(node: fx.Node) -> bool:
    return any(user.target is ops.release for user in node.users)


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


_compiled: "WeakKeyDictionary[fx.Graph, dict[object, Compiled | Recorded | None]]" = WeakKeyDictionary()
"""By graph, which replicas and forms of a step share, and by the layout of its inputs; None where it runs eagerly."""
_lock = threading.Lock()


def runnable(program: RankProgram, state: Mapping[str, torch.Tensor], backend: str) -> nn.Module:
    """The runnable module of a rank, its stage graphs by a back end, one of `fxpipe.options.BACKENDS`."""
    if backend == "eager":
        return program.bind(state)
    module = with_stages(program, state, backend)
    return RecordedRank(module) if backend == "cudagraphs" else module


def with_stages(program: RankProgram, state: Mapping[str, torch.Tensor], backend: str) -> fx.GraphModule:
    """The runnable module of a rank whose stage graphs are compiled or recorded. It sends copies of what is recorded,
    which may be on its way when that is written again."""
    if backend == "cudagraphs":
        program = replace(program, graph=_sending_copies(program.graph))
    module = program.bind(state)
    for name, graph in program.modules.items():
        if any(node.op == "call_function" and node.target is not ops.release for node in graph.nodes):
            module.add_module(name, CompiledStage(name, graph, getattr(module, name), program.gathered, backend))
    return module


def _sending_copies(graph: fx.Graph) -> fx.Graph:
    new = fx.Graph()
    new.output(new.graph_copy(graph, {}))
    for node in new.find_nodes(op="call_function", target=ops.send):
        transport, value, *rest = node.args
        with new.inserting_before(node):
            node.args = transport, new.call_function(_CLONE, (value,)), *rest
    return new


class CompiledStage(nn.Module):
    """A stage graph by a back end, called as its eager module is; of its weights those `gathered` are now here, now
    there."""

    def __init__(
        self, name: str, graph: fx.Graph, eager: fx.GraphModule, gathered: Collection[str], backend: str
    ) -> None:
        super().__init__()
        self._name, self._graph, self._eager, self._backend = name, graph, eager, backend
        names = [str(node.target) for node in eager.graph.find_nodes(op="get_attr")]
        self._weights = [attrgetter(name) for name in names]
        self._stays = [name not in gathered for name in names]
        # A recorded graph is of its own weights' memory.
        self._found = {} if backend == "cudagraphs" else _compiled.setdefault(graph, {})

    def forward(self, *args: Any) -> Any:
        given = [*args, *(weight(self._eager) for weight in self._weights)]
        key = tuple((tuple(t.shape), t.stride(), t.dtype) for t in pytree.tree_leaves(given))
        with _lock:
            if key not in self._found:
                self._found[key] = self._made(given)
            call = self._found[key]
        return self._eager(*args) if call is None else call(*given)

    def _made(self, given: Sequence[Any]) -> "Compiled | Recorded | None":
        try:
            if self._backend == "cudagraphs":
                return Recorded(self._graph, given, self._stays)
            return Compiled(self._graph, given)
        except Exception as error:
            (first, *_) = str(error).strip().splitlines() or [""]
            _log.warning("%s runs eagerly: %s: %s: %s", self._name, self._backend, type(error).__name__, first)
            return None


def _lifted(graph: fx.Graph, outputs: Sequence[fx.Node]) -> fx.Graph:
    """The graph with its state as inputs, after the others; a tuple of outputs; and without releases."""
    new, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.find_nodes(op="placeholder"):
        env[node] = new.placeholder(node.name)
        env[node].meta["steal_arg"] = _is_emptied(node)
    for node in graph.find_nodes(op="get_attr"):
        env[node] = new.placeholder(f"state_{node.name}")
    for node in graph.nodes:
        if node.op == "call_function" and node.target is not ops.release:
            env[node] = new.node_copy(node, env.__getitem__)
            env[node].meta = {}  # values of another fake mode
    new.output(tuple(env[node] for node in outputs))
    return new
