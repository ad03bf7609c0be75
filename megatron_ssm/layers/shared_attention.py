"""The shared transformer block of Zamba and Zamba2, split by attention head and MLP channel.

Several layers of a hybrid model use the same block: they share its weights, but have keys and values of their own. The
input is [hidden state | embeddings], 2 * hidden wide and whole on every rank. Attention and MLP follow one another
without residual connections, and the output is whole again. Each use sends two all-reduces, of `hidden` elements per
token each.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron_ssm.configs.config import Config, SharedBlockConfig
from megatron_ssm.context.token_sharding import TokenSharding
from megatron_ssm.ops.matrices import linear
from megatron_ssm.parallel.layers import (
    ColumnParallelLinear,
    Packed,
    Product,
    RMSNorm,
    RowParallelLinear,
    apply_layer,
    is_plain,
    with_adapter,
)
from megatron_ssm.parallel.operators import copy_to_ranks
from megatron_ssm.parallel.ranks import Ranks
from megatron_ssm.parallel.sequence_parallel import all_gathered_tokens, divide_gradient, replicated
from sparsefusion.collectives.wire_formats import at_least_fp32

from .cache import BatchInfo, Cache, LayerCache
from .low_rank import Adapters, adapter_of, adapter_of_parts

ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
}


@dataclass(frozen=True)
class Positions:
    """The positions of the tokens of one call in their sequences; the same for all layers.

    new: (batch, seq) int64, the position of each token; padding is not counted, and has negative positions. longest: the
    most keys that a row has after the call. causal: whether a query sees only the keys up to its own position. mask:
    (batch or 1, 1, seq, keys) bool, True where a query may look; None: `causal` decides alone.
    """

    new: torch.Tensor
    longest: int
    causal: bool
    mask: torch.Tensor | None

    @classmethod
    def of(
        cls, batch: int, seq: int, mask: torch.Tensor | None, cache: Cache | None, device: torch.device
    ) -> "Positions":
        """The positions in a call with `seq` new tokens per row. mask: (batch, seq, 1), 0 at padding; None: no padding."""
        padding = torch.zeros(batch, dtype=torch.int64) if mask is None else (mask == 0).sum((1, 2)).cpu()
        starts = torch.zeros(batch, dtype=torch.int64) if cache is None else cache.lengths[cache.rows]
        longest = seq if cache is None else max((starts + seq - padding).tolist(), default=seq)
        new = (torch.arange(seq) + (starts - padding).unsqueeze(1)).to(device)
        if mask is None and (starts == starts[:1]).all() and (seq == 1 or not starts.any()):
            return cls(new, longest, seq > 1, None)
        keys = new if cache is None else torch.arange(longest, device=device).expand(batch, -1)
        seen = (keys.unsqueeze(1) <= new.clamp(min=0).unsqueeze(2)) & (keys >= 0).unsqueeze(1)  # padding sees token 0
        return cls(new, longest, False, seen.unsqueeze(1))

    @classmethod
    def of_sharded(cls, sharding: TokenSharding, batch: int, cache: Cache | None, device: torch.device) -> "Positions":
        """The positions of this rank's tokens of a chunk that context ranks share."""
        starts = torch.zeros(batch, dtype=torch.int64) if cache is None else cache.lengths[cache.rows]
        new = sharding.positions + starts.unsqueeze(1)
        return cls(new.to(device), max(starts.tolist(), default=0) + sharding.length, True, None)

    @classmethod
    def of_one(cls, new: torch.Tensor, keys: int) -> "Positions":
        """The positions in a call with one token per row, at `new` (batch, 1), which sees itself and the keys before it.

        keys: at least as many as each row has. The host and the GPU exchange no values, so a CUDA graph can capture this.
        """
        seen = torch.arange(keys, device=new.device) <= new.unsqueeze(2)
        return cls(new, keys, False, seen.unsqueeze(1))


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(scale * q k^T) v on one rank, exactly: (batch, seq, heads, head_dim). Sends nothing.

    q: (batch, seq, heads, head_dim). k, v: (batch, keys, kv_heads, head_dim); heads/kv_heads consecutive query heads use the
    same key/value head. causal: a query sees the keys up to its own position, and there are as many keys as queries. mask:
    (batch or 1, 1, seq, keys) bool, True where a query may look.
    """
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2)


def attend_with_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    info: BatchInfo,
    cache: LayerCache | None,
) -> torch.Tensor:
    """`attend` of the tokens of a call to each other and to the keys and values in the cache, to which theirs are added."""
    positions = info.positions
    assert positions is not None, "attention needs the positions of the tokens"
    if cache is not None:
        k, v = cache.append(k, v, positions.new, positions.longest, info.rows, padded=info.mask is not None)
    return attend(q, k, v, positions.causal, scale, positions.mask)


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary position embedding of x (batch, seq, heads, head_dim): the same shape.

    Elements i and i + head_dim/2 are rotated by the angle positions * theta^(-2i/head_dim). positions: (batch, seq); padding
    has position 0. The angles are computed in at least fp32, as in transformers.
    """
    wide, size = at_least_fp32(x.dtype), x.shape[-1]
    frequencies = 1.0 / theta ** (torch.arange(0, size, 2, device=x.device).to(wide) / size)
    angles = positions.clamp(min=0).unsqueeze(-1).to(wide) * frequencies
    cos, sin = (t.to(x.dtype).unsqueeze(2) for t in (angles.cos(), angles.sin()))  # (batch, seq, 1, head_dim/2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Adapter(nn.Module):
    """A low-rank adapter, x down^T up^T, which is added to the output of a column-parallel layer.

    rank: of the adapter. rows: this rank's rows of each field of the layer. downs: the names of the low-rank activations:
    one for each field, or one that all fields use. Every rank has all of `down`; `up` is split like the layer.

    Forward sends nothing. Backward sends one all-reduce of the gradient of the low-rank activations, which makes the
    gradients of `down` and of x whole. So the layer's own all-reduce of x's gradient must not include this one.
    """

    def __init__(
        self,
        in_features: int,
        rank: int,
        downs: Iterable[str],
        rows: Mapping[str, int],
        ranks: Ranks,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        self.ranks, self.rank = ranks, rank
        self.down = Packed(dict.fromkeys(downs, rank), (in_features,), ranks, dtype, device)
        self.up = Packed(rows, (rank,), ranks, dtype, device)
        self.rows = [sum(rows.values())] if len(self.down.sizes) == 1 else list(rows.values())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in_features), whole -> (..., this rank's rows of all fields)."""
        low = copy_to_ranks(linear(x, self.down()), self.ranks.group, self.ranks.all_reduce_exact)
        parts = zip(low.split(self.rank, dim=-1), self.up().split(self.rows), strict=True)
        fields = [linear(part, up) for part, up in parts]
        return fields[0] if len(fields) == 1 else torch.cat(fields, dim=-1)


class SharedBlockInvocation(nn.Module):
    """The parameters of one hybrid layer's own for its use of the shared block: a linear layer, and adapters in Zamba2.

    Every rank has all of the linear layer. idle: {name: shape} of tensors that the checkpoint has and the layer does not
    use; they are kept to be saved again, and get no gradient. lora: low-rank products beside this layer's linear layers, and
    beside those of the shared block when this layer uses it; None: there are none.
    """

    lora: Adapters | None

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        idle: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        shared, hidden = _shared_config(config), config.hidden_size
        where: dict[str, Any] = dict(dtype=dtype, device=device)
        self.linear = nn.Parameter(torch.empty(hidden, hidden, **where))
        self.idle = nn.ParameterDict(
            {name: nn.Parameter(torch.empty(shape, **where), requires_grad=False) for name, shape in idle.items()}
        )
        self.register_module("lora", None)
        self.qkv = self.gate_up = None
        if shared.attention_adapters:
            self.qkv = Adapter(2 * hidden, shared.adapter_rank, "qkv", _qkv_rows(shared, ranks), ranks, **where)
        if shared.adapter_rank:
            self.gate_up = Adapter(hidden, shared.adapter_rank, ("low",), _mlp_rows(shared, ranks), ranks, **where)


def _shared_config(config: Config) -> SharedBlockConfig:
    assert config.shared is not None, "only models with hybrid layers have a shared block"
    return config.shared


def _qkv_rows(shared: SharedBlockConfig, ranks: Ranks) -> dict[str, int]:
    """This rank's rows of the query, key and value projections."""
    heads = {"q": shared.heads, "k": shared.kv_heads, "v": shared.kv_heads}
    return {name: count // ranks.size * shared.head_dim for name, count in heads.items()}


def _mlp_rows(shared: SharedBlockConfig, ranks: Ranks) -> dict[str, int]:
    """This rank's rows of the two projections into the MLP."""
    return dict.fromkeys(("gate", "up"), shared.feed_forward_size // ranks.size)


class SharedBlock(nn.Module):
    """norm -> attention -> norm -> gated MLP, without residual connections. A rank has 1/T of the heads and of the MLP.

    Forward sends two all-reduces (o_proj, down_proj). Backward sends two, of the gradients of the inputs of qkv and gate_up,
    and one for each adapter. core: the attention between the projections, a function with the arguments of
    `attend_with_cache`; its communication comes on top.
    """

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        core: Callable[..., torch.Tensor] = attend_with_cache,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        shared, hidden = _shared_config(config), config.hidden_size
        where: dict[str, Any] = dict(dtype=dtype, device=device)
        self.core, self.ranks = core, ranks
        self.head_dim, self.rope_theta = shared.head_dim, shared.rope_theta
        self.activation = ACTIVATIONS[shared.activation]
        self.rows, self.mlp_rows = _qkv_rows(shared, ranks), _mlp_rows(shared, ranks)
        self.norm = RMSNorm(2 * hidden, config.norm_eps, **where, ranks=ranks)
        self.qkv = ColumnParallelLinear(2 * hidden, self.rows, False, ranks, **where)
        self.o_proj = RowParallelLinear(self.rows["q"], hidden, False, ranks, **where)
        self.mlp_norm = RMSNorm(hidden, config.norm_eps, **where, ranks=ranks)
        self.gate_up = ColumnParallelLinear(hidden, self.mlp_rows, shared.bias, ranks, **where)
        self.down_proj = RowParallelLinear(
            self.mlp_rows["up"], hidden, shared.bias, ranks, **where, keep_for_recomputation=True
        )

    def new_cache(self, batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Zeroed keys and values for one use of the block: (batch, length, this rank's key/value heads, head_dim) each."""
        shape = batch, length, self.rows["k"] // self.head_dim, self.head_dim
        like = self.norm.weight
        return like.new_zeros(shape, requires_grad=False), like.new_zeros(shape, requires_grad=False)

    def forward(
        self,
        x: torch.Tensor,
        embeddings: torch.Tensor,
        use: SharedBlockInvocation,
        info: BatchInfo,
        cache: LayerCache | None = None,
    ) -> torch.Tensor:
        """x, embeddings: (batch, seq, hidden), whole -> the same shape, whole.

        use: of the layer that calls the block. cache: of that layer; its keys and values are read and extended.
        """
        run = self.ranks.recomputation.run  # without the attention itself, which would send keys and values again
        lora = adapter_of(use.lora, "o_proj")
        y = apply_layer(self.o_proj, self._attention(run(self._projected, x, embeddings, use), info, cache), lora)
        return run(self._mlp, y, use)

    def _projected(self, x: torch.Tensor, embeddings: torch.Tensor, use: SharedBlockInvocation) -> torch.Tensor:
        """Queries, keys and values."""
        lora = adapter_of_parts(use.lora, {f"{name}_proj": rows for name, rows in self.rows.items()})
        return _adapted(self.qkv, use.qkv, self.norm(torch.cat([x, embeddings], dim=-1)), lora)

    def _mlp(self, y: torch.Tensor, use: SharedBlockInvocation) -> torch.Tensor:
        parts = {f"{name}_proj": rows for name, rows in self.mlp_rows.items()}
        lora = adapter_of(use.lora, "gate_up_proj") or adapter_of_parts(use.lora, parts)
        gate, up = _adapted(self.gate_up, use.gate_up, self.mlp_norm(y), lora).chunk(2, dim=-1)
        y = apply_layer(self.down_proj, self.activation(gate) * up, adapter_of(use.lora, "down_proj"))
        return with_adapter(linear(y, replicated(use.linear, self.ranks)), adapter_of(use.lora, "linear"), y)

    def _attention(self, qkv: torch.Tensor, info: BatchInfo, cache: LayerCache | None) -> torch.Tensor:
        """(batch, seq, this rank's rows of q, k and v) -> (batch, seq, this rank's heads * head_dim)."""
        positions, parts = info.positions, qkv.split(list(self.rows.values()), dim=-1)
        assert positions is not None, "attention needs the positions of the tokens"
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        if self.rope_theta:
            q, k = (rotate(t, positions.new, self.rope_theta) for t in (q, k))
        return self.core(q, k, v, math.sqrt(2 / self.head_dim), info, cache).flatten(-2)


def _adapted(
    layer: ColumnParallelLinear, adapter: Adapter | None, x: torch.Tensor, lora: Product | None
) -> torch.Tensor:
    """The output of a layer plus that of its adapter; added in place without gradients, unless a hook may have kept it.

    lora: is added to the layer's own product.
    """
    if adapter is None:
        return apply_layer(layer, x, lora)
    if layer.ranks.sequence_parallel:
        with all_gathered_tokens(x, layer.ranks) as whole:
            return layer.product(whole, lora) + adapter(divide_gradient(whole, layer.ranks))
    y, more = apply_layer(layer, x, lora), adapter(x)
    return y + more if torch.is_grad_enabled() or not is_plain(layer, ColumnParallelLinear) else y.add_(more)
