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
from benchmarks.support.tables import markdown, print_or_publish
from commir import Mesh, Plan, Schedule, execute, programs, search
from commir.ir.program import Program
from commir.scheduling.loop_nest import Illegal
from commir.scheduling.placements import Placement, known_as, place
from commir.searching.tile_times import measure_tile
from sparsefusion.collectives.counted import exchange
from sparsefusion.fabric.measurement import repetitions, timed

REPETITIONS, BURST = 10, "16kb"
SIZES = 2_000, 200_000  # bytes of the messages by which links are measured


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
STREAMED_Q, STREAMED_KV = Placement("kv", True), Placement("q", True)


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


def lowered(program: Program, mesh: Mesh, placement: dict) -> list[Plan]:
    """The plan of a placement, or nothing if it does not divide."""
    try:
        return [place(Schedule(program, mesh), **placement).lower()]
    except Illegal:
        return []


def link_speed(group: dist.ProcessGroup) -> tuple[float, float]:
    """(latency in seconds, bytes per second) of messages around a ring of all ranks; the same on every rank."""
    rank, ranks = group.rank(), group.size()

    def pass_on(nbytes: int) -> None:
        out, into = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
        exchange([(out, (rank - 1) % ranks)], [(into, (rank + 1) % ranks)], group).wait()

    calls = [timed(lambda nbytes=nbytes: pass_on(nbytes)) for nbytes in SIZES]
    small, large = repetitions(calls, group, "cpu", REPETITIONS).median(0).values.tolist()
    rate = (SIZES[1] - SIZES[0]) / (large - small)
    return max(0.0, small - SIZES[0] / rate), rate


def measure(out: str, number: str) -> None:
    """Run one rank of cell number `number`. Rank 0 writes the result to `out`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cell, group, rank = CELLS[int(number)], dist.group.WORLD, dist.get_rank()
    point_seconds, call_seconds = measure_tile(cell.program, cell.ranks, group)
    speed = link_speed(group)
    mesh = Mesh(gpu=cell.ranks, speeds={"gpu": speed})
    best = search(cell.program, mesh, point_seconds=point_seconds, call_seconds=call_seconds)[0]
    plans = hand_written(cell.program, cell.ranks)
    timed_plans = {"ring again": plans["ring"], "chosen": best, **plans}
    generator = torch.Generator().manual_seed(rank)
    shapes = {"q": cell.heads, "k": cell.kv_heads, "v": cell.kv_heads}
    local = {
        name: torch.randn(1, cell.seq // cell.ranks, heads, 64, generator=generator).bfloat16()
        for name, heads in shapes.items()
    }
    calls = [timed(lambda plan=plan: execute(plan, local, group)) for plan in timed_plans.values()]
    seconds = repetitions(calls, group, "cpu", REPETITIONS).median(0).values.tolist()
    if rank == 0:
        write_result(out, {
            "seconds": dict(zip(timed_plans, seconds, strict=True)),
            "predicted": {
                name: predicted(plan, mesh, point_seconds, call_seconds) for name, plan in timed_plans.items()
            },
            "chosen": known_as(best.schedule) or str(best.schedule).partition(": ")[2],
            "speed": speed,
            "tile": (point_seconds, call_seconds),
        })  # fmt: skip
    dist.destroy_process_group()


def predicted(plan: Plan, mesh: Mesh, point_seconds: float, call_seconds: float) -> float:
    """The predicted seconds of a plan on links of the measured speed."""
    speeds = dict.fromkeys(plan.mesh.names, mesh.speeds["gpu"])
    fast = plan.on_mesh(plan.mesh.with_speeds(speeds))
    return fast.with_tile(point_seconds, call_seconds).seconds


def ranks_of(values: list[float]) -> list[float]:
    """The rank of each value, from 0."""
    order = sorted(range(len(values)), key=values.__getitem__)
    return [float(order.index(number)) for number in range(len(values))]


def correlation(a: list[float], b: list[float]) -> float:
    """Spearman's rank correlation."""
    pairs = torch.tensor([ranks_of(a), ranks_of(b)], dtype=torch.float64)
    return float(torch.corrcoef(pairs)[0, 1])


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
