"""The cost of a candidate in closed form, by the rules of lowering, without lowering it.

Bytes are exactly those of the plan. Time is a lower bound: one collective after the other, and in the loops the longer of
computing and sending. It also bounds plans in chunks, unless a measured fabric sends several small messages in less time
than a large one. Memory is a lower bound: the blocks that a tile needs, and accumulators.

A search asks for the costs of thousands of candidates, whose parts are often the same. The messages along a part depend on
the part and, for each set of loops, on the sizes of the parts before it along which operands with these loops are needed
whole; for outputs that every rank has at home, also on those of all parts. They are remembered for these numbers.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

from commir.ir.mesh import Mesh
from commir.ir.program import WHOLE, Operand, Program, Scan
from commir.lowering.accounting import AHEAD
from commir.lowering.scan_messages import is_sliced
from commir.lowering.timeline import check_tile, collective_seconds, link_seconds

from .candidates import Candidate, Part

Known = tuple[str, int, str, str | None]  # (level, size, loop axis, shifted loop) of a part
Factors = tuple[int, ...]  # for each set of loops, the sizes of parts along which operands with these are needed whole


class Cost(NamedTuple):
    """The cost of a candidate on one rank: seconds (at least), bytes, and messages."""

    seconds: float = 0.0
    sent: int = 0
    messages: int = 0

    def plus(self, other: "Cost") -> "Cost":
        return Cost(self.seconds + other.seconds, self.sent + other.sent, self.messages + other.messages)


@dataclass(frozen=True)
class _Tensor:
    """An operand, with what its messages depend on.

    Attributes:
        elements: of all ranks together.
        itemsize: bytes of an element in a message.
        loops: the number of its set of loops.
        result: of an output, the first output of its result, with which it travels; "" for an input.
        row: of an output, the elements of one row of an all-reduce.
    """

    operand: Operand
    elements: int
    itemsize: int
    loops: int
    result: str = ""
    row: int = 1


class CostModel:
    """Costs of the candidates of one program; `search` describes the times and `overlap`.

    Attributes:
        kept: the bytes of a rank's inputs and outputs at home, which every plan holds at its end.
    """

    def __init__(
        self, program: Program, mesh: Mesh, point_seconds: float = 0.0, call_seconds: float = 0.0, overlap: float = 1.0
    ) -> None:
        check_tile(point_seconds, call_seconds, overlap)
        self.program, self.mesh, self.overlap = program, mesh, overlap
        self._point_seconds, self._call_seconds = point_seconds, call_seconds
        self._points, self._ranks = program.points, mesh.ranks
        self._order = {axis.name: number for number, axis in enumerate(program.axes) if axis.kind != WHOLE}
        self._sets = list(dict.fromkeys(map(self._loops_of, program.operands)))
        self._replicates = any(not output.home for output in program.outputs)
        if self._replicates:
            self._sets.append(())  # its factor is the number of ranks so far
        self._tensors = [self._tensor(x, is_output=x in program.outputs) for x in program.operands]
        self._link = lru_cache(maxsize=None)(partial(link_seconds, mesh))  # slow to compute on a measured link
        self._ones: Factors = (1,) * len(self._sets)
        self._collectives: dict[tuple[Known, Factors, Factors], tuple[Cost, Factors]] = {}
        self._rings: dict[tuple[tuple[Known, ...], Factors], tuple[float, float, int, int]] = {}
        self._of_chunk: dict[tuple[str, int], CostModel] = {}
        home = {x.name: program.nbytes(x) // (mesh.ranks if x.home else 1) for x in program.operands}
        self._inputs = sum(home[x.name] for x in program.given)
        self.kept = self._inputs + sum(home[x.name] for x in program.outputs)

    def tile_seconds(self, candidate: Candidate) -> float:
        return self._tile_seconds(_turns(candidate.parts), candidate.chunks)

    def _tile_seconds(self, turns: int, chunks: int) -> float:
        return self._call_seconds + self._points / turns / self._ranks / chunks * self._point_seconds

    def cost(self, candidate: Candidate) -> Cost:
        """The cost of a candidate."""
        parts = [part for part in candidate.parts if part.size > 1]
        whole, factors = (self._factors(parts) if self._replicates else ()), self._ones
        seconds, sent, messages, tiles, ring = 0.0, 0, 0, 1, tuple[Known, ...]()
        for part in parts:
            known = part.level, part.size, part.placement.axis, part.shifted
            if (along := self._collectives.get((known, factors, whole))) is None:
                along = self._collectives[known, factors, whole] = self._along(part, factors, whole)
            (time, nbytes, count), factors = along
            seconds, sent, messages = seconds + time, sent + nbytes, messages + count
            if part.shifted:
                ring, tiles = (*ring, known), tiles * part.size
        computing = tiles * self._tile_seconds(tiles, candidate.chunks)
        if ring:
            if (rings := self._rings.get((ring, factors))) is None:
                rings = self._rings[ring, factors] = self._of_rings([part for part in parts if part.shifted], factors)
            beginning, busy, nbytes, count = rings
            return Cost(seconds + max(computing + beginning, busy), sent + nbytes, messages + count)
        scan = self.program.scan
        if scan is not None and any(part.placement.axis == scan.axis for part in parts):
            computing *= 2  # summaries take the recurrence of a tile
            time, nbytes, count = self._of_scan(scan, parts)
            seconds, sent, messages = seconds + time, sent + nbytes, messages + count
        return Cost(seconds + computing, sent, messages)

    def held(self, candidate: Candidate) -> dict[str, int]:
        """{operand: bytes} of accumulators, and of inputs that a rank holds for its tiles beside those at home, at least."""
        parts = [part for part in candidate.parts if part.size > 1]
        factors, held = self._factors(parts), dict[str, int]()
        for x in self._tensors:
            elements, operand = self._local(x, factors), x.operand
            if x.result:
                held[operand.name] = elements * max(4, x.itemsize)
            elif operand.in_tile:
                needs = [needed_axis(part, operand) for part in parts]
                is_at_home = not operand.source and all(need == operand.home for need in needs)
                blocks = _turns(_rings_of(operand, parts)) - is_at_home
                held[operand.name] = elements * x.itemsize * min(2, blocks)
        return held

    def memory(self, held: dict[str, int]) -> int:
        """The fewest bytes with a candidate's `held`: inputs at home, and what its tiles need."""
        return self._inputs + sum(held.values())

    def memory_in_chunks(self, held: dict[str, int], axis: str, chunks: int) -> float:
        """The fewest bytes that it holds with chunks of an axis: operands at home, and what a chunk's tiles need."""
        indexed = {operand.name for operand in self.program.operands if axis in operand.axes}
        return self.kept + sum(nbytes / (chunks if name in indexed else 1) for name, nbytes in held.items())

    def seconds_in_chunks(self, candidate: Candidate) -> float:
        """A lower bound of the time of a candidate with chunks: that of one chunk by itself, times their number."""
        key = candidate.chunked, candidate.chunks
        if key not in self._of_chunk:
            chunk = self.program.resized(**{key[0]: self.program.axis(key[0]).size // key[1]})
            self._of_chunk[key] = CostModel(chunk, self.mesh, self._point_seconds, self._call_seconds, self.overlap)
        return candidate.chunks * self._of_chunk[key].cost(Candidate(candidate.parts)).seconds

    def _loops_of(self, operand: Operand) -> tuple[str, ...]:
        return tuple(name for name in operand.axes if name in self._order)

    def _tensor(self, operand: Operand, is_output: bool) -> _Tensor:
        elements, itemsize = math.prod(self.program.shape(operand)), self.program.itemsize(operand, is_output)
        loops = self._sets.index(self._loops_of(operand))
        if not is_output:
            return _Tensor(operand, elements, itemsize, loops)
        result = self.program.result_of(operand.name)
        whole = set(operand.axes) - set(self.program.row_axes(result))
        row = math.prod(self.program.axis(name).size for name in whole)
        return _Tensor(operand, elements, itemsize, loops, result.outputs[0], row)

    def _factors(self, parts: Iterable[Part]) -> Factors:
        factors = self._ones
        for part in parts:
            factors = self._after(part, factors)
        return factors

    def _after(self, part: Part, factors: Factors) -> Factors:
        """The factors after a part, from those before it."""
        pairs = zip(factors, self._sets, strict=True)
        axes = part.placement.axis, part.shifted
        return tuple(factor if axes[0] in loops or axes[1] in loops else factor * part.size for factor, loops in pairs)

    def _local(self, x: _Tensor, factors: Factors) -> int:
        """The elements of an operand's block in the loops. factors: after all parts."""
        return x.elements // (self._ranks // factors[x.loops])

    def _along(self, part: Part, factors: Factors, whole: Factors) -> tuple[Cost, Factors]:
        """(cost of the collectives along a part, factors after it). factors: before it. whole: after all parts."""
        sent: dict[tuple[str, int], int] = {}  # {(kind, messages): bytes of each}
        others = part.size - 1
        for x in self._tensors:
            operand, need = x.operand, needed_axis(part, x.operand)
            share, kind, count, elements = x.elements // self._ranks, "", others, 0
            if not operand.home:
                if x.result and need is None:
                    kind, count = "reduce", 2 * others
                    elements = -(-self._local(x, whole) // x.row // part.size) * x.row
                elif x.result:  # gathered from the ranks before, too
                    kind, elements = "home", self._local(x, whole) * factors[-1] // factors[x.loops]
            elif need is None:
                kind, elements = ("reduce" if x.result else "gather"), share * factors[x.loops] * operand.in_tile
            elif need != operand.home and not operand.source:
                kind, elements = ("home" if x.result else "all_to_all"), share // part.size
            if elements:
                sent[kind, count] = sent.get((kind, count), 0) + elements * x.itemsize
        return self._of_collectives(part, sent), self._after(part, factors)

    def _of_collectives(self, part: Part, sent: Mapping[tuple[str, int], int]) -> Cost:
        cost = Cost()
        for (kind, count), nbytes in sent.items():
            at_once = AHEAD if kind == "reduce" else count  # fewer where blocks are copied
            seconds = collective_seconds(*self._link(part.level, part.size, nbytes), count, at_once)
            cost = cost.plus(Cost(seconds, nbytes * count, count))
        return cost

    def _of_rings(self, streamed: Sequence[Part], factors: Factors) -> tuple[float, float, int, int]:
        """Blocks that travel around rings: (seconds in which their messages begin, seconds of the busiest link, bytes,
        messages). factors: after all parts.
        """
        sent: dict[
            tuple[str, str, str], tuple[Part, int, int]
        ] = {}  # (part, bytes, messages) of blocks that go together
        for x in self._tensors:
            rings = _rings_of(x.operand, streamed) if x.operand.in_tile else []
            names, before, block = ", ".join(part.name for part in rings), 1, self._local(x, factors) * x.itemsize
            for part in sorted(rings, key=lambda each: self._order[str(each.shifted)]):
                _, nbytes, count = sent.get((part.name, x.result, names), (part, 0, (part.size - 1) * before))
                sent[part.name, x.result, names] = part, nbytes + block, count
                before *= part.size
        beginning, total, messages, links = 0.0, 0, 0, dict[str, float]()
        for part, nbytes, count in sent.values():
            latency, busy = self._link(part.level, part.size, nbytes)
            beginning, total, messages = beginning + count * latency, total + count * nbytes, messages + count
            links[part.level] = links.get(part.level, 0.0) + count * busy
        return beginning, max(links.values(), default=0.0), total, messages

    def _of_scan(self, scan: Scan, parts: Sequence[Part]) -> Cost:
        """Summaries of blocks, and the states that enter them, by the rules of `lowering.scan_messages`."""
        shared = [part for part in parts if part.placement.axis == scan.axis]
        placed = [part for part in parts if part.placement.axis not in (scan.axis, "heads")]
        ranks = math.prod(part.size for part in shared)
        others = self._ranks // ranks
        blocks = 2 if self.program.axis(scan.axis).order == "zigzag" else 1
        blocks *= math.prod(part.size for part in parts[: parts.index(shared[-1])] if part not in shared)
        state, decay = (
            blocks * self.program.nbytes(self.program.operand(name)) // others for name in (scan.state, scan.decay)
        )
        heads = self.program.axis("heads").size * math.prod(part.size for part in placed) // others
        gathered, cost = state + decay, Cost()
        for part in shared:
            if is_sliced(scan, ranks, heads):
                sent = {"summaries": (state + decay) // part.size, "states": state // part.size}
            else:
                sent = {"summaries": gathered}
                gathered *= part.size
            messages = {(kind, part.size - 1): nbytes for kind, nbytes in sent.items()}
            cost = cost.plus(self._of_collectives(part, messages))
        return cost


def needed_axis(part: Part, operand: Operand) -> str | None:
    """The axis whose blocks an operand is divided into along a part, or None if each rank needs all of it."""
    if part.placement.axis in operand.axes:
        return part.placement.axis
    return part.shifted if part.shifted in operand.axes else None


def _rings_of(operand: Operand, parts: Iterable[Part]) -> list[Part]:
    """The parts around which blocks of an operand travel."""
    return [part for part in parts if part.shifted in operand.axes and part.placement.axis not in operand.axes]


def _turns(parts: Iterable[Part]) -> int:
    """The number of tiles that a rank computes, one after the other."""
    return math.prod(part.size for part in parts if part.shifted)
