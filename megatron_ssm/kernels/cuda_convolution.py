"""The causal convolution by causal-conv1d's CUDA kernels, with the interface of `kernels.convolution`."""

import functools

import torch
from torch import Tensor

from . import cuda_kernels
from .implementations import CUDA_CONVOLUTION, CUDA_CONVOLUTION_STEP

VECTOR, BYTES = 8, 16  # causal_conv1d_fn needs strides that are multiples of 8 channels, and addresses of 16 bytes


def supports_conv(x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor | None) -> bool:
    """Return True if causal-conv1d supports these arguments of `convolution.causal_conv` (csrc/causal_conv1d.cpp)."""
    if bias is not None and bias.dtype is not weight.dtype:
        return False
    inputs = weight.shape[-1], x, weight, bias, history
    if x.shape[1] == 1:
        return CUDA_CONVOLUTION_STEP.takes(*inputs) and len(x) <= _conv_rows(x, weight, history)
    return x.shape[2] % VECTOR == 0 and CUDA_CONVOLUTION.takes(*inputs) and _conv_rows(x, weight, history) > 0


def _conv_rows(x: Tensor, weight: Tensor, history: Tensor | None) -> int:
    """The most rows of the batch for one call of a kernel, also if a history is prepended to x."""
    return cuda_kernels.rows_within((x.shape[1] + weight.shape[-1] - 1) * x.shape[2], x, history)


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor | None, overwrite: bool = False
) -> tuple[Tensor, Tensor]:
    """`convolution.causal_conv` by causal-conv1d. The history has the dtype of x.

    With gradients, the history is prepended to x, because the kernel's gradient of its initial states is not used here.
    The next history is a slice of torch tensors, which autograd differentiates.
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
    """The output of one token and the next history (csrc/causal_conv1d_update.cu).

    The kernel overwrites its history, (batch, channels, K-1), which may have any strides.
    """
    batch, _, channels = x.shape
    state = cuda_kernels.overwritable(history, (batch, weight.shape[1] - 1, channels), x.dtype, x, overwrite)
    y = cuda_kernels.load_kernel("causal_conv1d_update").item(
        x[:, 0], state.transpose(1, 2), weight, bias, activation="silu"
    )
    return y.unsqueeze(1), state


def _conv_tokens(weight: Tensor, bias: Tensor | None, x: Tensor, history: Tensor | None) -> tuple[Tensor, Tensor]:
    length = weight.shape[1] - 1
    past = x.new_zeros(x.shape[0], length, x.shape[2]) if history is None else history
    next_history = torch.cat([past, x[:, -length:]], 1)[:, -length:]
    if history is None or not torch.is_grad_enabled():
        return _channel_last(x, weight, bias, history), next_history
    return _channel_last(torch.cat([history, x], 1), weight, bias, None)[:, length:], next_history


def _channel_last(x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor | None) -> Tensor:
    """The output of several tokens. The kernel's layout "channel-last" is (batch, channels, seq), channels with stride 1."""
    history = history if history is None else _in_vectors(history).transpose(1, 2)
    y = cuda_kernels.load_kernel("causal_conv1d_fn").item(
        _in_vectors(x).transpose(1, 2), weight, bias, initial_states=history, activation="silu"
    )
    if y.requires_grad:  # the kernel's backward pass has the same conditions for the gradient of y as for x
        y.register_hook(lambda gradient: _in_vectors(gradient.transpose(1, 2)).transpose(1, 2))
    return y.transpose(1, 2)


def _in_vectors(tensor: Tensor) -> Tensor:
    """A tensor (batch, seq, channels), copied unless the kernel can load VECTOR channels at once from it.

    It is also copied if an offset is too large, as in some gradients. The strides of dimensions of size 1 must fit as well,
    because the kernel checks them; torch's is_contiguous ignores them.
    """
    sequence, token, channel = tensor.stride()
    aligned = tensor.data_ptr() % BYTES == sequence % VECTOR == token % VECTOR == 0
    fits = aligned and cuda_kernels.last_offset(tensor) <= cuda_kernels.LARGEST_OFFSET
    if fits and channel == 1 and token >= tensor.shape[2] and sequence >= token:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
