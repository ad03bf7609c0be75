"""The batch raised until memory ends, beside the formula: five families, one rank and two (about 15 min).

The claim: the largest batch that a rank with LIMIT bytes can read and decode is at least 0.9 and at most 1.2 times that of
the formula of `megatron_ssm.model.memory`. Shapes near 130m with random weights in bf16, states in fp32. A rank may have
LIMIT bytes of anonymous memory: its weights, and the growth to its peak while it reads prompts of PROMPT tokens and decodes
NEW more. The batch is raised by a twenty-fifth of the formula's until a rank has more, and the last one that fitted counts.
Ranks use gloo.

Arguments: families ("Zamba2"), to print their rows only.
"""

import os
import sys
import tempfile

os.environ.update(OMP_NUM_THREADS="1", MALLOC_MMAP_THRESHOLD_="262144", MALLOC_TRIM_THRESHOLD_="0")

import torch
import torch.distributed as dist

import megatron_ssm
from benchmarks.support.anonymous_memory import peak_growth
from benchmarks.support.cells import cell_arguments, measure_cell, write_result
from benchmarks.support.shapes import FIVE_FAMILIES, random_model
from benchmarks.support.tables import markdown, print_or_publish
from megatron_ssm import families
from megatron_ssm.model.memory import Memory

LIMIT, PROMPT, NEW, DEGREES, STEPS = 900e6, 8, 4, (1, 2), 25
PAPER = ["the paper's four, 1 -> 4 GPUs", "", "", "2 to 4x"]


def formula(shape: str, ranks: int) -> int:
    """The largest batch by the formula, if prompts are read at once."""
    memory = Memory(families.from_dict(FIVE_FAMILIES[shape].to_dict()), ranks)
    each = memory.prefill(1, PROMPT) + NEW * memory.keys_and_values_per_token
    return int((LIMIT - memory.weights) // each)


@torch.no_grad()
def cell(out: str, directory: str, expected: str) -> None:
    """Run one rank. Rank 0 writes the largest batch that fitted to `out`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.group.WORLD if dist.get_world_size() > 1 else None
    model = megatron_ssm.load(directory, group, dtype=torch.bfloat16, shared_memory=False)
    run(model, 1)  # allocates what does not depend on the batch, such as threads
    step = max(1, int(expected) // STEPS)
    fitted, batch = 0, int(expected) - 3 * step
    while most_memory(model, batch) <= LIMIT:
        fitted, batch = batch, batch + step
    if dist.get_rank() == 0:
        write_result(out, fitted)
    dist.barrier()
    dist.barrier()
    dist.destroy_process_group()


def most_memory(model: megatron_ssm.Model, batch: int) -> int:
    """The bytes of weights, and of the growth to the peak of `run`, on the rank that has most."""
    with peak_growth() as growth:
        run(model, batch)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    most = torch.tensor(weights + growth.bytes)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most)


def run(model: megatron_ssm.Model, batch: int) -> None:
    """Read PROMPT tokens of each sequence and decode NEW."""
    ids = torch.zeros(batch, PROMPT, dtype=torch.int64)
    cache = model.new_cache(batch, PROMPT + NEW)
    model(ids, cache=cache, logits_to_keep=1)
    for _ in range(NEW):
        model(ids[:, :1], cache=cache)


def main() -> None:
    """Measure and publish the table; print the rows of the families that the command line names."""
    rows = [PAPER]
    for shape in sys.argv[1:] or FIVE_FAMILIES:
        with tempfile.TemporaryDirectory() as directory:
            random_model(shape, directory)
            expected = [formula(shape, ranks) for ranks in DEGREES]
            found = [measure_cell(__file__, n, None, directory, e) for n, e in zip(DEGREES, expected, strict=True)]
        cells = [f"{e} / {f} ({f / e - 1:+.0%})" for e, f in zip(expected, found, strict=True)]
        rows.append([shape, *cells, f"{found[1] / found[0]:.2f}x (by the formula {expected[1] / expected[0]:.2f}x)"])
    header = [
        f"bf16, at most {LIMIT / 1e6:.0f} MB for each rank",
        *(f"{n} rank{'s'[: n - 1]}: formula / measured" for n in DEGREES),
        "gain",
    ]
    print_or_publish("largest-batch", markdown(header, rows))


if __name__ == "__main__":
    arguments = cell_arguments()
    main() if arguments is None else cell(*arguments)
