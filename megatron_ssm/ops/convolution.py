"""The short causal convolution of an SSM block: depthwise, followed by SiLU."""

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from megatron_ssm.native import kernels

from . import cuda_convolution


def causal_conv_ref(x, weight, bias=None, history=None):
    """The plain form of `causal_conv`, by torch's conv1d."""
    batch, _, channels = x.shape
    kernel = weight.shape[-1]
    history = x.new_zeros(batch, kernel - 1, channels) if history is None else history
    window = torch.cat([history, x], dim=1)
    y = F.conv1d(window.transpose(1, 2), weight, bias, groups=channels).transpose(1, 2)
    return F.silu(y), window[:, window.shape[1] - (kernel - 1) :]


def causal_conv(x, weight, bias=None, history=None, overwrite=False):
    """y_t = silu(sum_k weight[:, k] * x_{t - K + 1 + k} + bias), channel by channel; nothing is communicated.

    x: (batch, seq, channels); weight: (channels, 1, K), Hugging Face's shape; bias: (channels,) or None.
    history: (batch, K-1, channels), the inputs before x (None: zeros, the start of a sequence). overwrite: the history for
    the next call may take its place in memory (without gradients). In C or, on CUDA, by causal-conv1d where they can, else
    in torch.
    Returns y like x and the history for the next call, (batch, K-1, channels).
    """
    x = x.to(torch.promote_types(x.dtype, weight.dtype))  # in autocast x is narrower
    history = history if history is None else history.to(x.dtype)
    native = kernels.usable(x, weight, bias) and weight.shape[-1] <= kernels.LONGEST_KERNEL
    if not native and cuda_convolution.supports_conv(x, weight, bias, history):
        return cuda_convolution.causal_conv(x, weight, bias, history, overwrite)
    if not torch.is_grad_enabled():
        return (kernels.causal_conv if native else _causal_conv)(x, weight, bias, history, overwrite)
    native = native and x.dtype == torch.float32
    return _NativeConv.apply(x, weight, bias, history) if native else _causal_conv(x, weight, bias, history)


def _causal_conv(x, weight, bias, history, overwrite=False):
    """`causal_conv` in torch: tap by tap."""
    batch, seq, channels = x.shape
    kernel = weight.shape[-1]
    history = x.new_zeros(batch, kernel - 1, channels) if history is None else history
    window = torch.cat([history, x], dim=1)
    taps = weight.squeeze(1).t().contiguous()  # (K, channels)
    y = window[:, :seq] * taps[0] if bias is None else torch.addcmul(bias, window[:, :seq], taps[0])
    for k in range(1, kernel):
        y = torch.addcmul(y, window[:, k : k + seq], taps[k])
    return F.silu(y), window[:, seq:]


class _NativeConv(torch.autograd.Function):
    """The C kernels, in float32."""

    @staticmethod
    def forward(ctx, x, weight, bias, history):
        ctx.save_for_backward(x, weight, bias, history)
        return kernels.causal_conv(x, weight, bias, history)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dnext):
        return kernels.causal_conv_backward(*ctx.saved_tensors, dy, dnext, ctx.needs_input_grad[3])
