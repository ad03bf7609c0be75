"""Sparse gradients against dense ones, torch's fp16 hook and PowerSGD, behind slow links (about 105 min; root).

The claims, of a Mamba-2 of 4 M parameters in torch's DDP at density 0.01: `auto` makes a step at least 4 times as fast as
dense at 200 mbit on 2 ranks (where no messages at all make it 5 times as fast), 3 times on 4, 1.15 times at 1 gbit, and
takes at most 1/0.95 of the best mode's time wherever links are limited. Every contestant has two copies of the model, ours
the same two for all modes, and they take turns in the same processes; before each step is one that does not count, in which
the model comes back into the caches; medians of 10 turns, and of 30 of those that are close to the fastest. Where the plan
that `auto` took in a copy is the one that its mode made there, too, the turns of both are those of each: behind the best
mode it is by its choice or its plan alone. Dense runs twice: the difference is the spread. A turn in which the hypervisor
took the cores away is repeated.
"""

import sys
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import mean, median

import matplotlib
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.support.cells import cell_arguments, measured_cells, write_result
from benchmarks.support.learner import Learner, step, warm_turn
from benchmarks.support.tables import markdown, publish
from sparsefusion import SparseFusion
from sparsefusion.fabric.measurement import repetitions, timed
from sparsefusion.fusion.trial import longest_trial_steps

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402 (after the choice of a backend)

PLOT = Path(__file__).resolve().parents[2] / "docs" / "assets" / "plots" / "sparse_gradients.png"
TURNS, CLOSE_TURNS, DENSITY, LAYERS = 5, 10, 0.01, 4  # turns of each copy
CLOSE = 1.5  # times the fastest one's seconds: whoever takes less has more turns
PROFILED = 5  # dense steps
SETTLED = PROFILED + 1  # steps until a plan is in force
THEIRS = ("dense", "dense again", "no messages", "torch fp16", "PowerSGD")
OURS = ("fp16", "layerwise", "bucket", "selective", "interleaved", "offload", "auto")
SHOWN = (*THEIRS[3:], *OURS)
COPIES = 2  # of the model for each of theirs, and for all of ours together


@dataclass(frozen=True)
class Cell:
    """Ranks behind links, and the model's width; 256 tokens on each rank."""

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
    """A copy of the model that is trained in one way."""

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
        self.steps(SETTLED)

    def step(self):
        """One on this rank's random tokens."""
        step(self.loss, self.optimizer)

    def steps(self, count) -> float:
        """Seconds of so many."""
        return sum(timed(self.step)() for _ in range(count))

    def turn(self) -> float:
        """Seconds of one in the caches."""
        return warm_turn(self.step)


class Ours(Copy):
    """One that SparseFusion trains: by the plan of each mode in its turn, so that all of them use the same memory."""

    def __init__(self, hidden):
        super().__init__("ours", hidden)
        self.plans = {mode: self._plan(mode) for mode in OURS[:-1]}
        self._fusion = self._attached("auto")
        self.finding_out = self._found_out()
        self.auto = self._fusion.plan
        self.plans["auto"] = self.auto

    def _attached(self, mode):
        return SparseFusion(DENSITY, mode=mode, report=lambda text: None).attach(self.loss)

    def _plan(self, mode):
        fusion = self._attached(mode)
        self.steps(SETTLED)
        plan = fusion.plan
        fusion.detach()
        return plan

    def _found_out(self) -> float:
        """Seconds that auto took to decide: for its measurements, and for turns of plans that are slower than its choice."""
        watched, turns = [self.steps(1) for _ in range(PROFILED)], {}
        for _ in range(longest_trial_steps() + 2):
            turns.setdefault(self._fusion.plan.mode, []).append(self.steps(1))
        chosen = mean(turns[self._fusion.plan.mode])
        return watched[-1] - median(watched[:-1]) + sum(sum(each) - len(each) * chosen for each in turns.values())

    def turn_of(self, mode) -> float:
        """Seconds of a step in that mode."""
        self._fusion.load_state_dict(self._fusion.state_dict() | {"plan": self.plans[mode].to_json()})
        if self._fusion.plan != self.plans[mode]:
            raise RuntimeError(f"the plan of {mode} was not taken")
        return self.turn()


def measured(turns, group) -> dict[str, list]:
    """{name: seconds of each copy's steps}, the same on every rank. turns: {name: a function for each copy}."""

    def rows(names, count):
        found = repetitions([turn for name in names for turn in turns[name]], group, "cpu", count).T.tolist()
        return {name: [found.pop(0) for _ in turns[name]] for name in names}

    seconds = rows(turns, TURNS)
    fastest = min(middle(row) for row in seconds.values())
    close = [name for name, row in seconds.items() if middle(row) < CLOSE * fastest]
    for name, more in rows(close, CLOSE_TURNS).items():
        seconds[name] = [first + then for first, then in zip(seconds[name], more, strict=True)]
    return seconds


def middle(rows) -> float:
    """The median of all copies' steps."""
    return median(chain.from_iterable(rows))


def measure(out, number) -> None:
    """One rank's part of a cell."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    hidden = CELLS[int(number)].hidden
    turns = {name: [Copy(name, hidden).turn for _ in range(COPIES)] for name in THEIRS}
    ours = [Ours(hidden) for _ in range(COPIES)]
    turns |= {mode: [partial(copy.turn_of, mode) for copy in ours] for mode in OURS}
    seconds, autos = measured(turns, dist.group.WORLD), [copy.auto for copy in ours]
    for place, copy in enumerate(ours):
        mode, own = copy.auto.mode, copy.plans.get(copy.auto.mode)  # none of dense, which is DDP without us
        if own and own.hash == copy.auto.hash:
            seconds["auto"][place] = seconds[mode][place] = seconds["auto"][place] + seconds[mode][place]
    if dist.get_rank() == 0:
        write_result(out, {
            "seconds": {name: middle(rows) for name, rows in seconds.items()}, "chosen": [auto.mode for auto in autos],
            "predicted": median(auto.predicted[auto.mode] for auto in autos),
            "finding_out": median(copy.finding_out for copy in ours),
            "numel": sum(p.numel() for p in ours[0].loss.parameters()),
        })  # fmt: skip
    dist.destroy_process_group()


def row(cell: Cell, measured: dict) -> list[str]:
    """A line of the table."""
    seconds = measured["seconds"]
    dense, again = seconds["dense"], seconds["dense again"]
    best = min(seconds[name] for name in ("dense", *OURS[:-1]))
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


def plot(results: dict) -> None:
    """Times dense's speed, by cell."""
    figure, axis = plt.subplots(figsize=(11, 4), layout="constrained")
    names = ["torch fp16", "PowerSGD", "layerwise", "auto"]
    for number, name in enumerate(names):
        heights = [each["seconds"]["dense"] / each["seconds"][name] for each in results.values()]
        axis.bar([x + 0.2 * number for x in range(len(results))], heights, 0.2, label=name)
    axis.axhline(1, color="black", linewidth=0.5)
    labels = [f"{each['numel'] / 1e6:.0f} M\n{cell.ranks} ranks\n{cell.rate}" for cell, each in results.items()]
    axis.set_xticks([x + 0.3 for x in range(len(results))], labels, fontsize=8)
    axis.set(yscale="log", ylabel="times dense's speed")
    axis.set_yticks([1, 2, 5, 10], ["1", "2", "5", "10"])
    axis.minorticks_off()
    axis.legend(fontsize=8)
    figure.savefig(PLOT, dpi=60, pil_kwargs={"optimize": True})


def main() -> None:
    """Measure every cell, or those whose numbers are given; publish the table and the plot of all."""
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
        plot(results)


if __name__ == "__main__":
    arguments = cell_arguments()
    main() if arguments is None else measure(*arguments)
