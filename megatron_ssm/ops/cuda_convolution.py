"""The causal convolution by causal-conv1d's CUDA kernels, with the interface of `ops.convolution`."""

import functools

import torch
from torch import Tensor

from . import cuda_kernels
from .implementations import CUDA_CONVOLUTION, CUDA_CONVOLUTION_STEP

VECTOR, BYTES = 8, 16  # causal_conv1d_fn needs strides that are multiples of 8 channels, and addresses of 16 bytes


def supports_conv(x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor | None) -> bool:
    """Return True if a kernel computes this `convolution.causal_conv` (see csrc/causal_conv1d.cpp)."""
    if bias is not None and bias.dtype is not weight.dtype:
        return False
    inputs = weight.shape[-1], x, weight, bias, history
    if x.shape[1] == 1:
        return CUDA_CONVOLUTION_STEP.takes(*inputs) and len(x) <= _conv_rows(x, weight, history)
    return x.shape[2] % VECTOR == 0 and CUDA_CONVOLUTION.takes(*inputs) and _conv_rows(x, weight, history) > 0


def _conv_rows(x: Tensor, weight: Tensor, history: Tensor | None) -> int:
    """The number of rows of the batch that causal-conv1d's kernels get at a time, also if a history is prepended to x."""
    return cuda_kernels.rows_within((x.shape[1] + weight.shape[-1] - 1) * x.shape[2], x, history)


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor | None, overwrite: bool = False
) -> tuple[Tensor, Tensor]:
    """`convolution.causal_conv` by causal-conv1d; the history has the dtype of x.

    With gradients, the history is prepended to x, because the kernel's gradient of its initial states is not used here.
    The next history is always cut out by torch, which differentiates it.
    """
    weight, bias = weight.squeeze(1), bias if bias is None else bias.contiguous()
    if x.shape[1] == 1:
        return _conv_step(x, weight, bias, history, overwrite)
    return cuda_kernels.by_rows(
        functools.partial(_conv_tokens, weight, bias), _conv_rows(x, weight, history), x, history
    )


def _conv_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor | None, overwrite: bool
) -> tuple[Tensor, Tensor]:
    """One token (csrc/causal_conv1d_update.cu). It overwrites its history, (batch, channels, K-1), of any strides."""
    batch, _, channels = x.shape
    state = cuda_kernels.overwritable(history, (batch, weight.shape[1] - 1, channels), x.dtype, x, overwrite)
    y = cuda_kernels.load_kernel("causal_conv1d_update").item(
        x[:, 0], state.transpose(1, 2), weight, bias, activation="silu"
    )
    return y.unsqueeze(1), state


def _conv_tokens(weight: Tensor, bias: Tensor | None, x: Tensor, history: Tensor | None) -> tuple[Tensor, Tensor]:
    """(the output of several tokens, the history for the next ones)."""
    before = weight.shape[1] - 1
    past = x.new_zeros(x.shape[0], before, x.shape[2]) if history is None else history
    after = torch.cat([past, x[:, -before:]], 1)[:, -before:]
    if history is None or not torch.is_grad_enabled():
        return _channel_last(x, weight, bias, history), after
    return _channel_last(torch.cat([history, x], 1), weight, bias, None)[:, before:], after


def _channel_last(x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor | None) -> Tensor:
    """Several tokens, in the layout that the kernel calls channel-last: (batch, channels, seq), channels with stride 1."""
    history = history if history is None else _in_vectors(history).transpose(1, 2)
    y = cuda_kernels.load_kernel("causal_conv1d_fn").item(
        _in_vectors(x).transpose(1, 2), weight, bias, initial_states=history, activation="silu"
    )
    if y.requires_grad:  # the kernel's backward pass has the same conditions for it as for x
        y.register_hook(lambda gradient: _in_vectors(gradient.transpose(1, 2)).transpose(1, 2))
    return y.transpose(1, 2)


def _in_vectors(tensor: Tensor) -> Tensor:
    """The tensor (batch, seq, channels), copied unless the kernel can load VECTOR channels at once from it.

    It is copied as well if an offset is too large, as in some gradients. The strides between sequences and tokens must be
    right even if there is only one: the kernel checks them, while torch's is_contiguous ignores them.
    """
    sequence, token, channel = tensor.stride()
    aligned = tensor.data_ptr() % BYTES == sequence % VECTOR == token % VECTOR == 0
    fits = aligned and cuda_kernels.last_offset(tensor) <= cuda_kernels.LARGEST_OFFSET
    if fits and channel == 1 and token >= tensor.shape[2] and sequence >= token:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
