"""The bytes that the steps of a plan send and hold, counted from layouts and sizes, without running anything.

A running rank counts its tensors by the same rules (`execution.state.Count`). Inputs at home stay for the whole run. Every
block, accumulator and message counts from its allocation until it is no longer needed, and so does the copy that is sent of
a block that is not contiguous or has another dtype. Temporaries of kernels do not count.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from commir.ir.program import Operand

from . import plan_steps as kinds
from .operand_layouts import Digits, Layout
from .plan_steps import METHODS, Key, Step, register_key
from .rank_view import RankView
from .tensor_blocks import has_contiguous_blocks

AHEAD = 2  # exchanges of a collective that are under way at a time, where arriving tensors are copied


@dataclass(frozen=True)
class Message:
    """`count` messages of `nbytes` each along a mesh axis, of which `at_once` are under way at a time."""

    axis: str
    nbytes: int
    count: int = 1
    at_once: int = 1


@dataclass(frozen=True)
class Account:
    """The messages that a rank sends in each step (`by_step`), and the most bytes that it holds at a time (`peak`)."""

    by_step: tuple[tuple[Message, ...], ...]
    peak: int

    def in_chunks(self, number: int, kept: int) -> "Account":
        """The account of a plan with `number` chunks, from that of one chunk; a rank keeps `kept` bytes besides."""
        by_step = tuple(tuple(replace(each, count=each.count * number) for each in step) for step in self.by_step)
        return Account(by_step, kept + self.peak)

    @property
    def sent(self) -> int:
        return sum(message.nbytes * message.count for step in self.by_step for message in step)

    @property
    def messages(self) -> int:
        return sum(message.count for step in self.by_step for message in step)


def account(digits: Digits, steps: Sequence[Step], owned: Collection[str] = ()) -> Account:
    """Count the steps of a plan. All ranks send and hold the same, except that in a `Swap` some have nothing to send.

    owned: inputs that are dropped when they are no longer needed, as copies for a chunk are. The caller keeps the others.
    """
    ledger = _Ledger(digits, owned)
    for step in steps:
        ledger.messages.append([])
        _COUNT[type(step)](ledger, step)
    return Account(tuple(map(tuple, ledger.messages)), ledger.peak)


class _Ledger(RankView):
    """The sizes of all registers while steps are taken. blocks: {register: (elements, bytes of each, True if at home)}."""

    def __init__(self, digits: Digits, owned: Collection[str]) -> None:
        super().__init__(digits, 0)
        self.messages: list[list[Message]] = []
        self.held, self.peak = 0, 0
        self.blocks: dict[tuple[str, Key], tuple[int, int, bool]] = {}
        for x in self.program.given:
            self._add_block(x, digits.home(x), self.program.itemsize(x), is_home=x.name not in owned)

    # Registers

    def _hold(self, nbytes: int) -> None:
        self.held += nbytes
        self.peak = max(self.peak, self.held)

    def _add_register(self, name: str, key: Key, count: int, itemsize: int, is_home: bool = False) -> None:
        self._hold(count * itemsize)
        self.blocks[name, register_key(key)] = count, itemsize, is_home

    def _add_block(self, x: Operand, layout: Layout, itemsize: int, key: Key = (), is_home: bool = False) -> None:
        self._add_register(x.name, key, math.prod(self.digits.local_shape(x, layout)), itemsize, is_home)

    def _remove_register(self, name: str, key: Key = ()) -> tuple[int, int]:
        """Remove a register, without releasing its bytes. Returns (elements, bytes to release)."""
        count, itemsize, is_home = self.blocks.pop((name, register_key(key)))
        return count, 0 if is_home else count * itemsize

    def _nbytes(self, name: str) -> int:
        count, itemsize, _ = self.blocks[name, ()]
        return count * itemsize

    def _send(self, axis: str, nbytes: int) -> None:
        self.messages[-1].append(Message(axis, nbytes))

    def _exchange(self, axis: str, nbytes: int, arriving: int, leaving: int) -> int:
        """Count a message to every other rank along an axis; return the bytes of copies that are held meanwhile.

        arriving: the bytes of a message that do not arrive in their place. leaving: the bytes that are copied to be sent. If
        both are 0, all messages begin at once.
        """
        others = self.size(axis) - 1
        at_once = AHEAD if arriving or leaving else others
        self.messages[-1].append(Message(axis, nbytes, others, at_once))
        return min(at_once, others) * (arriving + leaving)

    def _replace(self, names: Sequence[str], factor: Callable[[int], int], transit: int) -> None:
        """Replace registers by blocks of `factor(elements)` elements, with `transit` bytes on their way meanwhile."""
        sizes = [(factor(self.blocks[name, ()][0]), self.blocks[name, ()][1]) for name in names]
        self._hold(sum(count * itemsize for count, itemsize in sizes))
        self._hold(transit)
        self.held -= transit
        for name, (count, itemsize) in zip(names, sizes, strict=True):
            self.held -= self._remove_register(name)[1]
            self.blocks[name, ()] = count, itemsize, False

    def _wide(self, output: Operand) -> int:
        return max(4, self.program.itemsize(output))

    def _on_wire(self, output: Operand) -> int:
        return self.program.itemsize(output, is_partial=True)

    def _is_copied(self, name: str, place: kinds.Place) -> bool:
        return not has_contiguous_blocks(self.digits, name, place)

    # Steps

    def all_to_all(self, step: kinds.AllToAll) -> None:
        """Send a piece of each operand to every other rank along the axis; blocks keep their size."""
        pieces = {name: self._nbytes(name) // self.size(step.axis) for name, _, _ in step.moves}
        arriving = sum(pieces[name] for name, _, joined in step.moves if self._is_copied(name, joined))
        leaving = sum(pieces[name] for name, cut, _ in step.moves if self._is_copied(name, cut))
        transit = self._exchange(step.axis, sum(pieces.values()), arriving, leaving)
        self._replace(list(pieces), lambda count: count, transit)

    def gather(self, step: kinds.Gather) -> None:
        """Send each block to every other rank along the axis, and hold the blocks of all."""
        names, size = [name for name, _ in step.moves], self.size(step.axis)
        arriving = [name for name, joined in step.moves if self._is_copied(name, joined)]
        transit = self._exchange(step.axis, sum(map(self._nbytes, names)), sum(map(self._nbytes, arriving)), 0)
        self._replace(names, lambda count: count * size, transit)

    def slice(self, step: kinds.Slice) -> None:
        size = self.size(step.axis)
        self._replace([name for name, _ in step.moves], lambda count: count // size, 0)

    def swap(self, step: kinds.Swap) -> None:
        outermost = min(step.axes, key=self.mesh.names.index)  # the peer is elsewhere along both
        self._send(outermost, sum(map(self._nbytes, step.operands)))
        self._replace(step.operands, lambda count: count, 0)

    def derive(self, step: kinds.Derive) -> None:
        """Hold a derived input. Its block has the source's elements without the axes that it lacks."""
        operand = self.program.operand(step.operand)
        source = self.program.operand(operand.source[0])
        dropped = math.prod(self.program.axis(name).size for name in source.axes if name not in operand.axes)
        count = self.blocks[source.name, ()][0] // dropped
        self._add_register(step.operand, (), count, self.program.itemsize(operand))

    def send(self, step: kinds.Send) -> None:
        """Send blocks to one rank, and hold the received ones besides."""
        blocks = [self.blocks[name, register_key(step.source)] for name in step.operands]
        self._send(step.axis, sum(count * itemsize for count, itemsize, _ in blocks))
        for name, (count, itemsize, _) in zip(step.operands, blocks, strict=True):
            self._add_register(name, step.target, count, itemsize)

    def arrive(self, step: kinds.Arrive) -> None:
        """Nothing changes: arriving blocks are counted from `send` on."""

    def free(self, step: kinds.Free) -> None:
        self.held -= sum(self._remove_register(name, step.key)[1] for name in step.operands)

    def compute(self, step: kinds.Compute) -> None:
        """Release the carried state of a scan, and hold accumulators, of at least 4 bytes an element, that are new."""
        if (scan := self.program.scan) and (scan.carry, ()) in self.blocks:
            self.held -= self._remove_register(scan.carry)[1]
        for number, result in enumerate(self.program.results):
            key = self.key(result.outputs[0], step.counters)
            if (result.outputs[0], key) not in self.blocks:
                for output in self.outputs(number):
                    self._add_block(output, self.digits.needed(output), self._wide(output), key)

    def summarize(self, step: kinds.Summarize) -> None:
        for operand in map(self.program.operand, self.scan.summaries):
            self._add_block(operand, self.digits.needed(operand), self.program.itemsize(operand))

    def pass_states(self, step: kinds.PassStates) -> None:
        """Hold the state that enters each block, as large as the state that leaves it."""
        count, itemsize, _ = self.blocks[self.scan.state, ()]
        self._add_register(self.scan.carry, (), count, itemsize)

    def send_partial(self, step: kinds.SendPartial) -> None:
        """Send a partial result in its travelling dtype to one rank, and hold the buffer that receives the other rank's."""
        sent, rounded, dropped = 0, 0, 0
        for output in self.outputs(step.result):
            count, nbytes = self._remove_register(output.name, step.source)
            sent += count * self._on_wire(output)
            rounded += count * self._on_wire(output) * self.program.is_rounded(output)
            dropped += nbytes * self.program.is_rounded(output)
        self._send(step.axis, sent)
        self._hold(rounded)
        self.held -= dropped
        self._hold(sent)

    def combine(self, step: kinds.Combine) -> None:
        """Release the received partial result, and the one that was sent."""
        for output in self.outputs(step.result):
            self.held -= 2 * self.blocks[output.name, register_key(step.target)][0] * self._on_wire(output)

    def reduce_scatter(self, step: kinds.ReduceScatter) -> None:
        """Send a piece of the partial result to every other rank along the axis, and hold one combined piece."""
        size, wire, leaving = self.size(step.axis), 0, 0
        for output, (name, cut) in zip(self.outputs(step.result), step.moves, strict=True):
            piece = self.blocks[name, ()][0] // size * self._on_wire(output)
            wire += piece
            leaving += piece * (self.program.is_rounded(output) or self._is_copied(name, cut))
        transit = self._exchange(step.axis, wire, wire, leaving)
        self._replace([name for name, _ in step.moves], lambda count: count // size, transit)

    def all_reduce(self, step: kinds.AllReduce) -> None:
        """Send pieces of rows to every other rank along the axis, twice, and hold the result at its size."""
        size, outputs = self.size(step.axis), self.outputs(step.result)
        counts = [self.blocks[output.name, ()][0] for output in outputs]
        shape = self.digits.local_shape(outputs[0], self.digits.needed(outputs[0]))
        whole = counts[0] // math.prod(shape[len(self.program.row_axes(self.program.results[step.result])) :])
        rows = -(-whole // size)  # of each piece
        pieces = [(rows * (count // whole), output) for count, output in zip(counts, outputs, strict=True)]
        wide = sum(n * self._wide(output) for n, output in pieces)
        wire = sum(n * self._on_wire(output) for n, output in pieces)
        rounded = [(n, output) for n, output in pieces if self.program.is_rounded(output)]
        leaving = sum(n * self._on_wire(output) for n, output in rounded)
        transit = self._exchange(step.axis, wire, wire, leaving)
        self._hold(size * wide + wide + transit)  # rows, this rank's piece, and copies of others
        self.held -= transit
        self._hold(leaving)  # this rank's piece, rounded
        self.held -= sum(n * self._wide(output) for n, output in rounded)
        transit = self._exchange(step.axis, wire, wire, 0)
        self._hold(transit)
        self.held -= size * wide + wire + transit

    def round(self, step: kinds.Round) -> None:
        """Hold outputs in the dtype in which they travel, instead of the accumulators."""
        for output in self.outputs(step.result):
            count, nbytes = self._remove_register(output.name)
            if self.program.is_rounded(output):
                self._hold(count * self._on_wire(output))
                self.held -= nbytes
            self.blocks[output.name, ()] = count, self._on_wire(output), False


_COUNT: dict[type, Callable[[_Ledger, Any], None]] = {kind: getattr(_Ledger, name) for kind, name in METHODS.items()}
