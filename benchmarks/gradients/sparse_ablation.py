"""The parts of SSFusion one by one (about 15 min; root).

The claims: fusion brings most of the speed-up, and the choice of dense gradients some more; sending these while the others
are selected, or during the backward pass, brings nothing on a CPU.

Every contestant trains a copy of a Mamba-2 of 24 layers with 410 gradients. They take turns. A turn is a step that does not
count and one that does, and is repeated if the hypervisor took the cores away meanwhile; the table shows medians. `dense`
is torch's DDP with its default buckets, and `in 0.2 MB` with the buckets from which the others are planned. The last
contestant has the same plan as the one before, and so shows the spread.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.support.cells import cell_arguments, measure_cell, write_result
from benchmarks.support.learner import Learner, step, warm_turn
from benchmarks.support.tables import markdown, publish
from commfabric.fabric.measurement import repetitions
from sparsefusion import SparseFusion
from sparsefusion.planning.plan import Buffer, Plan, Unit

REPETITIONS, DENSITY, LAYERS, HIDDEN, BUCKET_MB = 20, 0.01, 24, 192, 0.2


@dataclass(frozen=True)
class Cell:
    """A number of ranks, and the rate of their links."""

    ranks: int
    rate: str

    def __str__(self):
        return f"{self.ranks}, {self.rate}"


CELLS = [Cell(2, "200mbit"), Cell(2, "1gbit"), Cell(4, "200mbit"), Cell(4, "1gbit")]


def map_units(plan: Plan, change: Callable[[Unit], Unit]) -> Plan:
    """The plan with each of its units changed."""
    return replace(plan, buffers=tuple(Buffer(tuple(map(change, buffer.units))) for buffer in plan.buffers))


def compensated(plan: Plan) -> Plan:
    """The plan whose density is lowered, to half at most, to make up for the bytes of gradients that are sent dense.

    A dense element takes as many bytes as 1 / ranks selected ones, each of which has a value and an index of 4 bytes.
    """
    dense, _, numel = plan.sent_elements
    wanted = (plan.density * numel - dense / plan.ranks) / (numel - dense)
    density = min(plan.density, max(plan.density / 2, wanted))
    return map_units(plan, lambda unit: replace(unit, k=max(1, int(density * unit.numel))) if unit.k else unit)


def uncompensated_k(plan: Plan, unit: Unit) -> int:
    """The k of the density that was asked for."""
    return max(1, int(plan.density * unit.numel))


def dense(plan: Plan) -> Plan:
    """The framework's own reduction."""
    return replace(plan, mode="dense", buffers=())


def fused(plan: Plan) -> Plan:
    """The plan with all gradients sparse."""
    return map_units(plan, lambda unit: replace(unit, k=uncompensated_k(plan, unit)))


def alone(plan: Plan) -> Plan:
    """The plan with all gradients sparse, and each in a message of its own."""
    return replace(plan, buffers=tuple(Buffer((unit,)) for buffer in fused(plan).buffers for unit in buffer.units))


def selective(plan: Plan) -> Plan:
    """The plan whose sparse gradients have the density that was asked for."""
    return map_units(plan, lambda unit: replace(unit, k=uncompensated_k(plan, unit)) if unit.k else unit)


def interleaved(plan: Plan) -> Plan:
    """The plan whose dense gradients are sent before the others are selected."""
    return replace(plan, mode="interleaved")


def early(plan: Plan) -> Plan:
    """The interleaved plan whose dense gradients are sent as soon as those of a buffer are ready."""
    return interleaved(map_units(plan, lambda unit: replace(unit, early=not unit.k)))


CONTESTANTS = {  # made from one selective plan
    "in 0.2 MB": dense, "each gradient alone": alone, "fused": fused, "+ selective": selective,
    "+ density-aware": lambda plan: plan, "+ interleaved": interleaved, "that again": interleaved, "+ early": early,
}  # fmt: skip


class Dense:
    """A copy of the model, trained by torch's DDP."""

    def __init__(self, **options):
        self.loss = DistributedDataParallel(Learner(LAYERS, HIDDEN), **options)
        self.optimizer = torch.optim.SGD(self.loss.parameters(), lr=1e-3)

    def step(self):
        """One training step on random tokens."""
        step(self.loss, self.optimizer)

    def sent(self) -> dict:
        """The bytes that a rank sends in a step."""
        ranks, numel = dist.get_world_size(), sum(p.numel() for p in self.loss.parameters())
        return {"bytes": 8 * (ranks - 1) / ranks * numel}


class Contestant(Dense):
    """A copy of the model trained by a plan; None: by a selective plan that is made here."""

    def __init__(self, plan=None):
        super().__init__(bucket_cap_mb=BUCKET_MB)
        options: dict = {} if plan is None else {"sparsifier": plan.sparsifier, "exchange": plan.exchange}
        mode, density = ("selective", DENSITY) if plan is None else (plan.mode, plan.density)
        self.fusion = SparseFusion(density, mode=mode, report=lambda text: None, **options).attach(self.loss)
        if plan is not None:
            self.fusion.load_state_dict(self.fusion.state_dict() | {"plan": plan.to_json()})
            if self.fusion.plan.hash != plan.hash:
                raise RuntimeError(f"a plan of mode {plan.mode} was not taken")
        for _ in range(6):
            self.step()

    def sent(self) -> dict:
        """The bytes that a rank sends in a step, and the number of its messages."""
        counter = self.fusion.counter
        if not self.fusion.plan.buffers:
            return super().sent()
        counter.reset()
        self.step()
        return {"bytes": counter.sent, "messages": sum(counter.calls.values())}


def measure(out: str) -> None:
    """The part of one rank in the measurement of a cell."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    plan = compensated(Contestant().fusion.plan)
    contestants = {"dense": Dense()} | {name: Contestant(how(plan)) for name, how in CONTESTANTS.items()}
    turns = [partial(warm_turn, contestant.step) for contestant in contestants.values()]
    rows = repetitions(turns, dist.group.WORLD, "cpu", REPETITIONS)
    seconds, sent = rows.median(0).values.tolist(), [contestant.sent() for contestant in contestants.values()]
    if dist.get_rank() == 0:
        write_result(out, [each | {"seconds": s} for each, s in zip(sent, seconds, strict=True)])
    dist.barrier()
    dist.destroy_process_group()


def row(cell: Cell, measured: list[dict]) -> list[str]:
    """A row of the table: each contestant's speed-up over dense, and what it sends."""
    dense, *ours = measured
    texts = [f"{dense['seconds'] / each['seconds']:.2f}x" for each in ours]
    sent = [
        f"{each['bytes'] / 1e3:.0f} kB" + (f" in {each['messages']}" if "messages" in each else "") for each in ours
    ]
    return [
        str(cell),
        f"{1e3 * dense['seconds']:.0f} ms",
        *(f"{text}, {how}" for text, how in zip(texts, sent, strict=True)),
    ]


def main() -> None:
    """Measure every cell, and publish the table."""
    rows = [row(cell, measure_cell(__file__, cell.ranks, cell.rate)) for cell in CELLS]
    publish("sparse-ablation", markdown(["ranks, links", "dense", *CONTESTANTS], rows))


if __name__ == "__main__":
    arguments = cell_arguments()
    main() if arguments is None else measure(*arguments)
