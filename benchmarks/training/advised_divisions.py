"""Divisions of models over two ranks: predicted by `advise`, and measured (about 40 min; needs root).

The claims, each in at least 90 % of the rows: the division that `advise` names takes at most 1.10 times as long as the
fastest measured one, and its predicted time is within 25 % of the measured one. A row is a model, a link and a job: a
training step, or a reply. Beside `advise`, a rule chooses that looks at the batch only.

Each rank has one thread; both measure the parts of the models together. There are two ranks because the benchmark is for two
cores: of more ranks, each would wait for a core after every message, and not for the link. A host's speed can double within
minutes, so a row is predicted and measured in turns, and the medians of both count.

    advised_divisions.py [ROW...]    all rows, which are published; or those of these numbers, which are printed
"""

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist

from benchmarks.support.cells import cell_arguments, measure_cell
from benchmarks.support.tables import markdown, print_or_publish
from commfabric.fabric.measurement import collective_calls, measure
from megatron_ssm import families, generate
from megatron_ssm.checkpoints.hf import build
from megatron_ssm.model.context import schedule_of
from megatron_ssm.model.initialization import initialize
from megatron_ssm.model.model import Model
from megatron_ssm.parallel.groups import Groups, join
from megatron_ssm.plan.divisions import (
    Division,
    Generation,
    Training,
    generation_divisions,
    training_divisions,
)
from megatron_ssm.plan.measured import MeasuredDevice
from megatron_ssm.spec.stack import Stack
from megatron_ssm.train.batches import Batches, Tokens
from megatron_ssm.train.options import Options
from megatron_ssm.train.trainer import Trainer
from sparsefusion import Fabric

REPEATED, VOCAB, RANKS = 2, 512, 2
TURNS = 3  # in which a row is predicted and measured
CLOSE, ACCURATE = 1.10, 0.25  # an advised division is good, and a prediction accurate, up to these
SIZES = [1 << bits for bits in range(10, 23, 2)]
NARROW = dict(hidden_size=256, num_layers=12)
MAMBA2 = dict(model_type="mamba2", mamba_state_dim=64, mamba_head_dim=64)
MODELS = {
    "Mamba-1": dict(NARROW, model_type="mamba"),
    "Mamba-2": dict(NARROW, **MAMBA2),
    "Zamba2": dict(NARROW, **MAMBA2 | {"model_type": "zamba2"}, num_attention_heads=8, hybrid_interval=4),
    "Mamba-2 of width 512": dict(MAMBA2, hidden_size=512, num_layers=12),
}
LINKS = {None: "one machine", "1gbit": "1 Gbit/s", "200mbit": "200 Mbit/s"}
RULE = "DP 2 if the batch divides, else CP 2"


@dataclass(frozen=True)
class Row:
    """rate: of the links (see LINKS)."""

    model: str
    rate: str | None
    job: Training | Generation


REPLIES = Generation(128, 32), Generation(1024, 4)
JOBS = Training(256, 4), Training(1024, 1), *REPLIES
SHORT = Training(128, 1), Generation(32, 16)
ROWS = [
    *(Row(model, rate, job) for rate in (None, "1gbit") for model in list(MODELS)[:3] for job in JOBS),
    *(Row("Mamba-2 of width 512", rate, job) for rate in (None, "1gbit") for job in SHORT),
    *(Row(model, "200mbit", job) for model in list(MODELS)[:3] for job in REPLIES),
    Row("Mamba-2", "200mbit", Training(64, 4)),
]


# On a rank


def measured_fabric() -> Fabric:
    """What collectives cost among the first two ranks and among all."""
    curves: tuple = ()
    for count in sorted({2, dist.get_world_size()}):
        group = dist.new_group(list(range(count)))
        if dist.get_rank() < count:
            curves += measure(
                group, collective_calls(group, ["all_reduce", "all_gather", "all_to_all", "p2p"], "cpu"), SIZES
            ).curves
        dist.barrier()
    found: list = [curves]
    dist.broadcast_object_list(found, 0)
    return Fabric(found[0])


def groups_of(division: Division) -> Groups:
    """The process groups of a division, as `parallel.groups.initialize` makes them."""
    tensor, context, ranks = division.tensor, division.context, dist.get_world_size()

    def of(function: Callable[[int], tuple]) -> dist.ProcessGroup | None:
        members: dict[tuple, list[int]] = {}
        for rank in range(ranks):
            members.setdefault(function(rank), []).append(rank)
        group, _ = dist.new_subgroups_by_enumeration(list(members.values()))
        return group if group.size() > 1 else None

    return Groups(
        tensor=of(lambda r: (r // tensor,)), context=of(lambda r: (r % tensor, r // (tensor * context))),
        data=of(lambda r: (r % (tensor * context),)), data_context=of(lambda r: (r % tensor,)),
        rank=dist.get_rank(), ranks=ranks,
    )  # fmt: skip


def model_of(row: Row, config: Stack, groups: Groups, division: Division) -> Model:
    """The model of a division. Its ranks share memory if they are on one machine, and else only send through the links."""
    is_training = isinstance(row.job, Training)
    seq = row.job.seq if isinstance(row.job, Training) else row.job.prompt
    schedule = None
    if groups.context is not None:
        schedule = schedule_of(division.schedule, groups.context, config, division.tensor, seq, 1, is_training)
    model = build(
        config, groups.tensor, groups.data, context=schedule, reduce=division.format, recompute=division.recompute,
        shared_memory=row.rate is None,
    )  # fmt: skip
    return initialize(model, 0)


def median_time(run: Callable[[], object]) -> float:
    """Seconds of the slowest rank, the median of some runs after one that is not timed."""
    seconds = []
    for _ in range(1 + REPEATED):
        dist.barrier()
        start = time.perf_counter()
        run()
        mine = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
        seconds.append(float(mine))
    return statistics.median(seconds[1:])


def trained(row: Row, job: Training, division: Division, gradients: str) -> float:
    """Seconds of a training step in a gradient mode, once the mode has chosen how it sends."""
    options, groups = options_of(row.model, job, division, gradients), groups_of(division)
    config = families.from_dict(options.new_config(VOCAB, 0))
    tokens = torch.randint(VOCAB, (20_000,), generator=torch.Generator().manual_seed(0))
    batches = Batches(Tokens(tokens, len(tokens)), job.seq, job.global_batch, 0)
    with model_of(row, config, groups, division) as model:
        trainer = Trainer(model, groups, options, report=lambda _: None)
        while trainer.fusion is not None and trainer.fusion.state_dict()["plan"] is None:
            trainer.step(batches, 0)
        return median_time(lambda: trainer.step(batches, 0))


def generated(row: Row, config: Stack, job: Generation, division: Division) -> float:
    """Seconds of a reply."""
    ids = torch.randint(VOCAB, (1, job.prompt), generator=torch.Generator().manual_seed(0))
    with model_of(row, config, groups_of(division), division) as model:
        return median_time(lambda: generate(model, ids, max_new_tokens=job.new))


def options_of(model: str, job: Training, division: Division, gradients: str) -> Options:
    """The options of a model's training in a division."""
    return Options(
        **MODELS[model], seq_length=job.seq, micro_batch_size=job.micro_batch, global_batch_size=job.global_batch,
        train_iters=10, gradient_mode=gradients, recompute_activations=division.recompute,
    )  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """A division: its sizes, and its predicted and measured seconds, with dense sums of gradients.

    as_advised: those measured with the advised gradient mode, if it is another one.
    """

    sizes: str
    predicted: float
    measured: float
    as_advised: float

    @property
    def best(self) -> float:
        """The measured seconds with the advised options."""
        return self.as_advised or self.measured


def run_row(row: Row, fabric: Fabric) -> list[Measured]:
    """All possible divisions, from the one that is predicted to be the fastest to the slowest."""
    turns = [sorted(run_turn(row, fabric), key=lambda each: each.sizes) for _ in range(TURNS)]
    found = [
        Measured(
            same[0].sizes,
            *(median(getattr(each, name) for each in same) for name in ("predicted", "measured", "as_advised")),
        )
        for same in zip(*turns, strict=True)
    ]
    return sorted(found, key=lambda each: each.predicted)


def median(values: Iterable[float]) -> float:
    """The median of those that are not 0: a gradient mode may be advised in some turns only."""
    return statistics.median([value for value in values if value] or [0.0])


def run_turn(row: Row, fabric: Fabric) -> list[Measured]:
    """All possible divisions, predicted and then measured."""
    device = MeasuredDevice(4e9, dist.group.WORLD, shares=row.rate is None)
    config = families.from_dict(
        options_of(row.model, Training(512, 4), Division(1, 1, 1), "dense").new_config(VOCAB, 0)
    )
    job, found = row.job, []
    if isinstance(job, Training):
        divisions = training_divisions(config, RANKS, job, fabric, device)
    else:
        divisions = generation_divisions(config, RANKS, job, fabric, device)
    for each in divisions:
        if each.excluded:
            continue
        as_advised = 0.0
        if isinstance(job, Training):
            seconds = trained(row, job, each, "dense")
            as_advised = trained(row, job, each, each.gradients) if each.gradients != "dense" else 0.0
        else:
            seconds = generated(row, config, job, each)
        found.append(Measured(each.sizes, each.seconds, seconds, as_advised))
    return found


def run(numbers: list[int]) -> list[list[dict]]:
    """The divisions of some rows behind the same link, as `run_row` measures them."""
    join(1)
    fabric = measured_fabric()
    return [[asdict(each) for each in run_row(ROWS[number], fabric)] for number in numbers]


# In the benchmark


def ruled(row: Row, divisions: list[Measured]) -> Measured:
    """The division that RULE chooses."""
    fits = not isinstance(row.job, Training) or row.job.global_batch % RANKS == 0
    return next(each for each in divisions if each.sizes == ("TP 1 x CP 1 x DP 2" if fits else "TP 1 x CP 2 x DP 1"))


def job_name(job: Training | Generation) -> str:
    """A job in words."""
    if isinstance(job, Training):
        return f"training, {job.global_batch} x {job.seq:,} tokens"
    return f"{job.new} tokens after {job.prompt:,}"


def all_divisions(row: Row, divisions: list[Measured]) -> list[str]:
    """The predicted and the measured times of every division."""
    by_name = {short(each.sizes): each for each in divisions}
    cells = [row.model, LINKS[row.rate], job_name(row.job)]
    for name in ("TP 2", "CP 2", "DP 2"):
        each = by_name.get(name)
        text = f"{milliseconds(each.predicted)} / {milliseconds(each.measured)}" if each else "-"
        cells.append(text + (f" ({milliseconds(each.as_advised)})" if each and each.as_advised else ""))
    return cells


def scores(found: dict[Row, list[Measured]]) -> list[list[str]]:
    """How often `advise` and RULE choose well, and how accurate the predictions are."""
    lines = []
    for name, choose in (("`advise`", lambda _, divisions: divisions[0]), (RULE, ruled)):
        ratios = [choose(row, each).best / min(one.best for one in each) for row, each in found.items()]
        close = sum(ratio <= CLOSE for ratio in ratios)
        lines.append([name, f"{close} of {len(ratios)}", f"{statistics.mean(ratios):.2f}", f"{max(ratios):.2f}"])
    return lines


def accuracy(found: dict[Row, list[Measured]]) -> list[list[str]]:
    """How many predictions are accurate: of the advised divisions, and of all, in training and in generation."""
    lines = []
    for name, kind in (("training", Training), ("generation", Generation)):
        jobs = [divisions for row, divisions in found.items() if isinstance(row.job, kind)]
        for what, chosen in (("advised", [each[:1] for each in jobs]), ("all", jobs)):
            errors = [each.predicted / each.measured - 1 for divisions in chosen for each in divisions]
            if errors:
                within = sum(abs(error) <= ACCURATE for error in errors)
                signed = f"{statistics.median(errors):+.0%}, {min(errors):+.0%} to {max(errors):+.0%}"
                lines.append([name, what, f"{within} of {len(errors)}", signed])
    return lines


def short(sizes: str) -> str:
    """The one of the three numbers of ranks that is not 1."""
    return next(part for part in sizes.split(" x ") if not part.endswith(" 1"))


def milliseconds(seconds: float) -> str:
    """Three digits."""
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def main() -> None:
    """On a rank, run some rows; else measure and publish all rows, or print those whose numbers are arguments."""
    arguments = cell_arguments()
    if arguments is not None:
        found = run([int(number) for number in arguments[1:]])
        if dist.get_rank() == 0:
            Path(arguments[0]).write_text(json.dumps(found))
        dist.barrier()
        dist.destroy_process_group()
        return
    numbers = [int(number) for number in sys.argv[1:]] or range(len(ROWS))
    results: dict[Row, list[Measured]] = {}
    for _, together in itertools.groupby(numbers, key=lambda number: (ROWS[number].rate, ROWS[number].model)):
        chosen = list(together)
        for number, divisions in zip(chosen, measure_cell(__file__, RANKS, ROWS[chosen[0]].rate, *chosen), strict=True):
            results[ROWS[number]] = [Measured(**each) for each in divisions]
    publish_all(results)


def publish_all(results: dict[Row, list[Measured]]) -> None:
    """Publish the tables of the page, and print the times of all divisions."""
    header = ["chosen by", f"at most {CLOSE:.2f} times as long as the fastest", "mean", "most"]
    print_or_publish("advice-scores", markdown(header, scores(results)))
    header = ["job", "divisions", f"predictions within {ACCURATE:.0%}", "error: median, range"]
    print_or_publish("advice-accuracy", markdown(header, accuracy(results)))
    header = ["model", "links", "job", *(f"{name}: predicted / measured, ms" for name in ("TP 2", "CP 2", "DP 2"))]
    print(markdown(header, [all_divisions(*each) for each in results.items()]))


if __name__ == "__main__":
    main()
