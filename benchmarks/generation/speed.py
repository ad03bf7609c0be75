"""Prefill and decode of three models against transformers, one thread, by format of the weights (about 5 min).

The claim, for Mamba-1 and compared with transformers in float32: prefill of 256 tokens is >= 1.6x as fast, in bf16 >= 4x;
decode at batch 1 is >= 1.8x as fast, in bf16 >= 2.3x, with int8 weights >= 2.8x. All engines run the same random checkpoint
in turn, in one process. transformers runs twice, and the difference of its two times is the spread. "torch" is megatron_ssm
without its C kernels.
"""

import os
import tempfile
from collections.abc import Callable
from typing import Any

os.environ.update(OMP_NUM_THREADS="1")

import torch

import megatron_ssm
from benchmarks.support import table_charts
from benchmarks.support.shapes import PROMPT, SHAPES, random_model
from benchmarks.support.tables import interleaved, markdown, publish
from megatron_ssm.kernels import kernels

COMPARED = ("Granite 4.0 H", *SHAPES)  # a hybrid, and Mamba
NEW, REPETITIONS = 16, 10
FORMATS = {
    "fp32": {},
    "bf16": dict(dtype=torch.bfloat16),
    "int8": dict(weights="int8"),
    "int4": dict(weights="int4"),
}
LIBRARY = kernels.LIBRARY.functions


def without_kernels(function: Callable[[], Any]) -> Callable[[], None]:
    """A function that calls `function` without C kernels, so that torch's equivalents run."""

    def run() -> None:
        kernels.LIBRARY.functions = None
        try:
            function()
        finally:
            kernels.LIBRARY.functions = LIBRARY

    return run


def theirs(model: Any, ids: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """{phase: function that runs it once with transformers}; decode: NEW tokens after a prompt."""
    output = model(ids, use_cache=True, logits_to_keep=1)
    names = ("cache", "past_key_values", "cache_params")  # by version and family
    cache = {name: output[name] for name in names if name in output}

    def decode() -> None:
        for _ in range(NEW):
            model(ids[:, :1], use_cache=True, **cache)

    return {"prefill": lambda: model(ids, use_cache=True, logits_to_keep=1), "decode": decode}


def ours(model: megatron_ssm.Model, ids: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """{phase: function that runs it once with megatron_ssm}."""
    cache = model.new_cache(1)
    model(ids, cache=cache, logits_to_keep=1)

    def decode() -> None:
        for _ in range(NEW):
            model(ids[:, :1], cache=cache)

    return {"prefill": lambda: model(ids, cache=model.new_cache(1), logits_to_keep=1), "decode": decode}


def contestants(shape: str) -> dict[str, dict[str, Callable[[], Any]]]:
    """{engine: {phase: function that runs it once}}."""
    with tempfile.TemporaryDirectory() as directory:
        model = random_model(shape, directory)
        loaded = {name: megatron_ssm.load(directory, **options) for name, options in FORMATS.items()}
    ids = torch.randint(0, model.config.vocab_size, (1, PROMPT))
    engines = {"transformers": theirs(model, ids), **{name: ours(each, ids) for name, each in loaded.items()}}
    plain = {phase: without_kernels(function) for phase, function in engines["fp32"].items()}
    return {**engines, "torch": plain, "again": engines["transformers"]}


def row(shape: str, phase: str, times: dict[str, float]) -> list[str]:
    """A row of the table. times: seconds by engine."""
    base = (times["transformers"] + times["again"]) / 2
    spread = f"{abs(times['transformers'] / times['again'] - 1):.1%}"

    def cell(engine: str) -> str:
        seconds = times[engine]
        value = f"{NEW / seconds:.0f} tokens/s" if phase == "decode" else f"{seconds:.2f} s"
        return f"{value} ({base / seconds:.2f}x)"

    first = f"{NEW / base:.1f} tokens/s" if phase == "decode" else f"{base:.2f} s"
    return [shape, phase, first, *(cell(engine) for engine in ("torch", *FORMATS)), spread]


@torch.no_grad()
def main() -> None:
    """Measure the models and publish the table and its chart."""
    torch.set_num_threads(1)
    rows = []
    for shape in COMPARED:
        engines = contestants(shape)
        for phase in ("prefill", "decode"):
            times = interleaved({name: phases[phase] for name, phases in engines.items()}, REPETITIONS)
            rows.append(row(shape, phase, times))
    header = [
        "shape",
        f"prompt {PROMPT}",
        "transformers",
        "torch only",
        "fp32",
        "bf16",
        "int8 weights",
        "int4 weights",
        "spread",
    ]
    publish("speed", markdown(header, rows))
    table_charts.draw("speed")


if __name__ == "__main__":
    main()
