"""`measure_tile`: how long a tile takes on this machine, for predictions of plans whose messages travel meanwhile."""

import math
import statistics
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from commir.ir.program import WHOLE, Program
from commir.programs.tiles import tile_of
from sparsefusion.collectives.counted import all_reduce
from sparsefusion.fabric.measurement import timed

REPETITIONS = 7


def measure_tile(program: Program, ranks: int, group: ProcessGroup | None = None) -> tuple[float, float]:
    """(point_seconds, call_seconds), as `search` takes them, from two tiles of the size that plans on `ranks` ranks have.

    group: its ranks measure at the same time, as they will compute, and all return the times of the slowest. The tiles have
    random inputs in the program's dtype.
    """
    points, seconds = zip(*(_timed(program, ranks * factor) for factor in (1, 4)), strict=True)
    times = torch.tensor(seconds, dtype=torch.float64)
    large, small = all_reduce(times, group, op=dist.ReduceOp.MAX).tolist()
    per_point = max(0.0, (large - small) / (points[0] - points[1]))
    return per_point, max(0.0, small - per_point * points[1])


def _timed(program: Program, blocks: int) -> tuple[float, float]:
    """(points, median seconds) of a tile that is one of `blocks` blocks of the program's two largest loops."""
    loops = sorted((axis for axis in program.axes if axis.kind != WHOLE), key=lambda axis: -axis.size)[:2]
    factor = math.isqrt(blocks)
    tile = program.resized(**{axis.name: max(1, axis.size // factor) for axis in loops})
    dtype = getattr(torch, program.dtype)
    inputs = {
        operand.name: torch.randn(tile.shape(operand)).to(torch.float32 if operand.is_wide else dtype)
        for operand in tile.inputs
        if operand.in_tile
    }
    indices = {axis.name: torch.arange(axis.size) for axis in tile.axes if axis.kind != WHOLE}
    stopwatch = timed(partial(tile_of(tile), tile, inputs, indices))
    return tile.points, statistics.median(stopwatch() for _ in range(REPETITIONS))
