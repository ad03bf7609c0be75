"""Takes k elements out of gradient + residual, and adds values at indices: in one pass of a C kernel, or in torch.

Both functions treat several flat tensors as one concatenated tensor: k is the number of elements taken from all of them,
and indices are positions in the concatenation.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from commfabric.collectives.wire_formats import at_least_fp32
from commfabric.native.library import FLOAT, INT, POINTER, SIZE, Library

from .sparsifiers import select

SIGNATURES = {
    "selection_take": [POINTER, INT, INT, FLOAT, SIZE, POINTER, POINTER, SIZE, POINTER, POINTER],
    "selection_add": [POINTER, INT, POINTER, POINTER, SIZE, FLOAT],
}
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 3}
SLICE, SAMPLED, MOST_SAMPLED = 64, 64, 16384  # as in selection.c


class _Segment(ctypes.Structure):
    """The struct Segment of selection.c."""

    _fields_ = [("gradient", POINTER), ("residual", POINTER), ("numel", SIZE)]


@cache
def kernels() -> Library:
    """The C library of this package, or the reason why it cannot be used."""
    return Library("commfabric", SIGNATURES)


def take(
    sparsifier: str, gradients: Sequence[torch.Tensor], residuals: Sequence[torch.Tensor], k: int, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Take k elements of gradient * scale + residual; the other elements are the new residual.

    Non-finite elements are taken first, and none of them stays in a residual.

    Args:
        sparsifier: "topk", or one of `sparsifiers.THRESHOLDS`.
        gradients: Flat tensors of one dtype, with fewer than 2^31 elements in all.
        residuals: Flat tensors of the same lengths, at least fp32. They are overwritten, with 0 where an element is taken.
        k: The number of elements, at least 1.
        scale: The factor of the gradients.

    Returns:
        Values (k,) and ascending indices (k,), int32. If fewer than k elements are selected, the rest has value 0 and the
        last index.
    """
    native = kernels()
    if sparsifier == "dgc" and native and _fits_kernel(gradients, residuals):
        return _take_native(native.functions, gradients, residuals, k, scale)
    return take_ref(sparsifier, gradients, residuals, k, scale)


def take_ref(
    sparsifier: str, gradients: Sequence[torch.Tensor], residuals: Sequence[torch.Tensor], k: int, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """`take` in torch."""
    for gradient, residual in zip(gradients, residuals, strict=True):
        residual.add_(gradient.to(residual.dtype), alpha=scale)
    x = residuals[0] if len(residuals) == 1 else torch.cat(list(residuals))
    indices = select(sparsifier, x, k)
    values = x[indices]
    values[1:][indices[1:] == indices[:-1]] = 0  # padding
    x[indices] = 0
    if not values.isfinite().all():
        x.masked_fill_(~x.isfinite(), 0)
    if len(residuals) > 1:
        for residual, part in zip(residuals, x.split([r.numel() for r in residuals]), strict=True):
            residual.copy_(part)
    return values, indices.int()


def add_at(targets: Sequence[torch.Tensor], values: torch.Tensor, indices: torch.Tensor, scale: float = 1.0) -> None:
    """targets += values * scale at `indices`.

    Args:
        targets: Flat tensors.
        values, indices: Values (k,) and their ascending positions (k,) in the concatenated targets, int32 or int64.
        scale: The factor of the values.

    Raises:
        ValueError: Indices do not ascend or are out of range; some values may have been added by then. Indices on CUDA are
            not checked, because that would synchronize.
    """
    native, tensors = kernels(), (*targets, values)
    fits = indices.dtype == torch.int32 and all(t.is_contiguous() for t in targets) and len(values) == len(indices)
    if native and fits and indices.is_cpu and all(t.is_cpu and t.dtype == torch.float32 for t in tensors):
        segments = _segments([None] * len(targets), targets)
        values, indices = values.contiguous(), indices.contiguous()
        is_wrong = native.functions.selection_add(
            segments, len(segments), values.data_ptr(), indices.data_ptr(), len(indices), scale
        )
        if is_wrong:
            raise _wrong_indices(targets, indices)
        return
    add_at_ref(targets, values, indices, scale)


def add_at_ref(
    targets: Sequence[torch.Tensor], values: torch.Tensor, indices: torch.Tensor, scale: float = 1.0
) -> None:
    """`add_at` in torch."""
    if indices.is_cpu and len(indices) and not _ascend_within(indices, sum(map(len, targets))):
        raise _wrong_indices(targets, indices)
    indices, first = indices.long(), 0  # first: the position of the target's first element
    for target in targets:
        is_inside = (indices >= first) & (indices < first + len(target)) if len(targets) > 1 else slice(None)
        target.index_add_(0, indices[is_inside] - first, values[is_inside].to(target.dtype), alpha=scale)
        first += len(target)


def _ascend_within(indices: torch.Tensor, numel: int) -> bool:
    return bool(indices[0] >= 0 and indices[-1] < numel and (indices.diff() >= 0).all())


def _wrong_indices(targets: Sequence[torch.Tensor], indices: torch.Tensor) -> ValueError:
    numel = sum(map(len, targets))
    return ValueError(
        f"{len(indices)} indices from {indices.min()} to {indices.max()} do not ascend within {numel} elements"
    )


def _fits_kernel(gradients: Sequence[torch.Tensor], residuals: Sequence[torch.Tensor]) -> bool:
    """Return True if the C kernel supports these tensors."""
    dtype = gradients[0].dtype
    return dtype in TYPES and all(
        r.is_cpu and r.dtype == torch.float32 and r.is_contiguous()
        and g.is_cpu and g.dtype == dtype and g.is_contiguous() and g.numel() == r.numel()
        for g, r in zip(gradients, residuals, strict=True)
    )  # fmt: skip


def _segments(gradients: Sequence[torch.Tensor | None], residuals: Sequence[torch.Tensor]) -> Any:
    """The tensors as an array of C structs."""
    segments = (_Segment * len(residuals))()
    for segment, gradient, residual in zip(segments, gradients, residuals, strict=True):
        segment.gradient = None if gradient is None else gradient.data_ptr()
        segment.residual, segment.numel = residual.data_ptr(), residual.numel()
    return segments


def _take_native(
    functions: Any, gradients: Sequence[torch.Tensor], residuals: Sequence[torch.Tensor], k: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    numel = sum(r.numel() for r in residuals)
    capacity = 2 * k + SLICE + min(numel // SAMPLED, MOST_SAMPLED)
    workspace, values = torch.empty(2, capacity, dtype=torch.int32), torch.empty(k, dtype=torch.float32)
    indices = torch.empty(k, dtype=torch.int32)
    segments = _segments(gradients, residuals)
    keys, candidates = workspace
    functions.selection_take(
        segments, len(segments), TYPES[gradients[0].dtype], scale, k, keys.data_ptr(), candidates.data_ptr(),
        capacity, values.data_ptr(), indices.data_ptr(),
    )  # fmt: skip
    return values, indices


def residual_like(gradient: torch.Tensor) -> torch.Tensor:
    """A new residual for a flat gradient: zeros, at least fp32."""
    return torch.zeros(gradient.numel(), dtype=at_least_fp32(gradient.dtype), device=gradient.device)
