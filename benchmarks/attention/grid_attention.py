"""Attention over a grid of ranks against the schedules it competes with, behind slow links (about 16 min; root).

The claims (bf16, causal, as many key/value heads as heads, links of 20 mbit): a grid's forward is >= 1.55x as fast as a
ring's on 8 ranks and >= 1.7x on 9; forward and backward >= 1.5x on 8; with two heads the 3-D grid is >= 1.8x as fast as a
ring and >= 1.15x as fast as USP. In each repetition all schedules run in turn. A run starts with a barrier and lasts until
the slowest rank is done. The table shows medians. The ring runs twice, and the difference of its two medians is the spread.
Of several possible grids, the one that sends the fewest bytes (`volume`) is shown.
"""

import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist

from attention2d import USP, AllGather, Attention2D, Ring, Ulysses, choose
from benchmarks.support import table_charts
from benchmarks.support.cells import cell_arguments, measured_cells, write_result
from benchmarks.support.tables import markdown, publish
from commfabric.fabric.measurement import repetitions, timed

REPETITIONS, BURST = 10, "16kb"  # burst: of the emulated links (launch/netlab.sh)


@dataclass(frozen=True)
class Cell:
    """One measurement: a shape of the tensors on a number of ranks behind links of a rate."""

    ranks: int
    rate: str
    seq: int
    heads: int
    kv_heads: int
    head_dim: int = 64
    training: bool = False

    def __str__(self) -> str:
        way = "forward + backward" if self.training else "forward"
        return f"{self.ranks}, {self.rate}, {self.seq} tokens, {self.heads}/{self.kv_heads} x {self.head_dim}, {way}"

    @property
    def shape(self) -> dict[str, int]:
        """The keyword arguments of `volume` and `choose`."""
        return dict(seq=self.seq, heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim)


CELLS = [
    Cell(8, "20mbit", 1024, 8, 8),
    Cell(9, "20mbit", 1152, 9, 9),
    Cell(8, "20mbit", 1024, 8, 8, training=True),
    Cell(8, "20mbit", 1024, 2, 2, 256),
    Cell(8, "20mbit", 1024, 2, 2, 256, training=True),
    Cell(8, "20mbit", 4096, 2, 2),
    Cell(8, "20mbit", 1024, 8, 1),
    Cell(4, "20mbit", 1024, 8, 8),
    Cell(4, "100mbit", 1024, 8, 8),
    Cell(8, "100mbit", 1024, 8, 8),
    Cell(8, "1gbit", 1024, 8, 8),
]
SHOWN = ["all-gather", "Ulysses", "USP", "2-D", "2-D, overlapped", "3-D", "paper's 2-D"]


def contestants(cell: Cell, group: dist.ProcessGroup) -> dict[str, Attention2D]:
    """The schedules by their names, without those for which there are too few heads or ranks."""
    ranks, shared = group.size(), 2 if group.size() % 2 == 0 else 3
    found = {"ring": Ring(group), "ring again": Ring(group), "all-gather": AllGather(group)}
    if cell.kv_heads % ranks == 0:
        found["Ulysses"] = Ulysses(group)
    grid = cheapest(cell, group, 1)
    found["2-D"] = Attention2D(group, *grid)
    found["2-D, overlapped"] = Attention2D(group, *grid, overlap=True)
    found["paper's 2-D"] = Attention2D(group, *grid, order="cyclic", transpose=True)
    if cell.kv_heads % shared == 0:
        found["USP"] = USP(group, shared)
        if ranks // shared >= 4:
            found["3-D"] = Attention2D(group, *cheapest(cell, group, shared), ulysses=shared)
    chosen = choose(group, **cell.shape, training=cell.training)
    same = [name for name, schedule in found.items() if repr(schedule) == repr(chosen)]
    return found if same else found | {"chosen": chosen}


def cheapest(cell: Cell, group: dist.ProcessGroup, ulysses: int) -> tuple[int, int]:
    """The (rows, cols) that send the fewest bytes, of all grids with at least two rows and two columns."""
    cells = group.size() // ulysses
    grids = [(rows, cells // rows) for rows in range(2, cells) if cells % rows == 0]
    return min(grids, key=lambda grid: sent(Attention2D(group, *grid, ulysses=ulysses), cell))


def sent(schedule: Attention2D, cell: Cell) -> int:
    """The bytes that the busiest rank sends."""
    volume = schedule.volume(batch=1, itemsize=2, **cell.shape)
    return volume.forward + cell.training * volume.backward


def measure(out: str, number: str) -> None:
    """Run one rank of cell number `number`. Rank 0 writes the result to `out`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cell, group = CELLS[int(number)], dist.group.WORLD
    schedules = contestants(cell, group)
    generator = torch.Generator().manual_seed(dist.get_rank())
    local = cell.seq // cell.ranks

    def tensor(heads: int) -> torch.Tensor:
        made = torch.randn(1, local, heads, cell.head_dim, generator=generator).bfloat16()
        return made.requires_grad_(cell.training)

    q, k, v, dout = map(tensor, (cell.heads, cell.kv_heads, cell.kv_heads, cell.heads))

    def call(schedule: Attention2D) -> None:
        found = schedule(q, k, v, causal=True)
        if cell.training:
            torch.autograd.grad(found, (q, k, v), dout.detach())

    calls = [timed(lambda schedule=schedule: call(schedule)) for schedule in schedules.values()]
    seconds = repetitions(calls, group, "cpu", REPETITIONS).median(0).values.tolist()
    if dist.get_rank() == 0:
        chosen = choose(group, **cell.shape, training=cell.training)
        write_result(out, {
            "seconds": dict(zip(schedules, seconds, strict=True)),
            "sent": {name: sent(schedule, cell) for name, schedule in schedules.items()},
            "grids": {name: point(schedule) for name, schedule in schedules.items()},
            "chosen": next(name for name, schedule in schedules.items() if repr(schedule) == repr(chosen)),
        })  # fmt: skip
    dist.barrier()
    dist.destroy_process_group()


def point(schedule: Attention2D) -> str:
    """The schedule's grid as text: "ULYSSES x ROWS x COLS", or "ROWS x COLS" if cells have one rank."""
    grid = schedule.grid
    shared = f"{grid.ulysses} x " if grid.ulysses > 1 else ""
    return f"{shared}{grid.rows} x {grid.cols}"


def row(cell: Cell, measured: dict) -> list[str]:
    """A row of the table: how many times as fast as the ring, and in brackets how many times fewer bytes are sent."""
    seconds, nbytes, grids = measured["seconds"], measured["sent"], measured["grids"]
    ring, again = seconds["ring"], seconds["ring again"]

    def against(name: str) -> str:
        if name not in seconds:
            return ""
        grid = f" {grids[name]}" if name in ("2-D", "3-D") else ""
        return f"{ring / seconds[name]:.2f}x ({nbytes['ring'] / nbytes[name]:.2f}){grid}"

    chosen = measured["chosen"]
    others = [against(name) for name in SHOWN]
    best = f"{chosen} {grids[chosen]}: {against(chosen)}" if chosen == "chosen" else f"{chosen}"
    return [str(cell), f"{nbytes['ring'] / 1e6:.2f} MB, {ring:.3f} s", *others, best, f"{abs(again / ring - 1):.0%}"]


def main() -> None:
    """Measure all cells and publish the table and its chart; or measure and print those whose numbers are arguments."""
    results = measured_cells(__file__, CELLS, burst=BURST)
    header = ["ranks, links, tensors", "ring", *SHOWN, "`choose`", "spread"]
    table = markdown(header, [row(cell, measured) for cell, measured in results.items()])
    if sys.argv[1:]:
        print(table)
    else:
        publish("grid-attention", table)
        table_charts.draw("grid-attention")


if __name__ == "__main__":
    arguments = cell_arguments()
    main() if arguments is None else measure(*arguments)
