"""Conversion of gradients to float16 and back, times a factor, in C or in torch, and largest magnitudes.

All tensors are flat and contiguous.
"""

from functools import cache

import torch

from commfabric.native.library import FLOAT, POINTER, SIZE, Library

SIGNATURES = {
    "fp16_encode": [POINTER, SIZE, FLOAT, POINTER],
    "fp16_decode": [POINTER, SIZE, FLOAT, POINTER],
    "fp16_largest": [POINTER, SIZE],
}


@cache
def kernels() -> Library:
    """The C library of the package, or the reason why it cannot be used."""
    return Library("commfabric", SIGNATURES)


def to_fp16(x: torch.Tensor, factor: float) -> torch.Tensor:
    """x * factor, rounded to float16."""
    if not (x.is_cpu and x.dtype == torch.float32 and kernels()):
        return to_fp16_ref(x, factor)
    out = torch.empty_like(x, dtype=torch.float16)
    kernels().functions.fp16_encode(x.data_ptr(), x.numel(), factor, out.data_ptr())
    return out


def to_fp16_ref(x: torch.Tensor, factor: float) -> torch.Tensor:
    """`to_fp16` in torch. It rounds once, except that it rounds float64 to float32 first."""
    return (x.to(torch.promote_types(x.dtype, torch.float32)) * factor).to(torch.float16)


def from_fp16(values: torch.Tensor, factor: float, out: torch.Tensor) -> None:
    """Write `values` (float16) * factor into `out`."""
    if out.is_cpu and out.dtype == torch.float32 and kernels():
        kernels().functions.fp16_decode(values.data_ptr(), values.numel(), factor, out.data_ptr())
    else:
        from_fp16_ref(values, factor, out)


def from_fp16_ref(values: torch.Tensor, factor: float, out: torch.Tensor) -> None:
    """`from_fp16` in torch."""
    out.copy_(values.to(torch.promote_types(out.dtype, torch.float32)).mul_(factor))


def largest(tensor: torch.Tensor) -> torch.Tensor:
    """The largest magnitude in a tensor, a float64 scalar: it is finite if and only if all elements are finite."""
    if not tensor.numel():
        return tensor.new_zeros((), dtype=torch.float64)
    least, most = tensor.aminmax()
    return torch.maximum(-least.double(), most.double())


def largest_fp16(values: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of float16 values, a float64 scalar: it is finite if and only if all values are."""
    if not (values.is_cpu and kernels()):
        return largest(values)
    bits = kernels().functions.fp16_largest(values.data_ptr(), values.numel())
    return torch.tensor(bits, dtype=torch.int16).view(torch.float16).double()
