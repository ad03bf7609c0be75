"""SSFusion against other schemes, the parts of a step, densities and sparsifiers (about 28 min; root).

The schemes are plans of `SparseFusion` for the same Mamba-2 of 24 layers with 410 gradients. So what differs is what is
fused, what is selected together, and which collective sends it, but not the implementation:

- per-tensor: every gradient is selected from and sent alone;
- HiPress-like: gradients are dense if selecting costs more than it saves; all are sent together after the backward pass;
- Espresso-like: the same choice, without fusion, and another thread selects;
- merged, as OMGS and Cupcake: buffers that make the step shortest, each with one selection, and all-gathers;
- OkTopk-like: one buffer with one selection, and the sparse all-reduce;
- SparDL-like: as merged, with the sparse all-reduce;
- SSFusion, -O and -(O+I): the planner's selective plan with a lower density, with offloading, and also interleaved.

The contestants take turns, and speeds are medians. A step's `select` is the time of all selections. `send` is what remains
of it after forward and backward (measured without DDP) and selections: packing, adding, and messages that nothing hides.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist

from benchmarks.gradients.sparse_ablation import (
    HIDDEN,
    LAYERS,
    Contestant,
    Dense,
    alone,
    compensated,
    fused,
    map_units,
    selective,
)
from benchmarks.support.cells import cell_arguments, measured_cells, write_result
from benchmarks.support.learner import SEQUENCES, TOKENS, VOCAB, Learner, warm_turn
from benchmarks.support.tables import markdown, print_or_publish
from commfabric.fabric.measurement import repetitions
from sparsefusion.gradients.error_feedback import ErrorFeedback
from sparsefusion.planning.plan import Buffer, Plan, Unit

REPETITIONS = 10
DENSITIES = (0.1, 0.05, 0.01)
SPARSIFIERS = ("dgc", "topk", "gaussiank", "redsync", "sidco")


@dataclass(frozen=True)
class Cell:
    """A number of ranks, the rate of their links, and what is measured: schemes, densities or sparsifiers."""

    ranks: int
    rate: str
    subject: str = "schemes"

    def __str__(self) -> str:
        return f"{self.ranks}, {self.rate}"


CELLS = [Cell(2, "200mbit"), Cell(2, "1gbit"), Cell(4, "200mbit"), Cell(2, "200mbit", "densities"),
         Cell(2, "200mbit", "sparsifiers")]  # fmt: skip


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
BY_DENSITY = ("per-tensor", "merged (OMGS, Cupcake)", "SparDL-like", "SSFusion")


def at_density(scheme: str, density: float, plan: Plan) -> Plan:
    """The plan of a scheme with another density."""
    scaled = map_units(plan, lambda unit: unit.with_density_ratio(density / plan.density))
    return SCHEMES[scheme](replace(scaled, density=density))


def contestants(subject: str, plan: Plan) -> dict[str, Plan]:
    """{name: plan} of a cell."""
    if subject == "schemes":
        return {name: make(plan) for name, make in SCHEMES.items()}
    if subject == "densities":
        return {f"{name}, {density}": at_density(name, density, plan) for name in BY_DENSITY for density in DENSITIES}
    return {
        f"{name}, {sparsifier}": replace(SCHEMES[name](plan), sparsifier=sparsifier)
        for name in ("merged (OMGS, Cupcake)", "SSFusion") for sparsifier in SPARSIFIERS
    }  # fmt: skip


class SelectionTimer:
    """Adds up the seconds of all selections in this process, while it is entered."""

    def __enter__(self) -> "SelectionTimer":
        self.seconds, self._select = 0.0, ErrorFeedback.select

        def timed_select(feedback: ErrorFeedback, *arguments: object) -> object:
            start = time.perf_counter()
            selection = self._select(feedback, *arguments)
            self.seconds += time.perf_counter() - start
            return selection

        ErrorFeedback.select = timed_select  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *error: object) -> None:
        ErrorFeedback.select = self._select  # type: ignore[method-assign]


class Alone:
    """A copy of the model that is trained without messages, and the seconds of its parts."""

    def __init__(self) -> None:
        self.loss = Learner(LAYERS, HIDDEN)
        self.optimizer = torch.optim.SGD(self.loss.parameters(), lr=1e-3)

    def forward(self) -> None:
        """A forward pass, and the step of the optimizer."""
        self.optimizer.zero_grad()
        self._loss = self.loss(torch.randint(VOCAB, (SEQUENCES, TOKENS + 1)))
        self.optimizer.step()

    def step(self) -> None:
        """A whole step."""
        self.forward()
        self._loss.backward()


def selection_seconds(contestant: Contestant) -> float:
    """Seconds of the selections of a step: the mean of three steps."""
    contestant.step()
    with SelectionTimer() as timer:
        for _ in range(3):
            contestant.step()
    return timer.seconds / 3


def measure(out: str, number: str) -> None:
    """The part of one rank in the measurement of a cell."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    plans = contestants(CELLS[int(number)].subject, compensated(Contestant().fusion.plan))
    plain, dense, ours = Alone(), Dense(), {name: Contestant(plan) for name, plan in plans.items()}
    steps = [plain.forward, plain.step, dense.step, *(contestant.step for contestant in ours.values())]
    turns = [partial(warm_turn, step) for step in steps]
    seconds = repetitions(turns, dist.group.WORLD, "cpu", REPETITIONS).median(0).values.tolist()
    sent = {name: contestant.sent() | {"select": selection_seconds(contestant)} for name, contestant in ours.items()}
    if dist.get_rank() == 0:
        found = dict(zip(("forward", "alone", "dense", *ours), seconds, strict=True))
        write_result(out, {"seconds": found, "sent": sent})
    dist.barrier()
    dist.destroy_process_group()


def speed_row(name: str, found: dict) -> list[str]:
    """A contestant's speed relative to dense, its bytes and messages."""
    seconds, sent = found["seconds"], found["sent"][name]
    return [f"{seconds['dense'] / seconds[name]:.2f}x, {sent['bytes'] / 1e3:.0f} kB in {sent['messages']}"]


def parts_row(name: str, found: dict) -> list[str]:
    """The parts of a contestant's step."""
    seconds = found["seconds"]
    forward, backward, step = seconds["forward"], seconds["alone"] - seconds["forward"], seconds[name]
    select = found["sent"][name]["select"] if name in found["sent"] else 0.0
    parts = [forward, backward, select, step - seconds["alone"] - select]
    return [name, f"{1e3 * step:.0f} ms", *(f"{1e3 * part:.0f} ms" for part in parts)]


def main() -> None:
    """Measure every cell, and publish the tables; or some cells, and print their tables."""
    results = measured_cells(__file__, CELLS)
    schemes = {cell: found for cell, found in results.items() if cell.subject == "schemes"}
    if schemes:
        dense = ["dense", *(f"{1e3 * found['seconds']['dense']:.0f} ms" for found in schemes.values())]
        rows = [[name, *(cell for found in schemes.values() for cell in speed_row(name, found))] for name in SCHEMES]
        print_or_publish("sparse-baselines", markdown(["ranks, links", *map(str, schemes)], [dense, *rows]))
        first = next(iter(schemes.values()))
        header = ["scheme", "step", "forward", "backward", "select", "send"]
        print_or_publish("sparse-parts", markdown(header, [parts_row(name, first) for name in ("dense", *SCHEMES)]))
    for cell, found in results.items():
        if cell.subject == "densities":
            print_or_publish("sparse-densities", speeds(found, DENSITIES))
        if cell.subject == "sparsifiers":
            print_or_publish("sparse-sparsifiers", speeds(found, SPARSIFIERS))


def speeds(found: dict, columns: Sequence) -> str:
    """A table of the speed of each scheme with each of `columns`, densities or sparsifiers."""
    names = dict.fromkeys(name.rpartition(", ")[0] for name in found["sent"])
    rows = [[name, *(speed_row(f"{name}, {column}", found)[0] for column in columns)] for name in names]
    return markdown(["scheme", *map(str, columns)], rows)


if __name__ == "__main__":
    arguments = cell_arguments()
    main() if arguments is None else measure(*arguments)
