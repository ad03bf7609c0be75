"""The memory that a call needs besides its inputs, in closed form, for every grid.

It is the sum of all tensors that are alive at the same time, at the stage where this sum is largest. A gathered schedule
holds all queries of its row and all keys and values of its column: for a sequence of n tokens on a square grid of P ranks,
n/sqrt(P) tokens of each. A streamed schedule holds two chunks of queries, and with a single column two chunks of keys and
values.
"""

from dataclasses import dataclass

from attention2d.compute import tile
from attention2d.layout.grid import Grid


@dataclass(frozen=True)
class PeakMemory:
    """Bytes that one rank holds besides q, k and v; during backward, besides the gradient of out as well.

    Attributes:
        saved: kept from forward for backward, including out.
        forward, backward: the most at any time of the pass, including the saved bytes.
    """

    saved: int
    forward: int
    backward: int


@dataclass(frozen=True)
class _Sizes:
    """Bytes of one rank's tensors while attention is computed, when it has all tokens of its cell and a share of the heads.

    Attributes:
        q: queries; outputs and their gradients have the same size.
        kv: keys and values together.
        sum_q, sum_kv: the same elements in the dtype in which results and gradients are summed.
        stats: lse; delta has the same size.
        tile_forward, tile_backward: the temporaries of a kernel call on one tile, besides its inputs and the sums to which
            its result is added.
    """

    q: int
    kv: int
    sum_q: int
    sum_kv: int
    stats: int
    tile_forward: int
    tile_backward: int

    @property
    def is_widened(self) -> bool:
        return self.sum_q > self.q


def peak_memory(
    grid: Grid, overlap: bool, slots: int, batch: int, heads: int, kv_heads: int, head_dim: int, itemsize: int,
    transpose: bool = False, on_cuda: bool = False,
) -> PeakMemory:  # fmt: skip
    """The memory of a rank that holds `slots` tokens.

    Args:
        overlap: of the streamed schedule instead of the gathered one.
        slots, batch, heads, kv_heads, head_dim: the shape of the rank's shards.
        itemsize: bytes of an element of q, k and v.
        transpose: of the schedule with the paper's transpose.
        on_cuda: with the larger tiles of flash attention, assuming that these need as much besides their results as the
            CPU's do (not measured).
    """
    sizes = _sizes(grid, overlap, slots, batch, heads, kv_heads, head_dim, itemsize, on_cuda)
    cells = sizes, grid.rows, grid.cols
    is_copied = grid.ulysses > 1 or batch > 1  # moving the sequence first, and back, copies the tensors

    def in_transit(nbytes: int) -> int:
        """The bytes of messages while heads are scattered or gathered."""
        return min(2, grid.ulysses - 1) * nbytes // grid.ulysses

    inputs = sizes.q + sizes.kv if is_copied else transpose * sizes.kv
    saved = inputs + sizes.q + sizes.stats + is_copied * sizes.q
    forward = max(
        inputs + (_forward_streamed if overlap else _forward_gathered)(*cells),
        inputs + in_transit(inputs),
        saved + max(in_transit(sizes.q), (grid.ulysses > 1 and batch > 1) * sizes.q),
        saved + sizes.is_widened * sizes.sum_q - is_copied * sizes.q,
    )
    gradients = sizes.sum_q + sizes.sum_kv
    backward = saved + is_copied * sizes.q + max(
        (_backward_streamed if overlap else _backward_gathered)(*cells),
        gradients + sizes.is_widened * (sizes.q + sizes.kv),
        2 * gradients + in_transit(gradients) if grid.ulysses > 1 else 0,
        gradients + transpose * sizes.sum_kv,
    )  # fmt: skip
    return PeakMemory(saved, forward, backward)


def _sizes(
    grid: Grid, overlap: bool, slots: int, batch: int, heads: int, kv_heads: int, head_dim: int, itemsize: int,
    on_cuda: bool,
) -> _Sizes:  # fmt: skip
    wide, row = max(4, itemsize), batch * heads * head_dim
    elements = slots * row, 2 * slots * row * kv_heads // heads
    row //= grid.ulysses
    queries, keys = (slots * grid.ulysses * (1 if overlap else count) for count in (grid.cols, grid.rows))
    length = tile.kernel_tile_length(row, on_cuda)
    q, kv = min(length, queries) * row * wide, 2 * min(length, keys) * (row * kv_heads // heads) * wide
    is_widened = itemsize < wide
    return _Sizes(
        elements[0] * itemsize,
        elements[1] * itemsize,
        elements[0] * wide,
        elements[1] * wide,
        slots * batch * heads * wide,
        q + 4 * q // head_dim + is_widened * (q + kv),  # 4: lse, and three temporaries of `merge`
        2 * q + kv + is_widened * (2 * q + kv),
    )


def _forward_gathered(sizes: _Sizes, rows: int, cols: int) -> int:
    """The results of all queries of the row, with either all gathered tensors and a tile, or the temporaries of merging."""
    results = cols * (sizes.sum_q + sizes.stats)
    gathered = (rows > 1) * rows * sizes.kv + (cols > 1) * cols * sizes.q
    merging = sizes.sum_q + (1 + sizes.is_widened) * sizes.q + 5 * sizes.stats if cols > 1 else 0
    return results + max(gathered + sizes.tile_forward, merging)


def _backward_gathered(sizes: _Sizes, rows: int, cols: int) -> int:
    """The largest of three stages: computing delta, attending with all gathered tensors, reducing the gradients of keys."""
    keys, sums = (rows > 1) * rows * sizes.kv, cols * sizes.sum_q + rows * sizes.sum_kv
    queries = cols * (2 * sizes.q + 2 * sizes.stats) if cols > 1 else sizes.stats
    return max(
        keys + (1 + sizes.is_widened) * sizes.sum_q,  # while delta is computed
        keys + queries + sums + sizes.tile_backward,
        sizes.sum_q + (rows + 2) * sizes.sum_kv if rows > 1 else 0,
    )


def _forward_streamed(sizes: _Sizes, rows: int, cols: int) -> int:
    """Two chunks of the streamed tensors, the results of this rank's queries and of others', and results in transit.

    second, later, last: the sums while the second chunk of queries, a later one and the last one is attended or merged.
    """
    result, tile = sizes.sum_q + sizes.stats, sizes.tile_forward
    if cols == 1:
        return min(rows - 1, 2) * sizes.kv + result + tile
    received, sent = sizes.q + sizes.stats, result if not sizes.is_widened else sizes.q + sizes.stats
    second = min(cols - 1, 2) * sizes.q + tile
    later = min(cols - 2, 2) * sizes.q + tile + sent + received if cols > 2 else 0
    last = sizes.q + received + sizes.is_widened * sizes.q + 4 * sizes.stats
    return (rows - 1) * sizes.kv + 2 * result + max(second, later, last)


def _backward_streamed(sizes: _Sizes, rows: int, cols: int) -> int:
    """`_forward_streamed` with the gradients of keys and values, which travel while the last queries are attended."""
    kv, tile = sizes.sum_kv, sizes.tile_backward
    if cols == 1:
        second = min(rows - 1, 2) * sizes.kv + min(rows, 2) * kv + tile
        later = min(rows - 2, 2) * sizes.kv + 4 * kv + tile if rows > 2 else 0
        last = sizes.kv + 3 * kv if rows > 1 else 0
        return sizes.stats + sizes.sum_q + max(second, later, last)
    streamed = 2 * sizes.q + 2 * sizes.stats
    second = min(cols - 1, 2) * streamed + 2 * sizes.sum_q
    later = min(cols - 2, 2) * streamed + 4 * sizes.sum_q if cols > 2 else 0
    returning = max(tile + (rows > 2) * kv, (rows > 1) * kv)
    last = streamed + 3 * sizes.sum_q + (rows > 1) * kv
    return (rows - 1) * sizes.kv + sizes.stats + rows * kv + max(max(second, later) + returning, last)
