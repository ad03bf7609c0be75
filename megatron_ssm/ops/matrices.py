"""Products with matrices (`linear`), and matrices that are stored as 8-bit integers (`Int8Weight`).

A decoding step reads every weight once, so its time is determined by the memory's bandwidth and by the size of the weights.
For a few tokens the C kernel comes close to that bandwidth. In int8, blocks of 64 elements of a row share a float32 scale,
max(abs(w)) / 127. Only weights are rounded: activations and sums are as in a model without int8. Such a model can be neither
trained nor saved.
"""

import ctypes
import math
import sys
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ssm.native import kernels
from megatron_ssm.native.arguments import are_float32

PAGE, MADV_HUGEPAGE = 4096, 14  # Linux: bytes of a page; the advice to use huge pages
LARGE = 4 * 2**20  # bytes of a tensor from which huge pages are worth asking for
ROWS_OF_X = 12  # rows of x per call of the int8 kernel: they stay in the first-level cache
NUMBERS = 2**20  # elements of a matrix that are converted to another dtype at a time: they stay in the last-level cache
TOKENS = 1024  # tokens whose activations are converted at a time, to limit memory
FEW = 8  # rows of x up to which converting the matrix takes longer than it saves


def linear(x: Tensor, weight: "Tensor | Int8Weight", bias: Tensor | None = None) -> Tensor:
    """x (..., in) W^T + bias -> (..., out); weight: a tensor (out, in), or an Int8Weight.

    Without gradients, few rows of x are multiplied by a C kernel, which reads W once. Everything else is torch's product: in
    float32 where this processor has no instructions for x's dtype (`kernels.is_faster_in_float32`), otherwise in that dtype.
    """
    if isinstance(weight, Int8Weight):
        return weight.linear(x, bias)
    if torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    if kernels.should_multiply(x, weight, bias):
        return kernels.linear(x, weight, None, bias)
    widened = x.dtype is weight.dtype and _product_dtype(x) is not x.dtype
    if widened and x.numel() > FEW * x.shape[-1]:
        return _linear_in_pieces(x, weight, bias)
    return F.linear(x, weight, bias)


def _product_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which torch multiplies x fastest."""
    left_to_torch = not x.is_cpu or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu")
    return torch.float32 if not left_to_torch and kernels.is_faster_in_float32(x.dtype) else x.dtype


def _linear_in_pieces(x: Tensor, weight: "Tensor | Int8Weight", bias: Tensor | None) -> Tensor:
    """`linear` by torch; some tokens of x and some rows of the matrix at a time are converted to the product's dtype."""
    out, columns = weight.shape
    dtype, tokens = _product_dtype(x), x.reshape(-1, columns)
    pieces, at_once = (math.ceil(out * columns / NUMBERS), TOKENS) if x.is_cpu else (1, len(tokens))
    rows = max(1, math.ceil(out / max(1, pieces)))
    y: Tensor | None = None
    for first in range(0, max(1, len(tokens)), max(1, at_once)):
        some = tokens[first : first + at_once].to(dtype)
        for start in range(0, max(1, out), rows):
            piece = slice(start, start + rows)
            part = weight.rows(piece, dtype) if isinstance(weight, Int8Weight) else weight[piece].to(dtype)
            product = F.linear(some, part, None if bias is None else bias[piece].to(dtype))
            if y is None:  # under autocast, the product has autocast's dtype
                y = product.new_empty(len(tokens), out, dtype=product.dtype if dtype is x.dtype else x.dtype)
            y[first : first + len(some), piece] = product
    assert y is not None  # both loops run at least once
    return y.view(*x.shape[:-1], out)


def rows_at(weight: "Tensor | Int8Weight", index: Tensor) -> Tensor:
    """The rows of a matrix (out, in) at an index (...) of int64 -> (..., in): an embedding."""
    return weight.rows(index) if isinstance(weight, Int8Weight) else F.embedding(index, weight)


class Int8Weight(nn.Module):
    """A matrix W (out, in) in 8 bits: `values` int8 (out, in), `scales` float32 (out, in / 64).

    dtype: the activations' dtype, in which `rows` returns rows.
    """

    values: Tensor
    scales: Tensor

    def __init__(self, values: Tensor, scales: Tensor, dtype: torch.dtype):
        super().__init__()
        self.register_buffer("values", values)
        self.register_buffer("scales", scales)
        self.dtype = dtype

    @classmethod
    @torch.no_grad()
    def of(cls, weight: Tensor) -> "Int8Weight":
        """A floating-point matrix (out, in), rounded; `in` is a multiple of 64. A block of zeros has the scale 0."""
        blocks = weight.float().view(len(weight), -1, kernels.BLOCK)
        scales = blocks.abs().amax(-1) / 127
        divisors = scales.where(scales > 0, 1).unsqueeze(-1)
        values = torch.empty_like(weight, dtype=torch.int8)
        prefer_huge_pages([values])
        values.view_as(blocks).copy_((blocks / divisors).round_().clamp_(-127, 127))
        return cls(values, scales, weight.dtype)

    @property
    def shape(self) -> torch.Size:
        """(out, in)."""
        return self.values.shape

    @property
    def device(self) -> torch.device:
        """The device of values and scales."""
        return self.values.device

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Int8Weight":
        """For `.to()`, `.bfloat16()` and the like: changes the activations' dtype, while the scales stay float32."""
        scales = self.scales
        super()._apply(fn, recurse)
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        self.scales = scales.to(self.values.device)
        return self

    def forward(self) -> "Int8Weight":
        """Returns itself, as `Packed` returns its matrix; so it can replace a `Packed`."""
        return self

    def rows(self, index: Tensor | slice, dtype: torch.dtype | None = None) -> Tensor:
        """Some rows in a floating-point dtype (None: the activations'): index (...) -> (..., in)."""
        blocks = self.values[index].unflatten(-1, (-1, kernels.BLOCK)) * self.scales[index].unsqueeze(-1)
        return blocks.flatten(-2).to(dtype or self.dtype)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x (..., in) W^T + bias -> (..., out): by a C kernel for few rows of x, otherwise by torch."""
        if not torch.is_grad_enabled() and are_float32(self.scales) and kernels.should_multiply(x, self.values, bias):
            rows = x.reshape(-1, x.shape[-1]).split(ROWS_OF_X)
            parts = [kernels.linear(piece, self.values, self.scales, bias) for piece in rows]
            return torch.cat(parts).view(*x.shape[:-1], len(self.values))
        return _linear_in_pieces(x, self, bias)


def prefer_huge_pages(tensors: Iterable[Tensor]) -> None:
    """Ask Linux for pages of 2 MB for large tensors that nothing was written to yet; other systems are not asked.

    With the usual small pages, looking up their addresses makes reading the weights about a twentieth slower.
    """
    if sys.platform != "linux":
        return
    advise = ctypes.CDLL(None).madvise
    for tensor in tensors:
        start = -(-tensor.data_ptr() // PAGE) * PAGE
        if tensor.is_cpu and tensor.nbytes >= LARGE:
            advise(ctypes.c_void_p(start), ctypes.c_size_t(tensor.data_ptr() + tensor.nbytes - start), MADV_HUGEPAGE)


def quantize(module: nn.Module) -> bool:
    """Replace the module's own `weight`, a matrix or a `Packed`, by an Int8Weight.

    False, and nothing is done, if the length of its rows is not a multiple of 64. A matrix without rows stays as it is.
    """
    weight: Tensor = module.weight() if isinstance(module.weight, nn.Module) else module.weight
    if weight.shape[1] % kernels.BLOCK:
        return False
    if len(weight):
        del module.weight
        module.weight = Int8Weight.of(weight)
    return True
