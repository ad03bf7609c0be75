"""The time of a token by the length of the output, up to 1,024: two ranks against one and two replicas (about 15 min).

The claim: after the first tokens, the time per token does not depend on the length of the output, so neither does the gain
of tensor parallelism (TP 2) over two replicas with half of the batch each (DP 2), in all families but those with attention.
Shapes near 130m in fp32, a prompt of PROMPT tokens, batch BATCH, one thread for each rank, greedy `megatron_ssm.stream`. The
contestants take turns every SEGMENT tokens, so that all of them meet the same machine; a time is that of the slower rank.
The time per token of an output of N tokens is the mean of tokens 2 to N. The spread is that of TP 2 in two halves of the
turns: even and odd segments.

Arguments: families ("Zamba2"), to print their rows only.
"""

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1")

import torch
import torch.distributed as dist

import megatron_ssm
from benchmarks.support.pair import launch, meet
from benchmarks.support.shapes import FIVE_FAMILIES, random_model
from benchmarks.support.tables import markdown, print_or_publish

BATCH, PROMPT, SEGMENT, NEW = 2, 16, 16, 1024
OUTPUTS = (16, 64, 256, 1024)


@torch.no_grad()
def rank_main(rank: int, folder: str, arrived: torch.Tensor, directory: str) -> None:
    """Run one rank. Rank 0 saves {contestant: [seconds of each segment]} in `folder`, those of the slower rank.

    arrived: see `benchmarks.support.pair.meet`.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=Path(folder, "store").as_uri(), rank=rank, world_size=2)
    both, alone = megatron_ssm.load(directory, dist.group.WORLD), megatron_ssm.load(directory)
    ids = torch.randint(0, both.config.vocab_size, (BATCH, PROMPT), generator=torch.Generator().manual_seed(0))
    half = ids[rank * BATCH // 2 :][: BATCH // 2]
    streams: dict[str, Iterator | None] = {
        "one rank": megatron_ssm.stream(alone, ids, max_new_tokens=NEW + 1) if rank == 0 else None,
        "TP 2": megatron_ssm.stream(both, ids, max_new_tokens=NEW + 1),
        "DP 2": megatron_ssm.stream(alone, half, max_new_tokens=NEW + 1),
    }
    measured: dict[str, list[float]] = {who: [] for who in streams}
    for segment in range(1 + NEW // SEGMENT):
        for who, stream in streams.items():
            meet(arrived, rank)
            start = time.perf_counter()
            for _ in range(SEGMENT if segment else 1):  # first the prompt and the first token
                if stream is not None:
                    next(stream)
            seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            meet(arrived, rank)
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            if segment:
                measured[who].append(seconds.item())
    if rank == 0:
        torch.save(measured, Path(folder, "measured"))
    dist.barrier()


def per_token(segments: list[float], output: int) -> float:
    """Seconds per token of an output, without its first token."""
    used = segments[: output // SEGMENT]
    return sum(used) / (len(used) * SEGMENT)


def rows(family: str, measured: dict[str, list[float]]) -> list[list[str]]:
    """The rows of a family: milliseconds of TP 2, and its gains. measured: what `rank_main` saved."""
    halves = [sum(measured["TP 2"][start::2]) for start in (0, 1)]
    rows = [[family, "TP 2, ms", *(f"{per_token(measured['TP 2'], n) * 1e3:.1f}" for n in OUTPUTS)]]
    for who in ("one rank", "DP 2"):
        gains = (per_token(measured[who], n) / per_token(measured["TP 2"], n) for n in OUTPUTS)
        rows.append([family, f"over {who}", *(f"{gain:.2f}x" for gain in gains)])
    return [[*rows[0], f"{max(halves) / min(halves) - 1:.0%}"], *([*each, ""] for each in rows[1:])]


def main() -> None:
    """Measure every family and publish the table."""
    found = {}
    for family in sys.argv[1:] or FIVE_FAMILIES:
        with tempfile.TemporaryDirectory() as directory:
            random_model(family, directory)
            found[family] = launch(rank_main, directory)
    header = [f"batch {BATCH}, prompt {PROMPT}", "per token", *(f"{n} new" for n in OUTPUTS), "spread"]
    print_or_publish("token-time", markdown(header, [row for each in found.items() for row in rows(*each)]))


if __name__ == "__main__":
    main()
