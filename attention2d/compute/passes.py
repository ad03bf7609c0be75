"""Forward and backward of attention on a grid of cells (attention2d.md A.3 to A.5): gathered at once, or streamed.

Cell (i, j) of R rows and C columns attends the queries of its row to the keys and values of its column, and sends what it
finds to the queries' owners, who merge it: one softmax, exactly. Gathered, all is fetched first and sent home afterwards;
streamed, chunks travel while others are used, and a result leaves when it is ready. Both send the same bytes; a partial
result is rounded once, and results are merged in the order of the steps, whatever arrives first.
"""

from dataclasses import dataclass

from attention2d.layout.token_order import calls, cut
from sparsefusion.collectives.wire_formats import at_least_fp32

from .axis import Axis, Chunks, add
from .tile import attend, attend_backward, merge, of_no_keys, tile_length


@dataclass(frozen=True)
class Passes:
    """What one rank attends; tensors are its chunks, sequence first, of its share of the heads.

    row: the axis along which queries travel, C cells. col: that of keys and values, R cells.
    """

    row: Axis
    col: Axis
    causal: bool
    scale: float

    def forward_gathered(self, q, k, v):
        """(out, lse) of this rank's queries, at least fp32. Sends C-1 chunks of q, out and lse, R-1 of k and v."""
        rows, cols = Chunks(self.row.chunks), Chunks(self.col.chunks)
        keys, values = self.col.gather(cols, [k, v])
        (queries,) = self.row.gather(rows, [q])
        outs, lses = self._attend(calls(rows.segments, cols.segments, self.causal), queries, keys, values)
        del queries, keys, values
        mine = rows.take(self.row.own, outs), rows.take(self.row.own, lses)
        self.row.scatter(rows, [outs, lses], [q.dtype, lses.dtype], lambda more: merge(*mine, *more))
        return mine

    def backward_gathered(self, q, k, v, out, lse, dout):
        """(dq, dk, dv), at least fp32. Sends C-1 chunks of q, dout, lse, delta and dq, R-1 of k, v, dk and dv."""
        rows, cols = Chunks(self.row.chunks), Chunks(self.col.chunks)
        keys, values = self.col.gather(cols, [k, v])
        queries = self.row.gather(rows, [q, dout, lse, _delta(dout, out)])
        tiles = calls(rows.segments, cols.segments, self.causal)
        dqueries, dkeys, dvalues = self._attend_backward(tiles, queries, (keys, values))
        del queries, keys, values
        (dq,) = self.row.add_up(rows, [dqueries])
        del dqueries
        return dq, *self.col.add_up(cols, [dkeys, dvalues])

    def forward_streamed(self, q, k, v):
        """The same as `forward_gathered`. With one column two chunks of k and v are held at a time, else all."""
        mine, leaving, blocks = None, None, _Blocks(self.col, [k, v], kept=self.row.size > 1)
        for t, (queries,) in self.row.stream([q]):
            part = None
            for s, block in blocks:
                part = self._attend(self._pair(t, s), queries, *block, part)
                del block  # before the next but one is made
            del queries
            if leaving:
                merge(*mine, *leaving.wait())
            if t == 0:
                mine = part
            else:
                leaving = self.row.swap(t, [part[0].to(q.dtype), part[1]])
        if leaving:
            merge(*mine, *leaving.wait())
        return mine

    def backward_streamed(self, q, k, v, out, lse, dout):
        """The same as `backward_gathered`: sums follow the chunks, those of keys and values when the last queries do."""
        blocks, gradients, last = _Blocks(self.col, [k, v], kept=self.row.size > 1), {}, self.row.size - 1
        dq, leaving, leaving_home = None, None, None
        for t, queries in self.row.stream([q, dout, lse, _delta(dout, out)]):
            dqueries = None
            for s, block in blocks:
                found = (dqueries, *gradients.get(s, (None, None)))
                dqueries, *gradients[s] = self._attend_backward(self._pair(t, s), queries, block, found)
                del block, found  # before the next but one is made
                if s and t == last:
                    if leaving_home:
                        add(gradients[s], leaving_home.wait())
                    leaving_home = self.col.pass_on(gradients.pop(s))
            del queries
            if leaving:
                add([dqueries], leaving.wait())
            if t == 0:
                dq = dqueries
            else:
                leaving = self.row.pass_on([dqueries])
        if leaving_home:
            add(gradients[0], leaving_home.wait())
        if leaving:
            add([dq], leaving.wait())
        return dq, *gradients[0]

    def _pair(self, t: int, s: int):
        """Calls of the queries of the cell t columns on, against the keys of the one s rows on."""
        return calls(self.row.chunk(t), self.col.chunk(s), self.causal)

    def _attend(self, tiles, queries, keys, values, found=None):
        """(out, lse) of these calls, merged into what was found before."""
        if found is None and _is_whole(tiles, queries):
            (call,) = tiles
            return attend(queries, keys[call.kv], values[call.kv], call.causal, self.scale)
        out, lse = found = found or of_no_keys(queries)
        for call in cut(tiles, tile_length(queries)):
            merge(
                out[call.q],
                lse[call.q],
                *attend(queries[call.q], keys[call.kv], values[call.kv], call.causal, self.scale),
            )
        return found

    def _attend_backward(self, tiles, queries, block, found=(None, None, None)):
        """(dq, dk, dv) of these calls, added to what was found before; queries: q, dout, lse and delta; block: k and v."""
        if not any(gradient is not None for gradient in found) and _is_whole(tiles, queries[0], block[0]):
            return attend_backward(*(queries[at] for at in (1, 3, 0)), *block, queries[2], tiles[0].causal, self.scale)
        found = [
            _zeros(t) if gradient is None else gradient for gradient, t in zip(found, (queries[0], *block), strict=True)
        ]
        for call in cut(tiles, tile_length(queries[0])):
            q, dout, lse, delta = (t[call.q] for t in queries)
            k, v = (t[call.kv] for t in block)
            where = [t[slots] for t, slots in zip(found, (call.q, call.kv, call.kv), strict=True)]
            add(where, attend_backward(dout, delta, q, k, v, lse, call.causal, self.scale))
        return found


class _Blocks:
    """Chunks of keys and values by the step, as they come; kept for the next time, or not."""

    def __init__(self, axis: Axis, tensors, kept: bool):
        self._axis, self._tensors, self._kept, self._held = axis, tensors, kept, []

    def __iter__(self):
        if self._held:
            yield from self._held
            return
        if not self._kept:
            yield from self._axis.stream(self._tensors)
            return
        for step, block in self._axis.stream(self._tensors):
            self._held.append((step, block))
            yield step, block


def _is_whole(tiles, queries, keys=None) -> bool:
    """Whether all queries, and all keys, are one tile: it needs no room to be added up in."""
    whole = [slice(0, len(queries))]
    if [call.q for call in tiles] != whole or (keys is not None and tiles[0].kv != slice(0, len(keys))):
        return False
    return max(len(queries), tiles[0].kv.stop - tiles[0].kv.start) <= tile_length(queries)


def _delta(dout, out):
    return (dout.to(at_least_fp32(dout.dtype)) * out).sum(-1)


def _zeros(like):
    """A gradient of it: none yet."""
    return like.new_zeros(like.shape, dtype=at_least_fp32(like.dtype))
