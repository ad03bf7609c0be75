"""Ranks that share memory, die and fail: what the tests of it have in common."""

import os
import signal
import time

import pytest
import torch.distributed as dist

from sparsefusion.collectives.shared_memory import connect, kernels

SOON = 10  # seconds: 3 times what an error may take, and more, for busy machines
needs_library = pytest.mark.skipif(not kernels(), reason=f"no C library: {kernels().why}")


def joined(timeout=None, library=None):
    """This rank's SharedMemory of all ranks."""
    memory, why = connect(dist.group.WORLD, timeout, library)
    assert why == ""
    return memory


def die():
    """Kill this rank's process; what returns is a fork of it, which reports to the parent in its place."""
    if os.fork():
        os.kill(os.getpid(), signal.SIGKILL)


def error_of(function):
    """The (kind, message) of what it raises, within SOON."""
    start = time.monotonic()
    with pytest.raises(Exception) as caught:
        function()
    assert time.monotonic() - start < SOON
    return caught.type, str(caught.value)
