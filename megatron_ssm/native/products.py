"""Products with a matrix by the C kernels. Which kernel computes one, and whether C has one, says the table in dispatch.c.

A matrix (out, in) is a tensor of x's dtype, or of bfloat16 if that is float32; or it is quantized: `values`, int8 (out, in)
or two 4-bit numbers in each byte, uint8 (out, in / 2); and `scales`, float32 (out, in / BLOCK). `ops.quantized_matrices`
makes quantized ones. The general remarks of `kernels` hold here too.
"""

import ctypes
from itertools import count

import torch
from torch import Tensor

from . import kernels
from .arguments import address, check_shapes, without_gaps
from .kernels import TYPES, functions, raise_if_failed, usable

BLOCK = 64  # elements of a quantized matrix that share a scale (quantized.h)
QUANTIZED = (torch.int8, torch.uint8)  # dtypes of `values`
INSTRUCTIONS = ("plain loops", "AVX2", "AVX-512", "VNNI", "AVX512_BF16", "AMX")  # in the order of product.h
NO_KERNEL = 2  # returned by `linear` in C
NO_LIMIT = 2**63 - 1  # rows of x


def instructions() -> str:
    """The instruction set of the products: one of INSTRUCTIONS, each of which includes those before it."""
    return INSTRUCTIONS[0 if kernels.LIBRARY.functions is None else functions().instructions()]


def has_products_of(dtype: torch.dtype) -> bool:
    """Return True if this processor has instructions for products of bfloat16 or float16; True if that is not known."""
    return kernels.LIBRARY.functions is None or bool(functions().has_products_of(TYPES[dtype]))


def has_kernel(stored: torch.dtype, x: torch.dtype, rows: int, columns: int, has_gaps: bool = False) -> bool:
    """Return True if C multiplies `rows` rows of dtype x by a matrix that is stored in the dtype `stored`.

    columns: `in`. has_gaps: whether there are gaps between the rows of the matrix, or of the result.
    """
    if kernels.LIBRARY.functions is None or stored not in TYPES or x not in TYPES:
        return False
    return bool(functions().has_kernel(TYPES[stored], TYPES[x], rows, columns, has_gaps))


def kernels_for(stored: torch.dtype, x: torch.dtype) -> dict[str, int]:
    """{name of a kernel: up to how many rows of x} of the table's lines for these dtypes, on this processor.

    The first one whose number is large enough is used, if it supports the length of the matrix's rows.
    """
    found: dict[str, int] = {}
    if kernels.LIBRARY.functions is None or stored not in TYPES or x not in TYPES:
        return found
    rows, name = ctypes.c_ssize_t(), ctypes.create_string_buffer(32)
    for index in count():
        if not functions().kernel_line(index, TYPES[stored], TYPES[x], ctypes.byref(rows), name):
            return found
        if rows.value:
            found.setdefault(name.value.decode(), rows.value)
    return found


def columns_of(values: Tensor) -> int:
    """The columns `in` of a matrix."""
    return values.shape[1] * (2 if values.dtype is torch.uint8 else 1)


def should_multiply(x: Tensor, values: Tensor, bias: Tensor | None = None) -> bool:
    """Return True if C multiplies these tensors: on the CPU, without gaps, outside autocast, in a form that C has."""
    if not (usable(x, bias) and values.is_cpu and values.is_contiguous()) or torch.is_autocast_enabled("cpu"):
        return False
    columns = columns_of(values)
    return x.shape[-1] == columns > 0 and has_kernel(values.dtype, x.dtype, x.numel() // columns, columns)


def linear(
    x: Tensor, values: Tensor, scales: Tensor | None = None, bias: Tensor | None = None, kernel: str | None = None
) -> Tensor:
    """x (..., in) W^T + bias (out,) -> (..., out); x and bias are typed.

    values: a matrix of x's dtype or of bfloat16; or quantized, with scales. kernel: the name of one of `kernels_for`,
    instead of the one that the table has for so many rows. ValueError if C has no kernel for these.
    """
    out, columns = len(values), columns_of(values)
    _check_matrix(values, scales)
    check_shapes(x=(x, (*x.shape[:-1], columns)), bias=(bias, (out,)))
    x, values, scales, bias = without_gaps(x, values, scales, bias)
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


def _check_matrix(values: Tensor, scales: Tensor | None) -> None:
    """ValueError unless values is a matrix on the CPU of a known dtype, with the scales that it needs if it is quantized."""
    out, columns, is_quantized = len(values), columns_of(values), values.dtype in QUANTIZED
    if values.dtype not in TYPES or is_quantized != (scales is not None) or is_quantized and columns % BLOCK:
        raise ValueError(f"the C kernels need a matrix of float32 or bfloat16, or a quantized one with scales, whose rows "
                         f"have a multiple of {BLOCK} elements; not {values.dtype} {tuple(values.shape)}")  # fmt: skip
    check_shapes(values=(values, values.shape), scales=(scales, (out, columns // BLOCK)))


def quantized(matrix: Tensor, stored: torch.dtype) -> tuple[Tensor, Tensor]:
    """(values, scales) of a typed matrix (out, in), in 8 bits (int8) or 4 (uint8); ValueError for incomplete blocks."""
    out, columns = matrix.shape
    if columns % BLOCK:
        raise ValueError(f"rows of {columns} elements are not a multiple of {BLOCK}")
    matrix = matrix if matrix.stride(1) == 1 else matrix.contiguous()
    values = torch.empty(out, columns // (1 if stored is torch.int8 else 2), dtype=stored)
    scales = torch.empty(out, columns // BLOCK)
    functions().quantize(
        matrix.data_ptr(), values.data_ptr(), scales.data_ptr(), out, columns, matrix.stride(0), TYPES[matrix.dtype],
        TYPES[stored], torch.get_num_threads(),
    )  # fmt: skip
    return values, scales


def widened(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """A quantized matrix times its scales -> (out, in) of float32 or bfloat16; ValueError for a matrix of another dtype."""
    out, columns = len(values), columns_of(values)
    _check_matrix(values, scales)
    values, scales = without_gaps(values, scales)
    matrix = scales.new_empty(out, columns, dtype=dtype)
    functions().widen(
        values.data_ptr(), scales.data_ptr(), matrix.data_ptr(), out, columns, TYPES[values.dtype], TYPES[dtype],
        torch.get_num_threads(),
    )  # fmt: skip
    return matrix
