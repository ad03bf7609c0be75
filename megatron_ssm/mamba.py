"""The Mamba-1 mixer, split by channel over the tensor-parallel ranks (ssm.md A1; paper, section IV).

Each rank holds I/T of the I inner channels: their rows of in_proj, their convolution, their A, D and dt. Only x_proj,
which mixes all channels into the step size and the B and C that every channel reads, and out_proj cross the ranks: two
all-reduces a block, of R + 2N and of H numbers per token.
"""

import torch
import torch.nn.functional as F
from torch import nn

from .cache import LayerCache
from .config import Config
from .conv import causal_conv
from .layers import ColumnParallelLinear, Packed, Ranks, RowParallelLinear, at_least_fp32, sum_over_ranks
from .scan import selective_scan


class Convolution(nn.Module):
    """The depthwise causal convolution's parameters; `channels` maps each field to this rank's channels (see `Packed`)."""

    def __init__(self, channels: dict, kernel, bias, ranks: Ranks, dtype=None, device=None, shared=(), slots=1):
        super().__init__()
        self.weight = Packed(channels, (1, kernel), ranks, dtype, device, shared, slots)
        self.bias = Packed(channels, (), ranks, dtype, device, shared, slots) if bias else None

    def forward(self, x, history=None):
        """(batch, seq, channels) -> the same, through SiLU, and the inputs to remember: see `causal_conv`."""
        return causal_conv(x, self.weight(), self.bias() if self.bias is not None else None, history)


class MambaMixer(nn.Module):
    """Selective state space block: x (batch, seq, hidden), whole, to the same shape, whole.

    Forward sends two all-reduces (x_proj, out_proj), backward two (x_proj, in_proj's input).
    """

    def __init__(self, config: Config, ranks: Ranks, dtype=None, device=None):
        super().__init__()
        inner, state, rank = config.intermediate_size // ranks.size, config.state_size, config.dt_rank
        wide = at_least_fp32(dtype)
        self.ranks, self.channels, self.splits = ranks, inner, (rank, state, state)
        self.kernel, self.state_size = config.conv_kernel, state
        self.A_log = nn.Parameter(torch.empty(inner, state, dtype=wide, device=device))
        self.D = nn.Parameter(torch.empty(inner, dtype=wide, device=device))
        self.in_proj = ColumnParallelLinear(
            config.hidden_size, {"x": inner, "z": inner}, config.use_bias, ranks, dtype, device
        )
        self.conv = Convolution({"x": inner}, config.conv_kernel, config.conv_bias, ranks, dtype, device)
        self.x_proj = nn.Parameter(torch.empty(rank + 2 * state, inner, dtype=dtype, device=device))
        self.dt_proj = nn.Parameter(torch.empty(inner, rank, dtype=dtype, device=device))
        self.dt_bias = nn.Parameter(torch.empty(inner, dtype=wide, device=device))
        self.out_proj = RowParallelLinear(inner, config.hidden_size, config.use_bias, ranks, dtype, device)

    def new_cache(self, batch: int) -> LayerCache:
        """An empty state of this rank's channels for `batch` sequences."""
        where = dict(device=self.D.device)
        conv = torch.zeros(batch, self.kernel - 1, self.channels, dtype=self.x_proj.dtype, **where)
        return LayerCache(
            conv, torch.zeros(batch, self.state_size, self.channels, dtype=at_least_fp32(self.D.dtype), **where)
        )

    def forward(self, hidden, mask=None, cache: LayerCache | None = None, first: bool = True):
        """hidden: (batch, seq, hidden_size). mask: (batch, seq, 1), 0 where a row is padding. cache: read and updated."""
        x, z = self.in_proj(hidden).chunk(2, dim=-1)
        x = x if mask is None else x * mask
        x, conv = self.conv(x, None if cache is None else cache.conv)
        x = x if mask is None else x * mask
        parameters = sum_over_ranks(F.linear(x, self.x_proj), self.ranks.group, self.ranks.exact)
        dt, B, C = parameters.split(self.splits, dim=-1)
        dt = F.softplus(F.linear(dt, self.dt_proj) + self.dt_bias)
        y, state = selective_scan(x, dt, -torch.exp(self.A_log), B, C, self.D, None if cache is None else cache.state)
        if cache is not None:
            cache.update(conv, state)
        return self.out_proj(y * F.silu(z))
