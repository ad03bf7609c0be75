"""The collective steps of a plan: all-to-all, all-gather, reduce-scatter and all-reduce, as messages between pairs of ranks.

Every function takes the state of a rank and a step, and is a generator as `state` describes.
"""

import math
from collections.abc import Sequence

import torch

from commir.ir.monoids import MONOIDS
from commir.ir.program import Operand, Result
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
    _write_all(joined, own, [piece[own] for piece in pieces])
    for distance in range(1, size):
        to, source = (own + distance) % size, (own - distance) % size
        into = [each.receiver(source) for each in joined]
        arrived = yield from state.exchange(step.axis, [piece[to] for piece in pieces], distance, into)
        _write_all(joined, source, arrived)
        _drop_copies(state, joined, arrived)
    state.replace(names, new)


def gather(state: RankState, step: Gather) -> Run:
    """Join the blocks of all ranks along the axis. A rank passes on what it received last."""
    names = [name for name, _ in step.moves]
    passed = state.read(names)
    new = [_joined_buffer(x, state.size(step.axis), joined) for x, (_, joined) in zip(passed, step.moves, strict=True)]
    state.count.hold(*new)
    size = state.size(step.axis)
    joined = [_Joined(state, name, x, place, size) for x, (name, place) in zip(new, step.moves, strict=True)]
    yield from _pass_around(state, step.axis, passed, joined)
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
    passed = [state.on_wire(output, x) for output, x in zip(outputs, total, strict=True)]
    joined = [_Joined(None, name, x, ROWS, size) for name, x in zip(names, whole, strict=True)]
    yield from _pass_around(state, step.axis, passed, joined)
    state.count.drop(*total, *whole)
    new = [x.flatten()[: y.numel()].reshape(y.shape) for x, y in zip(whole, partial, strict=True)]
    state.count.hold(*new)
    state.replace(names, new)


def _pass_around(state: RankState, axis: str, passed: list[Tensor], joined: "list[_Joined]") -> Run:
    """Write this rank's blocks `passed`, and those of all others along the axis, into `joined` at their places."""
    size, own, is_own = state.size(axis), state.coordinates[axis], True
    _write_all(joined, own, passed)
    for distance in range(1, size):
        source = (own + distance) % size
        arrived = yield from state.exchange(axis, passed, -1, [each.receiver(source) for each in joined])
        if not is_own:
            _drop_copies(state, joined, passed)
        _write_all(joined, source, arrived)
        passed, is_own = arrived, False
    if not is_own:
        _drop_copies(state, joined, passed)


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
    size, own = state.size(axis), state.coordinates[axis]
    monoid = MONOIDS[state.program.result_of(outputs[0].name).monoid]
    for distance in range(1, size):
        to = (own + distance) % size
        leaving = [state.on_wire(output, piece[to]) for output, piece in zip(outputs, pieces, strict=True)]
        arrived = yield from state.exchange(axis, leaving, distance)
        monoid.combine(total, arrived)
        state.count.drop(*arrived)


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
