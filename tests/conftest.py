"""Settings of all tests: one thread, no network, quiet third-party packages; the `ranks` fixture; the option --full."""

import gc
import os
import signal

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch and numpy load their libraries
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # else tokenizers warns in every forked rank

import pytest
import torch

from ranks import run_ranks

torch.set_num_threads(1)
# A shell's background jobs ignore SIGINT, and so would the programs that the tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def ranks():
    """ranks(function, world_size, *args, timeout=60): the results of function(rank, *args) on forked gloo ranks."""
    return run_ranks


def pytest_collection_finish():
    """Exclude everything that was imported from garbage collection, here and in forked ranks: that saves time."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser):
    """Add --full."""
    parser.addoption("--full", action="store_true", help="also run the tests marked `full`: the full matrices")


def pytest_collection_modifyitems(config, items):
    """Deselect the tests marked `full` unless --full is given; skip those marked `cuda` where there is no CUDA."""
    if not config.getoption("--full"):
        full = [item for item in items if item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=full)
        items[:] = [item for item in items if not item.get_closest_marker("full")]
    for item in items:
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))
