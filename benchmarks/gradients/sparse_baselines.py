"""SSFusion against other schemes (about 10 min; root).

The schemes are plans of `SparseFusion` for the same Mamba-2 of 24 layers with 410 gradients. So what differs is what is
fused, what is selected together, and which collective sends it, but not the implementation:

- per-tensor: every gradient is selected from and sent alone;
- HiPress-like: gradients are dense if selecting costs more than it saves; all are sent together after the backward pass;
- Espresso-like: the same choice, without fusion, and another thread selects;
- merged, as OMGS and Cupcake: buffers that make the step shortest, each with one selection, and all-gathers;
- OkTopk-like: one buffer with one selection, and the sparse all-reduce;
- SparDL-like: as merged, with the sparse all-reduce;
- SSFusion, -O and -(O+I): the planner's selective plan with a lower density, with offloading, and also interleaved.

The contestants take turns, and speeds are medians.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist

from benchmarks.gradients.sparse_ablation import Contestant, Dense, alone, fused, map_units, selective
from benchmarks.support.cells import cell_arguments, measured_cells, write_result
from benchmarks.support.learner import warm_turn
from benchmarks.support.tables import markdown, print_or_publish
from commfabric.fabric.measurement import repetitions
from sparsefusion.planning.plan import Buffer, Plan, Unit

REPETITIONS = 10


@dataclass(frozen=True)
class Cell:
    """A number of ranks, and the rate of their links."""

    ranks: int
    rate: str

    def __str__(self) -> str:
        return f"{self.ranks}, {self.rate}"


CELLS = [Cell(2, "200mbit"), Cell(2, "1gbit"), Cell(4, "200mbit")]


def in_bulk(plan: Plan) -> Plan:
    """The plan with all buffers in one."""
    return replace(plan, buffers=(Buffer(tuple(unit for buffer in plan.buffers for unit in buffer.units)),))


def merged(plan: Plan) -> Plan:
    """The plan with one selection from each buffer."""
    buffers = []
    for buffer in fused(plan).buffers:
        names = tuple(name for unit in buffer.units for name in unit.names)
        buffers.append(Buffer((Unit(names, sum(u.numel for u in buffer.units), sum(u.k for u in buffer.units)),)))
    return replace(plan, mode="bucket", buffers=tuple(buffers))


def offloaded(plan: Plan) -> Plan:
    """The plan whose selections another thread makes."""
    return replace(map_units(plan, lambda unit: replace(unit, offload=unit.k > 0)), mode="offload")


def sparsely_reduced(plan: Plan) -> Plan:
    """The plan with the sparse all-reduce."""
    return replace(plan, exchange="sparse_all_reduce")


def split(plan: Plan) -> Plan:
    """The plan with each gradient in a buffer of its own, dense or sparse as before."""
    return replace(plan, buffers=tuple(Buffer((unit,)) for buffer in plan.buffers for unit in buffer.units))


SCHEMES: dict[str, Callable[[Plan], Plan]] = {  # each from the planner's selective plan with a lower density
    "per-tensor": alone,
    "HiPress-like": lambda plan: in_bulk(selective(plan)),
    "Espresso-like": lambda plan: offloaded(split(selective(plan))),
    "merged (OMGS, Cupcake)": merged,
    "OkTopk-like": lambda plan: sparsely_reduced(merged(in_bulk(plan))),
    "SparDL-like": lambda plan: sparsely_reduced(merged(plan)),
    "SSFusion": lambda plan: plan,
    "SSFusion-O": offloaded,
    "SSFusion-(O+I)": lambda plan: replace(offloaded(plan), mode="interleaved"),
}


def measure(out: str, number: str) -> None:
    """The part of one rank in the measurement of a cell."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    plan = Contestant().fusion.plan
    dense, ours = Dense(), {name: Contestant(make(plan)) for name, make in SCHEMES.items()}
    turns = [partial(warm_turn, contestant.step) for contestant in (dense, *ours.values())]
    seconds = repetitions(turns, dist.group.WORLD, "cpu", REPETITIONS).median(0).values.tolist()
    if dist.get_rank() == 0:
        found = dict(zip(("dense", *ours), seconds, strict=True))
        write_result(out, {"seconds": found, "sent": {name: each.sent() for name, each in ours.items()}})
    dist.barrier()
    dist.destroy_process_group()


def speedup(name: str, found: dict) -> str:
    """A contestant's speed relative to dense, its bytes and messages."""
    seconds, sent = found["seconds"], found["sent"][name]
    return f"{seconds['dense'] / seconds[name]:.2f}x, {sent['bytes'] / 1e3:.0f} kB in {sent['messages']}"


def main() -> None:
    """Measure every cell, and publish the table; or print some cells."""
    results = measured_cells(__file__, CELLS)
    dense = ["dense", *(f"{1e3 * found['seconds']['dense']:.0f} ms" for found in results.values())]
    rows = [[name, *(speedup(name, found) for found in results.values())] for name in SCHEMES]
    print_or_publish("sparse-baselines", markdown(["ranks, links", *map(str, results)], [dense, *rows]))


if __name__ == "__main__":
    arguments = cell_arguments()
    main() if arguments is None else measure(*arguments)
