"""The C kernel that `context.summaries` calls: the states that a block of Mamba-1's recurrence passes to other blocks."""

import torch
from torch import Tensor

from .arguments import address, c_array, check_shapes, contiguous, token_major, token_strides
from .kernels import functions


def selective_carry(
    values: Tensor, dt: Tensor, A_log: Tensor, weights: Tensor, z: Tensor | None, dt_bias: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor]:
    """The final state of a block from zeros, or the gradient of its initial state; all tensors are float32.

    Args:
        values: x, or with `reverse` the gradient of the outputs: (batch, seq, channels).
        dt: (batch, seq, channels).
        A_log: (channels, N) with N <= LARGEST_STATE.
        weights: B, or with `reverse` C: (batch, seq, N).
        z: The gate, (batch, seq, channels), with `reverse`; or None.
        dt_bias: (channels,), or None.
        reverse: True for the gradient of the initial state.

    Returns:
        (the state or the gradient (batch, N, channels); the sums of the step sizes (batch, channels)).
    """
    batch, seq, channels = values.shape
    size = A_log.shape[1]
    check_shapes(
        dt=(dt, (batch, seq, channels)), A_log=(A_log, (channels, size)), weights=(weights, (batch, seq, size)),
        z=(z, (batch, seq, channels)), dt_bias=(dt_bias, (channels,)),
    )  # fmt: skip
    values, dt, weights, z = (token_major(t) for t in (values, dt, weights, z))
    A_log, dt_bias = contiguous(A_log, dt_bias)
    state, sums = values.new_empty(batch, size, channels), values.new_empty(batch, channels)
    strides = [*token_strides(values), *token_strides(dt), *token_strides(weights), 0, 0, *token_strides(z)]
    functions().selective_carry(
        values.data_ptr(), dt.data_ptr(), A_log.data_ptr(), weights.data_ptr(), address(z), address(dt_bias),
        state.data_ptr(), sums.data_ptr(), c_array(*strides), batch, seq, channels, size, reverse, torch.get_num_threads(),
    )  # fmt: skip
    return state, sums
