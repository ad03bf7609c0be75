"""The time of each part of a block and of its messages: five families, a decoded token and a prompt (about 6 min).

The claim: on two ranks, products with weights are the largest part of a decoded token, and messages through shared memory
take less than a third of it; over gloo they take more than half. Shapes near 130m in fp32, one thread for each rank, batch
1. The operations of the model's tape are run one part after the other and timed on rank 0. A message includes the time
until the other rank sends its own. Two ranks read prompts without a tape, so the parts of a prompt are those of one rank,
and of two ranks only the messages are timed. Medians over TURNS turns.

Arguments: families ("Zamba2"), to print their rows only.
"""

import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import groupby
from typing import Any
from unittest.mock import patch

os.environ.update(OMP_NUM_THREADS="1")

import torch
import torch.distributed as dist

import megatron_ssm
from benchmarks.support.cells import cell_arguments, measure_cell, write_result
from benchmarks.support.shapes import FIVE_FAMILIES, PROMPT, random_model
from benchmarks.support.tables import markdown, print_or_publish
from megatron_ssm.layers.tape_run import BoundCall, Section
from megatron_ssm.parallel.ranks import Ranks

TURNS, TOKENS = 5, 8  # turns; decoded tokens of each
LINKS = ("shared memory", "gloo")
PARTS = ("norms, sums", "in_proj", "convolution", "x_proj, dt", "scan", "gated norm", "out_proj", "shared block",
         "embedding, head")  # fmt: skip
PART_OF = {
    **dict.fromkeys(("norm", "residual", "convert", "add"), "norms, sums"),
    **dict.fromkeys(("head_matmuls", "step_sizes", "inner_norms"), "x_proj, dt"),
    **dict.fromkeys(("ssd", "selective_scan"), "scan"),
    **dict.fromkeys(("embed", "logits"), "embedding, head"),
    "conv": "convolution", "gated_norm": "gated norm", "sum": "messages",
}  # fmt: skip


def parts_of(names: list[str], section: Section) -> Iterator[tuple[str, Section]]:
    """(part, its consecutive operations) of a section of a tape. names: of its operations, "layers.3.mixer conv"."""
    found, seen = [], set()
    for name in names[section.start : section.stop]:
        path, kind = name.split()[:2] if name.startswith("layers.") else ("", name.split()[0])
        if path.endswith(".use") and kind != "sum":
            found.append("shared block")
        elif kind == "matmul":
            found.append("out_proj" if path in seen else "in_proj")
            seen.add(path)
        else:
            found.append(PART_OF[kind])
    start = section.start
    for part, group in groupby(found):
        stop = start + len(list(group))
        yield part, Section(start, stop)
        start = stop


@contextmanager
def timed_parts() -> Iterator[Counter]:
    """Within it, calls of tapes add the seconds of their parts to the result."""
    seconds: Counter = Counter()
    run = BoundCall.run

    def timed_run(call: BoundCall, section: Section) -> tuple[int, float]:
        start = time.perf_counter()
        code = run(call, section)
        return code, time.perf_counter() - start

    def run_parts(call: BoundCall, section: Section) -> int:
        lengths, code = call.cache.lengths.clone(), 0
        for part, operations in parts_of(call.tape.builder.names, section):
            _, of_empty = timed_run(call, Section(operations.start, operations.start))
            call.cache.lengths.copy_(lengths)  # every run of a tape that decodes advances them
            code, taken = timed_run(call, operations)
            if operations.stop < section.stop:
                call.cache.lengths.copy_(lengths)
            seconds[part] += taken - of_empty
        return code

    with patch.object(BoundCall, "run", run_parts):
        yield seconds


@contextmanager
def timed_messages() -> Iterator[Counter]:
    """Within it, sums over the ranks in Python add their seconds to the result."""
    seconds: Counter = Counter()

    def timed(method: Callable) -> Callable:
        @wraps(method)
        def call(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = method(*arguments)
            seconds["messages"] += time.perf_counter() - start
            return result

        return call

    names = ("all_reduce_exact", "all_reduce_in_format", "reduce_beside")
    with patch.multiple(Ranks, **{name: timed(getattr(Ranks, name)) for name in names}):
        yield seconds


def medians(turns: list[dict[str, float]]) -> dict[str, float]:
    """The median of each part over the turns."""
    return {part: statistics.median(turn[part] for turn in turns) for part in turns[0]}


@torch.no_grad()
def cell(out: str, link: str, directory: str) -> None:
    """Run one rank. Rank 0 writes {"decode", "prompt" or "prompt, one rank": {part: seconds}}, with the "whole"."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = megatron_ssm.load(directory, dist.group.WORLD, shared_memory=link == LINKS[0])
    ids, results = torch.zeros(1, PROMPT, dtype=torch.int64), {}
    cache = model.new_cache(1, PROMPT + 2 * (TURNS + 1) * TOKENS)
    model.local_logits(ids, cache=cache, logits_to_keep=1)

    def decode() -> None:
        for _ in range(TOKENS):
            model.local_logits(ids[:, :1], cache=cache)

    def read(model: megatron_ssm.Model = model) -> None:
        model.local_logits(ids, cache=model.new_cache(1), logits_to_keep=1)

    results["decode"] = {part: s / TOKENS for part, s in measure(decode, timed_parts).items()}
    results["prompt"] = measure(read, timed_messages)
    if dist.get_rank() == 0:
        if link == LINKS[0]:
            alone = megatron_ssm.load(directory)
            results["prompt, one rank"] = measure(lambda: read(alone), timed_parts)
        write_result(out, results)
    dist.barrier()
    dist.barrier()
    dist.destroy_process_group()


def measure(function: Callable[[], None], timer: Callable) -> dict[str, float]:
    """Medians of the seconds of the parts of function(), and of all of it without a timer; the two take turns."""
    turns = []
    for _ in range(TURNS + 1):
        start = time.perf_counter()
        function()
        whole = time.perf_counter() - start
        with timer() as seconds:
            function()
        turns.append({**seconds, "whole": whole})
    return medians(turns[1:])


def row(family: str, link: str, found: dict[str, float], columns: tuple[str, ...]) -> list[str]:
    """A row: milliseconds of each part with its share of their sum, and of the whole."""
    total = sum(found.get(part, 0.0) for part in columns)
    cells = [f"{found[part] * 1e3:.2f} ({found[part] / total:.0%})" if part in found else "-" for part in columns]
    return [family, link, *cells, f"{total * 1e3:.1f} / {found['whole'] * 1e3:.1f}"]


def main() -> None:
    """Measure and publish both tables."""
    decoded, prompts, names = [], [], sys.argv[1:] or FIVE_FAMILIES
    for family in names:
        with tempfile.TemporaryDirectory() as directory:
            random_model(family, directory)
            found = {link: measure_cell(__file__, 2, None, link, directory) for link in LINKS}
        decoded += [row(family, link, found[link]["decode"], (*PARTS, "messages")) for link in LINKS]
        both = [found[link]["prompt"] for link in LINKS]
        messages = [f"{each['messages'] * 1e3:.0f} of {each['whole'] * 1e3:.0f}" for each in both]
        name, _, *cells = row(family, "", found[LINKS[0]]["prompt, one rank"], PARTS[:-1])
        prompts.append([name, *cells, *messages])
    header = ["ms of a token after 256, 2 ranks", "messages by", *PARTS, "messages", "sum / whole"]
    print_or_publish("parts-decode", markdown(header, decoded))
    header = [f"ms of a prompt of {PROMPT}, one rank", *PARTS[:-1], "sum / whole",
              *(f"messages of 2 ranks, {link}" for link in LINKS)]  # fmt: skip
    print_or_publish("parts-prompt", markdown(header, prompts))


if __name__ == "__main__":
    arguments = cell_arguments()
    main() if arguments is None else cell(*arguments)
