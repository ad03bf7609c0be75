"""What is known to go wrong on a machine, each with what helps: the doctor's warnings."""

import importlib.util
import os
import shlex
import shutil
import sysconfig
import time
from pathlib import Path

from megatron_ssm.ops.optional_imports import nvidia_apex, version_of
from sparsefusion.native.library import Library, skipped

LIBRARIES = ("sparsefusion", "megatron_ssm")
MINUTES_10 = 600.0  # after which a build's lock is taken for one that a killed build left
SHARED_BYTES = 8 * 2**20
NVIDIA_APEX = "pip install -v --no-build-isolation git+https://github.com/NVIDIA/apex"
REINSTALL = "`make -B env` or `pip install -e .`"


def known(function, *arguments):
    """What the function returns, or "unknown (why)"."""
    try:
        return function(*arguments)
    except Exception as error:  # a broken package may raise anything
        return f"unknown ({type(error).__name__}: {' '.join(str(error).split())[:300]})"


def usable_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def torch_build() -> str:
    """For CUDA, with the devices it finds, for ROCm, or for the CPU."""
    import torch

    if not torch.version.cuda:
        return f"ROCm {torch.version.hip}" if torch.version.hip else "CPU"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return f"CUDA {torch.version.cuda}; devices: {', '.join(names) or 'none'}"


def warnings() -> list[str]:
    """One line for each thing that is wrong, with what helps."""
    checks = (foreign_apex, stale_locks, cpu_torch, omp_threads, missing_kernels, shared_memory, skipped_kernels)
    found = {check.__name__: known(check) for check in checks}
    lines = ([f"{name}: {told}"] if isinstance(told, str) else told for name, told in found.items())
    return [line for each in lines for line in each]


def foreign_apex() -> list[str]:
    """Another project has the name on PyPI, and Megatron's `import apex` takes it for NVIDIA's. Imports neither."""
    spec, version = importlib.util.find_spec("apex"), version_of("apex")
    folders = list(spec.submodule_search_locations or []) if spec else []
    installed = version != "not installed"
    if nvidia_apex() or not (spec or installed):
        return []
    where = folders[0] if folders else spec.origin if spec else "no module"
    name, remedy = (f"apex {version}", "`pip uninstall apex`") if installed else ("apex", "take it off sys.path")
    return [f"{name} ({where}) is not NVIDIA's: {remedy}; NVIDIA's: `{NVIDIA_APEX}`"]


def stale_locks() -> list[str]:
    """Locks of torch's extension builds that nobody holds any more; each later build of that extension waits for it."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path(cache, "torch_extensions").expanduser())
    paths = [path for depth in range(4) for path in root.glob("*/" * depth + "lock")]
    ages = {path: time.time() - path.stat().st_mtime for path in sorted(paths) if path.is_file()}
    return [
        f"{path} is {age / 60:.0f} minutes old, and a build waits for it to go: delete it unless a compiler is running"
        for path, age in ages.items()
        if age > MINUTES_10
    ]


def cpu_torch() -> list[str]:
    """A CUDA device that torch was not built for."""
    devices = sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*"))
    return cpu_torch_beside(devices, known(torch_build))


def cpu_torch_beside(devices, build) -> list[str]:
    """The same, of device files and a build of torch."""
    if not devices or build != "CPU":
        return []
    return [
        f"{', '.join(devices)}: this machine has CUDA, and torch is a CPU build: install one for CUDA (pytorch.org)"
    ]


def omp_threads() -> list[str]:
    """More threads than cores slow each other down."""
    asked, cores = os.environ.get("OMP_NUM_THREADS", "").split(",")[0], usable_cores()
    if not asked:
        return []
    if not asked.strip().isdecimal():
        return [f"OMP_NUM_THREADS={asked} is not a number: unset it"]
    if int(asked) <= cores:
        return []
    return [
        f"OMP_NUM_THREADS={asked} is more than the {cores} cores of this process: set it to {cores} / ranks, or less"
    ]


def missing_kernels() -> list[str]:
    """Libraries that could be there."""
    if skipped():
        return []
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
    remedy = f"reinstall with {REINSTALL}" if shutil.which(compiler) else f"install gcc, then {REINSTALL}"
    whys = {package: Library(package, {}).why for package in LIBRARIES}
    return [f"{package} has no C kernels ({why}): {remedy}" for package, why in whys.items() if why]


def shared_memory(path="/dev/shm", needed=SHARED_BYTES) -> list[str]:
    """Ranks of one machine meet there."""
    if not os.access(path, os.W_OK | os.X_OK):
        return [f"{path} is not there or not writable, so that ranks meet in a file on disk: mount a tmpfs there"]
    size = os.statvfs(path)
    if (free := size.f_bavail * size.f_frsize) >= needed:
        return []
    return [f"{path} has {free >> 20} MB free, of {needed >> 20} needed: mount it larger (docker run --shm-size=1g)"]


def skipped_kernels() -> list[str]:
    """The switch that keeps C out."""
    return ["MEGATRON_SSM_SKIP_NATIVE is set, so that torch does the C kernels' work: unset it"] if skipped() else []
