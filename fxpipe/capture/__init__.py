"""Capture: the user's whole training step, or a denoiser, as one flat, functional FX graph of ATen operations.

    forward(x, y):                       p_conv_weight = placeholder   kind=parameter
        with no_grad(): z = vae(x)       x             = placeholder   kind=input
        n = randn_like(z)          ->    draw_0        = placeholder   kind=draw
        return mse(unet(z + n), y)       conv2d, silu, ..., mse_loss, output

Every node carries `meta["val"]` (its fake tensor, with the batch as a symbol) and `meta["path"]` (its module's path);
random draws and parameters are placeholders, `no_grad` regions and autocast regions are marks on the nodes.

inputs, trees    a call's tensors by name         export        torch.export, watched: what it would lose is refused
model_call       a call, as it is captured
own_gradients    of autograd functions, traced    own_graphs    taken out; backwards: the operation of each
functionalise    no writes in place (views)       (watch, calls, weights, random_calls, transforms, written_out)
known            numbers read from tensors         evaluation    what these hold, of a trace's nodes
updates          what forward writes into parameters and buffers (batch_statistics)
masked           what masks choose, at all places of them
guards           what is taken for granted of inputs
formulas         of operations in transforms
outputs          what forward returns beside the loss  same, kept_tables      whether two captures are one step
draws            randomness outside (attention)   randomness    numbers that do not depend on the layout
cache            captures on disk (stored, model_digest, code_names, files, expressions)
private          names of torch that are private
fingerprint      which graph this is              sizes, reach  sizes at a number of samples; walks over graphs
surroundings     where forward runs, and in which precision
"""

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import sympy
import torch
from torch import fx, nn

from fxpipe.capture import batch_statistics, functionalise, masked, private
from fxpipe.capture.attention import expand_attention_dropout
from fxpipe.capture.changed import Changed
from fxpipe.capture.draws import hoist_draws, passes_through
from fxpipe.capture.export import Exported, ResultOf, export_step
from fxpipe.capture.fingerprint import step_fingerprint
from fxpipe.capture.guards import Guard
from fxpipe.capture.holders import as_held
from fxpipe.capture.inputs import InputSpec
from fxpipe.capture.known import Read
from fxpipe.capture.model_call import ModelCall
from fxpipe.capture.outputs import OutputsFound, drop_unknown, is_number, outputs_of, separate, sinks
from fxpipe.capture.randomness import Draw
from fxpipe.capture.reach import reached
from fxpipe.capture.sizes import alike_sizes, expression
from fxpipe.capture.updates import Update, refuse_all, require_plain, require_seen, taken_out
from fxpipe.capture.views import shape_nodes
from fxpipe.capture.weights import check_weights
from fxpipe.errors import CaptureError, ValuesError


@dataclass(frozen=True)
class Capture:
    """One training step, or one call of a denoiser, as a graph.

    `tensors` maps a placeholder to the state name (parameter, buffer) or constant it stands for; `batch` is the symbol
    of the batch size, None when only the static size `inputs.batch_size` could be captured; `notes` tells the user what
    had to be given up for it, `unchecked` which assertions no rank checks, `left_out` names what a training step's
    forward returns beside the loss that is no output. `fingerprint` tells the step, as it was captured, from others; it
    is that while what forward has `read` as numbers keeps its value, and for calls whose inputs the `guards` hold of;
    `kept` tells of tensors that forward leaves on the model, where no program does; `updates` are what it writes into
    the model's own tensors. Smaller batches than the call's, down to `fewest` samples, and larger ones up to `most`
    (None is infinity), are computed by the same graph.
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
    fewest: int
    most: int | None
    left_out: tuple[str, ...] = ()
    fingerprint: str = ""
    read: Read = field(default_factory=dict)
    kept: tuple[str, ...] = ()
    guards: tuple[Guard, ...] = ()
    updates: tuple[Update, ...] = ()
    unchecked: tuple[str, ...] = ()

    @cached_property
    def nodes(self) -> Mapping[str, fx.Node]:
        """The graph's nodes by name, in order; see `rewritten`."""
        return {node.name: node for node in self.graph.nodes}

    @cached_property
    def places(self) -> Mapping[str, int]:
        """Every node's place in the graph's order, by name."""
        return {name: place for place, name in enumerate(self.nodes)}

    def rewritten(self) -> None:
        """Whoever changes the graph says so here."""
        for name in ("nodes", "places", "result", "outputs"):
            vars(self).pop(name, None)

    @cached_property
    def result(self) -> fx.Node:
        """What the graph returns: a training step's loss, a denoiser's prediction."""
        (output,) = self.graph.find_nodes(op="output")
        node = output.args[0][0] if isinstance(output.args[0], tuple) else output.args[0]
        assert isinstance(node, fx.Node)
        return node

    @cached_property
    def outputs(self) -> Mapping[str, fx.Node]:
        """What a training step's forward returns beside the loss, by name: the nodes that hand it over."""
        return sinks(self.graph)

    @property
    def seen(self) -> Mapping[str, str]:
        """What is written of outputs that are for this alone, by their names."""
        return {name: update.name for update in self.updates for name in update.seen}

    @property
    def numbers(self) -> list[fx.Node]:
        """Those of the outputs that travel with the loss."""
        return [node for node in self.outputs.values() if is_number(node)]

    @property
    def loss_bytes(self) -> int:
        """Of the loss and the numbers beside it, as ranks tell them to each other."""
        return 8 * (1 + len(self.numbers)) if self.numbers else int(self.result.meta["val"].nbytes)

    def __str__(self) -> str:
        counts = {kind: 0 for kind in ("parameter", "buffer", "constant", "input", "draw")}
        for node in self.graph.find_nodes(op="placeholder"):
            counts[node.meta["kind"]] += 1
        calls = sum(node.op == "call_function" for node in self.graph.nodes)
        head = f"capture: {calls} operations, " + ", ".join(f"{n} {kind}s" for kind, n in counts.items() if n)
        return "\n".join([head, *(f"  note: {note}" for note in (*self.notes, *self.unchecked))])


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
        found = type(value).__name__
        if isinstance(value, torch.Tensor):
            found = f"{[size if isinstance(size, int) else 'batch' for size in value.shape]} {value.dtype}"
        raise CaptureError(
            f"the model's forward must return a scalar loss (or have one in .loss), got {found}; "
            "wrap the model in a module whose forward computes the loss"
        )
    return value.reshape(())


def _has_effect(node: fx.Node) -> bool:
    """Whether a node counts though nobody reads it. Attention does not: what it might have drawn is an input by now."""
    drawn = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return not drawn and node.is_impure()


def capture(call: ModelCall, result_of: ResultOf = loss_of) -> Capture:
    """Trace a call of a model, with any batch size where it allows that.

    Args:
        result_of: the one tensor that counts in what forward returns; of a training step its loss.

    Raises:
        ValuesError: forward reads numbers of inputs that are not given.
        CaptureError: the model mutates its buffers or inputs, branches on values, or fails to trace; names the module.
    """
    check_weights(call.model)
    found: list[OutputsFound] = []

    def result(output: Any) -> tuple[torch.Tensor, ...]:
        if isinstance(output, Changed) and result_of is loss_of:
            if output.is_put:
                raise CaptureError(
                    f"forward changes its input {next(iter(output.arguments))} in place; a graph has no effect but its "
                    "result: return the new value"
                )
            output = output.output
        found.append(outputs_of(output) if result_of is loss_of else ({}, ()))
        return (result_of(output), *found[-1][0].values())

    with torch.set_grad_enabled(result_of is loss_of):  # predictions are made without, which forward may ask for
        exported = export_step(call, result)
    outputs, others = found[-1]
    captured = captured_from(call.model, exported, list(outputs), result_of is loss_of)
    return replace(captured, left_out=(*others, *captured.left_out))


def captured_from(model: nn.Module, exported: Exported, outputs: Sequence[str] = (), is_step: bool = False) -> Capture:
    """The capture that a trace of `model` is, of a training step (`is_step`) or a denoiser; `outputs` names what it
    returns after its result."""
    inputs = exported.inputs
    tensors, constants = _name_placeholders(model, exported)
    tied = {name: first for name, first in _tied_names(model).items() if name != first}
    tensors = {placeholder: tied.get(name, name) for placeholder, name in tensors.items()}
    _refuse_sparse(exported.graph, is_step)
    batch_statistics.write_out(exported.graph)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    wanted = {name for name, p in parameters.items() if p.requires_grad}
    graph, overwritten, rewritten = functionalise.run(exported.graph)
    _mark_requires_grad(graph, wanted, tensors)
    if not is_step:
        refuse_all(rewritten)
    updates, seen = taken_out(graph, rewritten, tensors)
    held = {node.meta["state"]: constants[node.name] for node in graph.nodes if node.name in constants}
    require_plain(model, updates, exported.numbers.read, held)
    unchecked = _drop_no_ops(graph)
    _mark_requires_grad(graph, wanted, tensors)
    graph.eliminate_dead_code()
    functionalise.refuse_hidden_writes(overwritten)
    combines = masked.write_whole(graph)
    _read_sizes(graph)
    expand_attention_dropout(graph)
    draws = hoist_draws(graph, constants)
    outputs, left_out = drop_unknown(graph, [*outputs, *seen])
    require_seen(updates, left_out)
    graph.eliminate_dead_code(is_impure_node=_has_effect)
    _refuse_values(graph, combines)
    _mark_requires_grad(graph, wanted, tensors)
    separate(graph, outputs)
    for node in graph.find_nodes(op="placeholder"):
        if not node.users:
            graph.erase_node(node)
    _mark_requires_grad(graph, wanted, tensors)
    _unmark_detached(graph)
    used = {tensors[n.name] for n in graph.find_nodes(op="placeholder") if n.name in tensors}
    state = [*parameters, *dict(model.named_buffers())]
    unused = tuple(n for n in state if n not in used and tied.get(n, n) not in used)
    trainable = frozenset(n for n in used if n in parameters and parameters[n].requires_grad)
    graphs = graph, *(update.graph for update in updates)
    kept = {node.name for one in graphs for node in one.find_nodes(op="placeholder")}
    constants = {name: constant for name, constant in constants.items() if name in kept}
    _refuse_foreign_gradients(graph, constants, {name: parameters[name] for name in wanted} if is_step else {})
    graph.lint()
    batch = _batch(graph, exported)
    notes = () if batch else _notes(exported)
    return Capture(
        graph, inputs, tensors, constants, trainable, tied, draws, batch, unused, notes, exported.fewest,
        exported.most, tuple(left_out), step_fingerprint(graph, draws, updates), exported.numbers.read, exported.kept,
        tuple(exported.numbers.guards), updates, unchecked,
    )  # fmt: skip


def _notes(exported: Exported) -> tuple[str, ...]:
    """Why there is no symbol for the batch."""
    size, why = exported.inputs.batch_size, exported.fixed or "the result depends on no input with a batch"
    batched = [leaf.name for leaf in exported.inputs.leaves if leaf.batched]
    if "forward fails" in why and len(batched) > 1:
        why += f" (if {' or '.join(batched)} has {size} rows by chance, and no samples, give a batch of another size)"
    return (f"only batches of {size}, in one micro-batch: the graph holds for no other size, as {why}",)[: size > 1]


_NAMES_OF_PROGRAMS = {"transport", "random", "carried", "loss_scale", "saved", "gathered_weights", "known_in_call"}
"""What ranks' programs and their graphs are given beside a model's inputs; those of the next batch begin with next_."""


def _name_placeholders(model: nn.Module, exported: Exported) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Give each placeholder its kind; returns state names by placeholder and lifted constants by placeholder."""
    tensors: dict[str, str] = {}
    constants: dict[str, torch.Tensor] = {}
    program, names = exported.program, iter(exported.inputs.tensor_names)
    kinds = torch.export.graph_signature.InputKind
    specs = program.graph_signature.input_specs
    for node, spec in zip(exported.graph.find_nodes(op="placeholder"), specs, strict=True):
        if spec.kind is kinds.USER_INPUT:
            node.meta["kind"], node.meta["input"] = "input", next(names)
            name = private.spelled("".join(c if c.isalnum() else "_" for c in node.meta["input"]))
            is_taken = name in _NAMES_OF_PROGRAMS or name.startswith("next_")
            private.rename(node, f"input_{name}" if is_taken else name)
        elif spec.kind is kinds.CONSTANT_TENSOR:
            node.meta["kind"], node.meta["state"] = "constant", str(spec.target).removeprefix("model.")
            constant = program.constants[str(spec.target)]
            fake = private.mode_of(constant) is not None  # in the place of the model's own, which is elsewhere
            constants[node.name] = operator.attrgetter(node.meta["state"])(model) if fake else constant
        else:
            node.meta["kind"] = "parameter" if spec.kind is kinds.PARAMETER else "buffer"
            node.meta["state"] = tensors[node.name] = str(spec.target).removeprefix("model.")
    return tensors, as_held(model, constants)


def _refuse_foreign_gradients(
    graph: fx.Graph, constants: Mapping[str, torch.Tensor], trained: Mapping[str, torch.Tensor]
) -> None:
    """Refuse tensors from outside of forward whose gradient goes on there, or belongs to no parameter, and those in the
    memory of one, which other ranks may train."""
    memory = {private.memory_of(parameter): name for name, parameter in trained.items()}
    for node in graph.find_nodes(op="placeholder"):
        if node.name in constants and (name := memory.get(private.memory_of(constants[node.name]))):
            raise CaptureError(
                f"forward reads the memory of {name!r}, which is trained, by another tensor, {node.meta['state']!r}, "
                "as one in a list or a view of it: its gradient would be lost; read it from its module, or clone it"
            )
        if node.name in constants and constants[node.name].requires_grad:
            raise CaptureError(
                f"forward reads {node.meta['state']!r}, a tensor that requires grad and is no parameter: its gradient "
                "would be lost; compute it in forward, make it an nn.Parameter of the model, or detach it"
            )


def _refuse_sparse(graph: fx.Graph, is_step: bool) -> None:
    """Refuse a step's sparse tensors, and lookups with sparse gradients, which no stage sends, adds up or reduces."""
    for node in graph.nodes:
        if is_step and any(value.layout != torch.strided for value in private.tensors_in(node.meta.get("val"))):
            raise CaptureError(
                f"{private.where(node)}: {node.target}: its result is no dense tensor, which cannot be compiled; "
                "compute with dense ones (a mask to multiply with, gather, index_add)"
            )
        if private.argument(node, "sparse") is True:
            raise CaptureError(
                f"{private.where(node)}: {node.target}: sparse=True asks for a sparse gradient, which cannot be "
                "compiled; use sparse=False"
            )


def _refuse_values(graph: fx.Graph, combines: fx.Node | None) -> None:
    """Refuse numbers and sizes that depend on what tensors hold; an operation may be why what masks choose has one."""
    why = "" if combines is None else f", and {combines.target} ({private.where(combines)}) may combine what is chosen"
    for node in graph.nodes:
        unknown = private.sizes.depends_on_values(node.meta.get("val"))
        if node.op == "call_function" and (unknown or _has_size_of_values(node)):
            raise ValuesError(
                f"{private.where(node)}: {node.target}: its result's size or value depends on what a tensor "
                f"holds{why}; keep it a tensor of fixed size (a weighted sum, torch.where, or gather by argsort "
                "instead of a mask index, no .item())"
            )


def _has_size_of_values(node: fx.Node) -> bool:
    """Whether values make the size of a node's result, also where what follows holds for one size alone."""
    if node.target in _SIZED_BY_VALUES:
        return True
    if torch.Tag.dynamic_output_shape not in getattr(node.target, "tags", ()):
        return False
    masks = (i.meta["val"].dtype in (torch.bool, torch.uint8) for i in node.all_input_nodes[1:])
    return any(masks) if node.target is torch.ops.aten.index.Tensor else node.target not in _SIZED_BY_NUMBER


_SIZED_BY_VALUES = {torch.ops.aten.where.default, torch.ops.aten.nonzero_numpy.default, torch.ops.aten.argwhere.default}
_SIZED_BY_NUMBER = (torch.ops.aten.one_hot.default, torch.ops.aten.repeat_interleave.Tensor)  # where they are given one


def _drop_no_ops(graph: fx.Graph) -> tuple[str, ...]:
    """Remove assertions, dropouts that drop nothing, casts and broadcasts that change nothing; returns notes on those
    assertions which would have looked at values."""
    unchecked = dict[str, None]()
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is operator.getitem and (whole := _not_broadcast(node)) is not None:
            node.replace_all_uses_with(whole)
            graph.erase_node(node)
            continue
        if _checks_values(node):
            unchecked[f"{private.where(node)}: {node.target} is left out: no rank checks it"] = None
        if private.is_assertion(node.target):
            graph.erase_node(node)
        elif passes_through(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    return tuple(unchecked)


def _checks_values(node: fx.Node) -> bool:
    """Whether it asserts something of what a tensor holds, also as a number: `torch._check(x.sum().item() < 9)`."""
    if private.packet_name(node.target) in ("_assert_async", "_functional_assert_async"):
        return True
    condition = node.all_input_nodes if private.is_assertion(node.target) else ()
    numbers = reached(condition, lambda n: [] if private.tensors_in(n.meta.get("val")) else n.all_input_nodes)
    return any(private.packet_name(number.target) in ("item", "_local_scalar_dense") for number in numbers)


def _not_broadcast(node: fx.Node) -> fx.Node | None:
    """What an item of `broadcast_tensors` is equal to, where it has that shape already (as in every mse_loss)."""
    source, index = node.args
    if not isinstance(source, fx.Node) or source.target is not torch.ops.aten.broadcast_tensors.default:
        return None
    (given,) = source.args
    item: fx.Node = given[index]  # type: ignore[index, assignment]
    return item if alike_sizes(item.meta["val"].shape, node.meta["val"].shape) else None


_SHAPED_AS = {
    torch.ops.aten.expand_as.default: torch.ops.aten.expand.default,
    torch.ops.aten.view_as.default: torch.ops.aten.view.default,
    torch.ops.aten.reshape_as.default: torch.ops.aten.reshape.default,
}


def _read_sizes(graph: fx.Graph) -> None:
    """What takes another value's shape or type is given these: it depends on nothing that the other one holds."""
    for node in list(graph.nodes):
        if node.target in _SHAPED_AS:
            value, other = node.args
            with graph.inserting_before(node):
                node.args = (value, shape_nodes(graph, other))
            node.target = _SHAPED_AS[node.target]
        elif node.target is torch.ops.aten.type_as.default:
            value, other = node.args
            if value.meta["val"].device == other.meta["val"].device:
                node.target, node.args = torch.ops.aten.to.dtype, (value, other.meta["val"].dtype)


def _tied_names(model: nn.Module) -> dict[str, str]:
    """Every parameter name to the first name of the same tensor."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}


_MADE_LIKE = re.compile("^new_|_like$")


def _mark_requires_grad(graph: fx.Graph, trainable: set[str], tensors: Mapping[str, str]) -> None:
    """`requires_grad` by dataflow: some ancestor is a trainable parameter, and between lie no detach, no no_grad, and
    nothing that is only made like another value."""
    for node in graph.nodes:
        if node.op == "placeholder":
            node.meta["requires_grad"] = node.meta["kind"] == "parameter" and tensors[node.name] in trainable
            continue
        floats = any(t.is_floating_point() or t.is_complex() for t in private.tensors_in(node.meta.get("val")))
        blocked = node.meta.get("no_grad", False) or node.target is torch.ops.aten.detach.default
        differentiable = floats and not blocked and not _MADE_LIKE.search(private.packet_name(node.target))
        node.meta["requires_grad"] = differentiable and any(a.meta["requires_grad"] for a in node.all_input_nodes)


def _unmark_detached(graph: fx.Graph) -> None:
    """What reaches the result by detached values alone, as a target that the model itself makes, gets no gradient, and
    is computed under no_grad."""
    (output,) = graph.find_nodes(op="output")
    reached = {node for node in output.all_input_nodes[:1] if node.meta["requires_grad"]}
    for node in reversed(graph.nodes):
        if node in reached:
            reached |= {argument for argument in node.all_input_nodes if argument.meta["requires_grad"]}
        elif node.op == "call_function" and node.meta["requires_grad"]:
            node.meta["requires_grad"], node.meta["no_grad"] = False, True


def _batch(graph: fx.Graph, exported: Exported) -> tuple[sympy.Symbol, ...]:
    if exported.fixed is not None:
        return ()
    batched = {leaf.name for leaf in exported.inputs.leaves if leaf.batched}
    symbols: set[sympy.Symbol] = set()
    for node in graph.find_nodes(op="placeholder"):
        if node.meta["kind"] == "input" and node.meta["input"] in batched:
            symbols |= expression(node.meta["val"].shape[0]).free_symbols
    return tuple(sorted(symbols, key=str))
