"""What a trace of forward would lose without a word, refused while it is traced.

A trace records ATen operations. Gradients that someone else computes (autograd functions, hooks), numbers from Python's
random and what forward keeps on its modules are not among them.
"""

import pickle
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import numpy
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributions import Distribution

from fxpipe.capture import own_gradients, private
from fxpipe.capture.asked import ASKED, HOOK
from fxpipe.capture.attention import encoders_watched, whole_attention
from fxpipe.capture.calls import Calls, Table, flags_kept, is_watched, own_generators, require_on, set_flag
from fxpipe.capture.holders import holders_of
from fxpipe.capture.known import KNOWN, note_failure, value_of
from fxpipe.capture.random_calls import RANDOM_CALLS
from fxpipe.capture.state import state_kept
from fxpipe.capture.surroundings import autocasts
from fxpipe.capture.transforms import plain_transforms
from fxpipe.capture.written_out import WRITTEN_OUT
from fxpipe.errors import CaptureError, ValuesError


@contextmanager
def watched(model: nn.Module) -> Iterator[None]:
    """Trace inside: checkpoints run plainly, what the model keeps in Python as before on leaving."""
    refuse_outside(model)
    gradients = torch.is_grad_enabled()
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        for message in ("The tensor attribute", "Using `torch.compile", "torch.compile"):  # all are dealt with here
            warnings.filterwarnings("ignore", message=message)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(state_kept(model))
        stack.enter_context(_no_python_random(model))
        for module, name in _SEEDING:
            stack.enter_context(private.replaced(module, name, _refused_to_users(getattr(module, name))))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(private.inference_without_gradients())
        stack.enter_context(torch.set_grad_enabled(gradients))  # on, where an inference mode was left
        stack.enter_context(private.user_frames())
        stack.enter_context(private.same_values_kept())
        stack.enter_context(private.plain_regions())
        stack.enter_context(private.plain_checkpoints())
        stack.enter_context(private.plain_scripts(_refused(_SCRIPT)))
        # Distributions look at their arguments' values, to raise errors only.
        stack.enter_context(private.replaced(Distribution, "_validate_args", False))
        stack.enter_context(private.listing(_require_few))
        stack.enter_context(plain_transforms())
        stack.enter_context(private.replaced(torch, "cond", _refused(_COND)))
        stack.enter_context(private.replaced(nn.Module, "_apply", _applied))
        stack.enter_context(private.on_autograd_function(_own_gradient))
        stack.enter_context(private.replaced(saved_tensors_hooks, "__enter__", _hooked))
        stack.enter_context(whole_attention())
        stack.enter_context(encoders_watched())
        stack.enter_context(own_generators(model, tell=True))
        stack.enter_context(flags_kept())
        stack.enter_context(Calls(RANDOM_CALLS, WRITTEN_OUT, KNOWN, ASKED, _REFUSED, note_failure=note_failure))
        yield


def _refused(why: str, with_gradients: bool = False) -> Callable[..., Any]:
    """What runs instead of a function that cannot be captured, or not while gradients are on."""

    def instead(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() or not with_gradients:
            raise CaptureError(why)
        func, *given = args
        return func(*given, **kwargs)

    return instead


def _refused_to_users(function: Callable[..., Any]) -> Callable[..., Any]:
    """What runs instead of a function that torch itself may call."""

    def instead(*args: Any, **kwargs: Any) -> Any:
        if is_watched() and not sys._getframe(1).f_code.co_filename.startswith(private.FRAMEWORK):
            raise CaptureError(_SEED.format(function.__name__))
        return function(*args, **kwargs)

    return instead


def _hooked(hooks: Any) -> Any:
    """Torch's own ones change nothing."""
    if (
        not torch.is_grad_enabled()
        or isinstance(hooks, save_on_cpu)
        or sys._getframe(1).f_code.co_filename.startswith(private.FRAMEWORK)
    ):
        return _ENTER(hooks)
    raise CaptureError(_SAVED)


def _gradient(func: Any, *args: Any, **kwargs: Any) -> Any:
    own_gradients.asks_autograd()
    raise CaptureError(_GRADIENT)


def _dual(func: Any, *args: Any, **kwargs: Any) -> Any:
    if not private.under_transform():
        raise CaptureError("forward AD (dual_level, make_dual) cannot be captured; use torch.func.jvp")
    return func(*args, **kwargs)


def _applied(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """As modules do, where it leaves their weights as they are."""
    try:
        return cast(nn.Module, _APPLY(module, function, recurse))
    except RuntimeError as error:
        raise CaptureError(
            "forward casts or moves its module's own weights (.to, .half, .cuda; layerwise casting, offloading), which "
            "a graph cannot: cast or move the whole model before compiling (a pipeline that offloads its models: "
            "remove_all_hooks()), or in forward a weight alone, weight.to(x.dtype)"
        ) from error


def _as_array(func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Numpy's of a tensor that has values, which are numbers of the graph then."""
    value = value_of(tensor)
    if value is None:
        _require_values(tensor, f".{func.__name__}()")
    with private.outside_trace(), private.outside_fakes():
        return func(tensor if value is None else value, *args, **kwargs)


def _require_few(tensor: torch.Tensor) -> None:
    if tensor.numel() > _LISTED:
        _require_values(tensor, ".tolist()")


def _require_values(tensor: torch.Tensor, by: str) -> None:
    if private.mode_of(tensor) is not None:
        raise ValuesError(
            f"forward reads the values of a tensor of shape {list(tensor.shape)} by {by}, which a graph does not have; "
            "compute with torch on the tensor itself (where it chooses experts, each on all tokens, weighted by "
            "whether it is chosen), or read what stays as it is (tables, schedules) in __init__"
        )


def _own_gradient(kind: Any, run: Callable[[], Any], args: tuple[Any, ...]) -> Any:
    of_library = kind.__name__.startswith("GeneratedBackwardFor_")  # of torch.library: kept as it is
    if not is_watched() or of_library or own_gradients.is_autograds():
        return run()
    require_on(private.tensors_in(args))
    with private.noted_without_gradients():
        out = run()
    if not torch.is_grad_enabled() or not any(one.requires_grad for one in private.tensors_in(args)):
        return out
    if private.under_transform():
        raise CaptureError(
            f"the autograd function {kind.__name__} hides its gradient from torch.func; use operations of torch there"
        )
    return own_gradients.traced(kind, out, args)


def refuse_outside(model: nn.Module) -> None:
    """What surrounds the model or hangs on it, and would change gradients."""
    if autocasts():
        raise CaptureError("compile outside torch.autocast: put the autocast into the model's forward")
    if private.all_modules_have_gradient_hooks():
        raise CaptureError("a backward hook of all modules cannot be captured; remove it")
    for name, module in model.named_modules():
        if private.has_gradient_hooks(module):
            raise CaptureError(f"module {name or '(the model itself)'}: a backward hook cannot be captured; remove it")
    for name, parameter in model.named_parameters():
        if private.has_gradient_hooks(parameter):
            raise CaptureError(
                f"parameter {name}: a gradient hook cannot be captured; remove it, and change .grad after each step"
            )


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Refuse a forward that puts other tensors in its buffers' places, or adds parameters."""
    before, kept = dict(model.named_buffers()), {name for name, _ in model.named_parameters()}
    yield
    if changed := sorted(kept ^ {name for name, _ in model.named_parameters()}):
        raise CaptureError(
            f"forward adds or removes {changed[0]!r}, a parameter of the model, which a graph cannot; do so in "
            "__init__, or call forward once before compiling, where that is all"
        )
    for name, buffer in model.named_buffers():
        if before.get(name) is not buffer:
            raise CaptureError(
                f"forward replaces its buffer {name!r}, which a graph cannot; write into it (copy_, add_), or keep it "
                "outside forward"
            )


@contextmanager
def _no_python_random(model: nn.Module) -> Iterator[None]:
    """Raises CaptureError where what runs inside draws from Python's or numpy's generators, or the model's own ones."""
    entries = [value for holder in holders_of(model)[0] for value in holder.entries().values()]
    own = [one for one in entries if isinstance(one, random.Random | numpy.random.Generator | numpy.random.RandomState)]
    generators = [random, numpy.random, *own]
    before = [_drawn(one) for one in generators]
    try:
        yield
        if pickle.dumps([_drawn(one) for one in generators]) != pickle.dumps(before):
            raise CaptureError(
                "forward draws from Python's or numpy's random, which a graph would fix to one outcome; draw with "
                "torch and choose with torch.where; for self-conditioning there is fxpipe.SelfConditioning"
            )
    finally:
        for one, state in zip(generators, before, strict=True):
            _draw_again(one, state)


def _drawn(generator: Any) -> Any:
    """How far one of Python's or numpy's generators is, or the one of the module itself."""
    if hasattr(generator, "getstate"):
        return generator.getstate()
    return generator.get_state(legacy=False) if hasattr(generator, "get_state") else generator.bit_generator.state


def _draw_again(generator: Any, state: Any) -> None:
    if hasattr(generator, "setstate"):
        generator.setstate(state)
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


_SEED = (
    "forward calls {}, but what is drawn in a step follows from the engine's seed, the step and the place of the draw "
    "alone, and is not drawn again; draw once what is used twice (noise, a mask to multiply with)"
)
_SEEDING = (
    *((module, name) for module in (torch, torch.random) for name in ("manual_seed", "seed", "set_rng_state")),
    (torch.random, "fork_rng"),
    *((torch.cuda, name) for name in ("manual_seed", "manual_seed_all", "seed", "set_rng_state", "set_rng_state_all")),
)
_ENTER: Any = saved_tensors_hooks.__enter__
_APPLY: Any = nn.Module._apply
_COND = "torch.cond decides by a tensor's value; compute both branches and choose with torch.where"
_SCRIPT = "a script of torch.jit hides its gradients from a trace; call the Python that it is made of"
_SAVED = (
    "hooks on the tensors that a backward keeps (saved_tensors_hooks) cannot be captured; leave them out, and compile "
    "with recompute=True, or do what they change in the backward of an autograd function"
)
_GRADIENT = "gradients computed inside forward (a gradient penalty?) cannot be captured; use torch.func.grad or jvp"
_DATA = (
    "forward sets the .data of a tensor, which a graph cannot; write into it (copy_ under torch.no_grad()), or compute "
    "a new tensor"
)
_PACKED = (
    "packed sequences have sizes that lengths decide; run the recurrent layer on the padded ones, and leave out what "
    "is behind their ends (a mask, or gather of the last step)"
)
_FRAMES = "torch.istft decides by the sums of its windows; add up frames with torch.nn.functional.fold"
_LISTED = 64
"""Entries of a tensor that a trace may list: one by one, in milliseconds each; few may be constants that it knows."""
_HOOKS = (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook)
_GRADIENTS = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)
_REFUSED: Table = {
    **dict.fromkeys(_HOOKS, _refused(HOOK, with_gradients=True)),
    **dict.fromkeys(_GRADIENTS, _gradient),
    torch._pack_padded_sequence: _refused(_PACKED),
    torch._make_dual: _dual,
    **dict.fromkeys((torch.istft, torch.Tensor.istft), _refused(_FRAMES)),
    **dict.fromkeys((torch.Tensor.numpy, torch.Tensor.__array__), _as_array),
    torch.Tensor.data.__set__: _refused(_DATA),  # type: ignore[attr-defined]
    torch.Tensor.data.__get__: lambda func, tensor: tensor.detach(),  # type: ignore[attr-defined]
    **dict.fromkeys((torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__), set_flag),  # type: ignore[attr-defined]
}
