"""The memory that tensors take, counted operation by operation or by torch's allocator."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):
    """Counts the bytes of storages that operations allocate, as long as anything holds them. Inputs do not count.

    nbytes: now. most: at most, since it was last set.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._inputs: dict[int, StorageWeakRef] = {}
        self._allocated: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the allocated storages that are still held."""
        self._allocated = {key: each for key, each in self._allocated.items() if not each[0].expired()}
        return sum(nbytes for _, nbytes in self._allocated.values())

    def __torch_dispatch__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        for storage in storages((args, kwargs)):
            if storage._cdata not in self._allocated:
                self._inputs[storage._cdata] = StorageWeakRef(storage)
        result = function(*args, **(kwargs or {}))
        for storage in storages(result):
            if storage._cdata not in self._inputs:
                self._allocated[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, self.nbytes)
        return result


def peak_allocated(function: Callable[[], object]) -> int:
    """The most bytes that torch's allocator has handed out, and not got back, during function()."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        function()
    events = (event for event in record.profiler.kineto_results.events() if event.name() == "[memory]")
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def storages(tree: Any) -> list[torch.UntypedStorage]:
    """The storages of all tensors in nested lists, tuples and dictionaries."""
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def taken(
    schedule: Any, batch: int, seq: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, causal: bool
) -> tuple[int, int, int]:
    """(saved, forward, backward): bytes that an attention2d schedule takes on this rank in addition to its inputs.

    saved: after forward, for backward. forward, backward: at most, during each.
    """
    local = len(schedule.positions(seq))
    q, k, v, dout = (
        torch.randn(batch, local, count, head_dim).to(dtype) for count in (heads, kv_heads, kv_heads, heads)
    )
    inputs = [t.requires_grad_() for t in (q, k, v)]
    with Alive() as alive:
        out = schedule(*inputs, causal=causal, seq=seq)
        saved, forward = alive.nbytes, alive.most
        alive.most = 0
        gradients = torch.autograd.grad(out, inputs, dout)
        backward = alive.most
    del gradients
    return saved, forward, backward
