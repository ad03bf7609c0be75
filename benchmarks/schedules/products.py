"""AsyncTP against all-gather and reduce-scatter, for the two products of a tensor-parallel layer (about 4 min; root).

The claim: on slow links, a product whose operand or result travels in a ring while tiles are computed is faster than one
that gathers first, or reduces afterwards. 4 ranks on two cores, fp32; both forms of a product take turns. The table shows
medians; the gathered form runs twice, and the difference of its two medians is the spread. Bytes are the same.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.support.cells import cell_arguments, measured_cells, write_result
from benchmarks.support.tables import markdown, print_or_publish
from commfabric.fabric.measurement import repetitions, timed
from commir import Mesh, Schedule, execute, programs
from commir.ir.program import Program
from commir.scheduling.placements import Placement, place

REPETITIONS = 10


@dataclass(frozen=True)
class Cell:
    """One product on ranks behind links of a rate."""

    name: str
    rate: str
    make: Callable[..., Program]
    axis: str
    rows: int = 1024
    cols: int = 8192
    inner: int = 1024
    ranks: int = 4


PRODUCTS = [
    ("all-gather, product", programs.all_gather_matmul, "cols", dict(cols=8192, inner=1024)),
    ("product, reduce-scatter", programs.matmul_reduce_scatter, "inner", dict(cols=1024, inner=8192)),
]
CELLS = [
    Cell(name, rate, make, axis, **sizes)
    for rate in ("100mbit", "200mbit", "1gbit")
    for name, make, axis, sizes in PRODUCTS
]


def measure(out: str, number: str) -> None:
    """Run one rank of cell number `number`. Rank 0 writes the result to `out`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cell, group = CELLS[int(number)], dist.group.WORLD
    schedule = Schedule(cell.make(cell.rows, cell.cols, cell.inner), Mesh(gpu=cell.ranks))
    gathered, streamed = (
        place(schedule, gpu=Placement(cell.axis, is_streamed)).lower() for is_streamed in (False, True)
    )
    assert gathered.bytes_per_rank == streamed.bytes_per_rank
    shapes = [gathered.digits.local_shape(each, gathered.digits.home(each)) for each in gathered.program.inputs]
    local = {name: torch.randn(shape) for name, shape in zip("ab", shapes, strict=True)}
    calls = [timed(lambda plan=plan: execute(plan, local, group)) for plan in (gathered, streamed, gathered)]
    first, ring, again = repetitions(calls, group, "cpu", REPETITIONS).median(0).values.tolist()
    if dist.get_rank() == 0:
        write_result(out, {"gathered": first, "ring": ring, "again": again, "sent": gathered.bytes_per_rank})
    dist.barrier()
    dist.destroy_process_group()


def row(cell: Cell, measured: dict) -> list[str]:
    """A row of the table."""
    speedup = measured["gathered"] / measured["ring"]
    shape = f"{cell.rows:,} x {cell.inner:,} x {cell.cols:,}"
    times = [f"{measured[name] * 1e3:.0f} ms" for name in ("gathered", "ring")]
    spread = f"{abs(measured['again'] / measured['gathered'] - 1):.0%}"
    return [cell.name, shape, cell.rate, f"{measured['sent'] / 1e6:.2f} MB", *times, f"{speedup:.2f}x", spread]


def main() -> None:
    """Measure all cells and publish the table; or measure and print those whose numbers are arguments."""
    results = measured_cells(__file__, CELLS)
    header = [
        "product",
        "rows x inner x columns",
        "links",
        "sent by a rank",
        "one after the other",
        "AsyncTP",
        "speedup",
    ]
    table = markdown([*header, "spread"], [row(cell, measured) for cell, measured in results.items()])
    print_or_publish("async-products", table)


if __name__ == "__main__":
    arguments = cell_arguments()
    main() if arguments is None else measure(*arguments)
