"""Products with a matrix by the C kernels, which the table in dispatch.c chooses. See also the remarks in `kernels`.

A matrix (out, in) is either a tensor of x's dtype, or of bfloat16 if x is float32; or it is quantized
(`kernels.quantized_matrices`), with `values`, int8 (out, in) or uint8 (out, in / 2) with two 4-bit numbers in each byte, and
`scales`, float32 (out, in / BLOCK).
"""

import ctypes
from itertools import count

import torch
from torch import Tensor

from . import kernels
from .arguments import address, check_shapes, contiguous
from .kernels import TYPES, functions, raise_if_failed, usable

BLOCK = 64  # elements of a quantized matrix that share a scale (quantized.h)
QUANTIZED = (torch.int8, torch.uint8)  # dtypes of `values`
INSTRUCTIONS = ("plain loops", "AVX2", "AVX-512", "VNNI", "AVX512_BF16", "AMX")  # in the order of product.h
NO_KERNEL = 2  # a result of C's `linear`
NO_LIMIT = 2**63 - 1  # in the table of kernels: any number of rows of x


def instructions() -> str:
    """The instruction set of the products, one of INSTRUCTIONS. Each includes the ones before it."""
    return INSTRUCTIONS[0 if kernels.LIBRARY.functions is None else functions().instructions()]


def has_products_of(dtype: torch.dtype) -> bool:
    """Return True if this processor has instructions for products of bfloat16 or float16, or if that is unknown."""
    return kernels.LIBRARY.functions is None or bool(functions().has_products_of(TYPES[dtype]))


def has_kernel(stored: torch.dtype, x: torch.dtype, rows: int, columns: int, has_gaps: bool = False) -> bool:
    """Return True if C has a kernel for a product of x (rows, columns) and a matrix.

    stored: the dtype of the matrix, or of its values. has_gaps: there are gaps between the rows of the matrix or of the
    result.
    """
    if kernels.LIBRARY.functions is None or stored not in TYPES or x not in TYPES:
        return False
    return bool(functions().has_kernel(TYPES[stored], TYPES[x], rows, columns, has_gaps))


def kernels_for(stored: torch.dtype, x: torch.dtype) -> dict[str, int]:
    """{name of a kernel: the most rows of x} of the table's lines for these dtypes, on this processor.

    The first kernel whose number is large enough is used, if it supports the length of the matrix's rows.
    """
    limits: dict[str, int] = {}
    if kernels.LIBRARY.functions is None or stored not in TYPES or x not in TYPES:
        return limits
    rows, name = ctypes.c_ssize_t(), ctypes.create_string_buffer(32)
    for index in count():
        if not functions().kernel_line(index, TYPES[stored], TYPES[x], ctypes.byref(rows), name):
            return limits
        if rows.value:
            limits.setdefault(name.value.decode(), rows.value)
    return limits


def columns_of(values: Tensor) -> int:
    """The number of columns `in` of a matrix, from its values."""
    return values.shape[1] * (2 if values.dtype is torch.uint8 else 1)


def should_multiply(x: Tensor, values: Tensor, bias: Tensor | None = None) -> bool:
    """Return True if C computes the product: contiguous CPU tensors outside autocast, for which C has a kernel."""
    if not (usable(x, bias) and values.is_cpu and values.is_contiguous()) or torch.is_autocast_enabled("cpu"):
        return False
    columns = columns_of(values)
    return x.shape[-1] == columns > 0 and has_kernel(values.dtype, x.dtype, x.numel() // columns, columns)


def linear(
    x: Tensor, values: Tensor, scales: Tensor | None = None, bias: Tensor | None = None, kernel: str | None = None
) -> Tensor:
    """The product x W^T + bias: (..., out). Raises ValueError if C has no kernel for it.

    Args:
        x: (..., in), typed.
        values: W, or the values of a quantized W.
        scales: The scales of a quantized W, or None.
        bias: (out,) in the dtype of x, or None.
        kernel: A name of `kernels_for`, to use this kernel and not the one of the table.
    """
    out, columns = len(values), columns_of(values)
    check_shapes(
        x=(x, (*x.shape[:-1], columns)), bias=(bias, (out,)), scales=(scales, (out, columns // BLOCK)),
    )  # fmt: skip
    x, values, scales, bias = contiguous(x, values, scales, bias)
    y = x.new_empty(*x.shape[:-1], out)
    failed = functions().linear(
        values.data_ptr(), address(scales), address(bias), x.data_ptr(), y.data_ptr(), x.numel() // max(1, columns), out,
        columns, TYPES[values.dtype], TYPES[x.dtype], torch.get_num_threads(), kernel and kernel.encode(),
    )  # fmt: skip
    if failed == NO_KERNEL:
        raise ValueError(
            f"C has no kernel{f' {kernel}' if kernel else ''} for {x.numel() // max(1, columns)} rows of {x.dtype} and a "
            f"matrix of {values.dtype} {tuple(values.shape)} with {instructions()}"
        )
    raise_if_failed(failed)
    return y


def quantized(matrix: Tensor, stored: torch.dtype) -> tuple[Tensor, Tensor]:
    """(values, scales) of a typed matrix (out, in), in 8 bits (int8) or 4 bits (uint8); `in` is a multiple of BLOCK."""
    out, columns = matrix.shape
    matrix = matrix if matrix.stride(1) == 1 else matrix.contiguous()
    values = torch.empty(out, columns // (1 if stored is torch.int8 else 2), dtype=stored)
    scales = torch.empty(out, columns // BLOCK)
    functions().quantize(
        matrix.data_ptr(), values.data_ptr(), scales.data_ptr(), out, columns, matrix.stride(0), TYPES[matrix.dtype],
        TYPES[stored], torch.get_num_threads(),
    )  # fmt: skip
    return values, scales


def widened(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """A quantized matrix in floating point: (out, in) in float32 or bfloat16."""
    out, columns = len(values), columns_of(values)
    values, scales = contiguous(values, scales)
    matrix = scales.new_empty(out, columns, dtype=dtype)
    functions().widen(
        values.data_ptr(), scales.data_ptr(), matrix.data_ptr(), out, columns, TYPES[values.dtype], TYPES[dtype],
        torch.get_num_threads(),
    )  # fmt: skip
    return matrix
