"""Plans that commir's search chooses against hand-written schedules, behind slow links (about 10 min; root).

The claims: in at least 90 % of the cells the chosen plan is at most 1.10x as slow as the best hand-written schedule, and
predicted and measured times of all schedules have a rank correlation of at least 0.9. Forward passes in bf16, causal. The
speeds of the links and the time of a tile are measured before, on all ranks at once. All schedules take turns; the table
shows medians. The ring runs twice, and the difference of its two medians is the spread.
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

REPETITIONS, BURST = 10, "16kb"


@dataclass(frozen=True)
class Cell:
    """One measurement: attention of a shape on a number of ranks behind links of a rate."""

    ranks: int
    rate: str
    kv_heads: int
    heads: int = 8
    seq: int = 1024

    def __str__(self) -> str:
        return f"{self.ranks}, {self.rate}, {self.heads}/{self.kv_heads} heads"

    @property
    def program(self) -> Program:
        return programs.attention(1, self.heads, self.kv_heads, self.seq, 64, dtype="bfloat16")


CELLS = [Cell(ranks, rate, kv_heads) for ranks in (4, 8) for rate in ("20mbit", "200mbit") for kv_heads in (8, 2, 1)]


def hand_written(program: Program, ranks: int) -> dict[str, Plan]:
    """The known schedules that fit, each with the best split of the ranks in its kind, by bytes."""
    splits = [(n, ranks // n) for n in range(2, ranks) if ranks % n == 0]
    kinds = {
        "ring": [(Mesh(x=ranks), dict(x=STREAMED_KV))],
        "all-gather": [(Mesh(x=ranks), dict(x="q"))],
        "Ulysses": [(Mesh(x=ranks), dict(x="heads"))],
        "USP": [(Mesh(x=a, y=b), dict(x=STREAMED_KV, y="heads")) for a, b in splits],
        "2-D": [(Mesh(x=a, y=b), dict(x="kv", y="q")) for a, b in splits],
        "2-D, overlapped": [(Mesh(x=a, y=b), dict(x=STREAMED_Q, y=STREAMED_KV)) for a, b in splits],
    }
    found = {name: [plan for each in options for plan in lowered(program, *each)] for name, options in kinds.items()}
    return {name: min(plans, key=lambda plan: plan.bytes_per_rank) for name, plans in found.items() if plans}


def measure(out: str, number: str) -> None:
    """Run one rank of cell number `number`. Rank 0 writes the result to `out`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cell, group, rank = CELLS[int(number)], dist.group.WORLD, dist.get_rank()
    tile, speed = (
        measure_tile(cell.program, cell.ranks, group),
        link_speeds(Mesh(x=cell.ranks), group, REPETITIONS)["x"],
    )
    best = search(cell.program, Mesh(x=cell.ranks, speeds={"x": speed}), point_seconds=tile[0], call_seconds=tile[1])[0]
    plans = hand_written(cell.program, cell.ranks)
    timed_plans = {"ring again": plans["ring"], "chosen": best, **plans}
    local = random_blocks(cell.ranks, rank, cell.seq, cell.heads, cell.kv_heads)
    seconds = median_seconds(timed_plans, local, group, REPETITIONS)
    if rank == 0:
        write_result(out, {
            "seconds": seconds,
            "predicted": {
                name: predicted(plan, dict.fromkeys("xy", speed), tile) for name, plan in timed_plans.items()
            },
            "chosen": known_as(best.schedule) or str(best.schedule).partition(": ")[2],
            "speed": speed,
            "tile": tile,
        })  # fmt: skip
    dist.destroy_process_group()


def row(cell: Cell, measured: dict) -> list[str]:
    """A row of the table: times relative to the ring; the chosen plan, relative to the best hand-written schedule."""
    seconds, predictions = measured["seconds"], measured["predicted"]
    names = [name for name in seconds if name not in ("chosen", "ring again")]
    best = min(names, key=seconds.__getitem__)
    others = [f"{seconds['ring'] / seconds[name]:.2f}x" if name in seconds else "" for name in SHOWN]
    spread = abs(seconds["ring again"] / seconds["ring"] - 1)
    agreement = correlation([seconds[n] for n in names], [predictions[n] for n in names])
    chosen = f"{measured['chosen']}: {seconds['chosen'] / seconds[best]:.2f} of {best}"
    error = f"{predictions['chosen'] / seconds['chosen']:.2f}"
    return [str(cell), f"{seconds['ring']:.3f} s", *others, chosen, error, f"{agreement:.2f}", f"{spread:.0%}"]


SHOWN = ["all-gather", "Ulysses", "USP", "2-D", "2-D, overlapped"]


def main() -> None:
    """Measure all cells and publish the table; or measure and print those whose numbers are arguments."""
    results = measured_cells(__file__, CELLS, burst=BURST)
    header = ["ranks, links, tensors", "ring", *SHOWN, "chosen", "predicted/measured", "correlation", "spread"]
    table = markdown(header, [row(cell, measured) for cell, measured in results.items()])
    pooled = [(each["seconds"][name], each["predicted"][name]) for each in results.values() for name in each["seconds"]]
    print(f"rank correlation over all cells: {correlation(*map(list, zip(*pooled, strict=True))):.3f}")
    print_or_publish("chosen-plans", table)


if __name__ == "__main__":
    arguments = cell_arguments()
    main() if arguments is None else measure(*arguments)
