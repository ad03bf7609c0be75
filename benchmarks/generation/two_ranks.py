"""Two ranks of one thread against one rank of one thread, at the 130m shapes (about 8 min).

The claim, on an idle machine whose two cores do not share the bandwidth of the memory: prefill of 256 tokens is >= 1.7x as
fast, decode >= 1.4x; a rank's CPU time outside collectives is >= 1.9x less in prefill and >= 1.8x less in decode. In each
repetition one rank works alone, then both work together through shared memory. To show what the memory allows at that
moment, one rank then reads a tensor, and both read a half each. A launch gives medians; the table shows the median, the
least and the most of several launches, because the host of a virtual machine may place its two processors, for minutes,
where they share a path to the memory. Ranks spin between phases, because after sleeping the scheduler wakes them close to
each other. gloo, with which they sleep, is therefore measured in a launch of its own.
"""

import ctypes
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1")

import torch
import torch.distributed as dist

import megatron_ssm
from benchmarks.support.pair import launch, meet
from benchmarks.support.shapes import PROMPT, SHAPES, random_model
from benchmarks.support.tables import markdown, publish

NEW, REPETITIONS, LAUNCHES = 16, 5, 5
STREAM = 2**26  # floats that are read to measure the memory's bandwidth
FORMATS = {"fp32": {}, "bf16": dict(dtype=torch.bfloat16), "int8": dict(weights="int8")}
PHASES = ("prefill", "decode")
REDUCE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)


class Stopwatch:
    """Measures the seconds of functions, and their CPU seconds outside the collectives of a model's shared memory.

    inside: CPU seconds in collectives. within: whether a collective is running.
    """

    def __init__(self, model: megatron_ssm.Model | None = None) -> None:
        self.inside, self.within, memory = 0.0, False, model and model.ranks.memory
        if memory is not None:
            for name in ("all_reduce", "all_gather", "wait"):
                setattr(memory, name, self.watched(getattr(memory, name)))
            reduce, channel = memory.addresses()
            self._in_c = REDUCE(self.watched(REDUCE(reduce)))  # the C code calls it between the layers
            memory.addresses = lambda: (ctypes.cast(self._in_c, ctypes.c_void_p).value, channel)

    def watched(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        """A function that calls `collective` and adds its CPU seconds to `inside`."""

        def call(*arguments: Any, **keywords: Any) -> Any:
            if self.within:
                return collective(*arguments, **keywords)
            self.within, start = True, time.process_time()
            result = collective(*arguments, **keywords)
            self.within, self.inside = False, self.inside + time.process_time() - start
            return result

        return call

    def time(self, function: Callable[[], Any]) -> tuple[float, float]:
        """(seconds, CPU seconds outside collectives) of one call."""
        self.inside, start, cpu = 0.0, time.perf_counter(), time.process_time()
        function()
        return time.perf_counter() - start, time.process_time() - cpu - self.inside


def phases(model: megatron_ssm.Model) -> dict[str, Callable[[], Any]]:
    """{phase: function that runs it once}."""
    ids = torch.arange(PROMPT).unsqueeze(0)
    cache = model.new_cache(1)
    model(ids, cache=cache, logits_to_keep=1)

    def decode() -> None:
        for _ in range(NEW):
            model.local_logits(ids[:, :1], cache=cache)

    return {"prefill": lambda: model.local_logits(ids, None, model.new_cache(1), logits_to_keep=1), "decode": decode}


@torch.no_grad()
def rank_main(rank: int, folder: str, arrived: torch.Tensor, directory: str, gloo: bool) -> None:
    """Run one rank. Rank 0 saves {(format, phase): {contestant: (seconds, CPU seconds)}} in `folder`.

    gloo: use gloo instead of shared memory. arrived: see `benchmarks.support.pair.meet`.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=Path(folder, "store").as_uri(), rank=rank, world_size=2)
    measured = {}
    for name, options in FORMATS.items():
        both = megatron_ssm.load(directory, dist.group.WORLD, shared_memory=not gloo, **options)
        alone = megatron_ssm.load(directory, **options) if rank == 0 else None
        for phase in PHASES:
            works = {"two": (phases(both)[phase], Stopwatch(both))}
            if rank == 0:
                works["one"] = (phases(alone)[phase], Stopwatch())
            measured[name, phase] = race(works | reading(rank, arrived), arrived, rank)
    if rank == 0:
        torch.save(measured, Path(folder, "measured"))
    dist.barrier()


def reading(rank: int, arrived: torch.Tensor) -> dict[str, tuple[Callable[[], Any], Stopwatch]]:
    """{contestant: (function, Stopwatch)} of plain reading. Two ranks read until the slower one is done."""
    stream = torch.ones(STREAM)
    half = stream[rank * STREAM // 2 :][: STREAM // 2]

    def read() -> None:
        half.sum()
        meet(arrived, rank)

    return {"two read": (read, Stopwatch())} | ({"one reads": (stream.sum, Stopwatch())} if rank == 0 else {})


def race(
    works: dict[str, tuple[Callable[[], Any], Stopwatch]], arrived: torch.Tensor, rank: int
) -> dict[str, tuple[float, ...]]:
    """{contestant: (median seconds, median CPU seconds)} of contestants that run in turn."""
    times: dict[str, list[tuple[float, float]]] = {who: [] for who in works}
    for _ in range(REPETITIONS + 1):
        for who in ("one", "two", "one reads", "two read"):
            meet(arrived, rank)
            if who in works:
                function, watch = works[who]
                times[who].append(watch.time(function))
    return {
        who: tuple(statistics.median(column) for column in zip(*taken[1:], strict=True)) for who, taken in times.items()
    }


def faster(one: str, two: str, column: int = 0) -> Callable[[dict[str, tuple[float, ...]]], float]:
    """A function of a measurement: how many times as much contestant `one` takes as `two`. column: 1 for CPU seconds."""
    return lambda each: each[one][column] / each[two][column]


def row(shape: str, name: str, phase: str, launches: list[dict], gloo: dict) -> list[str]:
    """A row of the table. launches, gloo: what `rank_main` saved, with shared memory and with gloo."""
    each = [measured[name, phase] for measured in launches]
    per = (lambda s: f"{s / NEW * 1e3:.1f} ms/token") if phase == "decode" else (lambda s: f"{s * 1e3:.0f} ms")
    seconds = [per(statistics.median(one[who][0] for one in each)) for who in ("one", "two")]
    cells = []
    for ratio in (faster("one", "two"), faster("one", "two", 1), faster("one reads", "two read")):
        found = sorted(map(ratio, each))
        cells.append(f"{statistics.median(found):.2f}x ({found[0]:.2f}-{found[-1]:.2f})")
    return [shape, name, phase, *seconds, *cells, f"{faster('one', 'two')(gloo[name, phase]):.2f}x"]


def main() -> None:
    """Measure both shapes and publish the table."""
    rows = []
    for shape in SHAPES:
        with tempfile.TemporaryDirectory() as directory:
            random_model(shape, directory)
            launches = [launch(rank_main, directory, False) for _ in range(LAUNCHES)]
            gloo = launch(rank_main, directory, True)
        rows += [row(shape, name, phase, launches, gloo) for name in FORMATS for phase in PHASES]
    header = [
        "shape",
        "weights",
        f"prompt {PROMPT}",
        "one rank",
        "two ranks",
        "faster",
        "CPU time, less",
        "two read",
        "gloo",
    ]
    publish("two-ranks", markdown(header, rows))


if __name__ == "__main__":
    main()
