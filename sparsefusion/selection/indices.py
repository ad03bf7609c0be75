"""Places on the wire: ascending numbers below `numel`, in two bytes each, and four for every 65,536 of `numel` that begin.

What is sent is how many there are below each multiple of 65,536, beginning with 0; then their lower halves. Or, if that is
shorter (of less than one number in about 32,768), the places as they are.
"""

import torch

from sparsefusion.collectives.wire_formats import view_bytes

BLOCK, PLACE_BYTES = 1 << 16, 2


def encode_places(places: torch.Tensor, numel: int) -> torch.Tensor:
    """uint8 of places (k,) of their dtype, which ascend."""
    if not _in_blocks(len(places), numel):
        return places.view(torch.uint8)
    multiples = torch.arange(0, numel, BLOCK, dtype=places.dtype, device=places.device)
    below = torch.searchsorted(places, multiples, out_int32=True)
    lower = ((places & (BLOCK - 1)) - BLOCK // 2).to(torch.int16)
    return torch.cat([below.view(torch.uint8), lower.view(torch.uint8)])


def decode_places(encoded: torch.Tensor, k: int, numel: int) -> torch.Tensor:
    """(rows, k), of the dtype of places below `numel`, of rows of what `encode_places` returns."""
    if not _in_blocks(k, numel):
        return view_bytes(encoded, dtype_of_places(numel))
    parts = encoded.split([encoded.shape[1] - PLACE_BYTES * k, PLACE_BYTES * k], 1)
    below, lower = map(view_bytes, parts, (torch.int32, torch.int16))
    counts = torch.diff(below, append=below.new_full((len(below), 1), k))
    first = torch.arange(0, below.numel(), below.shape[1], dtype=torch.int32, device=encoded.device)  # of each row
    blocks = torch.repeat_interleave(counts.flatten(), output_size=lower.numel()).view_as(lower) - first[:, None]
    return blocks.to(dtype_of_places(numel)).mul_(BLOCK).add_(lower).add_(BLOCK // 2)


def dtype_of_places(numel: int) -> torch.dtype:
    """Of places below `numel`."""
    return torch.int32 if numel <= 1 << 31 else torch.int64


def bytes_of_places(k: int, numel: int) -> int:
    """Of k places."""
    return min(_of_blocks(k, numel), dtype_of_places(numel).itemsize * k)


def _of_blocks(k, numel) -> int:
    """Bytes of k places by blocks."""
    return PLACE_BYTES * k + 4 * -(-numel // BLOCK)


def _in_blocks(k, numel) -> bool:
    """Whether they are sent so."""
    return bytes_of_places(k, numel) == _of_blocks(k, numel)
