"""Imports of the CUDA kernels of mamba-ssm, causal-conv1d and flash-linear-attention; batches that are too large are split.

`cuda_scans`, `gated_delta` and `convolution` call them. No other module imports these packages.

| operator | several tokens | one token, without gradients |
|---|---|---|
| `scan.selective_scan` | `selective_scan_fn` | `selective_state_update` |
| `scan.ssd` | `mamba_chunk_scan_combined` | `selective_state_update` |
| `gated_delta.gated_delta` | `chunk_gated_delta_rule` | `fused_recurrent_gated_delta_rule` |
| `convolution.causal_conv` | `causal_conv1d_fn` | `causal_conv1d_update` |

A package is imported when it is first needed for a CUDA tensor. If it is missing or broken, torch computes instead, and
`load_kernel` keeps the reason for `doctor` and for the first line of a job. The functions `supports_*` return True for the
calls that a kernel supports, according to the sources of mamba-ssm 2.3.2 and causal-conv1d 1.6.1. torch computes all others:
float64, unsupported sizes, and gradients that a kernel does not have. No kernel runs while torch.compile traces, because
that combination is untested.

The kernels of mamba-ssm and causal-conv1d compute offsets in 32 bits (causal_conv1d.h: `index_t`; in Triton `pid_b *
stride`; selective_scan.h too, before mamba-ssm 2.3.2), and silently give wrong results if an offset is larger. Therefore a
batch is split into calls whose offsets fit. torch computes a call of which a single row does not fit, and a step of one
token that does not fit as a whole.
"""

import functools
import importlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .optional_imports import OptionalImport, import_optional

TYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_OFFSET = 2**31 - 1  # the largest offset of an element from the first one of its tensor, in elements


# {kernel: (distribution, module that defines it)}
KERNELS = {
    "selective_scan_fn": ("mamba-ssm", "mamba_ssm.ops.selective_scan_interface"),
    "selective_state_update": ("mamba-ssm", "mamba_ssm.ops.triton.selective_state_update"),
    "mamba_chunk_scan_combined": ("mamba-ssm", "mamba_ssm.ops.triton.ssd_combined"),
    "chunk_gated_delta_rule": ("flash-linear-attention", "fla.ops.gated_delta_rule"),
    "fused_recurrent_gated_delta_rule": ("flash-linear-attention", "fla.ops.gated_delta_rule"),
    "causal_conv1d_fn": ("causal-conv1d", "causal_conv1d"),
    "causal_conv1d_update": ("causal-conv1d", "causal_conv1d"),
}


@functools.cache
def load_kernel(name: str) -> OptionalImport:
    """Import one of KERNELS, or find the reason why that fails."""
    package, module_name = KERNELS[name]

    def load() -> Callable:
        module = importlib.import_module(module_name)
        if getattr(module, "selective_scan_cuda", True) is None:  # mamba-ssm's import of its compiled module failed
            raise ImportError("it was built without selective_scan_cuda")
        return getattr(module, name)

    return import_optional(package, load)


def on_cuda(tensor: Tensor) -> bool:
    return tensor.is_cuda


def is_usable(name: str, first: Tensor, *others: Tensor | None) -> bool:
    """Return True if a kernel can be imported, and all tensors but None are on CUDA, not empty, and of its dtypes."""
    if not on_cuda(first) or torch.compiler.is_compiling():
        return False
    tensors = [t for t in (first, *others) if t is not None]
    return all(on_cuda(t) and t.dtype in TYPES and t.numel() for t in tensors) and load_kernel(name).item is not None


def may_use_tf32() -> bool:
    settings = torch.backends.cuda.matmul  # reading allow_tf32 raises an error once fp32_precision was set
    return settings.fp32_precision == "tf32" if hasattr(settings, "fp32_precision") else settings.allow_tf32


def common_dtype(*tensors: Tensor | None) -> torch.dtype:
    """The dtype to which all tensors but None can be converted without loss."""
    return functools.reduce(torch.promote_types, (t.dtype for t in tensors if t is not None))


def overwritable(
    state: Tensor | None, shape: Sequence[int], dtype: torch.dtype, like: Tensor, overwrite: bool
) -> Tensor:
    """A state for a kernel to overwrite: `state` if `overwrite` is True and the dtype fits, otherwise a copy, or zeros."""
    if state is None:
        return like.new_zeros(shape, dtype=dtype)
    if overwrite and state.dtype is dtype:
        return state
    return state.to(dtype, copy=True, memory_format=torch.contiguous_format)


# Rows of a batch


def last_offset(tensor: Tensor) -> int:
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def rows_within(allocated: int, *tensors: Tensor | None) -> int:
    """The most rows of a batch for which no offset exceeds LARGEST_OFFSET; 0 if an offset within a single row does.

    Args:
        allocated: The elements per row of the largest tensor that the kernel allocates.
        tensors: The tensors (batch, ...) that the kernel reads as they are or as contiguous copies; or None.
    """
    rows = (LARGEST_OFFSET + 1) // allocated
    for tensor in (t for t in tensors if t is not None):
        row_size, stride = tensor.numel() // len(tensor), tensor.stride(0)
        last_of_row = max(last_offset(tensor) - (len(tensor) - 1) * stride, row_size - 1)
        rows = min(rows, (LARGEST_OFFSET - last_of_row) // max(stride, row_size) + 1)
    return max(rows, 0)


def by_rows(function: Callable[..., Any], rows: int, first: Tensor, *others: Tensor | None) -> Any:
    """Call a function of tensors (batch, ...), which returns a tuple of such tensors, on at most `rows` rows at a time."""
    tensors = (first, *others)
    if rows >= len(first):
        return function(*tensors)
    parts = [itertools.repeat(None) if tensor is None else tensor.split(rows) for tensor in tensors]
    results = [function(*part) for part in zip(*parts, strict=False)]
    return tuple(torch.cat(outputs) for outputs in zip(*results, strict=True))
