"""The tensors that are really alive, against which predicted memory is held."""

import weakref
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operations of this thread have seen and that are still alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._seen: dict[int, int] = {}

    def see(self, values: Any) -> None:
        for tensor in pytree.tree_leaves(values):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self._seen:
                storage = tensor.untyped_storage()
                self._seen[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._gone, storage._cdata)
        self.peak = max(self.peak, self.now)

    def _gone(self, key: int) -> None:
        self.now -= self._seen.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.see((args, kwargs, result))
        return result
