"""Taking k numbers out of gradient + residual, and adding numbers back in their places: C in one pass, or torch.

Both work on flat parts: several tensors that one k is taken from, whose places count through all of them.
"""

import ctypes
from collections.abc import Sequence
from functools import cache

import torch

from sparsefusion.collectives.wire_formats import at_least_fp32
from sparsefusion.native.library import FLOAT, INT, POINTER, SIZE, Library

from .sparsifiers import select

SIGNATURES = {
    "selection_take": [POINTER, INT, INT, FLOAT, SIZE, POINTER, POINTER, SIZE, POINTER, POINTER],
    "selection_add": [POINTER, INT, POINTER, POINTER, SIZE, FLOAT],
}
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 3}
SLICE, SAMPLED, MOST_SAMPLED = 64, 64, 16384  # selection.c's


class _Segment(ctypes.Structure):
    _fields_ = [("gradient", POINTER), ("residual", POINTER), ("numel", SIZE)]


@cache
def kernels() -> Library:
    """The package's C library, or why there is none."""
    return Library("sparsefusion", SIGNATURES)


def take(sparsifier: str, gradients: Sequence, residuals: Sequence, k: int, scale: float = 1.0):
    """(values (k,), places (k,) int32 ascending) taken from gradient * scale + residual, of which the rest is the residual.

    gradients: flat tensors of one dtype; residuals: as long, at least fp32, are overwritten: 0 where a number was taken.
    Padding has value 0. What is not finite is taken first, and none of it stays.
    """
    native = kernels()
    if sparsifier == "dgc" and native and _fits(gradients, residuals):
        return _take_native(native.functions, gradients, residuals, k, scale)
    return take_ref(sparsifier, gradients, residuals, k, scale)


def take_ref(sparsifier, gradients, residuals, k, scale=1.0):
    """`take` in torch."""
    for gradient, residual in zip(gradients, residuals, strict=True):
        residual.add_(gradient.to(residual.dtype), alpha=scale)
    x = residuals[0] if len(residuals) == 1 else torch.cat(list(residuals))
    places = select(sparsifier, x, k)
    values = x[places]
    values[1:][places[1:] == places[:-1]] = 0  # padding
    x[places] = 0
    if not values.isfinite().all():
        x.masked_fill_(~x.isfinite(), 0)
    if len(residuals) > 1:
        for residual, part in zip(residuals, x.split([r.numel() for r in residuals]), strict=True):
            residual.copy_(part)
    return values, places.int()


def add_at(targets: Sequence, values, places, scale: float = 1.0) -> None:
    """targets += values * scale at `places`, which ascend; targets: flat parts as in `take`. ValueError: a place outside."""
    native = kernels()
    if native and all(t.is_cpu and t.dtype == torch.float32 for t in (*targets, values)):
        segments = _segments([None] * len(targets), targets)
        values, places = values.contiguous(), places.contiguous()
        wrong = native.functions.selection_add(
            segments, len(segments), values.data_ptr(), places.data_ptr(), len(places), scale
        )
        if wrong:
            raise ValueError(f"places {places.tolist()[:3]}... do not ascend within {sum(map(len, targets))} numbers")
        return
    add_at_ref(targets, values, places, scale)


def add_at_ref(targets, values, places, scale=1.0) -> None:
    """`add_at` in torch."""
    places, first = places.long(), 0
    for target in targets:
        inside = (places >= first) & (places < first + len(target)) if len(targets) > 1 else slice(None)
        target.index_add_(0, places[inside] - first, values[inside].to(target.dtype), alpha=scale)
        first += len(target)


def _fits(gradients, residuals) -> bool:
    """Whether the C kernel takes them."""
    dtype = gradients[0].dtype
    return dtype in TYPES and all(
        r.is_cpu and r.dtype == torch.float32 and r.is_contiguous() and g.dtype == dtype and g.is_contiguous()
        for g, r in zip(gradients, residuals, strict=True)
    )


def _segments(gradients, residuals):
    segments = (_Segment * len(residuals))()
    for segment, gradient, residual in zip(segments, gradients, residuals, strict=True):
        segment.gradient = None if gradient is None else gradient.data_ptr()
        segment.residual, segment.numel = residual.data_ptr(), residual.numel()
    return segments


def _take_native(functions, gradients, residuals, k, scale):
    numel = sum(r.numel() for r in residuals)
    capacity = 2 * k + SLICE + min(numel // SAMPLED, MOST_SAMPLED)
    room, values = torch.empty(2, capacity, dtype=torch.int32), torch.empty(k, dtype=torch.float32)
    places = torch.empty(k, dtype=torch.int32)
    segments = _segments(gradients, residuals)
    keys, candidates = room
    functions.selection_take(
        segments, len(segments), TYPES[gradients[0].dtype], scale, k, keys.data_ptr(), candidates.data_ptr(),
        capacity, values.data_ptr(), places.data_ptr(),
    )  # fmt: skip
    return values, places


def residual_like(gradient) -> torch.Tensor:
    """Nothing left over yet of a flat gradient: zeros of at least fp32."""
    return torch.zeros(gradient.numel(), dtype=at_least_fp32(gradient.dtype), device=gradient.device)
