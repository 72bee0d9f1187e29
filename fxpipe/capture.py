"""Capture: the user's whole training step as one flat, functional FX graph of ATen operations.

    forward(x, y):                       p_conv_weight = placeholder   kind=parameter
        with no_grad(): z = vae(x)       x             = placeholder   kind=input
        n = randn_like(z)          ->    draw_0        = placeholder   kind=draw
        return mse(unet(z + n), y)       conv2d, silu, ..., mse_loss, output

Every node carries `meta["val"]` (its fake tensor, with the batch as a symbol) and `meta["path"]` (its module's path);
random draws and parameters are placeholders, `no_grad` regions and autocast regions are marks on the nodes.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import sympy
import torch
from torch import fx, nn

from fxpipe import functionalise, private
from fxpipe.errors import CaptureError
from fxpipe.inputs import InputSpec
from fxpipe.randomness import Draw, PlainRandomCalls, is_random
from fxpipe.draws import draw_of, passes_through


@dataclass(frozen=True)
class Capture:
    """One training step as a graph.

    `tensors` maps a placeholder to the state name (parameter, buffer) or constant it stands for; `batch` is the symbol
    of the batch size, None when only the static size `inputs.batch_size` could be captured; `notes` tells the user what
    had to be given up.
    """

    graph: fx.Graph
    inputs: InputSpec
    tensors: Mapping[str, str]
    constants: Mapping[str, torch.Tensor]
    trainable: frozenset[str]
    tied: Mapping[str, str]
    draws: Mapping[str, Draw]
    batch: tuple[sympy.Symbol, ...]
    unused: tuple[str, ...]
    notes: tuple[str, ...]

    @cached_property
    def loss(self) -> fx.Node:
        (output,) = self.graph.find_nodes(op="output")
        node = output.args[0]
        assert isinstance(node, fx.Node)
        return node

    def __str__(self) -> str:
        counts = {kind: 0 for kind in ("parameter", "buffer", "constant", "input", "draw")}
        for node in self.graph.find_nodes(op="placeholder"):
            counts[node.meta["kind"]] += 1
        calls = sum(node.op == "call_function" for node in self.graph.nodes)
        head = f"capture: {calls} operations, " + ", ".join(f"{n} {kind}s" for kind, n in counts.items() if n)
        return "\n".join([head, *(f"  note: {note}" for note in self.notes)])


class _LossStep(nn.Module):
    """The model, taking its tensor leaves positionally and returning the scalar loss alone."""

    def __init__(self, model: nn.Module, inputs: InputSpec) -> None:
        super().__init__()
        self.model = model
        self._inputs = inputs

    def forward(self, *leaves: torch.Tensor) -> torch.Tensor:
        batched = [t for t, leaf in zip(leaves, self._tensor_leaves(), strict=True) if leaf.batched]
        for tensor in batched[1:]:
            torch._check(tensor.shape[0] == batched[0].shape[0])
        args, kwargs = self._inputs.rebuild(leaves)
        return loss_of(self.model(*args, **kwargs))

    def _tensor_leaves(self) -> list[Any]:
        return [leaf for leaf in self._inputs.leaves if leaf.is_tensor]


def loss_of(output: Any) -> torch.Tensor:
    """The scalar loss in a model's output: the output itself, its `loss` entry, or its first element."""
    value = output
    if isinstance(output, Mapping) and "loss" in output:
        value = output["loss"]
    elif isinstance(getattr(output, "loss", None), torch.Tensor):
        value = output.loss
    elif isinstance(output, tuple | list) and output:
        value = output[0]
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.is_floating_point():
        found = f"{list(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise CaptureError(
            f"the model's forward must return a scalar loss (or have one in .loss), got {found}; "
            "wrap the model in a module whose forward computes the loss"
        )
    return value.reshape(())


def capture(model: nn.Module, inputs: InputSpec, examples: Sequence[torch.Tensor]) -> Capture:
    """Trace `model` with a dynamic batch.

    Args:
        examples: the tensor leaves of one example call, in the order of `inputs`; only shapes and types are used.

    Raises:
        CaptureError: the model mutates its buffers or inputs, branches on values, or fails to trace; names the module.
    """
    step = _LossStep(model, inputs)
    exported = _export(step, inputs, _trace_examples(inputs, examples))
    _refuse_mutation(exported)
    graph, notes = private.inline_regions(exported.graph_module), []
    tensors, constants = _name_placeholders(graph, exported, inputs)
    functionalise.run(graph)
    _drop_no_ops(graph)
    draws = _hoist_draws(graph)
    graph.eliminate_dead_code()
    _clean_random_leftovers(graph)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tied = {name: first for name, first in _tied_names(model).items() if name != first}
    tensors = {placeholder: tied.get(name, name) for placeholder, name in tensors.items()}
    _mark_requires_grad(graph, {name for name, p in parameters.items() if p.requires_grad}, tensors)
    batch = _batch_symbols(graph, inputs)
    if not batch:
        notes.append(f"the batch could not be captured as dynamic: only batch size {inputs.batch_size} runs")
    used = {tensors[n.name] for n in graph.find_nodes(op="placeholder") if n.name in tensors and n.users}
    state = [*parameters, *dict(model.named_buffers())]
    unused = tuple(n for n in state if n not in used and tied.get(n, n) not in used)
    trainable = frozenset(n for n in used if n in parameters and parameters[n].requires_grad)
    graph.lint()
    return Capture(graph, inputs, tensors, constants, trainable, tied, draws, batch, unused, tuple(notes))


def _trace_examples(inputs: InputSpec, examples: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Uninitialised tensors of the examples' shapes, with a batch size that no other dimension has."""
    leaves = [leaf for leaf in inputs.leaves if leaf.is_tensor]
    taken = {int(size) for leaf in leaves for size in leaf.shape}
    size = next(p for p in (5, 7, 11, 13, 17, 19, 23, 29) if p not in taken)
    shapes = [(size, *leaf.shape[1:]) if leaf.batched else leaf.shape for leaf in leaves]
    return [
        torch.empty(shape, dtype=example.dtype, device=example.device)
        for shape, example in zip(shapes, examples, strict=True)
    ]


def _export(step: _LossStep, inputs: InputSpec, examples: Sequence[torch.Tensor]) -> torch.export.ExportedProgram:
    auto = torch.export.Dim.AUTO
    shapes = tuple({0: auto} if leaf.batched else None for leaf in inputs.leaves if leaf.is_tensor)
    with _module_trail() as trail, PlainRandomCalls():
        try:
            return torch.export.export(step, tuple(examples), dynamic_shapes=(shapes,), strict=False)
        except CaptureError as error:
            raise CaptureError(f"{_where(trail)}: {error}") from None
        except Exception as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise CaptureError(
                f"{_where(trail)}: cannot be captured: {reason[0]}. Control flow must not depend on tensor values, "
                "and shapes only on the inputs' shapes"
            ) from error


@contextmanager
def _module_trail() -> Iterator[list[nn.Module]]:
    """The modules entered and not left: after an exception, the last is the one that failed."""
    trail: list[nn.Module] = []

    def enter(module: nn.Module, args: Any) -> None:
        trail.append(module)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        while trail and trail.pop() is not module:
            pass

    handles = [
        nn.modules.module.register_module_forward_pre_hook(enter),
        nn.modules.module.register_module_forward_hook(leave),
    ]
    try:
        yield trail
    finally:
        for handle in handles:
            handle.remove()


def _where(trail: Sequence[nn.Module]) -> str:
    roots = [m for m in trail if isinstance(m, _LossStep)]
    names = {id(m): n for n, m in roots[0].model.named_modules()} if roots else {}
    path = next((names[id(m)] for m in reversed(trail) if id(m) in names), "")
    return f"module {path or '(the model itself)'}"


def _refuse_mutation(exported: torch.export.ExportedProgram) -> None:
    signature = exported.graph_signature
    for name in signature.buffers_to_mutate.values():
        path = _strip(name).rpartition(".")[0] or "(the model itself)"
        raise CaptureError(
            f"module {path}: forward changes its buffer {_strip(name)!r} (running statistics?), which micro-batches "
            "would change in another way; call .eval() on it, or use a normalisation without running statistics"
        )
    for name in signature.user_inputs_to_mutate.values():
        raise CaptureError(f"the model writes into its input {name!r} in place; clone it first")


def _strip(name: str) -> str:
    return name.removeprefix("model.")


def _name_placeholders(
    graph: fx.Graph, exported: torch.export.ExportedProgram, inputs: InputSpec
) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Give each placeholder its kind; returns state names by placeholder and lifted constants by placeholder."""
    tensors: dict[str, str] = {}
    constants: dict[str, torch.Tensor] = {}
    names = iter(inputs.tensor_names)
    kinds = torch.export.graph_signature.InputKind
    for node, spec in zip(graph.find_nodes(op="placeholder"), exported.graph_signature.input_specs, strict=True):
        if spec.kind is kinds.USER_INPUT:
            node.meta["kind"], node.meta["input"] = "input", next(names)
            private.rename(node, _identifier(node.meta["input"]))
            continue
        assert spec.target is not None
        if spec.kind is kinds.CONSTANT_TENSOR or spec.target not in exported.state_dict:
            node.meta["kind"] = "constant" if spec.kind is kinds.CONSTANT_TENSOR else "buffer"
            constants[node.name] = exported.constants.get(spec.target)  # type: ignore[assignment]
        else:
            node.meta["kind"] = "parameter" if spec.kind is kinds.PARAMETER else "buffer"
        if node.meta["kind"] != "constant":
            tensors[node.name] = _strip(spec.target)
            constants.pop(node.name, None)
    return tensors, constants


def _identifier(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)


def _drop_no_ops(graph: fx.Graph) -> None:
    """Remove assertions, dropouts that drop nothing and casts that change nothing."""
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if private.is_assertion(node.target):
            graph.erase_node(node)
        elif passes_through(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _hoist_draws(graph: fx.Graph) -> dict[str, Draw]:
    """Make every random operation a placeholder `draw_<k>`; a dropout becomes a product with its drawn mask."""
    random = [n for n in graph.nodes if n.op == "call_function" and is_random(n.target, n.args)]
    first = next(iter(graph.nodes))
    draws = {}
    for index, node in enumerate(random):
        draw, masks = draw_of(node, index)
        with graph.inserting_before(first):
            placeholder = graph.placeholder(f"draw_{index}")
        placeholder.meta = {**node.meta, "kind": "draw"}
        draws[placeholder.name] = draw
        value = placeholder
        if masks is not None:
            with graph.inserting_before(node):
                value = graph.call_function(torch.ops.aten.mul.Tensor, (masks, placeholder))
            value.meta = dict(node.meta)
        node.replace_all_uses_with(value)
        graph.erase_node(node)
    return draws


def _clean_random_leftovers(graph: fx.Graph) -> None:
    for node in list(graph.find_nodes(op="placeholder")):
        if not node.users:
            graph.erase_node(node)


def _tied_names(model: nn.Module) -> dict[str, str]:
    """Every parameter name to the first name of the same tensor."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}


_NOT_DIFFERENTIABLE = {torch.ops.aten.detach.default, torch.ops.aten.detach_.default}


def _mark_requires_grad(graph: fx.Graph, trainable: set[str], tensors: Mapping[str, str]) -> None:
    """`requires_grad` by dataflow: some ancestor is a trainable parameter and no detach or no_grad lies between."""
    for node in graph.nodes:
        if node.op == "placeholder":
            node.meta["requires_grad"] = node.meta["kind"] == "parameter" and tensors[node.name] in trainable
            continue
        value = node.meta.get("val")
        blocked = node.meta.get("no_grad", False) or node.target in _NOT_DIFFERENTIABLE
        differentiable = _any_float(value) and not blocked
        node.meta["requires_grad"] = differentiable and any(a.meta["requires_grad"] for a in node.all_input_nodes)


def _any_float(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_floating_point() or value.is_complex()
    return isinstance(value, tuple | list) and any(_any_float(v) for v in value)


def _batch_symbols(graph: fx.Graph, inputs: InputSpec) -> tuple[sympy.Symbol, ...]:
    batched = {leaf.name for leaf in inputs.leaves if leaf.batched}
    symbols: set[sympy.Symbol] = set()
    for node in graph.find_nodes(op="placeholder"):
        if node.meta["kind"] == "input" and node.meta["input"] in batched:
            size = node.meta["val"].shape[0]
            if isinstance(size, int):
                return ()
            symbols |= size.node.expr.free_symbols
    return tuple(sorted(symbols, key=str))
