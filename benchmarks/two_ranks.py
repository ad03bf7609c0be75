"""Two ranks of one thread against one rank of one thread, at the 130m shapes (about 4 min).

The claim, on a quiet machine with two cores: prefill of 256 tokens >= 1.7x, decode >= 1.4x; CPU time of a rank outside
collectives >= 1.9x less in prefill, >= 1.8x less in decode. In each repetition one rank works alone, then both through
shared memory, then both over gloo, for which the waiting ranks sleep; then, for what the memory allows at that moment, one
rank reads a tensor, and each of two a half. Medians.
"""

import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1")

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from _shapes import PROMPT, SHAPES, random_model
from _tables import markdown, publish

import megatron_ssm

NEW, REPETITIONS, STREAM = 16, 10, 2**27  # floats to read
FORMATS = {"fp32": {}, "bf16": dict(dtype=torch.bfloat16), "int8": dict(weights="int8")}


class Stopwatch:
    """Seconds and CPU seconds of a function, and the CPU seconds that went into collectives while it ran."""

    def __init__(self, model=None):
        self.inside, memory = 0.0, model and model.ranks.memory
        if memory is not None:
            memory.all_reduce, memory.all_gather = self.watched(memory.all_reduce), self.watched(memory.all_gather)

    def watched(self, collective):
        """The collective, its CPU time added up."""

        def call(*arguments, **keywords):
            start = time.process_time()
            result = collective(*arguments, **keywords)
            self.inside += time.process_time() - start
            return result

        return call

    def time(self, function) -> tuple[float, float]:
        """(seconds, CPU seconds outside collectives)."""
        self.inside, start, cpu = 0.0, time.perf_counter(), time.process_time()
        function()
        return time.perf_counter() - start, time.process_time() - cpu - self.inside


def phases(model):
    """{phase: function}"""
    ids = torch.arange(PROMPT).unsqueeze(0)
    cache = model.new_cache(1)
    model(ids, cache=cache, logits_to_keep=1)

    def decode():
        for _ in range(NEW):
            model.local_logits(ids[:, :1], cache=cache)

    return {"prefill": lambda: model.local_logits(ids, None, model.new_cache(1), logits_to_keep=1), "decode": decode}


@torch.no_grad()
def rank_main(rank, folder, directory) -> None:
    """One rank's part; rank 0 writes {format: {phase: {contestant: (seconds, CPU seconds)}}} down."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=Path(folder, "store").as_uri(), rank=rank, world_size=2)
    group, measured = dist.group.WORLD, {name: {} for name in FORMATS}
    for name, options in FORMATS.items():
        models = {"two": megatron_ssm.load(directory, group, **options)}
        models["gloo"] = megatron_ssm.load(directory, group, shared_memory=False, **options)
        if rank == 0:
            models["one"] = megatron_ssm.load(directory, **options)
        watches = {who: Stopwatch(model) for who, model in models.items()}
        works = {who: phases(models[who]) for who in ("two", "gloo")}  # in the same order on both ranks
        works |= {"one": phases(models["one"])} if rank == 0 else {}
        readers, ways = reading(rank), dict.fromkeys(("one reads", "two read"), Stopwatch())
        for phase in ("prefill", "decode"):
            measured[name][phase] = race({who: work[phase] for who, work in works.items()} | readers, watches | ways)
    if rank == 0:
        torch.save(measured, Path(folder, "measured"))
    dist.barrier()


def reading(rank) -> dict:
    """{contestant: function} of plain reading."""
    stream = torch.ones(STREAM)
    half = stream[rank * STREAM // 2 :][: STREAM // 2]
    return {"two read": half.sum} | ({"one reads": stream.sum} if rank == 0 else {})


def race(works, watches) -> dict:
    """{contestant: (median seconds, median CPU seconds)}, in turn."""
    times = {who: [] for who in works}
    for _ in range(REPETITIONS + 1):
        for who in ("one", "two", "gloo", "one reads", "two read"):
            dist.barrier()
            if who in works:
                times[who].append(watches[who].time(works[who]))
    return {
        who: tuple(statistics.median(column) for column in zip(*taken[1:], strict=True)) for who, taken in times.items()
    }


def row(shape, name, phase, measured) -> list[str]:
    """A line of the table."""
    (one, one_cpu), (two, two_cpu) = measured["one"], measured["two"]
    per = (lambda s: f"{s / NEW * 1e3:.1f} ms/token") if phase == "decode" else (lambda s: f"{s * 1e3:.0f} ms")
    read = measured["one reads"][0] / measured["two read"][0]
    ratios = [f"{ratio:.2f}x" for ratio in (one / two, one / measured["gloo"][0], one_cpu / two_cpu, read)]
    return [shape, name, phase, per(one), per(two), *ratios]


def main() -> None:
    """Measure both shapes and publish the table."""
    rows = []
    for shape in SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            random_model(shape, Path(folder, "model"))
            multiprocessing.spawn(rank_main, (folder, Path(folder, "model")), 2)
            measured = torch.load(Path(folder, "measured"), weights_only=True)
        rows += [row(shape, name, phase, cells) for name, both in measured.items() for phase, cells in both.items()]
    header = [
        "shape",
        "weights",
        f"prompt {PROMPT}",
        "one rank",
        "two ranks",
        "faster",
        "over gloo",
        "CPU time, less",
        "two read",
    ]
    publish("two-ranks", markdown(header, rows))


if __name__ == "__main__":
    main()
