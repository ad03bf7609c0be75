"""One residual block of the language model: a norm and a mixer; in hybrid layers also the shared attention block."""

import torch
from torch import nn

from megatron_ssm.configs.config import Config
from megatron_ssm.parallel.layers import RMSNorm
from megatron_ssm.parallel.ranks import Ranks
from sparsefusion.collectives.wire_formats import at_least_fp32

from .cache import BatchInfo, LayerCache
from .shared_attention import SharedBlock, SharedBlockInvocation


class Block(nn.Module):
    """x + mixer(norm(x)), or in hybrid layers x + mixer(norm(x + shared_block(x))). x is the same on every rank, or with
    sequence parallelism this rank's share of the tokens.

    mixer: a `MambaMixer` or a `Mamba2Mixer`. use: what a hybrid layer has of its own for its use of the shared block, or
    None. (Parameters of checkpoints have the names of these attributes.) Sends what the mixer and the shared block send.
    """

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        mixer: nn.Module,
        use: SharedBlockInvocation | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, dtype, device, ranks)
        self.mixer, self.use, self.recomputation = mixer, use, ranks.recomputation
        self.residual_in_fp32 = config.residual_in_fp32

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype of the residual stream."""
        dtype = self.norm.weight.dtype
        return at_least_fp32(dtype) if self.residual_in_fp32 else dtype

    def forward(
        self,
        x: torch.Tensor,
        info: BatchInfo,
        cache: LayerCache | None = None,
        shared: SharedBlock | None = None,
        embeddings: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x (batch, seq, hidden) -> the same shape. cache: of this layer; it is read and updated.

        shared, embeddings: for hybrid layers, the shared block and its second input (batch, seq, hidden).
        """
        residual = x.to(self.sum_dtype)
        if self.use is not None:
            assert shared is not None and embeddings is not None, "a hybrid layer needs the shared block and its input"
            x = x + shared(x, embeddings, self.use, info, cache)
        return residual + self.recomputation.run(self._mixed, x, info, cache)

    def _mixed(self, x: torch.Tensor, info: BatchInfo, cache: LayerCache | None) -> torch.Tensor:
        """The mixer's output."""
        return self.mixer(self.norm(x), info, cache)
