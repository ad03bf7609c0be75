"""Ranks that share memory: what the tests of it have in common."""

import pytest
import torch.distributed as dist

from sparsefusion.shared_memory import connect, kernels

needs_library = pytest.mark.skipif(not kernels(), reason=f"no C library: {kernels().why}")


def joined(timeout=None, library=None):
    """This rank's SharedMemory of all ranks."""
    memory, why = connect(dist.group.WORLD, timeout, library)
    assert why == ""
    return memory
