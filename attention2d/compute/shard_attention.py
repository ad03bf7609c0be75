"""Attention of one rank's shard, forward and backward: divide heads within the cell, attend on the grid, gather heads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from attention2d.layout import token_order as orders
from attention2d.layout.grid import Grid
from sparsefusion.collectives.counted import Counter

from .axis import Axis
from .heads import gather_heads, scatter_heads
from .passes import GridAttention

Tensor = torch.Tensor


class GridSchedule(Protocol):
    """What `ShardAttention.of` reads of a schedule (`attention2d.Attention2D`)."""

    group: ProcessGroup | None
    counter: Counter
    grid: Grid
    order: str
    overlap: bool
    transpose: bool


@dataclass(frozen=True)
class ShardAttention:
    """What this rank computes and sends for shards of one length.

    cell: the ranks of its cell, which divide the heads. streamed: chunks travel while others are attended. kv_to, kv_from:
    the rank to which it first sends its keys and values, and the one from which it receives those that it keeps instead;
    both are this rank itself unless the paper's transpose is asked for.
    """

    cell: Axis
    attention: GridAttention
    streamed: bool
    kv_to: int
    kv_from: int

    @classmethod
    def of(cls, schedule: GridSchedule, local: int, seq: int, causal: bool, scale: float) -> "ShardAttention":
        """For shards of `local` slots each of a sequence of `seq` tokens."""
        grid, order = schedule.grid, schedule.order

        def axis(ranks, index, chunks):
            return Axis(schedule.group, schedule.counter, tuple(ranks), index, tuple(chunks))

        def cell_segments(cell):
            return orders.segments(order, cell, grid.cells, local * grid.ulysses, seq)

        def kv_cell(row):  # whose keys and values the cell in that row of this column has
            return row * grid.cols + grid.col if schedule.transpose else row + grid.rows * grid.col

        rows, cols, members = range(grid.rows), range(grid.cols), grid.cell_ranks()
        along_row = axis(
            (grid.rank_at(grid.row, j) for j in cols), grid.col, (cell_segments(grid.row + grid.rows * j) for j in cols)
        )
        along_col = axis((grid.rank_at(i, grid.col) for i in rows), grid.row, map(cell_segments, map(kv_cell, rows)))
        cell = axis(members, grid.member, (orders.segments(order, rank, grid.ranks, local, seq) for rank in members))
        kv_from = kv_cell(grid.row)
        kv_to = grid.cell if kv_from == grid.cell else grid.cell // grid.cols + grid.rows * (grid.cell % grid.cols)
        attention = GridAttention(along_row, along_col, causal, scale)
        return cls(cell, attention, schedule.overlap, grid.rank_in_cell(kv_to), grid.rank_in_cell(kv_from))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """(batch, slots, heads, head_dim) each -> (q, k, v, out, lse) with the sequence first and divided heads."""
        q, k, v = scatter_heads(self.cell, [t.transpose(0, 1) for t in (q, k, v)])
        k, v = self._move([k, v], self.kv_to, self.kv_from)
        forward = self.attention.forward_streamed if self.streamed else self.attention.forward_gathered
        out, lse = forward(q, k, v)
        return q, k, v, out.to(q.dtype), lse

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> list[Tensor]:
        """This rank's shards of dq, dk and dv, sequence first, in at least fp32.

        dout: this rank's shard (slots, batch, heads, head_dim). The other arguments are what `forward` has returned.
        """
        (dout,) = scatter_heads(self.cell, [dout])
        backward = self.attention.backward_streamed if self.streamed else self.attention.backward_gathered
        dq, dk, dv = backward(q, k, v, out, lse, dout)
        dk, dv = self._move([dk, dv], self.kv_from, self.kv_to)
        return gather_heads(self.cell, [dq, dk, dv])

    def _move(self, tensors: Sequence[Tensor], to: int, source: int) -> Sequence[Tensor]:
        """Send `tensors` to rank `to` and return those of rank `source`."""
        if to == self.cell.peers[self.cell.index]:
            return tensors
        return self.cell.send_and_receive(tensors, to, source).wait()


class AttentionFunction(torch.autograd.Function):
    """`ShardAttention` with its gradient: (q, k, v, shard_attention) -> (out, lse).

    q, k, v: (batch, slots, heads, head_dim). out: (slots, batch, heads, head_dim). lse: (slots of the cell, batch, this
    rank's heads), without gradient.
    """

    @staticmethod
    def forward(ctx, q, k, v, shard_attention):
        """Sends what `cost.volume.messages` calls forward."""
        with torch.autocast(q.device.type, enabled=False):
            *saved, out, lse = shard_attention.forward(q, k, v)
        ctx.shard_attention = shard_attention
        ctx.save_for_backward(*saved, out, lse)
        ctx.mark_non_differentiable(lse)
        return *gather_heads(shard_attention.cell, [out]), lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, _):
        """Sends what `cost.volume.messages` calls backward."""
        with torch.autocast(dout.device.type, enabled=False):
            gradients = ctx.shard_attention.backward(dout, *ctx.saved_tensors)
        return *(t.to(dout.dtype).transpose(0, 1) for t in gradients), None
