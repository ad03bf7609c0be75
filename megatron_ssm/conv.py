"""The short causal convolution of an SSM block: depthwise, followed by SiLU."""

import torch
import torch.nn.functional as F


def causal_conv_ref(x, weight, bias=None, history=None):
    """The plain form of `causal_conv`, by torch's conv1d."""
    batch, _, channels = x.shape
    kernel = weight.shape[-1]
    history = x.new_zeros(batch, kernel - 1, channels) if history is None else history
    window = torch.cat([history, x], dim=1)
    y = F.conv1d(window.transpose(1, 2), weight, bias, groups=channels).transpose(1, 2)
    return F.silu(y), window[:, window.shape[1] - (kernel - 1) :]


def causal_conv(x, weight, bias=None, history=None):
    """y_t = silu(sum_k weight[:, k] * x_{t - K + 1 + k} + bias), channel by channel; nothing is communicated.

    x: (batch, seq, channels); weight: (channels, 1, K), Hugging Face's shape; bias: (channels,) or None.
    history: (batch, K-1, channels), the inputs before x (None: zeros, the start of a sequence).
    Returns y like x and the history for the next call, (batch, K-1, channels).
    """
    batch, seq, channels = x.shape
    kernel = weight.shape[-1]
    history = x.new_zeros(batch, kernel - 1, channels) if history is None else history.to(x.dtype)
    window = torch.cat([history, x], dim=1)
    taps = weight.squeeze(1).t().contiguous()  # (K, channels)
    y = window[:, :seq] * taps[0] if bias is None else torch.addcmul(bias, window[:, :seq], taps[0])
    for k in range(1, kernel):
        y = torch.addcmul(y, window[:, k : k + seq], taps[k])
    return F.silu(y), window[:, seq:]
