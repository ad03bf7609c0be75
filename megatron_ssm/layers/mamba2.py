"""The Mamba-2 mixer of Mamba-2 and Zamba2, split by head over the tensor-parallel ranks.

Each of T ranks holds 1/T of the heads: their rows of z, x and dt, and the B and C of their groups. With fewer groups G
than ranks, T/G consecutive ranks hold the same B and C and add up their gradients. in_proj computes dt, B and C, so
nothing has to be summed before the scan. The ranks sum the output of out_proj and, if a group of the gated norm spans
several ranks, the sums of squares of the norm:

- G % T = 0: the norm is local. One all-reduce per block.
- G = 1: 1/sqrt(mean square) is one number per token, and multiplying by it commutes with out_proj. So the sum of squares is
  one more column in the all-reduce of out_proj, exact in every format, and the sum is scaled afterwards. One all-reduce.
- 1 < G < T: the sums of squares (G elements per token) are summed before out_proj. Two all-reduces.

docs/concepts/all-reduce-count.md derives this.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron_ssm.configs.config import Config
from megatron_ssm.context.blocks import ContextRanks, halo
from megatron_ssm.context.channel_exchange import ssd_by_heads
from megatron_ssm.context.scans import ssd_over_context
from megatron_ssm.native import kernels
from megatron_ssm.ops.quantized_matrices import QuantizedMatrix
from megatron_ssm.ops.scan import ssd
from megatron_ssm.parallel.layers import ColumnParallelLinear, RowParallelLinear, apply_layer
from megatron_ssm.parallel.operators import in_pieces, reduce_beside, sum_over_ranks
from megatron_ssm.parallel.ranks import Ranks
from megatron_ssm.parallel.sequence_parallel import reduce_scatter_tokens
from sparsefusion.collectives.wire_formats import at_least_fp32

from .cache import BatchInfo, LayerCache, keep_last_inputs
from .low_rank import Adapters, adapter_of
from .mamba1 import Convolution
from .pending_tokens import KeptTokens, PendingTokens


class Mamba2Mixer(nn.Module):
    """The mixer of state-space duality: x (batch, seq, hidden), whole -> the same shape, whole.

    Forward sends the all-reduces above. Backward sends one all-reduce of the gradient of in_proj's input; with fewer groups
    than ranks, one for each tensor that holds B and C (the weights, and biases if there are any, of in_proj and of the
    convolution); and with 1 < groups < ranks one of the gradients of the sums of squares.

    context: the ranks that hold the other tokens of the sequence (None: this rank has all). Then both directions also pass
    the convolution's inputs and states between these ranks, or exchange channels (see `context`).
    """

    lora: Adapters | None
    A_log: nn.Parameter
    D: nn.Parameter
    dt_bias: nn.Parameter

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        context: ContextRanks | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        self.context = context
        self.ranks, wide = ranks, at_least_fp32(dtype)
        self.heads, self.head_dim, self.state_size = config.heads // ranks.size, config.head_dim, config.state_size
        self.groups = max(1, config.groups // ranks.size)
        self.all_groups, self.eps, self.dt_limit = config.groups, config.gated_norm_eps, config.dt_limit
        self.group_channels = config.intermediate_size // config.groups
        self.kernel = config.conv_kernel
        inner, bc = self.heads * self.head_dim, self.groups * self.state_size
        self.rows = {"z": inner, "x": inner, "B": bc, "C": bc, "dt": self.heads}
        shared: dict[str, Any] = dict(shared=("B", "C"), pieces=config.groups) if config.groups < ranks.size else {}
        for name in ("A_log", "D", "dt_bias"):
            self.register_parameter(name, nn.Parameter(torch.empty(self.heads, dtype=wide, device=device)))
        self.norm_weight = nn.Parameter(torch.empty(inner, dtype=dtype, device=device))
        self.in_proj = ColumnParallelLinear(
            config.hidden_size, self.rows, config.use_bias, ranks, dtype, device, **shared
        )
        channels = {name: self.rows[name] for name in "xBC"}
        self.conv = Convolution(channels, config.conv_kernel, config.conv_bias, ranks, dtype, device, **shared)
        self.out_proj = RowParallelLinear(inner, config.hidden_size, config.use_bias, ranks, dtype, device)
        self.register_module("lora", None)

    def new_cache(self, batch: int) -> LayerCache:
        """An empty state of this rank's heads, and empty inputs of its channels, B and C, for `batch` sequences."""
        device, wide = self.D.device, at_least_fp32(self.D.dtype)
        channels = sum(self.rows[name] for name in "xBC")
        conv = torch.zeros(batch, self.kernel - 1, channels, dtype=self.norm_weight.dtype, device=device)
        state = torch.zeros(batch, self.heads, self.state_size, self.head_dim, dtype=wide, device=device)
        return LayerCache(conv, state)

    def forward(self, hidden: torch.Tensor, info: BatchInfo, cache: LayerCache | None = None) -> torch.Tensor:
        """hidden (batch, seq, hidden_size) -> the same shape. cache: of this layer; it is read and updated.

        dt is clamped to the configuration's limits, except while decoding. That is what transformers does, so the logits of
        checkpoints with limits depend on it.
        """
        normed, squares = self._normed(*self._scanned(hidden, info, cache))
        adapter = adapter_of(self.lora, "out_proj")
        if squares is None:
            return apply_layer(self.out_proj, normed, adapter)
        return self._whole(self.out_proj.product(normed, adapter), squares)

    def _scanned(self, hidden, info: BatchInfo, cache: LayerCache | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The output of the scan and the gate z, (batch, seq, this rank's channels) each. Frees its temporaries."""
        inner, bc = self.rows["x"], self.rows["B"]
        conv, state = (None, None) if cache is None else cache.read(info.rows)
        projected = apply_layer(self.in_proj, hidden, adapter_of(self.lora, "in_proj"))
        z, xBC, dt = projected.split([inner, inner + 2 * bc, self.heads], dim=-1)
        if self.context is not None and info.sharding is not None:
            return self._scanned_over_context(xBC, dt, self.context, info, cache), z
        dt = self._step_sizes(dt, info.decoding)
        if cache is not None and info.speculative:
            return self._scanned_speculatively(xBC, dt, info, cache), z
        xBC = xBC if info.mask is None else xBC * info.mask
        xBC, conv = self.conv(xBC, conv, overwrite=cache is not None)
        xBC = xBC if info.mask is None else xBC * info.mask
        x, B, C = self._parts(xBC)
        may_round = isinstance(getattr(self.out_proj, "weight", None), QuantizedMatrix)  # whose products round as well
        y, state = ssd(x, dt, self.A_log, B, C, self.D, state, overwrite=cache is not None, may_round=may_round)
        if cache is not None:
            cache.update(conv, state, info.rows)
        return y.flatten(2), z

    def _scanned_speculatively(self, mixed, dt, info: BatchInfo, cache: LayerCache) -> torch.Tensor:
        """The output of the scan, for tokens that may be taken back; mixed is the input of the convolution."""
        conv, state = cache.read(info.rows)
        x, B, C = self._parts(self.conv(mixed, conv)[0])

        def advance(kept: KeptTokens, state: torch.Tensor) -> torch.Tensor:
            x_, dt_, B_, C_ = (t[:, : kept.longest] for t in (x, dt, B, C))
            dt_ = dt_ if kept.mask is None else dt_ * kept.mask.unsqueeze(-1)  # with dt = 0, the state stays the same
            return ssd(x_, dt_, self.A_log, B_, C_, self.D, state, overwrite=True, one_by_one=True)[1]

        cache.pending = PendingTokens(torch.cat([conv, mixed], dim=1), advance)
        return ssd(x, dt, self.A_log, B, C, self.D, state, one_by_one=True)[0].flatten(2)

    def _scanned_over_context(
        self, mixed: torch.Tensor, dt: torch.Tensor, context: ContextRanks, info: BatchInfo, cache: LayerCache | None
    ) -> torch.Tensor:
        """The output of the scan for this rank's tokens of a sequence that is spread over the context ranks."""
        history, state = (None, None) if cache is None or info.begins else cache.read(info.rows)
        xBC, dt = context.to_blocks(mixed), self._step_sizes(dt)
        xBC, _ = self.conv(xBC, halo(xBC, self.kernel - 1, context, history))
        x, B, C = self._parts(xBC)
        if cache is not None and info.sharding is not None:
            dt = info.sharding.mask_padding(dt)
        inputs = x, context.to_blocks(dt), self.A_log, B, C, self.D, context
        if cache is None and context.exchanges_channels:
            return context.from_blocks(ssd_by_heads(*inputs)).flatten(2)
        y, passed = ssd_over_context(*inputs, state)
        if cache is not None and info.sharding is not None:
            keep_last_inputs(mixed, info.sharding, info.rows, cache)
            cache.state[info.rows] = passed.whole_final().unflatten(2, cache.state.shape[2:])
        return context.from_blocks(y).flatten(2)

    def _parts(self, xBC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x (batch, seq, this rank's heads, head_dim), and B and C (batch, seq, this rank's groups, N)."""
        x, B, C = xBC.split([self.rows[name] for name in "xBC"], dim=-1)
        B, C = (t.unflatten(2, (self.groups, self.state_size)) for t in (B, C))
        return x.unflatten(2, (self.heads, self.head_dim)), B, C

    def _step_sizes(self, dt: torch.Tensor, decoding: bool = False) -> torch.Tensor:
        """softplus(dt + bias), clamped to the configuration's limits, except while decoding."""
        dt = F.softplus(dt + self.dt_bias)
        return dt if decoding or self.dt_limit == (0.0, float("inf")) else dt.clamp(*self.dt_limit)

    @property
    def local_norm(self) -> bool:
        """Whether this rank holds all channels of its groups, so that it normalizes them alone."""
        return self.all_groups >= self.ranks.size

    @property
    def fused_norm(self) -> bool:
        """Whether the sum of squares of the only group is a column in the all-reduce of out_proj."""
        return self.ranks.size > 1 and self.all_groups == 1

    def _normed(self, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(norm(y * silu(z)) * weight, None); the norm is over all channels of a group, on all ranks that hold them.

        With `fused_norm`: (the same without the factor 1/sqrt(mean square), this rank's sum of squares (batch, seq, 1)).
        """
        local_groups, fused = self.local_norm or self.fused_norm, self.fused_norm
        if local_groups and not torch.is_grad_enabled() and kernels.usable(y, z, self.norm_weight):
            return kernels.gated_norm(y, z, self.norm_weight, self.groups, None if fused else self.eps)
        wide = at_least_fp32(self.norm_weight.dtype)
        y = y.to(wide) * F.silu(z.to(wide))
        local = y.view(*y.shape[:-1], self.groups, -1)
        squares = local.square().sum(-1)  # (batch, seq, this rank's groups)
        if not fused:
            squares = squares if self.local_norm else self._sum_of_group(squares)
            scale = torch.rsqrt(squares / self.group_channels + self.eps)
            y = (local * scale.unsqueeze(-1)).view_as(y)
        return self.norm_weight * y.to(self.norm_weight.dtype), squares if fused else None

    def _whole(self, part: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
        """With `fused_norm`: [part of out_proj's output | sum of squares] in one all-reduce, scaled afterwards."""
        if self.ranks.sequence_parallel:
            both = reduce_scatter_tokens(
                torch.cat([part.to(squares.dtype), squares], dim=-1), self.ranks, keep_for_recomputation=True
            )
            out = self._scaled(both[..., :-1], both[..., -1:], part.dtype)
        else:
            out = in_pieces(self._scaled_sum, part, squares)
        return self.out_proj.add_bias(out)

    def _scaled_sum(self, part: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
        """The sum of `part` over the ranks, times 1/sqrt(mean square + eps) of each token."""
        return self._scaled(*reduce_beside(part.to(squares.dtype), squares, self.ranks), part.dtype)

    def _scaled(self, out: torch.Tensor, squares: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """out * 1/sqrt(mean square + eps) of each token."""
        return (out * torch.rsqrt(squares / self.group_channels + self.eps)).to(dtype)

    def _sum_of_group(self, squares: torch.Tensor) -> torch.Tensor:
        """This rank's sum of squares (batch, seq, 1) -> that of its group, by an all-reduce of one column per group."""
        group = self.ranks.piece_index(self.all_groups)
        columns = F.pad(squares, (group, self.all_groups - 1 - group))
        return sum_over_ranks(columns, self.ranks.group, self.ranks.all_reduce_exact_once)[..., group : group + 1]
