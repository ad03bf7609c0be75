"""Matrices that are stored in 8 or 4 bits. A model with such matrices can be neither trained nor saved.

Blocks of 64 elements of a row share a float32 scale, so an element takes 8.5 or 4.5 bits. `matrices.linear` computes their
products. It rounds few rows of x to 16 bits, and may round many rows to bfloat16 (see `matrices`).
"""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from . import products
from .arguments import are_float32
from .kernels import usable
from .products import BLOCK

NUMBERS = 2**20  # elements of a matrix that are quantized at a time, to limit memory
# In 4 bits, the scales to try are a block's extreme element divided by these numbers: a larger scale clips nothing, a
# smaller one has finer steps.
DIVISORS = (8.0, 7.5, 6.9, 6.3)


class QuantizedMatrix(nn.Module):
    """A matrix W (out, in) of integers and scales.

    Attributes:
        values: The integers, of `bits` bits each, in the dtype `stored`.
        scales: (out, in / 64) float32, the factors of the blocks.
        dtype: The activations' dtype, in which `rows` returns rows.
    """

    bits: ClassVar[int]
    stored: ClassVar[torch.dtype]
    values: Tensor
    scales: Tensor

    def __init__(self, values: Tensor, scales: Tensor, dtype: torch.dtype):
        super().__init__()
        self.register_buffer("values", values)
        self.register_buffer("scales", scales)
        self.dtype = dtype

    @classmethod
    def empty(cls, out: int, columns: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Uninitialized values and scales of a matrix (out, columns)."""
        values = torch.empty(out, columns * cls.bits // 8, dtype=cls.stored, device=device)
        return values, torch.empty(out, columns // BLOCK, device=device)

    @classmethod
    @torch.no_grad()
    def of(cls, weight: Tensor) -> "QuantizedMatrix":
        """Quantize a floating-point matrix (out, in) of which `in` is a multiple of 64.

        A block of zeros has the scale 0. A block with NaN or Inf has a scale that is not finite, and gives only NaN or Inf.
        """
        out, columns = weight.shape
        if usable(weight):
            return cls(*products.quantized(weight, cls.stored), weight.dtype)
        values, scales = cls.empty(out, columns, weight.device)
        step = max(1, NUMBERS // columns)
        for start in range(0, out, step):
            rows = slice(start, start + step)
            values[rows], scales[rows] = cls._quantize(weight[rows].float().unflatten(1, (-1, BLOCK)))
        return cls(values, scales, weight.dtype)

    @staticmethod
    def _quantize(blocks: Tensor) -> tuple[Tensor, Tensor]:
        """(values, scales) of blocks (rows, blocks, 64) in float32."""
        raise NotImplementedError

    @staticmethod
    def _integers(values: Tensor) -> Tensor:
        """Unpack stored values (..., bytes): integers (..., blocks, 64)."""
        raise NotImplementedError

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.values), products.columns_of(self.values)))

    @property
    def device(self) -> torch.device:
        return self.values.device

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantizedMatrix":
        """Change the activations' dtype, in `.to()`, `.bfloat16()` and the like. The scales stay float32."""
        scales = self.scales
        super()._apply(fn, recurse)
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        self.scales = scales.to(self.values.device)
        return self

    def forward(self) -> "QuantizedMatrix":
        """Return the matrix itself, so that it can replace a `Packed`, whose forward returns its matrix."""
        return self

    def rows(self, index: Tensor | slice, dtype: torch.dtype | None = None) -> Tensor:
        """The rows at `index` (...) in a floating-point dtype (None: the activations'): (..., in)."""
        values, scales, dtype = self.values[index], self.scales[index], dtype or self.dtype
        if are_float32(scales) and usable(torch.empty(0, dtype=dtype)):
            matrix = values.reshape(-1, values.shape[-1]), scales.reshape(-1, scales.shape[-1])
            return products.widened(*matrix, dtype).view(*values.shape[:-1], self.shape[1])
        return (self._integers(values) * scales.unsqueeze(-1)).flatten(-2).to(dtype)


class Int8Weight(QuantizedMatrix):
    """A matrix in 8 bits: `values` int8 (out, in). A block's scale is max(abs(w)) / 127."""

    bits, stored = 8, torch.int8

    @staticmethod
    def _quantize(blocks: Tensor) -> tuple[Tensor, Tensor]:
        scales = blocks.abs().amax(-1) / 127
        divisors = scales.where(scales > 0, 1).unsqueeze(-1)
        return (blocks / divisors).round_().clamp_(-127, 127).flatten(1).to(torch.int8), scales

    @staticmethod
    def _integers(values: Tensor) -> Tensor:
        return values.unflatten(-1, (-1, BLOCK))


class Int4Weight(QuantizedMatrix):
    """A matrix in 4 bits: `values` uint8 (out, in / 2), integers from -8 to 7 in the order of native/quantized.h.

    A block's scale is the one with the least sum of squared errors, of those that DIVISORS give.
    """

    bits, stored = 4, torch.uint8

    @staticmethod
    def _quantize(blocks: Tensor) -> tuple[Tensor, Tensor]:
        extreme = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
        least_error = torch.full_like(extreme, float("nan"))
        integers, scales = torch.zeros_like(blocks), torch.zeros_like(extreme)
        for divisor in DIVISORS:
            scale = extreme / -divisor
            rounded = (blocks / scale.where(scale != 0, 1)).round_().clamp_(-8, 7)
            error = (rounded * scale - blocks).square_().sum(-1, keepdim=True)
            is_better = ~(error >= least_error)  # True for the first divisor, also if its error is infinite or NaN
            least_error, scales = least_error.where(~is_better, error), scales.where(~is_better, scale)
            integers = integers.where(~is_better, rounded)
        quarters = (integers.to(torch.int8) & 15).view(torch.uint8).unflatten(-1, (4, 16))  # (rows, blocks, 4, 16)
        low = quarters[..., 0, :] | quarters[..., 1, :] << 4
        high = quarters[..., 2, :] | quarters[..., 3, :] << 4
        return torch.stack([low, high], dim=-1).flatten(1), scales.squeeze(-1)

    @staticmethod
    def _integers(values: Tensor) -> Tensor:
        words = values.unflatten(-1, (-1, 16, 2)).unsqueeze(-1)  # (..., blocks, 16, 2, 1)
        parts = torch.cat([words & 15, words >> 4], dim=-1)  # (..., blocks, 16, 2, 2): word, byte, half
        unsigned = parts.flatten(-2).transpose(-1, -2).flatten(-2).to(torch.int8)
        return unsigned - 16 * (unsigned > 7)


@torch.no_grad()
def in_4_bits(weight: Tensor | QuantizedMatrix) -> Int4Weight:
    """A copy of a matrix (out, in) in 4 bits; `in` is a multiple of 64."""
    out, columns = weight.shape
    values, scales = Int4Weight.empty(out, columns, weight.device)
    step = max(1, NUMBERS // columns)
    for start in range(0, out, step):
        rows = slice(start, start + step)
        part = Int4Weight.of(weight[rows] if isinstance(weight, Tensor) else weight.rows(rows))
        values[rows], scales[rows] = part.values, part.scales
    return Int4Weight(values, scales, weight.dtype)


QUANTIZED_FORMATS: dict[str, type[QuantizedMatrix]] = {"int8": Int8Weight, "int4": Int4Weight}  # by the names in `load`


def narrowed(matrix: Tensor) -> Tensor:
    """Convert a float32 matrix (out, in) on the CPU to bfloat16 if `in` is even; return any other as it is.

    Quantized models use this for small matrices whose outputs are too sensitive for 8 bits. In float32 they would be a fifth
    of the bytes that a 130m Mamba with 4-bit weights reads per token.
    """
    is_converted = matrix.is_cpu and matrix.dtype is torch.float32 and matrix.shape[1] % 2 == 0
    return matrix.bfloat16() if is_converted else matrix


def quantize(module: nn.Module, format: str) -> bool:
    """Replace the `weight` of a module, a matrix or a `Packed`, by a `QuantizedMatrix`. A matrix without rows stays.

    format: a key of QUANTIZED_FORMATS. Returns False, and the module is unchanged, if the length of the rows is not a
    multiple of 64.
    """
    weight: Tensor = (module.weight() if isinstance(module.weight, nn.Module) else module.weight).flatten(0, -2)
    if weight.shape[1] % BLOCK:
        return False
    if len(weight):
        del module.weight
        module.weight = QUANTIZED_FORMATS[format].of(weight)
    return True
