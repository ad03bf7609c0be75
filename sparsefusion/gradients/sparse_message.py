"""The message of the selected elements of several units: their values in a wire format, then their packed indices."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate

import torch
from torch.nn.functional import pad

from commfabric.collectives.wire_formats import Cast, Int8, padded, wire_format
from sparsefusion.planning.plan import Unit
from sparsefusion.selection.indices import decode_indices, encode_indices, index_bytes, index_dtype


@dataclass
class Selection:
    """The elements that a rank selected from a unit: values (k,), at least fp32, and indices (k,), int32, ascending."""

    unit: Unit
    values: torch.Tensor
    indices: torch.Tensor


class SparseMessage:
    """Encodes the selections of some units on this rank, and decodes those of all ranks.

    All ranks have the same units, numbers of elements and wire format, so their messages have the same size.

    Args:
        selections: The selections of this rank.
        wire: The format of their values.
        ranks: The number of ranks.
    """

    def __init__(self, selections: Sequence[Selection], wire: str, ranks: int):
        self._selections, self._rounds, self._ranks = selections, wire != "fp32", ranks
        self._dtype = reduce(torch.promote_types, (s.values.dtype for s in selections))  # from which values are encoded
        self._format = wire_format(wire, self._dtype)
        self._counts = [len(s.values) for s in selections]
        self._padded_counts = [padded(count, self._format.block) for count in self._counts]
        *self._starts, self._numel = accumulate((s.unit.numel for s in selections), initial=0)

    def encode(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """(message (nbytes,) uint8, [rounding errors (k,) of each unit]); the list is empty if values are sent in fp32.

        The values of each unit begin a new block of the format. Indices are positions in the concatenated units.
        """
        padded_values = [
            pad(s.values.to(self._dtype), (0, n - len(s.values)))
            for s, n in zip(self._selections, self._padded_counts, strict=True)
        ]
        values, rounded_off = torch.cat(padded_values), []
        encoded = self._format.encode(clamp_to_format(values, self._format, self._ranks).unsqueeze(0), self._ranks)
        if self._rounds:
            lost = values - self._decode_values(encoded)[0]
            lost = lost.where(lost.isfinite(), 0).split(self._padded_counts)
            rounded_off = [part[:count] for part, count in zip(lost, self._counts, strict=True)]
        dtype = index_dtype(self._numel)
        indices = torch.cat([s.indices.to(dtype) + n for s, n in zip(self._selections, self._starts, strict=True)])
        return torch.cat([encoded[0], encode_indices(indices, self._numel)]), rounded_off

    def decode(self, messages: torch.Tensor) -> tuple[torch.Tensor, list[list[tuple[torch.Tensor, torch.Tensor]]]]:
        """Decode messages (ranks, nbytes); returns (all values, for each unit the pairs (values, indices) of all ranks)."""
        count = sum(self._counts)
        value_bytes = messages.shape[1] - index_bytes(count, self._numel)
        values = self._decode_values(messages[:, :value_bytes])
        indices = decode_indices(messages[:, value_bytes:], count, self._numel).split(self._counts, 1)
        parts = zip(values.split(self._padded_counts, 1), indices, self._starts, strict=True)
        return values, [list(zip(v[:, : i.shape[1]], (i - start).int(), strict=True)) for v, i, start in parts]

    def _decode_values(self, encoded: torch.Tensor) -> torch.Tensor:
        return self._format.undo_scaling(self._format.decode(encoded, self._dtype), self._ranks)


def clamp_to_format(values: torch.Tensor, format: Cast | Int8, ranks: int) -> torch.Tensor:
    """Replace finite values that the format cannot represent by its largest value; the rest stays in the residual."""
    if isinstance(format, Int8) or format.dtype.itemsize >= values.dtype.itemsize:
        return values
    limit = torch.finfo(format.dtype).max * (ranks if format.scaled else 1)
    return values.where(~values.isfinite(), values.clamp(-limit, limit))
