"""What each step of the paper's design gains: a token at 256/256, naive sharding to quantized sums (about 6 min; root).

The claim: through shared memory, cached decoding is >= 10x as fast as recomputing the sequence. Mamba-1 of the 130m shape on
two ranks of one thread; 256 tokens in and 256 out; medians of 10. Naive sharding is the paper's baseline (see
`benchmarks.support.naive`). Without a cache, every token takes a forward pass over all tokens before it. The pass of the
token in the middle, over 384 tokens, stands for their mean, because the time of a pass is linear in its length.
"""

import os
import tempfile
from collections.abc import Sequence

os.environ.update(OMP_NUM_THREADS="1")

import torch
import torch.distributed as dist

import megatron_ssm
from benchmarks.support import table_charts
from benchmarks.support.cells import cell_arguments, measure_cell, write_result
from benchmarks.support.naive import shard_naively
from benchmarks.support.shapes import PROMPT, random_model
from benchmarks.support.tables import markdown, publish
from commfabric.fabric.measurement import repetitions, timed

SHAPE, RANKS, NEW = "Mamba-1 130m", 2, 16
BEFORE = PROMPT + PROMPT // 2  # the tokens before the one in the middle of the output
REPETITIONS = 10
LINKS = {"shared memory": None, "gloo": None, "1gbit": "1gbit", "200mbit": "200mbit"}
STEPS = {
    "naive sharding, nothing cached": "naive",
    "split by channel": "split",
    "+ cache": "fp32",
    "+ fp16 sums": "fp16",
    "+ int8 sums": "int8",
}
PAPER = {"A6000, the paper's": (9000, 717.4, 83.2, 73.2), "A100, the paper's": (3100, 201.3, 18.2, 16.2)}


def load(directory: str, link: str, step: str) -> megatron_ssm.Model:
    """The model of one step of the ablation, on this rank."""
    reduce = step if step in ("fp16", "int8") else "fp32"
    shared = link == "shared memory"
    model = megatron_ssm.load(directory, dist.group.WORLD, reduce=reduce, shared_memory=shared)
    if step == "naive":
        shard_naively(model)
    return model


def check(models: dict[str, megatron_ssm.Model], ids: torch.Tensor) -> None:
    """AssertionError unless the naive model has the same logits as ours."""
    ours, naive = (models[step].local_logits(ids, logits_to_keep=1) for step in ("split", "naive"))
    torch.testing.assert_close(naive, ours, rtol=0, atol=1e-3)


@torch.no_grad()
def cell(out: str, link: str, directory: str, count: str) -> None:
    """Run one rank. Rank 0 writes {step: seconds per token}, medians of `count` repetitions, to `out`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    models = {step: load(directory, link, step) for step in STEPS.values()}
    ids = torch.randint(0, models["split"].config.vocab_size, (1, BEFORE), generator=torch.Generator().manual_seed(0))
    check(models, ids[:, :PROMPT])
    recomputed = ("naive", "split")
    passes = [timed(lambda s=step: models[s].local_logits(ids, logits_to_keep=1)) for step in recomputed]
    medians = repetitions(passes, group, "cpu", int(count)).median(0).values.tolist()
    seconds = dict(zip(recomputed, medians, strict=True))
    cached = [step for step in models if step not in seconds]
    models["again"] = models["fp32"]
    caches = {step: models[step].new_cache(1) for step in (*cached, "again")}

    def decode(step: str) -> None:
        for _ in range(NEW):
            models[step].local_logits(ids[:, :1], cache=caches[step])

    for step in caches:
        models[step].local_logits(ids[:, :PROMPT], cache=caches[step], logits_to_keep=1)
    decodes = [timed(lambda s=step: decode(s)) for step in caches]
    medians = repetitions(decodes, group, "cpu", int(count)).median(0).values
    seconds |= dict(zip(caches, (medians / NEW).tolist(), strict=True))
    if dist.get_rank() == 0:
        write_result(out, seconds)
    dist.barrier()
    dist.barrier()
    dist.destroy_process_group()


def column(milliseconds: Sequence[float]) -> list[str]:
    """The cells of one link: the time of each step, and how many times as fast it is as the step before."""
    cells = [f"{milliseconds[0]:.0f}"]
    for before, now in zip(milliseconds, milliseconds[1:], strict=False):
        cells.append(f"{now:.1f} ({before / now:.2f}x)" if before / now < 10 else f"{now:.1f} ({before / now:.0f}x)")
    return cells + ["-"] * (len(STEPS) - len(cells))


def spread(seconds: dict[str, float]) -> str:
    """The difference between two identical runs of cached decoding."""
    return f"{abs(seconds['again'] / seconds['fp32'] - 1):.0%}"


def main() -> None:
    """Measure Mamba-1 on every link; publish the table and draw its chart."""
    columns, spreads = {}, []
    with tempfile.TemporaryDirectory() as directory:
        random_model(SHAPE, directory)
        for link, rate in LINKS.items():
            seconds = measure_cell(__file__, RANKS, rate, link, directory, REPETITIONS)
            columns[link] = [seconds[step] * 1e3 for step in STEPS.values()]
            spreads.append(spread(seconds))
    columns |= PAPER
    table = zip(*(column(times) for times in columns.values()), strict=True)
    header = ["ms per token (faster than the line above)", *columns]
    rows = [[step, *cells] for step, cells in zip(STEPS, table, strict=True)]
    rows.append(["spread of two identical runs of cached decoding", *spreads, *["-"] * len(PAPER)])
    publish("ablation", markdown(header, rows))
    table_charts.draw("ablation")


if __name__ == "__main__":
    arguments = cell_arguments()
    main() if arguments is None else cell(*arguments)
