"""The alternative to passing states: each context rank receives all tokens of some channels, and returns their outputs.

This is what Megatron-Core does for Mamba layers, and Ulysses for attention. Its bytes grow with the length of the
sequence, those of `scans` do not; for short sequences they are fewer. The gate z and the norm are computed where the tokens
are, so they are not sent. All channels read B and C, so every rank receives them whole; of Mamba-2's groups, it receives
those that its heads use.
"""

import torch

from megatron_ssm.ops.scan import selective_scan, ssd
from megatron_ssm.parallel.operators import differentiable
from sparsefusion.collectives import counted

from .blocks import ContextRanks
from .state_passing import ChannelPartition


def _tokens_to_channels(x, partition):
    """(batch, tokens of this rank, channels, n) -> (batch, all tokens in order, own channels, n); backward the other way."""
    return differentiable(x, lambda t: _to_channels(t, partition), lambda grad: _to_tokens(grad, partition))


def _channels_to_tokens(y, partition):
    """The inverse of `_tokens_to_channels`."""
    return differentiable(y, lambda t: _to_tokens(t, partition), lambda grad: _to_channels(grad, partition))


def _gather_tokens(x, context):
    """(batch, tokens of this rank, ...) -> (batch, all tokens in order, ...); backward sums the ranks' gradients."""

    def gather(x):
        return _in_order(counted.all_gather(x, context.group, context.counter), context)

    def sum_own(grad):
        blocks = grad.unflatten(1, (context.blocks, -1))
        rows = [blocks[:, list(context.blocks_of_rank(rank))].flatten(1, 2) for rank in range(context.size)]
        return counted.reduce_scatter(torch.stack(rows), context.group, context.counter)

    return differentiable(x, gather, sum_own)


def _in_order(parts, context):
    """(ranks, batch, tokens of a rank, ...) -> (batch, all tokens in order, ...)."""
    blocks = parts.unflatten(2, (context.blocks_per_rank, -1))
    owners = [context.rank_of_block(block) for block in range(context.blocks)]
    return torch.cat([blocks[rank, :, place] for rank, place in owners], dim=1)


def _to_channels(x, partition):
    # (batch, blocks of a rank, channels, tokens, n), and then (all blocks, batch, own channels, tokens, n)
    blocks = x.unflatten(1, (partition.context.blocks_per_rank, -1)).transpose(2, 3)
    whole = partition.blocks_to_channels(blocks.flatten(3)).unflatten(3, (-1, x.shape[3]))
    return whole.permute(1, 0, 3, 2, 4).flatten(1, 2)


def _to_tokens(y, partition):
    whole = y.unflatten(1, (partition.context.blocks, -1)).permute(1, 0, 3, 2, 4)
    blocks = partition.channels_to_blocks(whole.flatten(3)).unflatten(3, (-1, y.shape[3]))
    return blocks.transpose(2, 3).flatten(1, 2)


def selective_scan_by_channels(
    x: torch.Tensor,
    dt: torch.Tensor,
    A_log: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor | None,
    context: ContextRanks,
) -> torch.Tensor:
    """`ops.scan.selective_scan` without a gate: (batch, tokens of this rank, channels), like x.

    x, dt: like the result; B, C: (batch, tokens of this rank, N). Forward sends 3 numbers per channel and token, to all
    ranks together, and 2N per token to each; backward sends as many.
    """
    partition = ChannelPartition(x.shape[2], context)
    packed = _tokens_to_channels(torch.stack([x, dt.to(x.dtype)], dim=-1), partition)
    B, C = _gather_tokens(torch.cat([B, C], dim=-1), context).chunk(2, dim=-1)
    own = partition.own
    bias = None if dt_bias is None else dt_bias[own]
    y, _ = selective_scan(packed[..., 0], packed[..., 1], A_log[own], B, C, D[own], None, bias)
    return _channels_to_tokens(y.unsqueeze(-1), partition).squeeze(-1)


def ssd_by_heads(
    x: torch.Tensor,
    dt: torch.Tensor,
    A_log: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    context: ContextRanks,
) -> torch.Tensor:
    """`ops.scan.ssd` in which each context rank computes some heads: (batch, tokens of this rank, heads, head_dim), like x.

    dt: (batch, tokens of this rank, heads); B, C: (batch, tokens of this rank, groups, N). Forward sends 2 * head_dim + 1
    numbers per head and token, to all ranks together, and 2N per group and token: to all ranks together if the groups divide
    over the ranks, and to each of them otherwise. Backward sends as many.
    """
    heads, groups = x.shape[2], B.shape[2]
    partition = ChannelPartition(heads, context)
    packed = _tokens_to_channels(torch.cat([x, dt.unsqueeze(-1).to(x.dtype)], dim=-1), partition)
    both = torch.cat([B, C], dim=-1)
    if groups % context.size == 0:
        both = _tokens_to_channels(both, ChannelPartition(groups, context))
    else:
        group_of_head = torch.arange(heads, device=x.device)[partition.own] // (heads // groups)
        both = _gather_tokens(both, context)[:, :, group_of_head]
    B, C = both.chunk(2, dim=-1)
    x, dt = packed[..., :-1], packed[..., -1].to(A_log.dtype)
    y, _ = ssd(x, dt, A_log[partition.own], B, C, D[partition.own])
    return _channels_to_tokens(y, partition)
