"""Sparse gradients compared with dense ones, torch's fp16 hook and PowerSGD, on slow links (about 105 min; root).

The claims, for a Mamba-2 of 4 M parameters in torch's DDP at density 0.01: with `auto`, a step is at least 4 times as fast
as a dense one at 200 mbit on 2 ranks (without any messages it is 5 times as fast), 3 times on 4, and 1.15 times at 1 gbit;
and it takes at most 1/0.95 of the best mode's time wherever links are limited.

Every contestant has two copies of the model; all modes of SparseFusion share the same two. The contestants take turns in
the same processes. Before each measured step is one that does not count, which brings the model back into the caches. A
turn in which the hypervisor took the cores away is repeated. The table shows medians of 10 turns, and of 30 for contestants
that are close to the fastest. Where the plan that `auto` chose in a copy is also the plan of its mode there, both count the
turns of either, so `auto` can differ from the best mode only by its choice or its plan. Dense runs twice: the difference is
the spread.
"""

import sys
from dataclasses import dataclass
from functools import partial
from itertools import chain
from statistics import mean, median

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.support import table_charts
from benchmarks.support.cells import cell_arguments, measured_cells, write_result
from benchmarks.support.learner import Learner, step, warm_turn
from benchmarks.support.tables import markdown, publish
from commfabric.fabric.measurement import repetitions, timed
from sparsefusion import SparseFusion
from sparsefusion.fusion.trial import MOST_PLANS, ROUNDS, STEPS

TURNS, CLOSE_TURNS, DENSITY, LAYERS = 5, 10, 0.01, 4  # turns of each copy
CLOSE = 1.5  # contestants that take less than this many times the fastest one's seconds have more turns
PROFILED = 5  # dense steps
STEPS_TO_PLAN = PROFILED + 1  # steps until a plan is in force
PEERS = ("dense", "dense again", "no messages", "torch fp16", "PowerSGD")
SPARSE_FUSION_MODES = ("fp16", "layerwise", "bucket", "selective", "interleaved", "offload", "auto")
SHOWN = (*PEERS[3:], *SPARSE_FUSION_MODES)
COPIES = 2  # of the model: for each peer, and for all modes of SparseFusion together


@dataclass(frozen=True)
class Cell:
    """A number of ranks, the rate of their links, and the width of the model. Each rank has 256 tokens."""

    ranks: int
    rate: str
    hidden: int

    def __str__(self):
        return f"{self.ranks}, {self.rate}"


RATES = {
    (2, 384): ("100mbit", "200mbit", "500mbit", "1gbit", "none"),
    (4, 384): ("100mbit", "200mbit", "500mbit", "1gbit", "none"),
    (2, 896): ("200mbit", "500mbit", "1gbit", "none"),
    (4, 896): ("1gbit",),
}
CELLS = [Cell(ranks, rate, hidden) for (ranks, hidden), rates in RATES.items() for rate in rates]


class Copy:
    """A copy of the model, trained by one contestant."""

    def __init__(self, name, hidden):
        options = {"bucket_cap_mb": 1000} if name == "PowerSGD" else {}
        module = Learner(LAYERS, hidden)
        self.loss = module if name == "no messages" else DistributedDataParallel(module, **options)
        self.optimizer = torch.optim.SGD(self.loss.parameters(), lr=1e-3)
        if name == "torch fp16":
            self.loss.register_comm_hook(None, fp16_compress_hook)
        elif name == "PowerSGD":
            state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
            self.loss.register_comm_hook(state, powerSGD_hook)
        self.steps(STEPS_TO_PLAN)

    def step(self):
        """One training step on random tokens of this rank."""
        step(self.loss, self.optimizer)

    def steps(self, count) -> float:
        """Seconds of so many steps."""
        return sum(timed(self.step)() for _ in range(count))

    def turn(self) -> float:
        """Seconds of a step with the model in the caches."""
        return warm_turn(self.step)


class SparseFusionCopy(Copy):
    """A copy that SparseFusion trains, by the plan of each mode in its turn, so that all of them use the same memory."""

    def __init__(self, hidden):
        super().__init__("ours", hidden)
        self.plans = {mode: self._plan(mode) for mode in SPARSE_FUSION_MODES[:-1]}
        self._fusion = self._attached("auto")
        self.finding_out = self._decision_seconds()
        self.auto = self._fusion.plan
        self.plans["auto"] = self.auto

    def _attached(self, mode):
        return SparseFusion(DENSITY, mode=mode, report=lambda text: None).attach(self.loss)

    def _plan(self, mode):
        fusion = self._attached(mode)
        self.steps(STEPS_TO_PLAN)
        plan = fusion.plan
        fusion.detach()
        return plan

    def _decision_seconds(self) -> float:
        """Seconds that auto took to decide: those of its measurements, and of steps of plans slower than its choice."""
        profiled, turns = [self.steps(1) for _ in range(PROFILED)], {}
        for _ in range(MOST_PLANS * ROUNDS * STEPS + 2):
            turns.setdefault(self._fusion.plan.mode, []).append(self.steps(1))
        chosen = mean(turns[self._fusion.plan.mode])
        return profiled[-1] - median(profiled[:-1]) + sum(sum(each) - len(each) * chosen for each in turns.values())

    def turn_of(self, mode) -> float:
        """Seconds of a step by the plan of a mode."""
        self._fusion.load_state_dict(self._fusion.state_dict() | {"plan": self.plans[mode].to_json()})
        if self._fusion.plan != self.plans[mode]:
            raise RuntimeError(f"the plan of {mode} was not taken")
        return self.turn()


def measured(turns, group) -> dict[str, list]:
    """{name: [seconds of the steps of each copy]}, the same on every rank. turns: {name: a function for each copy}."""

    def rows(names, count):
        found = repetitions([turn for name in names for turn in turns[name]], group, "cpu", count).T.tolist()
        return {name: [found.pop(0) for _ in turns[name]] for name in names}

    seconds = rows(turns, TURNS)
    fastest = min(median_of_copies(row) for row in seconds.values())
    close = [name for name, row in seconds.items() if median_of_copies(row) < CLOSE * fastest]
    for name, more in rows(close, CLOSE_TURNS).items():
        seconds[name] = [first + then for first, then in zip(seconds[name], more, strict=True)]
    return seconds


def median_of_copies(rows) -> float:
    """The median of the steps of all copies."""
    return median(chain.from_iterable(rows))


def measure(out, number) -> None:
    """The part of one rank in the measurement of a cell."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    hidden = CELLS[int(number)].hidden
    turns = {name: [Copy(name, hidden).turn for _ in range(COPIES)] for name in PEERS}
    ours = [SparseFusionCopy(hidden) for _ in range(COPIES)]
    turns |= {mode: [partial(copy.turn_of, mode) for copy in ours] for mode in SPARSE_FUSION_MODES}
    seconds, autos = measured(turns, dist.group.WORLD), [copy.auto for copy in ours]
    for place, copy in enumerate(ours):
        mode, own = copy.auto.mode, copy.plans.get(copy.auto.mode)  # none of dense, which is DDP without us
        if own and own.hash == copy.auto.hash:
            seconds["auto"][place] = seconds[mode][place] = seconds["auto"][place] + seconds[mode][place]
    if dist.get_rank() == 0:
        write_result(out, {
            "seconds": {name: median_of_copies(rows) for name, rows in seconds.items()},
            "chosen": [auto.mode for auto in autos],
            "predicted": median(auto.predicted[auto.mode] for auto in autos),
            "finding_out": median(copy.finding_out for copy in ours),
            "numel": sum(p.numel() for p in ours[0].loss.parameters()),
        })  # fmt: skip
    dist.barrier()
    dist.destroy_process_group()


def row(cell: Cell, measured: dict) -> list[str]:
    """A row of the table."""
    seconds = measured["seconds"]
    dense, again = seconds["dense"], seconds["dense again"]
    best = min(seconds[name] for name in ("dense", *SPARSE_FUSION_MODES[:-1]))
    chosen = "/".join(dict.fromkeys(measured["chosen"]))
    return [
        f"{measured['numel'] / 1e6:.1f} M, {cell}",
        f"{1e3 * dense:.0f} ms",
        f"{dense / seconds['no messages']:.2f}x",
        *(f"{dense / seconds[name]:.2f}x" for name in SHOWN),
        f"{chosen}, {best / seconds['auto']:.2f}",
        f"{measured['predicted'] / seconds['auto']:.2f}",
        f"{measured['finding_out'] / seconds['auto'] / 1000:.1%}",
        f"{abs(again / dense - 1):.0%}",
    ]


def main() -> None:
    """Measure every cell, and publish the table and its chart; or print those of the cells whose numbers are given."""
    results = measured_cells(__file__, CELLS)
    header = [
        "parameters, ranks, links", "dense", "no messages", *SHOWN, "`auto` took, best/auto", "predicted/measured",
        "finding out", "spread",
    ]  # fmt: skip
    table = markdown(header, [row(cell, measured) for cell, measured in results.items()])
    if sys.argv[1:]:
        print(table)
    else:
        publish("sparse-gradients", table)
        table_charts.draw("sparse-gradients")


if __name__ == "__main__":
    arguments = cell_arguments()
    main() if arguments is None else measure(*arguments)
