"""Prefill and decode against transformers at the 130m shapes, one thread, by format of the weights (about 3 min).

The claim, for Mamba-1, against transformers in float32: prefill of 256 tokens >= 1.6x, in bf16 >= 4x; decode at batch 1
>= 1.8x, in bf16 >= 2.3x, with int8 weights >= 2.8x. All engines run the same random checkpoint, in turn, in one process;
transformers runs twice, and the difference between its two runs is the spread. "torch" is ours without its C kernels.
"""

import os
import tempfile

os.environ.update(OMP_NUM_THREADS="1")

import torch

import megatron_ssm
from benchmarks.support.shapes import PROMPT, SHAPES, random_model
from benchmarks.support.tables import interleaved, markdown, publish
from megatron_ssm.native import kernels

NEW, REPETITIONS = 16, 10
FORMATS = {"fp32": {}, "bf16": dict(dtype=torch.bfloat16), "int8": dict(weights="int8")}
LIBRARY = kernels.LIBRARY.functions


def without_kernels(function):
    """The function, run on the torch twins of all kernels."""

    def run():
        kernels.LIBRARY.functions = None
        try:
            function()
        finally:
            kernels.LIBRARY.functions = LIBRARY

    return run


def theirs(model, ids):
    """{phase: a repetition of transformers}; decode: NEW tokens after a prompt."""
    output = model(ids, use_cache=True, logits_to_keep=1)
    cache = {name: output[name] for name in ("cache", "cache_params") if name in output}  # renamed in transformers 5.24

    def decode():
        for _ in range(NEW):
            model(ids[:, :1], use_cache=True, **cache)

    return {"prefill": lambda: model(ids, use_cache=True, logits_to_keep=1), "decode": decode}


def ours(model, ids):
    """{phase: a repetition of ours}."""
    cache = model.new_cache(1)
    model(ids, cache=cache, logits_to_keep=1)

    def decode():
        for _ in range(NEW):
            model(ids[:, :1], cache=cache)

    return {"prefill": lambda: model(ids, cache=model.new_cache(1), logits_to_keep=1), "decode": decode}


def contestants(shape):
    """{engine: {phase: function}}."""
    with tempfile.TemporaryDirectory() as directory:
        model = random_model(shape, directory)
        loaded = {name: megatron_ssm.load(directory, **options) for name, options in FORMATS.items()}
    ids = torch.randint(0, SHAPES[shape].vocab_size, (1, PROMPT))
    engines = {"transformers": theirs(model, ids), **{name: ours(each, ids) for name, each in loaded.items()}}
    plain = {phase: without_kernels(function) for phase, function in engines["fp32"].items()}
    return {**engines, "torch": plain, "again": engines["transformers"]}


def row(shape, phase, times) -> list[str]:
    """A line of the table."""
    base = (times["transformers"] + times["again"]) / 2
    spread = f"{abs(times['transformers'] / times['again'] - 1):.1%}"

    def cell(engine):
        seconds = times[engine]
        value = f"{NEW / seconds:.0f} tokens/s" if phase == "decode" else f"{seconds:.2f} s"
        return f"{value} ({base / seconds:.2f}x)"

    first = f"{NEW / base:.1f} tokens/s" if phase == "decode" else f"{base:.2f} s"
    return [shape, phase, first, *(cell(engine) for engine in ("torch", *FORMATS)), spread]


@torch.no_grad()
def main() -> None:
    """Measure both shapes and publish the table."""
    torch.set_num_threads(1)
    rows = []
    for shape in SHAPES:
        engines = contestants(shape)
        for phase in ("prefill", "decode"):
            times = interleaved({name: phases[phase] for name, phases in engines.items()}, REPETITIONS)
            rows.append(row(shape, phase, times))
    header = ["shape", f"prompt {PROMPT}", "transformers", "torch only", "fp32", "bf16", "int8 weights", "spread"]
    publish("speed", markdown(header, rows))


if __name__ == "__main__":
    main()
