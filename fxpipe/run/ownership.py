"""Who trains a parameter: the ranks on which its gradient arrives, the same for all engines over a model.

    engine of program A     rank 0: conv_in, mid        rank 1: conv_out         owners: mid -> (0,)
    engine of program B     rank 0: conv_in             rank 1: mid, conv_out

A step of B borrows `mid` for rank 1 before it begins and gives its gradient to rank 0 after it, so that an optimizer
finds all of a parameter's gradients, and keeps its state, on one rank. Replicas of a stage own a share of its
parameters each, and each step begins with the others' values. Where a parameter is trained elsewhere this process has
no gradient, and an outdated value: a module that holds such values is neither run nor saved.

Where the weights themselves are shared out, a rank that does not own one holds no memory for it between steps: it reads
as no numbers, and torch refuses to write into it.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from weakref import WeakSet

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from fxpipe.errors import RunError
from fxpipe.run.partial_sums import trained_in_parts
from fxpipe.run.read_ahead import version

_owners = WeakTensorKeyDictionary()  # parameter -> ranks
_idle = WeakTensorKeyDictionary()  # parameters that nobody trains, and that not all ranks hold
_claims: list[None] = []  # one for each that was made
_outdated = WeakTensorKeyDictionary()  # parameter or average -> its version when it became so
_empty = WeakTensorKeyDictionary()  # parameters without memory -> whether for good
_watched: "WeakSet[nn.Module]" = WeakSet()
_as_is = ContextVar("_as_is", default=False)


def claim(parameter: nn.Parameter, ranks: tuple[int, ...]) -> None:
    """These ranks own it from now on, unless others do."""
    if parameter not in _owners:
        _owners[parameter] = ranks
        _claims.append(None)


def share_idle(parameter: nn.Parameter, ranks: tuple[int, ...]) -> None:
    """These ranks hold it too, which nobody trains; the others may let its memory go. Who held it first stays first."""
    if parameter not in _owners or parameter in _idle:
        _owners[parameter] = tuple(dict.fromkeys((*owners(parameter), *ranks)))
        _idle[parameter] = True
        _claims.append(None)


def is_idle(parameter: nn.Parameter) -> bool:
    """Whether nobody trains it, and it is not on all ranks."""
    return parameter in _idle


def num_claims() -> int:
    """Of all models so far: while it stays, so does what is owned."""
    return len(_claims)


def owners(parameter: torch.Tensor) -> tuple[int, ...]:
    """Empty where no engine trains it: it is then the same on all ranks."""
    found: tuple[int, ...] = _owners.get(parameter, ())
    return found


def outdate(parameters: Iterable[torch.Tensor]) -> None:
    """Other ranks have trained them."""
    for parameter in parameters:
        if _outdated.get(parameter) != version(parameter):
            _outdated[parameter] = version(parameter)


def is_outdated(tensor: torch.Tensor) -> bool:
    """Whether other ranks have trained it, or it is theirs to hold; what is written into an average makes it new."""
    return tensor in _outdated and (tensor in _owners or _outdated[tensor] == version(tensor))


def renew(parameters: Iterable[nn.Parameter]) -> None:
    """They have their owners' values."""
    for parameter in parameters:
        _outdated.pop(parameter, None)


def is_empty(tensor: torch.Tensor) -> bool:
    """Whether it is a parameter without memory here."""
    return tensor in _empty


def empty(parameters: Iterable[nn.Parameter], device: torch.device | None = None) -> None:
    """Let their memory go, on a rank that does not own them; they are on the device from then on, if given."""
    for parameter in parameters:
        if parameter not in _empty or device not in (None, parameter.device):
            nothing = float("nan") if parameter.is_floating_point() or parameter.is_complex() else 0
            parameter.data = parameter.data.new_full((), nothing, device=device).expand(parameter.shape)
            _empty.setdefault(parameter, False)
        _outdated[parameter] = version(parameter)


def at(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, moved in place where it is elsewhere, as `model.to(device)` moves it: optimizers keep it."""
    if tensor.device != device:
        gradient, tensor.grad = tensor.grad, None
        tensor.data = tensor.data.to(device)
        tensor.grad = None if gradient is None else gradient.to(device)
    return tensor


def fill(parameter: nn.Parameter) -> None:
    """Give it memory, whose values are still to come."""
    if _empty.pop(parameter, None) is not None:
        parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        _outdated[parameter] = version(parameter)


def release(model: nn.Module, read: Collection[str]) -> int:
    """Let go for good of a model's parameters but for those of these names; how many bytes that frees.

    Raises:
        RunError: an engine trains one of them.
    """
    kept = {id(p) for name, p in model.named_parameters(remove_duplicate=False) if name in read}
    gone = {name: p for name, p in model.named_parameters() if id(p) not in kept and not is_empty(p)}
    trained = [name for name, p in gone.items() if owners(p)]
    if trained:
        raise RunError(f"{len(trained)} parameters ({trained[0]}, ...) are trained by an engine, and are not released")
    size = sum(p.nbytes for p in gone.values())
    empty(gone.values())
    for parameter in gone.values():
        _empty[parameter] = True
    _watch(model, {id(p) for p in gone.values()})
    return size


def is_released(tensor: torch.Tensor) -> bool:
    """Whether it was let go for good."""
    return bool(_empty.get(tensor, False))


def watch(model: nn.Module, rank: int) -> None:
    """Refuse to run or save the parts of a model that hold outdated parameters; layers of torch alone go unwatched."""
    foreign = [p for p in model.parameters() if owners(p) and rank not in owners(p)]
    trained = [p for p in model.parameters() if p.requires_grad]
    if elsewhere := [p for p in foreign if p.requires_grad]:
        trained_in_parts(trained, elsewhere)
    watch_outdated(model, foreign)


def watch_outdated(model: nn.Module, outdated: Iterable[torch.Tensor]) -> None:
    """The same, where these are or may be outdated."""
    _watch(model, {id(tensor) for tensor in outdated})


def _watch(model: nn.Module, outdated: Collection[int]) -> None:
    for module in model.modules():
        if module in _watched or (module is not model and type(module).__module__.startswith("torch.nn.")):
            continue
        if any(id(p) in outdated for p in module.parameters()):
            module.register_forward_pre_hook(require_new)
            module.register_state_dict_pre_hook(require_new)
            _watched.add(module)


@contextmanager
def as_is() -> Iterator[None]:
    """For who knows which parameters are outdated: modules may be saved all the same."""
    token = _as_is.set(True)
    try:
        yield
    finally:
        _as_is.reset(token)


def uses_as_is() -> bool:
    return _as_is.get()


def require_new(module: nn.Module, *_: object, or_released: bool = False) -> None:
    """Raises RunError where parameters of a module are outdated, or released; a hook of modules, too."""
    if not _outdated or _as_is.get():
        return
    gone = [name for name, p in module.named_parameters() if is_released(p)]
    if gone and not or_released:
        raise RunError(
            f"{len(gone)} parameters of {type(module).__name__} ({gone[0]}, ...) were released on this rank, which "
            "samples without them; load the model again to run or save it"
        )
    old = [name for name, p in module.named_parameters() if is_outdated(p) and name not in gone]
    if old:
        raise RunError(
            f"{len(old)} parameters of {type(module).__name__} ({old[0]}, ...) were trained on other ranks, or "
            "released here, and are not here yet, or were written here alone; before the model is sampled from or "
            "saved, call engine.sync_model() on every rank, engine.sync_model(average) for averages of weights, or "
            "engine.gather_state_dict()"
        )
