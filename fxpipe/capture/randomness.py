"""Random draws that do not depend on the layout: each is drawn once, for the whole batch, from (seed, step, draw).

Every rank that needs a draw makes all of it and takes its slice, so that any number of ranks and micro-batches sees
the numbers that one device sees.
"""

import hashlib
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from fxpipe.capture.sizes import concrete

# The default generator belongs to the process; in-process ranks are threads and take turns.
GENERATOR_LOCK = threading.RLock()


@dataclass(frozen=True, eq=False)
class Draw:
    """One random operation of the step: `index` is its place in the model's order of random calls.

    `graph` makes its arguments of sizes and of the capture's `constants`, by placeholder, and then calls it. A tensor
    that counts by its shape and type alone is made of ones.
    """

    index: int
    target: str
    graph: fx.Graph
    constants: Mapping[str, torch.Tensor]

    def make(self, batch_size: int, device: torch.device) -> torch.Tensor:
        """What is drawn for the whole batch."""
        values: dict[fx.Node, Any] = {}
        for node in self.graph.nodes:
            if node.op == "placeholder":
                known = self.constants.get(node.meta["of"])
                values[node] = concrete(node.meta["val"], batch_size) if known is None else known.to(device)
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            placed = {name: device if name == "device" else value for name, value in kwargs.items()}
            values[node] = node.target(*concrete(args, batch_size), **placed)
        return values[node]  # type: ignore[no-any-return]

    def sample(self, batch_size: int, seed: int, step: int, device: torch.device) -> torch.Tensor:
        with seeded(seed, step, self.index, device):
            return self.make(batch_size, device)


@contextmanager
def seeded(seed: int, step: int, index: int, device: torch.device) -> Iterator[None]:
    """Torch's default generator, seeded by (seed, step, index) inside and as before outside."""
    digest = hashlib.sha256(f"{seed}/{step}/{index}".encode()).digest()
    devices = [device] if device.type == "cuda" else []
    with GENERATOR_LOCK, torch.random.fork_rng(devices=devices):
        torch.manual_seed(int.from_bytes(digest[:7], "little"))
        yield


class SeededDraws(TorchDispatchMode):
    """Runs a model eagerly with every random operation seeded as the compiled program seeds it; counts them.

    `types` are those that the draws so far were asked for, or of their first operands, None where that is no tensor.
    """

    def __init__(self, seed: int, step: int, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seed, self.step, self.device, self.count = seed, step, device, 0
        self.types: list[torch.dtype | None] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_random(func, args):
            return func(*args, **(kwargs or {}))
        with seeded(self.seed, self.step, self.count, self.device):
            self.count += 1
            self.types.append((kwargs or {}).get("dtype") or getattr(next(iter(args), None), "dtype", None))
            return _draw_contiguous(func, args, kwargs or {})


def _draw_contiguous(func: Any, args: Any, kwargs: Any) -> Any:
    """The draw in the order of contiguous memory: torch fills in the order of strides, which layouts need not share."""
    if not args or not isinstance(args[0], torch.Tensor):
        return func(*args, **kwargs)
    drawn = func(args[0].contiguous(), *args[1:], **kwargs)
    return args[0].copy_(drawn) if func._schema.is_mutable else drawn


def is_random(func: Any, args: Any) -> bool:
    """Whether an ATen call draws random numbers (an inactive dropout, or one of everything, does not)."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    name = func.overloadpacket.__name__
    if name in DROPOUTS:
        return 0.0 < float(args[1]) < 1.0 and bool(args[2])
    if name in RECURRENT:  # dropout between the layers only
        *_, num_layers, dropout, training = args[: 7 if isinstance(args[3], bool) else 8]
        return num_layers > 1 and 0.0 < float(dropout) and bool(training)
    # Attention draws only to drop weights, which `fxpipe.capture.attention` writes out.
    return "scaled_dot_product" not in name


DROPOUTS = ("dropout", "native_dropout", "feature_dropout", "alpha_dropout")
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
