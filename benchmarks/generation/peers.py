"""Prefill and decode against llama.cpp, the same weights in each format, Mamba-1 and Mamba-2 (about 30 min).

It needs the packages of the extra `peers`. Both engines read the same random weights of the 130m shapes, and take turns
in one process, with one and with two threads; a turn is a run that is not counted and two that are. The claims, at
equal format and threads: prefill of 256 tokens in fp32 >= 3x as fast, in bf16 >= 5x, with int8 weights >= 4x; decoding
in fp32 >= 1.0x, in bf16 and with int8 weights >= 1.5x, with int4 weights >= 1.2x of Q4_K; and no lower precision of
ours takes more than 1.05x the time of a higher one. Decoding of 8 sequences gives >= 3.5x the tokens of one. In
decoding, one rank of two threads and two ranks of one thread are within 10 %.

The spread is the difference between two equal runs of llama.cpp's F32. The share of the memory's rate is the bytes of the
weights and states that a token reads and writes, per second, relative to a plain sum of a large tensor. A number on the
command line is the only number of threads.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megatron_ssm
from benchmarks.support.pair import launch, meet
from benchmarks.support.shapes import SHAPES, processor, random_model
from benchmarks.support.tables import interleaved, markdown, print_or_publish
from megatron_ssm.kernels.huge_pages import HugePages
from megatron_ssm.kernels.products import instructions

NEW, PROMPTS, REPETITIONS = 16, {256: 10, 1024: 2}, 10  # decoded tokens; {length of a prompt: repetitions}
IN_A_ROW = 2  # repetitions in a turn
SEQUENCES = 8  # that are decoded together
STREAM = 2**27  # floats that are read to measure the memory's rate
OURS = {
    "F32": {},
    "BF16": dict(dtype=torch.bfloat16),
    "Q8_0": dict(weights="int8"),
    "Q4_K": dict(weights="int4"),
}
TITLES = {"F32": "fp32 / F32", "BF16": "bf16 / BF16", "Q8_0": "int8 / Q8_0", "Q4_K": "int4 / Q4_K"}


def engines(shape: str, directory: Path) -> dict[str, tuple[Any, Any]]:
    """{format: (our model, llama.cpp's)} of the same random weights, which stay in `directory`."""
    from benchmarks.support import gguf_files  # needs the extra `peers`

    torch.manual_seed(0)
    gguf_files.write(random_model(shape, directory / "hf"), directory / "F32.gguf")
    found = {}
    for format, options in OURS.items():
        path = directory / f"{format}.gguf"
        if format != "F32":
            gguf_files.quantize(directory / "F32.gguf", path, format)
        theirs = gguf_files.LlamaModel(path, max(PROMPTS))
        found[format] = megatron_ssm.load(directory / "hf", **options), theirs
    return found


def check(ours: megatron_ssm.Model, theirs: Any) -> None:
    """RuntimeError if the logits of the two float32 models differ by more than roundings."""
    ids = torch.arange(1, 40)
    theirs.reset()
    expected, found = theirs(ids.tolist()), ours(ids[None], logits_to_keep=1)[0, 0]
    if not (found - expected).norm() < 0.02 * expected.norm():
        raise RuntimeError(f"llama.cpp's logits differ by {(found - expected).norm() / expected.norm():.1%}")


def our_decoding(model: megatron_ssm.Model, threads: int, sequences: int = 1) -> Callable[[], None]:
    """A function that decodes NEW tokens of each of some sequences, one by one."""
    steps, cache = random_tokens(NEW, sequences, 1), model.new_cache(sequences)

    def decode() -> None:
        torch.set_num_threads(threads)
        for ids in steps:
            model(ids, cache=cache)

    return decode


def random_tokens(*shape: int) -> torch.Tensor:
    """Ids of this shape, the same at each call; equal ones would choose the same experts."""
    return torch.randint(1, 1000, shape, generator=torch.Generator().manual_seed(2))


def runs(ours: megatron_ssm.Model, theirs: Any, threads: int, tokens: int) -> tuple[Callable, Callable]:
    """Functions (ours, theirs) that read a prompt of so many tokens; with 0, that decode NEW tokens one by one."""
    ids = torch.ones(1, tokens or 1, dtype=torch.int64)

    def prefill() -> None:
        torch.set_num_threads(threads)
        ours(ids, cache=ours.new_cache(1), logits_to_keep=1)

    def their_run() -> None:
        theirs.use_threads(threads)
        theirs.reset()
        if tokens:
            theirs(ids[0].tolist())
        for _ in range(0 if tokens else NEW):
            theirs([1])

    return prefill if tokens else our_decoding(ours, threads), their_run


def race(threads: int, tokens: int, models: dict[str, tuple[Any, Any]]) -> tuple[dict[str, tuple[float, float]], str]:
    """{format: median seconds of (ours, theirs)} and the spread; tokens as in `runs`."""
    functions = {}
    for format, (ours, theirs) in models.items():
        functions[f"ours {format}"], functions[f"theirs {format}"] = runs(ours, theirs, threads, tokens)
    functions["again"] = functions["theirs F32"]
    times = interleaved(functions, PROMPTS.get(tokens, REPETITIONS), IN_A_ROW)
    found = {format: (times[f"ours {format}"], times[f"theirs {format}"]) for format in models}
    return found, f"{abs(times['again'] / times['theirs F32'] - 1):.1%}"


def rows_of(shape: str, threads: int, models: dict[str, tuple[Any, Any]], sizes: dict[str, int]) -> list[list[str]]:
    """The rows of the table for a number of threads; sizes: {format: bytes of llama.cpp's file}."""
    rows = []
    for tokens in PROMPTS:
        times, spread = race(threads, tokens, models)
        cells = [f"{ours:.3f} / {theirs:.3f} ({theirs / ours:.2f}x)" for ours, theirs in times.values()]
        rows.append([shape, str(threads), f"prefill {tokens}, s", *cells, spread])
    times, spread = race(threads, 0, models)
    cells = [f"{NEW / ours:.0f} / {NEW / theirs:.0f} ({theirs / ours:.2f}x)" for ours, theirs in times.values()]
    rows.append([shape, str(threads), "decode, tokens/s", *cells, spread])
    rate, cells = memory_rate(threads), []
    for format, (ours, _) in models.items():
        states = 2 * sum(state["state"].nbytes for state in ours.new_cache(1).states.values())
        weights = sum(tensor.nbytes for tensor in (*ours.parameters(), *ours.buffers()))
        pairs = zip((weights, sizes[format]), times[format], strict=True)
        cells.append(" / ".join(f"{(nbytes + states) * NEW / seconds / rate:.0%}" for nbytes, seconds in pairs))
    rows.append([shape, str(threads), f"share of the memory's {rate / 1e9:.1f} GB/s", *cells, ""])
    together = {format: our_decoding(ours, threads, SEQUENCES) for format, (ours, _) in models.items()}
    many = interleaved(together, REPETITIONS, IN_A_ROW)
    cells = [f"{SEQUENCES * NEW / s:.0f} ({SEQUENCES * times[f][0] / s:.2f}x of one)" for f, s in many.items()]
    rows.append([shape, str(threads), f"decode {SEQUENCES} sequences, tokens/s (ours)", *cells, ""])
    return rows


def memory_rate(threads: int) -> float:
    """Bytes per second at which a large tensor is summed."""
    torch.set_num_threads(threads)
    with HugePages():
        stream = torch.empty(STREAM)
    stream.fill_(1)
    return stream.nbytes / interleaved({"read": stream.sum}, REPETITIONS)["read"]


@torch.no_grad()
def rank_main(rank: int, folder: str, arrived: torch.Tensor, directory: str) -> None:
    """Run one of two ranks of one thread. Rank 0 saves {format: median seconds of decoding} in `folder`."""
    dist.init_process_group("gloo", init_method=Path(folder, "store").as_uri(), rank=rank, world_size=2)
    measured = {}
    for format, options in OURS.items():
        with megatron_ssm.load(directory, dist.group.WORLD, **options) as model:
            decode, seconds = our_decoding(model, 1), []
            for _ in range(REPETITIONS + 1):
                meet(arrived, rank)
                start = time.perf_counter()
                decode()
                seconds.append(time.perf_counter() - start)
        measured[format] = statistics.median(seconds[1:])
    if rank == 0:
        torch.save(measured, Path(folder, "measured"))
    dist.barrier()


def row_of_ranks(shape: str, directory: Path, models: dict[str, tuple[Any, Any]]) -> list[str]:
    """The row of two ranks of one thread each; in brackets, relative to one rank of two threads."""
    one = interleaved({format: our_decoding(ours, 2) for format, (ours, _) in models.items()}, REPETITIONS, IN_A_ROW)
    two = launch(rank_main, str(directory / "hf"))
    cells = [f"{NEW / two[f]:.0f} / {NEW / one[f]:.0f} ({one[f] / two[f]:.2f}x)" for f in models]
    return [shape, "2", "decode, tokens/s: 2 ranks x 1 thread / 1 x 2", *cells, ""]


@torch.no_grad()
def main() -> None:
    """Measure both shapes, print the processor, and publish the table."""
    rows, counts = [], list(map(int, sys.argv[1:] or (1, 2)))
    for shape in SHAPES:
        with tempfile.TemporaryDirectory() as temporary:
            torch.set_num_threads(2)
            models = engines(shape, Path(temporary))
            sizes = {format: Path(temporary, f"{format}.gguf").stat().st_size for format in models}
            check(*models["F32"])
            for threads in counts:
                rows += rows_of(shape, threads, models, sizes)
            if 2 in counts:
                rows.append(row_of_ranks(shape, Path(temporary), models))
        print(markdown(["", "", "", *models, ""], rows), flush=True)
        del models
    header = [processor(), "threads", "ours / llama.cpp", *TITLES.values(), "spread"]
    print(f"llama-cpp-python {version('llama-cpp-python')}")
    if instructions() == "AMX":
        print_or_publish("peers", markdown(header, rows))
    elif instructions() in ("VNNI", "AVX512_BF16"):
        print_or_publish("peers-with-vnni", markdown(header, rows))
    else:
        print_or_publish("peers-without-amx", markdown(header, rows))


if __name__ == "__main__":
    main()
