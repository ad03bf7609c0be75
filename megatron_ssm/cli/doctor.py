"""`python -m megatron_ssm doctor`: what is installed, which kernels run on this machine, and known problems.

A report is a dictionary of plain values, printed as a page or as JSON. An entry that raises an error is "unknown (ERROR)".
"""

import importlib.util
import json
import os
import platform
import shlex
import shutil
import sys
import sysconfig
import textwrap
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commfabric.foundation.command_line import Printer
from commfabric.foundation.launcher import this_rank
from commfabric.native.library import Library, file_of, skipped
from megatron_ssm.kernels.optional_imports import nvidia_apex, version_of
from megatron_ssm.kernels.report import dtype_name

if TYPE_CHECKING:
    from megatron_ssm.kernels.implementations import Implementation

PACKAGES = (
    "megatron-ssm", "torch", "numpy", "safetensors", "tokenizers", "transformers", "megatron-core", "deepspeed",
    "mamba-ssm", "causal-conv1d", "flash-linear-attention", "transformer-engine",
    "apex",
)  # fmt: skip
NOT_TRAINED = "none: quantized matrices are not trained"
LIBRARIES = ("commfabric", "megatron_ssm")
STALE_LOCK_S = 600.0  # an older lock of a build is assumed to come from a killed build
SHARED_BYTES = 8 * 2**20  # the space in /dev/shm that the ranks of one machine may need
NVIDIA_APEX = "pip install -v --no-build-isolation git+https://github.com/NVIDIA/apex"
REINSTALL = "`make -B env` or `pip install -e .`"


def doctor(as_json: bool) -> None:
    parts = report()
    Printer(this_rank() == 0).print(json.dumps(parts) + "\n" if as_json else page(parts))


def report() -> dict[str, Any]:
    """{name of a part: its content} of the report."""
    parts = {
        "versions": versions,
        "kernels": libraries,
        "operations": operations,
        "launchers": launchers,
        "threads": threads,
        "warnings": find_problems,
    }
    return {name: value_or_unknown(part) for name, part in parts.items()}


# What is installed


def versions() -> dict[str, Any]:
    """The versions of the machine and of the packages."""
    machine = {
        "python": platform.python_version,
        "platform": platform.platform,
        "CPU": cpu_model,
        "cores for this process": usable_cores,
        "torch build": torch_build,
    }
    return {name: value_or_unknown(find) for name, find in machine.items()} | {
        name: value_or_unknown(version_of, name) for name in PACKAGES
    }


def cpu_model() -> str:
    """The name of the processor, if Linux knows it, and its architecture."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0]} ({platform.machine()})" if models else platform.machine()


def libraries() -> dict[str, Any]:
    """{package: facts about its C library} with the keys loaded, variant, file and why not."""
    return {package: value_or_unknown(_library_of, package) for package in LIBRARIES}


def _library_of(package: str) -> dict[str, Any]:
    library, file = Library(package, {}), file_of(package)
    return {"loaded": bool(library), "variant": library.variant, "file": file and str(file), "why not": library.why}


def launchers() -> dict[str, str]:
    """{launcher: its path} in the folder of this Python or in PATH."""
    paths = {name: value_or_unknown(_launcher, name) for name in ("torchrun", "deepspeed", "srun")}
    if paths["torchrun"] == "not found" and version_of("torch") != "not installed":
        paths["torchrun"] = "not found; python -m torch.distributed.run is the same"
    return paths


def _launcher(name: str) -> str:
    folders = [str(Path(sys.executable).parent)] if sys.executable else []
    return shutil.which(name, path=os.pathsep.join([*folders, os.environ.get("PATH", os.defpath)])) or "not found"


def threads() -> dict[str, Any]:
    """The number of torch's threads, and the environment variable that sets it."""

    def torch_threads() -> int:
        import torch

        return torch.get_num_threads()

    return {"torch": value_or_unknown(torch_threads), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "not set")}


# The implementation of each operation


def operations() -> list[dict[str, str]]:
    """A row for each operation on each kind of device of this machine."""
    import torch

    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    return [row for device in devices for row in operations_on(device)]


def operations_on(device: str) -> list[dict[str, str]]:
    """A row for each operation on "cpu" or "cuda": the kernels of inference and training, and the calls that torch runs."""
    from megatron_ssm.kernels.implementations import IMPLEMENTATIONS

    names = dict.fromkeys(kernel.operation for kernel in IMPLEMENTATIONS)
    rows = [(name, *_runs([k for k in IMPLEMENTATIONS if (k.operation, k.device) == (name, device)])) for name in names]
    rows += _products() if device == "cpu" else [(name, "torch", train, "cuBLAS") for name, _, train, _ in _products()]
    rows += [
        ("attention", "torch", "torch", "torch's scaled_dot_product_attention"),
        _adamw(device),
        _all_reduce(device),
    ]
    return [dict(zip(("operation", "device", "inference", "training", "why"), (name, device, *row), strict=True))
            for name, *row in rows]  # fmt: skip


def _runs(kernels: "list[Implementation]") -> tuple[str, str, str]:
    """(inference, training, reason why torch runs) of an operation with these kernels on a device."""
    usable = [kernel for kernel in kernels if not kernel.why_not]
    whys = [*dict.fromkeys(kernel.why_not for kernel in kernels if kernel.why_not)]
    if not kernels:
        return "torch", "torch", "no kernel on this device"
    training = next((kernel.package for kernel in usable if kernel.trained), "torch")
    inference = [f"{kernel.package}{f' ({kernel.tokens})' * bool(kernel.tokens and whys)}" for kernel in usable]
    other_dtypes = "float64, float16" if kernels[0].device == "cpu" else "float64"
    why = "; ".join(whys) or f"torch: {', '.join([other_dtypes, *filter(None, (k.torch_for for k in usable))])}"
    return ", ".join([*dict.fromkeys(inference), *["torch"] * bool(whys)]), training, why


def _adamw(device: str) -> tuple[str, str, str, str]:
    from megatron_ssm.kernels.fused_adam import adamw_on_cuda

    name, why = adamw_on_cuda() if device == "cuda" else ("torch", "torch's fused AdamW")
    return "AdamW", "none: it trains", name, why or "float64: torch"


def _all_reduce(device: str) -> tuple[str, str, str, str]:
    library, name = Library("commfabric", {}), "all-reduce between ranks"
    if device == "cuda":
        return name, "NCCL", "NCCL", "the backend of torch.distributed for cuda"
    if not library:
        return name, "gloo", "gloo", f"no C kernels: {library.why}"
    return name, "C, shared memory", "C, shared memory", "if all ranks are on one machine; else gloo"


def _products() -> list[tuple]:
    """A row for the product with matrices of each dtype: the C kernels (native/dispatch.c), or torch."""
    import torch

    from megatron_ssm.kernels import products

    rows = []
    for stored in (torch.float32, torch.bfloat16, torch.float16, *products.QUANTIZED):
        x = torch.float32 if stored in products.QUANTIZED else stored
        ranges, last_limit = [], 0
        for kernel, limit in products.kernels_for(stored, x).items():
            if limit > last_limit:
                ranges.append(f"C ({kernel})" if limit == products.NO_LIMIT else f"C ({kernel}) up to {limit} rows")
                last_limit = limit
        inference = ", then ".join(ranges if last_limit == products.NO_LIMIT else [*ranges, "torch"])
        training = NOT_TRAINED if stored in products.QUANTIZED else "torch"
        why = f"instructions: {products.instructions()}"
        name = "int4" if stored is torch.uint8 else dtype_name(stored)
        rows.append((f"matrix product, {name}", inference, training, why))
    return rows


# The page


def page(parts: dict[str, Any]) -> str:
    """A report as text of at most 80 columns, which ends in a verdict. Longer words, such as paths, are not cut."""
    titles = {"kernels": "C kernels", "operations": "what runs each operation"}
    sections = [f"{titles.get(name, name).capitalize()}\n{_section(part)}" for name, part in parts.items()]
    lines = parts["warnings"] if isinstance(parts["warnings"], list) else []
    count = len(lines) + json.dumps(parts).count('"unknown (')
    verdict = f"{count} problem{'s' * (count > 1)}, listed above." if count else "No problems found."
    return "\n\n".join(["megatron-ssm doctor", *sections, verdict]) + "\n"


def _section(part: Any) -> str:
    """The text of a part, which is a string, {name: value}, rows of a table, or lines."""
    if isinstance(part, list) and part and isinstance(part[0], dict):
        part = {row["operation"] + f", {row['device']}" * (row["device"] != "cpu"):
                f"{row['inference']}; training: {row['training']} ({row['why']})" for row in part}  # fmt: skip
    if isinstance(part, dict):
        begin = max(map(len, part)) + 4
        texts = {name: _library_line(value) if isinstance(value, dict) else str(value) for name, value in part.items()}
        return "\n".join(_wrapped(text, f"  {name}".ljust(begin), begin) for name, text in texts.items())
    return "\n".join(_wrapped(line, "  ", 4) for line in ([part] if isinstance(part, str) else part or ["none"]))


def _wrapped(text: str, begin: str, indent: int) -> str:
    return textwrap.fill(text, 80, initial_indent=begin, subsequent_indent=" " * indent, break_long_words=False,
                         break_on_hyphens=False)  # fmt: skip


def _library_line(library: dict[str, Any]) -> str:
    file = f", {library['file']}" if library["file"] else ""
    return f"C ({library['variant']}){file}" if library["loaded"] else f"torch ({library['why not']}){file}"


# Known problems of the machine and of the installed versions, each with its remedy


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
