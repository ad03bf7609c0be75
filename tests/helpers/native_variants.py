"""The C libraries with which the kernels are tested: the installed one, and builds by setup.py for older processors.

The installed library has a copy of each kernel for several kinds of processors and runs only the best one, so the others are
compiled into libraries of their own: once per session, by the first xdist worker that needs them.
"""

import fcntl
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from chosen import by_default

from commfabric.native.library import Library, skipped

ROOT = Path(__file__).resolve().parents[2]
CPUINFO = Path("/proc/cpuinfo")
LEVELS = {  # the processor features that each level of x86-64 adds, as /proc/cpuinfo names them
    "x86-64": {"sse2"},
    "x86-64-v3": {"avx2", "bmi2", "f16c", "fma", "movbe"},
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
}
_FEATURES = set(CPUINFO.read_text().split()) if CPUINFO.exists() else set()
VARIANTS = ["installed", *(level for level in LEVELS if LEVELS[level] <= _FEATURES)]
# Others take half a minute to compile.
MARKED = by_default(("installed",), VARIANTS)


def compiler():
    """The program that setup.py compiles C with."""
    return shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]


def build_ext(*arguments, root=ROOT, **environment):
    """The output of `setup.py build_ext`, which must exit with 0."""
    command = [sys.executable, "setup.py", "build_ext", *arguments]
    environment = {name: value for name, value in {**os.environ, **environment}.items() if value is not None}
    output = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.run(command, cwd=root, env=environment, check=True, **output).stdout


def libraries(folder):
    """{package: path} of the libraries built in a folder."""
    return {path.parts[-3]: path for path in folder.glob("*/native/libkernels.so")}


def variants(module):
    """A fixture that makes `module.kernels()` return the C kernels of sparsefusion for each kind of processor."""

    @pytest.fixture(params=MARKED)
    def variant(request, library_path, monkeypatch):
        library = Library("commfabric", module.SIGNATURES, library_path("commfabric", request.param))
        assert library, library.why
        monkeypatch.setattr(module, "kernels", lambda: library)

    return variant


@pytest.fixture(scope="session")
def library_path(tmp_path_factory):
    """library_path(package, variant): the path of that library; None: the installed one. Skips if it cannot be built."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def path(package, variant):
        if variant == "installed":
            return None
        if skipped():
            pytest.skip("MEGATRON_SSM_SKIP_NATIVE is set")
        folder = base / f"native-{variant}"
        with open(base / f"{folder.name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                folder.mkdir()
                options = ("-q", "--build-lib", folder, "--build-temp", folder / "objects")
                oldest = " -DNO_INTRINSICS" if variant == "x86-64" else ""  # as on other processors than x86's
                flags = f"-g0 -DONE_LEVEL -march={variant}{oldest}"
                (folder / "output").write_text(build_ext(*options, CFLAGS=flags))
        if package in libraries(folder):
            return libraries(folder)[package]
        output = (folder / "output").read_text()
        # A compiler that does not support this variant names it in its error.
        if shutil.which(compiler()) and f"'{variant}'" not in output:
            pytest.fail(f"{variant} was not built:\n{output}")
        pytest.skip(f"{variant} was not built: {output.strip().splitlines()[-1]}")

    return path
