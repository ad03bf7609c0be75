"""Ranks along a row or a column of the grid: gathering their chunks, passing them around, sending results home.

A chunk is what one cell of the axis holds, sequence first: (slots, ...). Everything here goes by messages between pairs of
ranks of one group, one step after the other, and every rank takes the same steps.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from attention2d.layout.token_order import Segment
from sparsefusion.collectives.counted import Counter, Exchange, exchange


class Chunks:
    """Several ranks' chunks in one buffer, sorted by position; `segments` says what it holds, from slot 0 on."""

    def __init__(self, chunks: Sequence[tuple[Segment, ...]]):
        found = []
        for number, chunk in enumerate(chunks):
            ends = accumulate(segment.length for segment in chunk)
            found += [(s, number, slice(end - s.length, end)) for s, end in zip(chunk, ends, strict=True)]
        found.sort(key=lambda piece: piece[0].start)
        self.segments = tuple(segment for segment, _, _ in found)
        self.count, self.slots = len(chunks), sum(segment.length for segment in self.segments)
        self._pieces = [[] for _ in chunks]  # of each chunk: (slots of the chunk, slots of the buffer)
        ends = accumulate(segment.length for segment in self.segments)
        for (segment, number, slots), end in zip(found, ends, strict=True):
            self._pieces[number].append((slots, slice(end - segment.length, end)))

    def empty(self, like: torch.Tensor) -> torch.Tensor:
        """A buffer for chunks like this one."""
        return like.new_empty(self.slots, *like.shape[1:])

    def pieces(self, chunk: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The chunk `tensor`, cut as it lies in a buffer."""
        return [tensor[slots] for slots, _ in self._pieces[chunk]]

    def views(self, chunk: int, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Where those lie."""
        return [buffer[slots] for _, slots in self._pieces[chunk]]

    def put(self, chunk: int, tensor: torch.Tensor, buffer: torch.Tensor) -> None:
        """The chunk `tensor` into its place."""
        for piece, view in zip(self.pieces(chunk, tensor), self.views(chunk, buffer), strict=True):
            view.copy_(piece)

    def take(self, chunk: int, buffer: torch.Tensor) -> torch.Tensor:
        """A chunk out of a buffer: the buffer itself if there is no other."""
        if self.count == 1:
            return buffer
        return torch.cat(self.views(chunk, buffer))


def add(totals: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> None:
    """Each part to its total."""
    for total, part in zip(totals, parts, strict=True):
        total += part


@dataclass(frozen=True)
class Axis:
    """peers: the ranks along it, of which this one is number `own`; chunks: of each of them, in the same order."""

    group: object
    counter: Counter
    peers: tuple[int, ...]
    own: int
    chunks: tuple[tuple[Segment, ...], ...]

    @property
    def size(self) -> int:
        return len(self.peers)

    def peer(self, step: int) -> int:
        """The rank `step` further, around."""
        return self.peers[(self.own + step) % self.size]

    def chunk(self, step: int) -> tuple[Segment, ...]:
        """What that rank's chunk holds."""
        return self.chunks[(self.own + step) % self.size]

    def exchange(self, sends, receives) -> Exchange:
        """`sparsefusion.collectives.counted.exchange`, counted."""
        return exchange(sends, receives, self.group, self.counter)

    def gather(self, layout: Chunks, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Every rank's chunk of each of `tensors`, in buffers of this layout. Sends (size - 1) chunks of each.

        Every rank passes what came last on to the one before it: seven chunks of 262 KB, which 20 mbit would carry in
        0.73 s, take 0.8 to 0.9 s from one neighbour, and with bbr as TCP 1.1 to 1.2 s from one rank after the other.
        """
        if self.size == 1:
            return list(tensors)
        buffers = [layout.empty(tensor) for tensor in tensors]
        for tensor, buffer in zip(tensors, buffers, strict=True):
            layout.put(self.own, tensor, buffer)
        for step in range(1, self.size):
            last, coming = ((self.own + by) % self.size for by in (step - 1, step))
            sends = [(part, self.peer(-1)) for buffer in buffers for part in layout.views(last, buffer)]
            receives = [(part, self.peer(1)) for buffer in buffers for part in layout.views(coming, buffer)]
            self.exchange(sends, receives).wait()
        return buffers

    def scatter(self, layout: Chunks, buffers: Sequence[torch.Tensor], dtypes, take) -> None:
        """For each other rank, in the order of the steps, take(its parts of this rank's chunk, one of each buffer).

        dtypes: what they travel in. Sends (size - 1) chunks of each.
        """
        pairs = list(zip(buffers, dtypes, strict=True))
        for step in range(1, self.size):
            take(self._send_home(layout, pairs, step))

    def add_up(self, layout: Chunks, buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's chunk of each of `buffers`, summed over all ranks: the nearest before it first, its own last.

        Sums are passed on to the rank before, as chunks are, each rank adding what it has. Sends (size - 1) chunks of each.
        """
        sums = [layout.take((self.own + 1) % self.size, buffer) for buffer in buffers]
        for step in range(1, self.size):
            sums, chunk = self.pass_on(sums).wait(), (self.own + 1 + step) % self.size
            for total, buffer in zip(sums, buffers, strict=True):
                add(layout.pieces(chunk, total), layout.views(chunk, buffer))
        return sums

    def _send_home(self, layout, pairs, step) -> list[torch.Tensor]:
        """The chunk of the rank `step` further leaves; the one of the rank `step` before for this one."""
        slots, target = layout.slots // self.size, (self.own + step) % self.size
        received = [buffer.new_empty(slots, *buffer.shape[1:], dtype=dtype) for buffer, dtype in pairs]
        sends = [(part.to(dtype), self.peer(step)) for buffer, dtype in pairs for part in layout.views(target, buffer)]
        receives = [(part, self.peer(-step)) for r in received for part in layout.pieces(self.own, r)]
        self.exchange(sends, receives).wait()
        return received

    def trade(self, tensors: Sequence[torch.Tensor], to: int, source: int) -> Exchange:
        """Start sending `tensors` to rank `to`, and receiving as many of the same shapes from rank `source`."""
        receives = [(tensor.new_empty(tensor.shape), source) for tensor in tensors]
        return self.exchange([(tensor, to) for tensor in tensors], receives)

    def pass_on(self, tensors: Sequence[torch.Tensor]) -> Exchange:
        """Start sending `tensors` to the rank before this one, and receiving the same of the one after it."""
        return self.trade(tensors, self.peer(-1), self.peer(1))

    def stream(self, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, Sequence[torch.Tensor]]]:
        """(step, the chunks of the rank `step` further), this rank's first; the next ones travel while these are used.

        Every rank passes what it has on to the one before it. Sends (size - 1) chunks of each.
        """
        for step in range(self.size):
            under_way = None
            if step + 1 < self.size:
                under_way = self.pass_on(tensors)
            yield step, tensors
            if under_way:
                tensors = under_way.wait()

    def swap(self, step: int, tensors: Sequence[torch.Tensor]) -> Exchange:
        """Start sending `tensors` to the rank `step` further, and receiving the same from the one `step` before."""
        return self.trade(tensors, self.peer(step), self.peer(-step))
