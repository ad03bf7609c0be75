"""The all-to-all of DeepSpeed-Ulysses (Jacobs et al., 2023) among the ranks of a cell, by messages.

Before `scatter_heads` and after `gather_heads`, a rank has its own tokens and all heads. In between, while attention is
computed, it has all tokens of its cell and its share of the heads. Tensors are (slots, batch, heads, ...).
"""

from collections.abc import Sequence

import torch

from .axis import Axis, ChunkLayout


def scatter_heads(cell: Axis, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """All slots of the cell, sorted by position, with this rank's share of the heads, for each of `tensors`.

    Sends (size - 1)/size of each tensor, all tensors in the same size - 1 steps. The results are contiguous.

    Args:
        cell: its size divides the heads.
        tensors: this rank's slots with all heads.
    """
    if cell.size == 1:
        return [x.contiguous() for x in tensors]
    layout, index = ChunkLayout(cell.chunks), cell.index
    head_shares = [x.chunk(cell.size, dim=2) for x in tensors]  # (slots, batch, heads / size, ...) for each rank
    scattered = [layout.new_buffer(shares[index]) for shares in head_shares]
    for shares, buffer in zip(head_shares, scattered, strict=True):
        layout.write(index, shares[index], buffer)
    for step in range(1, cell.size):
        to, source = (index + step) % cell.size, (index - step) % cell.size
        pieces = [piece for shares in head_shares for piece in layout.chunk_pieces(index, shares[to].contiguous())]
        views = [view for buffer in scattered for view in layout.buffer_pieces(source, buffer)]
        cell.exchange([(t, cell.peer(step)) for t in pieces], [(t, cell.peer(-step)) for t in views]).wait()
    return scattered


def gather_heads(cell: Axis, scattered: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The inverse of `scatter_heads`: this rank's slots with all heads, for each tensor of `scattered`.

    Sends (size - 1)/size of each tensor.
    """
    if cell.size == 1:
        return list(scattered)
    layout, index = ChunkLayout(cell.chunks), cell.index
    gathered = [
        x.new_empty(x.shape[0] // cell.size, x.shape[1], x.shape[2] * cell.size, *x.shape[3:]) for x in scattered
    ]
    head_shares = [x.chunk(cell.size, dim=2) for x in gathered]  # (slots, batch, heads / size, ...) for each rank
    for shares, x in zip(head_shares, scattered, strict=True):
        shares[index].copy_(layout.read(index, x))
    for step in range(1, cell.size):
        to, source = (index + step) % cell.size, (index - step) % cell.size
        received = [torch.empty_like(shares[index], memory_format=torch.contiguous_format) for shares in head_shares]
        views = [view for x in scattered for view in layout.buffer_pieces(to, x)]
        pieces = [piece for chunk in received for piece in layout.chunk_pieces(index, chunk)]
        cell.exchange([(t, cell.peer(step)) for t in views], [(t, cell.peer(-step)) for t in pieces]).wait()
        for shares, chunk in zip(head_shares, received, strict=True):
            shares[source].copy_(chunk)
    return gathered
