"""The bytes that each rank sends, in closed form, for every grid.

The terms for rows and columns follow the cost analysis of Attention2D (section 3.3), without the paper's transpose of keys
and values and without the outputs that its backward gathers. The term for heads is that of DeepSpeed-Ulysses.
"""

from dataclasses import dataclass

from attention2d.layout.grid import Grid


@dataclass(frozen=True)
class Volume:
    """Bytes sent by the busiest rank in a forward and in a backward pass."""

    forward: int
    backward: int


@dataclass(frozen=True)
class Messages:
    """The messages of each rank in order: (number of steps, bytes sent in each of these steps)."""

    forward: tuple[tuple[int, int], ...]
    backward: tuple[tuple[int, int], ...]

    @property
    def volume(self) -> Volume:
        """The bytes of all messages of each pass."""
        return Volume(*(sum(steps * nbytes for steps, nbytes in way) for way in (self.forward, self.backward)))


def messages(
    grid: Grid, slots: int, batch: int, heads: int, kv_heads: int, head_dim: int, itemsize: int, transpose: bool = False
) -> Messages:
    """The messages of a grid whose ranks hold `slots` tokens each.

    itemsize: bytes of an element of q, k and v. Let s = batch * slots * heads be the rows of a rank's queries,
    w = s * head_dim their elements, k = kv_heads / heads, e = itemsize, and a = max(4, e) the bytes of an element of
    statistics and gradients. On R x C cells of U ranks each, a rank sends

    forward   (U-1)/U (2+2k) w e  +  (R-1) 2 k w e  +  (C-1) (2 w e + s a)
    backward  (U-1)/U (w e + (1+2k) w a)  +  (R-1) (2 k w e + 2 k w a)  +  (C-1) (2 w e + 2 s a + w a)

    The terms are, in this order: heads within the cell, keys and values along the column, queries and results along the row.
    transpose: with the paper's transpose (section 3.2), which first sends keys and values to another cell, 2 k w e, and
    returns their gradients, 2 k w a.
    """
    U, R, C, e, a = grid.ulysses - 1, grid.rows - 1, grid.cols - 1, itemsize, max(4, itemsize)
    s = batch * slots * heads
    w, kw = s * head_dim, batch * slots * kv_heads * head_dim
    q, kv = w // grid.ulysses, kw // grid.ulysses
    scatter_and_transpose = (U, (q + 2 * kv) * e), (int(transpose), 2 * kw * e)
    forward = *scatter_and_transpose, (R, 2 * kw * e), (C, w * e), (C, w * e + s * a), (U, q * e)
    backward = (U, q * e), (R, 2 * kw * e), (C, 2 * w * e + 2 * s * a), (C, w * a), (R, 2 * kw * a)
    return Messages(forward, (*backward, (int(transpose), 2 * kw * a), (U, (q + 2 * kv) * a)))
