"""Writes training checkpoints in another thread, so that training goes on meanwhile.

Training stops only while the state is copied to memory. The copy is as large as this rank's parameters and moments, and its
memory is used again for the next checkpoint.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist

from .training import Snapshot


class BackgroundWriter:
    """Writes one checkpoint at a time. All ranks make the same calls in the same order.

    Its messages go through a gloo group of its own, so that they do not mix with those of training. timeout: of that group.
    """

    def __init__(self, timeout: timedelta):
        self._group = dist.new_group(backend="gloo", timeout=timeout) if dist.is_initialized() else None
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._copies: dict[str, torch.Tensor] = {}
        self._under_way: Future | None = None

    def write(self, make: Callable[[Callable[[str, torch.Tensor], torch.Tensor]], Snapshot]) -> None:
        """Copy the state, and begin to write it. Waits for the checkpoint before this one.

        make: makes the snapshot with the function that it is given, which copies a tensor (see `Snapshot.of`). Failure on
        every rank if the checkpoint before could not be written.
        """
        self.wait()
        snapshot = make(self._copy)
        self._under_way = self._thread.submit(snapshot.write, self._group)

    def _copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in this host's memory."""
        if name not in self._copies:
            self._copies[name] = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        return self._copies[name].copy_(tensor)

    @property
    def has_failed(self) -> bool:
        """Whether this rank already knows that the checkpoint under way cannot be written; `wait` then says why."""
        return self._under_way is not None and self._under_way.done() and self._under_way.exception() is not None

    def wait(self) -> None:
        """Wait until no checkpoint is under way. Failure on every rank if it could not be written."""
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            under_way.result()
