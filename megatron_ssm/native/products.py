"""Products of few rows with a matrix by the C kernels, and the conditions under which they are faster than torch's.

A matrix (out, in) is a tensor of x's dtype, or of bfloat16 if that is float32; or it is rounded: `values`, int8 (out, in) or
two 4-bit numbers in each byte, uint8 (out, in / 2); and `scales`, float32 (out, in / BLOCK). `ops.rounded_matrices` makes
rounded ones. The general remarks of `kernels` hold here too.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import kernels
from .arguments import address, check_shapes, without_gaps
from .kernels import TYPES, functions, raise_if_failed, usable

BLOCK = 64  # elements of a rounded matrix that share a scale (rounded.c)
ROUNDED = (torch.int8, torch.uint8)  # dtypes of `values`
# Rows of x beyond which torch is faster, by the dtype of the matrix.
ROWS = {torch.float32: 16, torch.bfloat16: 4, torch.int8: 36, torch.uint8: 36}
ROWS_IF_WIDE = {torch.float32: 24, torch.bfloat16: 24}  # the same where few_rows.c multiplies them
ROWS_IF_WIDENED = 24  # the same for bfloat16, on processors without instructions for it, or with an x of float32
ROWS_IF_TILES = 47  # the same for bfloat16 and rounded matrices, on processors with AMX
FEWEST_IN_BFLOAT16 = 25  # rows of x from which `linear` by AMX rounds x and a rounded matrix to bfloat16 (rounded.c)


def has_products_of(dtype: torch.dtype) -> bool:
    """Whether this processor has instructions for products of bfloat16 or float16; True if that is not known."""
    return kernels.LIBRARY.functions is None or bool(functions().has_products_of(TYPES[dtype]))


def has_few_rows_of(dtype: torch.dtype) -> bool:
    """Whether matrices of float32 or bfloat16 are multiplied by the kernel for AVX-512 (few_rows.c)."""
    return kernels.LIBRARY.functions is not None and bool(functions().has_few_rows_of(TYPES[dtype]))


def is_multiplied_by(x: torch.dtype, values: torch.dtype) -> bool:
    """Whether `linear` multiplies rows of a dtype x by a matrix of a dtype `values`."""
    return values in (x, *ROUNDED) or values is torch.bfloat16 and x is torch.float32


def most_rows(dtype: torch.dtype, x: torch.dtype | None = None) -> int:
    """The rows of x up to which `linear` with a matrix of this dtype is faster than torch.

    x: their dtype. None: that of the matrix, or any if it is rounded.
    """
    if dtype is torch.bfloat16 and x is torch.float32:
        return ROWS_IF_WIDENED
    if dtype in (torch.bfloat16, *ROUNDED) and has_tile_products():
        return ROWS_IF_TILES
    if dtype in ROWS_IF_WIDE and has_few_rows_of(dtype):
        return ROWS_IF_WIDE[dtype]
    widened = dtype is torch.bfloat16 and not has_products_of(dtype)
    return ROWS_IF_WIDENED if widened else ROWS.get(dtype, 0)


def columns_of(values: Tensor) -> int:
    """The columns `in` of a matrix."""
    return values.shape[1] * (2 if values.dtype is torch.uint8 else 1)


def is_faster_than_torch(rows: int, values: Tensor, x: torch.dtype) -> bool:
    """Whether `linear` of so many rows of a dtype x and a matrix is faster than torch."""
    dtype = values.dtype
    return (
        rows <= most_rows(dtype, x)
        and values.is_contiguous()
        and (dtype is not torch.bfloat16 or values.shape[1] % 2 == 0)
        and not torch.is_autocast_enabled("cpu")
    )


def should_multiply(x: Tensor, values: Tensor, bias: Tensor | None = None) -> bool:
    """Whether `linear` supports this product and is faster than torch: few rows of x, outside autocast."""
    if not (usable(x, bias) and values.is_cpu and is_multiplied_by(x.dtype, values.dtype)):
        return False
    columns = columns_of(values)
    return x.shape[-1] == columns > 0 and is_faster_than_torch(x.numel() // columns, values, x.dtype)


def linear(x: Tensor, values: Tensor, scales: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """x (..., in) W^T + bias (out,) -> (..., out), for few rows of x; x and bias are typed.

    values: a matrix without gaps, of x's dtype or of bfloat16, which has an even `in`; or rounded, with an `in` that is a
    multiple of BLOCK, and with scales. ValueError for another one.
    """
    columns = columns_of(values)
    if not values.is_contiguous() or values.dtype is torch.bfloat16 and columns % 2:
        raise ValueError(f"the C kernel needs a matrix without gaps, and with an even number of columns if it is bfloat16; "
                         f"not {values.dtype} {tuple(values.shape)}")  # fmt: skip
    dtypes = [dtype for dtype in (x.dtype, torch.bfloat16, *ROUNDED) if is_multiplied_by(x.dtype, dtype)]
    return _multiply(functions().linear, dtypes, x, values, scales, bias, columns)


def has_integer_products() -> bool:
    """Whether this processor has AVX512_VNNI, without which there is no `integer_product`."""
    return kernels.LIBRARY.functions is not None and bool(functions().has_integer_products())


def has_tile_products() -> bool:
    """Whether this processor has AMX, without which there is no `tile_product`."""
    return kernels.LIBRARY.functions is not None and bool(functions().has_tile_products())


def integer_product(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear` for many rows of x and a rounded matrix: x is rounded to 8 bits, in blocks of BLOCK.

    ValueError for a matrix of another dtype; RuntimeError without AVX512_VNNI.
    """
    if not has_integer_products():
        raise RuntimeError("this processor has no AVX512_VNNI, or the C kernels are not loaded: use `linear`")
    return _multiply(functions().integer_product, ROUNDED, x, values, scales, bias, columns_of(values))


def tile_product(x: Tensor, values: Tensor, scales: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """`linear` for many rows of x by AMX. x is rounded to bfloat16, unless it and the matrix are float32.

    ValueError for a matrix of another dtype; RuntimeError without AMX.
    """
    if not has_tile_products():
        raise RuntimeError("this processor has no AMX, or the C kernels are not loaded: use `linear`")
    dtypes = (*ROUNDED, torch.bfloat16, *([torch.float32] if x.dtype is torch.float32 else []))
    return _multiply(functions().tile_product, dtypes, x, values, scales, bias, columns_of(values))


def has_panel_products() -> bool:
    """Whether this processor has AVX2, without which there is no `panel_product`."""
    return kernels.LIBRARY.functions is not None and bool(functions().has_panel_products())


def panel_product(
    x: Tensor, values: Tensor, scales: Tensor | None = None, bias: Tensor | None = None, as_integers: bool = False
) -> Tensor:
    """`linear` for many rows of x by AVX2 or AVX-512; for rounded matrices x is rounded to 16 bits, in blocks of BLOCK.

    Others are multiplied in float32, or in bfloat16 where both x and the matrix are and the processor has AVX512_BF16.

    as_integers: a bfloat16 matrix and x are rounded to integers of 12 and 13 bits and sign, also in blocks of BLOCK. It
    changes nothing for rounded matrices, and float32 ones are refused. ValueError for a matrix of another dtype;
    RuntimeError without AVX2.
    """
    if not has_panel_products():
        raise RuntimeError("this processor has no AVX2, or the C kernels are not loaded: use `linear`")
    kernel = functions().integer_panel_product if as_integers else functions().panel_product
    dtypes = (*ROUNDED, torch.bfloat16, *([] if as_integers else [torch.float32]))
    return _multiply(kernel, dtypes, x, values, scales, bias, columns_of(values))


def _check_matrix(values: Tensor, scales: Tensor | None, dtypes: Sequence[torch.dtype]) -> None:
    """ValueError unless values is a matrix on the CPU of one of these dtypes, with scales just if it is rounded."""
    out, columns, is_rounded = len(values), columns_of(values), values.dtype in ROUNDED
    multiple = BLOCK if is_rounded else 1
    if values.dtype not in dtypes or columns < 1 or columns % multiple or is_rounded != (scales is not None):
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"the C kernel needs a matrix of {names} whose rows have a multiple of {multiple} elements, "
                         f"with scales just if it is rounded; not {values.dtype} {tuple(values.shape)}")  # fmt: skip
    check_shapes(values=(values, values.shape), scales=(scales, (out, columns // BLOCK)))


def _multiply(
    kernel: Any, dtypes: Sequence[torch.dtype], x: Tensor, values: Tensor, scales: Tensor | None, bias: Tensor | None,
    *x_stride: int,
) -> Tensor:  # fmt: skip
    """Call a C function for a product -> (..., out).

    dtypes: those of the matrices that it takes. x_stride: elements between rows of x, if it takes this number.
    """
    out, columns = len(values), columns_of(values)
    _check_matrix(values, scales, dtypes)
    check_shapes(x=(x, (*x.shape[:-1], columns)), bias=(bias, (out,)))
    x, values, scales, bias = without_gaps(x, values, scales, bias)
    y = x.new_empty(*x.shape[:-1], out)
    raise_if_failed(kernel(
        values.data_ptr(), address(scales), address(bias), x.data_ptr(), y.data_ptr(), x.numel() // columns, out,
        columns, *x_stride, TYPES[values.dtype], TYPES[x.dtype], torch.get_num_threads(),
    ))  # fmt: skip
    return y


def widened(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """A rounded matrix times its scales -> (out, in) of float32 or bfloat16; ValueError for a matrix of another dtype."""
    out, columns = len(values), columns_of(values)
    _check_matrix(values, scales, ROUNDED)
    values, scales = without_gaps(values, scales)
    matrix = scales.new_empty(out, columns, dtype=dtype)
    functions().widen(
        values.data_ptr(), scales.data_ptr(), matrix.data_ptr(), out, columns, TYPES[values.dtype], TYPES[dtype],
        torch.get_num_threads(),
    )  # fmt: skip
    return matrix
