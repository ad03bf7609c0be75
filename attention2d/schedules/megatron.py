"""A core attention for Megatron-Core's layers, whose sequence is sharded over the context-parallel group.

It imports nothing from Megatron: it only reads attributes of Megatron's configuration and process groups. Megatron shards
sequences in zigzag order (`get_batch_on_this_cp_rank`), so nothing else in the model changes.
`megatron_ssm.integrations.specs` makes the ModuleSpec.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from attention2d.layout.attention_arguments import refuse_features
from attention2d.layout.grid import group_size

from .choosing import choose
from .family import USP, AllGather, Attention2D, Ring, Ulysses

Tensor = torch.Tensor
SCHEDULES: dict[str, Callable[[ProcessGroup | None], Attention2D]] = {
    "p2p": Ring,
    "all_gather": AllGather,
    "a2a": Ulysses,
}
COMMUNICATION_TYPES = (*SCHEDULES, "a2a+p2p", "2d")


class CoreAttention(nn.Module):
    """A core attention without parameters, over this rank's shards of the sequence.

    query (seq, batch, heads, head_dim), key and value (seq, batch, groups, head_dim) -> (seq, batch, heads * head_dim).

    The attribute `schedule` follows from `cp_comm_type`:

    - p2p (the default): `Ring`
    - all_gather: `AllGather`
    - a2a: `Ulysses`
    - a2a+p2p: `USP`, where config.hierarchical_context_parallel_sizes[0] ranks (default: 2) divide the heads
    - 2d: `Attention2D` with the given rows, cols, ulysses and overlap; without any of them, the schedule of `choose`

    Args:
        config: Megatron's TransformerConfig.
        attention_dropout, softmax_scale: instead of those of `config`.
        cp_comm_type: the kind of the schedule.
        pg_collection: its `cp` is the context-parallel group, its `tp` the tensor-parallel group.
        rows, cols, ulysses, overlap: of `Attention2D`, for cp_comm_type="2d".

    Raises:
        ValueError: sizes do not fit, or an option of attention is not supported.
    """

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str,
        attention_dropout: float | None = None, softmax_scale: float | None = None, cp_comm_type: str | None = None,
        pg_collection: Any = None, rows: int | None = None, cols: int | None = None, ulysses: int | None = None,
        overlap: bool | None = None, **others: object,
    ) -> None:  # fmt: skip
        super().__init__()
        kind = getattr(config, "softmax_type", "vanilla")
        window = None if config.window_size is None or tuple(config.window_size) == (-1, -1) else config.window_size
        refuse_features(
            window_size=window, qk_clip=getattr(config, "qk_clip", None), softmax_type=None if kind == "vanilla" else kind,
            fp8_dot_product_attention=getattr(config, "fp8_dot_product_attention", None),
            fp8_multi_head_attention=getattr(config, "fp8_multi_head_attention", None),
            attention_type=None if attention_type == "self" else attention_type, **others,
        )  # fmt: skip
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.scale, self.mask_type = softmax_scale, attn_mask_type
        group, heads, kv_heads = _group_and_heads(config, pg_collection)
        grid = dict(rows=rows, cols=cols, ulysses=ulysses, overlap=overlap or None)
        grid = {name: value for name, value in grid.items() if value is not None}
        self.schedule = _schedule(cp_comm_type or "p2p", group, heads, kv_heads, config, grid)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, attn_mask_type: Any = None,
        attention_bias: Tensor | None = None, packed_seq_params: Any = None,
    ) -> Tensor:  # fmt: skip
        """Attention of this rank's shards. Sends what `schedule` sends, in forward and in backward.

        The mask type decides which keys a query sees, as in Transformer Engine's attention. The types padding,
        padding_causal and arbitrary use attention_mask; others ignore it.

        Args:
            attention_mask: of the whole sequence, the same on every rank: (batch or 1, 1, 1 or seq, seq), bool, True where a
                key is hidden. `get_batch_on_this_cp_rank` would shard it: leave it out of that batch.

        Raises:
            ValueError: on every rank, for arguments that the schedule refuses, for dropout during training, attention_bias,
                packed_seq_params, and other mask types.
        """
        mask_type, mask = (attn_mask_type or self.mask_type).name, None
        if mask_type in ("padding", "padding_causal", "arbitrary") and isinstance(attention_mask, Tensor):
            mask, mask_type = ~attention_mask.flatten(0, 1), "causal" if mask_type == "padding_causal" else "no_mask"
        # (batch, seq, heads, head_dim). Other shapes are passed on, because the schedule refuses them on every rank.
        q, k, v = (t.transpose(0, 1) if isinstance(t, Tensor) and t.dim() == 4 else t for t in (query, key, value))
        out: Any = self.schedule(
            q, k, v, causal=mask_type == "causal", scale=self.scale, attention_bias=attention_bias,
            packed_seq_params=packed_seq_params, attention_dropout=self.dropout if self.training else None,
            attn_mask_type=None if mask_type in ("causal", "no_mask") else mask_type, mask=mask,
        )  # fmt: skip
        return out.transpose(0, 1).flatten(2)  # (seq, batch, heads * head_dim)


def _group_and_heads(config: Any, pg_collection: Any) -> tuple[ProcessGroup | None, int, int]:
    """The context-parallel group, and the numbers of query and key/value heads on each of its ranks."""
    group, tensor_group = (getattr(pg_collection, name, None) for name in ("cp", "tp"))
    if group_size(group) != config.context_parallel_size:
        raise ValueError(
            f"context_parallel_size={config.context_parallel_size}, and pg_collection.cp has {group_size(group)} ranks"
        )
    tensor_ranks = group_size(tensor_group)
    return group, config.num_attention_heads // tensor_ranks, max(1, config.num_query_groups // tensor_ranks)


def _schedule(
    kind: str, group: ProcessGroup | None, heads: int, kv_heads: int, config: Any, grid: dict[str, Any]
) -> Attention2D:
    """The schedule for a cp_comm_type. grid: the arguments of `Attention2D` that the caller gave."""
    if kind not in COMMUNICATION_TYPES:
        raise ValueError(f"unknown cp_comm_type {kind!r}: expected {', '.join(COMMUNICATION_TYPES)}")
    if kind == "2d":
        if grid:
            return Attention2D(group, **_full_grid(group_size(group), **grid))
        return _choose(group, heads, kv_heads, config)
    if grid:
        raise ValueError(f"{', '.join(grid)}: only for cp_comm_type='2d', not for {kind!r}")
    if kind == "a2a+p2p":
        sizes = getattr(config, "hierarchical_context_parallel_sizes", None)
        return USP(group, min(group_size(group), sizes[0] if sizes else 2))
    return SCHEDULES[kind](group)


def _choose(group: ProcessGroup | None, heads: int, kv_heads: int, config: Any) -> Attention2D:
    """The schedule that sends the fewest bytes.

    The length of the sequence is not known yet. It does not matter: the bytes of every schedule grow in proportion to it.
    """
    itemsize = getattr(getattr(config, "params_dtype", None), "itemsize", 2)
    shape = dict(heads=heads, kv_heads=kv_heads, head_dim=config.kv_channels, seq=2 * group_size(group))
    return choose(group, **shape, itemsize=itemsize)


def _full_grid(
    ranks: int, rows: int | None = None, cols: int | None = None, ulysses: int = 1, overlap: bool = False
) -> dict[str, Any]:
    """The arguments of `Attention2D`, with rows or cols filled in. `Attention2D` raises if the sizes do not fit."""
    if rows is None and cols is None:
        raise ValueError("cp_comm_type='2d' with ulysses or overlap needs rows or cols as well")
    other = max(1, ranks // max(1, ulysses * (rows or cols or 1)))
    rows, cols = (other if size is None else size for size in (rows, cols))
    return dict(rows=rows, cols=cols, ulysses=ulysses, overlap=overlap)
