"""Forward and backward pass of attention on a grid of cells, gathered or streamed (Attention2D, sections 3.2 and 3.4).

On a grid of R rows and C columns, each cell attends the queries of all cells of its row to the keys and values of all cells
of its column. It sends each partial result back to the cell that owns the queries. The owner merges the partial results by
their log-sum-exp, which gives exactly the softmax over all keys (docs/concepts/attention-on-a-grid.md).

- gathered (the paper's Attention2D-NO): first gather all queries of the row and all keys of the column, then attend, then
  send the results.
- streamed (Attention2D-O): attend one chunk of queries to one chunk of keys at a time, while the next chunks and finished
  results travel.

Both send the same bytes. Each partial result is rounded to the dtype of the messages once, and partial results are merged in
the order of the steps, so the result does not depend on the order of arrival.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attention2d.layout.block_mask import BlockMask
from attention2d.layout.token_order import KernelCall, Segment, kernel_calls, split_calls
from commfabric.collectives.wire_formats import at_least_fp32

from .axis import Axis, ChunkLayout, Tensors, add_to
from .tile import attend, attend_backward, empty_result, merge, tile_length

Tensor = torch.Tensor
Between = tuple[Sequence[Segment], Sequence[Segment]]  # the segments of a buffer of queries and of a buffer of keys


@dataclass(frozen=True)
class GridAttention:
    """Attention of one rank's chunks. Tensors have the sequence first and this rank's share of the heads.

    The ranks of all other cells of the row and of the column call each method together with this one.

    Attributes:
        row: the axis along which queries travel, with C cells.
        col: the axis along which keys and values travel, with R cells.
        mask: which keys a query sees, besides the causal mask (None: all).
    """

    row: Axis
    col: Axis
    causal: bool
    scale: float
    mask: BlockMask | None = None

    def forward_gathered(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(out, lse) of this rank's queries, in at least fp32. Sends C-1 chunks of q, out and lse, R-1 of k and v."""
        rows, cols = ChunkLayout(self.row.chunks), ChunkLayout(self.col.chunks)
        keys, values = self.col.all_gather(cols, [k, v])  # (R slots, batch, kv_heads, head_dim)
        (queries,) = self.row.all_gather(rows, [q])  # (C slots, batch, heads, head_dim)
        outs, lses = self._attend((rows.segments, cols.segments), queries, (keys, values))
        del queries, keys, values
        own_result = rows.read(self.row.index, outs), rows.read(self.row.index, lses)
        self.row.all_to_all(rows, [outs, lses], [q.dtype, lses.dtype], lambda partial: merge(*own_result, *partial))
        return own_result

    def backward_gathered(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv), in at least fp32. Sends C-1 chunks of q, dout, lse, delta and dq, R-1 of k, v, dk and dv."""
        rows, cols = ChunkLayout(self.row.chunks), ChunkLayout(self.col.chunks)
        keys, values = self.col.all_gather(cols, [k, v])
        queries = self.row.all_gather(rows, [q, dout, lse, _delta(dout, out)])
        dqueries, dkeys, dvalues = self._attend_backward((rows.segments, cols.segments), queries, (keys, values))
        del queries, keys, values
        (dq,) = self.row.reduce_scatter(rows, [dqueries])
        del dqueries
        dk, dv = self.col.reduce_scatter(cols, [dkeys, dvalues])
        return dq, dk, dv

    def forward_streamed(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """`forward_gathered`, streamed. Holds all chunks of k and v of the column, or two of them if it is the only one."""
        blocks = _KeyBlocks(self.col, [k, v], is_kept=self.row.size > 1)
        own_result: Any = None  # (out, lse) of this rank's queries, once the first round over the keys is done
        pending_result = None
        for col_step, (queries,) in self.row.stream([q]):
            partial: Any = None
            for row_step, block in blocks:
                partial = self._attend((self.row.chunk(col_step), self.col.chunk(row_step)), queries, block, partial)
                del block  # so that its memory is free when the next one arrives
            del queries
            if pending_result:
                merge(*own_result, *pending_result.wait())
            if col_step == 0:
                own_result = partial
            else:
                pending_result = self.row.swap(col_step, [partial[0].to(q.dtype), partial[1]])
        if pending_result:
            merge(*own_result, *pending_result.wait())
        return own_result

    def backward_streamed(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`backward_gathered`, streamed.

        Partial sums of dq travel along the row, one step after their queries. Partial sums of dk and dv travel along the
        column while the last chunk of queries is attended.
        """
        blocks, last = _KeyBlocks(self.col, [k, v], is_kept=self.row.size > 1), self.row.size - 1
        dq: Any = None  # of this rank's queries, once the first round over the keys is done
        dkv: dict[int, list[Tensor]] = {}  # {row_step: partial [dk, dv] of the cell row_step rows further}
        pending_dq, pending_dkv = None, None
        for col_step, queries in self.row.stream([q, dout, lse, _delta(dout, out)]):
            dqueries: Any = None
            for row_step, block in blocks:
                sums = (dqueries, *dkv.get(row_step, (None, None)))
                between = self.row.chunk(col_step), self.col.chunk(row_step)
                dqueries, *dkv[row_step] = self._attend_backward(between, queries, block, sums)
                del block, sums  # so that their memory is free when the next block arrives
                if row_step and col_step == last:
                    if pending_dkv:
                        add_to(dkv[row_step], pending_dkv.wait())
                    pending_dkv = self.col.pass_on(dkv.pop(row_step))
            del queries
            if pending_dq:
                add_to([dqueries], pending_dq.wait())
            if col_step == 0:
                dq = dqueries
            else:
                pending_dq = self.row.pass_on([dqueries])
        if pending_dkv:
            add_to(dkv[0], pending_dkv.wait())
        if pending_dq:
            add_to([dq], pending_dq.wait())
        dk, dv = dkv[0]
        return dq, dk, dv

    def _attend(
        self, between: Between, queries: Tensor, block: Tensors, result: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """(out, lse) of these queries and keys, merged in place into an earlier `result` if there is one. block: k and v."""
        keys, values = block
        calls = kernel_calls(*between, self.causal)
        if self.mask is None and result is None and _is_one_tile(calls, queries):
            (call,) = calls
            return attend(queries, keys[call.kv], values[call.kv], call.causal, self.scale)
        out, lse = result or empty_result(queries)
        for call, visible in self._tiles(calls, between, queries):
            rows, cols = call.q, call.kv
            tile = queries[rows], keys[cols], values[cols], call.causal, self.scale, visible
            merge(out[rows], lse[rows], *attend(*tile))
        return out, lse

    def _attend_backward(
        self, between: Between, queries: Tensors, block: Tensors, sums: Sequence[Tensor | None] = (None, None, None)
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of these queries and keys, added in place to those of the earlier `sums` that are not None.

        queries: q, dout, lse and delta. block: k and v.
        """
        (q, dout, lse, delta), (k, v) = queries, block
        calls, is_first = kernel_calls(*between, self.causal), all(total is None for total in sums)
        if self.mask is None and is_first and _is_one_tile(calls, q, k):
            return attend_backward(dout, delta, q, k, v, lse, calls[0].causal, self.scale)
        dq, dk, dv = (_zeros(t) if total is None else total for total, t in zip(sums, (q, k, v), strict=True))
        for call, visible in self._tiles(calls, between, q):
            rows, cols = call.q, call.kv
            tile = dout[rows], delta[rows], q[rows], k[cols], v[cols], lse[rows], call.causal, self.scale, visible
            add_to([dq[rows], dk[cols], dv[cols]], attend_backward(*tile))
        return dq, dk, dv

    def _tiles(
        self, calls: Sequence[KernelCall], between: Between, q: Tensor
    ) -> Iterator[tuple[KernelCall, Tensor | None]]:
        """(call, visible) of each tile: `visible` as in `tile.attend`, None where the mask hides nothing."""
        tiles = split_calls(calls, tile_length(q))
        if self.mask is None:
            yield from ((call, None) for call in tiles)
            return
        for call, visible in self.mask.tiles(tiles, *between):
            yield call, None if visible is None else visible.to(q.device)


class _KeyBlocks:
    """Iterates over (step, chunks of keys and values) along the column, as `Axis.stream` yields them.

    is_kept: keep the chunks that arrive during the first iteration, so that later iterations send nothing. Otherwise the
    object can be iterated only once.
    """

    def __init__(self, axis: Axis, tensors: Tensors, is_kept: bool) -> None:
        self._axis, self._tensors, self._is_kept = axis, tensors, is_kept
        self._received: list[tuple[int, Tensors]] = []

    def __iter__(self) -> Iterator[tuple[int, Tensors]]:
        if self._received:
            yield from self._received
            return
        if not self._is_kept:
            yield from self._axis.stream(self._tensors)
            return
        for step, block in self._axis.stream(self._tensors):
            self._received.append((step, block))
            yield step, block


def _is_one_tile(calls: Sequence[KernelCall], queries: Tensor, keys: Tensor | None = None) -> bool:
    """Return True if one kernel call on one tile covers all queries (and all keys), so that no sum over tiles is needed."""
    all_queries = [slice(0, len(queries))]
    if [call.q for call in calls] != all_queries or (keys is not None and calls[0].kv != slice(0, len(keys))):
        return False
    return max(len(queries), calls[0].kv.stop - calls[0].kv.start) <= tile_length(queries)


def _delta(dout: Tensor, out: Tensor) -> Tensor:
    """The sum of dout * out over head_dim: (slots, batch, heads), in at least fp32."""
    return (dout.to(at_least_fp32(dout.dtype)) * out).sum(-1)


def _zeros(like: Tensor) -> Tensor:
    """A zero gradient for `like`, in at least fp32."""
    return like.new_zeros(like.shape, dtype=at_least_fp32(like.dtype))
