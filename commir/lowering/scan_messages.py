"""The messages of a scanned axis: states pass from block to block of a sequence that ranks share.

Each rank summarizes its blocks. In the gather form all ranks get all summaries, and each computes all states. In the slice
form an all-to-all gives each rank the summaries of all blocks for its share of the heads, and another one returns the
states. The bytes of neither form depend on the length of the sequence. The slice form sends less on more than two ranks and,
where matrices map states, on two; the heads must divide over the ranks.
"""

import math
from collections.abc import Iterator

from commir.ir.program import Scan

from .operand_layouts import Digits, scanning_mesh_axes
from .plan_steps import AllToAll, Free, Gather, PassStates, Place, Slice, Step, Summarize


def is_sliced(scan: Scan, ranks: int, heads: int) -> bool:
    """Return True if states pass in the slice form among `ranks` ranks with `heads` heads each.

    On two ranks the gather form sends `decay` twice as often and needs one message less; it is used if `decay` is a number.
    """
    return ranks > (2 if scan.rates else 1) and heads % ranks == 0


def takes_slices(digits: Digits) -> bool:
    """Return True if a plan passes states in the slice form."""
    if (scan := digits.nest.program.scan) is None:
        return False
    nest = digits.nest
    ranks = math.prod(map(nest.mesh.size, scanning_mesh_axes(nest)))
    placed = math.prod(nest.mesh.size(m) for name, m in nest.parallel if nest.digit(name).axis == "heads")
    return is_sliced(scan, ranks, nest.program.axis("heads").size // placed)


def scan_steps(digits: Digits) -> Iterator[Step]:
    """The steps from the inputs to the register of entering states; none if no ranks share the scanned axis."""
    nest = digits.nest
    shared = scanning_mesh_axes(nest)
    if nest.program.scan is None or not shared:
        return
    scan, summaries = nest.program.scan, (nest.program.scan.state, nest.program.scan.decay)
    yield Summarize()
    sliced = takes_slices(digits)
    layout = digits.needed(nest.program.operand(scan.state))
    for mesh_axis in shared:
        after = {name: piece for name, piece in layout.items() if name != mesh_axis}
        joined = [(name, digits.place(nest.program.operand(name), layout[mesh_axis], after)) for name in summaries]
        if sliced:
            yield AllToAll(mesh_axis, tuple((name, _heads(digits, name), place) for name, place in joined))
            if scan.rates:
                yield Slice(mesh_axis, ((scan.rates, _heads(digits, scan.rates)),))
        else:
            yield Gather(mesh_axis, tuple(joined))
        layout = after
    yield PassStates()
    yield Free(scan.summaries, ())
    carry, returned = nest.program.operand(scan.carry), digits.needed(nest.program.operand(scan.carry))
    for mesh_axis in reversed(shared) if sliced else shared:
        cut = digits.place(carry, returned[mesh_axis], layout)
        layout = {**layout, mesh_axis: returned[mesh_axis]}
        if sliced:
            yield AllToAll(mesh_axis, ((carry.name, cut, _heads(digits, carry.name)),))
        else:
            yield Slice(mesh_axis, ((carry.name, cut),))


def _heads(digits: Digits, name: str) -> Place:
    """The place of the heads of an operand, of which all that a rank has are cut into equal shares."""
    return Place(digits.nest.program.operand(name).axes.index("heads"), 1)
