"""`best_grid`: the grid of attention2d that a search over plans finds best for a forward and a backward pass."""

from typing import Any

from commir.execution.attention_grids import grid_of
from commir.execution.gradient import backward_plan
from commir.execution.verifier import verify
from commir.ir.mesh import Mesh
from commir.ir.program import Program
from commir.lowering.plan import Plan

from .search import all_plans, rounded


def best_grid(program: Program, mesh: Mesh, training: bool = True) -> tuple[Plan, tuple[int, int, int, bool]]:
    """(plan, (rows, cols, ulysses, overlap)) of the best plan that attention2d can run, verified.

    training: by the time of a forward and a backward pass, otherwise of a forward pass. Among equals the fewest messages
    come first. All ranks that call it with the same arguments get the same plan. ValueError: no grid divides the sizes.
    """
    found: list[tuple[Any, Plan, tuple[int, int, int, bool]]] = []
    for plan in all_plans(program, mesh):
        if (grid := grid_of(plan)) is None:
            continue
        passes = [plan, backward_plan(plan)] if training else [plan]
        time, messages = rounded(sum(each.seconds for each in passes)), sum(each.messages for each in passes)
        held = max(each.memory for each in passes)
        found.append(((time, len(plan.mesh.axes), messages, held, str(plan.schedule)), plan, grid))
    if not found:
        raise ValueError(f"no grid of attention2d divides {program.name} over {mesh!r}")
    _, plan, grid = min(found, key=lambda each: each[0])
    verify(plan)
    if training:
        verify(backward_plan(plan))
    return plan, grid
