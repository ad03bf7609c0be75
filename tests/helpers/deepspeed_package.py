"""The `deepspeed` fixture: the package, with all that its engines import, before ranks are forked."""

import importlib
import os
import sys
from contextlib import suppress

import pytest

# An engine imports these when it is made, which every forked rank would do again.
LATE = ("comm.mori", "module_inject.auto_ep_layer", "runtime.zero.muon.muon_optimizer")


@pytest.fixture(scope="session")
def deepspeed():
    """The package on CPUs, with warnings hidden."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    package = pytest.importorskip("deepspeed")
    for name in LATE:
        with suppress(ImportError):  # other versions of DeepSpeed do not have all of them
            importlib.import_module(f"deepspeed.{name}")
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # which would compile its CPU operations
    package.utils.logger.setLevel("ERROR")
    return package
