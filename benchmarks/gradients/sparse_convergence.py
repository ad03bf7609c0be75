"""How a model learns with sparse gradients, per step and per second, on links of 200 mbit (about 15 min; root).

The claims, for a Mamba-2 of 4 M parameters on the demo's text, two ranks, and 400 steps: the held-out loss is at most 0.20
nats per byte above that of dense gradients at density 0.05, and 0.30 at 0.01, both with 100 steps of density warm-up; error
feedback improves it by at least 0.05; and sparse gradients learn more in the time that the dense steps take. The contestant
without error feedback drops its residuals after each step.
"""

import sys
import tempfile
import time
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from benchmarks.support import charts
from benchmarks.support.cells import ROOT, cell_arguments, measure_cell, write_result
from benchmarks.support.tables import markdown, publish
from megatron_ssm.checkpoints.hf import build
from megatron_ssm.model.initialization import initialize as initialize_parameters
from megatron_ssm.parallel.groups import Groups
from megatron_ssm.train.batches import Batches
from megatron_ssm.train.corpus import Corpus
from megatron_ssm.train.options import Options
from megatron_ssm.train.trainer import Trainer, evaluate

STEPS, WARMUP, SHOWN_EVERY, RATE = 400, 100, 10, "200mbit"
MODEL = dict(
    num_layers=4, hidden_size=384, mamba_head_dim=64, mamba_state_dim=16, seq_length=128, micro_batch_size=2,
    global_batch_size=4, train_iters=STEPS, lr=1e-3, lr_warmup_iters=20, seed=1,
)  # fmt: skip
CONTESTANTS = {
    "dense": {},
    "layerwise, 0.05": {"gradient_mode": "layerwise", "gradient_density": 0.05, "gradient_density_warmup": WARMUP},
    "layerwise, 0.01": {"gradient_mode": "layerwise", "gradient_density_warmup": WARMUP},
    "bucket, 0.01": {"gradient_mode": "bucket", "gradient_density_warmup": WARMUP},
    "selective, 0.01": {"gradient_mode": "selective", "gradient_density_warmup": WARMUP},
    "layerwise, 0.01, 3 x the steps": {
        "gradient_mode": "layerwise", "gradient_density_warmup": WARMUP, "train_iters": 3 * STEPS,
    },
    "layerwise, 0.01, no error feedback": {"gradient_mode": "layerwise", "gradient_density_warmup": WARMUP},
}  # fmt: skip


def measure(out: str, data: str, number: str) -> None:
    """The part of one rank in the training of one contestant."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    name = list(CONTESTANTS)[int(number)]
    options = Options(
        data=(f"{data}/train",), valid_data_path=(f"{data}/held_out",), out=data, **MODEL | CONTESTANTS[name]
    )
    corpus = Corpus(options)
    groups = Groups(
        data=dist.group.WORLD, data_context=dist.group.WORLD, rank=dist.get_rank(), ranks=dist.get_world_size()
    )
    model = initialize_parameters(build(corpus.new_model_config(options), None, groups.data), options.seed)
    trainer = Trainer(model, groups, options, report=lambda line: print(line, file=sys.stderr))
    batches = Batches(corpus.train, options.seq_length, options.global_batch_size, options.seed)
    losses, seconds, start = [], [], time.perf_counter()
    for step in range(options.train_iters):
        losses.append(trainer.step(batches, step).loss)
        seconds.append(time.perf_counter() - start)
        if name.endswith("no error feedback"):
            trainer.fusion._session.reducer.feedback.residuals.clear()
    held_out = evaluate(model, corpus.held_out, groups, replace(options, micro_batch_size=16))
    if dist.get_rank() == 0:
        write_result(out, {"losses": losses, "seconds": seconds, "held_out": held_out})
    dist.barrier()
    dist.destroy_process_group()


def row(name: str, measured: dict, dense: dict) -> list[str]:
    """A row of the table: steps, their time, the held-out loss, and the training loss when the dense steps end."""
    seconds = measured["seconds"][-1]
    at = next((i for i, s in enumerate(measured["seconds"]) if s > dense["seconds"][-1]), len(measured["seconds"])) - 1
    return [
        name,
        f"{len(measured['losses'])} in {seconds:.0f} s ({seconds / dense['seconds'][-1]:.2f})",
        f"{measured['held_out']:.3f} ({measured['held_out'] - dense['held_out']:+.3f})",
        f"{smooth(measured['losses'])[at]:.3f} after {at + 1} steps",
    ]


def smooth(losses: list[float]) -> list[float]:
    """Exponential moving averages of losses."""
    found = [losses[0]]
    for loss in losses[1:]:
        found.append(0.95 * found[-1] + 0.05 * loss)
    return found


def plot(results: dict[str, dict], figure: charts.pyplot.Figure) -> None:
    """Plot the training loss over steps and over seconds."""
    axes = figure.subplots(1, 2, sharey=True)
    for name, each in results.items():
        losses = smooth(each["losses"])[::SHOWN_EVERY]
        axes[0].plot(range(0, len(each["losses"]), SHOWN_EVERY), losses, label=name)
        axes[1].plot(each["seconds"][::SHOWN_EVERY], losses)
    axes[0].set(xlabel="steps", ylabel="training loss, nats per byte", ylim=(1.2, 4))
    axes[1].set(xlabel=f"seconds at {charts.LINKS[RATE]}", xlim=(0, results["dense"]["seconds"][-1]))
    charts.legend(figure, axes[0], 2)


def main() -> None:
    """Train all contestants, and publish the table and draw the chart."""
    sys.path.insert(0, str(ROOT / "examples"))
    from corpus import write_corpus

    with tempfile.TemporaryDirectory() as data:
        write_corpus(data)
        results = {name: measure_cell(__file__, 2, RATE, data, i, burst="128kb") for i, name in enumerate(CONTESTANTS)}
    header = [
        "gradients",
        "steps, time (of dense's)",
        "held-out nats per byte (against dense)",
        "training loss at the end",
    ]
    publish(
        "sparse-convergence", markdown(header, [row(name, each, results["dense"]) for name, each in results.items()])
    )
    charts.save("sparse_convergence", partial(plot, results), height=4)


if __name__ == "__main__":
    arguments = cell_arguments()
    main() if arguments is None else measure(*arguments)
