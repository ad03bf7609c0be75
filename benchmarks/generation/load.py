"""The HTTP server under load, beside llama.cpp's llama-server and transformers, at 130m on two cores (about 25 min).

The claims, with two threads or two ranks: 8 clients at a time get at least 1.2x the new tokens a second of llama-server
at the same format, and the 95th percentile of the time to the first token is no longer. Mamba-2 with the same random
weights everywhere; every server has 8 slots, and no cache of prompts, because no prompt occurs twice.

Lengths of prompts and replies are drawn from the percentiles of the conversations in Azure's LLM inference trace of 2023
(Patel et al., Splitwise, ISCA 2024), divided by SCALE so that two cores can do it. The two parts:

- 8 clients that each make the next request when they have the reply. The servers take turns, with the same requests.
- Requests at random times (a Poisson process) at RATE a second on average, whatever becomes of them. Each round has other
  times, the same for all servers; the offered rate is that of its times. A request meets the objective if its first token
  comes within FIRST_S seconds and the others take EACH_S seconds on average.

Numbers are medians of the rounds, with the least and the most of them.

`llama-server` must be on the PATH; docs/results/index.md says how it is built. transformers has no server for this: it
generates requests of the first part as one batch of 8. Formats on the command line (fp32, bf16, int8) are the only ones that
are measured.
"""

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.support.served import Run, Work, arrivals, closed_loop, open_loop, our_server, started, texts
from benchmarks.support.shapes import processor, random_model
from benchmarks.support.tables import markdown, print_or_publish

SHAPE, CLIENTS, THREADS, LONGEST = "Mamba-2 130m", 8, 2, 1024
# Percentiles of the trace AzureLLMInferenceTrace_conv.csv: 19,366 requests of one hour, on 16 November 2023.
LEVELS = (0.05, 0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99)
PROMPTS = (181, 207, 396, 1020, 1189, 2734, 4083, 4142)
REPLIES = (41, 54, 85, 129, 395, 424, 451, 601)
SCALE = 8
CLOSED_ROUNDS, OF_A_CLOSED_ROUND = 5, 16  # of the first part
OPEN_ROUNDS, REQUESTS, RATE = 3, 30, 1.0  # of the second
FIRST_S, EACH_S = 2.0, 0.2
OURS = {"fp32": ("--dtype", "float32"), "bf16": ("--dtype", "bfloat16"), "int8": ("--weights", "int8")}
PEER = "llama.cpp, llama-server"
THEIRS = {"fp32": "F32", "bf16": "BF16", "int8": "Q8_0"}


@dataclass(frozen=True)
class Server:
    """A contestant: its name, its command, its threads in each process, and the path that answers when it is ready."""

    name: str
    command: list[object]
    threads: int
    ready: str


def servers(format: str, directory: Path) -> list[Server]:
    """The servers that take part with a format of the weights; `directory` has the checkpoint, and the GGUF files."""
    flags = (*OURS[format], "--max-length", LONGEST)
    gguf = directory / f"{THEIRS[format]}.gguf"
    program = shutil.which("llama-server")
    if program is None:
        raise RuntimeError("llama-server is not on the PATH; docs/results/index.md says how it is built")
    llama = [program, "--model", gguf, "--ctx-size", LONGEST * CLIENTS, "--parallel", CLIENTS]
    llama += ["--threads", THREADS, "--threads-batch", THREADS]
    llama += ["--no-cache-prompt", "--cache-ram", 0, "--ctx-checkpoints", 0]
    return [
        Server("two ranks", our_server(directory, 2, CLIENTS, *flags), 1, "/ready"),
        Server("two threads", our_server(directory, 1, CLIENTS, *flags), THREADS, "/ready"),
        Server(PEER, llama, THREADS, "/health"),
    ]


def write_files(directory: Path) -> PreTrainedModel:
    """Write the checkpoint, and the same weights in GGUF in each format; returns transformers' model."""
    from benchmarks.support import byte_tokens, gguf_files  # need the extra `peers`

    model = random_model(SHAPE, directory)
    byte_tokens.write_tokenizer(directory, model.config.vocab_size)
    gguf_files.write(model, directory / "bare.gguf")
    byte_tokens.copy_with_tokenizer(directory / "bare.gguf", directory / "F32.gguf")
    for format in set(THEIRS.values()) - {"F32"}:
        gguf_files.quantize(directory / "F32.gguf", directory / f"{format}.gguf", format)
    return model


def requests(count: int, seed: int) -> list[Work]:
    """`count` requests of random lengths and random letters, the same for the same seed."""
    rng = np.random.default_rng(seed)

    def lengths(values: Sequence[int]) -> list[int]:
        return [max(1, round(value / SCALE)) for value in np.interp(rng.random(count), LEVELS, values)]

    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz      ", dtype=np.uint8)
    return [
        Work(rng.choice(letters, prompt).tobytes().decode(), max(2, reply))
        for prompt, reply in zip(lengths(PROMPTS), lengths(REPLIES), strict=True)
    ]


def compare_replies(urls: dict[str, str]) -> None:
    """ValueError if servers of fp32 weights do not begin a reply with the same tokens."""
    work = Work(requests(1, 10**6)[0].prompt, 8)
    replies = {name: texts(url, [work])[0] for name, url in urls.items()}
    if len(set(replies.values())) > 1:
        raise ValueError(f"the servers' replies differ: {replies}")


def measured(format: str, directory: Path) -> tuple[dict[str, list[Run]], dict[str, list[Run]]]:
    """The rounds of both parts by the names of the servers."""
    with ExitStack() as stack:
        urls = {}
        for server in servers(format, directory):
            log = directory / f"{server.name}.log"
            urls[server.name] = stack.enter_context(started(server.command, server.ready, server.threads, log))
        if format == "fp32":
            compare_replies(urls)
        closed: dict[str, list[Run]] = {name: [] for name in urls}
        opened: dict[str, list[Run]] = {name: [] for name in urls}
        for url in urls.values():
            closed_loop(url, requests(CLIENTS, 10**6), CLIENTS)  # not counted
        for seed in range(CLOSED_ROUNDS):
            for name, url in urls.items():
                closed[name].append(closed_loop(url, requests(OF_A_CLOSED_ROUND, seed), CLIENTS))
        for seed in range(OPEN_ROUNDS):
            for name, url in urls.items():
                opened[name].append(open_loop(url, requests(REQUESTS, 7 + seed), arrivals(REQUESTS, RATE, seed)))
        return closed, opened


def batched(model: Any) -> float:
    """New tokens a second that transformers generates for CLIENTS requests of the first round, as one batch."""
    works = requests(CLIENTS, 0)
    longest = max(len(work.prompt) for work in works)
    ids = torch.tensor([[0] * (longest - len(work.prompt)) + list(work.prompt.encode()) for work in works])
    mask = torch.tensor([[0] * (longest - len(work.prompt)) + [1] * len(work.prompt) for work in works])
    new = max(work.tokens for work in works)
    start = time.perf_counter()
    model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
    return sum(work.tokens for work in works) / (time.perf_counter() - start)


def continuous_error(model: Any) -> str:
    """Why transformers' continuous batching does not generate with this model; "" if it does."""
    try:
        replies = model.generate_batch([[1, 2, 3]], max_new_tokens=2)
        return "" if replies else "there was no reply"
    except Exception as error:  # of any kind
        return f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"


def row(format: str, name: str, runs: list[Run], peer: list[Run] | None, count: int) -> list[str]:
    """A row of a table, without the goodput. Each number is the median of the rounds, with the least and the most of them.

    peer: the rounds of llama-server. count: how many of the percentiles are shown.
    """
    cells = [spread([run.throughput for run in runs])]
    if peer is not None:
        ratios = [run.throughput / theirs.throughput for run, theirs in zip(runs, peer, strict=True)]
        cells.append(spread(ratios, 2, "x"))
    for field, scale, digits in (("first", 1, 2), ("each", 1000, 0)):
        rounds = [run.percentiles(field)[:count] for run in runs]
        cells.append(
            " / ".join(spread([scale * value for value in level], digits) for level in zip(*rounds, strict=True))
        )
    return [format, name, *cells]


def spread(values: Sequence[float], digits: int = 0, unit: str = "") -> str:
    """The median of some values, with the least and the most."""
    least, middle, most = (f"{value:.{digits}f}" for value in (min(values), statistics.median(values), max(values)))
    return f"{middle}{unit} ({least}-{most})"


@torch.no_grad()
def main() -> None:
    """Measure all formats, and publish both tables."""
    torch.set_num_threads(THREADS)
    closed_rows, open_rows = [], []
    offered = spread([REQUESTS / arrivals(REQUESTS, RATE, seed)[-1] for seed in range(OPEN_ROUNDS)], 2)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        torch.manual_seed(0)
        model = write_files(directory)
        for format in sys.argv[1:] or THEIRS:
            closed, opened = measured(format, directory)
            closed_rows += [row(format, name, runs, closed[PEER], 2) for name, runs in closed.items()]
            for name, runs in opened.items():
                within = [run.within(FIRST_S, EACH_S) for run in runs]
                goodput = spread([count / run.seconds for count, run in zip(within, runs, strict=True)], 2)
                share = spread([100 * count / REQUESTS for count in within])
                open_rows.append([*row(format, name, runs, None, 3), offered, goodput, share])
        closed_rows.append(["fp32", "transformers, a batch of 8", f"{batched(model):.0f}", "", "", ""])
        why = continuous_error(model) or "it works"
        closed_rows.append(["fp32", "transformers, continuous batching", why, "", "", ""])
    weights = f"weights, on {processor()}"
    header = [weights, "server", "new tokens/s", "ratio", "first token p50 / p95, s", "each p50 / p95, ms"]
    print_or_publish("clients", markdown(header, closed_rows))
    header = [weights, "server", "new tokens/s", "first token p50 / p95 / p99, s", "each p50 / p95 / p99, ms",
              "requests/s offered", "requests/s within the objective", "% within it"]  # fmt: skip
    print_or_publish("load", markdown(header, open_rows))


if __name__ == "__main__":
    main()
