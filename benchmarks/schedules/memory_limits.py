"""Plans that commir's search finds within a limit of memory that no known schedule keeps (about 3 min; root).

The claim: where ring, Ulysses and all other known schedules hold more than a rank has, the search still finds a plan, and it
is little slower. Forward passes in bf16, causal, on 2 nodes of 2 ranks. Memory is what the plan says, and what torch's
allocator has handed out at most, beyond the inputs, with the kernels' own temporaries. All plans take turns; the table shows
medians. The plan without a limit runs twice, and the difference of its two medians is the spread.
"""

from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.support.cells import cell_arguments, measured_cells, write_result
from benchmarks.support.live_memory import peak_allocated
from benchmarks.support.plans import link_speeds, median_seconds, random_blocks
from benchmarks.support.tables import markdown, print_or_publish
from commir import Mesh, execute, programs, search
from commir.execution.state import Count
from commir.ir.program import Program
from commir.scheduling.known_schedules import known_as
from commir.searching.search import all_plans
from commir.searching.tile_times import measure_overlap, measure_tile

REPETITIONS, BURST = 10, "16kb"
LIMITS = 1.0, 0.85, 0.75, 0.6  # of what the most economical known schedule holds
NODES, PER_NODE = 2, 2


@dataclass(frozen=True)
class Cell:
    """One measurement: attention of a shape, with all limits."""

    kv_heads: int
    heads: int = 16
    seq: int = 4096
    rate: str = "500mbit"
    ranks: int = NODES * PER_NODE
    per_node: int = PER_NODE

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads} heads"

    @property
    def program(self) -> Program:
        """Attention of these sizes, of heads of 64."""
        return programs.attention(1, self.heads, self.kv_heads, self.seq, 64, dtype="bfloat16")


CELLS = [Cell(16), Cell(4), Cell(1)]


def measure(out: str, number: str) -> None:
    """Run one rank of cell number `number`. Rank 0 writes the result to `out`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cell, group, rank = CELLS[int(number)], dist.group.WORLD, dist.get_rank()
    bare = Mesh(node=NODES, gpu=PER_NODE)
    mesh = bare.with_speeds(link_speeds(bare, group, REPETITIONS))
    tile = *measure_tile(cell.program, cell.ranks, group), measure_overlap(cell.program, group)
    times = dict(zip(("point_seconds", "call_seconds", "overlap"), tile, strict=True))
    known = {}
    for flat_or_not in (Mesh(gpu=cell.ranks), mesh):
        for plan in all_plans(cell.program, flat_or_not):
            if name := known_as(plan.schedule).removesuffix(", overlapped"):
                known[name] = min(known.get(name, plan.memory), plan.memory)
    limits = {f"{share:.0%}": int(share * min(known.values())) for share in LIMITS}
    plans = {"no limit": search(cell.program, mesh, **times)[0]}
    for name, limit in limits.items():
        with suppress(ValueError):  # no plan holds so little
            plans[name] = search(cell.program, mesh, memory=limit, **times)[0]
    local = random_blocks(cell.ranks, rank, cell.seq, cell.heads, cell.kv_heads)
    seconds = median_seconds({"again": plans["no limit"], **plans}, local, group, REPETITIONS)
    allocated = {
        name: peak_allocated(lambda plan=plan: execute(plan, local, group, Count())) for name, plan in plans.items()
    }
    if rank == 0:
        write_result(out, {
            "known": known,
            "limits": limits,
            "seconds": seconds,
            "allocated": allocated,
            "inputs": sum(x.nbytes for x in local.values()),
            "memory": {name: plan.memory for name, plan in plans.items()},
            "sent": {name: plan.bytes_per_rank for name, plan in plans.items()},
            "placement": {name: str(plan.schedule).partition(": ")[2] for name, plan in plans.items()},
        })  # fmt: skip
    dist.barrier()
    dist.destroy_process_group()


def rows(cell: Cell, found: dict) -> list[list[str]]:
    """Rows of the table: one for each limit."""
    spread = abs(found["seconds"]["again"] / found["seconds"]["no limit"] - 1)
    table = []
    for name in ("no limit", *found["limits"]):
        limit = found["limits"].get(name)
        if name not in found["placement"]:
            table.append([str(cell), f"{limit / 1e6:.2f} MB", "all", "no plan holds so little", *[""] * 5])
            continue
        exceeding = [each for each, memory in found["known"].items() if limit is not None and memory > limit]
        table.append([
            str(cell),
            "none" if limit is None else f"{limit / 1e6:.2f} MB",
            "all" if exceeding and len(exceeding) == len(found["known"]) else f"{len(exceeding)} of {len(found['known'])}",
            found["placement"][name],
            f"{found['memory'][name] / 1e6:.2f} MB",
            f"{(found['allocated'][name] + found['inputs']) / 1e6:.2f} MB",
            f"{found['sent'][name] / 1e6:.2f} MB",
            f"{found['seconds'][name] / found['seconds']['no limit']:.2f}",
            f"{spread:.0%}",
        ])  # fmt: skip
    return table


def main() -> None:
    """Measure all cells and publish the table; or measure and print those whose numbers are arguments."""
    results = measured_cells(__file__, CELLS, burst=BURST)
    header = ["heads", "limit", "known schedules above it", "found", "holds", "allocated", "sent by a rank",
              "time / without limit", "spread"]  # fmt: skip
    table = markdown(header, [row for cell, found in results.items() for row in rows(cell, found)])
    print_or_publish("memory-limits", table)


if __name__ == "__main__":
    arguments = cell_arguments()
    main() if arguments is None else measure(*arguments)
