"""Matrices, and the product with them: `linear`; and matrices kept as 8-bit integers.

A decoding step reads every weight once, so it is as fast as the memory: a C kernel comes close to that for a few tokens,
and smaller weights need less. In int8, blocks of 64 numbers of a row share a float32 scale, max(abs(w)) / 127; only
weights are rounded, activations and sums are as in the model's dtype, and nothing can be trained or saved.
"""

import ctypes
import math
import sys

import torch
import torch.nn.functional as F
from torch import nn

from megatron_ssm.native import kernels

PAGE, LARGE, MADV_HUGEPAGE = 4096, 4 * 2**20, 14  # Linux's
ROWS_OF_X = 12  # at once, which stay in the first-level cache
NUMBERS = 2**20  # of a matrix brought to another type at once, which stay in the last-level cache
TOKENS = 1024  # whose activations are brought to another type at once: for memory's sake
FEW = 8  # rows of x, for which a matrix is not worth bringing to another type


def linear(x, weight, bias=None) -> torch.Tensor:
    """x (..., in) W^T + bias -> (..., out); weight: a tensor (out, in), or an Int8Weight.

    Without gradients, for a few tokens a C kernel that reads W once; else torch's product, where this processor is
    faster so of float32 (`kernels.widens`).
    """
    if isinstance(weight, Int8Weight):
        return weight.linear(x, bias)
    if torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    if kernels.takes(x, weight, bias):
        return kernels.linear(x, weight, None, bias)
    widened = x.dtype is weight.dtype and _multiplied_as(x) is not x.dtype
    if widened and x.numel() > FEW * x.shape[-1]:
        return _by_pieces(x, weight, bias)
    return F.linear(x, weight, bias)


def _multiplied_as(x):
    """The type in which torch is to multiply x."""
    left_to_torch = not x.is_cpu or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu")
    return torch.float32 if not left_to_torch and kernels.widens(x.dtype) else x.dtype


def _by_pieces(x, weight, bias):
    """`linear` by torch, with the matrix brought to the type it is multiplied in some rows at a time, and so x."""
    out, columns = weight.shape
    dtype, tokens, y = _multiplied_as(x), x.reshape(-1, columns), None
    pieces, at_once = (math.ceil(out * columns / NUMBERS), TOKENS) if x.is_cpu else (1, len(tokens))
    rows = max(1, math.ceil(out / max(1, pieces)))
    for some in range(0, max(1, len(tokens)), max(1, at_once)):
        given = tokens[some : some + at_once].to(dtype)
        for start in range(0, max(1, out), rows):
            piece = slice(start, start + rows)
            part = weight.rows(piece, dtype) if isinstance(weight, Int8Weight) else weight[piece].to(dtype)
            product = F.linear(given, part, None if bias is None else bias[piece].to(dtype))
            if y is None:  # under autocast, products are of its type
                y = product.new_empty(len(tokens), out, dtype=product.dtype if dtype is x.dtype else x.dtype)
            y[some : some + len(given), piece] = product
    return y.view(*x.shape[:-1], out)


def rows_at(weight, index) -> torch.Tensor:
    """Rows of a matrix, (...) int64 -> (..., in): an embedding."""
    return weight.rows(index) if isinstance(weight, Int8Weight) else F.embedding(index, weight)


class Int8Weight(nn.Module):
    """A matrix W (out, in): `values` int8 (out, in), `scales` float32 (out, in / 64). dtype: of activations."""

    values: torch.Tensor
    scales: torch.Tensor

    def __init__(self, values, scales, dtype):
        super().__init__()
        self.register_buffer("values", values)
        self.register_buffer("scales", scales)
        self.dtype = dtype

    @classmethod
    @torch.no_grad()
    def of(cls, weight) -> "Int8Weight":
        """A floating-point matrix, rounded. A block of zeros has scale 0."""
        blocks = weight.float().view(len(weight), -1, kernels.BLOCK)
        scales = blocks.abs().amax(-1) / 127
        divisors = scales.where(scales > 0, 1).unsqueeze(-1)
        values = torch.empty_like(weight, dtype=torch.int8)
        prefer_huge_pages([values])
        values.view_as(blocks).copy_((blocks / divisors).round_().clamp_(-127, 127))
        return cls(values, scales, weight.dtype)

    @property
    def shape(self) -> torch.Size:
        """(out, in)"""
        return self.values.shape

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.values.device

    def _apply(self, fn, recurse=True):
        """`.to()`, `.bfloat16()`, ...: the scales stay float32, and activations have the new type."""
        scales = self.scales
        super()._apply(fn, recurse)
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        self.scales = scales.to(self.values.device)
        return self

    def forward(self) -> "Int8Weight":
        """Itself: what `Packed` gives for a matrix of several fields."""
        return self

    def rows(self, index, dtype=None) -> torch.Tensor:
        """Some rows in dtype (the model's): index (...) -> (..., in)."""
        blocks = self.values[index].unflatten(-1, (-1, kernels.BLOCK)) * self.scales[index].unsqueeze(-1)
        return blocks.flatten(-2).to(dtype or self.dtype)

    def linear(self, x, bias=None) -> torch.Tensor:
        """x (..., in) W^T + bias -> (..., out): by a C kernel for few rows of x, else by torch."""
        if not torch.is_grad_enabled() and kernels.exact(self.scales) and kernels.takes(x, self.values, bias):
            rows = x.reshape(-1, x.shape[-1]).split(ROWS_OF_X)
            parts = [kernels.linear(piece, self.values, self.scales, bias) for piece in rows]
            return torch.cat(parts).view(*x.shape[:-1], len(self.values))
        return _by_pieces(x, self, bias)


def prefer_huge_pages(tensors) -> None:
    """Ask Linux for pages of 2 MB under tensors that nothing has been written to yet; elsewhere, nothing.

    Each page needs a look into a table, and of small ones there are so many that reading takes a twentieth longer.
    """
    if sys.platform != "linux":
        return
    advise = ctypes.CDLL(None).madvise
    for tensor in tensors:
        start = -(-tensor.data_ptr() // PAGE) * PAGE
        if tensor.is_cpu and tensor.nbytes >= LARGE:
            advise(ctypes.c_void_p(start), ctypes.c_size_t(tensor.data_ptr() + tensor.nbytes - start), MADV_HUGEPAGE)


def quantize(module: nn.Module) -> bool:
    """Replace the module's own `weight`, a matrix or `Packed` fields of one, by an Int8Weight.

    False if its rows are no whole blocks; of a matrix without rows there is nothing to do.
    """
    weight = module.weight() if isinstance(module.weight, nn.Module) else module.weight
    if weight.shape[1] % kernels.BLOCK:
        return False
    if len(weight):
        del module.weight
        module.weight = Int8Weight.of(weight)
    return True
