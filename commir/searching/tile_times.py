"""`measure_tile`: how long a tile takes on this machine, for predictions of plans whose messages travel meanwhile."""

import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from commir.ir.program import WHOLE, Program
from commir.programs.tiles import tile_of
from sparsefusion.collectives.counted import all_reduce
from sparsefusion.collectives.wire_formats import at_least_fp32
from sparsefusion.fabric.measurement import timed

REPETITIONS = 7


def measure_tile(program: Program, ranks: int, group: ProcessGroup | None = None) -> tuple[float, float]:
    """(point_seconds, call_seconds), as `search` takes them, from two tiles: as plans on `ranks` ranks have, and a smaller.

    group: its ranks measure at the same time, as they will compute, and all return the times of the slowest. The tiles have
    random inputs in the program's dtype. If no tile is smaller, point_seconds is 0. ValueError: ranks is below 1.
    """
    if ranks < 1:
        raise ValueError(f"a tile of a plan on {ranks} ranks: at least 1 rank is needed")
    tile = tile_program(program, ranks)
    smaller = tile_program(tile, 4)
    times = torch.tensor([_seconds(tile), _seconds(smaller)], dtype=torch.float64)
    large, small = all_reduce(times, group, op=dist.ReduceOp.MAX).tolist()
    if smaller == tile:
        return 0.0, large
    per_point = max(0.0, (large - small) / (tile.points - smaller.points))
    return per_point, max(0.0, small - per_point * smaller.points)


def tile_program(program: Program, blocks: int) -> Program:
    """The program on one of about `blocks` blocks: of its two loops with the most elements, as far as they divide."""
    loops = [axis for axis in program.axes if axis.kind != WHOLE]
    units = {axis.name: math.lcm(*(each.divisor(axis.name) for each in program.operands)) for axis in loops}
    loops.sort(key=lambda axis: -(axis.size // units[axis.name]))
    counts = {axis.name: axis.size // units[axis.name] // math.isqrt(blocks) for axis in loops[:2]}
    return program.resized(**{name: units[name] * max(1, count) for name, count in counts.items()})


def random_inputs(
    program: Program, shapes: Mapping[str, Sequence[int]], device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """Normal random inputs of these shapes, in the dtypes of the program."""
    dtype = getattr(torch, program.dtype)
    dtypes = {name: at_least_fp32(dtype) if program.operand(name).is_wide else dtype for name in shapes}
    return {name: torch.randn(tuple(shape), device=device).to(dtypes[name]) for name, shape in shapes.items()}


def _seconds(tile: Program) -> float:
    """The median time of a tile on this machine."""
    inputs = random_inputs(tile, {each.name: tile.shape(each) for each in tile.inputs if each.in_tile})
    indices = {axis.name: torch.arange(axis.size) for axis in tile.axes if axis.kind != WHOLE}
    stopwatch = timed(partial(tile_of(tile), tile, inputs, indices))
    return statistics.median(stopwatch() for _ in range(REPETITIONS))
