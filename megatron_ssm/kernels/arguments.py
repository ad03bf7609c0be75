"""The arguments of the C kernels: checks of shapes, and memory layouts. A tensor may be None if it is optional."""

import ctypes
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def are_float32(*tensors: Tensor | None) -> bool:
    return all(t is None or (t.dtype is torch.float32 and t.is_cpu) for t in tensors)


def check_shapes(**expected: tuple[Tensor | None, tuple[int, ...]]) -> None:
    """Raise ValueError for a tensor of another shape or on another device, because C would read other memory.

    expected: name=(tensor, shape).
    """
    for name, (tensor, shape) in expected.items():
        if tensor is not None and (tensor.shape != shape or not tensor.is_cpu):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} on {tensor.device}: expected {tuple(shape)} on cpu"
            )


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def contiguous(*tensors: Tensor | None) -> Iterator[Any]:
    return (t if t is None else t.contiguous() for t in tensors)


def token_major(tensor: Any) -> Any:
    """A tensor (batch, seq, ...), copied unless each token is contiguous."""
    if tensor is None or tensor.is_contiguous():
        return tensor
    if tensor.stride(-1) == 1 and (tensor.ndim < 4 or tensor[0, 0].is_contiguous()):
        return tensor
    return tensor.contiguous()


def token_strides(tensor: Tensor | None) -> tuple[int, ...]:
    return (0, 0) if tensor is None else tensor.stride()[:2]


def c_array(*numbers: int) -> ctypes.Array:
    return (ctypes.c_ssize_t * len(numbers))(*numbers)


def next_state(
    state: Tensor | None, like: Tensor, shape: tuple[int, ...], overwrite: bool
) -> tuple[Tensor | None, Tensor]:
    """The state for a kernel to read, and a tensor for the state that it writes.

    Both have the dtype of `like`, and each sequence is contiguous. They are one tensor if `overwrite` is True and the state
    needs no copy.
    """
    if state is not None and not (state.dtype is like.dtype and (state.is_contiguous() or state[0].is_contiguous())):
        state, overwrite = state.to(like.dtype).contiguous(), False
    return state, state if overwrite and state is not None else like.new_empty(shape)
