"""Attention plans that attention2d computes: a grid of rows and columns whose cells divide the heads.

Both send the same messages with the same bits; attention2d is the hand-written implementation.
"""

from collections.abc import Mapping

import torch
from torch.distributed import ProcessGroup

from attention2d import Attention2D
from commfabric.collectives.counted import Counter
from commir.lowering.plan import Plan
from commir.programs.attention_programs import is_self_attention
from commir.scheduling.loop_nest import LoopNest
from commir.scheduling.placements import is_placed, placements_of

Tensor = torch.Tensor

GRID_AXES = ("kv", "q", "heads")  # in the order of a grid's ranks: columns, rows, divided heads


def grid_of(schedule: LoopNest) -> tuple[int, int, int, bool] | None:
    """Return (rows, cols, ulysses, overlap) of the grid that computes a schedule, or None if attention2d has no such grid.

    Mesh axes must come in the order of GRID_AXES, at most one of each: a double ring is another schedule than a ring of all
    ranks, because it sends less over the outer links. Either all rings are streamed or none.
    """
    program, chosen = schedule.program, placements_of(schedule)
    axes = [placement.axis for placement in chosen.values()]
    streams = {placement.is_streamed for placement in chosen.values() if placement.axis != "heads"}
    if not is_self_attention(program) or not set(axes) <= set(GRID_AXES):
        return None
    if schedule.kernel != "library" or schedule.chunked is not None:
        return None
    if axes != sorted(set(axes), key=GRID_AXES.index) or len(streams) > 1 or not is_placed(schedule):
        return None
    sizes = dict.fromkeys(GRID_AXES, 1)
    sizes |= {placement.axis: schedule.mesh.size(name) for name, placement in chosen.items()}
    return sizes["q"], sizes["kv"], sizes["heads"], True in streams


def attend(
    plan: Plan, grid: tuple[int, int, int, bool], local_inputs: Mapping[str, Tensor], group: ProcessGroup | None,
    counter: Counter | None,
) -> dict[str, Tensor]:  # fmt: skip
    """The outputs of a plan, by attention2d. Differentiable with respect to q, k and v."""
    rows, cols, ulysses, overlap = grid
    order = plan.program.axis("q").order
    schedule = Attention2D(group, rows, cols, ulysses, order, overlap)
    schedule.counter = counter or schedule.counter
    causal, scale = (plan.program.option(name) for name in ("causal", "scale"))
    out, lse = schedule(*(local_inputs[name] for name in "qkv"), causal=bool(causal), scale=scale, return_lse=True)
    return {"out": out, "lse": lse}
