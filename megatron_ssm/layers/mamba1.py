"""The Mamba-1 mixer of Mamba, Falcon-Mamba and Zamba, split by channel over the tensor-parallel ranks.

Each of T ranks holds I/T of the I inner channels: their rows of in_proj, their convolution, their A, D and dt. Two
projections mix channels, so their outputs are summed over the ranks: x_proj, whose output (dt, B and C) every channel reads,
and out_proj. That is two all-reduces per block, of R + 2N and of H elements per token, with dt of rank R, N states per
channel and hidden size H. docs/concepts/splitting-an-ssm.md describes each step.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from megatron_ssm.configs.config import Config
from megatron_ssm.context.blocks import ContextRanks, halo
from megatron_ssm.context.channel_exchange import selective_scan_by_channels
from megatron_ssm.context.scans import NO_STEP, ScanInputs, selective_scan_over_context
from megatron_ssm.context.token_sharding import TokenSharding
from megatron_ssm.ops import cuda_kernels
from megatron_ssm.ops.convolution import causal_conv
from megatron_ssm.ops.matrices import linear
from megatron_ssm.parallel.layers import (
    ColumnParallelLinear,
    Packed,
    RowParallelLinear,
    apply_layer,
    is_plain,
    rms_norm,
    with_adapter,
)
from megatron_ssm.parallel.operators import sum_over_ranks
from megatron_ssm.parallel.ranks import Ranks
from sparsefusion.collectives.wire_formats import at_least_fp32

from .cache import BatchInfo, LayerCache, keep_last_inputs
from .low_rank import Adapters, adapter_of
from .pending_tokens import KeptTokens, PendingTokens


class Convolution(nn.Module):
    """The depthwise causal convolution over this rank's channels, followed by SiLU.

    channels: this rank's number of channels of each field. kernel: the number of taps K. shared, pieces: see `Packed`.
    """

    def __init__(
        self,
        channels: Mapping[str, int],
        kernel: int,
        bias: bool,
        ranks: Ranks,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        shared: Iterable[str] = (),
        pieces: int = 1,
    ):
        super().__init__()
        self.weight = Packed(channels, (1, kernel), ranks, dtype, device, shared, pieces)
        self.bias = Packed(channels, (), ranks, dtype, device, shared, pieces) if bias else None

    def forward(
        self, x: torch.Tensor, history: torch.Tensor | None = None, overwrite: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x (batch, seq, channels) -> the same shape, and the last K-1 inputs (batch, K-1, channels).

        history: the K-1 inputs before x (None: zeros). overwrite: whether history may be overwritten; see `causal_conv`.
        """
        return causal_conv(x, *self.tensors(), history, overwrite)

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """weight (channels, 1, K) and bias (channels,) or None, of all fields."""
        return self.weight(), None if self.bias is None else self.bias()


class MambaMixer(nn.Module):
    """The selective state-space mixer: x (batch, seq, hidden), whole -> the same shape, whole.

    Falcon-Mamba normalizes dt, B and C after their sum, the same on every rank, so nothing more is sent. Zamba's channels
    form heads with an x_proj each. A rank with whole heads needs no sum there; with more ranks than heads, the ranks that
    hold the same head (`head_ranks`) sum among themselves.

    Forward sends the all-reduce of out_proj and, if there are fewer heads than ranks, that of x_proj. Backward sends the
    all-reduce of the gradient of in_proj's input and, if forward does, that of x_proj's output.

    context: the ranks that hold the other tokens of the sequence (None: this rank has all). Then both directions also pass
    the convolution's inputs and states between these ranks, or exchange channels (see `context`).
    """

    lora: Adapters | None

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        head_ranks: Ranks,
        context: ContextRanks | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        self.context = context
        inner, state, rank = config.intermediate_size // ranks.size, config.state_size, config.dt_rank
        wide = at_least_fp32(dtype)
        self.head_ranks, self.channels, self.splits = head_ranks, inner, (rank, state, state)
        self.heads = max(1, config.heads // ranks.size)
        self.inner_norm_eps = config.inner_norm_eps
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
        self.register_module("lora", None)

    def new_cache(self, batch: int) -> LayerCache:
        """An empty state of this rank's channels for `batch` sequences."""
        device, wide = self.D.device, at_least_fp32(self.D.dtype)
        dtype = self.conv.weight.fields[0].dtype
        conv = torch.zeros(batch, self.kernel - 1, self.channels, dtype=dtype, device=device)
        return LayerCache(conv, torch.zeros(batch, self.state_size, self.channels, dtype=wide, device=device))

    def forward(self, hidden: torch.Tensor, info: BatchInfo, cache: LayerCache | None = None) -> torch.Tensor:
        """hidden (batch, seq, hidden_size) -> the same shape. cache: of this layer; it is read and updated."""
        if self.context is not None and info.sharding is not None:
            y = self._gated_over_context(hidden, self.context, info, cache)
        else:
            y = self._gated(hidden, info, cache)
        return apply_layer(self.out_proj, y, adapter_of(self.lora, "out_proj"))

    def _gated(self, hidden, info: BatchInfo, cache: LayerCache | None) -> torch.Tensor:
        """The input of out_proj, (batch, seq, this rank's channels). Its temporaries are freed when it returns."""
        conv, state = (None, None) if cache is None else cache.read(info.rows)
        state = None if info.begins and cuda_kernels.on_cuda(hidden) else state  # mamba-ssm's scan starts from zeros
        x, z = self._projected(hidden).chunk(2, dim=-1)
        if cache is not None and info.speculative:
            return self._gated_speculatively(x, z, info, cache)
        x = x if info.mask is None else x * info.mask
        x, conv = self.conv(x, conv, overwrite=cache is not None)
        x = x if info.mask is None else x * info.mask
        heads = self._head_slices()
        scans = [self._scan(x[..., h], z[..., h], h, None if state is None else state[..., h]) for h in heads]
        y, state = map(_side_by_side, zip(*scans, strict=True))
        if cache is not None:
            cache.update(conv, state, info.rows)
        return y

    def _gated_speculatively(self, mixed, z, info: BatchInfo, cache: LayerCache) -> torch.Tensor:
        """`_gated` of the input of the convolution and the gate, for tokens that may be taken back."""
        conv, state = cache.read(info.rows)
        x, _ = self.conv(mixed, conv)
        heads = self._head_slices()
        inputs = [self._scan_inputs(x[..., h], z[..., h], h) for h in heads]

        def advance(kept: KeptTokens, state: torch.Tensor) -> torch.Tensor:
            first = (each.first(kept.longest, kept.mask) for each in inputs)
            return _side_by_side(
                [each.scan(state[..., h], overwrite=True)[1] for each, h in zip(first, heads, strict=True)]
            )

        cache.pending = PendingTokens(torch.cat([conv, mixed], dim=1), advance)
        return _side_by_side([each.scan(state[..., h])[0] for each, h in zip(inputs, heads, strict=True)])

    def _gated_over_context(
        self, hidden: torch.Tensor, context: ContextRanks, info: BatchInfo, cache: LayerCache | None
    ) -> torch.Tensor:
        """`_gated` of this rank's tokens of a sequence that is spread over the context ranks."""
        history, state = (None, None) if cache is None or info.begins else cache.read(info.rows)
        mixed, z = self._projected(hidden).chunk(2, dim=-1)
        x = context.to_blocks(mixed)
        x, _ = self.conv(x, halo(x, self.kernel - 1, context, history))
        sharding = None if cache is None else info.sharding  # without a cache, nobody reads the final state
        inputs = [self._scan_inputs(x[..., h], context.to_blocks(z)[..., h], h, sharding) for h in self._head_slices()]
        if cache is None and context.exchanges_channels:
            return context.from_blocks(selective_scan_by_channels(inputs, context))
        y, passed = selective_scan_over_context(inputs, context, state)
        if cache is not None and info.sharding is not None:
            keep_last_inputs(mixed, info.sharding, info.rows, cache)
            cache.state[info.rows] = passed.whole_final().transpose(1, 2)
        return context.from_blocks(y)

    def _projected(self, hidden: torch.Tensor) -> torch.Tensor:
        """[x | z], (batch, seq, 2 * this rank's channels)."""
        return apply_layer(self.in_proj, hidden, adapter_of(self.lora, "in_proj"))

    def _head_slices(self) -> list[slice]:
        """The channels of each head on this rank."""
        width = self.channels // self.heads
        return [slice(h * width, (h + 1) * width) for h in range(self.heads)] if self.heads > 1 else [slice(None)]

    def _sum(self, parameters: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks of their parts of [dt | B | C] (..., R + 2N); in Falcon-Mamba, each is then normalized."""
        parameters = sum_over_ranks(parameters, self.head_ranks.group, self.head_ranks.all_reduce_exact_once)
        if self.inner_norm_eps is None:
            return parameters
        parts = (rms_norm(t, self.inner_norm_eps).to(t.dtype) for t in parameters.split(self.splits, dim=-1))
        return torch.cat(list(parts), dim=-1)

    def _scan(self, x, z, head: slice, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The gated output and the next state of one head's channels (batch, seq, width). Its temporaries are freed.

        A state from a cache is overwritten, and so is x, the output of the convolution, unless a hook may have kept it.
        """
        return self._scan_inputs(x, z, head).scan(state, state is not None, is_plain(self.conv, Convolution))

    def _scan_inputs(
        self, x: torch.Tensor, z: torch.Tensor, head: slice, sharding: TokenSharding | None = None
    ) -> ScanInputs:
        """x_proj and dt_proj of one head's channels (batch, seq, width), and what else its scan reads.

        sharding: whose padding does not change the state.
        """
        parameters = linear(x, self.x_proj[:, head] if self.heads > 1 else self.x_proj)
        parameters = self._sum(with_adapter(parameters, adapter_of(self.lora, "x_proj"), x))
        low, B, C = parameters.split(self.splits, dim=-1)
        dt = with_adapter(linear(low, self.dt_proj[head]), adapter_of(self.lora, "dt_proj"), low)
        if sharding is not None and self.context is not None:
            dt = self.context.to_blocks(sharding.mask_padding(self.context.from_blocks(dt), NO_STEP))
        return ScanInputs(x, dt, self.A_log[head], B, C, self.D[head], z, self.dt_bias[head])


def _side_by_side(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The channels of several heads in one tensor; that of a single head is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=-1)
