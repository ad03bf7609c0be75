"""Bytes that each rank sends, in closed form (attention2d.md A.7), for every point of the family."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Volume:
    """Bytes sent by the busiest rank."""

    forward: int
    backward: int


@dataclass(frozen=True)
class Messages:
    """What each rank sends, one after the other: (steps, bytes in each)."""

    forward: tuple[tuple[int, int], ...]
    backward: tuple[tuple[int, int], ...]

    @property
    def volume(self) -> Volume:
        """All of it."""
        return Volume(*(sum(steps * nbytes for steps, nbytes in way) for way in (self.forward, self.backward)))


def messages(grid, slots, batch, heads, kv_heads, head_dim, itemsize, moved=False) -> Messages:
    """Of a `Grid` whose ranks hold `slots` tokens each.

    With w numbers in a rank's queries and s rows of them, e bytes per number, and a = max(4, e) per number of statistics
    and gradients, k = kv_heads/heads; on R x C cells of U ranks that share heads, in all:

    forward   (U-1)/U (2+2k) w e  +  (R-1) 2 k w e  +  (C-1) (2 w e + s a)
    backward  (U-1)/U (w e + (1+2k) w a)  +  (R-1) (2 k w e + 2 k w a)  +  (C-1) (2 w e + 2 s a + w a)

    moved: keys and values are moved before, 2 k w e, and their gradients back, 2 k w a.
    """
    U, R, C, e, a = grid.ulysses - 1, grid.rows - 1, grid.cols - 1, itemsize, max(4, itemsize)
    s = batch * slots * heads
    w, kw = s * head_dim, batch * slots * kv_heads * head_dim
    q, kv = w // grid.ulysses, kw // grid.ulysses
    shared = (U, (q + 2 * kv) * e), (int(moved), 2 * kw * e)
    forward = *shared, (R, 2 * kw * e), (C, w * e), (C, w * e + s * a), (U, q * e)
    backward = (U, q * e), (R, 2 * kw * e), (C, 2 * w * e + 2 * s * a), (C, w * a), (R, 2 * kw * a)
    return Messages(forward, (*backward, (int(moved), 2 * kw * a), (U, (q + 2 * kv) * a)))
