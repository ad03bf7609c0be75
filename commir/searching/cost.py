"""The cost of a candidate in closed form, by the rules of lowering, without lowering it.

Bytes are exactly those of the plan. Time is a lower bound: one collective after the other, and in the loops the longer of
computing and sending. It also bounds plans in chunks, unless a measured fabric sends several small messages in less time
than a large one. Memory is a lower bound: the blocks that a tile needs, and accumulators.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial

from commir.ir.mesh import Mesh
from commir.ir.program import Operand, Program, Scan
from commir.lowering.accounting import AHEAD
from commir.lowering.scan_messages import is_sliced
from commir.lowering.timeline import check_tile, collective_seconds, link_seconds

from .candidates import Candidate, Part


@dataclass
class Cost:
    """The cost of a candidate on one rank.

    Attributes:
        sent: bytes.
        seconds: at least.
        messages: their number.
        held: {operand: bytes} of inputs that it holds for its tiles beside those at home, and of accumulators, at least.
    """

    sent: int = 0
    seconds: float = 0.0
    messages: int = 0
    held: dict[str, int] = field(default_factory=dict)


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
        self._of_chunk: dict[tuple[str, int], CostModel] = {}
        self.order = {axis.name: number for number, axis in enumerate(program.axes)}
        self._elements = {
            operand.name: math.prod(program.shape(operand)) for operand in (*program.operands, *program.internal)
        }
        self._nbytes = {
            operand.name: self._elements[operand.name] * program.itemsize(operand) for operand in program.inputs
        }
        self._axes = {operand.name: operand.axes for operand in program.operands}
        self._points, self._ranks = program.points, mesh.ranks
        # Cached, because the time of a message on a measured link is slow to compute.
        self.link = lru_cache(maxsize=None)(partial(link_seconds, mesh))
        home = {
            operand.name: program.nbytes(operand) // (mesh.ranks if operand.home else 1) for operand in program.operands
        }
        self._inputs = sum(home[operand.name] for operand in program.inputs if not operand.source)
        self.kept = self._inputs + sum(home[operand.name] for operand in program.outputs)

    def tile_seconds(self, candidate: Candidate) -> float:
        """The predicted time of one tile."""
        points = self._points / _turns(candidate) / self._ranks / candidate.chunks
        return self._call_seconds + points * self._point_seconds

    def cost(self, candidate: Candidate) -> Cost:
        """The cost of a candidate."""
        parts = tuple(part for part in candidate.parts if part.size > 1)
        streamed = tuple(part for part in parts if part.shifted)
        tally = _Tally(parts, self.link, streamed=streamed)
        scattered: dict[str, int] = {}
        for operand in self.program.inputs:
            self._add_input(tally, operand, scattered)
        tiles = _turns(candidate)
        if self.program.scan is not None and any(part.placement.axis == self.program.scan.axis for part in parts):
            self._add_scan(tally, self.program.scan)
            tiles += 1  # summaries take the recurrence of a tile
        for result in self.program.results:
            for name in result.outputs:
                self._add_output(tally, self.program.operand(name), ", ".join(result.outputs))
        return tally.total(tiles * self.tile_seconds(candidate))

    def memory(self, cost: Cost) -> int:
        """The fewest bytes that a candidate of this cost holds: inputs at home, and what its tiles need."""
        return self._inputs + sum(cost.held.values())

    def memory_in_chunks(self, cost: Cost, axis: str, chunks: int) -> float:
        """The fewest bytes that it holds with chunks of an axis: operands at home, and what a chunk's tiles need."""
        needed = (held / (chunks if axis in self._axes[name] else 1) for name, held in cost.held.items())
        return self.kept + sum(needed)

    def seconds_in_chunks(self, candidate: Candidate) -> float:
        """A lower bound of the time of a candidate with chunks: that of one chunk by itself, times their number."""
        key = candidate.chunked, candidate.chunks
        if key not in self._of_chunk:
            chunk = self.program.resized(**{key[0]: self.program.axis(key[0]).size // key[1]})
            self._of_chunk[key] = CostModel(chunk, self.mesh, self._point_seconds, self._call_seconds, self.overlap)
        return candidate.chunks * self._of_chunk[key].cost(Candidate(candidate.parts)).seconds

    def _add_input(self, tally: "_Tally", operand: Operand, scattered: dict[str, int]) -> None:
        parts, needs = tally.parts, [needed_axis(part, operand) for part in tally.parts]
        home, nbytes = operand.home, self._nbytes[operand.name]
        block = nbytes // (self._ranks if home else 1)
        if operand.source:  # scattered like its source, without the dimensions that it lacks
            block = nbytes // scattered[operand.source[0]]
        else:
            for part, need in zip(parts, needs, strict=True):
                if home and need not in (None, home):
                    tally.collective(part, "all_to_all", block // part.size, part.size - 1)
                elif not home and need:
                    block //= part.size
        scattered[operand.name] = nbytes // block
        if not operand.in_tile:
            return
        gathered = block
        for part, need in zip(parts, needs, strict=True):
            if home and need is None:
                tally.collective(part, "gather", gathered, part.size - 1)
                gathered *= part.size
        is_at_home = not operand.source and all(need == home or not home and not need for need in needs)
        turns = self._travel(tally, operand, gathered, "inputs")
        tally.cost.held[operand.name] = gathered * (min(2, turns - 1) if is_at_home else min(2, turns))

    def _add_output(self, tally: "_Tally", operand: Operand, result: str) -> None:
        """result: the outputs of its result, which travel in the same messages."""
        itemsize = self.program.itemsize(operand, is_partial=True)
        parts, home = tally.parts, operand.home
        have = [needed_axis(part, operand) for part in parts]
        elements = self._elements[operand.name] // math.prod(
            part.size for part, digit in zip(parts, have, strict=True) if digit
        )
        tally.cost.held[operand.name] = elements * max(4, itemsize)
        self._travel(tally, operand, elements * itemsize, result)
        for index in reversed(range(len(parts))):
            part = parts[index]
            if have[index] is None:
                if home:
                    elements //= part.size
                    tally.collective(part, "reduce", elements * itemsize, part.size - 1)
                    have[index] = home
                else:
                    self._all_reduce(tally, part, operand, elements, itemsize)
        for part, digit in zip(parts, have, strict=True):
            if home and digit not in (None, home):
                tally.collective(part, "home", elements // part.size * itemsize, part.size - 1)
            elif not home and digit:
                tally.collective(part, "home", elements * itemsize, part.size - 1)
                elements *= part.size

    def _add_scan(self, tally: "_Tally", scan: Scan) -> None:
        """Summaries of blocks, and the states that enter them, by the rules of `lowering.scan_messages`."""
        shared = [part for part in tally.parts if part.placement.axis == scan.axis]
        placed = [part for part in tally.parts if part.placement.axis not in (scan.axis, "heads")]
        others = math.prod(part.size for part in tally.parts) // math.prod(part.size for part in shared)
        outer = tally.parts[: tally.parts.index(shared[-1])]
        blocks = 2 if self.program.axis(scan.axis).order == "zigzag" else 1
        blocks *= math.prod(part.size for part in outer if part not in shared)
        state, decay = (
            blocks * self._elements[name] * self.program.itemsize(self.program.operand(name)) // others
            for name in (scan.state, scan.decay)
        )
        heads = self.program.axis("heads").size * math.prod(part.size for part in placed) // others
        ranks = math.prod(part.size for part in shared)
        gathered = state + decay
        for part in shared:
            if is_sliced(scan, ranks, heads):
                tally.collective(part, "summaries", (state + decay) // part.size, part.size - 1)
                tally.collective(part, "states", state // part.size, part.size - 1)
            else:
                tally.collective(part, "summaries", gathered, part.size - 1)
                gathered *= part.size

    def _all_reduce(self, tally: "_Tally", part: Part, operand: Operand, elements: int, itemsize: int) -> None:
        """An all-reduce by rows, the elements of the axes that all outputs of the result share."""
        shared = self.program.row_axes(self.program.result_of(operand.name))
        row = math.prod(self.program.axis(name).size for name in operand.axes if name not in shared)
        tally.collective(part, "reduce", -(-elements // row // part.size) * row * itemsize, 2 * (part.size - 1))

    def _travel(self, tally: "_Tally", operand: Operand, block: int, together: str) -> int:
        """Add messages of blocks that travel around nested rings; return the number of blocks that a rank sees.

        together: names the blocks that travel in the same messages if they travel around the same rings.
        """
        if not tally.streamed:
            return 1
        rings = [
            part for part in tally.streamed if part.shifted in operand.axes and part.placement.axis not in operand.axes
        ]
        before, names = 1, ", ".join(part.name for part in rings)
        for part in sorted(rings, key=lambda each: self.order[str(each.shifted)]):
            tally.ring(part, f"{together} around {names}", block, (part.size - 1) * before)
            before *= part.size
        return before


@dataclass
class _Tally:
    """Messages of a candidate, summed as its plan sends them: those of one kind along one axis are sent together.

    Attributes:
        link: `link_seconds` of the mesh.
        streamed: the parts around whose rings blocks travel.
        collectives, rings: {(part, kind): [bytes of a message, messages]} of messages while nothing else happens, and of
            those while tiles are computed.
    """

    parts: tuple[Part, ...]
    link: Callable[[str, int, int], tuple[float, float]]
    cost: Cost = field(default_factory=Cost)
    collectives: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    rings: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    streamed: tuple[Part, ...] = ()

    def collective(self, part: Part, kind: str, nbytes: int, count: int) -> None:
        """Add bytes to the `count` messages of a kind that follow one another."""
        self.cost.sent += nbytes * count
        self.collectives.setdefault((part.name, kind), [0, count])[0] += nbytes

    def ring(self, part: Part, kind: str, nbytes: int, count: int) -> None:
        """Add bytes to the `count` messages of a kind that travel while tiles are computed."""
        self.cost.sent += nbytes * count
        self.rings.setdefault((part.name, kind), [0, count])[0] += nbytes

    def total(self, computing: float) -> Cost:
        """The cost, with the time of all messages and of computing."""
        by_name = {part.name: part for part in self.parts}
        for (name, kind), (nbytes, count) in self.collectives.items():
            at_once = AHEAD if kind == "reduce" else count  # fewer where blocks are copied
            self.cost.seconds += collective_seconds(*self._busy(by_name[name], nbytes), count, at_once)
            self.cost.messages += count
        links: dict[str, float] = {}  # {level: seconds for which its link is busy}
        for (name, _), (nbytes, count) in self.rings.items():
            latency, busy = self._busy(by_name[name], nbytes)
            links[by_name[name].level] = links.get(by_name[name].level, 0.0) + count * busy
            computing += count * latency
            self.cost.messages += count
        self.cost.seconds += max(computing, *links.values(), 0.0)
        return self.cost

    def _busy(self, part: Part, nbytes: int) -> tuple[float, float]:
        """(latency, seconds on the link) of a message."""
        return self.link(part.level, part.size, nbytes)


def _turns(candidate: Candidate) -> int:
    """The number of tiles that a rank computes, one after the other."""
    return math.prod(part.size for part in candidate.parts if part.shifted)


def needed_axis(part: Part, operand: Operand) -> str | None:
    """The axis whose blocks an operand is divided into along a part, or None if each rank needs all of it."""
    if part.placement.axis in operand.axes:
        return part.placement.axis
    return part.shifted if part.shifted in operand.axes else None
