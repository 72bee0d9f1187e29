"""Random draws that do not depend on the layout: each is drawn once, for the whole batch, from (seed, step, draw).

Every rank that needs a draw makes all of it and takes its slice, so that any number of ranks and micro-batches sees
the numbers that one device sees.
"""

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fxpipe.errors import CaptureError

# The default generator belongs to the process; in-process ranks are threads and take turns.
_GENERATOR_LOCK = threading.RLock()


@dataclass(frozen=True)
class Draw:
    """One random operation of the step: `index` is its place in the model's order of random calls.

    Args of `make` are the global batch size and the device; it returns the drawn tensor, batch included.
    """

    index: int
    target: str
    make: Callable[[int, torch.device], torch.Tensor]

    def sample(self, batch_size: int, seed: int, step: int, device: torch.device) -> torch.Tensor:
        with seeded(seed, step, self.index, device):
            return self.make(batch_size, device)


@contextmanager
def seeded(seed: int, step: int, index: int, device: torch.device) -> Iterator[None]:
    """Torch's default generator, seeded by (seed, step, index) inside and as before outside."""
    digest = hashlib.sha256(f"{seed}/{step}/{index}".encode()).digest()
    devices = [device] if device.type == "cuda" else []
    with _GENERATOR_LOCK, torch.random.fork_rng(devices=devices):
        torch.manual_seed(int.from_bytes(digest[:7], "little"))
        yield


class SeededDraws(TorchDispatchMode):
    """Runs a model eagerly with every random operation seeded as the compiled program seeds it; counts them."""

    def __init__(self, seed: int, step: int, device: torch.device) -> None:
        super().__init__()
        self.seed, self.step, self.device, self.count = seed, step, device, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_random(func, args):
            return func(*args, **(kwargs or {}))
        with seeded(self.seed, self.step, self.count, self.device):
            self.count += 1
            return _draw_contiguous(func, args, kwargs or {})


def _draw_contiguous(func: Any, args: Any, kwargs: Any) -> Any:
    """The draw in the order of contiguous memory: torch fills in the order of the strides, which layouts need not share."""
    if not args or not isinstance(args[0], torch.Tensor):
        return func(*args, **kwargs)
    drawn = func(args[0].contiguous(), *args[1:], **kwargs)
    return args[0].copy_(drawn) if func._schema.is_mutable else drawn


class PlainRandomCalls(TorchFunctionMode):
    """Rewrites random calls into forms that export records: no explicit generator, attention dropout written out."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("generator") is not None:
            raise CaptureError("a torch.Generator passed inside the model cannot be captured; draw without generator=")
        kwargs.pop("generator", None)
        dropout = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
        if func is F.scaled_dot_product_attention and dropout:
            return _attention_with_dropout(*args, **kwargs)
        return func(*args, **kwargs)


def is_random(func: Any, args: Any) -> bool:
    """Whether an ATen call draws random numbers (a dropout of probability zero, or not in training, does not)."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    name = func.overloadpacket.__name__
    if name in ("dropout", "native_dropout", "feature_dropout", "alpha_dropout"):
        return float(args[1]) > 0.0 and bool(args[2])
    return not (name.startswith(("scaled_dot_product", "_scaled_dot_product", "rrelu")) and _attention_dropout(args) == 0)


def _attention_dropout(args: Any) -> float:
    floats = [a for a in args if isinstance(a, float)]
    return max(floats, default=0.0)


def _attention_with_dropout(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    scores = query @ key.transpose(-2, -1) * (query.size(-1) ** -0.5 if scale is None else scale)
    if is_causal:
        causal = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~causal, float("-inf"))
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, float("-inf")) if attn_mask.dtype == torch.bool else scores + attn_mask
    return F.dropout(scores.softmax(-1), dropout_p) @ value
