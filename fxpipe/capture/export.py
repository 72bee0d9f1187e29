"""Run `torch.export` on a model: with any batch size where the model allows it, else at the call's.

1. batch as a symbol, traced at a size that no other dimension has
2. an input whose rows only happen to be as many as the samples keeps its size, and 1. again
3. batch as a symbol, traced at the call's size             (`if batch > 64`: the branch that the call takes)
4. the call's size alone; 1. after all, where it is the same graph at that size
"""

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import sympy
import torch
from torch import fx, nn

from fxpipe.capture import own_graphs, private
from fxpipe.capture.asked import IfTraced, answered, asking
from fxpipe.capture.changed import called
from fxpipe.capture.code_names import knows_sizes, reads_anew
from fxpipe.capture.holders import own_functions
from fxpipe.capture.inputs import Dims, InputSpec, Leaf
from fxpipe.capture.known import Given, NumbersRead, forward_begins, numbers_read
from fxpipe.capture.later_calls import Lengths, later_is_other
from fxpipe.capture.model_call import ModelCall
from fxpipe.capture.same import computation
from fxpipe.capture.size_reads import builtins_watched, decisions_noted, sizes_read_plainly
from fxpipe.capture.sizes import is_symbolic
from fxpipe.capture.state import WrittenEntry, carried_on, state_written, warn_of_tensors
from fxpipe.capture.watch import buffers_kept, watched
from fxpipe.errors import CaptureError, FxpipeError, ValuesError

ResultOf = Callable[[Any], torch.Tensor]
ResultsOf = Callable[[Any], torch.Tensor | tuple[torch.Tensor, ...]]
Trace = Callable[..., torch.export.ExportedProgram]


@dataclass(frozen=True)
class Exported:
    """`graph` is flat; `fixed` says why only the batch size of `inputs` runs, None where any does.

    With `fewest` samples and more, up to that batch size and on to `most` (None is infinity), forward itself decides as
    it did in the trace. `kept` tells of tensors that forward leaves on the model, `numbers` of what it read as such.
    """

    program: torch.export.ExportedProgram
    graph: fx.Graph
    inputs: InputSpec
    fixed: str | None
    fewest: int
    most: int | None
    numbers: NumbersRead
    kept: tuple[str, ...]


class ExportedStep(nn.Module):
    """The model, taking its tensor leaves positionally and returning its result alone: of a training step, the loss,
    and after that the tensors beside it."""

    def __init__(self, call: ModelCall, result_of: ResultsOf, one_batch: bool = True) -> None:
        super().__init__()
        self.model, self.surroundings, self.given = call.model, call.surroundings, call.given or Given()
        self._inputs, self._result_of, self._one_batch = call.inputs, result_of, one_batch
        self.sizes: Sequence[str] = ()
        self.written: list[WrittenEntry] = []

    def forward(self, *given: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        count = len(given) - len(self.sizes)
        leaves, sizes = given[:count], dict(zip(self.sizes, given[count:], strict=True))
        batched = [t for t, leaf in zip(leaves, _tensors(self._inputs), strict=True) if leaf.batched]
        for tensor in batched[1:] if self._one_batch else ():
            torch._check(tensor.shape[0] == batched[0].shape[0])
        forward_begins(dict(zip(self._inputs.tensor_names, leaves, strict=True)), sizes)
        args, kwargs = self._inputs.rebuild(leaves)
        kept = state_written(self.model, leaves, self.written)
        with private.asked_if_traced(IfTraced()), buffers_kept(self.model), kept:
            with nullcontext() if self.surroundings is None else self.surroundings.autocast():
                output = called(self.model, self._inputs.signature, args, kwargs)
            return self._result_of(output)


def export_step(call: ModelCall, result_of: ResultsOf) -> Exported:
    """Trace a call. What is given of its inputs forward may read, in a graph for the call's size alone, but on the
    first try.

    Raises:
        CaptureError: forward decides by values, fails, or holds what a trace would lose; names the module.
    """
    inputs = call.inputs

    def trace(size: int, dynamic: bool = True, one_batch: bool = True) -> torch.export.ExportedProgram:
        step = ExportedStep(call, result_of, one_batch)
        return _trace(step, inputs, _resized(call, size), _batch_dims(inputs, dynamic))

    def at_size(reason: str) -> Exported:
        try:
            return _flat(trace(inputs.batch_size, dynamic=False), inputs, reason)
        except _Failed as error:
            kind = ValuesError if isinstance(error, ValuesError) else CaptureError
            raise kind(str(error)) from error.__cause__

    def same_or(fixed: Exported, symbolic: torch.export.ExportedProgram) -> Exported:
        flexible, size = _flat(symbolic, inputs, None), inputs.batch_size
        return flexible if computation(flexible.graph, size) == computation(fixed.graph, size) else fixed

    def confirmed(symbolic: torch.export.ExportedProgram) -> Exported:
        places = (symbolic.graph_module.meta[_READ].told, *map(knows_sizes, own_functions(call.model)))
        if place := next(filter(None, places), None):
            return same_or(at_size(f"forward does something else of a plain number, at {place}"), symbolic)
        return _flat(symbolic, inputs, None)

    if inputs.batch_size == 1:
        return at_size("the batch has one sample")
    if call.given is not None and not call.given.first:
        return at_size("forward reads numbers of its inputs")
    symbolic, fault = _attempt(trace, _free_size(call), inputs)
    if symbolic is not None and fault is None:
        return confirmed(symbolic)
    free = _free_at_size(trace, inputs)
    known = [one for one in free if one is not None]
    if any(known) and not all(known):
        return export_step(replace(call, inputs=_with_batched(inputs, free)), result_of)
    traced, other = _attempt(trace, inputs.batch_size, inputs) if all(known) else (None, fault)
    if traced is not None and other is None:
        return confirmed(traced)
    fixed = at_size(fault or "")
    if symbolic is None or not all(is_symbolic(value.shape[0]) for value in _batched_values(symbolic, inputs)):
        return fixed
    return same_or(fixed, symbolic)


def of_one_batch(call: ModelCall, result_of: ResultOf) -> InputSpec:
    """The call's inputs, without a batch in those whose rows only happen to be as many: forward leaves them any number.

    Raises:
        CaptureError: forward fails so.
    """
    step, inputs = ExportedStep(call, result_of, one_batch=False), call.inputs
    program, _ = answered(lambda: _traced_once(step, _resized(call, _free_size(call)), _batch_dims(inputs, True)))
    (made,) = (node for node in program.graph.nodes if node.op == "output")
    size = made.args[0][0].meta["val"].shape[0]
    batched = [str(value.shape[0]) == str(size) for value in _batched_values(program, inputs)]
    return _with_batched(inputs, batched) if any(batched) else inputs


def export_any_size(
    call: ModelCall, result_of: ResultOf, any_batch: bool, numbers: Mapping[str, int], only: Dims | None
) -> Exported:
    """Trace a call with every size of its inputs free, as far as forward leaves it so, or `only` these, and `numbers`
    that it reads. They are sizes of further inputs, with these names, after all others.

    Raises:
        CaptureError: forward fails so.
    """
    size = _free_size(call) if any_batch else call.inputs.batch_size
    step = ExportedStep(call, result_of)
    step.sizes = [*numbers]
    shaped = _resized(call, size)
    places = [torch.empty(number, dtype=torch.bool, device="meta") for number in numbers.values()]
    leaves = [Leaf(name, True, False, (number,), torch.bool, None) for name, number in numbers.items()]
    inputs = replace(call.inputs, leaves=(*call.inputs.leaves, *leaves))
    with sizes_read_plainly(), private.sizes.general_sizes():
        free = only if only is None else {**only, **{name: (0,) for name in numbers}}
        # once: it is compared with a trace of which it is known what forward keeps
        program, _ = answered(lambda: _traced_once(step, (*shaped, *places), _all_dims(inputs, any_batch, free)))
    if any_batch and (fault := private.sizes.dynamic_fault(_batched_values(program, inputs), inputs.batch_size)):
        raise CaptureError(fault)
    return _flat(program, inputs, None if any_batch else "it was so before")


def _flat(program: torch.export.ExportedProgram, inputs: InputSpec, fixed: str | None) -> Exported:
    size, values = inputs.batch_size, _batched_values(program, inputs)
    graph = private.flatten_regions(program.graph_module)
    lifted = program.graph_signature.inputs_to_lifted_tensor_constants
    own_graphs.cut_out(graph, {at: program.constants[name] for at, name in lifted.items()})
    numbers, kept = program.graph_module.meta[_READ], program.graph_module.meta.get(_KEPT, ())
    if fixed is not None:
        return Exported(program, graph, inputs, fixed, size, size, numbers, kept)
    fewest = private.sizes.fewest_samples(values, size)
    if any(map(_squeezes_free_sizes, graph.nodes)):
        fewest = max(fewest, 2)
    return Exported(program, graph, inputs, fixed, fewest, private.sizes.most_samples(values, size), numbers, kept)


def _squeezes_free_sizes(node: fx.Node) -> bool:
    """Whether another dimension goes, and with it what forward may ask for, where such a size is one."""
    if private.packet_name(node.target) != "squeeze":
        return False
    shape = node.args[0].meta["val"].shape  # type: ignore[union-attr]
    dims: Any = node.args[1] if len(node.args) > 1 else range(len(shape))
    return any(is_symbolic(shape[dim]) for dim in ([dims] if isinstance(dims, int) else dims) if shape)


def _attempt(trace: Trace, size: int, inputs: InputSpec) -> tuple[torch.export.ExportedProgram | None, str | None]:
    """A trace with the batch as a symbol, and what is wrong with it at the call's batch size."""
    try:
        exported = trace(size)
    except _Failed as error:
        return None, str(error)
    return exported, private.sizes.dynamic_fault(_batched_values(exported, inputs), inputs.batch_size)


def _free_at_size(trace: Trace, inputs: InputSpec) -> list[bool | None]:
    """For each batched input, whether forward leaves its size free at the call's batch size; None where it reads none.

    Where some are free and others not, the others are no batches: their rows only happen to be as many.
    """
    try:
        nodes = _batched_nodes(trace(inputs.batch_size, one_batch=False), inputs)
    except _Failed:
        return [False]
    return [is_symbolic(node.meta["val"].shape[0]) if node.users else None for node in nodes]


def _with_batched(inputs: InputSpec, batched: Sequence[bool | None]) -> InputSpec:
    flags = iter(one is not False for one in batched)
    return replace(inputs, leaves=tuple(replace(f, batched=next(flags)) if f.batched else f for f in inputs.leaves))


def _batched_nodes(exported: torch.export.ExportedProgram, inputs: InputSpec) -> list[fx.Node]:
    names = set(exported.graph_signature.user_inputs)
    nodes = [n for n in exported.graph.find_nodes(op="placeholder") if n.name in names]
    return [node for node, leaf in zip(nodes, _tensors(inputs), strict=True) if leaf.batched]


def _batched_values(exported: torch.export.ExportedProgram, inputs: InputSpec) -> list[torch.Tensor]:
    return [node.meta["val"] for node in _batched_nodes(exported, inputs)]


def _tensors(inputs: InputSpec) -> list[Leaf]:
    return [leaf for leaf in inputs.leaves if leaf.is_tensor]


def _free_size(call: ModelCall) -> int:
    """A prime that no dimension of an input or parameter has, so that the trace confuses the batch with none.

    The next from the call's size on: a branch such as diffusers' `if batch >= 64` is then the call's, in one trace.
    """
    inputs = call.inputs
    taken = {inputs.rows, *(int(size) for leaf in _tensors(inputs) for size in leaf.shape[int(leaf.batched) :])}
    taken |= {int(size) for parameter in call.model.parameters() for size in parameter.shape}
    return next(n for n in count(max(5, inputs.batch_size)) if n not in taken and sympy.isprime(n))


def _resized(call: ModelCall, size: int) -> tuple[torch.Tensor, ...]:
    """Tensors shaped like the examples, with a batch of `size`; a meta model's or meta examples' on its device."""
    shapes = [call.inputs.shape_of(leaf, size) for leaf in _tensors(call.inputs)]
    own = next((p.device for p in call.model.parameters()), torch.device("cpu"))
    places = [own if own.type == "meta" or example.is_meta else example.device for example in call.examples]
    given = zip(shapes, call.examples, places, strict=True)
    return tuple(torch.empty(shape, dtype=example.dtype, device=place) for shape, example, place in given)


class _Failed(CaptureError):
    """A trace that failed, for a reason that another batch size might not meet."""


class _FailedByValue(_Failed, ValuesError):
    """Where a number that forward has read is none, or Python needs a size or a value as a key."""


def _trace(
    step: ExportedStep,
    inputs: InputSpec,
    examples: tuple[torch.Tensor, ...],
    free: Sequence[set[int]],
) -> torch.export.ExportedProgram:
    """A trace, and where forward has kept something, others of later calls: a graph has every call alike, and all
    tensors, however they lie in memory.

    Raises:
        CaptureError: one of them computes something else; names the attribute, or the question.
    """

    def first() -> tuple[torch.export.ExportedProgram, list[WrittenEntry]]:
        written = step.written = []  # this list: an export puts a copy of how it was in its place
        return _traced_once(step, examples, free), written

    (exported, written), asked = answered(first)
    anew = next(filter(None, map(reads_anew, own_functions(step.model))), "")
    if not written and not asked.found and not anew:
        return exported
    computed = computation(exported.graph, inputs.batch_size)
    asked.require_same(
        lambda: computation(_traced_once(step, examples, free).graph, inputs.batch_size) == computed, anew
    )
    if not written:
        return exported

    def again(state: Sequence[WrittenEntry], lengths: Lengths) -> Sequence[WrittenEntry] | None:
        found = step.written
        with asking("", asked.is_traced), carried_on(state), suppress(CaptureError):
            other = _traced_once(step, examples, free, lengths)
            return found if computation(other.graph, inputs.batch_size) == computed else None
        return None

    second = None if any(one.is_read for one in written) else again(written, {})
    if second is None or later_is_other(written, second, again):
        told = "computes something else the next" if second is None else "may compute something else a later"
        again_written = {one.place for one in second or ()}
        which = next((one for one in written if one.is_read or one.place in again_written), written[0])
        raise CaptureError(
            f"{which}, and {told} time, but a graph has every call alike; pass what changes as "
            "an input, or set it outside of forward"
        )
    exported.graph_module.meta[_KEPT] = warn_of_tensors(written)
    return exported


_READ, _KEPT = "fxpipe.read", "fxpipe.kept"

_OF_MASKS = "; where masks choose together, make the mask once: known = y > 0, then scores[known, labels[known]]"
_OF_KEYS = (
    "; it takes as a key, or into a set, a size or a number read from a tensor, which the trace does not know: compare "
    "it with others, or keep it a tensor"
)

_LOST = "torch loses a size that is free, as its vmap of a convolution does of what comes from around the function,"


def _traced_once(
    step: ExportedStep,
    examples: tuple[torch.Tensor, ...],
    free: Sequence[set[int]],
    lengths: Lengths | None = None,
) -> torch.export.ExportedProgram:
    """A trace that leaves the `free` dimensions of each example so."""
    shapes = tuple(dict.fromkeys(sorted(dims), torch.export.Dim.AUTO) or None for dims in free)
    read: NumbersRead | None = None
    with _module_trail() as trail:
        try:
            with ExitStack() as stack:
                for guard in (private.global_hooks_kept(), private.quiet(), private.code_when_run()):
                    stack.enter_context(guard)
                for guard in (watched(step.model), decisions_noted(), builtins_watched(step.model, lengths or {})):
                    stack.enter_context(guard)
                if step.surroundings is not None:
                    stack.enter_context(step.surroundings.checked())
                    examples = stack.enter_context(step.surroundings.moved(step.model, examples))
                read = stack.enter_context(numbers_read(step.model, step.given))
                program = torch.export.export(step, examples, dynamic_shapes=(shapes,), strict=False)
                program.graph_module.meta[_READ] = read
                private.let_go(program.graph)
                if read.failed:  # and forward went on
                    raise read.failed[0]
                return program
        except FxpipeError as error:
            kind = ValuesError if isinstance(error, ValuesError) else CaptureError
            raise kind(f"{_where(trail)}: {error}") from None
        except private.VALUE_ERRORS as error:
            raise ValuesError(
                f"{_where(trail)}: forward decides by the value of a tensor{_line(error)}; keep it a tensor "
                "(torch.where instead of if, a weighted sum instead of a mask index, no .item(); samples' places in a "
                "table by (table == x[:, None]).int().argmax(1)), or compute it before forward, as noisy inputs by "
                "scheduler.add_noise, and give it as an input" + _in_eval(trail)
            ) from error
        except Exception as error:
            reason = next(iter(str(error).strip().splitlines()), "")
            by_key = isinstance(error, TypeError) and reason.endswith("SymInt")
            kind = _FailedByValue if by_key or (read is not None and read.unknown) else _Failed
            hint = _OF_KEYS if by_key else _OF_MASKS if "Pending unbacked symbols" in reason else ""
            told = f"{_where(trail)}: forward fails{_line(error)}: {type(error).__name__}: {reason}{hint}"
            if "not tracked with proxy" in reason:
                told = f"{_where(trail)}: {_LOST}{_line(error)}"
            raise kind(told) from error


def _batch_dims(inputs: InputSpec, any_batch: bool) -> list[set[int]]:
    return [{0} if leaf.batched and any_batch else set() for leaf in _tensors(inputs)]


def _all_dims(inputs: InputSpec, any_batch: bool, only: Dims | None) -> list[set[int]]:
    """All dimensions, or `only` these of inputs by name; one of a single entry is one."""

    def of(leaf: Leaf) -> set[int]:
        dims = range(int(leaf.batched), len(leaf.shape)) if only is None else only.get(leaf.name, ())
        return {dim for dim in dims if leaf.shape[dim] > 1}

    batch = _batch_dims(inputs, any_batch)
    return [one | of(leaf) for one, leaf in zip(batch, _tensors(inputs), strict=True)]


def _line(error: BaseException) -> str:
    """Where in the user's code: the last frame that is neither torch's nor ours."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(private.FRAMEWORK)]
    return f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""


@contextmanager
def _module_trail() -> Iterator[list[nn.Module]]:
    """The modules entered and not left: after an exception, the last is the one that failed."""
    trail: list[nn.Module] = []

    def enter(module: nn.Module, args: Any) -> None:
        trail.append(module)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        while trail and trail.pop() is not module:
            pass

    module = nn.modules.module
    with module.register_module_forward_pre_hook(enter), module.register_module_forward_hook(leave):
        yield trail


def _in_eval(trail: Sequence[nn.Module]) -> str:
    """A remedy where a module's code asks for its mode, as adapters do that are dropped at random."""
    code = getattr(type(trail[-1]).forward, "__code__", None) if trail else None
    decides = code is not None and "training" in code.co_names and trail[-1].training
    return ", or call .eval() on the module if it decides in training alone" if decides else ""


def _where(trail: Sequence[nn.Module]) -> str:
    roots = [m for m in trail if isinstance(m, ExportedStep)]
    names = {id(m): n for n, m in roots[0].model.named_modules()} if roots else {}
    path = next((names[id(m)] for m in reversed(trail) if id(m) in names), "")
    return f"module {path or '(the model itself)'}"
