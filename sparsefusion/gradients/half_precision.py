"""Numbers to float16 and back, times a factor, and the largest of them: C in a pass each, or torch.

All tensors are flat and contiguous.
"""

from functools import cache

import torch

from sparsefusion.native.library import FLOAT, POINTER, SIZE, Library

from .nonfinite import largest

SIGNATURES = {
    "halves_of": [POINTER, SIZE, FLOAT, POINTER],
    "halves_restored": [POINTER, SIZE, FLOAT, POINTER],
    "halves_largest": [POINTER, SIZE],
}


@cache
def kernels() -> Library:
    """The package's C library, or why there is none."""
    return Library("sparsefusion", SIGNATURES)


def to_half(x, times: float) -> torch.Tensor:
    """x * times, float16."""
    if not (x.is_cpu and x.dtype == torch.float32 and kernels()):
        return to_half_ref(x, times)
    out = torch.empty_like(x, dtype=torch.float16)
    kernels().functions.halves_of(x.data_ptr(), x.numel(), times, out.data_ptr())
    return out


def to_half_ref(x, times) -> torch.Tensor:
    """`to_half` in torch; rounded once, also from bfloat16, but from float64 by way of float32."""
    return (x.to(torch.promote_types(x.dtype, torch.float32)) * times).to(torch.float16)


def restore(halves, times: float, out) -> None:
    """Write halves, float16, * times into `out`."""
    if out.is_cpu and out.dtype == torch.float32 and kernels():
        kernels().functions.halves_restored(halves.data_ptr(), halves.numel(), times, out.data_ptr())
    else:
        restore_ref(halves, times, out)


def restore_ref(halves, times, out) -> None:
    """`restore` in torch."""
    out.copy_(halves.to(torch.promote_types(out.dtype, torch.float32)).mul_(times))


def largest_half(halves) -> torch.Tensor:
    """The largest magnitude, float64: finite if all are."""
    if not (halves.is_cpu and kernels()):
        return largest(halves)
    bits = kernels().functions.halves_largest(halves.data_ptr(), halves.numel())
    return torch.tensor(bits, dtype=torch.int16).view(torch.float16).double()
