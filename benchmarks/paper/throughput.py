"""Tensor parallelism against one rank, and against data parallelism on the same cores, by prompt and output (about 33 min).

The claim: two tensor-parallel ranks (TP 2) give more tokens per second than one rank. They also give more than two replicas
with half of the batch each (DP 2), unless the prompt is long and the output short. Four families at sizes near 130m, all
ranks on one machine with one thread each, greedy `megatron_ssm.stream`. The token times of one run give the throughput of
every shorter output. Medians of interleaved runs; the spread is the difference between the medians of TP 2's even and odd
runs.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1")

import torch
import torch.distributed as dist

import megatron_ssm
from benchmarks.support import table_charts
from benchmarks.support.pair import launch, meet
from benchmarks.support.shapes import FAMILIES, random_model
from benchmarks.support.tables import markdown, publish

BATCH, REPETITIONS = 4, 6
PROMPTS = {"Mamba-1 130m": (16, 64, 256), "Mamba-2 130m": (16, 64, 256)}  # those of the paper; for other families LONG
LONG, OUTPUTS = (16, 256, 1024), (4, 16, 64)
PAPER = [
    ["the paper's four, 2 A6000", "16 to 1024", "", "", "1.58 to 1.98x", "1.02 to 1.59x", ""],
    ["the paper's four, 2 A100", "16 to 1024", "", "", "1.75 to 1.96x", "1.01 to 1.27x", ""],
]


def token_times(model: megatron_ssm.Model, ids: torch.Tensor) -> list[float]:
    """The seconds from the start until each token of the longest output is known."""
    start, times = time.perf_counter(), []
    for _ in megatron_ssm.stream(model, ids, max_new_tokens=max(OUTPUTS)):
        times.append(time.perf_counter() - start)
    return times


@torch.no_grad()
def rank_main(rank: int, folder: str, arrived: torch.Tensor, directory: str, prompts: tuple[int, ...]) -> None:
    """Run one rank. Rank 0 saves {(prompt, contestant): [token times of each run]} in `folder`, those of the slower rank.

    arrived: see `benchmarks.support.pair.meet`.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=Path(folder, "store").as_uri(), rank=rank, world_size=2)
    both, alone = megatron_ssm.load(directory, dist.group.WORLD), megatron_ssm.load(directory)
    measured = {}
    for prompt in prompts:
        ids = torch.randint(0, both.config.vocab_size, (BATCH, prompt), generator=torch.Generator().manual_seed(0))
        works = {
            "one rank": (alone, ids) if rank == 0 else None,
            "TP 2": (both, ids),
            "DP 2": (alone, ids[rank * BATCH // 2 :][: BATCH // 2]),
        }
        for repetition in range(REPETITIONS + 1):
            for who, work in works.items():
                meet(arrived, rank)
                times = torch.tensor(token_times(*work) if work else [0.0] * max(OUTPUTS), dtype=torch.float64)
                meet(arrived, rank)
                dist.all_reduce(times, op=dist.ReduceOp.MAX)
                if repetition:
                    measured.setdefault((prompt, who), []).append(times.tolist())
    if rank == 0:
        torch.save(measured, Path(folder, "measured"))
    dist.barrier()


class Result:
    """The runs of one family and prompt, by contestant, and their medians. measured: what `rank_main` saved."""

    def __init__(self, measured: dict[tuple[int, str], list[list[float]]], prompt: int) -> None:
        self.runs = {who: runs for (length, who), runs in measured.items() if length == prompt}

    def median(self, who: str, of: Callable[[list[float]], float]) -> float:
        """The median over a contestant's runs of a function `of` their token times."""
        return statistics.median(map(of, self.runs[who]))

    def first(self, who: str) -> float:
        """The time to the first token, in seconds."""
        return self.median(who, lambda times: times[0])

    def each(self, who: str) -> float:
        """The time per token after the first one, in seconds."""
        return self.median(who, lambda times: (times[-1] - times[0]) / (len(times) - 1))

    def gain(self, over: str, output: int) -> float:
        """The throughput of TP 2 over that of contestant `over`, for an output of `output` tokens."""
        return self.median(over, lambda t: t[output - 1]) / self.median("TP 2", lambda t: t[output - 1])

    def spread(self) -> float:
        """The relative difference between the medians of TP 2's even and odd runs."""
        totals = [times[-1] for times in self.runs["TP 2"]]
        return abs(statistics.median(totals[::2]) / statistics.median(totals[1::2]) - 1)


def row(family: str, prompt: int, found: Result) -> list[str]:
    """A row of the table."""
    whole = []
    for value, unit in ((found.first, "ms"), (found.each, "ms")):
        times = [value(who) for who in ("one rank", "TP 2", "DP 2")]
        whole.append(f"{times[1] * 1e3:.0f} {unit} ({times[0] / times[1]:.2f}x, {times[2] / times[1]:.2f}x)")
    gains = [" / ".join(f"{found.gain(over, output):.2f}x" for output in OUTPUTS) for over in ("one rank", "DP 2")]
    return [family, str(prompt), *whole, *gains, f"{found.spread():.0%}"]


def main() -> None:
    """Measure every family, publish the table and draw its chart."""
    found = {}
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as directory:
            random_model(family, directory)
            prompts = PROMPTS.get(family, LONG)
            measured = launch(rank_main, directory, prompts)
        found |= {(family, prompt): Result(measured, prompt) for prompt in prompts}
    outputs = " / ".join(map(str, OUTPUTS))
    header = [f"model, batch {BATCH}", "prompt", "TP 2: first token (faster than one rank, than DP 2)",
              "then each (the same)", f"throughput over one rank, {outputs} new", "over DP 2, same", "spread"]  # fmt: skip
    publish("throughput", markdown(header, [*PAPER, *(row(*of, one) for of, one in found.items())]))
    table_charts.draw("throughput")


if __name__ == "__main__":
    main()
