"""Memory that a call takes beside its inputs, in closed form, for every point of the family (attention2d.md A.7).

What `messages` is for bytes sent: the sum of the tensors that live at once, at the stage where they are most. Gathered, a
rank holds all queries of its row and keys of its column, n/sqrt(P) tokens on a square; streamed, of queries (and, with one
column, of keys and values) two chunks.
"""

from dataclasses import dataclass

from attention2d.compute import tile


@dataclass(frozen=True)
class Memory:
    """Bytes beside q, k and v; backward: beside the gradient of out as well.

    saved: what stays between the two, out included. forward, backward: the most at any time, what is saved included.
    """

    saved: int
    forward: int
    backward: int


@dataclass(frozen=True)
class _Sizes:
    """Bytes of what one rank has, heads shared: of tensors as they are given, and (sum_) as they are added up.

    q: queries, as many as outputs and their gradients. kv: keys and values together. stats: lse, as many as delta.
    tile_forward, tile_backward: what a tile takes beside what it is added to.
    """

    q: int
    kv: int
    sum_q: int
    sum_kv: int
    stats: int
    tile_forward: int
    tile_backward: int

    @property
    def widened(self) -> bool:
        """Whether sums have more bytes than what is given."""
        return self.sum_q > self.q


def memory(grid, overlap, slots, batch, heads, kv_heads, head_dim, itemsize, moved=False, on_cuda=False) -> Memory:
    """Of a `Grid` whose ranks hold `slots` tokens each.

    moved: keys and values are moved before. on_cuda: with the larger tiles of flash attention there, as if these took what
    the CPU's do (not measured).
    """
    sizes = _sizes(grid, overlap, slots, batch, heads, kv_heads, head_dim, itemsize, on_cuda)
    cells, copied = (sizes, grid.rows, grid.cols), grid.ulysses > 1 or batch > 1  # sequence first, and back

    def travelling(nbytes):  # when heads are shared or joined
        return min(2, grid.ulysses - 1) * nbytes // grid.ulysses

    inputs = sizes.q + sizes.kv if copied else moved * sizes.kv
    saved = inputs + sizes.q + sizes.stats + copied * sizes.q
    forward = max(
        inputs + (_forward_streamed if overlap else _forward_gathered)(*cells),
        inputs + travelling(inputs),
        saved + max(travelling(sizes.q), (grid.ulysses > 1 and batch > 1) * sizes.q),
        saved + sizes.widened * sizes.sum_q - copied * sizes.q,
    )
    given = saved + copied * sizes.q
    gradients = sizes.sum_q + sizes.sum_kv
    backward = given + max(
        (_backward_streamed if overlap else _backward_gathered)(*cells),
        gradients + sizes.widened * (sizes.q + sizes.kv),
        2 * gradients + travelling(gradients) if grid.ulysses > 1 else 0,
        gradients + moved * sizes.sum_kv,
    )
    return Memory(saved, forward, backward)


def _sizes(grid, overlap, slots, batch, heads, kv_heads, head_dim, itemsize, on_cuda) -> _Sizes:
    wide, row = max(4, itemsize), batch * heads * head_dim
    numbers = slots * row, 2 * slots * row * kv_heads // heads
    row //= grid.ulysses
    queries, keys = (slots * grid.ulysses * (1 if overlap else count) for count in (grid.cols, grid.rows))
    most = tile.most_slots(row, on_cuda)
    q, kv = min(most, queries) * row * wide, 2 * min(most, keys) * (row * kv_heads // heads) * wide
    widened = itemsize < wide
    return _Sizes(
        *(count * itemsize for count in numbers),
        *(count * wide for count in numbers),
        slots * batch * heads * wide,
        q + 4 * q // head_dim + widened * (q + kv),  # 4: statistics, and what they are merged with
        2 * q + kv + widened * (2 * q + kv),
    )


def _forward_gathered(sizes, rows, cols) -> int:
    found = cols * (sizes.sum_q + sizes.stats)
    gathered = (rows > 1) * rows * sizes.kv + (cols > 1) * cols * sizes.q
    home = sizes.sum_q + (1 + sizes.widened) * sizes.q + 5 * sizes.stats if cols > 1 else 0
    return found + max(gathered + sizes.tile_forward, home)


def _backward_gathered(sizes, rows, cols) -> int:
    keys, found = (rows > 1) * rows * sizes.kv, cols * sizes.sum_q + rows * sizes.sum_kv
    queries = cols * (2 * sizes.q + 2 * sizes.stats) if cols > 1 else sizes.stats
    return max(
        keys + (1 + sizes.widened) * sizes.sum_q,  # for delta
        keys + queries + found + sizes.tile_backward,
        sizes.sum_q + (rows + 2) * sizes.sum_kv if rows > 1 else 0,
    )


def _forward_streamed(sizes, rows, cols) -> int:
    """Beside two chunks of what is streamed, the results of this rank's queries, of others', and those on their way."""
    part, tile = sizes.sum_q + sizes.stats, sizes.tile_forward
    if cols == 1:
        return min(rows - 1, 2) * sizes.kv + part + tile
    received, sent = sizes.q + sizes.stats, part if not sizes.widened else sizes.q + sizes.stats
    second = min(cols - 1, 2) * sizes.q + tile
    later = min(cols - 2, 2) * sizes.q + tile + sent + received if cols > 2 else 0
    last = sizes.q + received + sizes.widened * sizes.q + 4 * sizes.stats
    return (rows - 1) * sizes.kv + 2 * part + max(second, later, last)


def _backward_streamed(sizes, rows, cols) -> int:
    """The same; gradients of keys and values leave while the last queries are used."""
    kv, tile = sizes.sum_kv, sizes.tile_backward
    if cols == 1:
        second = min(rows - 1, 2) * sizes.kv + min(rows, 2) * kv + tile
        later = min(rows - 2, 2) * sizes.kv + 4 * kv + tile if rows > 2 else 0
        last = sizes.kv + 3 * kv if rows > 1 else 0
        return sizes.stats + sizes.sum_q + max(second, later, last)
    streamed = 2 * sizes.q + 2 * sizes.stats
    second = min(cols - 1, 2) * streamed + 2 * sizes.sum_q
    later = min(cols - 2, 2) * streamed + 4 * sizes.sum_q if cols > 2 else 0
    home = max(tile + (rows > 2) * kv, (rows > 1) * kv)
    last = streamed + 3 * sizes.sum_q + (rows > 1) * kv
    return (rows - 1) * sizes.kv + sizes.stats + rows * kv + max(max(second, later) + home, last)
