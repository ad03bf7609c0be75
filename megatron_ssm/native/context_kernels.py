"""The C kernel that `context.summaries` calls: what a block of Mamba-1's recurrence passes on to other blocks."""

import torch
from torch import Tensor

from .arguments import address, c_array, check_shapes, check_size, token_major, token_strides, without_gaps
from .kernels import LARGEST_STATE, functions


def selective_carry(
    values: Tensor, dt: Tensor, A_log: Tensor, weights: Tensor, z: Tensor | None, dt_bias: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor]:
    """(state (batch, N, channels), sum of the step sizes (batch, channels)) of float32 tensors on the CPU.

    values, dt, z: (batch, seq, channels); A_log: (channels, N), N <= LARGEST_STATE; weights: (batch, seq, N); dt_bias:
    (channels,). reverse False: values is x, weights is B, z is not used, and state is the final state from zeros. True:
    values is the gradient of the outputs, weights is C, and state is the gradient of the initial state.
    """
    batch, seq, channels = values.shape
    size = A_log.shape[1]
    check_size("N", size, LARGEST_STATE)
    check_shapes(
        dt=(dt, (batch, seq, channels)), A_log=(A_log, (channels, size)), weights=(weights, (batch, seq, size)),
        z=(z, (batch, seq, channels)), dt_bias=(dt_bias, (channels,)),
    )  # fmt: skip
    values, dt, weights, z = (token_major(t) for t in (values, dt, weights, z))
    A_log, dt_bias = without_gaps(A_log, dt_bias)
    state, sums = values.new_empty(batch, size, channels), values.new_empty(batch, channels)
    strides = [*token_strides(values), *token_strides(dt), *token_strides(weights), 0, 0, *token_strides(z)]
    functions().selective_carry(
        values.data_ptr(), dt.data_ptr(), A_log.data_ptr(), weights.data_ptr(), address(z), address(dt_bias),
        state.data_ptr(), sums.data_ptr(), c_array(*strides), batch, seq, channels, size, reverse, torch.get_num_threads(),
    )  # fmt: skip
    return state, sums
