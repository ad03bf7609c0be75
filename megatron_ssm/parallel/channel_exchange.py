"""The alternative to passing states: each context rank receives all tokens of some channels, and returns their outputs.

Megatron-Core does this for Mamba layers, and Ulysses for attention. Its bytes grow with the length of the sequence, unlike
those of `scans`; for short sequences they are fewer. The gate z and the norm are computed before and after the exchange, so
they are not sent. If the groups of channels that share B and C divide over the ranks, a rank receives B and C of its groups,
otherwise those of all groups. Tensors are in blocks, as in `scans`.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from commfabric.collectives import counted
from megatron_ssm.kernels.gated_delta import gated_delta
from megatron_ssm.kernels.scan import selective_scan, ssd

from .blocks import ContextRanks
from .operators import differentiable
from .scans import ScanInputs
from .state_passing import ChannelPartition


def _tokens_to_channels(x, partition):
    """(batch * blocks, block length, channels, n) -> (batch, all tokens in order, own channels, n), and back in backward."""
    return _exchanged(x, partition, _to_channels, _to_tokens)


def _channels_to_tokens(y, partition):
    return _exchanged(y, partition, _to_tokens, _to_channels)


def _exchanged(x, partition, exchange, transpose):
    once = partition.context.recomputation.communicate_once
    return differentiable(x, lambda t: once(lambda: exchange(t, partition)), lambda grad: transpose(grad, partition))


def _gather_tokens(x, context):
    """(batch * blocks, block length, ...) -> (batch, all tokens in order, ...); backward sums the ranks' gradients."""

    def gather(x):
        parts = counted.all_gather(x, context.group, context.counter).unflatten(1, (-1, context.blocks_per_rank))
        owners = [context.rank_of_block(block) for block in range(context.blocks)]
        return torch.cat([parts[rank, :, place] for rank, place in owners], dim=1)

    def sum_own(grad):
        blocks = grad.unflatten(1, (context.blocks, -1))
        rows = [blocks[:, list(context.blocks_of_rank(rank))].flatten(0, 1) for rank in range(context.size)]
        return counted.reduce_scatter(torch.stack(rows), context.group, context.counter)

    return differentiable(x, lambda t: context.recomputation.communicate_once(lambda: gather(t)), sum_own)


def _to_channels(x, partition):
    # -> (batch, blocks of a rank, channels, tokens, n) -> (all blocks, batch, own channels, tokens, n)
    blocks = x.unflatten(0, (-1, partition.context.blocks_per_rank)).transpose(2, 3)
    whole = partition.blocks_to_channels(blocks.flatten(3)).unflatten(3, (-1, x.shape[3]))
    return whole.permute(1, 0, 3, 2, 4).flatten(1, 2)


def _to_tokens(y, partition):
    whole = y.unflatten(1, (partition.context.blocks, -1)).permute(1, 0, 3, 2, 4)
    blocks = partition.channels_to_blocks(whole.flatten(3)).unflatten(3, (-1, y.shape[3]))
    return blocks.transpose(2, 3).flatten(0, 1)


def _own_channels(x, dt, partition):
    """x (batch * blocks, block length, channels, n) and dt (without n) -> all tokens in order, of this rank's channels.

    They are in one message if they have the same dtype.
    """
    if x.dtype != dt.dtype:
        return _tokens_to_channels(x, partition), _tokens_to_channels(dt.unsqueeze(-1), partition).squeeze(-1)
    packed = _tokens_to_channels(torch.cat([x, dt.unsqueeze(-1)], dim=-1), partition)
    return packed[..., :-1], packed[..., -1]


def _own_groups(B, C, partition):
    """(B and C of the groups of this rank's channels, both (batch, all tokens, own groups, N); the group of each channel).

    B, C: (batch * blocks, block length, groups, N). A group consists of consecutive channels.
    """
    groups, context, both = B.shape[2], partition.context, torch.cat([B, C], dim=-1)
    group_of_channel = torch.arange(partition.count)[partition.own] // (partition.count // groups)
    first, last = int(group_of_channel[0]), int(group_of_channel[-1])
    if groups % context.size == 0:
        both = _tokens_to_channels(both, ChannelPartition(groups, context))
    else:
        both = _gather_tokens(both, context)[:, :, first : last + 1]
    return *both.chunk(2, dim=-1), group_of_channel - first


def selective_scan_by_channels(heads: Sequence[ScanInputs], context: ContextRanks) -> torch.Tensor:
    """`scans.selective_scan_over_context`, with the channels split over the context ranks: y, like x of all heads.

    There must be at least as many channels as ranks. Forward sends 3 elements per channel and token, in total to all ranks,
    and 2N per head and token: in total if the heads divide over the ranks, otherwise to each rank. Backward sends as many.
    """
    x, dt, z = (torch.cat(parts, dim=-1) for parts in zip(*((head.x, head.dt, head.z) for head in heads), strict=True))
    B, C = (torch.stack(parts, dim=2) for parts in zip(*((head.B, head.C) for head in heads), strict=True))
    partition = ChannelPartition(x.shape[2], context)
    x, dt = _own_channels(x.unsqueeze(-1), dt, partition)
    B, C, head_of_channel = _own_groups(B, C, partition)
    widths = head_of_channel.bincount().tolist()
    own = [torch.cat(parts)[partition.own].split(widths) for parts in zip(*map(_parameters, heads), strict=True)]
    outputs = [
        selective_scan(x, dt, A_log, B[:, :, index], C[:, :, index], D, None, dt_bias)[0]
        for index, (x, dt, A_log, D, dt_bias) in enumerate(
            zip(x.squeeze(-1).split(widths, -1), dt.split(widths, -1), *own, strict=True)
        )
    ]
    return _channels_to_tokens(torch.cat(outputs, dim=-1).unsqueeze(-1), partition).squeeze(-1) * F.silu(z)


def _parameters(head):
    return head.A_log, head.D, head.dt_bias


def ssd_by_heads(
    x: torch.Tensor,
    dt: torch.Tensor,
    A_log: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    context: ContextRanks,
) -> torch.Tensor:
    """`scans.ssd_over_context`, with the heads split over the context ranks: y, like x.

    There must be at least as many heads as ranks. Forward sends 2 * head_dim + 1 elements per head and token, in total
    to all
    ranks, and 2N per group and token: in total if the groups divide over the ranks, otherwise to each rank. Backward
    sends as many.
    """
    partition = ChannelPartition(x.shape[2], context)
    x, dt = _own_channels(x, dt, partition)
    B, C, group = _own_groups(B, C, partition)
    if len(set(group.bincount().tolist())) > 1:  # the recurrence needs groups of equal size
        B, C = (t[:, :, group.to(t.device)] for t in (B, C))
    y, _ = ssd(x, dt, A_log[partition.own], B, C, D[partition.own])
    return _channels_to_tokens(y, partition)


def gated_delta_by_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, context: ContextRanks
) -> torch.Tensor:
    """`scans.gated_delta_over_context`, with the value heads split over the context ranks: y, like v.

    There must be at least as many value heads as ranks. Forward sends 2 V + 2 elements per value head and token, and 2 K per
    key head and token, as `ssd_by_heads` does. Backward sends as many.
    """
    partition = ChannelPartition(v.shape[2], context)
    rates = torch.stack([g, beta], dim=-1)
    if rates.dtype == v.dtype:
        v, rates = _tokens_to_channels(torch.cat([v, rates], dim=-1), partition).split([v.shape[-1], 2], dim=-1)
    else:
        v, rates = _tokens_to_channels(v, partition), _tokens_to_channels(rates, partition)
    k, q, group = _own_groups(k, q, partition)
    if len(set(group.bincount().tolist())) > 1:  # the recurrence needs groups of equal size
        k, q = (t[:, :, group.to(t.device)] for t in (k, q))
    y, _ = gated_delta(q, k, v, *rates.unbind(-1))
    return _channels_to_tokens(y, partition)
