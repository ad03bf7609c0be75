"""Predicted and measured all-reduces on a slow network, at sizes that were not fitted (about 3 min; root).

The claim: predictions are within 25 % of the measured times. The fabric is fitted to powers of two. It predicts sizes
between and beyond them, which are measured afterwards on the same links: medians of 15 calls, or of 100 below 128 KB,
until the slowest rank is done.
"""

import sys

import torch
import torch.distributed as dist

from benchmarks.support.cells import cell_arguments, measure_cell, write_result
from benchmarks.support.tables import markdown, print_or_publish
from commfabric.collectives import counted as collectives
from commfabric.fabric.cost_model import size_name
from commfabric.fabric.measurement import collective_calls, measure, repetitions, timed

CELLS = [(2, "200mbit"), (4, "200mbit"), (2, "1gbit"), (4, "1gbit")]
FITTED = [1 << bits for bits in range(10, 23)]
PREDICTED = [3 << 10, 12 << 10, 48 << 10, 192 << 10, 384 << 10, 768 << 10, 3 << 20, 6 << 20]
REPETITIONS, SMALL, REPETITIONS_OF_SMALL = 15, 128 << 10, 100


def cell(out: str) -> None:
    """What one rank does; the result is a list of (bytes, measured seconds, predicted seconds, low, high)."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    fabric = measure(group, collective_calls(group, ["all_reduce"]), FITTED)
    rows = []
    for nbytes in PREDICTED:
        tensor = torch.zeros(nbytes // 4)
        call = timed(lambda tensor=tensor: collectives.all_reduce(tensor, group))
        count = REPETITIONS_OF_SMALL if nbytes < SMALL else REPETITIONS
        measured = repetitions([call], group, count=count).median().item()
        asked = ("all_reduce", nbytes, group.size())
        rows.append([nbytes, measured, fabric.time(*asked), *fabric.interval(*asked)])
    if dist.get_rank() == 0:
        write_result(out, rows)
    dist.barrier()
    dist.destroy_process_group()


def rows(ranks: int, rate: str, results: list) -> list[list[str]]:
    """The table's rows for one cell."""
    lines = []
    for nbytes, measured, predicted, low, high in results:
        times = [f"{seconds * 1e3:.2f}" for seconds in (measured, predicted)]
        interval = f"{low * 1e3:.2f} to {high * 1e3:.2f}"
        lines.append([f"{ranks}, {rate}", size_name(nbytes), *times, f"{predicted / measured - 1:+.0%}", interval])
    return lines


def main() -> None:
    """Measure all cells and publish the table; print those that the command line names ("2,200mbit")."""
    cells = [each for each in CELLS if not sys.argv[1:] or f"{each[0]},{each[1]}" in sys.argv[1:]]
    table = [row for each in cells for row in rows(*each, measure_cell(__file__, *each))]
    header = ["ranks, link", "all-reduce of", "measured ms", "predicted ms", "error", "interval ms"]
    print_or_publish("fabric-netlab", markdown(header, table))


if __name__ == "__main__":
    arguments = cell_arguments()
    main() if arguments is None else cell(*arguments)
