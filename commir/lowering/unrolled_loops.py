"""The loops of a rank, unrolled: when each block travels, and when it is used for the last time.

At loop counters t, a rank with coordinates x uses block (t + x) mod T of each shifted digit. It gets a block of an input
from the next rank along the mesh axis, which used it one turn earlier. Every block travels once: it is kept where an outer
loop that does not index it uses it again. Partial results travel to the rank before, which adds its own part, or directly to
their owner, as the monoid says.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from commir.ir.monoids import MONOIDS
from commir.ir.program import Operand

from .operand_layouts import Digits, Piece
from .plan_steps import Arrive, Combine, Compute, Free, Key, Send, SendPartial, Step


@dataclass(frozen=True)
class Loop:
    """A loop of a rank. mesh_axis: the axis against which it is shifted (None: a plain loop, in which nothing travels)."""

    piece: Piece
    size: int
    mesh_axis: str | None


def loops_of(digits: Digits) -> tuple[Loop, ...]:
    """The loops of a rank that have several turns, outermost first."""
    shifts = dict(digits.nest.shifts)
    loops = [digit for digit in map(digits.nest.digit, digits.nest.order) if digit.size > 1]
    return tuple(Loop(digits.piece(loop.name), loop.size, shifts.get(loop.name)) for loop in loops)


def travelling(digits: Digits, loops: Sequence[Loop], operand: Operand) -> tuple[int, ...]:
    """The numbers of the loops along which blocks of an operand travel: the mesh axis holds the loop's digit of it."""
    needed = digits.needed(operand)
    return tuple(j for j, loop in enumerate(loops) if loop.mesh_axis and needed.get(loop.mesh_axis) == loop.piece)


def unrolled(digits: Digits, loops: Sequence[Loop]) -> Iterator[Step]:
    """The steps from the first block to the last partial result."""
    program = digits.nest.program
    keys = {operand.name: travelling(digits, loops, operand) for operand in program.inputs if operand.in_tile}
    travels = [travelling(digits, loops, program.operand(each.outputs[0])) for each in program.results]
    turns = _turns(loops, set().union(*keys.values()), set().union(*travels))
    together = {along: tuple(name for name in keys if keys[name] == along) for along in keys.values() if along}
    streams = [_Stream(names, along, loops, turns) for along, names in together.items()]
    are_direct = [MONOIDS[result.monoid].travels_directly for result in program.results]
    partials = [_Partials(n, along, loops, turns, are_direct[n]) for n, along in enumerate(travels) if along]
    for number, turn in enumerate(turns):
        for stream in streams:
            yield from stream.fetch(number)
        yield Compute(turn)
        for partial in partials:
            yield from partial.advance(number)
        for stream in streams:
            yield from stream.release(number)
    for partial in partials:
        while not partial.is_done:
            yield from partial.advance(len(turns))


def _turns(loops: Sequence[Loop], streamed: set[int], travelled: set[int]) -> list[Key]:
    """The loop counters of every turn, in order.

    Where only partial results travel along a loop, a rank's own block comes last, so that each message travels while the
    next block is computed; otherwise it comes first.
    """
    ranges = [
        (*range(1, loop.size), 0) if j in travelled and j not in streamed else range(loop.size)
        for j, loop in enumerate(loops)
    ]
    return list(product(*ranges))


class _Blocks:
    """Blocks of an operand that travel along some loops; `keys` has the block of each turn."""

    def __init__(self, along: tuple[int, ...], loops: Sequence[Loop], turns: Sequence[Key]) -> None:
        self.axes = [str(loops[j].mesh_axis) for j in along]
        self.sizes = [loops[j].size for j in along]
        self.keys = [tuple(turn[j] for j in along) for turn in turns]
        self.first = {key: number for number, key in reversed(list(enumerate(self.keys)))}
        self.last = {key: number for number, key in enumerate(self.keys)}


class _Stream(_Blocks):
    """The blocks of inputs that travel together. A block is passed on when it is used for the first time."""

    def __init__(
        self, operands: tuple[str, ...], along: tuple[int, ...], loops: Sequence[Loop], turns: Sequence[Key]
    ) -> None:
        super().__init__(along, loops, turns)
        self.operands, self._arrived = operands, {(0,) * len(along)}

    def fetch(self, number: int) -> Iterator[Step]:
        """Wait for the block of this turn, and begin to pass it on if this is its first use."""
        key = self.keys[number]
        if key not in self._arrived:
            self._arrived.add(key)
            yield Arrive(self.operands, key)
            yield from self._free(_predecessor(key), number - 1)
        if self.first[key] == number:
            for level, after in self._successors(key):
                yield Send(self.operands, self.axes[level], key, after)

    def release(self, number: int) -> Iterator[Step]:
        yield from self._free(self.keys[number], number)

    def _free(self, key: Key, number: int) -> Iterator[Step]:
        is_used = self.last[key] > number or any(after not in self._arrived for _, after in self._successors(key))
        if any(key) and not is_used:
            yield Free(self.operands, key)

    def _successors(self, key: Key) -> list[tuple[int, Key]]:
        """(level, key) of the blocks that are received from the rank that holds this one; an inner ring starts from each."""
        successors = []
        for level in reversed(range(len(key))):
            if key[level] + 1 < self.sizes[level]:
                successors.append((level, _with(key, level, key[level] + 1)))
            if key[level]:
                break
        return successors[::-1]


class _Partials(_Blocks):
    """Partial results that travel.

    They combine level by level, from the innermost loop: the partial results at a level's counters 1, 2, ... are combined
    into that at 0. In a ring, 1 is sent on to be combined with 2, and so on until it comes to its owner, at 0.
    """

    def __init__(
        self, result: int, along: tuple[int, ...], loops: Sequence[Loop], turns: Sequence[Key], is_direct: bool
    ) -> None:
        super().__init__(along, loops, turns)
        self.result, self._is_direct = result, is_direct
        self._sources = {key: self._sources_of(key) for key in product(*map(range, self.sizes))}
        self._computed: set[Key] = set()
        self._sent: dict[Key, int] = {}

    @property
    def is_done(self) -> bool:
        """Return True if all parts are computed, and all but one were sent."""
        return not any(self._sources.values()) and len(self._sent) + 1 == len(self._sources)

    def advance(self, number: int) -> Iterator[Step]:
        """After turn `number`, combine what earlier turns sent, and send what is complete."""
        if number < len(self.keys) and self.last[self.keys[number]] == number:
            self._computed.add(self.keys[number])
        for key in sorted(self._computed):
            sources = self._sources[key]
            while sources and self._sent.get(sources[0], number) < number:
                yield Combine(self.result, sources.pop(0), key)
        for key in sorted(self._computed - self._sent.keys()):
            if any(key) and not self._sources[key]:
                self._sent[key] = number if number < len(self.keys) else number - 1
                level, target, distance = self._target(key)
                yield SendPartial(self.result, self.axes[level], distance, key, target)

    def _sources_of(self, key: Key) -> list[Key]:
        """The partial results that are combined into this one, in order: inner levels first."""
        sources: list[Key] = []
        for level in reversed(range(len(key))):
            counter, size = key[level], self.sizes[level]
            if self._is_direct and counter == 0:
                sources += [_with(key, level, other) for other in range(1, size)]
            elif not self._is_direct and counter != 1:
                sources.append(_with(key, level, (counter or size) - 1))
            if counter:
                break
        return sources

    def _target(self, key: Key) -> tuple[int, Key, int]:
        """Return (level, key, distance) of the place to which a complete partial result is sent."""
        level = max(j for j, counter in enumerate(key) if counter)
        if self._is_direct:
            return level, _with(key, level, 0), key[level]
        return level, _with(key, level, (key[level] + 1) % self.sizes[level]), -1


def _with(key: Key, level: int, counter: int) -> Key:
    return (*key[:level], counter, *key[level + 1 :])


def _predecessor(key: Key) -> Key:
    """The block whose holder sends this one: one less at the innermost counter that is not zero."""
    level = max(j for j, counter in enumerate(key) if counter)
    return _with(key, level, key[level] - 1)
