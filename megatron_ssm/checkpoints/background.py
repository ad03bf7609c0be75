"""Writes training checkpoints in another thread while training continues.

Training stops only while the state is copied to memory. The copy is as large as this rank's parameters and moments, and its
memory is used again for the next checkpoint.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_ssm.kernels.huge_pages import HugePages

from .training import Snapshot, Stage


class BackgroundWriter:
    """Writes one checkpoint at a time. All ranks make the same calls in the same order.

    It communicates over its own gloo group with the time-out `timeout`, so that its messages do not mix with training.
    """

    def __init__(self, timeout: timedelta):
        self._group = dist.new_group(backend="gloo", timeout=timeout) if dist.is_initialized() else None
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._copies: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # {name: (copy of a tensor, entry of the copy)}
        self._memory = HugePages()
        self._under_way: Future | None = None

    def write(self, make: Callable[[Stage], Snapshot]) -> None:
        """Wait for the previous checkpoint, copy the state, and begin to write it.

        `make` returns the snapshot; its argument `stage` makes entries of copies (see `Snapshot.of`). Failure on every rank
        if the previous checkpoint could not be written.
        """
        self.wait()
        snapshot = make(self._entry)
        self._under_way = self._thread.submit(snapshot.write, self._group)

    def _entry(self, name: str, tensor: torch.Tensor, entry_of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The entry of a copy in this host's memory, which is reused if the previous one has the same shape and dtype."""
        known = self._copies.get(name)
        if known is None or (known[0].shape, known[0].dtype) != (tensor.shape, tensor.dtype):
            if tensor.is_cuda:
                copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
            else:
                with self._memory:
                    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            known = self._copies[name] = copy, entry_of(copy)
        copy, entry = known
        copy.copy_(tensor)
        return entry

    @property
    def has_failed(self) -> bool:
        """True if this rank already knows that the checkpoint under way cannot be written; `wait` then says why."""
        return self._under_way is not None and self._under_way.done() and self._under_way.exception() is not None

    def wait(self) -> None:
        """Wait until no checkpoint is under way. Failure on every rank if it could not be written."""
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            under_way.result()
