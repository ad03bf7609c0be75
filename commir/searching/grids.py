"""`best_grid`: the grid of attention2d that is best for a forward and a backward pass."""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from commir.execution.attention_grids import GRID_AXES, grid_of
from commir.execution.gradient import backward_plan
from commir.execution.verifier import verify
from commir.ir.mesh import Mesh
from commir.ir.program import Program
from commir.lowering.lower import Schedule
from commir.lowering.plan import Plan
from commir.programs.attention_programs import is_self_attention
from commir.scheduling.loop_nest import IllegalSchedule
from commir.scheduling.placements import place, placements_of

from .candidates import candidates
from .search import check_homes_divide, longer, rounded

Grid = tuple[int, int, int, bool]
VERIFIED = 64  # ranks of the largest plan that is verified itself, which takes some seconds
MOST_ALONG_AXIS = 3  # ranks along each mesh axis of the smaller plan that is verified instead of a larger one
# The reasons for which a grid comes before another that is as fast, in the order in which they are compared.
TIES = (
    "divides the mesh into fewer axes",
    "sends fewer messages",
    "holds less memory",
    "comes first in the order of their texts",
)


class _Choice(NamedTuple):
    """A grid; `order` is its time, and then the values that TIES describes."""

    order: tuple[Any, ...]
    schedule: Schedule
    grid: Grid


def best_grid(program: Program, mesh: Mesh, training: bool = True) -> tuple[Plan, Grid]:
    """Find the best plan that attention2d can run, verified: (plan, (rows, cols, ulysses, overlap)).

    Grids are compared by predicted time, without the messages that bring lse home (`leaving_lse`), which most callers do not
    ask for; equally fast ones by number of mesh axes, messages, memory, and text. Each axis of the mesh divides one loop,
    and each loop is divided by at most one axis, so a ring over the ranks of two axes is not among the grids. All ranks that
    call it with the same arguments get the same plan.

    On more than VERIFIED ranks, whose verification would take long, the same placement is verified on fewer.

    Args:
        program: `programs.attention`, forward.
        mesh: the ranks, with the speeds of its levels.
        training: compare the time of a forward and a backward pass, otherwise of a forward pass.

    Raises:
        ValueError: the program is another one, the ranks do not divide the sequence, or no grid divides the other sizes.
    """
    check_homes_divide(program, mesh)
    if not is_self_attention(program):
        raise ValueError(f"no grid of attention2d computes {program.name}: only `programs.attention`, forward")
    choices = sorted(_choices(program, mesh, training), key=lambda each: each.order)
    if not choices:
        raise ValueError(
            f"no grid of attention2d, one of whose {', '.join(GRID_AXES)} each mesh axis divides, fits "
            f"{program.name} on {mesh!r}"
        )
    plan = choices[0].schedule.lower()
    smaller = plan if mesh.ranks <= VERIFIED else _on_fewer_ranks(choices[0].schedule)
    for pass_plan in _passes(smaller, training):
        verify(pass_plan)
    return replace(plan, reason=_reason(choices, training)), choices[0].grid


def leaving_lse(plan: Plan) -> Plan:
    """The plan of a placement that leaves lse where it is computed, with the heads of each rank; its reason is the same.

    attention2d does so unless its caller asks for lse. The backward pass takes it from there.
    """
    divided = [name for name, placement in placements_of(plan.schedule).items() if placement.axis == "heads"]
    if not divided:
        return plan
    schedule = Schedule(plan.program, plan.mesh).apply(plan.schedule.primitives())
    for name in divided:
        schedule = schedule.shard("lse", "heads", name)
    return replace(schedule.lower(), reason=plan.reason)


def _choices(program: Program, mesh: Mesh, training: bool) -> Iterator[_Choice]:
    """All grids of attention2d, in the order of their candidates."""
    one_sequence = program.resized(batch=1)  # fewer candidates: no grid divides the batch
    for candidate in candidates(one_sequence, mesh):
        axes = [part.placement.axis for part in candidate.parts if part.size > 1]
        if axes != [axis for axis in GRID_AXES if axis in axes]:  # not in their order, or one several times: no grid
            continue
        with suppress(IllegalSchedule):
            schedule = candidate.schedule(program, mesh)
            if (grid := grid_of(schedule)) is None:
                continue
            passes = _passes(leaving_lse(schedule.lower()), training)
            time, messages = rounded(sum(each.seconds for each in passes)), sum(each.messages for each in passes)
            held = max(each.memory for each in passes)
            yield _Choice((time, len(schedule.mesh.axes), messages, held, str(schedule)), schedule, grid)


def _passes(plan: Plan, training: bool) -> list[Plan]:
    return [plan, backward_plan(plan)] if training else [plan]


def _on_fewer_ranks(schedule: Schedule) -> Plan:
    """The plan of the same placement on at most MOST_ALONG_AXIS ranks along each mesh axis."""
    program, placements = schedule.program, placements_of(schedule)
    mesh = Mesh(None, **{axis.name: min(axis.size, MOST_ALONG_AXIS) for axis in schedule.mesh.axes})
    divided = math.prod(mesh.size(name) for name, placement in placements.items() if placement.axis == "heads")
    heads = 2 * divided * program.operand("k").divisor("heads")
    smaller = program.resized(heads=heads, q=2 * mesh.ranks, kv=2 * mesh.ranks)
    return place(Schedule(smaller, mesh), **{name: placements.get(name, "q") for name in mesh.names}).lower()


def _reason(choices: list[_Choice], training: bool) -> str:
    """The words that say why the first grid was chosen."""
    best, *others = choices
    passes = "forward and backward" if training else "forward"
    if not others:
        return "the only grid of attention2d that divides these sizes"
    first, *ties = (a != b for a, b in zip(best.order, others[0].order, strict=True))
    if first:
        why = f"the next takes {longer(others[0].order[0], best.order[0])} this: {others[0].schedule}"
    else:
        why = f"as fast as the next, but {TIES[ties.index(True)]}; the next is {others[0].schedule}"
    return f"the fastest of {len(choices)} grids by prediction, {passes}; {why}"
