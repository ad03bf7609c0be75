"""One residual block of the language model: a norm and a mixer, and in hybrid layers the shared attention block."""

import torch
from torch import nn

from megatron_ssm.configs.config import Config
from megatron_ssm.parallel.layers import RMSNorm
from sparsefusion.collectives.wire_formats import at_least_fp32

from .cache import BatchInfo


class Block(nn.Module):
    """x + mixer(norm(x)), or in hybrid layers x + mixer(norm(x + shared attention block)). The same on every rank.

    use: the hybrid layer's own part of the shared block, or None. Its name is part of the names of parameters.
    """

    def __init__(self, config: Config, mixer, use=None, dtype=None, device=None):
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, dtype, device)
        self.mixer, self.use = mixer, use
        self.residual_in_fp32 = config.residual_in_fp32

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype of the residual stream."""
        dtype = self.norm.weight.dtype
        return at_least_fp32(dtype) if self.residual_in_fp32 else dtype

    def forward(self, x, info: BatchInfo, cache=None, shared=None, embeddings=None):
        """x (batch, seq, hidden) -> the same shape. shared, embeddings: the shared block and its other input, or None."""
        residual = x.to(self.sum_dtype)
        if self.use is not None:
            x = x + shared(x, embeddings, self.use, info, cache)
        return residual + self.mixer(self.norm(x), info, cache)
