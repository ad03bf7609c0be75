"""Wire formats: the encodings of values that ranks send to one another.

| format | bytes per element | relative error of a heavy-tailed sum |
|---|---|---|
| fp32 | 4 (float64: 8) | rounding only |
| fp16 | 2; sends x / ranks: finite while abs(x) and abs(sum) <= 65504 * ranks, else inf | 3e-4 |
| bf16 | 2; has float32's range | 3e-3 |
| int8 | 1 + 4/128; each block of 128 has a float32 scale, max(abs(x)) / 127 | 2e-2 |

A format encodes rows of values as rows of bytes, and decodes them. NaN and Inf are decoded as NaN or Inf; in int8 they
affect their whole block. Source: Tensor Parallelism for State-Space Models (Dutt et al.), section IV-D, which sends the
remaining all-reduces in fp16.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

BLOCK = 128  # values that share a scale in int8
LARGEST_SCALE = torch.finfo(torch.float32).max / 127 * (1 - 2**-24)


@dataclass(frozen=True)
class Cast:
    """Values in another dtype. If scaled, they are divided by the number of ranks, so that their sum is within its range."""

    name: str
    dtype: torch.dtype
    scaled: bool = False
    block: ClassVar[int] = 1

    def nbytes(self, numel: int) -> int:
        return numel * self.dtype.itemsize

    def encode(self, x: torch.Tensor, ranks: int) -> torch.Tensor:
        """x (rows, n), float32 or float64 -> uint8 (rows, nbytes(n))."""
        return (x / ranks if self.scaled else x).to(self.dtype).view(torch.uint8)

    def decode(self, message: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """uint8 (rows, nbytes(n)) -> dtype (rows, n), still divided by the number of ranks if scaled."""
        return view_bytes(message, self.dtype).to(dtype)

    def encode_sum(self, total: torch.Tensor, ranks: int) -> torch.Tensor:
        """A sum (rows, n) of decoded values -> uint8 (rows, nbytes(n)).

        A sum that exceeds the range by no more than the rounding errors of its summands becomes the largest value.
        """
        limit = torch.finfo(self.dtype).max
        if self.scaled and (total.is_cuda or not all(abs(end) <= limit for end in _extremes(total))):
            slack = limit * (1 + ranks * torch.finfo(self.dtype).eps)
            total = total.where(total.abs() > slack, total.clamp(-limit, limit))
        return total.to(self.dtype).view(torch.uint8)

    def undo_scaling(self, total: torch.Tensor, ranks: int) -> torch.Tensor:
        """The sum of the original values, from the sum of decoded values, which may be overwritten."""
        return total.mul_(ranks) if self.scaled else total

    def round_to_wire(self, total: torch.Tensor, ranks: int) -> torch.Tensor:
        """A sum of decoded values, rounded as if it had been sent: then all algorithms give the same sum."""
        return self.decode(self.encode_sum(total, ranks), total.dtype)


@dataclass(frozen=True)
class Int8:
    """Values as 8-bit integers, rounded half to even, with a float32 scale for each block of 128.

    Blocks with values below about 1e-36 lose precision, because no scale is below float32's smallest normal number.
    """

    name: str = "int8"
    block: ClassVar[int] = BLOCK

    def nbytes(self, numel: int) -> int:
        """Bytes of `numel` values, a multiple of 128: the scales, followed by the integers."""
        return numel // BLOCK * 4 + numel

    def encode(self, x: torch.Tensor, ranks: int) -> torch.Tensor:
        """x (rows, n), n a multiple of 128 -> uint8 (rows, nbytes(n))."""
        blocks = x.float().view(len(x), -1, BLOCK)
        scale = blocks.abs().amax(-1, keepdim=True).div_(127)
        # The scale of zeros must not be 0, and 127 times the scale of finite values must not overflow.
        scale = scale.where(scale.isinf(), scale.clamp(torch.finfo(torch.float32).tiny, LARGEST_SCALE))
        integers = (blocks / scale).round_().clamp_(-127, 127).to(torch.int8)
        return torch.cat([scale.flatten(1).view(torch.uint8), integers.flatten(1).view(torch.uint8)], dim=1)

    def decode(self, message: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """uint8 (rows, nbytes(n)) -> dtype (rows, n)."""
        blocks = message.shape[1] // (BLOCK + 4)
        scale, integers = message.split([4 * blocks, BLOCK * blocks], dim=1)
        integers = integers.view(torch.int8).view(len(message), blocks, BLOCK)
        return (integers * view_bytes(scale, torch.float32).unsqueeze(-1)).flatten(1).to(dtype)

    encode_sum = encode

    def undo_scaling(self, total: torch.Tensor, ranks: int) -> torch.Tensor:
        """The sum of the decoded values, unchanged."""
        return total

    def round_to_wire(self, total: torch.Tensor, ranks: int) -> torch.Tensor:
        """The sum, unchanged: another rounding would double the error."""
        return total


WireFormat = Cast | Int8

LOSSY: dict[str, WireFormat] = {
    "fp16": Cast("fp16", torch.float16, scaled=True),
    "bf16": Cast("bf16", torch.bfloat16),
    "int8": Int8(),
}


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are accumulated: float64 for float64, otherwise float32."""
    return torch.promote_types(dtype, torch.float32)


def wire_format(name: str, dtype: torch.dtype) -> WireFormat:
    """The format called `name` for sums of `dtype`, float32 or float64; "fp32" sends both unchanged."""
    return LOSSY.get(name) or Cast("fp32", dtype)


def _extremes(x: torch.Tensor) -> list[float]:
    """[smallest, largest] value, both NaN if there is a NaN; [] for an empty tensor."""
    return torch.stack(x.aminmax()).tolist() if x.numel() else []


def padded(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple


def rows_of(x: torch.Tensor, rows: int, multiple: int) -> torch.Tensor:
    """x (n,) padded with zeros, as (rows, m) with m a multiple of `multiple`."""
    total = padded(x.numel(), rows * multiple)
    return (F.pad(x, (0, total - x.numel())) if total > x.numel() else x).view(rows, total // rows)


def view_bytes(message: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows of bytes (rows, nbytes) viewed as values of `dtype` (rows, n); copied if they are not aligned."""
    size = dtype.itemsize
    if message.storage_offset() % size or message.stride(0) % size or message.stride(-1) != 1:
        message = message.clone(memory_format=torch.contiguous_format)
    return message.view(dtype)
