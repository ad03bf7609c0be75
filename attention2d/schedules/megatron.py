"""A core attention for Megatron-Core's layers whose sequence is sharded over the context-parallel group.

It imports nothing from Megatron: it only reads attributes of Megatron's configuration and process groups. Megatron shards
sequences in zigzag order (`get_batch_on_this_cp_rank`), so nothing else in the model changes.
`megatron_ssm.integrations.specs` makes the ModuleSpec.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from attention2d.layout.checks import refuse_features
from attention2d.layout.grid import group_size

from .choosing import choose
from .family import USP, AllGather, Attention2D, Ring, Ulysses

Tensor = torch.Tensor
SCHEDULES: dict[str, Callable] = {"p2p": Ring, "all_gather": AllGather, "a2a": Ulysses}
COMMUNICATION_TYPES = (*SCHEDULES, "a2a+p2p", "2d")


class CoreAttention(nn.Module):
    """A core attention without parameters, over this rank's shards of the sequence.

    query (seq, batch, heads, head_dim), key and value (seq, batch, groups, head_dim) -> (seq, batch, heads * head_dim).

    config: Megatron's TransformerConfig. pg_collection: its `cp` is the context-parallel group. cp_comm_type:

    - p2p (the default): `Ring`
    - all_gather: `AllGather`
    - a2a: `Ulysses`
    - a2a+p2p: `USP`, where config.hierarchical_context_parallel_sizes[0] ranks (default: 2) divide the heads
    - 2d: `Attention2D` with the given rows, cols, ulysses and overlap; if none of them is given, what `choose` chooses

    ValueError for sizes that do not fit, and for options of attention that are not supported.
    """

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str,
        attention_dropout: float | None = None, softmax_scale: float | None = None, cp_comm_type: str | None = None,
        pg_collection: Any = None, rows: int | None = None, cols: int | None = None, ulysses: int | None = None,
        overlap: bool | None = None, **others: object,
    ):  # fmt: skip
        super().__init__()
        kind = getattr(config, "softmax_type", "vanilla")
        window = None if config.window_size is None or tuple(config.window_size) == (-1, -1) else config.window_size
        refuse_features(
            window_size=window, qk_clip=getattr(config, "qk_clip", None), softmax_type=None if kind == "vanilla" else kind,
            attention_type=None if attention_type == "self" else attention_type, **others,
        )  # fmt: skip
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.scale, self.mask_type = softmax_scale, attn_mask_type
        group, heads, kv_heads = _group_and_heads(config, pg_collection)
        grid = {
            name: value for name, value in dict(rows=rows, cols=cols, ulysses=ulysses, overlap=overlap).items() if value
        }
        self.schedule = _schedule(cp_comm_type or "p2p", group, heads, kv_heads, config, grid)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, attn_mask_type: Any = None,
        attention_bias: Tensor | None = None, packed_seq_params: Any = None,
    ) -> Tensor:  # fmt: skip
        """Attention of this rank's shards, as the schedule computes it and with what it sends.

        attention_mask is ignored: the mask type says what is seen, as in Transformer Engine's attention.
        """
        mask_type = (attn_mask_type or self.mask_type).name
        # Tensors of other shapes are passed on as they are: the schedule refuses them on every rank.
        q, k, v = (t.transpose(0, 1) if t.dim() == 4 else t for t in (query, key, value))
        out: Any = self.schedule(
            q, k, v, causal=mask_type == "causal", scale=self.scale, attention_bias=attention_bias,
            packed_seq_params=packed_seq_params, attention_dropout=self.dropout if self.training else None,
            attn_mask_type=None if mask_type in ("causal", "no_mask") else mask_type,
        )  # fmt: skip
        return out.transpose(0, 1).flatten(2)  # type: ignore[union-attr]


def _group_and_heads(config, pg_collection):
    """The context-parallel group, and how many query and key/value heads each of its ranks has."""
    group, tensor_group = (getattr(pg_collection, name, None) for name in ("cp", "tp"))
    if group_size(group) != config.context_parallel_size:
        raise ValueError(
            f"context_parallel_size={config.context_parallel_size}, and pg_collection.cp has {group_size(group)} ranks"
        )
    tensor_ranks = group_size(tensor_group)
    return group, config.num_attention_heads // tensor_ranks, max(1, config.num_query_groups // tensor_ranks)


def _schedule(kind, group, heads, kv_heads, config, grid) -> Attention2D:
    """The schedule of a cp_comm_type; grid: the arguments of `Attention2D` that were given."""
    if kind not in COMMUNICATION_TYPES:
        raise ValueError(f"cp_comm_type={kind!r} is none of {', '.join(COMMUNICATION_TYPES)}")
    if kind == "2d":
        return (
            Attention2D(group, **_full_grid(group_size(group), **grid))
            if grid
            else _choose(group, heads, kv_heads, config)
        )
    if grid:
        raise ValueError(f"{', '.join(grid)}: only for cp_comm_type='2d', not for {kind!r}")
    if kind == "a2a+p2p":
        sizes = getattr(config, "hierarchical_context_parallel_sizes", None)
        return USP(group, min(group_size(group), sizes[0] if sizes else 2))
    return SCHEDULES[kind](group)


def _choose(group, heads, kv_heads, config) -> Attention2D:
    """The schedule that sends the fewest bytes per token, whatever the length of the sequence, which is not known yet."""
    itemsize = getattr(getattr(config, "params_dtype", None), "itemsize", 2)
    shape = dict(heads=heads, kv_heads=kv_heads, head_dim=config.kv_channels, seq=2 * group_size(group))
    return choose(group, **shape, itemsize=itemsize)


def _full_grid(ranks, rows=None, cols=None, ulysses=1, overlap=False) -> dict:
    """Fill in rows or cols if only one of them is given; `Attention2D` raises if the product does not fit."""
    if not (rows or cols):
        raise ValueError("cp_comm_type='2d' with ulysses or overlap needs rows or cols as well")
    rows = rows or max(1, ranks // (ulysses * (cols or 1)))
    cols = cols or max(1, ranks // (ulysses * rows))
    return dict(rows=rows, cols=cols, ulysses=ulysses, overlap=overlap)
