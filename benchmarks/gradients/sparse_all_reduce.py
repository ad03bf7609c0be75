"""The sparse all-reduce against an all-gather of selected elements, on 4, 8 and 16 ranks (about 5 min; root).

The claims, for 4 M gradients at density 0.01: at 16 ranks a rank sends at most twice the bytes of 4 ranks (the all-gather
sends 5 times as many); behind links of 200 mbit it is faster than the all-gather from 8 ranks on. Both are timed in turns in
the same processes, with their selection; dense is an all-reduce of all gradients. The bytes are those that a rank sends, as
counted. 8 ranks of two cores spend more time in computing than ranks of their own machines would.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.support.cells import cell_arguments, measured_cells, write_result
from benchmarks.support.tables import markdown, print_or_publish
from commfabric.fabric.measurement import repetitions, timed
from sparsefusion.gradients.reducer import Reducer
from sparsefusion.planning.plan import Unit

NUMEL, DENSITY, TURNS = 1 << 22, 0.01, 7
EXCHANGES = ("all_gather", "sparse_all_reduce")


@dataclass(frozen=True)
class Cell:
    """A number of ranks, and the rate of their links."""

    ranks: int
    rate: str


CELLS = [Cell(ranks, rate) for ranks, rate in ((4, "200mbit"), (8, "200mbit"), (16, "200mbit"))]


def measure() -> dict[str, list]:
    """{exchange: [median seconds, bytes that rank 0 sends]}, and of a dense all-reduce."""
    group = dist.group.WORLD
    drawn = torch.randn(NUMEL, generator=torch.Generator().manual_seed(dist.get_rank())).pow_(3)
    units = {name: [Unit(("g",), NUMEL, int(DENSITY * NUMEL))] for name in EXCHANGES} | {"dense": [Unit(("g",), NUMEL)]}
    reducers = {name: Reducer(group, exchange=name) for name in units}

    def reduce(name: str) -> None:
        reducers[name].start(units[name], {"g": drawn.clone()}).wait()

    turns = [timed(lambda name=name: reduce(name), "cpu") for name in units]
    seconds = repetitions(turns, group, "cpu", TURNS).median(0).values.tolist()
    sent = [reducer.counter.sent // sum(reducer.counter.calls.values()) for reducer in reducers.values()]
    calls = {"all_gather": 1, "sparse_all_reduce": 2, "dense": 1}
    return {n: [s, each * calls[n]] for n, s, each in zip(units, seconds, sent, strict=True)}


def main() -> None:
    """Measure all cells, or those whose numbers are given, and publish the table."""
    if (arguments := cell_arguments()) is not None:
        dist.init_process_group("gloo")
        torch.set_num_threads(1)
        write_result(arguments[0], measure())
        dist.barrier()
        dist.destroy_process_group()
        return
    rows = []
    for cell, found in measured_cells(__file__, CELLS).items():
        (gather, sent_gather), (reduce, sent_reduce), (dense, sent_dense) = found.values()
        rows.append(
            [str(cell.ranks), cell.rate]
            + [f"{sent / 1e6:.2f} MB, {1e3 * seconds:.0f} ms" for seconds, sent in found.values()]
            + [f"{sent_gather / sent_reduce:.2f}x", f"{gather / reduce:.2f}x"]
        )
    header = ["ranks", "links", "all-gather", "sparse all-reduce", "dense", "fewer bytes", "as fast"]
    print_or_publish("sparse-all-reduce", markdown(header, rows))


if __name__ == "__main__":
    main()
