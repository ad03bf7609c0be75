"""The collective steps of a plan: all-to-all, all-gather, reduce-scatter and all-reduce, as messages between pairs of ranks.

Every function takes the state of a rank and a step, and is a generator as `state` describes.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from commir.ir.monoids import MONOIDS
from commir.ir.program import Operand, Result
from commir.lowering.accounting import AHEAD
from commir.lowering.blocks import is_received_in_place
from commir.lowering.steps import AllReduce, AllToAll, Gather, Place, ReduceScatter, Slice, Swap

from .state import RankState, Run

Tensor = torch.Tensor
ROWS = Place(0, 1)


def all_to_all(state: RankState, step: AllToAll) -> Run:
    """Cut each operand into pieces for the ranks along the axis, and join the pieces that they send."""
    size, own, names = state.size(step.axis), state.coordinates[step.axis], [name for name, _, _ in step.moves]
    pieces = [_pieces(x, cut, size) for x, (_, cut, _) in zip(state.read(names), step.moves, strict=True)]
    new = [_joined_buffer(piece[own], size, joined) for piece, (_, _, joined) in zip(pieces, step.moves, strict=True)]
    state.count.hold(*new)
    joined = [_Joined(state, name, x, place, size) for x, (name, _, place) in zip(new, step.moves, strict=True)]
    yield from _collect(state, step.axis, lambda to: [piece[to] for piece in pieces], joined)
    state.replace(names, new)


def gather(state: RankState, step: Gather) -> Run:
    """Join the blocks of all ranks along the axis."""
    size, names = state.size(step.axis), [name for name, _ in step.moves]
    blocks = state.read(names)
    new = [_joined_buffer(x, size, joined) for x, (_, joined) in zip(blocks, step.moves, strict=True)]
    state.count.hold(*new)
    joined = [_Joined(state, name, x, place, size) for x, (name, place) in zip(new, step.moves, strict=True)]
    yield from _collect(state, step.axis, lambda to: blocks, joined)
    state.replace(names, new)


def slice_own(state: RankState, step: Slice) -> Run:
    """Keep this rank's piece of each operand."""
    size, own, names = state.size(step.axis), state.coordinates[step.axis], [name for name, _ in step.moves]
    new = [_copy(_pieces(x, cut, size)[own]) for x, (_, cut) in zip(state.read(names), step.moves, strict=True)]
    state.count.hold(*new)
    state.replace(names, new)
    yield from ()


def swap(state: RankState, step: Swap) -> Run:
    """Exchange operands with the rank that has these coordinates on the two mesh axes in the other order."""
    first, second = step.axes
    here = state.coordinates
    peer = state.plan.mesh.rank_at({**here, first: here[second], second: here[first]})
    old = state.read(step.operands)
    new = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in old]
    state.count.hold(*new)
    if here[first] == here[second]:
        for x, y in zip(new, old, strict=True):
            x.copy_(y)
    else:
        handle = yield state.begin([(x, peer) for x in old], [(x, peer) for x in new])
        yield handle
    state.replace(step.operands, new)


def reduce_scatter(state: RankState, step: ReduceScatter) -> Run:
    """Combine all ranks' partial results, of which each rank keeps one piece."""
    size, own, outputs = state.size(step.axis), state.coordinates[step.axis], state.outputs(step.result)
    names = [output.name for output in outputs]
    pieces = [_pieces(x, cut, size) for x, (_, cut) in zip(state.read(names), step.moves, strict=True)]
    total = [_copy(piece[own]) for piece in pieces]
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
    pieces = [_pieces(x, ROWS, size) for x in rows]
    total = [_copy(piece[own]) for piece in pieces]
    state.count.hold(*total)
    yield from _combine_pieces(state, step.axis, outputs, pieces, total)
    state.count.drop(*rows)
    whole = [torch.empty_like(x) for x in rows]
    state.count.hold(*whole)
    rounded = [state.on_wire(output, x) for output, x in zip(outputs, total, strict=True)]
    joined = [_Joined(None, name, x, ROWS, size) for name, x in zip(names, whole, strict=True)]
    yield from _collect(state, step.axis, lambda to: rounded, joined)
    state.count.drop(*total, *whole)
    new = [x.flatten()[: y.numel()].reshape(y.shape) for x, y in zip(whole, partial, strict=True)]
    state.count.hold(*new)
    state.replace(names, new)


def _collect(state: RankState, axis: str, leaving: Callable[[int], list[Tensor]], joined: "list[_Joined]") -> Run:
    """Bring together what all ranks along an axis have for this one. leaving: this rank's tensors for each. joined: where
    those of each belong."""
    size, own = state.size(axis), state.coordinates[axis]
    _write_all(joined, own, leaving(own))
    is_in_place = not any(each.has_copies for each in joined)

    def arrived(source: int, blocks: list[Tensor]) -> None:
        _write_all(joined, source, blocks)
        _drop_copies(state, joined, blocks)

    receivers = {source: [each.receiver(source) for each in joined] for source in range(size) if source != own}
    yield from _exchange_with_all(state, axis, leaving, receivers, arrived, size if is_in_place else AHEAD)


def _exchange_with_all(
    state: RankState, axis: str, leaving: Callable[[int], list[Tensor]], receivers: Mapping[int, Any],
    arrived: Callable[[int, list[Tensor]], None], ahead: int,
) -> Run:  # fmt: skip
    """Exchange tensors with all other ranks along an axis, of which at most `ahead` are on their way at a time.

    leaving: those for each rank. receivers: {rank: what its tensors are received into} as in `begin_exchange`. arrived: is
    called for each rank in turn with its tensors.
    """
    size, own, under_way = state.size(axis), state.coordinates[axis], deque[tuple[int, Any, list[Tensor]]]()
    for distance in range(1, size + ahead):
        if distance < size:
            to, source = (own + distance) % size, (own - distance) % size
            handle, blocks = yield from state.begin_exchange(axis, leaving(to), distance, receivers.get(source))
            under_way.append((source, handle, blocks))
        if under_way and distance >= ahead:
            source, handle, blocks = under_way.popleft()
            yield handle
            arrived(source, blocks)


class _Joined:
    """A tensor of `count` blocks at a place, which are written into it. state: None: blocks are never received in place."""

    def __init__(self, state: RankState | None, name: str, x: Tensor, place: Place, count: int) -> None:
        self.slots = _slots(x, place, count)
        self._is_in_place = state is not None and is_received_in_place(state.digits, name, place)
        self._shape = list(x.shape)
        self._shape[place.dim] //= count

    def receiver(self, index: int) -> Tensor | None:
        """Where block number `index` can be received; None: in a tensor of its own."""
        return self.slots[index].view(self._shape) if self._is_in_place else None

    def write(self, index: int, block: Tensor) -> None:
        """Write block number `index`, unless it has been received in its place."""
        slot = self.slots[index]
        if block.data_ptr() != slot.data_ptr():
            slot.copy_(block.reshape(slot.shape))

    @property
    def has_copies(self) -> bool:
        return not self._is_in_place


def _write_all(joined: Sequence[_Joined], index: int, blocks: Sequence[Tensor]) -> None:
    for each, block in zip(joined, blocks, strict=True):
        each.write(index, block)


def _drop_copies(state: RankState, joined: Sequence[_Joined], blocks: Sequence[Tensor]) -> None:
    """Count blocks that were received in tensors of their own as no longer needed."""
    state.count.drop(*(block for each, block in zip(joined, blocks, strict=True) if each.has_copies))


def _combine_pieces(
    state: RankState, axis: str, outputs: list[Operand], pieces: list[list[Tensor]], total: list[Tensor]
) -> Run:
    """Combine this rank's piece of every other rank's partial result into `total`."""
    monoid = MONOIDS[state.program.result_of(outputs[0].name).monoid]

    def leaving(to: int) -> list[Tensor]:
        return [state.on_wire(output, piece[to]) for output, piece in zip(outputs, pieces, strict=True)]

    def arrived(source: int, blocks: list[Tensor]) -> None:
        monoid.combine(total, blocks)
        state.count.drop(*blocks)

    yield from _exchange_with_all(state, axis, leaving, {}, arrived, AHEAD)


def _rows(state: RankState, result: Result, partial: list[Tensor], size: int) -> list[Tensor]:
    """Partial results with one row per element of the axes that they share, padded with the neutral element."""
    dims = len(state.program.row_axes(result))
    count = math.prod(partial[0].shape[:dims])
    padded = -(-count // size) * size
    rows = []
    for x, value in zip(partial, MONOIDS[result.monoid].values(len(partial)), strict=True):
        row = x.new_full((padded, *x.shape[dims:]), value)
        row[:count] = x.reshape(count, *x.shape[dims:])
        rows.append(row)
    return rows


def _pieces(x: Tensor, place: Place, count: int) -> list[Tensor]:
    """The `count` blocks of the digit at `place`: views if no digit surrounds it, otherwise copies."""
    if place.outer == 1:
        return list(x.tensor_split(count, place.dim))
    return [slot.flatten(place.dim, place.dim + 1) for slot in _slots(x, place, count)]


def _slots(x: Tensor, place: Place, count: int) -> list[Tensor]:
    """Views of the same blocks, to write into, with the digits outside of them in a dimension of their own."""
    size = x.shape[place.dim] // (place.outer * count)
    return list(x.unflatten(place.dim, (place.outer, count, size)).unbind(place.dim + 1))


def _joined_buffer(block: Tensor, count: int, place: Place) -> Tensor:
    """An uninitialized tensor for `count` such blocks, joined at `place`."""
    shape = list(block.shape)
    shape[place.dim] *= count
    return block.new_empty(shape)


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)
