"""The anonymous memory of a process (RssAnon), read by another process many times a second."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

# Samples a process's anonymous memory; prints the peak's growth over the first sample when stdin closes.
SAMPLER = """
import select, sys
def anonymous():
    with open(f"/proc/{sys.argv[1]}/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))
first = most = anonymous()
print(flush=True)
while not select.select([sys.stdin], [], [], 0.0002)[0]:
    most = max(most, anonymous())
print(max(most, anonymous()) - first)
"""


def return_freed_blocks() -> None:
    """From now on, return blocks of 1 MB and more to the system when they are freed, where the C library is glibc.

    By default, glibc keeps blocks of up to 32 MB, so that a measurement would depend on what the process has done before.
    """
    libc, threshold = ctypes.CDLL(None), -3  # M_MMAP_THRESHOLD: larger blocks do not come from the heap
    if hasattr(libc, "mallopt"):
        libc.mallopt(threshold, 2**20)


@contextmanager
def peak_growth() -> Iterator[SimpleNamespace]:
    """Measures the peak growth of this process's anonymous memory; `.bytes` of the result afterwards.

    From then on, the process gets no pages of 2 MB.
    """
    result = SimpleNamespace(bytes=None)
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)  # otherwise, reused memory of earlier work in this process would not count
    # PR_SET_THP_DISABLE: earlier models may have asked for pages of 2 MB in the heap, where a byte would count as so much.
    libc.prctl(41, 1, 0, 0, 0)
    command = [sys.executable, "-S", "-E", "-c", SAMPLER, str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sampler:
        sampler.stdout.readline()
        yield result
        result.bytes = int(sampler.communicate()[0])
