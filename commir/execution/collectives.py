"""The collective steps of a plan: all-to-all, all-gather, reduce-scatter and all-reduce, as messages between pairs of ranks.

Every function takes the state of a rank and a step, and is a generator of messages (see the docstring of `state`).
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from commir.ir.monoids import MONOIDS
from commir.ir.program import Operand, Result
from commir.lowering.accounting import AHEAD
from commir.lowering.plan_steps import AllReduce, AllToAll, Gather, Place, ReduceScatter, Slice, Swap
from commir.lowering.tensor_blocks import has_contiguous_blocks

from .state import RankState, Run

Tensor = torch.Tensor
ROWS = Place(0, 1)


def all_to_all(state: RankState, step: AllToAll) -> Run:
    """Cut each operand into pieces for the ranks along the axis, and join the pieces that they send."""
    size, names = state.size(step.axis), [name for name, _, _ in step.moves]
    pieces = _pieces(state, [(name, cut) for name, cut, _ in step.moves], size)
    moves = [(name, joined) for name, _, joined in step.moves]
    new = [_joined_buffer(x.slots[0], x.shape, size, joined) for x, (_, joined) in zip(pieces, moves, strict=True)]
    state.count.hold(*new)
    yield from _collect(state, step.axis, pieces, _destinations(state, moves, new, size))
    state.replace(names, new)


def gather(state: RankState, step: Gather) -> Run:
    """Join the blocks of all ranks along the axis."""
    size, names = state.size(step.axis), [name for name, _ in step.moves]
    blocks = state.read(names)
    new = [_joined_buffer(x, x.shape, size, joined) for x, (_, joined) in zip(blocks, step.moves, strict=True)]
    state.count.hold(*new)
    yield from _collect(state, step.axis, [_Whole(x) for x in blocks], _destinations(state, step.moves, new, size))
    state.replace(names, new)


def slice_own(state: RankState, step: Slice) -> Run:
    """Keep this rank's piece of each operand."""
    size, own, names = state.size(step.axis), state.coordinates[step.axis], [name for name, _ in step.moves]
    new = [_Pieces(x, cut, size).copy(own) for x, (_, cut) in zip(state.read(names), step.moves, strict=True)]
    state.count.hold(*new)
    state.replace(names, new)
    yield from ()


def swap(state: RankState, step: Swap) -> Run:
    """Exchange operands between the ranks at (x, y) and (y, x) of the two mesh axes."""
    peer = state.swap_peer(step)
    old = state.read(step.operands)
    if peer == state.rank:
        new = [x.clone(memory_format=torch.contiguous_format) for x in old]
        state.count.hold(*new)
    else:
        handle, new = yield from state.begin_exchange(old, peer, peer)
        yield handle
    state.replace(step.operands, new)


def reduce_scatter(state: RankState, step: ReduceScatter) -> Run:
    """Each rank receives all ranks' partial results of its own piece, combines them, and keeps the result."""
    size, own, outputs = state.size(step.axis), state.coordinates[step.axis], state.outputs(step.result)
    names = [output.name for output in outputs]
    pieces = _pieces(state, step.moves, size, [state.dtype_on_wire(output) for output in outputs])
    total = [each.copy(own) for each in pieces]
    state.count.hold(*total)
    yield from _combine_pieces(state, step.axis, outputs, pieces, total)
    state.replace(names, total)


def all_reduce(state: RankState, step: AllReduce) -> Run:
    """Combine all ranks' partial results on every rank, with the same bits."""
    size, own, outputs = state.size(step.axis), state.coordinates[step.axis], state.outputs(step.result)
    result, names = state.program.results[step.result], [output.name for output in outputs]
    partial = state.read(names)
    rows = _rows(state, result, partial, size)
    state.count.hold(*rows)
    dtypes = [state.dtype_on_wire(output) for output in outputs]
    pieces = [_Pieces(x, ROWS, size, True, dtype) for x, dtype in zip(rows, dtypes, strict=True)]
    total = [each.copy(own) for each in pieces]
    state.count.hold(*total)
    yield from _combine_pieces(state, step.axis, outputs, pieces, total)
    rounded = [state.on_wire(output, x) for output, x in zip(outputs, total, strict=True)]
    state.count_instead(total, rounded)
    del pieces, total  # so that they are freed
    destinations = [_Destination(x, ROWS, size, is_in_place=False) for x in rows]  # the pieces have all been sent
    yield from _collect(state, step.axis, [_Whole(x) for x in rounded], destinations)
    state.count.drop(*rounded, *rows)
    new = [x.flatten()[: y.numel()].reshape(y.shape) for x, y in zip(rows, partial, strict=True)]
    state.count.hold(*new)
    state.replace(names, new)


def _collect(
    state: RankState, axis: str, sources: "Sequence[_Whole | _Pieces]", destinations: "list[_Destination]"
) -> Run:
    """Send the blocks of `sources` to all ranks along an axis, and write the blocks that they send into `destinations`.

    If nothing is copied on either side, all messages begin at once.
    """
    size, own = state.size(axis), state.coordinates[axis]
    is_in_place = all(destination.is_in_place for destination in destinations)

    def write(source: int, blocks: list[Tensor]) -> None:
        for destination, block in zip(destinations, blocks, strict=True):
            destination.write(source, block)
            if not destination.is_in_place:
                state.count.drop(block)

    for destination, source in zip(destinations, sources, strict=True):
        destination.write(own, source.block(own))
    buffers = {rank: [each.buffer(rank) for each in destinations] for rank in range(size) if rank != own}
    most_under_way = AHEAD if any(source.is_copied for source in sources) or not is_in_place else size
    yield from _exchange_with_all(state, axis, sources, buffers, write, most_under_way)


def _exchange_with_all(
    state: RankState, axis: str, sources: "Sequence[_Whole | _Pieces]", buffers: Mapping[int, Sequence[Tensor | None]],
    on_arrival: Callable[[int, list[Tensor]], None], most_under_way: int,
) -> Run:  # fmt: skip
    """Exchange tensors with all other ranks along an axis, with at most `most_under_way` exchanges in flight.

    Args:
        sources: the tensors to send.
        buffers: {rank: the tensors that receive its blocks}. For ranks that are not in it, and for entries None, new tensors
            are allocated.
        on_arrival: called with (rank, blocks) for each rank in turn.
    """
    size, own = state.size(axis), state.coordinates[axis]
    under_way = deque[tuple[int, Any, list[Tensor], list[Tensor]]]()
    for distance in range(1, size + most_under_way):
        if distance < size:
            to, source = (own + distance) % size, (own - distance) % size
            leaving = [source.block(to) for source in sources]
            copies = [x for x, each in zip(leaving, sources, strict=True) if each.is_copied]
            state.count.hold(*copies)
            peers = state.peer(axis, distance), state.peer(axis, -distance)
            handle, blocks = yield from state.begin_exchange(leaving, *peers, buffers.get(source))
            under_way.append((source, handle, blocks, copies))
        if under_way and distance >= most_under_way:
            source, handle, blocks, copies = under_way.popleft()
            yield handle
            state.count.drop(*copies)
            on_arrival(source, blocks)
            del handle, blocks, copies  # so that they are freed before the next message is allocated


@dataclass
class _Whole:
    """A tensor that is sent to every rank as it is."""

    x: Tensor
    is_copied = False

    def block(self, to: int) -> Tensor:
        return self.x


class _Pieces:
    """A contiguous tensor, cut at `place` into `count` blocks, one for each rank; sent as `dtype`.

    Attributes:
        slots: views of the blocks.
        is_copied: a message is a copy, because blocks are not contiguous or have another dtype.
    """

    def __init__(
        self, x: Tensor, place: Place, count: int, is_contiguous: bool = False, dtype: torch.dtype | None = None
    ) -> None:
        self.slots, self.shape = _slots(x, place, count), list(x.shape)
        self.shape[place.dim] //= count
        self._dtype = dtype or x.dtype
        self.is_copied = not is_contiguous or self._dtype != x.dtype

    def block(self, to: int) -> Tensor:
        slot = self.slots[to]
        if self.is_copied:
            slot = slot.to(self._dtype, copy=True, memory_format=torch.contiguous_format)
        return slot.view(self.shape)

    def copy(self, index: int) -> Tensor:
        """A copy of block number `index`, in the tensor's own dtype."""
        return self.slots[index].clone(memory_format=torch.contiguous_format).view(self.shape)


def _pieces(
    state: RankState, moves: Sequence[tuple[str, Place]], count: int, dtypes: Sequence[torch.dtype | None] | None = None
) -> list[_Pieces]:
    """The tensors of operands, each cut into `count` blocks. moves: (operand, place where it is cut)."""
    tensors, dtypes = state.read([name for name, _ in moves]), dtypes or [None] * len(moves)
    return [
        _Pieces(x, cut, count, has_contiguous_blocks(state.digits, name, cut), dtype)
        for x, (name, cut), dtype in zip(tensors, moves, dtypes, strict=True)
    ]


class _Destination:
    """A tensor into which `count` blocks are written at `place`. is_in_place: messages are received directly into it."""

    def __init__(self, x: Tensor, place: Place, count: int, is_in_place: bool) -> None:
        self.slots, self.is_in_place = _slots(x, place, count), is_in_place
        self._shape = list(x.shape)
        self._shape[place.dim] //= count

    def buffer(self, index: int) -> Tensor | None:
        return self.slots[index].view(self._shape) if self.is_in_place else None

    def write(self, index: int, block: Tensor) -> None:
        """Write block number `index`, unless it was received in its place."""
        slot = self.slots[index]
        if block.data_ptr() != slot.data_ptr():
            slot.copy_(block.reshape(slot.shape))


def _destinations(
    state: RankState, moves: Sequence[tuple[str, Place]], tensors: Sequence[Tensor], count: int
) -> list[_Destination]:
    """Destinations of operands that are joined from `count` blocks. moves: (operand, place where its blocks join)."""
    return [
        _Destination(x, place, count, has_contiguous_blocks(state.digits, name, place))
        for x, (name, place) in zip(tensors, moves, strict=True)
    ]


def _combine_pieces(
    state: RankState, axis: str, outputs: list[Operand], pieces: "list[_Pieces]", total: list[Tensor]
) -> Run:
    """Combine this rank's piece of every other rank's partial result into `total`."""
    monoid = MONOIDS[state.program.result_of(outputs[0].name).monoid]

    def combine(source: int, blocks: list[Tensor]) -> None:
        monoid.combine(total, blocks)
        state.count.drop(*blocks)

    yield from _exchange_with_all(state, axis, pieces, {}, combine, AHEAD)


def _rows(state: RankState, result: Result, partial: list[Tensor], size: int) -> list[Tensor]:
    """Partial results with one row for each element of the axes that they share, padded with the neutral element."""
    dims = len(state.program.row_axes(result))
    count = math.prod(partial[0].shape[:dims])
    padded = -(-count // size) * size
    rows = []
    for x, value in zip(partial, MONOIDS[result.monoid].values(len(partial)), strict=True):
        row = x.new_full((padded, *x.shape[dims:]), value)
        row[:count] = x.reshape(count, *x.shape[dims:])
        rows.append(row)
    return rows


def _slots(x: Tensor, place: Place, count: int) -> list[Tensor]:
    """Views of the `count` blocks of the digit at `place`. Dimension `place.dim` of each view numbers the outer digits, and
    the next one the elements of a block.
    """
    size = x.shape[place.dim] // (place.outer * count)
    return list(x.unflatten(place.dim, (place.outer, count, size)).unbind(place.dim + 1))


def _joined_buffer(like: Tensor, shape: Sequence[int], count: int, place: Place) -> Tensor:
    """An uninitialized tensor for `count` blocks of a shape, joined at `place`, with the dtype and device of `like`."""
    shape = list(shape)
    shape[place.dim] *= count
    return like.new_empty(shape)
