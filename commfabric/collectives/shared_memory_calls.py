"""Calls of the shared-memory kernels: describes their arguments to C, and their headers in error messages."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from commfabric.native.library import INT, POINTER, SIZE

from .wire_formats import at_least_fp32, padded, wire_format

# Constants of native.h and formats.h.
OPERATIONS, GATHER = {"sum": 0, "max": 1}, 2
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 3, torch.float64: 4}
CODES = {"fp32": 0, "bf16": 1, "int8": 2, "fp16": 3, "fp64": 4, "bytes": 5}


class Part(ctypes.Structure):
    """The struct Part of formats.h."""

    _fields_ = [("input", POINTER), ("output", POINTER), ("numel", SIZE), ("dtype", INT), ("format", INT)]


def check_device(tensors: Sequence[torch.Tensor]) -> None:
    """ValueError if a tensor is not on the CPU: C would read its address."""
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise ValueError(f"shared memory needs tensors on the CPU, not on {tensor.device}")


def fill_parts(parts: Any, tensors: Sequence[torch.Tensor], totals: Sequence[torch.Tensor], format: str) -> None:
    """Fill the structs `parts` with tensors to sum and tensors for the sums. The second tensor is summed in fp32."""
    for part, tensor, total, name in zip(parts, tensors, totals, (format, "fp32"), strict=False):
        part.input, part.output, part.numel = tensor.data_ptr(), total.data_ptr(), tensor.numel()
        part.dtype = DTYPES[tensor.dtype]
        part.format = CODES["fp64" if name == "fp32" and tensor.dtype == torch.float64 else name]


def bytes_on_wire(tensors: Sequence[torch.Tensor], format: str) -> int:
    """The sum of the bytes of the first tensor in a format and of the second, if any, in fp32."""
    total = 0
    for tensor, name in zip(tensors, (format, "fp32"), strict=False):
        form = wire_format(name, at_least_fp32(tensor.dtype))
        total += form.nbytes(padded(tensor.numel(), form.block))
    return total


def describe_header(kind: int, numel: int, second_numel: int) -> str:
    """A header of shared_memory.c in words: operation, format, bytes, and elements or dtypes where these may differ."""
    operation, count = kind & 15, kind >> 4 & 15
    if operation == GATHER:
        return f"all_gather of {numel} bytes"
    numels = [numel, second_numel][:count]
    names = {code: name for name, code in CODES.items()}
    formats = [names[kind >> shift & 15] for shift in (8, 12)]
    nbytes = [_encoded_bytes(name, each) for name, each in zip(formats, numels, strict=False)]
    text = f"all_reduce ({[*OPERATIONS][operation]}, {formats[0]}) of {_sum_of(nbytes)} bytes"
    if "int8" in formats[:count]:  # several numbers of elements take the same number of bytes
        text += f" ({_sum_of(numels)} elements)"
    dtypes = {code: str(dtype) for dtype, code in DTYPES.items()}
    types = [dtypes[kind >> shift & 15] for shift in (16, 20)][:count]
    return text if {*types} == {"torch.float32"} else f"{text} from {_sum_of(types)}"


def _sum_of(values: Sequence[object]) -> str:
    return " + ".join(map(str, values))


def _encoded_bytes(format: str, numel: int) -> int:
    """Bytes of `numel` elements in a format of CODES other than "bytes"."""
    form = wire_format("fp32", torch.float64) if format == "fp64" else wire_format(format, torch.float32)
    return form.nbytes(padded(numel, form.block))
