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


@dataclass(frozen=True)
class SparseMessage:
    """Encodes the selections of some units on this rank, and decodes those of all ranks.

    All ranks have the same units, numbers of elements and wire format, so their messages have the same size.

    Attributes:
        selections: The selections of this rank.
        wire: The format of their values.
        ranks: The number of ranks.
    """

    selections: Sequence[Selection]
    wire: str
    ranks: int

    def encode(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """(message (nbytes,) uint8, [rounding errors (k,) of each unit]); the list is empty if values are sent in fp32.

        The values of each unit begin a new block of the format. Indices are positions in the concatenated units.
        """
        format, counts = wire_format(self.wire, self._dtype), self._counts
        padded_values = [
            pad(s.values.to(self._dtype), (0, n - len(s.values)))
            for s, n in zip(self.selections, self._padded_counts, strict=True)
        ]
        values = torch.cat(padded_values)
        encoded = format.encode(clamp_to_format(values, format, self.ranks).unsqueeze(0), self.ranks)
        rounded_off = []
        if self.wire != "fp32":
            lost = values - self._decode_values(encoded)[0]
            lost = lost.where(lost.isfinite(), 0).split(self._padded_counts)
            rounded_off = [part[:count] for part, count in zip(lost, counts, strict=True)]
        starts, numel = self._starts
        indices = [s.indices.to(index_dtype(numel)) + n for s, n in zip(self.selections, starts, strict=True)]
        return torch.cat([encoded[0], encode_indices(torch.cat(indices), numel)]), rounded_off

    def decode(self, messages: torch.Tensor) -> tuple[torch.Tensor, list[list[tuple[torch.Tensor, torch.Tensor]]]]:
        """Decode messages (ranks, nbytes); returns (all values, for each unit the pairs (values, indices) of all ranks)."""
        counts, (starts, numel) = self._counts, self._starts
        value_bytes = messages.shape[1] - index_bytes(sum(counts), numel)
        values = self._decode_values(messages[:, :value_bytes])
        indices = decode_indices(messages[:, value_bytes:], sum(counts), numel).split(counts, 1)
        parts = zip(values.split(self._padded_counts, 1), indices, starts, strict=True)
        return values, [list(zip(v[:, : i.shape[1]], (i - start).int(), strict=True)) for v, i, start in parts]

    @property
    def _counts(self) -> list[int]:
        return [len(s.values) for s in self.selections]

    @property
    def _dtype(self) -> torch.dtype:
        """The dtype from which the values of all units are encoded."""
        return reduce(torch.promote_types, (s.values.dtype for s in self.selections))

    @property
    def _padded_counts(self) -> list[int]:
        """The number of values of each unit, padded to whole blocks."""
        block = wire_format(self.wire, self._dtype).block
        return [padded(count, block) for count in self._counts]

    @property
    def _starts(self) -> tuple[list[int], int]:
        """(the index of each unit's first element, the number of all elements)."""
        *starts, numel = accumulate((s.unit.numel for s in self.selections), initial=0)
        return starts, numel

    def _decode_values(self, encoded: torch.Tensor) -> torch.Tensor:
        format = wire_format(self.wire, self._dtype)
        return format.undo_scaling(format.decode(encoded, self._dtype), self.ranks)


def clamp_to_format(values: torch.Tensor, format: Cast | Int8, ranks: int) -> torch.Tensor:
    """Replace finite values that the format cannot represent by its largest value; the rest stays in the residual."""
    if isinstance(format, Int8) or format.dtype.itemsize >= values.dtype.itemsize:
        return values
    limit = torch.finfo(format.dtype).max * (ranks if format.scaled else 1)
    return values.where(~values.isfinite(), values.clamp(-limit, limit))
