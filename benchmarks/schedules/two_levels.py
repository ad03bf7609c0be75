"""Plans that commir's search chooses on nodes with fast links, behind slow ones between them (about 12 min; root).

The claim: in at least 90 % of the cells the chosen plan is at most 1.10x as slow as the best hand-written schedule, whose
splits follow the nodes or ignore them. Forward passes in bf16, causal. The ranks of a node share one slow link to the other
nodes. The speeds of both levels and the time of a tile are measured before, on all ranks at once. All schedules take turns;
the table shows medians. The ring runs twice, and the difference of its two medians is the spread.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.support.cells import cell_arguments, measured_cells, write_result
from benchmarks.support.plans import (
    STREAMED_KV,
    STREAMED_Q,
    correlation,
    link_speeds,
    lowered,
    median_seconds,
    predicted,
    random_blocks,
)
from benchmarks.support.tables import markdown, print_or_publish
from commir import Mesh, Plan, programs, search
from commir.ir.program import Program
from commir.scheduling.placements import known_as
from commir.searching.tile_times import measure_tile

REPETITIONS, BURST = 7, "16kb"


@dataclass(frozen=True)
class Cell:
    """One measurement: attention of a shape on nodes of some ranks, each behind a link of a rate."""

    nodes: int
    per_node: int
    rate: str
    kv_heads: int
    heads: int = 8
    seq: int = 1024

    def __str__(self) -> str:
        return f"{self.nodes} x {self.per_node}, {self.rate}, {self.heads}/{self.kv_heads} heads, {self.seq:,}"

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node

    @property
    def mesh(self) -> Mesh:
        return Mesh(node=self.nodes, gpu=self.per_node)

    @property
    def program(self) -> Program:
        return programs.attention(1, self.heads, self.kv_heads, self.seq, 64, dtype="bfloat16")


SHAPES = [(2, 2), (2, 4), (4, 2)]
CELLS = [Cell(*shape, rate, kv) for shape in SHAPES for rate in ("50mbit", "500mbit") for kv in (8, 2, 1)]
CELLS += [Cell(*shape, "200mbit", 2, seq=4096) for shape in SHAPES]

# Schedules that ignore the nodes, on one axis of all ranks, and those that follow them: (placement of nodes, within a node).
FLAT = {"ring": STREAMED_KV, "all-gather": "q", "Ulysses": "heads"}
BY_NODE = {
    "double ring": [(STREAMED_KV, STREAMED_KV)],
    "USP": [(STREAMED_KV, "heads"), ("heads", STREAMED_KV)],
    "2-D": [("kv", "q"), ("q", "kv")],
    "2-D, overlapped": [(STREAMED_Q, STREAMED_KV), (STREAMED_KV, STREAMED_Q)],
}


def hand_written(cell: Cell) -> dict[str, Plan]:
    """The known schedules that fit; where there are two ways to use the nodes, both."""
    plans = {name: lowered(cell.program, Mesh(x=cell.ranks), {"x": each}) for name, each in FLAT.items()}
    for name, ways in BY_NODE.items():
        for number, (node, gpu) in enumerate(ways):
            plans[name + " (the other way)" * number] = lowered(cell.program, cell.mesh, {"node": node, "gpu": gpu})
    return {name: plan for name, found in plans.items() for plan in found}


def measure(out: str, number: str) -> None:
    """Run one rank of cell number `number`. Rank 0 writes the result to `out`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cell, group, rank = CELLS[int(number)], dist.group.WORLD, dist.get_rank()
    tile, speeds = measure_tile(cell.program, cell.ranks, group), link_speeds(cell.mesh, group, REPETITIONS)
    mesh = cell.mesh.with_speeds(speeds)
    best = search(cell.program, mesh, point_seconds=tile[0], call_seconds=tile[1])[0]
    plans = hand_written(cell)
    timed_plans = {"ring again": plans["ring"], "chosen": best, **plans}
    local = random_blocks(cell.ranks, rank, cell.seq, cell.heads, cell.kv_heads)
    seconds = median_seconds(timed_plans, local, group, REPETITIONS)
    if rank == 0:
        placed = {name: plan for name, plan in timed_plans.items() if plan.mesh.names != ("x",)}
        write_result(out, {
            "seconds": seconds,
            "predicted": {name: predicted(plan, speeds, tile) for name, plan in placed.items()},
            "chosen": str(best.schedule).partition(": ")[2] + f" ({known_as(best.schedule)})",
            "speeds": speeds,
            "tile": tile,
        })  # fmt: skip
    dist.destroy_process_group()


def row(cell: Cell, measured: dict) -> list[str]:
    """A row of the table: times relative to the ring; the chosen plan, relative to the best hand-written schedule."""
    seconds, predictions = measured["seconds"], measured["predicted"]
    names = [name for name in seconds if name not in ("chosen", "ring again")]
    best = min(names, key=seconds.__getitem__)
    others = []
    for shown in SHOWN:
        ways = [seconds[name] for name in names if name.removesuffix(" (the other way)") == shown]
        others.append(f"{seconds['ring'] / min(ways):.2f}x" if ways else "")
    spread = abs(seconds["ring again"] / seconds["ring"] - 1)
    chosen = f"{measured['chosen'].removesuffix(' ()')}: {seconds['chosen'] / seconds[best]:.2f} of {best}"
    error = f"{predictions['chosen'] / seconds['chosen']:.2f}"
    return [str(cell), f"{seconds['ring']:.3f} s", *others, chosen, error, f"{spread:.0%}"]


SHOWN = ["all-gather", "Ulysses", *BY_NODE]


def main() -> None:
    """Measure all cells and publish the table; or measure and print those whose numbers are arguments."""
    results = measured_cells(__file__, CELLS, burst=BURST)
    header = ["nodes x ranks, links, heads, tokens", "ring", *SHOWN, "chosen", "predicted/measured", "spread"]
    table = markdown(header, [row(cell, measured) for cell, measured in results.items()])
    pooled = [
        (each["seconds"][name], each["predicted"][name]) for each in results.values() for name in each["predicted"]
    ]
    print(f"rank correlation over all cells: {correlation(*map(list, zip(*pooled, strict=True))):.3f}")
    print_or_publish("two-levels", table)


if __name__ == "__main__":
    arguments = cell_arguments()
    main() if arguments is None else measure(*arguments)
