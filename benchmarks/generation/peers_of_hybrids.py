"""Prefill and decode of hybrids against llama.cpp and transformers, the same weights in each format (about 20 min).

It needs the packages of the extra `peers`. Random weights of 100 to 200 million parameters of Nemotron-H, Granite 4.0 H,
Falcon-H1, Jamba and Qwen3.5, of 340 million of Granite and Qwen3-Next with experts, and of Qwen3.5's published 0.8B shape,
which is only decoded. Ours and llama.cpp's take turns in one process, on two threads; the first tokens that both choose
greedily are compared before. The claims, at equal format and threads, without AMX: prefill of 256 tokens in fp32 and bf16
>= 1.2x as fast, with int8 weights >= 1.8x; decoding in fp32 >= 1.0x, in bf16 and with int8 weights >= 1.4x, with int4
weights >= 1.2x of Q4_K; decoding >= 3x as fast as transformers. Of Qwen3.5, decoding in bf16 >= 1.05x, with int8 and int4
weights >= 1.2x. Of models with experts: prefill >= 1.1x, decoding in fp32 >= 1.0x, in bf16 >= 1.05x, with int8 and int4
weights >= 1.15x, and of 8 sequences >= 2x of one.
Arguments: names of models, and numbers of threads.
"""

import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import megatron_ssm
from benchmarks.support.shapes import HYBRIDS, processor, random_model
from benchmarks.support.tables import interleaved, markdown, print_or_publish

PROMPT, CONTEXTS, REPETITIONS, GREEDY = 256, (256, 2048), 6, 8
IN_A_ROW, NEW, SEQUENCES = 2, 16, 8  # repetitions in a turn; decoded tokens; sequences that are decoded together
OURS = {
    "F32": {},
    "BF16": dict(dtype=torch.bfloat16),
    "Q8_0": dict(weights="int8"),
    "Q4_K": dict(weights="int4"),
}
TITLES = {"F32": "fp32 / F32", "BF16": "bf16 / BF16", "Q8_0": "int8 / Q8_0", "Q4_K": "int4 / Q4_K"}
WITH_EXPERTS = ("Granite 4.0 H, experts", "Qwen3-Next")
PROMPTS = {"Qwen3.5": (256, 4096), "Qwen3.5 0.8B": ()} | dict.fromkeys(WITH_EXPERTS, (256, 2048))  # if not only PROMPT
FORMATS = {"Qwen3.5 0.8B": ("BF16", "Q4_K")}  # where they are not all of OURS


def engines(shape: str, directory: Path) -> tuple[dict[str, tuple[Any, Any]], Any]:
    """{format: (our model, llama.cpp's)} of the same random weights, and transformers' model."""
    from benchmarks.support import gguf_files, gguf_hybrids  # needs the extra `peers`

    torch.manual_seed(0)
    theirs = random_model(shape, directory / "hf")
    gguf_hybrids.write(directory / "hf", directory / "F32.gguf")
    found = {}
    for format in FORMATS.get(shape, OURS):
        options = OURS[format]
        path = directory / f"{format}.gguf"
        if format != "F32":
            gguf_files.quantize(directory / "F32.gguf", path, format)
        llama = gguf_files.LlamaModel(path, max(*CONTEXTS, *PROMPTS.get(shape, ())) + 64)
        found[format] = megatron_ssm.load(directory / "hf", **options), llama
    return found, theirs


def check(ours: megatron_ssm.Model, theirs: Any) -> None:
    """RuntimeError unless both choose the same tokens, greedily, in float32."""
    prompt = torch.randint(1, 1000, (1, 40), generator=torch.Generator().manual_seed(1))
    wanted = megatron_ssm.generate(ours, prompt, max_new_tokens=GREEDY)[0].tolist()
    theirs.reset()
    logits, found = theirs(prompt[0].tolist()), []
    for _ in range(GREEDY):
        found.append(int(logits.argmax()))
        logits = theirs([found[-1]])
    if found != wanted:
        raise RuntimeError(f"llama.cpp chooses {found}, not {wanted}")


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


def prefills(ours: megatron_ssm.Model, theirs: Any, threads: int, prompt: int) -> tuple[Callable, Callable]:
    """Functions (ours, theirs) that read a prompt."""
    ids = random_tokens(1, prompt)

    def read() -> None:
        torch.set_num_threads(threads)
        ours(ids, cache=ours.new_cache(1, prompt), logits_to_keep=1)

    def their_read() -> None:
        theirs.use_threads(threads)
        theirs.reset()
        theirs(ids[0].tolist())

    return read, their_read


def decodings(ours: megatron_ssm.Model, theirs: Any, threads: int, context: int) -> tuple[Callable, Callable]:
    """Functions (ours, theirs) that decode NEW tokens after `context` others; each call continues the last one."""
    ids, cache = random_tokens(1, context), ours.new_cache(1, context + 64 * NEW)
    ours(ids, cache=cache, logits_to_keep=1)
    theirs.reset()
    theirs(ids[0].tolist())
    steps = random_tokens(NEW, 1, 1)

    def decode() -> None:
        torch.set_num_threads(threads)
        for one in steps:
            ours(one, cache=cache)

    def their_decode() -> None:
        theirs.use_threads(threads)
        for token in steps.flatten().tolist():
            theirs([token])

    return decode, their_decode


def rows_of(shape: str, threads: int, models: dict[str, tuple[Any, Any]]) -> list[list[str]]:
    """The rows of the table for a number of threads."""
    rows = []
    for prompt in PROMPTS.get(shape, (PROMPT,)):
        functions: dict[str, Callable] = {}
        for format, pair in models.items():
            functions[f"ours {format}"], functions[f"theirs {format}"] = prefills(*pair, threads, prompt)
        times = interleaved(functions, REPETITIONS if prompt == PROMPT else 2, IN_A_ROW)
        cells = [_pair(times[f"ours {f}"], times[f"theirs {f}"], "s") for f in models]
        rows.append([shape, str(threads), f"prefill {prompt:,}, s", *cells])
    for context in CONTEXTS if len(models) == len(OURS) else CONTEXTS[:1]:
        cells = []
        for pair in models.values():  # one after the other: each has one cache
            ours, theirs = decodings(*pair, threads, context)
            times = interleaved({"ours": ours, "theirs": theirs}, REPETITIONS, 1)
            cells.append(_pair(times["ours"], times["theirs"], "tokens"))
        rows.append([shape, str(threads), f"decode after {context}, tokens/s", *_in_columns(models, cells)])
    if shape in WITH_EXPERTS:
        cells = []
        for ours, _ in models.values():
            functions = {str(n): our_decoding(ours, threads, n) for n in (1, SEQUENCES)}
            times = interleaved(functions, REPETITIONS, 1)
            one, many = (int(n) * NEW / times[n] for n in functions)
            cells.append(f"{many:.0f} ({many / one:.2f}x of one)")
        rows.append(
            [shape, str(threads), f"decode {SEQUENCES} sequences, tokens/s (ours)", *_in_columns(models, cells)]
        )
    return rows


def _in_columns(models: dict, cells: list[str]) -> list[str]:
    """The cells of all formats, empty where there is no model."""
    return [dict(zip(models, cells, strict=True)).get(format, "") for format in OURS]


def _pair(ours: float, theirs: float, what: str) -> str:
    shown = f"{ours:.3f} / {theirs:.3f}" if what == "s" else f"{NEW / ours:.0f} / {NEW / theirs:.0f}"
    return f"{shown} ({theirs / ours:.2f}x)"


def row_of_transformers(shape: str, threads: int, ours: megatron_ssm.Model, theirs: Any) -> list[str]:
    """Decoding in float32 beside transformers."""
    ids = torch.ones(1, PROMPT, dtype=torch.int64)
    output = theirs(ids, use_cache=True)
    state = [output]

    def their_decode() -> None:
        torch.set_num_threads(threads)
        for _ in range(NEW):
            name = next(n for n in ("cache", "past_key_values", "cache_params") if n in state[0])
            state[0] = theirs(ids[:, :1], use_cache=True, **{name: state[0][name]})

    cache = ours.new_cache(1, PROMPT + 64 * NEW)
    ours(ids, cache=cache, logits_to_keep=1)

    def decode() -> None:
        torch.set_num_threads(threads)
        for _ in range(NEW):
            ours(ids[:, :1], cache=cache)

    times = interleaved({"ours": decode, "theirs": their_decode}, 3, 1)
    cell = _pair(times["ours"], times["theirs"], "tokens")
    return [shape, str(threads), "decode, tokens/s: ours / transformers", cell, "", "", ""]


@torch.no_grad()
def main() -> None:
    """Measure all shapes, print the processor, and publish the table."""
    rows, counts = [], [int(each) for each in sys.argv[1:] if each.isdecimal()] or [2]
    for shape in [each for each in sys.argv[1:] if not each.isdecimal()] or HYBRIDS:
        with tempfile.TemporaryDirectory() as temporary:
            torch.set_num_threads(2)
            models, transformers_model = engines(shape, Path(temporary))
            if "F32" in models:
                check(*models["F32"])
            for threads in counts:
                rows += rows_of(shape, threads, models)
            if "F32" in models:
                rows.append(row_of_transformers(shape, counts[-1], models["F32"][0], transformers_model))
        print(markdown(["", "", "", *OURS], rows), flush=True)
        del models, transformers_model
    header = [processor(), "threads", "ours / llama.cpp", *TITLES.values()]
    print(f"llama-cpp-python {version('llama-cpp-python')}")
    print_or_publish("peers-of-hybrids", markdown(header, rows))


if __name__ == "__main__":
    main()
