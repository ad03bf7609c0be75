"""Products with matrices (`linear`), by the C kernels or by torch.

A decoding step reads every weight once, so the memory's bandwidth and the size of the weights determine its time. For a few
tokens the C kernels come close to that bandwidth. For many tokens the multiplications determine the time, and the dtype
matters: one processor multiplies bfloat16 ten times as fast as float32, another takes several times as long.

The table in native/dispatch.c chooses the kernel by the format of the weights, the instruction set and the number of tokens.
If C has no kernel, torch computes the product in x's dtype, or in float32 if that has 16 bits and the processor has no
instructions for such products. A matrix in another dtype is then converted a few rows at a time.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from . import products
from .arguments import are_float32
from .quantized_matrices import QuantizedMatrix

NUMBERS = 2**20  # elements of a matrix that are converted to another dtype at a time: they stay in the last-level cache
TOKENS = 1024  # tokens whose activations are converted at a time, to limit memory
FEW = 8  # the most rows of x for which converting the matrix takes longer than it saves

HALVES = (torch.bfloat16, torch.float16)


def linear(x: Tensor, weight: Tensor | QuantizedMatrix, bias: Tensor | None = None) -> Tensor:
    """The product x W^T + bias: (..., out). With gradients, torch computes it in x's dtype.

    Args:
        x: (..., in).
        weight: W, (out, in): a tensor of x's dtype or a `narrowed` one, or a `QuantizedMatrix`.
        bias: (out,), or None.
    """
    values, scales = (weight, None) if isinstance(weight, Tensor) else (weight.values, weight.scales)
    in_fewer_bits = isinstance(weight, QuantizedMatrix) or _is_narrowed(x, weight)
    if torch.is_grad_enabled():
        return _linear_in_pieces(x, weight, bias, x.dtype) if in_fewer_bits else F.linear(x, values, bias)
    if (in_fewer_bits or x.dtype is values.dtype) and are_float32(scales) and products.should_multiply(x, values, bias):
        return products.linear(x, values, scales, bias)
    dtype = _dtype_for(x, values.dtype)
    if in_fewer_bits or dtype is not x.dtype:
        return _linear_in_pieces(x, weight, bias, dtype)
    return F.linear(x, values, bias)


def _is_narrowed(x: Tensor, weight: Tensor) -> bool:
    """Return True for a float32 x and a bfloat16 matrix of a quantized model, outside autocast (which converts both)."""
    is_narrower = weight.dtype is torch.bfloat16 and x.dtype is torch.float32 and not weight.requires_grad
    return is_narrower and not torch.is_autocast_enabled(x.device.type)


def _dtype_for(x: Tensor, stored: torch.dtype) -> torch.dtype:
    """The dtype in which torch multiplies x by a matrix that is stored in the dtype `stored`."""
    is_few = stored is x.dtype and x.numel() <= FEW * x.shape[-1]
    if x.dtype not in HALVES or not x.is_cpu or is_few or torch.compiler.is_compiling():
        return x.dtype
    return x.dtype if torch.is_autocast_enabled("cpu") or products.has_products_of(x.dtype) else torch.float32


def _linear_in_pieces(x: Tensor, weight: Tensor | QuantizedMatrix, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`linear` by torch in `dtype`. Tokens of x and rows of the matrix are converted to it piece by piece."""
    out, columns = weight.shape
    tokens = x.reshape(-1, columns)  # (tokens, in)
    pieces, at_once = (math.ceil(out * columns / NUMBERS), TOKENS) if x.is_cpu else (1, len(tokens))
    rows = max(1, math.ceil(out / max(1, pieces)))
    is_narrower = torch.promote_types(dtype, x.dtype) is not dtype
    y: Tensor | None = None
    for first in range(0, max(1, len(tokens)), max(1, at_once)):
        inputs = tokens[first : first + at_once].to(dtype)
        for start in range(0, max(1, out), rows):
            piece = slice(start, start + rows)
            part = weight.rows(piece, dtype) if isinstance(weight, QuantizedMatrix) else weight[piece].to(dtype)
            product = F.linear(inputs, part, None if bias is None or is_narrower else bias[piece].to(dtype))
            if y is None:  # under autocast, the product has autocast's dtype
                y = product.new_empty(len(tokens), out, dtype=product.dtype if dtype is x.dtype else x.dtype)
            y[first : first + len(inputs), piece] = product
    assert y is not None  # both loops run at least once
    if bias is not None and is_narrower:
        y += bias
    return y.view(*x.shape[:-1], out)


def rows_at(weight: Tensor | QuantizedMatrix, index: Tensor) -> Tensor:
    """The rows of a matrix (out, in) at the indices `index` (...) int64: (..., in), an embedding."""
    return weight.rows(index) if isinstance(weight, QuantizedMatrix) else F.embedding(index, weight)
