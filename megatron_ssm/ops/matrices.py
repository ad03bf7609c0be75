"""Products with matrices (`linear`): in the form that a measurement found fastest.

A decoding step reads every weight once, so its time is determined by the memory's bandwidth and by the size of the weights.
For a few tokens the C kernels come close to that bandwidth.

For many tokens the time is that of the multiplications, and their form matters: one processor multiplies bfloat16 ten times
as fast as float32, another takes several times as long. So some products are timed in each form, once in a process, and the
fastest is used. Of forms within 5 % of it, those of native/step.c come first, because whole layers then run in one call of
C; then x's own dtype. The forms of a product are:

- x's own dtype, and another dtype, in torch's library, of 16 bits only if the processor has instructions for such products.
  The matrix is converted some rows at a time, and not kept;
- INTEGERS: x is rounded to 8 bits, for a rounded matrix;
- TILES: by AMX, with x in bfloat16, for a bfloat16 or a rounded matrix;
- EXACT_TILES: by AMX, for a float32 matrix. Each number is the sum of three bfloat16 numbers, so the result is as exact as
  torch's in float32;
- PANELS: by AVX2 or AVX-512, for a float32 or a bfloat16 matrix, on processors without AMX: in float32, or in bfloat16 where
  x is too and the processor has AVX512_BF16;
- INTEGER_PANELS: the same with x and a rounded or a bfloat16 matrix as integers of 16 bits.
"""

import math
import time
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ssm.native import products
from megatron_ssm.native.arguments import are_float32
from megatron_ssm.native.kernels import usable

from .rounded_matrices import Int4Weight, Int8Weight, RoundedMatrix

NUMBERS = 2**20  # elements of a matrix that are converted to another dtype at a time: they stay in the last-level cache
TOKENS = 1024  # tokens whose activations are converted at a time, to limit memory
FEW = 8  # rows of x up to which converting the matrix takes longer than it saves

HALVES = (torch.bfloat16, torch.float16)
MEASURED = (torch.float32, *HALVES)  # dtypes of tensors whose products have several forms
KINDS: dict[torch.dtype, type[RoundedMatrix]] = {torch.int8: Int8Weight, torch.uint8: Int4Weight}
# Forms; the others are names of dtypes.
INTEGERS, TILES, EXACT_TILES = "int8 by VNNI", "bfloat16 by AMX", "float32 by AMX"
PANELS, INTEGER_PANELS = "floating point by AVX", "int16 by AVX"
IN_STEP = (TILES, EXACT_TILES, PANELS, INTEGER_PANELS, INTEGERS)  # those of native/step.c
SHAPE, ROW_COUNTS = (1024, 768), (16, 128)  # of the measured products: W, and few and many rows of x
MANY = 48  # rows of x from which the measurement with many applies
REPETITIONS, MARGIN = 5, 0.95  # a form counts as fastest if this share of its time is at most the least time
TOO_SLOW = 4  # a form that takes so many times the least time is not timed again


def linear(x: Tensor, weight: Tensor | RoundedMatrix, bias: Tensor | None = None) -> Tensor:
    """x (..., in) W^T + bias -> (..., out); weight: a tensor (out, in), or a RoundedMatrix.

    Without gradients, few rows of x are multiplied by a C kernel, which reads W once, and many in the fastest form
    (`product_form`). With gradients it is torch's product in x's dtype. A tensor has x's dtype, or it is `narrowed`.
    """
    if isinstance(weight, RoundedMatrix) or _is_narrowed(x, weight):
        return _linear_by_fewer_bits(x, weight, bias)
    if torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    if products.should_multiply(x, weight, bias):
        return products.linear(x, weight, None, bias)
    if x.dtype in MEASURED and x.dtype is weight.dtype and x.numel() > FEW * x.shape[-1]:
        return _linear_in_form(_form_for(x, x.dtype), x, weight, bias)
    return F.linear(x, weight, bias)


def _is_narrowed(x: Tensor, weight: Tensor) -> bool:
    """Whether a float32 x meets a bfloat16 matrix of a quantized model, outside autocast, which would convert both."""
    is_narrower = weight.dtype is torch.bfloat16 and x.dtype is torch.float32 and not weight.requires_grad
    return is_narrower and not torch.is_autocast_enabled(x.device.type)


def _parts(weight: Tensor | RoundedMatrix) -> tuple[Tensor, Tensor | None]:
    """(values, scales); a tensor has no scales."""
    return (weight, None) if isinstance(weight, Tensor) else (weight.values, weight.scales)


def _linear_by_fewer_bits(x: Tensor, weight: Tensor | RoundedMatrix, bias: Tensor | None) -> Tensor:
    """`linear` with a matrix that is stored in fewer bits than x."""
    values, scales = _parts(weight)
    if torch.is_grad_enabled():
        return _linear_in_pieces(x, weight, bias, x.dtype)
    if are_float32(scales) and products.should_multiply(x, values, bias):
        return products.linear(x, values, scales, bias)
    return _linear_in_form(_form_for(x, values.dtype), x, weight, bias)


def _linear_in_form(form: str, x: Tensor, weight: Tensor | RoundedMatrix, bias: Tensor | None) -> Tensor:
    """`linear` in a form, or in x's dtype if the C kernels do not support these tensors."""
    values, scales = _parts(weight)
    by_tiles, by_panels = form in (TILES, EXACT_TILES), form in (PANELS, INTEGER_PANELS)
    if by_tiles and not products.has_tile_products() or by_panels and not products.has_panel_products():
        form = _name(x.dtype)
    if form in IN_STEP and not (usable(x, bias) and values.is_cpu):
        form = _name(x.dtype)
    if form in (TILES, EXACT_TILES):
        return products.tile_product(x, values, scales, bias)
    if form in (PANELS, INTEGER_PANELS):
        return products.panel_product(x, values, scales, bias, as_integers=form == INTEGER_PANELS)
    if form == INTEGERS and scales is not None:
        return products.integer_product(x, values, scales, bias)
    dtype = getattr(torch, form)
    return F.linear(x, values, bias) if values.dtype is dtype else _linear_in_pieces(x, weight, bias, dtype)


def _linear_in_pieces(x: Tensor, weight: Tensor | RoundedMatrix, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`linear` by torch in `dtype`; some tokens of x and some rows of the matrix at a time are converted to it."""
    out, columns = weight.shape
    tokens = x.reshape(-1, columns)
    pieces, at_once = (math.ceil(out * columns / NUMBERS), TOKENS) if x.is_cpu else (1, len(tokens))
    rows = max(1, math.ceil(out / max(1, pieces)))
    is_narrower = torch.promote_types(dtype, x.dtype) is not dtype
    y: Tensor | None = None
    for first in range(0, max(1, len(tokens)), max(1, at_once)):
        some = tokens[first : first + at_once].to(dtype)
        for start in range(0, max(1, out), rows):
            piece = slice(start, start + rows)
            part = weight.rows(piece, dtype) if isinstance(weight, RoundedMatrix) else weight[piece].to(dtype)
            product = F.linear(some, part, None if bias is None or is_narrower else bias[piece].to(dtype))
            if y is None:  # under autocast, the product has autocast's dtype
                y = product.new_empty(len(tokens), out, dtype=product.dtype if dtype is x.dtype else x.dtype)
            y[first : first + len(some), piece] = product
    assert y is not None  # both loops run at least once
    if bias is not None and is_narrower:
        y += bias
    return y.view(*x.shape[:-1], out)


def rows_at(weight: Tensor | RoundedMatrix, index: Tensor) -> Tensor:
    """The rows of a matrix (out, in) at an index (...) of int64 -> (..., in): an embedding."""
    return weight.rows(index) if isinstance(weight, RoundedMatrix) else F.embedding(index, weight)


# The form of a product


def _form_for(x: Tensor, stored: torch.dtype) -> str:
    """The form in which x is multiplied by a matrix that is stored in the dtype `stored`."""
    if not x.is_cpu or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return _name(x.dtype)
    return product_form(stored, x.dtype, x.numel() // max(1, x.shape[-1]))


def product_form(stored: torch.dtype, x: torch.dtype, rows: int) -> str:
    """The form of a product of `rows` rows of dtype x with a matrix that is stored in the dtype `stored`."""
    seconds = product_times(stored, x, ROW_COUNTS[rows >= MANY], torch.get_num_threads())
    least = min(seconds.values())
    in_step = [form for form in IN_STEP if form in seconds]
    return next(form for form in (*in_step, *seconds) if MARGIN * seconds[form] <= least)


@cache
def product_times(stored: torch.dtype, x: torch.dtype, rows: int, threads: int) -> dict[str, float]:
    """{form: seconds} of a product with a matrix of SHAPE, in each form that could be the fastest.

    It is measured by the first call in a process, and takes some milliseconds. With only one form nothing is measured.
    """
    forms = _forms_to_try(stored, x)
    if len(forms) == 1:
        return {forms[0]: 0.0}
    with torch.inference_mode():
        matrix = torch.linspace(-1, 1, math.prod(SHAPE), device="cpu").view(SHAPE)
        weight = KINDS[stored].of(matrix) if stored in KINDS else matrix.to(stored)
        given, seconds = torch.ones(rows, SHAPE[1], dtype=x, device="cpu"), dict.fromkeys(forms, math.inf)
        for _ in range(REPETITIONS):
            longest = TOO_SLOW * min(seconds.values())
            for form in [form for form in forms if seconds[form] <= longest]:
                start = time.perf_counter()
                _linear_in_form(form, given, weight, None)
                seconds[form] = min(seconds[form], time.perf_counter() - start)
    return seconds


def _forms_to_try(stored: torch.dtype, x: torch.dtype) -> list[str]:
    """The forms in which rows of dtype x could be multiplied by such a matrix.

    x's own dtype comes first, except that torch multiplies no 16-bit numbers where the processor has no instructions for it.
    """
    forms, is_rounded = [x], stored in KINDS
    if x in HALVES:
        forms.append(torch.float32)
    elif x is torch.float32 and is_rounded:
        forms.append(torch.bfloat16)
    forms = [form for form in forms if form not in HALVES or products.has_products_of(form)]
    has_kernels = x in (torch.float32, torch.bfloat16)
    integers = [INTEGERS] if has_kernels and is_rounded and products.has_integer_products() else []
    in_step = []
    if has_kernels and stored is not torch.float16:
        if products.has_tile_products():
            in_step = [EXACT_TILES if stored is torch.float32 else TILES]
        elif products.has_panel_products():
            in_step = [INTEGER_PANELS if is_rounded else PANELS]
            if stored is torch.bfloat16:
                in_step.append(INTEGER_PANELS)
    return [*map(_name, forms), *integers, *in_step]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
