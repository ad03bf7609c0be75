"""What four small models learn in a step from sparse gradients (about 30 min).

Does selecting over fused tensors leave tensors out, and does a model learn less (SSFusion, section III-A)? A ResNet, an
LSTM, a transformer and a Mamba-2 are trained by two workers at density 0.01 with five seeds. Contestants have the same
seeds, so differences are paired; an interval is that of Student's t at 95 %. Plans are the planner's, from fixed costs of
links of 200 mbit, so that all seeds have the same plan. A tensor is missed in a step if no worker has sent an element of
it. The workers are simulated in one process: they select by `ErrorFeedback`, and their elements are added in the order of
the workers, as in an all-gather in fp32.

Results go to build/sparse_accuracy.json after each run, so an interrupted measurement continues; remove it to start again.
"""

import json
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, groupby, product
from statistics import mean, stdev

import torch
from torch.nn import functional

from benchmarks.support.cells import ROOT
from benchmarks.support.small_learners import TASKS, symbols, texts
from benchmarks.support.tables import markdown, publish
from sparsefusion.fusion.cost_measurement import interpolated_times
from sparsefusion.gradients.error_feedback import ErrorFeedback
from sparsefusion.planning.compression import CompressionSettings
from sparsefusion.planning.plan import Buffer, Plan, Unit
from sparsefusion.planning.planner import make_plans
from sparsefusion.planning.timeline import Costs, Tensor, Timeline
from sparsefusion.selection.fused import add_at
from sparsefusion.selection.indices import INDEX_BYTES

RESULTS = ROOT / "build" / "sparse_accuracy.json"
WORKERS, SEEDS, DENSITY, STEPS, RATE_WARMUP = 2, range(5), 0.01, 150, 15
HELD_OUT = {"resnet": 256}  # examples; of the others TEXTS
TEXTS = 64
BACKWARD_S, ATOMS = 5e-3, 4  # of the timeline from which plans are made
STUDENT_T = 2.78  # the factor of the standard error of five seeds, at 95 %


def planned(mode: str, parameters: dict[str, torch.Tensor], budget: str = "none") -> Plan:
    """The planner's plan of a mode for two ranks, from fixed costs: links of 200 mbit, and a backward pass of BACKWARD_S."""
    sizes = {name: p.numel() for name, p in reversed(parameters.items())}
    shares = dict(zip(sizes, accumulate(n / sum(sizes.values()) for n in sizes.values()), strict=True))
    tensors = [Tensor(name, n, parameters[name].dim(), BACKWARD_S * (1 + shares[name])) for name, n in sizes.items()]
    atoms = groupby(sizes, key=lambda name: int(ATOMS * (shares[name] - 1e-9)))
    timeline = Timeline(tuple(tensors), tuple(tuple(names) for _, names in atoms), 4, 4, 10 * BACKWARD_S)
    points = [(size, 1e-3 + size / 25e6) for size in (1 << 10, 1 << 21)]
    costs = Costs(
        interpolated_times({"all_reduce": points, "all_gather": points}), 2, lambda n: 1e-5 + 2e-9 * n, lambda n: 1e-9 * n,
        lambda n: 1e-10 * n,
    )  # fmt: skip
    return make_plans([mode], CompressionSettings(DENSITY, budget=budget), timeline, costs)[mode]


def joined(units: Sequence[Unit]) -> Unit:
    """One unit of several."""
    names = tuple(name for unit in units for name in unit.names)
    return Unit(names, sum(unit.numel for unit in units), sum(unit.k for unit in units))


def bucket_small_dense(parameters: dict) -> Plan:
    """Selection over each buffer without the gradients that `selective` sends dense."""
    plan = planned("selective", parameters)
    buffers = []
    for buffer in plan.buffers:
        sparse = [unit for unit in buffer.units if unit.k]
        buffers.append(Buffer((joined(sparse), *(unit for unit in buffer.units if not unit.k))))
    return replace(plan, mode="bucket", buffers=tuple(buffers))


@dataclass(frozen=True)
class Contestant:
    """A way to send gradients.

    Attributes:
        plan: plan(parameters) makes its plan; None: dense.
        keeps_residuals: False: residuals are dropped after each step.
    """

    plan: Callable[[dict], Plan] | None = None
    keeps_residuals: bool = True


MAIN = {
    "dense": Contestant(),
    "bucket": Contestant(partial(planned, "bucket")),
    "layerwise": Contestant(partial(planned, "layerwise")),
    "selective": Contestant(partial(planned, "selective")),
    "selective, budget paper": Contestant(partial(planned, "selective", budget="paper")),
    "bucket, small ones dense": Contestant(bucket_small_dense),
}
WITHOUT_FEEDBACK = {
    "bucket, no residuals": replace(MAIN["bucket"], keeps_residuals=False),
    "layerwise, no residuals": replace(MAIN["layerwise"], keeps_residuals=False),
}
CONTESTANTS = MAIN | WITHOUT_FEEDBACK


@dataclass(frozen=True)
class Run:
    """The training of one model."""

    model: str
    contestant: str
    seed: int

    def __str__(self) -> str:
        return f"{self.model}|{self.contestant}|{self.seed}"


def all_runs() -> list[Run]:
    """All runs, one seed after the other."""
    return [Run(model, contestant, seed) for seed, model, contestant in product(SEEDS, TASKS, CONTESTANTS)]


def all_dense(sizes: dict[str, int]) -> Plan:
    """A plan that sends everything."""
    units = tuple(Unit((name,), size) for name, size in sizes.items())
    return Plan("layerwise", "dgc", 1.0, "fp32", WORKERS, (Buffer(units),))


class Workers:
    """Simulated workers, which exchange elements of their gradients by a plan.

    Attributes:
        means: {name: mean (numel,)} of the last step.
    """

    def __init__(self, contestant: Contestant, parameters: dict[str, torch.Tensor]) -> None:
        self._contestant = contestant
        self._sizes = {name: p.numel() for name, p in parameters.items()}
        self.plan = contestant.plan(parameters) if contestant.plan else all_dense(self._sizes)
        self._feedbacks = [ErrorFeedback("dgc") for _ in range(WORKERS)]
        self.sent = 0.0  # bytes of a worker

    def exchange(self, step: int, gradients: Sequence[dict[str, torch.Tensor]]) -> None:
        """Average the workers' gradients {name: (numel,)}."""
        self.means = {name: torch.zeros(size) for name, size in self._sizes.items()}
        for feedback in self._feedbacks:
            feedback.begin_step(step)
        for unit in (unit for buffer in self.plan.buffers for unit in buffer.units):
            self._exchange_unit(unit, gradients)
        if not self._contestant.keeps_residuals:
            for feedback in self._feedbacks:
                feedback.residuals.clear()

    def _exchange_unit(self, unit: Unit, gradients: Sequence[dict[str, torch.Tensor]]) -> None:
        means = [self.means[name] for name in unit.names]
        for feedback, own in zip(self._feedbacks, gradients, strict=True):
            if unit.k:
                selection = feedback.select(unit, own, 1.0)
                add_at(means, selection.values, selection.indices, 1 / WORKERS)
            else:
                feedback.flush({name: own[name] for name in unit.names})
                for name, mean_ in zip(unit.names, means, strict=True):
                    mean_.add_(own[name], alpha=1 / WORKERS)
        self.sent += (WORKERS - 1) * (unit.k * (4 + INDEX_BYTES) if unit.k else 8 * unit.numel / WORKERS)


def train(run: Run) -> dict:
    """Train a model: its held-out loss, the share of missed tensors, and the bytes that a worker sends in a step."""
    task, contestant = TASKS[run.model], CONTESTANTS[run.contestant]
    model = task.learner(run.seed)
    parameters = dict(model.named_parameters())
    workers, optimizer = Workers(contestant, parameters), task.optimizer(parameters.values())
    rate = optimizer.param_groups[0]["lr"]
    generators = [torch.Generator().manual_seed(1000 * run.seed + worker) for worker in range(WORKERS)]
    inputs, targets = task.held_out(HELD_OUT.get(run.model, TEXTS))
    missed = []
    for step in range(STEPS):
        gradients = []
        for generator in generators:
            own = torch.autograd.grad(model(*task.draw(task.batch, generator, False)), list(parameters.values()))
            gradients.append({name: each.reshape(-1) for name, each in zip(parameters, own, strict=True)})
        workers.exchange(step, gradients)
        for name, parameter in parameters.items():
            parameter.grad = workers.means[name].view_as(parameter)
        missed.append(mean(float(not each.any()) for each in workers.means.values()))
        optimizer.param_groups[0]["lr"] = rate * min(1, (step + 1) / RATE_WARMUP)
        optimizer.step()
    with torch.no_grad():
        loss = functional.cross_entropy(model.model(inputs).flatten(0, -2), targets.flatten()).item()
    return {"loss": loss, "missed": mean(missed), "bytes": workers.sent / STEPS}


def train_all() -> dict[str, dict]:
    """The results of all runs, of which those in the file are kept."""
    RESULTS.parent.mkdir(exist_ok=True)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    missing = [run for run in all_runs() if str(run) not in results]
    torch.set_num_threads(1)  # with more threads, the processes that are forked could not compute
    symbols(), texts()  # drawn and read once, for all of them
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("fork")) as pool:
        for run, found in zip(missing, pool.map(train, missing), strict=True):
            results[str(run)] = found
            unfinished = RESULTS.with_suffix(".new")
            unfinished.write_text(json.dumps(results))
            unfinished.replace(RESULTS)
    return results


def values(results: dict[str, dict], model: str, contestant: str, what: str) -> list[float]:
    """A value of a contestant for each seed."""
    return [results[str(Run(model, contestant, seed))][what] for seed in SEEDS]


def difference(ours: Sequence[float], others: Sequence[float]) -> str:
    """The mean difference of paired values, with its interval at 95 %."""
    differences = [value - other for value, other in zip(ours, others, strict=True)]
    return f"{mean(differences):+.2f} ± {STUDENT_T * stdev(differences) / len(differences) ** 0.5:.2f}"


def main() -> None:
    """Train all models, and publish the tables."""
    results = train_all()
    dense = {model: values(results, model, "dense", "loss") for model in TASKS}
    losses = [["dense", *(f"{mean(dense[model]):.2f}" for model in TASKS)]]
    for name in list(CONTESTANTS)[1:]:
        losses.append([name, *(difference(values(results, m, name, "loss"), dense[m]) for m in TASKS)])
    publish("sparse-accuracy", markdown(["gradients", *TASKS], losses))
    costs = []
    for name in MAIN:
        pairs = [[mean(values(results, model, name, what)) for what in ("missed", "bytes")] for model in TASKS]
        costs.append([name, *(f"{missed:.0%}, {nbytes / 1e3:.1f} kB" for missed, nbytes in pairs)])
    publish("sparse-accuracy-costs", markdown(["gradients", *TASKS], costs))


if __name__ == "__main__":
    main()
