"""`best_grid`: the grid of attention2d that a search over plans finds best for a forward and a backward pass."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from commir.execution.attention_grids import GRID_AXES, grid_of
from commir.execution.gradient import backward_plan
from commir.execution.verifier import verify
from commir.ir.checks import check_type
from commir.ir.mesh import Mesh
from commir.ir.program import Program
from commir.lowering.lower import Schedule
from commir.lowering.plan import Plan
from commir.programs.attention_programs import is_self_attention
from commir.scheduling.loop_nest import Illegal
from commir.scheduling.placements import place, placements_of

from .candidates import Candidate, candidates
from .search import TIES, longer, rounded

Grid = tuple[int, int, int, bool]
VERIFIED = 64  # ranks up to which a plan is verified as it is, which takes some seconds
FEWER = 3  # ranks at most along each mesh axis of the same placement, which is verified instead


TIES_OF_GRIDS = tuple(TIES[n] for n in (1, 3, 4, 5))  # axes, messages, memory and text


class _Choice(NamedTuple):
    """A grid, and what it is chosen by: a time, then mesh axes, messages, memory and text."""

    order: tuple[Any, ...]
    plan: Plan
    grid: Grid


def best_grid(program: Program, mesh: Mesh, training: bool = True) -> tuple[Plan, Grid]:
    """(plan, (rows, cols, ulysses, overlap)) of the best plan that attention2d can run, verified.

    training: by the time of a forward and a backward pass, otherwise of a forward pass. Among equals the fewest messages
    come first. The plan keeps lse where it is computed, with a rank's own heads, as attention2d does if its caller does not
    ask for lse. All ranks that call it with the same arguments get the same plan. On more than VERIFIED ranks, whose
    verification would take long, the same placement is verified on fewer. ValueError: no grid divides the sizes.
    """
    check_type("best_grid", program, Program)
    check_type("best_grid", mesh, Mesh)
    if not is_self_attention(program):
        raise ValueError(f"no grid of attention2d computes {program.name}: only `programs.attention`, forward")
    found = sorted(_choices(program, mesh, training), key=lambda each: each.order)
    if not found:
        raise ValueError(f"no grid of attention2d divides {program.name} over {mesh!r}")
    best = found[0]
    smaller = best.plan if mesh.ranks <= VERIFIED else _on_fewer_ranks(best.plan)
    for plan in _passes(smaller, training):
        verify(plan)
    return replace(best.plan, reason=_reason(found, training)), best.grid


def _choices(program: Program, mesh: Mesh, training: bool) -> Iterator[_Choice]:
    """All grids of attention2d, in the order of their candidates."""
    one_sequence = program.resized(batch=1)  # grids divide no batch, which therefore adds no candidates
    for candidate in candidates(one_sequence, mesh):
        if not _may_be_grid(candidate):
            continue
        with suppress(Illegal):
            schedule = candidate.schedule(program, mesh)
            if (grid := grid_of(schedule.lower())) is None:
                continue
            for name, placement in placements_of(schedule).items():
                if placement.axis == "heads":
                    schedule = schedule.shard("lse", "heads", name)
            passes = _passes(schedule.lower(), training)
            time, messages = rounded(sum(each.seconds for each in passes)), sum(each.messages for each in passes)
            held, text = max(each.memory for each in passes), str(schedule)
            yield _Choice((time, len(schedule.mesh.axes), messages, held, text), passes[0], grid)


def _may_be_grid(candidate: Candidate) -> bool:
    """Whether the parts come in the order of GRID_AXES, at most one of each; only then need it be lowered."""
    axes = [part.placement.axis for part in candidate.parts if part.size > 1]
    return axes == [axis for axis in GRID_AXES if axis in axes]


def _passes(plan: Plan, training: bool) -> list[Plan]:
    return [plan, backward_plan(plan)] if training else [plan]


def _on_fewer_ranks(plan: Plan) -> Plan:
    """The same placement on at most FEWER ranks along each mesh axis."""
    program, placements = plan.program, placements_of(plan.schedule)
    sizes = {axis.name: min(axis.size, FEWER) for axis in plan.mesh.axes}
    mesh = Mesh(None, **sizes)
    heads = FEWER * program.operand("k").divisor("heads")
    smaller = program.resized(heads=heads, q=2 * mesh.ranks, kv=2 * mesh.ranks)
    schedule = place(Schedule(smaller, mesh), **{name: placements.get(name, "q") for name in sizes})
    for name, placement in placements.items():
        if placement.axis == "heads":
            schedule = schedule.shard("lse", "heads", name)
    return schedule.lower()


def _reason(found: list[_Choice], training: bool) -> str:
    """Why the first grid was chosen."""
    best, *others = found
    passes = "forward and backward" if training else "forward"
    if not others:
        return "the only grid of attention2d that divides these sizes"
    first, *ties = (a != b for a, b in zip(best.order, others[0].order, strict=True))
    if first:
        why = f"the next takes {longer(others[0].order[0], best.order[0])} this"
    else:
        why = f"as fast as the next, but {TIES_OF_GRIDS[ties.index(True)]}"
    return f"the fastest of {len(found)} grids by prediction, {passes}; {why}: {others[0].plan.schedule}"
