"""`python -m megatron_ssm doctor`: what is installed, which kernels run on this machine, and known problems.

A report is a dictionary of plain values, printed as a page or as JSON. What cannot be found out is "unknown (the error)".
"""

import json
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ssm.ops.optional_imports import version_of
from sparsefusion.foundation.command_line import Printer
from sparsefusion.foundation.launcher import this_rank
from sparsefusion.native.library import Library, file_of

from .known_problems import LIBRARIES, find_problems, torch_build, usable_cores, value_or_unknown

if TYPE_CHECKING:
    from megatron_ssm.ops.implementations import Implementation

PACKAGES = (
    "megatron-ssm", "torch", "numpy", "safetensors", "tokenizers", "transformers", "megatron-core", "deepspeed",
    "mamba-ssm", "causal-conv1d", "flash-linear-attention", "transformer-engine",
    "apex",
)  # fmt: skip
TYPES = ("float32", "bfloat16", "float64")
NOT_TRAINED = "none: quantized matrices are not trained"


def kernels_line(device: object, dtype: object, all_reduce: str | None = None, trains: bool = False) -> str:
    """The kernels that a job runs: the first line that it prints.

    Args:
        device: The device of the model, as torch names it.
        dtype: The dtype of its parameters, or its name.
        all_reduce: How the ranks sum; None or "" for one rank.
        trains: Name the AdamW too.
    """
    kind, name = str(device).split(":")[0], _name(dtype)
    kernels = _kernels_of_cuda(name) if kind == "cuda" else _kernels_of_cpu(kind, name)
    adamw = f"; AdamW {_adamw_of_cuda(name)}" if trains and kind == "cuda" else ""
    return f"megatron-ssm: kernels {kernels}{adamw}" + (f"; all-reduce {all_reduce}" if all_reduce else "")


def _kernels_of_cpu(device: str, dtype: str) -> str:
    """The C kernels' variant, or torch and the reason."""
    from megatron_ssm.native.kernels import LIBRARY

    why_torch = device if device != "cpu" else dtype if dtype not in TYPES[:2] else LIBRARY.why
    return f"torch ({why_torch})" if why_torch else f"C ({LIBRARY.variant})"


def _kernels_of_cuda(dtype: str) -> str:
    """The packages whose kernels are all installed, then torch with the reasons why others are not."""
    from megatron_ssm.ops.cuda_kernels import TYPES as CUDA_TYPES
    from megatron_ssm.ops.implementations import IMPLEMENTATIONS

    if dtype not in map(_name, CUDA_TYPES):
        return f"torch (cuda; no other kernels take {dtype})"
    whys: dict[str, set[str]] = {}
    for kernel in (each for each in IMPLEMENTATIONS if each.device == "cuda"):
        whys.setdefault(kernel.package, set()).update({kernel.why_not} - {""})
    complete = [f"{package} {version_of(package)}" for package, missing in whys.items() if not missing]
    missing = [why for package in whys.values() for why in sorted(package)]
    fallback = [f"torch (cuda; {'; '.join(missing)})"] if missing else []
    return ", ".join([*complete, *fallback])


def _adamw_of_cuda(dtype: str) -> str:
    import torch

    from megatron_ssm.ops.fused_adam import adamw_on_cuda

    name, why = adamw_on_cuda(getattr(torch, dtype))
    return f"{name} ({why})" if why else name


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def doctor(as_json: bool) -> None:
    """Print the report from rank 0."""
    found = report()
    Printer(this_rank() == 0).print(json.dumps(found) + "\n" if as_json else page(found))


def report() -> dict[str, Any]:
    """Everything that `doctor` finds out, by part."""
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
    """The processor's name where Linux knows it, and the architecture."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0]} ({platform.machine()})" if models else platform.machine()


def libraries() -> dict[str, Any]:
    """{package: its C library: loaded or not, the variant, the file, and the reason if it is not loaded}."""
    return {package: value_or_unknown(_library_of, package) for package in LIBRARIES}


def _library_of(package: str) -> dict[str, Any]:
    library, file = Library(package, {}), file_of(package)
    return {"loaded": bool(library), "variant": library.variant, "file": file and str(file), "why not": library.why}


def launchers() -> dict[str, str]:
    """{launcher: its path}, beside this Python or in PATH."""
    found = {name: value_or_unknown(_launcher, name) for name in ("torchrun", "deepspeed", "srun")}
    if found["torchrun"] == "not found" and version_of("torch") != "not installed":
        found["torchrun"] = "not found; python -m torch.distributed.run is the same"
    return found


def _launcher(name: str) -> str:
    beside = [str(Path(sys.executable).parent)] if sys.executable else []
    return shutil.which(name, path=os.pathsep.join([*beside, os.environ.get("PATH", os.defpath)])) or "not found"


def threads() -> dict[str, Any]:
    """The number of threads of torch, and the environment variable that sets it."""

    def of_torch() -> int:
        import torch

        return torch.get_num_threads()

    return {"torch": value_or_unknown(of_torch), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "not set")}


# The implementations that run


def operations() -> list[dict[str, str]]:
    """One row for each operation on each kind of device that this machine has."""
    import torch

    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    return [row for device in devices for row in operations_on(device)]


def operations_on(device: str) -> list[dict[str, str]]:
    """The kernels of each operation on "cpu" or "cuda" in inference and in training, and the calls left to torch."""
    from megatron_ssm.ops.implementations import IMPLEMENTATIONS

    names = dict.fromkeys(each.operation for each in IMPLEMENTATIONS)
    rows = [(name, *_runs([i for i in IMPLEMENTATIONS if (i.operation, i.device) == (name, device)])) for name in names]
    rows += _products() if device == "cpu" else [(name, "torch", train, "cuBLAS") for name, _, train, _ in _products()]
    rows += [
        ("attention", "torch", "torch", "torch's scaled_dot_product_attention"),
        _adamw(device),
        _all_reduce(device),
    ]
    return [dict(zip(("operation", "device", "inference", "training", "why"), (name, device, *row), strict=True))
            for name, *row in rows]  # fmt: skip


def _runs(kernels: "list[Implementation]") -> tuple[str, str, str]:
    """(inference, training, why) of an operation with these kernels on a device."""
    usable = [kernel for kernel in kernels if not kernel.why_not]
    whys = [*dict.fromkeys(kernel.why_not for kernel in kernels if kernel.why_not)]
    if not kernels:
        return "torch", "torch", "no kernel on this device"
    trained = [kernel.package for kernel in usable if kernel.trained]
    inference = [f"{kernel.package}{f' ({kernel.tokens})' * bool(kernel.tokens and whys)}" for kernel in usable]
    other_dtypes = "float64, float16" if kernels[0].device == "cpu" else "float64"
    why = "; ".join(whys) or f"torch: {', '.join([other_dtypes, *filter(None, (k.torch_for for k in usable))])}"
    return ", ".join([*dict.fromkeys(inference), *["torch"] * bool(whys)]), (trained or ["torch"])[0], why


def _adamw(device: str) -> tuple[str, str, str, str]:
    from megatron_ssm.ops.fused_adam import adamw_on_cuda

    name, why = adamw_on_cuda() if device == "cuda" else ("torch", "torch's fused AdamW")
    return "AdamW", "none: it trains", name, why or "float64: torch"


def _all_reduce(device: str) -> tuple[str, str, str, str]:
    library, name = Library("sparsefusion", {}), "all-reduce between ranks"
    if device == "cuda":
        return name, "NCCL", "NCCL", "what torch.distributed has for cuda"
    if not library:
        return name, "gloo", "gloo", f"no C kernels: {library.why}"
    return name, "C, shared memory", "C, shared memory", "if all ranks are on one machine; else gloo"


def _products() -> list[tuple]:
    """A row for the product with each kind of matrix: the kernels of C's table (native/dispatch.c), or torch."""
    import torch

    from megatron_ssm.native import products

    rows = []
    for stored in (torch.float32, torch.bfloat16, torch.float16, *products.QUANTIZED):
        x = torch.float32 if stored in products.QUANTIZED else stored
        parts, most = [], 0
        for kernel, limit in products.kernels_for(stored, x).items():
            if limit > most:
                parts.append(f"C ({kernel})" if limit == products.NO_LIMIT else f"C ({kernel}) up to {limit} rows")
                most = limit
        runs = ", then ".join(parts if most == products.NO_LIMIT else [*parts, "torch"])
        training = NOT_TRAINED if stored in products.QUANTIZED else "torch"
        rows.append(
            (f"matrix product, {_matrix_name(stored)}", runs, training, f"instructions: {products.instructions()}")
        )
    return rows


def _matrix_name(stored: Any) -> str:
    """The name of a matrix's dtype: the 4-bit numbers are stored in bytes."""
    return {"uint8": "int4"}.get(_name(stored), _name(stored))


# The page


def page(found: dict[str, Any]) -> str:
    """The report as text."""
    titles = {"kernels": "C kernels", "operations": "what runs each operation"}
    parts = [f"{titles.get(name, name).capitalize()}\n{_part(part)}" for name, part in found.items()]
    return "megatron-ssm doctor\n\n" + "\n\n".join(parts) + "\n"


def _part(part: Any) -> str:
    """The text of a part: a string, {name: value}, rows of a table, or lines."""
    if isinstance(part, dict):
        return _aligned([(name, _library_line(v) if isinstance(v, dict) else str(v)) for name, v in part.items()])
    if isinstance(part, list) and part and isinstance(part[0], dict):
        return _aligned([tuple(part[0]), *(tuple(row.values()) for row in part)])
    return "\n".join("  " + line for line in ([part] if isinstance(part, str) else part or ["none"]))


def _library_line(library: dict[str, Any]) -> str:
    """A row of `kernels` in words."""
    where = f", {library['file']}" if library["file"] else ""
    return f"C ({library['variant']}){where}" if library["loaded"] else f"torch ({library['why not']}){where}"


def _aligned(rows: list[tuple[str, ...]]) -> str:
    """The rows as lines, in columns that are two spaces apart."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join("  " + line.rstrip() for line in lines)
