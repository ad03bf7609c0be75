"""Attention plans that attention2d computes: a grid of rows and columns whose cells divide the heads.

Both send the same messages with the same bits; attention2d is the hand-written implementation.
"""

from collections.abc import Mapping

import torch
from torch.distributed import ProcessGroup

from attention2d import Attention2D
from commir.lowering.plan import Plan
from commir.programs.attention_programs import is_self_attention
from commir.scheduling.loop_nest import LoopNest
from commir.scheduling.placements import is_placed, placements_of
from sparsefusion.collectives.counted import Counter

Tensor = torch.Tensor

GRID_AXES = ("kv", "q", "heads")  # in the order of a grid's ranks: columns, rows, divided heads


def grid_of(schedule: LoopNest) -> tuple[int, int, int, bool] | None:
    """(rows, cols, ulysses, overlap) of the grid that computes a schedule, or None if it is not in attention2d's family.

    Mesh axes must come in the order of GRID_AXES, one of each at most: a double ring is another schedule than a ring of
    all ranks, as it sends less over the outer links. All rings are streamed or none.
    """
    program, chosen = schedule.program, placements_of(schedule)
    axes = [each.axis for each in chosen.values()]
    streams = {each.is_streamed for each in chosen.values() if each.axis != "heads"}
    if not is_self_attention(program) or not set(axes) <= set(GRID_AXES):
        return None
    if schedule.kernel != "library" or schedule.chunked is not None:
        return None
    if axes != sorted(set(axes), key=GRID_AXES.index) or len(streams) > 1 or not is_placed(schedule):
        return None
    sizes = dict.fromkeys(GRID_AXES, 1) | {each.axis: schedule.mesh.size(name) for name, each in chosen.items()}
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
