"""What a sequence leaves behind: the convolution's last inputs and the recurrent state, this rank's channels only."""

from dataclasses import dataclass

import torch


@dataclass
class LayerCache:
    """One layer's state.

    conv: (batch, K-1, this rank's convolved channels), the model's dtype: the convolution's inputs before the next token.
    state: at least fp32: (batch, N, channels) for Mamba-1, (batch, heads, head_dim, N) for Mamba-2.
    """

    conv: torch.Tensor
    state: torch.Tensor

    def update(self, conv: torch.Tensor, state: torch.Tensor) -> None:
        """Overwrite in place: a cache tensor never moves."""
        self.conv.copy_(conv.detach())
        self.state.copy_(state.detach())


@dataclass
class Cache:
    """The state of `batch` sequences between two calls of the model; made by `model.new_cache`."""

    layers: list[LayerCache]
    tokens: int = 0  # positions processed so far, padding included

    @property
    def nbytes(self) -> int:
        """Bytes this rank holds."""
        return sum(t.numel() * t.element_size() for layer in self.layers for t in (layer.conv, layer.state))

    @property
    def batch(self) -> int:
        """How many sequences."""
        return self.layers[0].conv.shape[0]
