"""Sums of what the ranks have selected from their gradients: three ways to exchange it.

| exchange | a rank sends | a rank receives |
|---|---|---|
| `Gathered` | its k elements to every other rank | all elements of all ranks, up to P k different ones |
| `SparseAllReduce` | about 2 k elements | the k largest sums |
| `Added` (all ranks have selected the same indices) | k values, twice | k sums |

k elements take 8 bytes each in fp32, with indices of 4 bytes (2, if they are packed). `Gathered` sends (P - 1) k of them, so
its bytes grow with the ranks; those of `SparseAllReduce` do not. Sources: `SparseAllReduce` has the structure of Ok-Topk (Li
and Hoefler, 2022) and SparDL (Zhao et al., 2023): a reduce-scatter of selected elements, a new selection, and an all-gather.
"""

from collections.abc import Sequence
from functools import reduce
from itertools import accumulate

import torch
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from commfabric.collectives.counted import Counter, begin_all_gather, begin_all_reduce, begin_all_to_all
from commfabric.collectives.wire_formats import Cast, Int8, padded, wire_format
from sparsefusion.planning.plan import Unit
from sparsefusion.selection.indices import decode_indices, encode_indices, index_bytes, index_dtype

from .error_feedback import ErrorFeedback, Selection

# (the values of a unit, their ascending indices), which `wait` returns for every unit; the sum is over the pairs.
Part = tuple[torch.Tensor, torch.Tensor]


class SparseMessage:
    """Encodes the selections of some units on this rank, and decodes those of all ranks.

    All ranks have the same units, numbers of elements and wire format, so their messages have the same size.
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


class Added:
    """An all-reduce of the selected values, of ranks that have selected the same indices."""

    def __init__(self, selections: Sequence[Selection], group: ProcessGroup, counter: Counter):
        self._selections = selections
        self._message = begin_all_reduce(torch.cat([s.values for s in selections]), group, counter)

    def wait(self) -> tuple[torch.Tensor, list[list[Part]]]:
        """(all sums, for each unit [(sums, indices)]), once they have arrived."""
        (received,) = self._message.wait()
        sums = received.split([len(s.values) for s in self._selections])
        return received, [[(total, s.indices)] for total, s in zip(sums, self._selections, strict=True)]


class Gathered:
    """An all-gather of the selected elements. What rounding to the wire format takes from them returns to the residuals."""

    def __init__(
        self, selections: Sequence[Selection], wire: str, feedback: ErrorFeedback, group: ProcessGroup, counter: Counter
    ):
        self._message = SparseMessage(selections, wire, group.size())
        encoded, rounded_off = self._message.encode()
        for selection, lost in zip(selections, rounded_off, strict=False):  # none, if nothing is rounded
            feedback.add_back(selection, lost)
        self._exchange = begin_all_gather(encoded, group, counter)

    def wait(self) -> tuple[torch.Tensor, list[list[Part]]]:
        """(all values, for each unit [(values, indices)] of every rank), once they have arrived."""
        return self._message.decode(self._exchange.wait()[0])


class SparseAllReduce:
    """Sums of selected elements, of which every rank receives the k largest.

    Each rank owns 1/P of the elements, scattered over all units, and receives from every rank the elements that it owns: at
    most ceil(k / P), the largest. It adds them up in the order of the ranks, keeps the ceil(k / P) largest sums, and sends
    them to all ranks. What is left out at either place, and what rounding takes, returns to the residual of the rank that
    left it out, so that nothing is lost. If ceil(k / P) elements take B bytes, a rank sends 2 (P - 1) B.

    All ranks call `wait` in the order in which they have made these objects, because it communicates.
    """

    def __init__(
        self, selections: Sequence[Selection], wire: str, feedback: ErrorFeedback, group: ProcessGroup, counter: Counter
    ):
        self._units, self._wire, self._feedback = [s.unit for s in selections], wire, feedback
        self._group, self._counter, self._ranks = group, counter, group.size()
        *self._starts, self._numel = accumulate((unit.numel for unit in self._units), initial=0)
        self._share = -(-self._numel // self._ranks)  # elements that a rank owns
        values = torch.cat([s.values for s in selections])
        self._most = min(self._share, -(-len(values) // self._ranks))
        empty = values.new_zeros(self._most)
        self._message = self._message_of(empty, empty)  # decodes the messages of other ranks
        places = torch.cat([s.indices.long() + start for s, start in zip(selections, self._starts, strict=True)])
        self._exchange = begin_all_to_all(self._encode_for_owners(values, places), group, counter)

    def wait(self) -> tuple[torch.Tensor, list[list[Part]]]:
        """(all sums, for each unit [(sums, indices)]). Waits for the first message, and sends the second."""
        encoded = self._encode(*self._own_sums(self._exchange.wait()[0]), self._group.rank())
        received = begin_all_gather(encoded, self._group, self._counter).wait()[0]
        values, (parts,) = self._message.decode(received)
        sums = torch.cat([each for each, _ in parts])
        places = torch.cat([self._places(local, owner) for owner, (_, local) in enumerate(parts)])
        places, order = places.sort(stable=True)
        return values, [[part] for part in self._by_unit(sums[order], places)]

    def _encode_for_owners(self, values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """(P, B): for each rank the selected elements that it owns. places (k,): indices that count through all units."""
        local = places // self._ranks
        owners = (places + _scattered(local)) % self._ranks  # of P consecutive elements, every rank owns one
        order = owners.sort(stable=True).indices  # the local indices of each owner ascend
        counts = owners.bincount(minlength=self._ranks).tolist()
        parts = zip(values[order].split(counts), local[order].split(counts), strict=True)
        return torch.stack([self._encode(*part, owner) for owner, part in enumerate(parts)])

    def _own_sums(self, received: torch.Tensor) -> Part:
        """The sums of the elements that this rank owns and any rank has sent, and their ascending local indices."""
        _, (parts,) = self._message.decode(received)
        values, indices = (torch.cat(each) for each in zip(*parts, strict=True))
        local, inverse = indices.unique(return_inverse=True)
        return values.new_zeros(len(local)).index_add_(0, inverse, values), local

    def _encode(self, values: torch.Tensor, local: torch.Tensor, owner: int) -> torch.Tensor:
        """(B,): the largest `self._most` elements of an owner. The others return to the residuals."""
        if len(values) > self._most:
            kept = torch.zeros_like(local, dtype=torch.bool)
            kept[values.abs().topk(self._most, sorted=False).indices] = True
            self._add_back(values[~kept], local[~kept], owner)
            values, local = values[kept], local[kept]
        missing = self._most - len(values)
        filled = torch.cat([values, values.new_zeros(missing)])
        encoded, rounded_off = self._message_of(filled, pad(local, (0, missing), value=self._share - 1)).encode()
        if rounded_off:
            self._add_back(rounded_off[0][: len(values)], local, owner)
        return encoded

    def _message_of(self, values: torch.Tensor, local: torch.Tensor) -> SparseMessage:
        owned = Unit(("owned",), self._share, self._most)
        return SparseMessage([Selection(owned, values, local.int())], self._wire, self._ranks)

    def _add_back(self, values: torch.Tensor, local: torch.Tensor, owner: int) -> None:
        """Return elements to the residuals, except those that are not finite."""
        parts = self._by_unit(values.where(values.isfinite(), 0), self._places(local, owner))
        for unit, (part, indices) in zip(self._units, parts, strict=True):
            self._feedback.add_back(Selection(unit, part, indices), part)

    def _by_unit(self, values: torch.Tensor, places: torch.Tensor) -> list[Part]:
        """[(values, indices)] of each unit, of elements at ascending places."""
        ends = torch.tensor([*self._starts[1:], self._numel], device=places.device)
        counts = torch.searchsorted(places, ends).diff(prepend=ends.new_zeros(1)).tolist()
        parts = zip(values.split(counts), places.split(counts), self._starts, strict=True)
        return [(part, (place - start).int()) for part, place, start in parts]

    def _places(self, local: torch.Tensor, owner: int) -> torch.Tensor:
        """The places of an owner's elements among all units, from their local indices; they ascend alike."""
        local = local.long()
        places = local * self._ranks + (owner - _scattered(local)) % self._ranks
        return places.clamp_(max=self._numel - 1)  # the zeros that fill up a message may lie beyond


def _scattered(numbers: torch.Tensor) -> torch.Tensor:
    """A hash of int64 numbers below 2^31, so that no rank owns whole columns of a matrix."""
    return numbers * 2654435761 >> 16
