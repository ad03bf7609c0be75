"""Known problems of a machine, each with its remedy: the warnings of `doctor`."""

import importlib.util
import os
import shlex
import shutil
import sysconfig
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from commfabric.native.library import Library, skipped
from megatron_ssm.kernels.optional_imports import nvidia_apex, version_of

LIBRARIES = ("commfabric", "megatron_ssm")
STALE_LOCK_S = 600.0  # an older lock of a build is assumed to come from a killed build
SHARED_BYTES = 8 * 2**20  # the space in /dev/shm that the ranks of one machine may need
NVIDIA_APEX = "pip install -v --no-build-isolation git+https://github.com/NVIDIA/apex"
REINSTALL = "`make -B env` or `pip install -e .`"


def value_or_unknown(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a function, or "unknown (ERROR)" if it raises an error."""
    try:
        return function(*arguments)
    except Exception as error:  # a broken package may raise anything
        return f"unknown ({type(error).__name__}: {' '.join(str(error).split())[:300]})"


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def torch_build() -> str:
    """The platform for which torch was built: CUDA, with the visible devices, ROCm, or CPU."""
    import torch

    if not torch.version.cuda:
        return f"ROCm {torch.version.hip}" if torch.version.hip else "CPU"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return f"CUDA {torch.version.cuda}; devices: {', '.join(names) or 'none'}"


def find_problems() -> list[str]:
    """A line for each problem of this machine, with its remedy.

    Each check is a function without arguments that returns such lines.
    """
    checks = (
        foreign_apex, stale_locks, cpu_torch, omp_threads, missing_kernels, slow_kernels, shared_memory, skipped_kernels,
    )  # fmt: skip
    results = {check.__name__: value_or_unknown(check) for check in checks}
    lines = ([f"{name}: {result}"] if isinstance(result, str) else result for name, result in results.items())
    return [line for group in lines for line in group]


def foreign_apex() -> list[str]:
    """Check for an apex that is not NVIDIA's, without importing it.

    PyPI has another project of this name, and Megatron would import it as if it were NVIDIA's.
    """
    spec, version = importlib.util.find_spec("apex"), version_of("apex")
    folders = list(spec.submodule_search_locations or []) if spec else []
    installed = version != "not installed"
    if nvidia_apex() or not (spec or installed):
        return []
    path = folders[0] if folders else spec.origin if spec else "no module"
    name, remedy = (f"apex {version}", "`pip uninstall apex`") if installed else ("apex", "take it off sys.path")
    return [f"{name} ({path}) is not NVIDIA's: {remedy}; NVIDIA's: `{NVIDIA_APEX}`"]


def stale_locks() -> list[str]:
    """Check for locks of killed builds of torch's extensions. Every later build of such an extension waits for its lock."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path(cache, "torch_extensions").expanduser())
    paths = [path for depth in range(4) for path in root.glob("*/" * depth + "lock")]
    ages = {path: time.time() - path.stat().st_mtime for path in sorted(paths) if path.is_file()}
    return [
        f"{path} is {age / 60:.0f} minutes old, and builds wait for it: delete it unless a compiler is running"
        for path, age in ages.items()
        if age > STALE_LOCK_S
    ]


def cpu_torch() -> list[str]:
    """Check for CUDA devices that torch, built for the CPU, cannot use."""
    devices = sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*"))
    return cpu_torch_beside(devices, value_or_unknown(torch_build))


def cpu_torch_beside(devices: Sequence[str], build: str) -> list[str]:
    """The result of `cpu_torch` for these device files and this build of torch."""
    if not devices or build != "CPU":
        return []
    return [
        f"{', '.join(devices)}: this machine has CUDA, but torch is a CPU build: install one for CUDA (pytorch.org)"
    ]


def omp_threads() -> list[str]:
    """Check for an OMP_NUM_THREADS above the number of cores; the threads would slow each other down."""
    value, cores = os.environ.get("OMP_NUM_THREADS", "").split(",")[0], usable_cores()
    if not value:
        return []
    if not value.strip().isdecimal():
        return [f"OMP_NUM_THREADS={value} is not a number: unset it"]
    if int(value) <= cores:
        return []
    return [
        f"OMP_NUM_THREADS={value} is more than the {cores} cores of this process: set it to {cores} / ranks, or less"
    ]


def missing_kernels() -> list[str]:
    """Check for C libraries that are not built, although they could be."""
    if skipped():
        return []
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
    remedy = f"reinstall with {REINSTALL}" if shutil.which(compiler) else f"install gcc, then {REINSTALL}"
    whys = {package: Library(package, {}).why for package in LIBRARIES}
    return [f"{package} has no C kernels ({why}): {remedy}" for package, why in whys.items() if why]


def slow_kernels() -> list[str]:
    """Check for C libraries without AVX2, because of an older compiler, on a processor with AVX2."""
    cpuinfo = Path("/proc/cpuinfo")
    features = set(cpuinfo.read_text(errors="replace").split()) if cpuinfo.is_file() else set()
    return slow_kernels_on(features, {package: Library(package, {}).variant for package in LIBRARIES})


def slow_kernels_on(features: Collection[str], variants: Mapping[str, str]) -> list[str]:
    """The result of `slow_kernels` for a processor's features and {package: variant of its library}."""
    remedy = f"reinstall with GCC 12 or newer, on glibc ({REINSTALL})"
    return [
        f"{package}'s C kernels use {variant}, but this processor has AVX2: {remedy}"
        for package, variant in variants.items()
        if variant == "SSE2" and "avx2" in features
    ]


def shared_memory(path: str | Path = "/dev/shm", needed: int = SHARED_BYTES) -> list[str]:
    """Check that /dev/shm, where the ranks of one machine share memory, exists and has `needed` bytes."""
    if not os.access(path, os.W_OK | os.X_OK):
        return [f"{path} is missing or not writable, so ranks share memory through a file on disk: mount a tmpfs there"]
    size = os.statvfs(path)
    if (free := size.f_bavail * size.f_frsize) >= needed:
        return []
    return [f"{path} has {free >> 20} MB free, of {needed >> 20} needed: mount a larger one (docker run --shm-size=1g)"]


def skipped_kernels() -> list[str]:
    return ["MEGATRON_SSM_SKIP_NATIVE is set, so torch does the work of the C kernels: unset it"] if skipped() else []
