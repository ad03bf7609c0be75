"""Calls of the shared-memory kernels: their arguments checked and described to C, and headers described in words."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from sparsefusion.native.library import INT, POINTER, SIZE

from .wire_formats import at_least_fp32, padded, wire_format

FORMATS = ("fp32", "fp16", "bf16", "int8")
# Constants of native.h and formats.h.
OPERATIONS, GATHER = {"sum": 0, "max": 1}, 2
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 3, torch.float64: 4}
CODES = {"fp32": 0, "bf16": 1, "int8": 2, "fp16": 3, "fp64": 4, "bytes": 5}


class Part(ctypes.Structure):
    """The struct Part of formats.h."""

    _fields_ = [("input", POINTER), ("output", POINTER), ("numel", SIZE), ("dtype", INT), ("format", INT)]


def check_arguments(tensor: torch.Tensor, format: str, exact: torch.Tensor | None, op: str) -> None:
    """ValueError: an all-reduce that the kernels do not do."""
    if format not in FORMATS:
        raise ValueError(f"format {format!r} is none of {', '.join(FORMATS)}")
    if op not in OPERATIONS:
        raise ValueError(f"op {op!r} is none of {', '.join(OPERATIONS)}")
    if op == "max" and (format != "fp32" or exact is not None):
        raise ValueError(
            f"op 'max' is for format fp32 and one tensor, not for {format}{' and exact' * (exact is not None)}"
        )
    for each in (tensor, exact):
        if each is not None:
            check_device(each)
            if each.dtype not in DTYPES:
                raise ValueError(f"{each.dtype} is none of {', '.join(map(str, DTYPES))}")


def check_device(tensor: torch.Tensor) -> None:
    """ValueError: not a tensor, or not on the CPU."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{type(tensor).__name__} is no tensor")
    if tensor.device.type != "cpu":
        raise ValueError(f"the tensor is on {tensor.device}, and only tensors on the CPU go through shared memory")


def fill_parts(parts: Any, tensors: Sequence[torch.Tensor], totals: Sequence[torch.Tensor], format: str) -> None:
    """Describe to C which tensors to sum, and where to write the sums. The second tensor is summed in fp32."""
    for part, tensor, total, name in zip(parts, tensors, totals, (format, "fp32"), strict=False):
        part.input, part.output, part.numel = tensor.data_ptr(), total.data_ptr(), tensor.numel()
        part.dtype = DTYPES[tensor.dtype]
        part.format = CODES["fp64" if name == "fp32" and tensor.dtype == torch.float64 else name]


def bytes_on_wire(tensors: Sequence[torch.Tensor], format: str) -> int:
    """Bytes of the first tensor in a format, and of a second one in fp32."""
    total = 0
    for tensor, name in zip(tensors, (format, "fp32"), strict=False):
        form = wire_format(name, at_least_fp32(tensor.dtype))
        total += form.nbytes(padded(tensor.numel(), form.block))
    return total


def describe_header(kind: int, numel: int, second_numel: int) -> str:
    """A header of shared_memory.c in words: the operation, the format, the bytes, and what else may differ."""
    operation, count = kind & 15, kind >> 4 & 15
    if operation == GATHER:
        return f"all_gather of {numel} bytes"
    numels = [numel, second_numel][:count]
    names = {code: name for name, code in CODES.items()}
    formats = [names[kind >> shift & 15] for shift in (8, 12)]
    nbytes = [_encoded_bytes(name, each) for name, each in zip(formats, numels, strict=False)]
    text = f"all_reduce ({[*OPERATIONS][operation]}, {formats[0]}) of {_sum_of(nbytes)} bytes"
    if "int8" in formats[:count]:  # several sizes take the same number of bytes
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
