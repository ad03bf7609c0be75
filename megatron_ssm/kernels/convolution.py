"""The short causal convolution of an SSM block: depthwise, followed by SiLU."""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import cuda_kernels, kernels
from .implementations import CONVOLUTION, CUDA_CONVOLUTION, CUDA_CONVOLUTION_STEP

VECTOR, BYTES = 8, 16  # causal_conv1d_fn needs strides that are multiples of 8 channels, and addresses of 16 bytes


def causal_conv_ref(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, history: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The plain form of `causal_conv`, with torch's conv1d."""
    batch, _, channels = x.shape
    taps = weight.shape[-1]
    history = x.new_zeros(batch, taps - 1, channels) if history is None else history
    window = torch.cat([history, x], dim=1)  # (batch, K-1 + seq, channels)
    y = F.conv1d(window.transpose(1, 2), weight, bias, groups=channels).transpose(1, 2)
    return F.silu(y), window[:, window.shape[1] - (taps - 1) :]


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, history: Tensor | None = None, overwrite: bool = False
) -> tuple[Tensor, Tensor]:
    """The depthwise causal convolution, y_t = silu(sum_k weight[:, k] * x_{t - K + 1 + k} + bias). Sends nothing.

    The C kernel computes it on the CPU, and causal-conv1d on CUDA, if they support the inputs; otherwise torch does.

    Args:
        x: (batch, seq, channels).
        weight: (channels, 1, K), as in Hugging Face's checkpoints.
        bias: (channels,), or None.
        history: (batch, K-1, channels), the inputs before x. None: zeros, for the start of a sequence.
        overwrite: True if, without gradients, the history for the next call may be written into `history`.

    Returns:
        (y, like x; the history for the next call, (batch, K-1, channels)).
    """
    x = x.to(torch.promote_types(x.dtype, weight.dtype))  # under autocast x is narrower
    history = history if history is None else history.to(x.dtype)
    native = CONVOLUTION.takes(weight.shape[-1], x, weight, bias)
    if not native and supports_conv(x, weight, bias, history):
        return _causal_conv_cuda(x, weight, bias, history, overwrite)
    if not torch.is_grad_enabled():
        return (kernels.causal_conv if native else _causal_conv_torch)(x, weight, bias, history, overwrite)
    return (_NativeConv.apply if native else _causal_conv_torch)(x, weight, bias, history)


def _causal_conv_torch(
    x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor | None, overwrite: bool = False
) -> tuple[Tensor, Tensor]:
    batch, seq, channels = x.shape
    kernel = weight.shape[-1]
    history = x.new_zeros(batch, kernel - 1, channels) if history is None else history
    window = torch.cat([history, x], dim=1)  # (batch, K-1 + seq, channels)
    taps = weight.squeeze(1).t().contiguous()  # (K, channels)
    y = window[:, :seq] * taps[0] if bias is None else torch.addcmul(bias, window[:, :seq], taps[0])
    for k in range(1, kernel):
        y = torch.addcmul(y, window[:, k : k + seq], taps[k])
    return F.silu(y), window[:, seq:]


class _NativeConv(torch.autograd.Function):
    """`causal_conv` by the C kernels, in float32."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight, bias, history)
        return kernels.causal_conv(x, weight, bias, history)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dnext: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, history = ctx.saved_tensors
        return kernels.causal_conv_backward(x, weight, bias, history, dy, dnext, ctx.needs_input_grad[3])


# causal-conv1d's CUDA kernels


def supports_conv(x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor | None) -> bool:
    """Return True if causal-conv1d supports these arguments of `causal_conv` (csrc/causal_conv1d.cpp)."""
    if bias is not None and bias.dtype is not weight.dtype:
        return False
    inputs = weight.shape[-1], x, weight, bias, history
    if x.shape[1] == 1:
        return CUDA_CONVOLUTION_STEP.takes(*inputs) and len(x) <= _conv_rows(x, weight, history)
    return x.shape[2] % VECTOR == 0 and CUDA_CONVOLUTION.takes(*inputs) and _conv_rows(x, weight, history) > 0


def _conv_rows(x: Tensor, weight: Tensor, history: Tensor | None) -> int:
    """The most rows of the batch for one call of a kernel, also if a history is prepended to x."""
    return cuda_kernels.rows_within((x.shape[1] + weight.shape[-1] - 1) * x.shape[2], x, history)


def _causal_conv_cuda(
    x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor | None, overwrite: bool = False
) -> tuple[Tensor, Tensor]:
    """`causal_conv` by causal-conv1d. The history has the dtype of x.

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
