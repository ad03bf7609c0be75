"""Heads shared among the ranks of a cell: each has all of the cell's tokens for its heads, or all heads for its tokens.

This is DeepSpeed-Ulysses' all-to-all, by messages (attention2d.md A.7). Tensors: (slots, batch, heads, ...).
"""

import torch

from .axis import Axis, Chunks


def share_heads(mates: Axis, x: torch.Tensor) -> torch.Tensor:
    """x: this rank's slots, all heads -> the slots of all mates, sorted by position, this rank's heads.

    Sends (size - 1)/size of x.
    """
    if mates.size == 1:
        return x
    parts, layout = x.chunk(mates.size, dim=2), Chunks(mates.chunks)
    shared = layout.empty(parts[0])
    layout.put(mates.own, parts[mates.own], shared)
    for step in range(1, mates.size):
        to, source = ((mates.own + by) % mates.size for by in (step, -step))
        sends = [(piece, mates.peer(step)) for piece in layout.pieces(mates.own, parts[to].contiguous())]
        receives = [(view, mates.peer(-step)) for view in layout.views(source, shared)]
        mates.exchange(sends, receives).wait()
    return shared


def join_heads(mates: Axis, shared: torch.Tensor) -> torch.Tensor:
    """What `share_heads` does, undone."""
    if mates.size == 1:
        return shared
    layout, own = Chunks(mates.chunks), mates.own
    part = layout.take(own, shared)
    whole = part.new_empty(*part.shape[:2], part.shape[2] * mates.size, *part.shape[3:])
    parts = whole.chunk(mates.size, dim=2)
    parts[own].copy_(part)
    for step in range(1, mates.size):
        to, source = (own + step) % mates.size, (own - step) % mates.size
        received = part.new_empty(part.shape)
        sends = [(view, mates.peer(step)) for view in layout.views(to, shared)]
        mates.exchange(sends, [(piece, mates.peer(-step)) for piece in layout.pieces(own, received)]).wait()
        parts[source].copy_(received)
    return whole
