"""Functions for the tests of shared memory: connect ranks, kill a rank, and check that an error is raised in time."""

import os
import signal
import time

import pytest
import torch.distributed as dist

from sparsefusion.collectives.shared_memory import connect, kernels

SOON = 10  # seconds within which an error must be raised: over 3 times the limit promised, because machines may be busy
needs_library = pytest.mark.skipif(not kernels(), reason=f"no C library: {kernels().why}")


def joined(timeout=None, library=None):
    """This rank's SharedMemory, connected to those of all ranks."""
    memory, why = connect(dist.group.WORLD, timeout, library)
    assert why == ""
    return memory


def die():
    """Kill this rank's process. A fork of it returns, which reports to the parent in its place."""
    if os.fork():
        os.kill(os.getpid(), signal.SIGKILL)


def error_of(function):
    """The (type, message) of the exception that `function` raises; it must do so within SOON seconds."""
    start = time.monotonic()
    with pytest.raises(Exception) as caught:
        function()
    assert time.monotonic() - start < SOON
    return caught.type, str(caught.value)
