"""The line that says which kernels a job runs."""

from .optional_imports import version_of

TYPES = ("float32", "bfloat16", "float64")


def size_text(nbytes: int) -> str:
    unit, divisor = ("GB", 1e9) if nbytes >= 1e8 else ("MB", 1e6) if nbytes >= 1e5 else ("KB", 1e3)
    return f"{nbytes / divisor:.2f} {unit}"


def kernels_line(device: object, dtype: object, all_reduce: str | None = None, trains: bool = False) -> str:
    """The first line that a job prints: the kernels that it runs, with `trains` also the implementation of AdamW.

    all_reduce: the implementation of the all-reduce; None or "" for one rank.
    """
    kind, name = str(device).split(":")[0], dtype_name(dtype)
    kernels = _kernels_of_cuda(name) if kind == "cuda" else _kernels_of_cpu(kind, name)
    adamw = f"; AdamW {_adamw_of_cuda(name)}" if trains and kind == "cuda" else ""
    return f"megatron-ssm: kernels {kernels}{adamw}" + (f"; all-reduce {all_reduce}" if all_reduce else "")


def _kernels_of_cpu(device: str, dtype: str) -> str:
    """The C kernels' variant, or torch and the reason."""
    from .kernels import LIBRARY

    why_torch = device if device != "cpu" else dtype if dtype not in TYPES[:2] else LIBRARY.why
    return f"torch ({why_torch})" if why_torch else f"C ({LIBRARY.variant})"


def _kernels_of_cuda(dtype: str) -> str:
    """The packages whose kernels are all installed, and torch with the reasons why other kernels are missing."""
    from .cuda_kernels import TYPES as CUDA_TYPES
    from .implementations import IMPLEMENTATIONS

    if dtype not in map(dtype_name, CUDA_TYPES):
        return f"torch (cuda; no other kernels take {dtype})"
    whys: dict[str, set[str]] = {}
    for kernel in IMPLEMENTATIONS:
        if kernel.device == "cuda":
            whys.setdefault(kernel.package, set()).update({kernel.why_not} - {""})
    complete = [f"{package} {version_of(package)}" for package, missing in whys.items() if not missing]
    missing = [why for package in whys.values() for why in sorted(package)]
    fallback = [f"torch (cuda; {'; '.join(missing)})"] if missing else []
    return ", ".join([*complete, *fallback])


def _adamw_of_cuda(dtype: str) -> str:
    import torch

    from .fused_adam import adamw_on_cuda

    name, why = adamw_on_cuda(getattr(torch, dtype))
    return f"{name} ({why})" if why else name


def dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
