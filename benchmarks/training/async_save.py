"""How long a checkpoint stops training: written in the background against at once (about 5 min).

The claim: with --async-save, training stops <= 10 % as long. Two tensor-parallel ranks train a Mamba-2 whose parameters and
moments are 0.4 GB; both ways take turns, each on a state that has changed since the last checkpoint. Written in the
background, a checkpoint stops training while the state is copied to memory; the first one, which also allocates that memory,
is not counted. Beside it, how much longer training steps take while a checkpoint is written: the writing needs the
processors too, and here the two ranks have only two.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1")

import torch
import torch.distributed as dist

from benchmarks.support.cells import cell_arguments, measure_cell, write_result
from benchmarks.support.tables import markdown, publish
from megatron_ssm import families
from megatron_ssm.parallel.groups import initialize, shut_down
from megatron_ssm.train.batches import Batches, Tokens
from megatron_ssm.train.options import Options
from megatron_ssm.train.pretraining import make_model
from megatron_ssm.train.saving import Saver
from megatron_ssm.train.trainer import Trainer

REPETITIONS, STEPS = 10, 2
RUN = dict(
    tensor_model_parallel_size=2, hidden_size=640, num_layers=8, micro_batch_size=2, global_batch_size=2, seq_length=128,
    train_iters=1000, mamba_head_dim=64, keep=1,
)  # fmt: skip
VOCAB = 16384


def measure(out: str, folder: str) -> None:
    """Run one rank, which writes checkpoints to a folder. Rank 0 writes the seconds of each repetition to `out`."""
    torch.set_num_threads(1)
    groups = initialize(2)
    ways = {name: Options(**RUN, async_save=name == "background") for name in ("at once", "background")}
    options = ways["at once"]
    model = make_model(options, families.from_dict(options.new_config(VOCAB, 0)), groups, torch.device("cpu"))
    trainers = {name: Trainer(model, groups, way) for name, way in ways.items()}
    trainers["background"].optimizer = trainers["at once"].optimizer
    batches = Batches(Tokens(torch.randint(VOCAB, (10_000,)), 10_000), 128, 2, 0)
    savers = {name: Saver(trainer, Path(folder, name), {}, 0) for name, trainer in trainers.items()}

    def seconds(action: Callable[[], object]) -> float:
        dist.barrier()
        start = time.perf_counter()
        action()
        dist.barrier()
        return time.perf_counter() - start

    def steps() -> None:
        for step in range(STEPS):
            trainers["at once"].step(batches, step)

    rows: dict[str, list[float]] = {"alone": [], "at once": [], "background": [], "meanwhile": []}
    for repetition in range(REPETITIONS + 1):
        measured = {"alone": seconds(steps), "at once": seconds(partial(savers["at once"].save, repetition))}
        steps()
        measured["background"] = seconds(partial(savers["background"].save, repetition))
        measured["meanwhile"] = seconds(steps)
        savers["background"].finish()
        for name, value in measured.items() if repetition else ():
            rows[name].append(value)
    if groups.rank == 0:
        nbytes = 3 * sum(p.nbytes for p in model.parameters()) * 2
        write_result(out, {"seconds": rows, "nbytes": nbytes})
    shut_down()


def main() -> None:
    """Measure and publish the table."""
    with tempfile.TemporaryDirectory() as folder:
        result = measure_cell(__file__, 2, None, folder)
    alone, at_once, background, meanwhile = (statistics.median(each) for each in result["seconds"].values())
    ratios = [b / a for a, b in zip(result["seconds"]["at once"], result["seconds"]["background"], strict=True)]
    row = [
        f"{result['nbytes'] / 1e9:.2f} GB",
        f"{at_once:.2f} s",
        f"{background:.3f} s",
        f"{background / at_once:.1%} ({min(ratios):.1%}-{max(ratios):.1%})",
        f"{meanwhile / alone:.2f}x",
    ]
    header = ["checkpoint", "training stops: at once", "in the background", "ratio", "steps meanwhile take"]
    publish("async-save", markdown(header, [row]))


if __name__ == "__main__":
    arguments = cell_arguments()
    main() if arguments is None else measure(*arguments)
