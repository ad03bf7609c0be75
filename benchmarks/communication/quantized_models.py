"""Prefill and decode of 130m models with quantized sums, 2 ranks, fast and slow links (about 12 min; root).

The claim: prefill on a 200 mbit link is >= 1.3x as fast with fp16, and faster still with int8. The models of all formats
are in the same processes and take turns. Times are medians until the slower rank is done. The exact model is measured
twice; the difference is the spread.
"""

import os
import sys
import tempfile

os.environ.update(OMP_NUM_THREADS="1")

import torch
import torch.distributed as dist

import megatron_ssm
from benchmarks.support.cells import cell_arguments, measure_cell, write_result
from benchmarks.support.shapes import PROMPT, SHAPES, random_model
from benchmarks.support.tables import markdown, print_or_publish
from commfabric.fabric.measurement import repetitions, timed

RANKS, NEW, REPETITIONS = 2, 8, 10
RATES = ["200mbit", "1gbit", "none"]
FORMATS = ["fp32", "fp16", "bf16", "int8", "auto"]


@torch.no_grad()
def cell(out: str, directory: str) -> None:
    """What one rank does; the result is {phase: {format: seconds}}."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    models = {format: megatron_ssm.load(directory, group, reduce=format, shared_memory=False) for format in FORMATS}
    models["again"] = models["fp32"]
    ids = torch.randint(0, 50280, (1, PROMPT))
    caches = {name: model.new_cache(1) for name, model in models.items()}
    for name, model in models.items():
        model.local_logits(ids, cache=caches[name], logits_to_keep=1)

    def prefill(model, cache):
        model.local_logits(ids, cache=model.new_cache(1), logits_to_keep=1)

    def decode(model, cache):
        for _ in range(NEW):
            model.local_logits(ids[:, :1], cache=cache)

    seconds = {}
    for phase in (prefill, decode):
        calls = [timed(lambda p=phase, n=name: p(models[n], caches[n])) for name in models]
        medians = repetitions(calls, group, "cpu", REPETITIONS).median(0).values.tolist()
        seconds[phase.__name__] = dict(zip(models, medians, strict=True))
    if dist.get_rank() == 0:
        write_result(out, seconds)
    dist.barrier()
    dist.destroy_process_group()


def rows(name: str, rate: str, measured: dict[str, dict[str, float]]) -> list[list[str]]:
    """The table's rows for one cell: prefill and decode."""
    lines = []
    for phase, seconds in measured.items():
        exact = seconds["fp32"]
        per = f"{exact:.2f} s" if phase == "prefill" else f"{exact / NEW * 1e3:.1f} ms/token"
        gains = [f"{exact / seconds[format]:.2f}x" for format in FORMATS[1:]]
        lines.append([name, rate, phase, per, *gains, f"{abs(seconds['again'] / exact - 1):.0%}"])
    return lines


def main() -> None:
    """Measure all links and publish the table; print those that the command line names ("200mbit")."""
    rates = sys.argv[1:] or RATES
    table = []
    for shape in SHAPES:
        with tempfile.TemporaryDirectory() as directory:
            random_model(shape, directory)
            for rate in rates:
                table += rows(shape, rate, measure_cell(__file__, RANKS, rate, directory))
    header = ["shape, 2 ranks", "link", f"prompt {PROMPT}", "exact", *FORMATS[1:], "spread"]
    print_or_publish("quantized-models", markdown(header, table))


if __name__ == "__main__":
    arguments = cell_arguments()
    main() if arguments is None else cell(*arguments)
