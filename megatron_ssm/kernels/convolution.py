"""The short causal convolution of an SSM block: depthwise, followed by SiLU."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import cuda_convolution, kernels
from .implementations import CONVOLUTION


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
    if not native and cuda_convolution.supports_conv(x, weight, bias, history):
        return cuda_convolution.causal_conv(x, weight, bias, history, overwrite)
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
