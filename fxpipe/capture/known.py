"""Numbers that forward reads from tensors which no input and no weight has a part in: the graph has them as numbers.

times = linspace(1, 0, 4)     float(times[1])             0.666..., run as the trace has recorded it
register_buffer("sigma", ..)  float(self.sigma)           its value: another one later is another step, and refused
                              self.scales[1].item()       so of any other tensor from outside
                              float(x[1]), float(w[1])    refused: of inputs, draws and weights
input of a denoiser: mask     mask.sum(1).tolist()        its value, which the graph's calls must have (`guards.py`)
                              x[mask], mask.nonzero()     likewise: x[first:last], arange(first, last) where they follow
                                                          each other, else by number, as of repeat_interleave(mask)
                              if t > 500, float(t)        likewise; refused: numbers of what changes from step to step
                              x[mask] = token             no number: where(mask, token, x)
                              x[: mask.sum()]             a slice by its number
full([3], batch * 2)          n.tolist()                the size that it is filled with, three times
uniform = rand(1)             if uniform > 0.0            True: no draw decides it, as with a dropout of nothing
"""

import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from fxpipe.capture import private
from fxpipe.capture.calls import Table
from fxpipe.capture.evaluation import evaluated
from fxpipe.capture.guards import Guard, run_of
from fxpipe.capture.holders import holders_of
from fxpipe.capture.inputs import is_time
from fxpipe.capture.same import alike
from fxpipe.capture.sizes import is_symbolic
from fxpipe.capture.surroundings import no_autocast
from fxpipe.errors import CaptureError, ValuesError

Read = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""Buffers by name and other tensors that a model holds, each with its value when forward read it as a number."""


@dataclass(frozen=True)
class Given:
    """What a call's inputs hold, by name; `changing` are those that are others at every step. Where it is the `first`
    try, and others with more values follow, places that are not known end the trace, which goes on without them."""

    values: Mapping[str, torch.Tensor] = field(default_factory=dict)
    changing: Collection[str] = ()
    first: bool = False


@dataclass
class NumbersRead:
    """What forward has read as numbers so far: `read` of the model, and of inputs, as `guards` say.

    `names` and `inputs` are those of buffers and inputs by the names of the trace's placeholders. `sizes`: tensors by
    name that are as long as numbers to be read, in a trace that leaves these free. `unknown`: it has read others, which
    the trace has no numbers for; `failed`: what this, or a size, has raised in forward, which ends a trace. `told`:
    where it got the text of a free size. `chosen`: unknown masks, each with how many entries it chooses.
    """

    model: nn.Module
    buffers: Mapping[str, torch.Tensor]
    given: Given
    read: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    guards: list[Guard] = field(default_factory=list)
    names: Mapping[str, str] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)
    sizes: dict[str, torch.Tensor] = field(default_factory=dict)
    unknown: bool = False
    failed: list[Exception] = field(default_factory=list)
    told: str = ""
    chosen: list[tuple[fx.Node, Any]] = field(default_factory=list)


_NUMBERS = (bool, int, float)
_INTS = (torch.int32, torch.int64)
Made = Callable[[torch.Tensor], torch.Tensor]

_held: ContextVar[NumbersRead | None] = ContextVar("held", default=None)


@contextmanager
def numbers_read(model: nn.Module, given: Given) -> Iterator[NumbersRead]:
    """Inside, what forward reads as numbers is known of the model's buffers and of what is given, and noted."""
    found = NumbersRead(model, dict(model.named_buffers()), given)
    token, noted = _held.set(found), CaptureError.noted.set(found.failed)
    try:
        yield found
    finally:
        _held.reset(token)
        CaptureError.noted.reset(noted)


def value_of(tensor: torch.Tensor, is_truth: bool = False) -> torch.Tensor | None:
    """What a traced tensor holds where that is known; `is_truth` where only whether it is zero is asked for."""
    found = _known(tensor, is_truth)
    return None if found is None else found[0]


def _as_it_is(value: torch.Tensor) -> torch.Tensor:
    return value


def _known(
    tensor: torch.Tensor, is_truth: bool = False, are_sizes: bool = False, made: Made = _as_it_is
) -> tuple[torch.Tensor, int | None] | None:
    """What is `made` of a traced tensor's value, and which guard says so, if any; `are_sizes` where whole numbers are
    asked for that a trace may leave free."""
    held = _held.get()
    if held is not None and private.is_plain(tensor):
        _note(held, {_name_of(held, tensor): tensor})
        with private.outside_trace(), private.outside_fakes():
            return made(tensor), None
    if held is None:
        found = evaluated(tensor, {})
        with private.outside_trace(), private.outside_fakes():
            return None if found is None or found.read else (made(found.value), None)
    names, inputs = held.names, held.inputs
    known = {at: held.buffers[name] for at, name in names.items() if name in held.buffers}
    found = evaluated(tensor, known | {at: held.given.values[name] for at, name in inputs.items()})
    if found is None:
        return None
    asked = {inputs[at] for at in found.read if at in inputs}
    is_truth |= made is _as_it_is and found.value.dtype == torch.bool and found.value.numel() == 1
    if not is_truth and any(name in held.given.changing or is_time(name) for name in asked):
        return None
    by_node = {node: inputs[node.name] for node in found.values if node.name in inputs}
    with private.outside_trace(), private.outside_fakes(), no_autocast():
        value, place = made(found.value), None
        if asked:
            guard = Guard.of(found.node, found.values, by_node, made, is_truth, are_sizes)
            if not guard.holds(held.given.values):  # as of what an autocast computes, which no later call is in
                return None
            place = _place(held, guard)
    _note(held, {names.get(at) or _name_of(held, one): one for at, one in found.read.items() if at not in inputs})
    return value, place


def _place(held: NumbersRead, guard: Guard) -> int:
    """Of a guard among all; of one that says the same, if there is one."""
    for place, other in enumerate(held.guards):
        if guard.says_what(other):
            return place
    held.guards.append(guard)
    return len(held.guards) - 1


def forward_begins(leaves: Mapping[str, torch.Tensor], sizes: Mapping[str, torch.Tensor]) -> None:
    """With these inputs, by name: later they may be the results of what leaves a tensor as it is, as casts may."""
    if (held := _held.get()) is not None:
        held.sizes = dict(sizes)
        held.names = _by_node(dict(held.model.named_buffers()))
        held.inputs = _by_node({name: leaf for name, leaf in leaves.items() if name in held.given.values})


def note_failure(error: Exception) -> None:
    """Forward gets this of what is no number yet; if it catches it, it goes another way than with a number."""
    if (held := _held.get()) is not None:
        held.failed.append(error)


def note_text(place: str) -> None:
    """Forward gets the text of a size there, which is not that of its number."""
    if (held := _held.get()) is not None:
        held.told = held.told or place


def _by_node(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The names of tensors by those of the trace's nodes that they are."""
    nodes = {name: private.traced_node(one) for name, one in tensors.items()}
    return {node.name: name for name, node in nodes.items() if node is not None}


def _note(held: NumbersRead, read: Mapping[str, torch.Tensor]) -> None:
    with private.outside_trace(), private.outside_fakes():
        held.read.update({name: (one, one.detach().cpu().clone()) for name, one in read.items()})


def _name_of(held: NumbersRead, tensor: torch.Tensor) -> str:
    """Where the model holds a tensor that is no buffer."""
    for holder in holders_of(held.model)[0]:
        for key, value in holder.entries().items():
            if value is tensor:
                return f"{holder.owner}.{holder.name(key)}".lstrip(".")
    return f"tensor {len(held.read)}"


def _size_in(tensor: torch.Tensor) -> Any:
    """The free size that a tensor is filled with; None where it is another one."""
    node = private.traced_node(tensor)
    while node is not None and (node.target is operator.getitem or private.packet_name(node.target) in _ENTRIES):
        node = node.args[0]  # type: ignore[assignment]
    if node is None or private.packet_name(node.target) not in ("full", "scalar_tensor") or tensor.dtype not in _INTS:
        return None
    size = node.args[-1].meta["val"] if isinstance(node.args[-1], fx.Node) else None
    return size if is_symbolic(size) and not private.writers(node) else None


def _read(func: Any, tensor: torch.Tensor, *args: Any) -> Any:
    if func is torch.Tensor.item and (size := _size_in(tensor)) is not None:
        return size
    held = _held.get()
    by_python = func is torch.Tensor.__int__ and held is not None and bool(held.sizes)  # which wants a number
    are_sizes = func in _SIZES and not by_python and tensor.dtype in _INTS
    known = _known(tensor, is_truth=func is torch.Tensor.__bool__, are_sizes=are_sizes)
    if known is None:
        if held is not None:
            held.unknown = True
        try:
            return func(tensor, *args)
        except private.VALUE_ERRORS as error:
            note_failure(error)
            raise
    value, guard = known
    with private.outside_trace(), private.outside_fakes():
        found = func(value, *args)
    return _free(found, guard) if are_sizes else found


def size_names(place: int, value: torch.Tensor) -> list[str | None]:
    """Of the entries of a guard's value, by its place among all; None where one is none: of a single one, or none."""
    numbers = enumerate(value.flatten().tolist())
    return [f"number {entry} of {place}" if number > 1 else None for entry, number in numbers]


def _free(found: Any, place: int | None) -> Any:
    """Numbers as the sizes that stand for them, where the guard at that place says what they are."""
    held = _held.get()
    if held is None or place is None or not held.sizes:
        return found
    guard = held.guards[place]
    with private.outside_trace(), private.outside_fakes():
        names = size_names(place, guard.value)
    held.guards[place] = replace(guard, sizes=tuple(name if name in held.sizes else None for name in names))
    entries = iter(held.guards[place].sizes)

    def freed(number: Any) -> Any:
        if isinstance(number, list):
            return [freed(one) for one in number]
        name = next(entries)
        return number if name is None else held.sizes[name].shape[0]

    return freed(found)


def _formatted(func: Any, tensor: torch.Tensor, form: str) -> Any:
    """The text of a number; of one that is not known, that of the tensor, as without a form, for logs to print."""
    if not form or tensor.ndim:
        return func(tensor, form)
    return str(tensor) if value_of(tensor) is None else _read(func, tensor, form)


def _places(tensor: torch.Tensor) -> torch.Tensor | None:
    """Where a tensor that is known is not zero: as numbers of forward's own, [entries, dimensions]."""
    run = _run(tensor)
    if run is not None:
        return torch.arange(run.start, run.stop, device=tensor.device).unsqueeze(1)
    value, held = value_of(tensor), _held.get()
    if value is None and held is not None and held.given.first:
        raise ValuesError("forward asks where a tensor is not zero")
    if value is None:
        return None
    with private.outside_trace(), private.outside_fakes():
        places = value.nonzero().tolist()
    return torch.tensor(places, dtype=torch.int64, device=tensor.device).reshape(len(places), tensor.ndim)


def _run(mask: torch.Tensor) -> slice | None:
    """The places of a mask that is known where they follow each other, as those of a text before its padding do."""
    known = _known(mask, are_sizes=True, made=run_of) if mask.ndim == 1 else None
    if known is None:
        return None
    with private.outside_trace(), private.outside_fakes():
        bounds = known[0].tolist()
    return slice(*_free(bounds, known[1])) if bounds else None


def _nonzero(func: Any, input: torch.Tensor, as_tuple: bool = False) -> Any:
    places = _places(input)
    if places is None:
        return _as_many(input, func(input, as_tuple=as_tuple))
    return tuple(places.unbind(1)) if as_tuple and input.ndim else places


def _where(func: Any, condition: torch.Tensor, *others: Any, **named: Any) -> Any:
    known = None if others or named else _places(condition)
    if known is None:
        found = func(condition, *others, **named)
        return found if others or named else _as_many(condition, found)
    return tuple(known.unbind(1))


def _masked_select(func: Any, input: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    places = _places(mask.expand(shape))
    if places is None:
        mask = mask.expand(shape)
        _as_many(mask, chosen := input.expand(shape)[mask])
        return chosen
    return input.expand(shape)[places.unbind(1)]


def _repeated(func: Any, input: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
    """Entries, or slices along a dimension, as often as numbers that are known say."""
    given: dict[str, Any] = dict(zip(("repeats", "dim"), args, strict=False)) | named
    repeats, dim = given.get("repeats"), given.get("dim")
    value = value_of(repeats) if isinstance(repeats, torch.Tensor) else None
    if value is None:
        return func(input, *args, **named)  # type: ignore[no-any-return]
    source, along = (input.flatten(), 0) if dim is None else (input, dim)
    with private.outside_trace(), private.outside_fakes():
        times = value.expand(source.shape[along]).tolist()
    places = [place for place, number in enumerate(times) for _ in range(number)]
    return source.index_select(along, torch.tensor(places, dtype=torch.int64, device=input.device))


def _put(func: Any, tensor: torch.Tensor, index: Any, value: Any) -> None:
    """One value for all places of a mask is chosen entry by entry, however many these are."""
    *others, mask = index if type(index) is tuple and index else (index,)
    behind = tensor.ndim - len(others) - mask.ndim if _is_mask(mask) else -1
    known = isinstance(value, torch.Tensor) or type(value) in _NUMBERS
    all_of = known and all(type(one) is slice and one == slice(None) for one in others)
    if behind >= 0 and all_of and mask.shape == tensor.shape[len(others) : len(others) + mask.ndim]:
        one = torch.full((), value, dtype=tensor.dtype, device=tensor.device) if type(value) in _NUMBERS else value
        if one.ndim == behind + 1 and type(one.shape[0]) is int and one.shape[0] == 1:
            one = one[0]
        if one.ndim <= behind and (one.dtype, one.device) == (tensor.dtype, tensor.device) == (one.dtype, mask.device):
            tensor.copy_(torch.where(mask.reshape(*mask.shape, *[1] * behind), one, tensor))
            return
    _taken(func, tensor, index, value)


def _sliced(index: Any) -> Any:
    """A slice by numbers where its bounds are tensors that are known: the mask's [:lengths[0]]."""
    if type(index) is not slice:
        return index
    return slice(*(_bound(one) for one in (index.start, index.stop, index.step)))


def _bound(bound: Any) -> Any:
    known = _known(bound, are_sizes=True) if isinstance(bound, torch.Tensor) and bound.dtype in _INTS else None
    if known is None:
        return bound
    with private.outside_trace(), private.outside_fakes():
        number = known[0].item()
    return _free(number, known[1])


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype == torch.bool and index.ndim > 0


def _taken(func: Any, tensor: torch.Tensor, index: Any, *values: Any) -> Any:
    """Entries of a tensor, or as many put there, where masks that are known are places."""
    parts = tuple(_sliced(one) for one in (index if type(index) is tuple else (index,)))
    index = parts if type(index) is tuple else parts[0]
    masks = [_is_mask(one) for one in parts]
    one_for_all = bool(values) and not (isinstance(values[0], torch.Tensor) and values[0].ndim)
    if one_for_all or not any(masks):
        return func(tensor, index, *values)
    if sum(masks) == 1 and all(is_mask or type(one) is slice for one, is_mask in zip(parts, masks, strict=True)):
        run = _run(parts[masks.index(True)])
        if run is not None:
            at = tuple(run if is_mask else one for one, is_mask in zip(parts, masks, strict=True))
            return func(tensor, at, *values) if values else func(tensor, at).clone()
    found = list[Any]()
    for one, is_mask in zip(parts, masks, strict=True):
        places = _places(one) if is_mask else None
        found += [one] if places is None else places.unbind(1)
    result = func(tensor, tuple(found), *values)
    unknown = [one for one in found if _is_mask(one)]
    return result if values or len(unknown) != 1 else _as_many(unknown[0], result)


def _as_many(mask: torch.Tensor, result: Any) -> Any:
    """What an unknown mask chooses: as many entries as another that is made alike."""
    held, node = _held.get(), private.traced_node(mask)
    sizes = [size for one in private.tensors_in(result) for size in one.shape if private.sizes.depends_on_values(size)]
    if held is not None and node is not None and sizes:
        same = next((number for other, number in held.chosen if alike(other, node)), None)
        if same is None:
            held.chosen.append((node, sizes[0]))
        else:
            torch._check(sizes[0] == same)
    return result


_ENTRIES = ("unbind", "select")  # as `tolist` asks for them
_SIZES = (torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__int__)
KNOWN: Table = {
    **dict.fromkeys(
        (
            torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__bool__, torch.Tensor.__int__,
            torch.Tensor.__float__, torch.Tensor.__index__,
        ),
        _read,
    ),
    torch.Tensor.__format__: _formatted,
    **dict.fromkeys((torch.nonzero, torch.Tensor.nonzero), _nonzero),
    **dict.fromkeys((torch.argwhere, torch.Tensor.argwhere), lambda func, input: _nonzero(torch.nonzero, input)),
    **dict.fromkeys((torch.masked_select, torch.Tensor.masked_select), _masked_select),
    torch.where: _where,
    **dict.fromkeys((torch.repeat_interleave, torch.Tensor.repeat_interleave), _repeated),
    torch.Tensor.__getitem__: _taken,
    torch.Tensor.__setitem__: _put,
}  # fmt: skip
