"""Pages of 2 MB for large tensors, on Linux."""

import ctypes
import sys
from collections.abc import Iterable

from torch import Tensor

PAGE, MADV_HUGEPAGE = 4096, 14  # Linux: bytes of a page; the advice to use huge pages
LARGE = 4 * 2**20  # bytes of a tensor from which huge pages are worth asking for


def prefer_huge_pages(tensors: Iterable[Tensor]) -> None:
    """Ask Linux for pages of 2 MB for large tensors that nothing was written to yet; other systems are not asked.

    With the usual small pages, looking up their addresses makes reading the weights about a twentieth slower.
    """
    if sys.platform != "linux":
        return
    advise = ctypes.CDLL(None).madvise
    for tensor in tensors:
        start = -(-tensor.data_ptr() // PAGE) * PAGE
        if tensor.is_cpu and tensor.nbytes >= LARGE:
            advise(ctypes.c_void_p(start), ctypes.c_size_t(tensor.data_ptr() + tensor.nbytes - start), MADV_HUGEPAGE)
