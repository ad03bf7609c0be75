"""How much quantized all-reduces add to throughput, by prompt and output: the paper's Fig. 9 (about 14 min; root).

The claim: with 256 tokens in and 16 out, over links of 200 mbit, fp16 sums give >= 1.1x the throughput. Mamba-1 of the 130m
shape and the two other families for which the paper gives a number, at batch 1, over links of 1 gbit and 200 mbit. Reading
a prompt and decoding are measured in turn with exact, fp16 and int8 sums (medians of 15). An output of n tokens takes the
time of reading the prompt and n - 1 times that of decoding a token. The exact model runs twice: gains are over the mean of
both runs, and their difference is the spread.
"""

import os
import tempfile

os.environ.update(OMP_NUM_THREADS="1")

import torch
import torch.distributed as dist

import megatron_ssm
from benchmarks.support import table_charts
from benchmarks.support.cells import cell_arguments, measure_cell, write_result
from benchmarks.support.shapes import random_model
from benchmarks.support.tables import markdown, publish
from commfabric.fabric.measurement import repetitions, timed

RANKS, NEW, REPETITIONS = 2, 8, 15
LINKS, FORMATS, OUTPUTS = ("1gbit", "200mbit"), ("fp32", "fp16", "int8"), (16, 64, 256)
PROMPTS = {"Mamba-1 130m": (64, 128, 256), "Falcon-Mamba": (256,), "Zamba": (256,)}
PAPER = [["Mamba, the paper's", "A6000, PCIe", "64 to 256", "fp16", "1.03 to 1.12x", "", "1.12x at 256 in", ""],
         ["Mamba, the paper's", "A100, NVLink", "64 to 256", "fp16", "1.03 to 1.10x", "", "1.10x at 256 in", ""],
         ["Falcon-Mamba, Zamba, the paper's", "", "", "fp16", "1.12 to 1.18x", "", "", ""]]  # fmt: skip


@torch.no_grad()
def cell(out: str, shape: str, directory: str) -> None:
    """Run one rank. Rank 0 writes {"PROMPT FORMAT": seconds} to `out`; with PROMPT 0, the seconds of a decoded token."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    models = {name: megatron_ssm.load(directory, group, reduce=name, shared_memory=False) for name in FORMATS}
    models["again"] = models["fp32"]
    caches = {name: model.new_cache(1) for name, model in models.items()}
    prompts = PROMPTS[shape]
    ids = torch.randint(0, 50280, (1, max(prompts)), generator=torch.Generator().manual_seed(0))

    def read(name: str, prompt: int) -> None:
        models[name].local_logits(ids[:, :prompt], cache=models[name].new_cache(1), logits_to_keep=1)

    def decode(name: str) -> None:
        for _ in range(NEW):
            models[name].local_logits(ids[:, :1], cache=caches[name])

    for name in models:
        models[name].local_logits(ids, cache=caches[name], logits_to_keep=1)
    calls = {f"{prompt} {name}": timed(lambda n=name, p=prompt: read(n, p)) for prompt in prompts for name in models}
    calls |= {f"0 {name}": timed(lambda n=name: decode(n)) for name in models}
    medians = repetitions(list(calls.values()), group, "cpu", REPETITIONS).median(0).values.tolist()
    if dist.get_rank() == 0:
        write_result(out, {of: s / (NEW if of.startswith("0 ") else 1) for of, s in zip(calls, medians, strict=True)})
    dist.barrier()
    dist.barrier()
    dist.destroy_process_group()


def gain(seconds: dict[str, float], prompt: int, output: int, name: str) -> float:
    """The throughput with format `name` over that with exact sums. seconds: what `cell` wrote."""
    exact, again, quantized = (whole(seconds, prompt, output, each) for each in ("fp32", "again", name))
    return (exact + again) / 2 / quantized


def whole(seconds: dict[str, float], prompt: int, output: int, name: str) -> float:
    """The seconds of reading a prompt and decoding an output."""
    return seconds[f"{prompt} {name}"] + (output - 1) * seconds[f"0 {name}"]


def spread(seconds: dict[str, float], prompt: int) -> str:
    """The largest difference between the two exact runs."""
    pairs = ([whole(seconds, prompt, output, name) for name in ("fp32", "again")] for output in OUTPUTS)
    return f"{max(max(pair) / min(pair) for pair in pairs) - 1:.0%}"


def main() -> None:
    """Measure on both links; publish the table and draw its chart."""
    measured = {}
    for shape in PROMPTS:
        with tempfile.TemporaryDirectory() as directory:
            random_model(shape, directory)
            measured |= {(shape, link): measure_cell(__file__, RANKS, link, shape, directory) for link in LINKS}
    rows = [
        [
            shape,
            link,
            str(prompt),
            name,
            *(f"{gain(seconds, prompt, output, name):.2f}x" for output in OUTPUTS),
            spread(seconds, prompt),
        ]
        for (shape, link), seconds in measured.items()
        for prompt in PROMPTS[shape]
        for name in FORMATS[1:]
    ]
    header = ["batch 1", "link", "prompt", "sums", *(f"{output} new" for output in OUTPUTS), "spread"]
    publish("quantized-throughput", markdown(header, PAPER + rows))
    table_charts.draw("quantized-throughput")


if __name__ == "__main__":
    arguments = cell_arguments()
    main() if arguments is None else cell(*arguments)
