"""A rank's program of one call as ops for the simulator: seconds of every operation, and the bytes that are alive.

k_own = linear(h, w)          run   its seconds     + k_own
send(k_own, to 1)             send  edge 3
k_from_1 = wait(recv)         wait  edge 3          + k_from_1
k = cat([k_own, k_from_1])    run   its seconds     + k, - k_from_1

Memory is followed by running the graph without data: storages appear and go as they will when it runs, so views cost
nothing, and what an operation of several kernels makes for itself counts while it is there.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fxpipe.plan import ops, row_ops
from fxpipe.plan.displaced_ops import done, held
from fxpipe.plan.rank_program import Message
from fxpipe.plan.sample_program import SampleProgram
from fxpipe.plan.unroll import ENDS
from fxpipe.simulate.op_lists import Bytes, Op, StepOps
from fxpipe.simulate.repeated import CallResult, call_key, result_of

SecondsOf = Callable[[Sequence[SampleProgram]], Mapping[fx.Node, float]]
_META = torch.device("meta")
_NEVER_AGAIN = {ops.begin, ops.send, ops.recv, ops.wait, done, held, getitem}
_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def sample_ops(
    programs: Sequence[SampleProgram],
    messages: Sequence[Message],
    inputs: Mapping[str, torch.Tensor],
    seconds_of: SecondsOf,
    keeps_sent: bool = False,
) -> StepOps:
    """The ops of all ranks.

    Args:
        inputs: the whole inputs by the programs' names, on the meta device.
        seconds_of: every node of these programs that takes time, its value being in its `meta["val"]`.
        keeps_sent: as for `alive_bytes`.
    """
    by_edge = {message.edge: message for message in messages}
    alive = [alive_bytes(program, inputs, keeps_sent) for program in programs]
    seconds = seconds_of(programs)
    ranks = [
        [_op(node, by_edge, seconds)._replace(memory=of_rank[node]) for node in program.graph.nodes]
        for program, of_rank in zip(programs, alive, strict=True)
    ]
    held = [
        {
            "weights": _num_bytes(program.state.values()),
            "inputs": _num_bytes(inputs[name] for name in program.inputs),
            "conditions": _num_bytes(inputs[name] for name in program.conditions),
        }
        for program in programs
    ]
    return StepOps(ranks, held)


def _num_bytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _op(node: fx.Node, by_edge: Mapping[int, Message], seconds: Mapping[fx.Node, float]) -> Op:
    if (message := message_op(node, by_edge)) is not None:
        return message
    if node.op == "call_function":
        return Op("run", seconds=seconds.get(node, 0.0))
    return Op("none")


def message_op(node: fx.Node, by_edge: Mapping[int, Message]) -> Op | None:
    """What begins an action, sends, posts a receive or waits."""
    if node.target is ops.begin:
        return Op("begin", action=str(node.args[1]))
    if node.target is ops.send:
        return Op("send", message=by_edge[node.args[3]])  # type: ignore[index]
    if node.target is ops.recv:
        return Op("post", message=by_edge[node.args[2]])  # type: ignore[index]
    if node.target is ops.wait:
        (receive,) = node.all_input_nodes
        return Op("wait", message=by_edge[receive.args[2]])  # type: ignore[index]
    return None


def alive_bytes(program: SampleProgram, inputs: Mapping[str, torch.Tensor], keeps_sent: bool) -> dict[fx.Node, Bytes]:
    """What every node adds to its rank's memory beside weights and inputs, and what goes after it.

    A value that is sent counts until its last use here, as on NCCL; where it `keeps_sent`, as gloo, to the end of the
    step, or of the next one where something crosses to that. A receive counts from when it is posted. Every node of the
    program that gives a tensor has its shape and type in `meta["val"]` afterwards.
    """
    meter = _Meter()
    state = {name: torch.empty_like(tensor, device=_META) for name, tensor in program.state.items()}
    likes = {name: inputs[name].to(_META) for name in program.inputs}
    meter.ignore([*state.values(), *likes.values()])
    with torch.no_grad():
        walk = _Walk(program.graph, state, meter, keeps_sent)
        walk.run(*(likes.get(node.name) for node in program.graph.find_nodes(op="placeholder")))
    for node, (shape, strides, dtype) in walk.values.items():
        node.meta["val"] = torch.empty_strided(shape, strides, dtype=dtype, device=_META)
    return walk.found


class _Walk(fx.Interpreter):
    """Runs a program on tensors without data."""

    def __init__(self, graph: fx.Graph, state: Mapping[str, torch.Tensor], meter: "_Meter", keeps_sent: bool) -> None:
        super().__init__(fx.GraphModule(torch.nn.Module(), fx.Graph()), graph=graph)
        self.state, self.meter, self.keeps_sent = state, meter, keeps_sent
        self.known: dict[Any, CallResult | None] = {}
        self.sent, self.sent_before = list[torch.Tensor](), list[torch.Tensor]()
        self.found: dict[fx.Node, Bytes] = {}
        self.values: dict[fx.Node, tuple[torch.Size, tuple[int, ...], torch.dtype]] = {}
        self._last: tuple[fx.Node, int, int] | None = None

    def run_node(self, n: fx.Node) -> Any:
        self._settle()
        before = self.meter.now
        self.meter.peak = before
        if n.op == "get_attr":
            result: Any = self.state[str(n.target)]
        elif n.op == "call_function":
            args, kwargs = fx.node.map_aggregate((n.args, n.kwargs), self._given)
            result = self._again_or_called(n, args, kwargs)
        else:
            result = super().run_node(n)
        if isinstance(result, torch.Tensor):
            self.values[n] = result.shape, result.stride(), result.dtype
        self._last = n, before, self.meter.now
        return result

    def _given(self, argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return self.env[argument]
        return _META if isinstance(argument, torch.device) else argument

    def _again_or_called(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if node.target in _NEVER_AGAIN:
            with self.meter:
                return self._call(node, args, kwargs)
        key, given = call_key(node.target, args, kwargs)  # type: ignore[arg-type]
        before = self.meter.now
        if (known := self.known.get(key)) is not None:
            result = known.again(given)
            self.meter.count(result)
            self.meter.peak = max(self.meter.peak, before + known.most_bytes)
            return result
        with self.meter:
            result = self._call(node, args, kwargs)
        self.known[key] = result_of(result, given, self.meter.now - before, self.meter.peak - before)
        return result

    def _call(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if node.target is ops.send and self.keeps_sent:
            self.sent.append(args[1].contiguous())
        if node.target in (ops.begin, ops.send):
            return None
        if node.target is ops.recv:
            return torch.empty(args[3], dtype=args[4], device=_META)
        if node.target is ops.wait:
            return args[0]
        if node.target is _ATTENTION and row_ops.is_fused(args[0], args[1], args[2], bool(kwargs.get("enable_gqa"))):
            # Without data it would be computed step by step. Kernels write the result in the order of the queries.
            query, width = args[0], args[2].shape[-1]
            return torch.empty_like(query) if query.shape[-1] == width else query.new_empty((*query.shape[:-1], width))
        if node.target is row_ops.attend:
            wide = torch.promote_types(args[0].dtype, torch.float32)
            result = args[0].new_empty((*args[0].shape[:-1], args[2].shape[-1]))
            return result, args[0].new_empty(args[0].shape[:-1], dtype=wide)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _settle(self) -> None:
        """Values that the node before was the last to use are gone by now, as is its own where nothing uses that."""
        if self._last is None:
            return
        node, before, made = self._last
        if not node.users:
            self.env.pop(node, None)
        if ENDS in node.meta:
            self.sent, self.sent_before = [], self.sent if node.meta[ENDS] else []
        gone = made - self.meter.now
        self.found[node] = Bytes((("activations", made - before),), (("activations", gone),), (), *[self._most] * 2)

    @property
    def _most(self) -> int:
        assert self._last is not None
        return max(self.meter.peak - self._last[1], 0)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        result = super().run(*args, **kwargs)
        self._settle()
        return result


class _Meter(TorchDispatchMode):
    """Bytes of all storages that operations have made and that are still there; `peak` since it was last set."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._seen: dict[int, int] = {}

    def ignore(self, values: Any) -> None:
        """Storages that are counted elsewhere."""
        for tensor in pytree.tree_leaves(values):
            if isinstance(tensor, torch.Tensor):
                self._seen[tensor.untyped_storage()._cdata] = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count(result)
        return result

    def count(self, result: Any) -> None:
        """What is new in a result."""
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self._seen:
                storage = tensor.untyped_storage()
                self._seen[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._gone, storage._cdata)
        self.peak = max(self.peak, self.now)

    def _gone(self, key: int) -> None:
        self.now -= self._seen.pop(key)
