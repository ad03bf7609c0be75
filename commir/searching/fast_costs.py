"""The seconds of `CostModel.cost` in a fraction of the time, because the cost of a part depends on few other things.

At home each rank keeps an equal share of every operand. A collective along a part sends of an operand its share times the
sizes of those parts before it along which the operand is needed whole. That product is the same for operands with the same
loops. So the cost of a part depends only on the part and on one factor for each set of loops, and is remembered for these.
"""

import math
from collections.abc import Sequence

from commir.ir.program import WHOLE, Operand
from commir.lowering.accounting import AHEAD
from commir.lowering.timeline import collective_seconds

from .candidates import Candidate, Part
from .cost import CostModel, needed_axis

Known = tuple[str, int, str, str | None]  # (level, size, loop axis, shifted loop) of a part
Factors = tuple[int, ...]  # for each set of loops, the size of a block divided by that of a share


class FastCosts:
    """Seconds of the candidates of a model, if it `applies`."""

    def __init__(self, model: CostModel) -> None:
        self.model, self.program = model, model.program
        self._inputs = {operand.name for operand in self.program.inputs}
        self._sets = list(dict.fromkeys(map(self._loops_of, self.program.operands)))
        self._set = {operand.name: self._sets.index(self._loops_of(operand)) for operand in self.program.operands}
        self._share = {x.name: math.prod(self.program.shape(x)) // model.mesh.ranks for x in self.program.operands}
        self._itemsize = {x.name: self.program.itemsize(x, x.name not in self._inputs) for x in self.program.operands}
        self._parts: dict[tuple[Known, Factors], tuple[float, Factors]] = {}
        self._rings: dict[tuple[tuple[Known, ...], Factors], tuple[float, float]] = {}

    @property
    def applies(self) -> bool:
        """Return True if the ranks share all operands at home and pass no states."""
        return self.program.scan is None and all(operand.home for operand in self.program.operands)

    def seconds(self, candidate: Candidate) -> float:
        """`CostModel.cost(candidate).seconds`, except for rounding."""
        total, factors, streamed, tiles = 0.0, (1,) * len(self._sets), list[Part](), 1
        ring: tuple[Known, ...] = ()
        for part in candidate.parts:
            if part.size == 1:
                continue
            known = part.level, part.size, part.placement.axis, part.shifted
            if (found := self._parts.get((known, factors))) is None:
                found = self._parts[known, factors] = self._part(part, factors)
            if part.shifted:
                streamed.append(part)
                ring, tiles = (*ring, known), tiles * part.size
            total, factors = total + found[0], found[1]
        computing = tiles * self.model.tile_seconds(candidate)
        if not streamed:
            return total + computing
        if (rings := self._rings.get((ring, factors))) is None:
            rings = self._rings[ring, factors] = self._of_rings(streamed, factors)
        return total + max(computing + rings[0], rings[1])

    def _loops_of(self, operand: Operand) -> tuple[str, ...]:
        return tuple(name for name in operand.axes if self.program.axis(name).kind != WHOLE)

    def _part(self, part: Part, factors: Factors) -> tuple[float, Factors]:
        """(seconds of the collectives along a part, factors of the parts after it)."""
        sent, after = dict[str, int](), list(factors)
        for operand in self.program.operands:
            is_input, number = operand.name in self._inputs, self._set[operand.name]
            share, need, itemsize = self._share[operand.name], needed_axis(part, operand), self._itemsize[operand.name]
            if need is None:
                after[number] = factors[number] * part.size
                kind, nbytes = "gather" if is_input else "reduce", share * factors[number] * itemsize
            else:
                kind = "all_to_all" if is_input else "home"
                nbytes = share * itemsize // part.size if is_input else share // part.size * itemsize
            if operand.in_tile if need is None else need != operand.home and not operand.source:
                sent[kind] = sent.get(kind, 0) + nbytes
        seconds, count = 0.0, part.size - 1
        for kind, nbytes in sent.items():
            at_once = AHEAD if kind == "reduce" else count
            seconds += collective_seconds(*self.model.link(part.level, part.size, nbytes), count, at_once)
        return seconds, tuple(after)

    def _of_rings(self, streamed: Sequence[Part], factors: Factors) -> tuple[float, float]:
        """(seconds in which messages around rings begin, seconds of the level whose link they keep busy longest)."""
        sent: dict[
            tuple[str, str, str], tuple[Part, int, int]
        ] = {}  # (part, bytes, messages) of blocks that travel together
        for operand in (operand for operand in self.program.operands if operand.in_tile):
            is_input = operand.name in self._inputs
            together = "" if is_input else self.program.result_of(operand.name).outputs[0]
            rings = [x for x in streamed if x.shifted in operand.axes and x.placement.axis not in operand.axes]
            names, before = ", ".join(part.name for part in rings), 1
            block = self._share[operand.name] * factors[self._set[operand.name]] * self._itemsize[operand.name]
            for part in sorted(rings, key=lambda each: self.model.order[str(each.shifted)]):
                _, nbytes, count = sent.get((part.name, together, names), (part, 0, (part.size - 1) * before))
                sent[part.name, together, names] = part, nbytes + block, count
                before *= part.size
        beginning, links = 0.0, dict[str, float]()
        for part, nbytes, count in sent.values():
            latency, busy = self.model.link(part.level, part.size, nbytes)
            beginning += count * latency
            links[part.level] = links.get(part.level, 0.0) + count * busy
        return beginning, max(links.values(), default=0.0)
