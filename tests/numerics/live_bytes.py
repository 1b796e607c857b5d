"""Bytes of tensors that are alive: counted at every operation, forward and backward, until their storages are freed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Within, `now` and `peak` count the storages that operations make; those that were there before are not counted.

    `watch` sees each operation's name before its result counts; where it returns False the peak stays as it is.
    """

    def __init__(self, watch: Callable[[str], bool] = lambda operation: True) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._watch = watch
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        counts = self._watch(str(func))
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in given and storage._cdata not in self._sizes:
                    self._sizes[storage._cdata] = storage.nbytes()
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._freed, storage._cdata)
        if counts:
            self.peak = max(self.peak, self.now)
        return result

    def _freed(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def kept_for_backward(forward: Callable[[], Any], parameters: list[Tensor]) -> int:
    """Bytes of all storages that autograd keeps of `forward()`, parameters apart."""
    known = {parameter.untyped_storage()._cdata for parameter in parameters}
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            storages[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = forward()
    del result
    return sum(storage.nbytes() for storage in storages.values())
