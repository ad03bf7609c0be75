"""The shared transformer block of Zamba and Zamba2, split by attention head and MLP channel (ssm.md A4, A5).

Several layers of a hybrid use the same block: the weights are shared, keys and values are not. Its input is the hidden
state beside the original embeddings, 2 x hidden wide and whole on every rank; attention and MLP follow one another
without residuals, and what comes out is whole again: two all-reduces per use, of hidden numbers per token each.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from megatron_ssm.configs.config import Config
from megatron_ssm.ops.matrices import linear
from megatron_ssm.parallel.layers import (
    ColumnParallelLinear,
    Packed,
    Ranks,
    RMSNorm,
    RowParallelLinear,
    copy_to_ranks,
    is_plain,
)
from sparsefusion.collectives.wire_formats import at_least_fp32

from .cache import BatchInfo, Cache, LayerCache

ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
}


@dataclass(frozen=True)
class Positions:
    """Where the tokens of one call stand in their sequences; the same for all layers.

    new: (batch, seq) int64: each token's position, padding not counted and negative. longest: keys a row may have after
    the call. mask: (batch or 1, 1, seq, keys) bool, True where a query may look; None: all it can see by `causal`.
    """

    new: torch.Tensor
    longest: int
    causal: bool
    mask: torch.Tensor | None

    @classmethod
    def of(cls, batch: int, seq: int, mask, cache: Cache | None, device) -> "Positions":
        """Of a call with `seq` new tokens per row; mask: (batch, seq, 1), 0 where a row is padding, or None."""
        padding = torch.zeros(batch, dtype=torch.int64) if mask is None else (mask == 0).sum((1, 2)).cpu()
        starts = torch.zeros(batch, dtype=torch.int64) if cache is None else cache.lengths[cache.rows]
        longest = seq if cache is None else int((starts + seq - padding).max())
        new = (torch.arange(seq) + (starts - padding).unsqueeze(1)).to(device)
        if mask is None and (starts == starts[0]).all() and (seq == 1 or not starts[0]):
            return cls(new, longest, seq > 1, None)
        keys = new if cache is None else torch.arange(longest, device=device).expand(batch, -1)
        seen = (keys.unsqueeze(1) <= new.clamp(min=0).unsqueeze(2)) & (keys >= 0).unsqueeze(1)  # padding sees token 0
        return cls(new, longest, False, seen.unsqueeze(1))

    @classmethod
    def of_one(cls, new, keys: int) -> "Positions":
        """Of one token per row, at `new` (batch, 1), which sees itself and what is before it among `keys` keys.

        keys: at least what the rows have. No number goes to the host or comes from it: a CUDA graph may do this.
        """
        seen = torch.arange(keys, device=new.device) <= new.unsqueeze(2)
        return cls(new, keys, False, seen.unsqueeze(1))


def attend(q, k, v, causal, scale, mask=None):
    """softmax(scale q k^T) v, exactly, on one rank: the plain core attention.

    q: (batch, seq, heads, head_dim); k, v: (batch, keys, key/value heads, head_dim), each serving heads/kv_heads
    neighbouring query heads. causal: keys == seq, and a query sees the keys up to its own. mask: (batch or 1, 1, seq,
    keys) bool, True where a query may look. Returns (batch, seq, heads, head_dim).
    """
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2)


def rotate(x, positions, theta):
    """Rotary position embedding: pairs (i, i + head_dim/2) of x (batch, seq, heads, head_dim) turned by their position.

    positions: (batch, seq); padding counts as 0. Angles are computed in at least fp32, as transformers does.
    """
    wide, size = at_least_fp32(x.dtype), x.shape[-1]
    frequencies = 1.0 / theta ** (torch.arange(0, size, 2, device=x.device).to(wide) / size)
    angles = positions.clamp(min=0).unsqueeze(-1).to(wide) * frequencies
    cos, sin = (t.to(x.dtype).unsqueeze(2) for t in (angles.cos(), angles.sin()))  # (batch, seq, 1, head_dim/2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Adapter(nn.Module):
    """A low-rank addition to a column-parallel layer, one per use of it: x down^T up^T.

    rows: this rank's rows of each field of the layer. downs: the low-rank activations, one for each field, or one for all.
    down is whole on every rank, up is split like the layer. Backward: one all-reduce of the low-rank activations, so
    that down's gradient, and x's, are whole (the layer's own all-reduce of x's gradient must not include this one).
    """

    def __init__(self, in_features, rank: int, downs, rows: dict, ranks: Ranks, dtype=None, device=None):
        super().__init__()
        self.ranks, self.rank = ranks, rank
        self.down = Packed(dict.fromkeys(downs, rank), (in_features,), ranks, dtype, device)
        self.up = Packed(rows, (rank,), ranks, dtype, device)
        self.rows = [sum(rows.values())] if len(downs) == 1 else list(rows.values())

    def forward(self, x):
        """(..., in_features), whole -> (..., this rank's rows of all fields)."""
        low = copy_to_ranks(linear(x, self.down()), self.ranks.group, self.ranks.exact)
        parts = zip(low.split(self.rank, dim=-1), self.up().split(self.rows), strict=True)
        fields = [linear(part, up) for part, up in parts]
        return fields[0] if len(fields) == 1 else torch.cat(fields, dim=-1)


class SharedBlockInvocation(nn.Module):
    """What one hybrid layer has of its own beside the block it shares: adapters, and a linear layer, whole on all ranks.

    idle: {name: shape} of tensors that the checkpoint has and nothing uses; they get no gradient.
    """

    def __init__(self, config: Config, ranks: Ranks, idle: dict, dtype=None, device=None):
        super().__init__()
        shared, hidden = config.shared, config.hidden_size
        where = dict(dtype=dtype, device=device)
        self.linear = nn.Parameter(torch.empty(hidden, hidden, **where))
        self.idle = nn.ParameterDict(
            {name: nn.Parameter(torch.empty(shape, **where), requires_grad=False) for name, shape in idle.items()}
        )
        self.qkv = self.gate_up = None
        if shared.attention_adapters:
            self.qkv = Adapter(2 * hidden, shared.adapter_rank, "qkv", _qkv_rows(config, ranks), ranks, **where)
        if shared.adapter_rank:
            self.gate_up = Adapter(hidden, shared.adapter_rank, ("low",), _mlp_rows(config, ranks), ranks, **where)


def _qkv_rows(config: Config, ranks: Ranks) -> dict:
    shared = config.shared
    heads = {"q": shared.heads, "k": shared.kv_heads, "v": shared.kv_heads}
    return {name: count // ranks.size * shared.head_dim for name, count in heads.items()}


def _mlp_rows(config: Config, ranks: Ranks) -> dict:
    return dict.fromkeys(("gate", "up"), config.shared.feed_forward_size // ranks.size)


class SharedBlock(nn.Module):
    """norm -> attention -> norm -> gated MLP, no residuals; this rank has heads/T attention heads and 1/T of the MLP.

    Forward sends two all-reduces (o_proj, down_proj), backward two of the inputs' gradients and one per adapter.
    `core`: the attention between projections, exchangeable: core(q, k, v, causal=, scale=, mask=), see `attend`.
    """

    def __init__(self, config: Config, ranks: Ranks, dtype=None, device=None):
        super().__init__()
        shared, hidden = config.shared, config.hidden_size
        where = dict(dtype=dtype, device=device)
        self.core = attend
        self.head_dim, self.rope_theta = shared.head_dim, shared.rope_theta
        self.activation = ACTIVATIONS[shared.activation]
        self.rows, mlp = _qkv_rows(config, ranks), _mlp_rows(config, ranks)
        self.norm = RMSNorm(2 * hidden, config.norm_eps, **where)
        self.qkv = ColumnParallelLinear(2 * hidden, self.rows, False, ranks, **where)
        self.o_proj = RowParallelLinear(self.rows["q"], hidden, False, ranks, **where)
        self.mlp_norm = RMSNorm(hidden, config.norm_eps, **where)
        self.gate_up = ColumnParallelLinear(hidden, mlp, shared.bias, ranks, **where)
        self.down_proj = RowParallelLinear(mlp["up"], hidden, shared.bias, ranks, **where)

    def new_cache(self, batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for the keys and values of one use of the block by `batch` sequences: this rank's heads."""
        shape = batch, length, self.rows["k"] // self.head_dim, self.head_dim
        like = self.norm.weight
        return like.new_zeros(shape, requires_grad=False), like.new_zeros(shape, requires_grad=False)

    def forward(self, x, embeddings, use: SharedBlockInvocation, info: BatchInfo, cache: LayerCache | None = None):
        """x, embeddings: (batch, seq, hidden), whole -> the same shape, whole. cache: this use's keys and values."""
        y = self.norm(torch.cat([x, embeddings], dim=-1))
        y = self.o_proj(self._attention(_adapted(self.qkv, use.qkv, y), info, cache))
        gate, up = _adapted(self.gate_up, use.gate_up, self.mlp_norm(y)).chunk(2, dim=-1)
        return linear(self.down_proj(self.activation(gate) * up), use.linear)

    def _attention(self, qkv, info, cache):
        """(batch, seq, this rank's q, k and v rows) -> (batch, seq, this rank's heads * head_dim)."""
        positions, parts = info.positions, qkv.split(list(self.rows.values()), dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        if self.rope_theta:
            q, k = (rotate(t, positions.new, self.rope_theta) for t in (q, k))
        if cache is not None:
            k, v = (t.to(cache.keys.dtype) for t in (k, v))  # autocast's may be narrower
            k, v = cache.append(k, v, positions.new, positions.longest, info.rows, padded=info.mask is not None)
        scale = math.sqrt(2 / self.head_dim)
        out = self.core(q, k, v, causal=positions.causal, scale=scale, mask=positions.mask)
        return out.flatten(-2)


def _adapted(layer, adapter, x):
    """What a layer gives, and its adapter; without gradients added in place, where nobody else may hold it."""
    if adapter is None:
        return layer(x)
    y, more = layer(x), adapter(x)
    return y + more if torch.is_grad_enabled() or not is_plain(layer, ColumnParallelLinear) else y.add_(more)
