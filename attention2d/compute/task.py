"""One call of a schedule on one rank: heads are shared out, chunks attended, results joined; and the gradient of that."""

from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable

from attention2d.layout import token_order as orders

from .axis import Axis
from .heads import join_heads, share_heads
from .passes import Passes


@dataclass(frozen=True)
class Task:
    """What a rank does with shards of one length; tensors are (slots, batch, heads, head_dim).

    mates: the ranks of its cell. streamed: chunks travel while others are used. keys_to, keys_from: the rank that its
    keys and values are moved to before, and the one whose it gets; itself where none are moved.
    """

    mates: Axis
    passes: Passes
    streamed: bool
    keys_to: int
    keys_from: int

    @classmethod
    def of(cls, schedule, local: int, length: int, causal: bool, scale: float) -> "Task":
        """Of `local` slots of a sequence."""
        grid, order = schedule.grid, schedule.order

        def axis(ranks, own, chunks):
            return Axis(schedule.group, schedule.counter, tuple(ranks), own, tuple(chunks))

        def held(cell):
            return orders.segments(order, cell, grid.cells, local * grid.ulysses, length)

        def kept(row):  # the cell whose keys and values that one of this column has
            return row * grid.cols + grid.col if schedule.transpose else row + grid.rows * grid.col

        row, col, mates = range(grid.cols), range(grid.rows), grid.mates()
        shared = (orders.segments(order, rank, grid.ranks, local, length) for rank in mates)
        across = axis((grid.at(grid.row, j) for j in row), grid.col, (held(grid.row + grid.rows * j) for j in row))
        down = axis((grid.at(i, grid.col) for i in col), grid.row, map(held, map(kept, col)))
        keys_from = kept(grid.row)
        keys_to = grid.cell if keys_from == grid.cell else grid.cell // grid.cols + grid.rows * (grid.cell % grid.cols)
        passes = Passes(across, down, causal, scale)
        return cls(
            axis(mates, grid.place, shared), passes, schedule.overlap, grid.in_cell(keys_to), grid.in_cell(keys_from)
        )

    def forward(self, q, k, v):
        """(batch, slots, heads, head_dim) -> (q, k, v, out, lse) as backward takes them: sequence first, shared heads."""
        q, k, v = share_heads(self.mates, [t.transpose(0, 1) for t in (q, k, v)])
        k, v = self._move([k, v], self.keys_to, self.keys_from)
        out, lse = (self.passes.forward_streamed if self.streamed else self.passes.forward_gathered)(q, k, v)
        return q, k, v, out.to(q.dtype), lse

    def backward(self, dout, q, k, v, out, lse):
        """dout, this rank's shard, sequence first -> (dq, dk, dv), the same, at least fp32."""
        (dout,) = share_heads(self.mates, [dout])
        backward = self.passes.backward_streamed if self.streamed else self.passes.backward_gathered
        dq, dk, dv = backward(q, k, v, out, lse, dout)
        dk, dv = self._move([dk, dv], self.keys_from, self.keys_to)
        return join_heads(self.mates, [dq, dk, dv])

    def _move(self, tensors, to, source):
        if to == self.mates.peers[self.mates.own]:
            return tensors
        return self.mates.trade(tensors, to, source).wait()


class Attend(torch.autograd.Function):
    """(q, k, v, task), (batch, slots, heads, head_dim) each -> out, sequence first, and lse as the cell shares it.

    lse has no gradient.
    """

    @staticmethod
    def forward(ctx, q, k, v, task):
        with torch.autocast(q.device.type, enabled=False):
            *saved, out, lse = task.forward(q, k, v)
        ctx.task = task
        ctx.save_for_backward(*saved, out, lse)
        ctx.mark_non_differentiable(lse)
        return *join_heads(task.mates, [out]), lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, _):
        with torch.autocast(dout.device.type, enabled=False):
            gradients = ctx.task.backward(dout, *ctx.saved_tensors)
        return *(t.to(dout.dtype).transpose(0, 1) for t in gradients), None
