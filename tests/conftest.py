"""Settings of all tests: one thread, no network, quiet third-party packages; the `ranks` fixture; the option --full."""

import ctypes
import gc
import os
import signal
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch and numpy load their libraries
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as the scripts set it
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # else tokenizers warns in every forked rank

import pytest
import torch
from chosen import covering

from benchmarks.support.anonymous_memory import return_freed_blocks
from ranks import run_ranks

torch.set_num_threads(1)
LIBC = ctypes.CDLL(None)
HUGE_PAGE, MADV_COLLAPSE = 2**21, 25
return_freed_blocks()  # so forking is fast, and a measurement of memory does not depend on the tests before it
# A shell's background jobs ignore SIGINT, and so would the programs that the tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def ranks():
    """ranks(function, world_size, *args, timeout=60): the results of function(rank, *args) on forked gloo ranks."""
    return run_ranks


@pytest.fixture(autouse=True)
def _hide_gpus(request, monkeypatch):
    """Where there is a GPU, hide it from tests that are not marked `cuda`: commands would choose it by default."""
    if torch.cuda.is_available() and not request.node.get_closest_marker("cuda"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(scope="module", autouse=True)
def _return_freed_memory():
    """After a module, return freed memory to the system: forking a rank takes time for every page of this process."""
    yield
    if hasattr(LIBC, "malloc_trim"):
        LIBC.malloc_trim(0)


def pytest_collection_finish():
    """Exclude everything that was imported from garbage collection, here and in forked ranks: that saves time."""
    gc.collect()
    gc.freeze()
    _join_pages()


def _join_pages():
    """Move this process's memory to pages of 2 MB where Linux can: a fork copies and drops an entry for every page.

    This halves the time of starting and ending ranks.
    """
    if sys.platform != "linux":
        return
    for line in Path("/proc/self/maps").read_text().splitlines():
        area, access, *_, name = [*line.split(maxsplit=5), ""][:6]
        if access.startswith("rw") and name in ("", "[heap]"):
            start, end = (int(address, 16) for address in area.split("-"))
            for page in range(-(-start // HUGE_PAGE) * HUGE_PAGE, end - HUGE_PAGE + 1, HUGE_PAGE):
                LIBC.madvise(ctypes.c_void_p(page), ctypes.c_size_t(HUGE_PAGE), MADV_COLLAPSE)


def pytest_addoption(parser):
    """Add --full."""
    parser.addoption("--full", action="store_true", help="run the full matrices: all cases of all tests")


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc):
    """Without --full, keep few cases of each test, before pytest builds them: those that `covering` chooses of the unmarked.

    Unless cases are named on the command line.
    """
    yield
    options = metafunc.config
    if metafunc._calls and not options.getoption("--full") and not any("[" in argument for argument in options.args):
        cases = [case for case in metafunc._calls if all(mark.name != "full" for mark in case.marks)]
        chosen = covering([case.params for case in cases]) if cases else []
        metafunc._calls = [cases[index] for index in chosen] or metafunc._calls[:1]  # which is deselected later


def pytest_collection_modifyitems(config, items):
    """Without --full, deselect tests and cases marked `full`; skip tests marked `cuda` where there is no CUDA."""
    if not config.getoption("--full"):
        kept = [item for item in items if not item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("full")])
        items[:] = kept
    for item in items:
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))
