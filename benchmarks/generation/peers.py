"""Prefill and decode against llama.cpp, the same weights in each format, Mamba-1 and Mamba-2 (about 25 min).

It needs the packages of the extra `peers`. Both engines read the same random weights of the 130m shapes, and take turns in
one process, with one and with two threads. The claims, at equal format and threads: prefill of 256 tokens in fp32 >= 3x as
fast, in bf16 >= 5x, with int8 weights >= 4x; decoding in fp32 >= 1.0x, in bf16 and with int8 weights >= 1.5x, with int4
weights >= 1.2x of Q4_K; and no lower precision of ours takes more than 1.05x the time of a higher one. The spread is the
difference between two equal runs of llama.cpp's F32. A number on the command line is the only number of threads.
"""

import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import megatron_ssm
from benchmarks.support.shapes import SHAPES, random_model
from benchmarks.support.tables import interleaved, markdown, print_or_publish
from megatron_ssm.diagnostics.doctor import cpu_model
from megatron_ssm.native.products import has_integer_products, has_tile_products

NEW, PROMPTS = 16, {256: 10, 1024: 5}  # decoded tokens; {length of a prompt: repetitions}
OURS = {
    "F32": {},
    "BF16": dict(dtype=torch.bfloat16),
    "Q8_0": dict(weights="int8"),
    "Q4_K": dict(weights="int4"),
}
TITLES = {"F32": "fp32 / F32", "BF16": "bf16 / BF16", "Q8_0": "int8 / Q8_0", "Q4_K": "int4 / Q4_K"}


def engines(shape: str, directory: Path) -> dict[str, tuple[Any, Any]]:
    """{format: (our model, llama.cpp's)} of the same random weights."""
    from benchmarks.support import gguf_files  # needs the extra `peers`

    torch.manual_seed(0)
    model = random_model(shape, directory / "hf")
    gguf_files.write(model, directory / "F32.gguf")
    found = {}
    for format, options in OURS.items():
        path = directory / f"{format}.gguf"
        if format != "F32":
            gguf_files.quantize(directory / "F32.gguf", path, format)
        theirs = gguf_files.LlamaModel(path, SHAPES[shape].vocab_size, max(PROMPTS))
        found[format] = megatron_ssm.load(directory / "hf", **options), theirs
    return found


def check(ours: megatron_ssm.Model, theirs: Any) -> None:
    """RuntimeError if the logits of the two float32 models differ by more than roundings."""
    ids = torch.arange(1, 40)
    theirs.reset()
    expected, found = theirs(ids.tolist()), ours(ids[None], logits_to_keep=1)[0, 0]
    if not (found - expected).norm() < 0.02 * expected.norm():
        raise RuntimeError(f"llama.cpp's logits differ by {(found - expected).norm() / expected.norm():.1%}")


def runs(ours: megatron_ssm.Model, theirs: Any, threads: int, tokens: int) -> tuple[Callable, Callable]:
    """Functions (ours, theirs) that read a prompt of so many tokens; with 0, that decode NEW tokens one by one."""
    ids, cache = torch.ones(1, tokens or 1, dtype=torch.int64), ours.new_cache(1)

    def our_run() -> None:
        torch.set_num_threads(threads)
        if tokens:
            ours(ids, cache=ours.new_cache(1), logits_to_keep=1)
        for _ in range(0 if tokens else NEW):
            ours(ids, cache=cache)

    def their_run() -> None:
        theirs.use_threads(threads)
        theirs.reset()
        if tokens:
            theirs(ids[0].tolist())
        for _ in range(0 if tokens else NEW):
            theirs([1])

    return our_run, their_run


def row(shape: str, threads: int, tokens: int, models: dict[str, tuple[Any, Any]]) -> list[str]:
    """A row of the table; tokens as in `runs`."""
    functions = {}
    for format, (ours, theirs) in models.items():
        functions[f"ours {format}"], functions[f"theirs {format}"] = runs(ours, theirs, threads, tokens)
    functions["again"] = functions["theirs F32"]
    times = interleaved(functions, PROMPTS.get(tokens, 10))

    def shown(seconds: float) -> str:
        return f"{seconds:.3f}" if tokens else f"{NEW / seconds:.0f}"

    cells = [
        f"{shown(times[f'ours {format}'])} / {shown(times[f'theirs {format}'])} "
        f"({times[f'theirs {format}'] / times[f'ours {format}']:.2f}x)"
        for format in models
    ]
    what = f"prefill {tokens}, s" if tokens else "decode, tokens/s"
    return [shape, str(threads), what, *cells, f"{abs(times['again'] / times['theirs F32'] - 1):.1%}"]


@torch.no_grad()
def main() -> None:
    """Measure both shapes, print the processor, and publish the table."""
    torch.set_num_threads(2)
    rows = []
    for shape in SHAPES:
        with tempfile.TemporaryDirectory() as temporary:
            models = engines(shape, Path(temporary))
        check(*models["F32"])
        for threads in map(int, sys.argv[1:] or (1, 2)):
            for tokens in (*PROMPTS, 0):
                rows.append(row(shape, threads, tokens, models))
                print(*rows[-1], sep=" | ", flush=True)
        del models
    where = cpu_model() + (", AMX" if has_tile_products() else ", VNNI" if has_integer_products() else "")
    header = [where, "threads", "ours / llama.cpp", *TITLES.values(), "spread"]
    print(f"llama-cpp-python {version('llama-cpp-python')}")
    print_or_publish("peers", markdown(header, rows))


if __name__ == "__main__":
    main()
