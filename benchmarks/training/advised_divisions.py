"""Divisions of models over ranks: predicted by `advise` and measured, on slow links (about 15 min; needs root).

The claims: the division that `advise` predicts to be the fastest takes at most 1.10 times as long as the fastest measured
one, in at least 90 % of the cells, and predicted times of advised divisions are within 25 %. A cell is a number of ranks, a
model, a rate of links and a job: training steps of 4 x 512 tokens, or replies of 32 tokens to a prompt of 512. Each rank has
one thread. Four share two cores, so the parts of the models are measured on all of them at the same time, as they compute.
"""

import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
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
TRAINING, GENERATION = Training(512, 4), Generation(512, 32)
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
    ranks: int


CELLS = [Cell(model, rate, 2) for model in MODELS for rate in ("1gbit", "200mbit", "50mbit")]
CELLS += [Cell(model, "200mbit", 4) for model in MODELS]


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
        schedule = schedule_of("auto", groups.context, config, division.tensor, seq, 1, training)
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


def trained(config: Config, options: Options, division: Division) -> float:
    """Seconds of a training step."""
    groups = groups_of(division)
    trainer = Trainer(model_of(config, groups, division, TRAINING.seq, True), groups, options)
    tokens = torch.randint(VOCAB, (20_000,), generator=torch.Generator().manual_seed(0))
    batches = Batches(Tokens(tokens, len(tokens)), TRAINING.seq, TRAINING.global_batch, 0)
    return median_time(lambda: trainer.step(batches, 0))


def generated(config: Config, division: Division) -> float:
    """Seconds of a reply."""
    groups = groups_of(division)
    model = model_of(config, groups, division, GENERATION.prompt, False)
    ids = torch.randint(VOCAB, (1, GENERATION.prompt), generator=torch.Generator().manual_seed(0))
    return median_time(lambda: generate(model, ids, max_new_tokens=GENERATION.new))


def run(cell: Cell) -> dict:
    """{job: [(sizes, predicted seconds, measured seconds)], as predicted from the fastest to the slowest}."""
    join(1)
    options = Options(
        **MODELS[cell.model], seq_length=TRAINING.seq, micro_batch_size=TRAINING.micro_batch, train_iters=10,
        global_batch_size=TRAINING.global_batch,
    )  # fmt: skip
    config = Config.from_dict(options.new_config(VOCAB, 0))
    fabric, device = measured_fabric(), MeasuredDevice(4e9, dist.group.WORLD)
    found = {
        "training": training_divisions(config, cell.ranks, TRAINING, fabric, device),
        "generation": generation_divisions(config, cell.ranks, GENERATION, fabric, device),
    }
    times = {
        "training": lambda each: trained(config, options, each),
        "generation": lambda each: generated(config, each),
    }
    return {
        job: [(each.sizes, each.parts, each.seconds, times[job](each)) for each in divisions if not each.excluded]
        for job, divisions in found.items()
    }


# In the benchmark


def rows(cell: Cell, results: dict) -> list[list[str]]:
    """The rows of a cell: one for each job."""
    lines = []
    for job, divisions in results.items():
        name, _, predicted, measured = divisions[0]
        best = min(divisions, key=lambda each: each[3])
        errors = [abs(p / m - 1) for _, _, p, m in divisions]
        lines.append([
            str(cell.ranks), cell.model, cell.rate, job, name, f"{predicted * 1e3:.0f}", f"{measured * 1e3:.0f}", best[0],
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
    header = ["ranks", "model", "links", "job", "advised", "predicted, ms", "measured, ms", "fastest measured",
              "advised / fastest", "error of the prediction", "median error of all divisions"]  # fmt: skip
    print_or_publish("advised-divisions", markdown(header, table))


if __name__ == "__main__":
    main()
