"""Checks of the tensors that the C kernels receive, and their memory layouts. None stands for an absent tensor."""

import ctypes
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def are_float32(*tensors: Tensor | None) -> bool:
    """Return True if these tensors are float32 and on the CPU, as states, A_log, D and the bias of dt must be."""
    return all(t is None or (t.dtype is torch.float32 and t.is_cpu) for t in tensors)


def check_shapes(**expected: tuple[Tensor | None, tuple[int, ...]]) -> None:
    """ValueError if a tensor has another shape than expected, or is not on the CPU: a kernel would read other memory."""
    for name, (tensor, shape) in expected.items():
        if tensor is not None and (tensor.shape != shape or not tensor.is_cpu):
            given = f"{tuple(tensor.shape)} on {tensor.device}"
            raise ValueError(f"{name} has shape {given}, but the C kernel needs {tuple(shape)} on cpu")


def check_size(name: str, size: int, limit: int) -> None:
    """ValueError unless 1 <= size <= limit: the kernels have buffers of the largest size."""
    if not 0 < size <= limit:
        raise ValueError(f"{name} is {size}, but the C kernel supports 1 to {limit}")


def check_groups(name: str, size: int, groups: int) -> None:
    """ValueError unless groups divides size."""
    if groups < 1 or size % groups:
        raise ValueError(f"{size} {name} do not divide over {groups} groups")


def address(tensor: Tensor | None) -> int | None:
    """The address of a tensor's first element; None is a null pointer."""
    return None if tensor is None else tensor.data_ptr()


def without_gaps(*tensors: Tensor | None) -> Iterator[Any]:
    """The tensors, copied where they are not contiguous."""
    return (t if t is None else t.contiguous() for t in tensors)


def token_major(tensor: Any) -> Any:
    """A tensor (batch, seq, ...), copied if there are gaps within a token."""
    if tensor is None or tensor.is_contiguous():
        return tensor
    if tensor.stride(-1) == 1 and (tensor.ndim < 4 or tensor[0, 0].is_contiguous()):
        return tensor
    return tensor.contiguous()


def token_strides(tensor: Tensor | None) -> tuple[int, ...]:
    """(elements from one sequence to the next, elements from one token to the next)."""
    return (0, 0) if tensor is None else tensor.stride()[:2]


def c_array(*numbers: int) -> ctypes.Array:
    """A C array of sizes."""
    return (ctypes.c_ssize_t * len(numbers))(*numbers)


def next_state(
    state: Tensor | None, like: Tensor, shape: tuple[int, ...], overwrite: bool
) -> tuple[Tensor | None, Tensor]:
    """(the state as a kernel reads it, the tensor for the next state), of like's dtype, without gaps within a sequence.

    The next state has the place of the state if overwrite allows it and the state needs no copy.
    """
    if state is not None and not (state.dtype is like.dtype and (state.is_contiguous() or state[0].is_contiguous())):
        state, overwrite = state.to(like.dtype).contiguous(), False
    return state, state if overwrite and state is not None else like.new_empty(shape)
