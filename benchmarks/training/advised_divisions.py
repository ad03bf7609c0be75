"""Divisions of models over two ranks: predicted by `advise` and measured, on slow links (about 10 min; needs root).

The claims: the division that `advise` predicts to be the fastest takes at most 1.10 times as long as the fastest measured
one, in at least 90 % of the rows, and most predicted times of advised divisions are within 25 %. A row is a model, a rate of
links, and a job: a training step, or a reply. Each rank has one thread; both measure the parts of the models together.
"""

import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist

from benchmarks.support.cells import cell_arguments, measured_cells
from benchmarks.support.tables import markdown, print_or_publish
from megatron_ssm import generate
from megatron_ssm.advice.divisions import (
    Division,
    Generation,
    Training,
    generation_divisions,
    training_divisions,
)
from megatron_ssm.advice.measured import MeasuredDevice
from megatron_ssm.checkpoints.hf import build
from megatron_ssm.configs.config import Config
from megatron_ssm.models.context import schedule_of
from megatron_ssm.models.initialization import initialize
from megatron_ssm.models.model import Model
from megatron_ssm.parallel.groups import Groups, join
from megatron_ssm.training.data import Batches, Tokens
from megatron_ssm.training.options import Options
from megatron_ssm.training.trainer import Trainer
from sparsefusion import Fabric
from sparsefusion.fabric.measurement import collective_calls, measure

REPEATED, VOCAB = 5, 512
JOBS: dict[str, Training | Generation] = {
    "training, 4 x 512 tokens": Training(512, 4),
    "training, 1 x 2,048 tokens": Training(2048, 1),
    "32 tokens after 512": Generation(512, 32),
    "4 tokens after 2,048": Generation(2048, 4),
}
SIZES = [1 << bits for bits in range(10, 23, 2)]
SMALL = dict(hidden_size=256, num_layers=4)
MODELS = {
    "Mamba-1": dict(SMALL, model_type="mamba"),
    "Mamba-2": dict(SMALL, model_type="mamba2", mamba_state_dim=64, mamba_head_dim=64),
    "Zamba2": dict(
        SMALL, model_type="zamba2", mamba_state_dim=64, mamba_head_dim=64, num_attention_heads=8, hybrid_interval=2
    ),
}


@dataclass(frozen=True)
class Cell:
    """A model and the rate of the links."""

    model: str
    rate: str
    ranks: int = 2


CELLS = [Cell(model, rate) for model in MODELS for rate in ("1gbit", "200mbit")]


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


def model_of(config: Config, groups: Groups, division: Division, seq: int, training: bool) -> Model:
    """The model of a division, whose ranks only send through the links."""
    schedule = None
    if groups.context is not None:
        schedule = schedule_of(division.schedule, groups.context, config, division.tensor, seq, 1, training)
    model = build(config, groups.tensor, groups.data, context=schedule, reduce=division.format, shared_memory=False)
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


def trained(model: str, job: Training, division: Division) -> float:
    """Seconds of a training step."""
    options, groups = options_of(model, job), groups_of(division)
    config = Config.from_dict(options.new_config(VOCAB, 0))
    trainer = Trainer(model_of(config, groups, division, job.seq, True), groups, options)
    tokens = torch.randint(VOCAB, (20_000,), generator=torch.Generator().manual_seed(0))
    batches = Batches(Tokens(tokens, len(tokens)), job.seq, job.global_batch, 0)
    return median_time(lambda: trainer.step(batches, 0))


def generated(config: Config, job: Generation, division: Division) -> float:
    """Seconds of a reply."""
    model = model_of(config, groups_of(division), division, job.prompt, False)
    ids = torch.randint(VOCAB, (1, job.prompt), generator=torch.Generator().manual_seed(0))
    return median_time(lambda: generate(model, ids, max_new_tokens=job.new))


def options_of(model: str, job: Training) -> Options:
    """The options of a model's training."""
    return Options(
        **MODELS[model], seq_length=job.seq, micro_batch_size=job.micro_batch, global_batch_size=job.global_batch,
        train_iters=10,
    )  # fmt: skip


def run(cell: Cell) -> dict:
    """{job: [(sizes, parts, predicted seconds, measured seconds)], as predicted from the fastest to the slowest}."""
    join(1)
    config = Config.from_dict(options_of(cell.model, Training(512, 4)).new_config(VOCAB, 0))
    fabric, device = measured_fabric(), MeasuredDevice(4e9, dist.group.WORLD)
    results = {}
    for name, job in JOBS.items():
        if isinstance(job, Training):
            found = training_divisions(config, cell.ranks, job, fabric, device)
            measure = partial(trained, cell.model, job)
        else:
            found = generation_divisions(config, cell.ranks, job, fabric, device)
            measure = partial(generated, config, job)
        results[name] = [(each.sizes, each.parts, each.seconds, measure(each)) for each in found if not each.excluded]
    return results


# In the benchmark


def rows(cell: Cell, results: dict) -> list[list[str]]:
    """The rows of a cell: one for each job."""
    lines = []
    for job, divisions in results.items():
        name, _, predicted, measured = divisions[0]
        best = min(divisions, key=lambda each: each[3])
        errors = [abs(p / m - 1) for _, _, p, m in divisions]
        lines.append([
            cell.model, cell.rate, job, name, f"{predicted * 1e3:.0f}", f"{measured * 1e3:.0f}", best[0],
            f"{measured / best[3]:.2f}", f"{predicted / measured - 1:+.0%}", f"{statistics.median(errors):.0%}",
        ])  # fmt: skip
    return lines


def main() -> None:
    """On a rank, run a cell; else measure and publish all cells, or print those whose numbers are arguments."""
    arguments = cell_arguments()
    if arguments is not None:
        found = run(CELLS[int(arguments[1])])
        if dist.get_rank() == 0:
            Path(arguments[0]).write_text(json.dumps(found))
        dist.destroy_process_group()
        return
    table = [row for cell, results in measured_cells(__file__, CELLS).items() for row in rows(cell, results)]
    header = ["model", "links", "job", "advised", "predicted, ms", "measured, ms", "fastest measured",
              "advised / fastest", "error of the prediction", "median error of all divisions"]  # fmt: skip
    print_or_publish("advised-divisions", markdown(header, table))


if __name__ == "__main__":
    main()
