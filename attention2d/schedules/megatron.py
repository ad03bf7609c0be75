"""A core attention for Megatron-Core's layers, whose sequence is spread over the context-parallel group.

It imports nothing of Megatron: its configuration and groups are told apart by their names. Megatron's own shards are in
zigzag order (`get_batch_on_this_cp_rank`), so nothing else changes; `megatron_ssm.integrations.specs` has its ModuleSpec.
"""

from torch import nn

from attention2d.layout.checks import refuse
from attention2d.layout.grid import size_of

from .choosing import choose
from .family import USP, AllGather, Attention2D, Ring, Ulysses

COMMUNICATION = ("p2p", "all_gather", "a2a", "a2a+p2p", "2d")


class CoreAttention(nn.Module):
    """query (seq, batch, heads, head_dim), key and value (seq, batch, groups, head_dim) -> (seq, batch, heads * head_dim).

    All of them this rank's shards; without parameters. config: Megatron's TransformerConfig. cp_comm_type: p2p (`Ring`;
    also None), all_gather, a2a (`Ulysses`), a2a+p2p (`USP`, with the first of config.hierarchical_context_parallel_sizes
    ranks that share heads, or 2) or 2d (`Attention2D`, with rows or cols, or both, and ulysses and overlap; without any of
    them what `choose` chooses). pg_collection: its `cp` is the group. ValueError: sizes that do not fit; what it does not
    compute.
    """

    def __init__(
        self, config, layer_number, attn_mask_type, attention_type, attention_dropout=None, softmax_scale=None,
        cp_comm_type=None, pg_collection=None, rows=None, cols=None, ulysses=None, overlap=None, **others,
    ):  # fmt: skip
        super().__init__()
        kind = getattr(config, "softmax_type", "vanilla")
        window = None if config.window_size is None or tuple(config.window_size) == (-1, -1) else config.window_size
        refuse(
            window_size=window, qk_clip=getattr(config, "qk_clip", None), softmax_type=None if kind == "vanilla" else kind,
            attention_type=None if attention_type == "self" else attention_type, **others,
        )  # fmt: skip
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.scale, self.mask_type = softmax_scale, attn_mask_type
        group, heads, kv_heads = _shares(config, pg_collection)
        point = {
            name: value for name, value in dict(rows=rows, cols=cols, ulysses=ulysses, overlap=overlap).items() if value
        }
        self.schedule = _schedule(cp_comm_type or "p2p", group, heads, kv_heads, config, point)

    def forward(
        self, query, key, value, attention_mask=None, attn_mask_type=None, attention_bias=None, packed_seq_params=None
    ):
        """attention_mask: not looked at; the mask type says what is seen, as in Transformer Engine's."""
        mask_type = (attn_mask_type or self.mask_type).name
        q, k, v = (t.transpose(0, 1) for t in (query, key, value))
        out = self.schedule(
            q, k, v, causal=mask_type == "causal", scale=self.scale, attention_bias=attention_bias,
            packed_seq_params=packed_seq_params, attention_dropout=self.dropout if self.training else None,
            attn_mask_type=None if mask_type in ("causal", "no_mask") else mask_type,
        )  # fmt: skip
        return out.transpose(0, 1).flatten(2)


def _shares(config, pg_collection):
    """The context-parallel group, and how many query and key/value heads each of its ranks has."""
    group, ranks = (getattr(pg_collection, name, None) for name in ("cp", "tp"))
    if size_of(group) != config.context_parallel_size:
        raise ValueError(
            f"context_parallel_size={config.context_parallel_size}, and pg_collection.cp has {size_of(group)} ranks"
        )
    shared = size_of(ranks)
    return group, config.num_attention_heads // shared, max(1, config.num_query_groups // shared)


def _schedule(kind, group, heads, kv_heads, config, point):
    """The point of the family that a cp_comm_type stands for."""
    if kind not in COMMUNICATION:
        raise ValueError(f"cp_comm_type={kind!r} is none of {', '.join(COMMUNICATION)}")
    if kind == "2d":
        if point:
            return Attention2D(group, **_grid(size_of(group), **point))
        itemsize = getattr(getattr(config, "params_dtype", None), "itemsize", 2)
        return choose(
            group,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=config.kv_channels,
            seq=2 * size_of(group),
            itemsize=itemsize,
        )
    if point:
        raise ValueError(f"{', '.join(point)}: of cp_comm_type='2d', not of {kind!r}")
    if kind == "a2a+p2p":
        sizes = getattr(config, "hierarchical_context_parallel_sizes", None)
        return USP(group, min(size_of(group), sizes[0] if sizes else 2))
    return {"p2p": Ring, "all_gather": AllGather, "a2a": Ulysses}[kind](group)


def _grid(ranks, rows=None, cols=None, ulysses=1, overlap=False) -> dict:
    """With the rows or columns that are not given; `Attention2D` says if they do not divide."""
    if not (rows or cols):
        raise ValueError("cp_comm_type='2d' with ulysses or overlap needs rows or cols as well")
    rows = rows or max(1, ranks // (ulysses * (cols or 1)))
    cols = cols or max(1, ranks // (ulysses * rows))
    return dict(rows=rows, cols=cols, ulysses=ulysses, overlap=overlap)
