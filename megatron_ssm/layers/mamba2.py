"""The Mamba-2 mixer, split by head over the tensor-parallel ranks (ssm.md A3).

Each rank holds h/T heads: their rows of z, x and dt, and the B and C of their groups. With fewer groups than ranks,
T/G neighbouring ranks hold the same B and C and add their gradients. There is no x_proj: what is left to cross the
ranks is out_proj and, where a group of the gated norm spans several ranks, the norm's sum of squares:

- groups % ranks == 0: the norm is local; one all-reduce a block.
- one group: rsqrt(mean square) is one number per token and commutes with out_proj, so the sum of squares rides as one
  more column of out_proj's all-reduce, exact in any format, and the result is scaled afterwards; still one.
- 1 < groups < ranks: the sums of squares (G numbers per token) are reduced first; two.
"""

import torch
import torch.nn.functional as F
from torch import nn

from megatron_ssm.configs.config import Config
from megatron_ssm.native import kernels
from megatron_ssm.ops.matrices import linear
from megatron_ssm.ops.scan import ssd
from megatron_ssm.parallel.layers import (
    ColumnParallelLinear,
    Ranks,
    RowParallelLinear,
    in_pieces,
    reduce_beside,
    sum_over_ranks,
)
from sparsefusion.collectives.wire_formats import at_least_fp32

from .cache import BatchInfo, LayerCache
from .mamba1 import Convolution


class Mamba2Mixer(nn.Module):
    """State-space duality block: x (batch, seq, hidden), whole, to the same shape, whole.

    Backward sends one all-reduce of in_proj's input gradient; with groups < ranks one each of the gradients of B and C's
    weights, biases and convolution; and, at 1 < groups < ranks, one of the sums of squares'.
    """

    A_log: nn.Parameter
    D: nn.Parameter
    dt_bias: nn.Parameter

    def __init__(self, config: Config, ranks: Ranks, dtype=None, device=None):
        super().__init__()
        self.ranks, wide = ranks, at_least_fp32(dtype)
        self.heads, self.head_dim, self.state_size = config.heads // ranks.size, config.head_dim, config.state_size
        self.groups = max(1, config.groups // ranks.size)
        self.all_groups, self.eps, self.dt_limit = config.groups, config.gated_norm_eps, config.dt_limit
        self.group_channels = config.intermediate_size // config.groups
        self.kernel = config.conv_kernel
        inner, bc = self.heads * self.head_dim, self.groups * self.state_size
        self.rows = {"z": inner, "x": inner, "B": bc, "C": bc, "dt": self.heads}
        shared = dict(shared=("B", "C"), slots=config.groups) if config.groups < ranks.size else {}
        for name in ("A_log", "D", "dt_bias"):
            self.register_parameter(name, nn.Parameter(torch.empty(self.heads, dtype=wide, device=device)))
        self.norm_weight = nn.Parameter(torch.empty(inner, dtype=dtype, device=device))
        self.in_proj = ColumnParallelLinear(
            config.hidden_size, self.rows, config.use_bias, ranks, dtype, device, **shared
        )
        channels = {name: self.rows[name] for name in "xBC"}
        self.conv = Convolution(channels, config.conv_kernel, config.conv_bias, ranks, dtype, device, **shared)
        self.out_proj = RowParallelLinear(inner, config.hidden_size, config.use_bias, ranks, dtype, device)

    def new_cache(self, batch: int) -> LayerCache:
        """An empty state of this rank's heads, and of its groups' B and C history, for `batch` sequences."""
        device, wide = self.D.device, at_least_fp32(self.D.dtype)
        channels = sum(self.rows[name] for name in "xBC")
        conv = torch.zeros(batch, self.kernel - 1, channels, dtype=self.norm_weight.dtype, device=device)
        state = torch.zeros(batch, self.heads, self.state_size, self.head_dim, dtype=wide, device=device)
        return LayerCache(conv, state)

    def forward(self, hidden, info: BatchInfo, cache: LayerCache | None = None):
        """hidden: (batch, seq, hidden_size). cache: read and updated.

        dt is clamped to the configuration's limit except while decoding, where one token continues a sequence:
        transformers' behaviour, on which checkpoints with a limit depend.
        """
        normed, squares = self._normed(*self._scanned(hidden, info, cache))
        if squares is None:
            return self.out_proj(normed)
        return self._whole(linear(normed, self.out_proj.weight), squares)

    def _scanned(self, hidden, info, cache):
        """The outputs of the recurrence and the gate, (batch, seq, this rank's channels). Temporaries are freed."""
        batch, seq, _ = hidden.shape
        inner, bc = self.rows["x"], self.rows["B"]
        conv, state = (None, None) if cache is None else cache.read(info.rows)
        z, xBC, dt = self.in_proj(hidden).split([inner, inner + 2 * bc, self.heads], dim=-1)
        xBC = xBC if info.mask is None else xBC * info.mask
        xBC, conv = self.conv(xBC, conv, overwrite=cache is not None)
        xBC = xBC if info.mask is None else xBC * info.mask
        x, B, C = xBC.split([inner, bc, bc], dim=-1)
        dt = F.softplus(dt + self.dt_bias)
        if not info.decoding and self.dt_limit != (0.0, float("inf")):
            dt = dt.clamp(*self.dt_limit)
        B, C = (t.view(batch, seq, self.groups, self.state_size) for t in (B, C))
        x = x.view(batch, seq, self.heads, self.head_dim)
        y, state = ssd(x, dt, self.A_log, B, C, self.D, state, overwrite=cache is not None)
        if cache is not None:
            cache.update(conv, state, info.rows)
        return y.reshape(batch, seq, inner), z

    @property
    def local_norm(self) -> bool:
        """Whether this rank holds all channels of its groups."""
        return self.all_groups >= self.ranks.size

    @property
    def fused_norm(self) -> bool:
        """Whether the sum of squares of the only group is sent in out_proj's all-reduce."""
        return self.ranks.size > 1 and self.all_groups == 1

    def _normed(self, y, z):
        """(norm(y * silu(z)) * weight, None); the norm is over all channels of a group, on all ranks that hold them.

        With `fused_norm`: (the same without the scale of the norm, this rank's sum of squares (batch, seq, 1)).
        """
        local_groups, fused = self.local_norm or self.fused_norm, self.fused_norm
        if local_groups and not torch.is_grad_enabled() and kernels.usable(y, z, self.norm_weight):
            normed = kernels.gated_norm(y, z, self.norm_weight, self.groups, None if fused else self.eps)
            return normed if fused else (normed, None)
        wide = at_least_fp32(self.norm_weight.dtype)
        y = y.to(wide) * F.silu(z.to(wide))
        local = y.view(*y.shape[:-1], self.groups, -1)
        squares = local.square().sum(-1)  # (batch, seq, this rank's groups)
        if not fused:
            squares = squares if self.local_norm else self._sum_of_group(squares)
            scale = torch.rsqrt(squares / self.group_channels + self.eps)
            y = (local * scale.unsqueeze(-1)).view_as(y)
        return self.norm_weight * y.to(self.norm_weight.dtype), squares if fused else None

    def _whole(self, part, squares):
        """With one group: [out_proj's part | sum of squares] in one all-reduce, and then the scale of the norm."""
        out = in_pieces(self._scaled_sum, part, squares)
        return out if self.out_proj.bias is None else out + self.out_proj.bias

    def _scaled_sum(self, part, squares):
        """The sum over the ranks, times the scale of the norm for each token."""
        out, squares = reduce_beside(part.to(squares.dtype), squares, self.ranks)
        return (out * torch.rsqrt(squares / self.group_channels + self.eps)).to(part.dtype)

    def _sum_of_group(self, squares):
        """This rank's sum of squares (batch, seq, 1) -> that of its group, by an all-reduce of G columns."""
        mine = self.ranks.slot(self.all_groups)
        columns = F.pad(squares, (mine, self.all_groups - 1 - mine))
        return sum_over_ranks(columns, self.ranks.group, self.ranks.exact)[..., mine : mine + 1]
