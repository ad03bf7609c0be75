"""Tiles by a library's kernel, in plain operations, and under torch.compile (about 1 min; on one core).

The claim: an expression of your own that is no product is computed many times as fast under torch.compile, and attention and
products of matrices are not. Each operator is one tile in fp32. Times are those of the processor, so that other processes
change them little.
"""

import statistics
import time

import torch

from benchmarks.support.tables import markdown, publish
from commir import In, Out, grid, operator, programs
from commir.ir.program import WHOLE, Program
from commir.programs.kernels import kernels_of
from commir.programs.tiles import tile_of
from commir.searching.tile_times import random_inputs

REPETITIONS = 15


@operator
def nearest(points=2048, centres=1024):  # type: ignore[no-untyped-def]
    """The operator of the guide."""
    x = In[points]
    y = In[centres]
    best = Out[points]
    for points, centres in grid("sr"):
        best[points] = max(best[points], -torch.abs(x[points] - y[centres]))


@operator
def activated(rows=1024, cols=1024):  # type: ignore[no-untyped-def]
    """A gate, element by element."""
    x = In[rows, cols]
    gate = In[rows, cols]
    y = Out[rows, cols]
    for rows, cols in grid("ss"):
        y[rows, cols] = x[rows, cols] * torch.sigmoid(x[rows, cols]) * gate[rows, cols]


OPERATORS = {
    "nearest of 1,024 centres, 2,048 points": nearest(),
    "gate of 1,024 x 1,024": activated(),
    "causal attention, 512 tokens, 4/2 heads of 64": programs.attention(1, 4, 2, 512, 64),
    "product of 512 x 512 matrices": programs.all_gather_matmul(512, 512, 512),
}


def processor_seconds(program: Program, kernel: str) -> float:
    """The median time of this process's processor for a tile of the whole program, after two that are not counted."""
    inputs = random_inputs(program, {operand.name: program.shape(operand) for operand in program.inputs})
    indices = {axis.name: torch.arange(axis.size) for axis in program.axes if axis.kind != WHOLE}
    tile, times = tile_of(program, kernel), []
    for _ in range(REPETITIONS + 2):
        start = time.process_time()
        tile(program, inputs, indices)
        times.append(time.process_time() - start)
    return statistics.median(times[2:])


def row(name: str, program: Program) -> list[str]:
    """The times of an operator by each kernel."""
    library, *others = (
        processor_seconds(program, kernel) if kernel in kernels_of(program) else None
        for kernel in ("library", "reference", "compiled")
    )
    assert library is not None
    return [name, f"{library * 1e3:.2f} ms", *("" if each is None else f"{library / each:.2f}x" for each in others)]


def main() -> None:
    """Time all operators, and publish the table."""
    torch.set_num_threads(1)
    header = ["operator", "library", "plain operations", "torch.compile"]
    publish("compiled-tiles", markdown(header, [row(*each) for each in OPERATORS.items()]))


if __name__ == "__main__":
    main()
