"""The latency floor of all-reduces, and what it makes of a token on two ranks, by link (about 6 min; root).

The claim: two ranks decode faster than one exactly where an all-reduce takes less than half of one rank's token, divided by
the number of all-reduces. Mamba-1 of the 130m shape in fp32, one thread per rank; 8 tokens on one rank and on two take
turns, medians of 7. The prediction is half of one rank's time, plus the measured times of the all-reduces.
"""

import os
import sys
import tempfile

os.environ.update(OMP_NUM_THREADS="1")

import torch
import torch.distributed as dist

import megatron_ssm
from benchmarks.support.cells import cell_arguments, measure_cell, write_result
from benchmarks.support.shapes import SHAPES, random_model
from benchmarks.support.tables import markdown, print_or_publish
from megatron_ssm import families
from megatron_ssm.sizing.advise import all_reduces
from sparsefusion.collectives import counted as collectives
from sparsefusion.collectives.shared_memory import connect
from sparsefusion.fabric.advice import break_even
from sparsefusion.fabric.measurement import measure, repetitions, timed

SHAPE, RANKS, NEW, REPETITIONS = "Mamba-1 130m", 2, 8, 7
SIZES = [1 << bits for bits in range(3, 21)]
SHOWN = (8, 1 << 10, 1 << 14, 1 << 17, 1 << 20)
LINKS = {"shared memory": None, "gloo": None, "gloo, 1gbit": "1gbit", "gloo, 200mbit": "200mbit"}


@torch.no_grad()
def cell(out: str, link: str, directory: str) -> None:
    """What one rank does; the result is the fabric's times, its floor, and the seconds of tokens, measured and predicted."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group, shared = dist.group.WORLD, link == "shared memory"
    memory = connect(group)[0] if shared else None

    def call(nbytes: int):
        tensor = torch.zeros(nbytes // 4)
        if memory is None:
            return lambda: collectives.all_reduce(tensor, group)
        return lambda: memory.all_reduce(tensor, "fp32")

    curve = measure(group, {"all_reduce": call}, SIZES).curves[0]
    two = megatron_ssm.load(directory, group, shared_memory=shared)
    models = [two] if dist.get_rank() else [two, megatron_ssm.load(directory)]
    caches = [model.new_cache(1) for model in models]
    token = torch.tensor([[73]])

    def decode(which: int) -> None:
        for _ in range(NEW if which < len(models) else 0):  # rank 1 waits while rank 0 decodes alone
            models[which].local_logits(token, cache=caches[which])

    medians = repetitions([timed(lambda w=which: decode(w)) for which in (0, 1)], group, count=REPETITIONS).median(0)
    both, alone = (medians.values / NEW).tolist()
    sums = list(all_reduces(families.from_dict(SHAPES[SHAPE].to_dict()), RANKS))
    predicted = alone / RANKS + sum(count * curve.interpolated(nbytes) for nbytes, count in sums)
    if dist.get_rank() == 0:
        times = [curve.interpolated(nbytes) for nbytes in SHOWN]
        bound = break_even(alone, RANKS) / sum(count for _, count in sums)
        write_result(out, [times, curve.floor, alone, both, predicted, bound])
    dist.barrier()
    if memory is not None:
        memory.close()
    two.close()
    dist.destroy_process_group()


def row(link: str, result: list) -> list[str]:
    """A row of the table."""
    times, floor, alone, both, predicted, bound = result
    sizes = ["-" if seconds is None else f"{seconds * 1e6:.0f} us" for seconds in (*times, floor, bound)]
    tokens = [f"{alone * 1e3:.1f} ms", f"{both * 1e3:.1f} ms ({alone / both:.2f}x)"]
    return [link, *sizes, *tokens, f"{predicted * 1e3:.1f} ms ({alone / predicted:.2f}x)"]


def main() -> None:
    """Measure every link and publish the table; print the rows of the links that the command line names."""
    links = sys.argv[1:] or LINKS
    with tempfile.TemporaryDirectory() as directory:
        random_model(SHAPE, directory)
        rows = [row(link, measure_cell(__file__, RANKS, LINKS[link], link, directory)) for link in links]
    header = ["two ranks", "8 B", "1 KB", "16 KB", "128 KB", "1 MB", "floor", "must be below", "a token on one rank"]
    print_or_publish("nvlink-floor", markdown([*header, "on two (faster)", "predicted"], rows))


if __name__ == "__main__":
    arguments = cell_arguments()
    main() if arguments is None else cell(*arguments)
