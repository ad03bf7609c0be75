"""Replicas of a server beside one replica with more threads, and beside tensor parallelism, on two cores (about 5 min).

The claim: two replicas of one thread each get at least 1.6x the new tokens a second of one replica with one thread. One
replica with two threads, and one on two tensor-parallel ranks, use the same two cores. CLIENTS clients at a time make the
same requests to each, each client the next one when it has its reply. The servers take turns; numbers are medians of
ROUNDS rounds, with the least and the most of them. Mamba-2 at the 130m shape with random weights in bf16.
"""

import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks.support.served import Work, closed_loop, our_server, started
from benchmarks.support.shapes import processor, random_model
from benchmarks.support.tables import markdown

SHAPE, CLIENTS, ROUNDS, SLOTS = "Mamba-2 130m", 16, 3, 8
PROMPT, NEW, REQUESTS = 128, 64, 48
# {name: (threads of a rank, tensor-parallel ranks, further flags)}; the first one is the base of the ratios
SERVERS: dict[str, tuple[int, int, tuple[object, ...]]] = {
    "one replica, one thread": (1, 1, ()),
    "one replica, two threads": (2, 1, ()),
    "one replica, --tp 2": (1, 2, ()),
    "--replicas 2": (1, 1, ("--replicas", 2)),
}


def work(number: int) -> Work:
    """A request whose prompt begins like no other one."""
    return Work(f"{number:06}" + "x" * (PROMPT - 6), NEW, {"ignore_eos": True})


def main() -> None:
    """Measure and print the table."""
    from benchmarks.support import byte_tokens  # needs the extra `peers`

    speeds: dict[str, list[float]] = {name: [] for name in SERVERS}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        directory = Path(folder) / "model"
        byte_tokens.write_tokenizer(directory, random_model(SHAPE, directory).config.vocab_size)
        urls = {}
        for number, (name, (threads, ranks, flags)) in enumerate(SERVERS.items()):
            command = our_server(directory, ranks, SLOTS, "--dtype", "bfloat16", *flags)
            urls[name] = stack.enter_context(started(command, "/ready", threads, Path(folder) / f"log{number}"))
        for turn in range(ROUNDS + 1):  # the first one is not counted
            for name, url in urls.items():
                run = closed_loop(url, [work(turn * REQUESTS + i) for i in range(REQUESTS)], CLIENTS)
                speeds[name] += [run.throughput] if turn else []
    base = statistics.median(next(iter(speeds.values())))
    rows = [
        [name, f"{statistics.median(found):.0f} ({min(found):.0f} to {max(found):.0f})",
         f"{statistics.median(found) / base:.2f}x"]
        for name, found in speeds.items()
    ]  # fmt: skip
    print(f"{SHAPE}, bf16, {CLIENTS} clients, prompts of {PROMPT} tokens, {NEW} new ones, {processor()}\n")
    print(markdown(["server", "new tokens/s", "ratio"], rows))


if __name__ == "__main__":
    main()
