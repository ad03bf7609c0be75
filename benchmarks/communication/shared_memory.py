"""The all-reduce in shared memory beside that of gloo, by size and format, on one machine (about 1 min).

The claim: 768 floats between 2 ranks take at most a quarter of gloo's time. In each repetition all choices take turns; a
turn starts with a barrier and lasts until the slowest rank is done. Times are medians. A turn is several calls in a row,
as in a model, and its time is divided by their number. gloo is measured twice; the difference is the spread.
"""

import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from benchmarks.support.tables import markdown, publish
from commfabric.collectives import counted as collectives
from commfabric.collectives.shared_memory import connect
from commfabric.fabric.measurement import repetitions, timed

RANKS = (2, 4)
SIZES = {"3 KB (768 floats)": 768, "8 KB": 2048, "64 KB": 16384, "768 KB (256 x 768)": 196608, "4 MB": 1 << 20}
FORMATS = ("fp32", "fp16", "int8")
CALLS, CALLS_OF_LARGE, LARGE, REPETITIONS = 20, 2, 1 << 17, 15


def calls_in_a_row(call: Callable[[], object], count: int) -> Callable[[], None]:
    """A function that calls `call` `count` times."""

    def several() -> None:
        for _ in range(count):
            call()

    return several


def measure(numel: int, group: dist.ProcessGroup, memory: Any) -> dict[str, float]:
    """{choice: seconds of a call} for `numel` floats."""
    tensor = torch.randn(numel)
    gloo = partial(collectives.all_reduce, tensor, group)
    choices = {"gloo": gloo, **{name: partial(memory.all_reduce, tensor, name) for name in FORMATS}, "gloo again": gloo}
    count = CALLS if numel < LARGE else CALLS_OF_LARGE
    turns = [timed(calls_in_a_row(call, count)) for call in choices.values()]
    seconds = repetitions(turns, group, "cpu", REPETITIONS).median(0).values / count
    return dict(zip(choices, seconds.tolist(), strict=True))


def rank_main(rank: int, ranks: int, folder: str) -> None:
    """What one rank does: measure all sizes; rank 0 saves the times."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=Path(folder, "store").as_uri(), rank=rank, world_size=ranks)
    memory, why = connect(dist.group.WORLD)
    if memory is None:
        raise RuntimeError(why)
    measured = {name: measure(numel, dist.group.WORLD, memory) for name, numel in SIZES.items()}
    if rank == 0:
        torch.save(measured, Path(folder, "measured"))
    dist.barrier()
    memory.close()
    dist.barrier()
    dist.destroy_process_group()


def row(ranks: int, size: str, seconds: dict[str, float]) -> list[str]:
    """A row of the table."""
    gloo = seconds["gloo"]
    shared = [f"{seconds[name] * 1e6:.0f} us ({gloo / seconds[name]:.0f}x)" for name in FORMATS]
    return [str(ranks), size, f"{gloo * 1e6:.0f} us", *shared, f"{abs(seconds['gloo again'] / gloo - 1):.0%}"]


def main() -> None:
    """Measure, and publish the table unless --print is given."""
    rows = []
    for ranks in RANKS:
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(rank_main, (ranks, folder), ranks)
            measured = torch.load(Path(folder, "measured"), weights_only=True)
        rows += [row(ranks, size, seconds) for size, seconds in measured.items()]
    table = markdown(["ranks", "float32 data", "gloo", *FORMATS, "spread"], rows)
    print(table) if sys.argv[1:] == ["--print"] else publish("shared-memory", table)


if __name__ == "__main__":
    main()
