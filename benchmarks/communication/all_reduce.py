"""Quantized all-reduce by size, format, ranks and link, against the exact one (about 7 min; root, for launch/netlab.sh).

The claims: for 1 MB among 4 ranks on 200 mbit, fp16 has >= 1.6x and int8 >= 2.5x the speed of fp32, and `auto` takes at
most 1.15x the time of the best fixed choice. In each repetition all choices take turns; a turn starts with a barrier and
lasts until the slowest rank is done. Times are medians. The exact all-reduce is measured twice; the difference is the
spread.
"""

import sys

import torch
import torch.distributed as dist

from benchmarks.support import table_charts
from benchmarks.support.cells import cell_arguments, measure_cell, write_result
from benchmarks.support.tables import markdown, publish
from commfabric.fabric.measurement import repetitions, timed
from commfabric.reduction import quantized

REPETITIONS, SMALL, REPETITIONS_OF_SMALL = 30, 128 << 10, 150
SIZES = [8 << 10, 32 << 10, 128 << 10, 512 << 10, 1 << 20, 4 << 20]
CELLS = [(2, "200mbit"), (4, "200mbit"), (2, "1gbit"), (4, "1gbit")]


def cell(out: str) -> None:
    """What one rank does: measure every choice at every size."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    choice = quantized.format_choice(group)
    rows = []
    for nbytes in SIZES:
        tensor = torch.randn(nbytes // 4)
        choices = {f"{f} {a}": (f, a) for f, a in quantized.CANDIDATES} | {
            "fp32 again": ("fp32", "native"),
            "auto": ("auto", None),
        }
        calls = [lambda c=c, tensor=tensor: quantized.all_reduce(tensor, group, *c) for c in choices.values()]
        count = REPETITIONS_OF_SMALL if nbytes <= SMALL else REPETITIONS
        seconds = repetitions([timed(call) for call in calls], group, "cpu", count).median(0).values.tolist()
        chosen = " ".join(choice.choose(tensor.numel()))
        rows.append({"nbytes": nbytes, "chosen": chosen, "seconds": dict(zip(choices, seconds, strict=True))})
    if dist.get_rank() == 0:
        write_result(out, rows)
    dist.barrier()
    dist.destroy_process_group()


def row(ranks: int, rate: str, measured: dict) -> list[str]:
    """A row of the table."""
    seconds, chosen = dict(measured["seconds"]), measured["chosen"]
    auto, again, exact = seconds.pop("auto"), seconds.pop("fp32 again"), seconds["fp32 native"]

    formats = [of_format(format, ranks, measured) for format in ("fp16", "bf16", "int8")]
    size = measured["nbytes"]
    return [
        f"{ranks}, {rate}",
        f"{size >> 10} KB" if size < 1 << 20 else f"{size >> 20} MB",
        f"{exact * 1e3:.2f} ms",
        *(f"{exact / s:.2f}x ({algorithm})" for s, algorithm in formats),
        f"{exact / auto:.2f}x ({chosen})",
        f"{auto / min(seconds.values()):.2f}",
        f"{abs(again / exact - 1):.0%}",
    ]


def of_format(format: str, ranks: int, measured: dict) -> tuple[float, str]:
    """(seconds, algorithm) of `all_reduce(tensor, group, format)`, which takes the format's default algorithm."""
    algorithm = quantized.default_algorithm(format, measured["nbytes"] // 4, ranks)
    return measured["seconds"][f"{format} {algorithm}"], algorithm


def main() -> None:
    """Measure all cells and publish the table and its chart; print those that the command line names ("2,200mbit")."""
    chosen = [each for each in CELLS if not sys.argv[1:] or f"{each[0]},{each[1]}" in sys.argv[1:]]
    cells = {each: measure_cell(__file__, *each) for each in chosen}
    rows = [row(*each, line) for each, measured in cells.items() for line in measured]
    header = ["ranks, link", "float32 data", "exact", "fp16", "bf16", "int8", "auto", "auto / best fixed", "spread"]
    if sys.argv[1:]:
        print(markdown(header, rows))
    else:
        publish("all-reduce", markdown(header, rows))
        table_charts.draw("all-reduce")


if __name__ == "__main__":
    arguments = cell_arguments()
    main() if arguments is None else cell(*arguments)
