"""A 2-D plan whose steps commir takes one by one, against attention2d's hand-written schedule (about 5 min).

The claim: the plan takes at most 1.10x as long, and sends the same bytes. Passes of causal attention, forward or with the
gradients of q, k and v; all ranks are on this machine. Both take turns; the table shows medians. attention2d runs twice, and
the difference is the spread.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from attention2d import Attention2D
from benchmarks.support.cells import cell_arguments, measured_cells, write_result
from benchmarks.support.tables import markdown, print_or_publish
from commfabric.fabric.measurement import repetitions, timed
from commir import Mesh, Schedule, differentiable, execute, programs
from commir.execution.gradient import backward_plan
from commir.execution.state import Count
from commir.scheduling.placements import Placement, place

REPETITIONS = 20


@dataclass(frozen=True)
class Cell:
    """One grid on ranks of this machine. rate: None, as their links are not limited."""

    rows: int
    cols: int
    overlap: bool
    dtype: str
    backward: bool = False
    kv_heads: int = 8
    seq: int = 4096
    rate: None = None

    @property
    def ranks(self) -> int:
        """The ranks of the whole grid."""
        return self.rows * self.cols


CELLS = [
    Cell(rows, cols, overlap, dtype)
    for rows, cols in ((2, 1), (2, 2), (2, 4))
    for overlap in (False, True)
    for dtype in ("float32", "bfloat16")
]
CELLS += [
    Cell(rows, cols, overlap, "float32", backward=True) for rows, cols in ((2, 2), (2, 4)) for overlap in (False, True)
]
CELLS += [Cell(2, 2, overlap, "float32", kv_heads=2) for overlap in (False, True)]


def measure(out: str, number: str) -> None:
    """Run one rank of cell number `number`. Rank 0 writes the result to `out`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cell, group, rank = CELLS[int(number)], dist.group.WORLD, dist.get_rank()
    program = programs.attention(1, 8, cell.kv_heads, cell.seq, 64, dtype=cell.dtype)
    placement = dict(cols=Placement("kv", cell.overlap and cell.cols > 1), rows=Placement("q", cell.overlap))
    plan = place(Schedule(program, Mesh(cols=cell.cols, rows=cell.rows)), **placement).lower()
    schedule = Attention2D(group, cell.rows, cell.cols, overlap=cell.overlap)
    generator = torch.Generator().manual_seed(rank)
    shapes = {name: (1, cell.seq // cell.ranks, 8 if name == "q" else cell.kv_heads, 64) for name in "qkv"}
    dtype = getattr(torch, cell.dtype)
    local = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    for x in local.values():
        x.requires_grad_(cell.backward)
    attend = differentiable(plan, group, Count())

    def by_hand() -> None:
        out = schedule(local["q"], local["k"], local["v"], causal=True)
        if cell.backward:
            torch.autograd.grad(out, tuple(local.values()), out.detach())

    def steps_of_plan() -> None:
        if cell.backward:
            out = attend(local["q"], local["k"], local["v"])
            torch.autograd.grad(out, tuple(local.values()), out.detach())
        else:
            execute(plan, local, group, Count())

    calls = [by_hand, steps_of_plan, by_hand]
    hand, steps, again = (
        repetitions([timed(each) for each in calls], group, "cpu", REPETITIONS).median(0).values.tolist()
    )
    if rank == 0:
        volume = schedule.volume(1, cell.seq, 8, cell.kv_heads, 64, dtype.itemsize)
        sent = volume.forward + volume.backward * cell.backward
        same = sent == plan.bytes_per_rank + backward_plan(plan).bytes_per_rank * cell.backward
        write_result(out, {"hand": hand, "steps": steps, "again": again, "sent": sent, "same": same})
    dist.barrier()
    dist.destroy_process_group()


def row(cell: Cell, measured: dict) -> list[str]:
    """A row of the table."""
    kind = ", overlapped" * cell.overlap + ", with gradients" * cell.backward + ", 8/2 heads" * (cell.kv_heads == 2)
    spread = f"{abs(measured['again'] / measured['hand'] - 1):.0%}"
    sent = f"{measured['sent'] / 1e6:.2f} MB" + (", the same" if measured["same"] else ", not the same")
    ratio = f"{measured['steps'] / measured['hand']:.3f}"
    return [
        f"{cell.rows} x {cell.cols}{kind}, {cell.dtype}",
        sent,
        f"{measured['hand'] * 1e3:.0f} ms",
        ratio,
        spread,
    ]


def main() -> None:
    """Measure all cells and publish the table; or measure and print those whose numbers are arguments."""
    results = measured_cells(__file__, CELLS)
    header = ["grid", "sent by a rank", "attention2d", "time of the plan's steps / attention2d's", "spread"]
    print_or_publish("generic-executor", markdown(header, [row(cell, each) for cell, each in results.items()]))


if __name__ == "__main__":
    arguments = cell_arguments()
    main() if arguments is None else measure(*arguments)
