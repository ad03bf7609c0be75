"""What four small models learn from sparse gradients: per step, per byte and per second (about 45 min; root).

Does selecting over fused tensors leave tensors out, and does a model learn less (SSFusion, section III-A)? A ResNet, an
LSTM, a transformer and a Mamba-2 are trained by two workers at densities 0.01, 0.05 and 0.1 with five seeds. Contestants
have the same seeds, so differences are paired; an interval is that of Student's t at 95 %. Plans are the planner's, from
fixed costs of links of 200 mbit, so that all seeds have the same plan. A tensor is missed in a step if no worker has sent
an element of it. The workers are simulated in one process: they select by `ErrorFeedback`, and their elements are added in
the order of the workers, as in an all-gather in fp32. Times are of real ranks behind slow links.

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
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.support.cells import ROOT, cell_arguments, measure_cell, write_result
from benchmarks.support.learner import warm_turn
from benchmarks.support.small_learners import TASKS, Task, symbols, texts
from benchmarks.support.tables import markdown, publish
from commfabric.fabric.measurement import repetitions
from sparsefusion import SparseFusion
from sparsefusion.fusion.cost_measurement import interpolated_times
from sparsefusion.gradients.error_feedback import ErrorFeedback
from sparsefusion.planning.compression import CompressionSettings
from sparsefusion.planning.plan import Buffer, Plan, Unit
from sparsefusion.planning.planner import make_plans
from sparsefusion.planning.timeline import Costs, Tensor, Timeline
from sparsefusion.selection.fused import add_at
from sparsefusion.selection.indices import INDEX_BYTES

RESULTS = ROOT / "build" / "sparse_accuracy.json"
WORKERS, SEEDS, DENSITIES, STEPS, EVERY, RATE_WARMUP = 2, range(5), (0.01, 0.05, 0.1), 150, 25, 15
HELD_OUT = {"resnet": 256}  # examples; of the others TEXTS
TEXTS = 64
FEW_SEEDS, TIMED, RATE = SEEDS[:3], 20, "200mbit"  # seeds of the ablation; turns of the timing, and its links
BACKWARD_S, ATOMS = 5e-3, 4  # of the timeline from which plans are made
STUDENT_T = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}  # {seeds: the factor of the standard error, at 95 %}


def planned(mode: str, parameters: dict[str, torch.Tensor], density: float, budget: str = "none") -> Plan:
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
    return make_plans([mode], CompressionSettings(density, budget=budget), timeline, costs)[mode]


def joined(units: Sequence[Unit]) -> Unit:
    """One unit of several."""
    names = tuple(name for unit in units for name in unit.names)
    return Unit(names, sum(unit.numel for unit in units), sum(unit.k for unit in units))


def bucket_small_dense(parameters: dict, density: float) -> Plan:
    """Selection over each buffer without the gradients that `selective` sends dense."""
    plan = planned("selective", parameters, density)
    buffers = []
    for buffer in plan.buffers:
        sparse = [unit for unit in buffer.units if unit.k]
        buffers.append(Buffer((joined(sparse), *(unit for unit in buffer.units if not unit.k))))
    return replace(plan, mode="bucket", buffers=tuple(buffers))


def fused_in(count: int, parameters: dict, density: float) -> Plan:
    """Selection over `count` buffers of about the same number of elements."""
    plan = planned("layerwise", parameters, density)
    units = [unit for buffer in plan.buffers for unit in buffer.units]
    numel, ends = sum(u.numel for u in units), accumulate(u.numel for u in units)
    numbers = [int(count * (end - 1) / numel) for end in ends]
    groups = groupby(zip(units, numbers, strict=True), key=lambda pair: pair[1])
    return replace(plan, mode="bucket", buffers=tuple(Buffer((joined([u for u, _ in group]),)) for _, group in groups))


@dataclass(frozen=True)
class Contestant:
    """A way to send gradients.

    Attributes:
        plan: plan(parameters, density) makes its plan; None: dense.
        sparsifier, density_warmup: Of SparseFusion.
        keeps_residuals: False: residuals are dropped after each step.
        other: Another plan, which takes turns of TURN steps with the first.
    """

    plan: Callable[[dict, float], Plan] | None = None
    sparsifier: str = "dgc"
    density_warmup: int = 0
    keeps_residuals: bool = True
    other: Callable[[dict, float], Plan] | None = None


TURN = 10
LAYERWISE, SELECTIVE = partial(planned, "layerwise"), partial(planned, "selective")


MAIN = {
    "dense": Contestant(),
    "bucket": Contestant(partial(planned, "bucket")),
    "layerwise": Contestant(LAYERWISE),
    "selective": Contestant(SELECTIVE),
    "selective, budget paper": Contestant(partial(SELECTIVE, budget="paper")),
    "bucket, small ones dense": Contestant(bucket_small_dense),
}
WITHOUT_FEEDBACK = {
    "bucket, no residuals": replace(MAIN["bucket"], keeps_residuals=False),
    "layerwise, no residuals": replace(MAIN["layerwise"], keeps_residuals=False),
}
DEGREES = {f"buffers: {count}": Contestant(partial(fused_in, count)) for count in (1, 4, 16)}
WARM = {f"{name}, warm-up": replace(MAIN[name], density_warmup=50) for name in ("bucket", "layerwise", "selective")}
SPARSIFIERS = {
    f"{mode}, {sparsifier}": replace(MAIN[mode], sparsifier=sparsifier)
    for mode in ("bucket",)
    for sparsifier in ("gaussiank", "redsync", "sidco")
}
CHANGING = {"selective and layerwise in turns": Contestant(SELECTIVE, other=LAYERWISE)}
ABLATION, ABLATED = DEGREES | WARM | SPARSIFIERS | CHANGING, ("transformer", "resnet")
AT_ALL_DENSITIES = ("bucket", "layerwise", "selective")
CONTESTANTS = MAIN | WITHOUT_FEEDBACK | ABLATION


@dataclass(frozen=True)
class Run:
    """The training of one model."""

    model: str
    contestant: str
    density: float
    seed: int

    def __str__(self) -> str:
        return f"{self.model}|{self.contestant}|{self.density}|{self.seed}"


def all_runs() -> list[Run]:
    """All runs: the smallest density first, and one seed after the other."""
    first, *others = DENSITIES
    runs = [Run(m, c, first, s) for s, m, c in product(SEEDS, TASKS, (*MAIN, *WITHOUT_FEEDBACK))]
    runs += [Run(m, c, d, s) for s, d, m, c in product(SEEDS, others, TASKS, AT_ALL_DENSITIES)]
    return runs + [Run(m, c, first, s) for s, m, c in product(FEW_SEEDS, ABLATED, ABLATION)]


def all_dense(sizes: dict[str, int]) -> Plan:
    """A plan that sends everything."""
    units = tuple(Unit((name,), size) for name, size in sizes.items())
    return Plan("layerwise", "dgc", 1.0, "fp32", WORKERS, (Buffer(units),))


class Workers:
    """Simulated workers, which exchange elements of their gradients by a plan.

    Attributes:
        means: {name: mean (numel,)} of the last step.
    """

    def __init__(self, contestant: Contestant, parameters: dict[str, torch.Tensor], density: float) -> None:
        self._contestant, self._density = contestant, density
        self._sizes = {name: p.numel() for name, p in parameters.items()}
        makers = [maker for maker in (contestant.plan, contestant.other) if maker]
        self.plans = [make(parameters, density) for make in makers] or [all_dense(self._sizes)]
        self._feedbacks = [ErrorFeedback(contestant.sparsifier) for _ in range(WORKERS)]
        self.sent = 0.0  # bytes of a worker

    def exchange(self, step: int, gradients: Sequence[dict[str, torch.Tensor]]) -> None:
        """Average the workers' gradients {name: (numel,)}."""
        plan, ratio = self.plans[step // TURN % len(self.plans)], self._density_ratio(step)
        self.means = {name: torch.zeros(size) for name, size in self._sizes.items()}
        for feedback in self._feedbacks:
            feedback.begin_step(step)
        for unit in (unit.with_density_ratio(ratio) for buffer in plan.buffers for unit in buffer.units):
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

    def _density_ratio(self, step: int) -> float:
        """As in `DensityWarmup`."""
        steps = self._contestant.density_warmup
        return max(self._density, 0.25 ** (1 + 4 * step / steps)) / self._density if step < steps else 1.0


def train(run: Run) -> dict:
    """Train a model; held-out losses and shares of correct answers, the share of missed tensors, and the bytes of a step."""
    task, contestant = TASKS[run.model], CONTESTANTS[run.contestant]
    model = task.learner(run.seed)
    parameters = dict(model.named_parameters())
    workers, optimizer = Workers(contestant, parameters, run.density), task.optimizer(parameters.values())
    rate = optimizer.param_groups[0]["lr"]
    generators = [torch.Generator().manual_seed(1000 * run.seed + worker) for worker in range(WORKERS)]
    inputs, targets = task.held_out(HELD_OUT.get(run.model, TEXTS))
    losses, correct, missed = [], [], []
    for step in range(STEPS + 1):
        if step % EVERY == 0:
            with torch.no_grad():
                logits = model.model(inputs).flatten(0, -2)
            losses.append(functional.cross_entropy(logits, targets.flatten()).item())
            correct.append((logits.argmax(-1) == targets.flatten()).float().mean().item())
        if step == STEPS:
            break
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
    units = [unit for buffer in workers.plans[0].buffers for unit in buffer.units]
    return {
        "losses": losses, "correct": correct, "missed": mean(missed), "bytes": workers.sent / STEPS,
        "elements": [sum(u.numel for u in units if not u.k), sum(u.k for u in units), sum(u.numel for u in units)],
        "tensors": len(parameters), "buffers": len(workers.plans[0].buffers),
    }  # fmt: skip


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


class Copy:
    """A copy of a model that DDP and a plan train on this rank and others."""

    def __init__(self, task: Task, contestant: Contestant) -> None:
        self._task, self._generator = task, torch.Generator().manual_seed(dist.get_rank())
        self._loss = DistributedDataParallel(task.learner(0))
        self._optimizer = task.optimizer(self._loss.parameters())
        if contestant.plan:
            plan = contestant.plan(dict(self._loss.module.named_parameters()), DENSITIES[0])
            fusion = SparseFusion(DENSITIES[0], mode=plan.mode, report=lambda text: None).attach(self._loss)
            fusion.load_state_dict(fusion.state_dict() | {"plan": plan.to_json()})

    def step(self) -> None:
        """One training step."""
        self._optimizer.zero_grad()
        self._loss(*self._task.draw(self._task.batch, self._generator, False)).backward()
        self._optimizer.step()


def time_steps(out: str, model: str) -> None:
    """The part of one rank in the timing of a model's steps: {contestant: seconds} of MAIN."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    copies = {name: Copy(TASKS[model], contestant) for name, contestant in MAIN.items()}
    turns = [partial(warm_turn, copy.step) for copy in copies.values()]
    seconds = repetitions(turns, dist.group.WORLD, "cpu", TIMED).median(0).values.tolist()
    if dist.get_rank() == 0:
        write_result(out, dict(zip(copies, seconds, strict=True)))
    dist.barrier()
    copies.clear()  # with their groups, before the default group goes
    turns.clear()
    dist.barrier()
    dist.destroy_process_group()


Results = dict[str, dict]
Value = Callable[[dict], float]
Side = tuple[str, float, Value]  # a contestant, its density, and what is compared


def final_loss(found: dict) -> float:
    """The held-out loss after the last step."""
    return found["losses"][-1]


def share_missed(found: dict) -> float:
    """The share of tensors that are missed in a step."""
    return found["missed"]


def bytes_of_step(found: dict) -> float:
    """The bytes that a worker sends in a step."""
    return found["bytes"]


def loss_at(step: float) -> Value:
    """The held-out loss after this many steps, between those at which it was measured."""

    def loss(found: dict) -> float:
        before = min(int(step / EVERY), len(found["losses"]) - 2)
        share = step / EVERY - before
        return (1 - share) * found["losses"][before] + share * found["losses"][before + 1]

    return loss


def average(results: Results, model: str, contestant: str, density: float, value: Value) -> float:
    """The mean of a value over the seeds."""
    return mean(value(results[str(Run(model, contestant, density, seed))]) for seed in SEEDS)


def difference(values: Sequence[float], others: Sequence[float]) -> str:
    """The mean difference of paired values, with its interval at 95 %."""
    differences = [value - other for value, other in zip(values, others, strict=True)]
    half = STUDENT_T[len(differences)] * stdev(differences) / len(differences) ** 0.5
    return f"{mean(differences):+.2f} ± {half:.2f}"


def compared(
    results: Results,
    model: str,
    ours: tuple[str, float, Value],
    base: tuple[str, float, Value],
    seeds: Sequence[int] = SEEDS,
) -> str:
    """The difference of a contestant to another one, each given by its name, density and value."""
    values = [
        [value(results[str(Run(model, name, density, seed))]) for seed in seeds]
        for name, density, value in (ours, base)
    ]
    return difference(*values)


def main_tables(results: Results, seconds: dict[str, dict[str, float]]) -> None:
    """Publish the tables of the contestants at the smallest density."""
    first = DENSITIES[0]
    dense = ("dense", first, final_loss)
    losses = [f"{average(results, model, 'dense', first, final_loss):.2f}" for model in TASKS]
    rows = [["dense", *losses]]
    for name in [name for name in MAIN if name != "dense"] + [*WITHOUT_FEEDBACK]:
        rows.append([name, *(compared(results, model, (name, first, final_loss), dense) for model in TASKS)])
    publish("sparse-accuracy", markdown(["gradients", *TASKS], rows))
    rows = []
    for name in MAIN:
        cells = []
        for model in TASKS:
            missed = average(results, model, name, first, share_missed)
            nbytes = average(results, model, name, first, bytes_of_step)
            cells.append(f"{missed:.0%}, {nbytes / 1e3:.1f} kB")
        rows.append([name, *cells])
    publish("sparse-accuracy-costs", markdown(["gradients", *TASKS], rows))
    sent = partial(average, results, density=first, value=bytes_of_step)
    publish("sparse-accuracy-bytes", at_equal_cost(results, sent, lambda nbytes: f"{nbytes / 1e3:.1f} kB"))
    times = at_equal_cost(results, lambda model, name: seconds[model][name], lambda s: f"{1e3 * s:.1f} ms")
    publish("sparse-accuracy-time", times)


def at_equal_cost(results: Results, cost: Callable[[str, str], float], shown: Callable[[float], str]) -> str:
    """A table of the losses against `bucket`, after as many steps as cost the same. cost(model, contestant): of a step."""
    rows = []
    for name in (name for name in MAIN if name != "bucket"):
        cells = []
        for model in TASKS:
            cheapest = min(cost(model, other) for other in MAIN)
            steps, base = (STEPS * cheapest / cost(model, each) for each in (name, "bucket"))
            sides = (name, DENSITIES[0], loss_at(steps)), ("bucket", DENSITIES[0], loss_at(base))
            cells.append(f"{compared(results, model, *sides)} after {steps:.0f} ({shown(cost(model, name))})")
        rows.append([name, *cells])
    return markdown(["gradients", *TASKS], rows)


def density_table(results: Results) -> None:
    """Publish the losses at all densities."""
    rows = []
    for name, density in product(AT_ALL_DENSITIES, DENSITIES):
        dense = ("dense", DENSITIES[0], final_loss)
        missed = [average(results, model, name, density, share_missed) for model in TASKS]
        cells = [compared(results, model, (name, density, final_loss), dense) for model in TASKS]
        shown = [
            f"{cell}, {share:.0%}" if name == "bucket" else cell for cell, share in zip(cells, missed, strict=True)
        ]
        rows.append([f"{name}, {density}", *shown])
    publish("sparse-accuracy-densities", markdown(["against dense", *TASKS], rows))


def ablation_table(results: Results) -> None:
    """Publish the ablation: each row against the contestant that it changes."""
    first, rows = DENSITIES[0], []
    bases = {name: "bucket" for name in DEGREES | SPARSIFIERS} | {name: name.partition(",")[0] for name in WARM}
    bases |= {name: "selective" for name in CHANGING}
    for name, base in bases.items():
        cells = []
        for model in ABLATED:
            runs = [results[str(Run(model, name, first, seed))] for seed in FEW_SEEDS]
            change = compared(results, model, (name, first, final_loss), (base, first, final_loss), FEW_SEEDS)
            cells.append(
                f"{change}, {mean(run['missed'] for run in runs):.0%}, {mean(run['bytes'] for run in runs) / 1e3:.1f} kB"
            )
        rows.append([name, base, *cells])
    publish("sparse-accuracy-ablation", markdown(["gradients", "against", *ABLATED], rows))


def main() -> None:
    """Train all models, time their steps, and publish the tables."""
    if (arguments := cell_arguments()) is not None:
        time_steps(*arguments)
        return
    results = train_all()
    seconds = {model: measure_cell(__file__, WORKERS, RATE, model, burst="16kb") for model in TASKS}
    main_tables(results, seconds)
    density_table(results)
    ablation_table(results)


if __name__ == "__main__":
    main()
