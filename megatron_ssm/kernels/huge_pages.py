"""Memory in pages of 2 MB for a model's weights and states, on Linux.

A processor reads a large array up to a third faster from them than from pages of 4 KB. A matrix of a few MB that is
allocated by itself contains few whole ones, so matrices are allocated next to each other.
"""

import ctypes
import mmap
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

PAGE = 2 * 2**20  # bytes of a huge page
PIECE = 64 * 2**20  # bytes of address space that are reserved at a time; a page takes memory when it is first written
ALIGNMENT = 64  # bytes of a cache line


class HugePages(TorchFunctionMode):
    """A context in which torch.empty and torch.zeros allocate CPU tensors next to each other in huge pages, on Linux.

    With the usual pages of 4 KB, looking up addresses makes reading the weights up to a third slower. A tensor of a few MB
    that is allocated by itself contains few whole huge pages, and one below 2 MB contains none.

    A reserved piece is freed with its last tensor, so the tensors should have the same lifetime, like a model's weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self._piece: Any = None  # an mmap
        self._used = self._end = 0  # the range of its free bytes

    def __torch_function__(
        self, func: Callable, types: Iterable[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func in (torch.empty, torch.zeros):
            device = options.get("device")
            if torch.device(torch.get_default_device() if device is None else device).type == "cpu":
                return self._zeros_like(func(*args, **options | {"device": "meta"}))
        return func(*args, **options)

    def copy(self, tensor: Tensor) -> Tensor:
        return self._zeros_like(tensor).copy_(tensor)

    def _zeros_like(self, tensor: Tensor) -> Tensor:
        """A CPU tensor of zeros of the same shape and dtype, with a storage of its own."""
        if sys.platform != "linux" or not tensor.numel():
            return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
        nbytes = -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        if self._used + nbytes > self._end:
            self._reserve(max(nbytes, PIECE))
        self._used += nbytes
        return torch.frombuffer(self._piece, dtype=tensor.dtype, count=tensor.numel(), offset=self._used - nbytes).view(
            tensor.shape
        )

    def _reserve(self, nbytes: int) -> None:
        """Reserve a new piece of `nbytes` bytes that begins with a huge page. Raises MemoryError if that fails."""
        try:
            self._piece = mmap.mmap(-1, nbytes + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError):
            raise MemoryError(f"tried to allocate {nbytes} bytes") from None
        self._used = -torch.frombuffer(self._piece, dtype=torch.uint8).data_ptr() % PAGE
        self._end = self._used + nbytes
        with suppress(OSError):  # on a Linux kernel without huge pages
            self._piece.madvise(mmap.MADV_HUGEPAGE)


def trim_heap() -> None:
    """Return freed memory to the system, if the C library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
