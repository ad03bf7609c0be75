"""Attention of one rank's shard, forward and backward: scatter heads within the cell, attend on the grid, gather heads."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from attention2d.layout import token_order as orders
from attention2d.layout.block_mask import BlockMask
from attention2d.layout.grid import Grid
from commfabric.collectives.counted import Counter

from .axis import Axis
from .heads import gather_heads, scatter_heads
from .passes import GridAttention

Tensor = torch.Tensor


class GridSchedule(Protocol):
    """The attributes of a schedule (`attention2d.Attention2D`) that `ShardAttention.of_schedule` reads."""

    group: ProcessGroup | None
    counter: Counter
    grid: Grid
    order: str
    overlap: bool
    transpose: bool


@dataclass(frozen=True)
class ShardAttention:
    """The attention of one rank's shards of one length.

    `kv_to` and `kv_from` are this rank itself unless the schedule applies the paper's transpose (Attention2D, section 3.2).

    Attributes:
        cell: the ranks of its cell, which divide the heads.
        attention: the attention of the cell on the grid.
        is_streamed: chunks travel while others are attended.
        kv_to: the rank to which it sends its keys and values before anything else.
        kv_from: the rank whose keys and values it receives in exchange.
    """

    cell: Axis
    attention: GridAttention
    is_streamed: bool
    kv_to: int
    kv_from: int

    @classmethod
    def of_schedule(
        cls, schedule: GridSchedule, local: int, seq: int, causal: bool, scale: float, mask: BlockMask | None
    ) -> "ShardAttention":
        """The attention of `schedule` for a sequence of `seq` tokens in shards of `local` slots."""
        grid, order = schedule.grid, schedule.order

        def axis(ranks: Iterable[int], index: int, chunks: Iterable[tuple[orders.Segment, ...]]) -> Axis:
            return Axis(schedule.group, schedule.counter, tuple(ranks), index, tuple(chunks))

        def cell_segments(cell: int) -> tuple[orders.Segment, ...]:
            """The tokens of a cell of the grid."""
            return orders.segments(order, cell, grid.cells, local * grid.ulysses, seq)

        def kv_cell(row: int) -> int:
            """The cell whose keys and values row `row` of this rank's column uses."""
            return row * grid.cols + grid.col if schedule.transpose else row + grid.rows * grid.col

        rows, cols, members = range(grid.rows), range(grid.cols), grid.cell_ranks()
        along_row = axis(
            (grid.rank_at(grid.row, j) for j in cols), grid.col, (cell_segments(grid.row + grid.rows * j) for j in cols)
        )
        along_col = axis((grid.rank_at(i, grid.col) for i in rows), grid.row, map(cell_segments, map(kv_cell, rows)))
        cell = axis(members, grid.member, (orders.segments(order, rank, grid.ranks, local, seq) for rank in members))
        kv_from = kv_cell(grid.row)
        kv_to = grid.cell if kv_from == grid.cell else grid.cell // grid.cols + grid.rows * (grid.cell % grid.cols)
        attention = GridAttention(along_row, along_col, causal, scale, mask)
        return cls(cell, attention, schedule.overlap, grid.rank_in_cell(kv_to), grid.rank_in_cell(kv_from))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """(q, k, v, out, lse) of all slots of the cell and this rank's share of the heads, sequence first.

        q, k, v: this rank's shards, (batch, slots, heads, head_dim) each. lse is in at least fp32.
        """
        # (batch, slots, heads, head_dim) -> (slots of the cell, batch, heads / ulysses, head_dim)
        q, k, v = scatter_heads(self.cell, [t.transpose(0, 1) for t in (q, k, v)])
        k, v = self._move([k, v], self.kv_to, self.kv_from)
        forward = self.attention.forward_streamed if self.is_streamed else self.attention.forward_gathered
        out, lse = forward(q, k, v)
        return q, k, v, out.to(q.dtype), lse

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> list[Tensor]:
        """This rank's shards of dq, dk and dv, (slots, batch, heads, head_dim) each, in at least fp32.

        dout: this rank's shard (slots, batch, heads, head_dim). The other arguments are the results of `forward`.
        """
        (dout,) = scatter_heads(self.cell, [dout])
        backward = self.attention.backward_streamed if self.is_streamed else self.attention.backward_gathered
        dq, dk, dv = backward(q, k, v, out, lse, dout)
        dk, dv = self._move([dk, dv], self.kv_from, self.kv_to)
        return gather_heads(self.cell, [dq, dk, dv])

    def _move(self, tensors: Sequence[Tensor], to: int, source: int) -> Sequence[Tensor]:
        """Send `tensors` to rank `to` and return those of rank `source`; return `tensors` if `to` is this rank."""
        if to == self.cell.peers[self.cell.index]:
            return tensors
        return self.cell.send_and_receive(tensors, to, source).wait()


class AttentionFunction(torch.autograd.Function):
    """`ShardAttention` with its gradient: (q, k, v, shard_attention) -> (out, lse).

    q, k, v: (batch, slots, heads, head_dim). out: (slots, batch, heads, head_dim), in q's dtype. lse: (slots of the cell,
    batch, this rank's heads), in at least fp32 and without gradient.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, shard_attention: ShardAttention) -> tuple[Tensor, Tensor]:
        """Attend. Sends the forward messages of `cost.volume.messages`."""
        with torch.autocast(q.device.type, enabled=False):
            *saved, out, lse = shard_attention.forward(q, k, v)
        ctx.shard_attention = shard_attention
        ctx.save_for_backward(*saved, out, lse)
        ctx.mark_non_differentiable(lse)
        (gathered,) = gather_heads(shard_attention.cell, [out])
        return gathered, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, _: Any) -> tuple[Tensor, Tensor, Tensor, None]:
        """Compute dq, dk and dv in the inputs' dtype. Sends the backward messages of `cost.volume.messages`."""
        with torch.autocast(dout.device.type, enabled=False):
            gradients = ctx.shard_attention.backward(dout, *ctx.saved_tensors)
        dq, dk, dv = (t.to(dout.dtype).transpose(0, 1) for t in gradients)  # (batch, slots, heads, head_dim)
        return dq, dk, dv, None
