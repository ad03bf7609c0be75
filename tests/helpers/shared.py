"""Functions for the tests of shared memory and of errors: connect ranks, kill a rank, and check when an error is raised and
that it keeps nothing."""

import gc
import os
import signal
import sys
import time

import pytest
import torch.distributed as dist

from commfabric.collectives.shared_memory import connect, kernels

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


def references_kept(*functions):
    """How many references to the default group are left by the functions, which must raise errors, without a collection.

    Threads of a group that is referred to might run until Python ends, and abort the process.
    """
    gc.disable()
    before = sys.getrefcount(dist.group.WORLD)
    for function in functions:
        try:  # `pytest.raises` would keep the error
            function()
        except Exception:
            continue
        raise AssertionError(f"{function} raised no error")
    return sys.getrefcount(dist.group.WORLD) - before


def error_of(function):
    """The (type, message) of the exception that `function` raises; it must do so within SOON seconds."""
    start = time.monotonic()
    with pytest.raises(Exception) as caught:
        function()
    assert time.monotonic() - start < SOON
    return caught.type, str(caught.value)
