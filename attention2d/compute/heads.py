"""Heads shared among the ranks of a cell: each has all of the cell's tokens for its heads, or all heads for its tokens.

This is DeepSpeed-Ulysses' all-to-all, by messages (attention2d.md A.7). Tensors: (slots, batch, heads, ...).
"""

from collections.abc import Sequence

import torch

from .axis import Axis, Chunks


def share_heads(mates: Axis, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each of `tensors`, this rank's slots, all heads -> the slots of all mates, sorted by position, this rank's heads.

    What comes out is contiguous. Sends (size - 1)/size of each, all in the same steps.
    """
    if mates.size == 1:
        return [x.contiguous() for x in tensors]
    layout, own = Chunks(mates.chunks), mates.own
    parts = [x.chunk(mates.size, dim=2) for x in tensors]
    shared = [layout.empty(of[own]) for of in parts]
    for of, buffer in zip(parts, shared, strict=True):
        layout.put(own, of[own], buffer)
    for step in range(1, mates.size):
        to, source = (own + step) % mates.size, (own - step) % mates.size
        pieces = [piece for of in parts for piece in layout.pieces(own, of[to].contiguous())]
        views = [view for buffer in shared for view in layout.views(source, buffer)]
        mates.exchange([(t, mates.peer(step)) for t in pieces], [(t, mates.peer(-step)) for t in views]).wait()
    return shared


def join_heads(mates: Axis, shared: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What `share_heads` does, undone."""
    if mates.size == 1:
        return list(shared)
    layout, own = Chunks(mates.chunks), mates.own
    wholes = [x.new_empty(x.shape[0] // mates.size, x.shape[1], x.shape[2] * mates.size, *x.shape[3:]) for x in shared]
    parts = [whole.chunk(mates.size, dim=2) for whole in wholes]
    for of, x in zip(parts, shared, strict=True):
        of[own].copy_(layout.take(own, x))
    for step in range(1, mates.size):
        to, source = (own + step) % mates.size, (own - step) % mates.size
        received = [torch.empty_like(of[own], memory_format=torch.contiguous_format) for of in parts]
        views = [view for x in shared for view in layout.views(to, x)]
        pieces = [piece for each in received for piece in layout.pieces(own, each)]
        mates.exchange([(t, mates.peer(step)) for t in views], [(t, mates.peer(-step)) for t in pieces]).wait()
        for of, each in zip(parts, received, strict=True):
            of[source].copy_(each)
    return wholes
