"""Packs ascending indices below `numel` into two bytes each, plus four bytes for each block of 65,536 possible indices.

The packed form contains, for each block, the number of indices before it, and then the lower 16 bits of all indices. If
fewer than about one in 32,768 elements is selected, plain indices take fewer bytes and are sent instead.
"""

import torch

from commfabric.collectives.wire_formats import view_bytes

BLOCK, INDEX_BYTES = 1 << 16, 2


def encode_indices(indices: torch.Tensor, numel: int) -> torch.Tensor:
    """Pack ascending indices (k,) of dtype `index_dtype(numel)`; returns uint8 (index_bytes(k, numel),)."""
    if not _is_blocked(len(indices), numel):
        return indices.view(torch.uint8)
    multiples = torch.arange(0, numel, BLOCK, dtype=indices.dtype, device=indices.device)
    below = torch.searchsorted(indices, multiples, out_int32=True)
    lower = ((indices & (BLOCK - 1)) - BLOCK // 2).to(torch.int16)
    return torch.cat([below.view(torch.uint8), lower.view(torch.uint8)])


def decode_indices(encoded: torch.Tensor, k: int, numel: int) -> torch.Tensor:
    """Unpack rows (rows, index_bytes(k, numel)); returns indices (rows, k) of dtype `index_dtype(numel)`."""
    if not _is_blocked(k, numel):
        return view_bytes(encoded, index_dtype(numel))
    parts = encoded.split([encoded.shape[1] - INDEX_BYTES * k, INDEX_BYTES * k], 1)
    below, lower = map(view_bytes, parts, (torch.int32, torch.int16))  # (rows, blocks), (rows, k)
    counts = torch.diff(below, append=below.new_full((len(below), 1), k))
    # The number of each row's first block, counting the blocks of all rows.
    first = torch.arange(0, below.numel(), below.shape[1], dtype=torch.int32, device=encoded.device)
    blocks = torch.repeat_interleave(counts.flatten(), output_size=lower.numel()).view_as(lower) - first[:, None]
    return blocks.to(index_dtype(numel)).mul_(BLOCK).add_(lower).add_(BLOCK // 2)


def index_dtype(numel: int) -> torch.dtype:
    """The dtype of indices below `numel`."""
    return torch.int32 if numel <= 1 << 31 else torch.int64


def index_bytes(k: int, numel: int) -> int:
    """Bytes of k packed indices."""
    return min(_blocked_bytes(k, numel), index_dtype(numel).itemsize * k)


def _blocked_bytes(k: int, numel: int) -> int:
    return INDEX_BYTES * k + 4 * -(-numel // BLOCK)


def _is_blocked(k: int, numel: int) -> bool:
    return _blocked_bytes(k, numel) <= index_dtype(numel).itemsize * k
