"""The longest prompt that fits: a batch of 256 on 48 and 80 GB, published shapes (about 6 min).

The claim: the formula of `megatron_ssm.model.memory` is within 5 % of the measured memory of a prefill, on one rank and on
two. Weights and activations are in bf16, states in fp32. One layer of each published shape with a small vocabulary is
measured: the growth of a rank's anonymous memory to its peak, which is at least 1 GB. The rank with the most counts. Ranks
use gloo.
"""

import os
import tempfile

os.environ.update(OMP_NUM_THREADS="1", MALLOC_MMAP_THRESHOLD_="262144", MALLOC_TRIM_THRESHOLD_="0")

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import megatron_ssm
from benchmarks.support.cells import cell_arguments, measure_cell, write_result
from benchmarks.support.shapes import PUBLISHED
from benchmarks.support.tables import markdown, publish
from megatron_ssm import families
from megatron_ssm.model.memory import Memory
from megatron_ssm.spec.stack import Stack

GB, BATCH, DEGREES, BUDGETS = 1e9, 256, (1, 2, 4), (48, 80)
PROMPT, CHUNK = 1024, 64  # tokens of the prompts, and of the chunks in which they are read, for the largest batch
PAPER = {  # the paper's Fig. 3, on A6000 and on A100: one GPU and data parallelism, then tensor parallelism
    "mamba-2.8b": ("64 -> 256", "128 -> 512"),
    "mamba2-2.7b": ("64 -> 256", "128 -> 512"),
    "falcon-mamba-7b": ("2 to 4x", "2 to 4x"),
    "Zamba-7B-v1": ("2 to 4x", "2 to 4x"),
}
MEASURED = 1.3 * GB  # the least memory, by the formula, of the prefill that is measured


def config_of(shape: str) -> Stack:
    """megatron_ssm's configuration of a published shape."""
    return families.from_dict(PUBLISHED[shape].to_dict())


def longest(shape: str) -> list[str]:
    """A row of the first table."""
    cells = []
    for budget in BUDGETS:
        memories = [Memory(config_of(shape), degree) for degree in DEGREES]
        on_cuda = [Memory(config_of(shape), degree, on_cuda=True) for degree in DEGREES]
        for each in (memories, on_cuda):
            cells.append(" / ".join(f"{memory.longest_prompt(budget * GB, BATCH):,}" for memory in each))
        cells.append(" / ".join(f"{memory.largest_batch(budget * GB, PROMPT, CHUNK):,}" for memory in memories))
    return [shape, *PAPER[shape], *cells]


def one_layer(shape: str, directory: str) -> None:
    """Save a checkpoint of one layer, or of two if layers share a block."""
    changed = PUBLISHED[shape].to_dict() | dict(num_hidden_layers=1, vocab_size=256)
    if changed.pop("layers_block_type", None):
        changed |= dict(num_hidden_layers=2, layers_block_type=["hybrid"] * 2)
    config = type(PUBLISHED[shape]).from_dict(changed)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)


def peak_anonymous() -> int:
    """The peak of this process's anonymous memory since `forget_peak`: its peak of all memory, less files mapped now."""
    with open("/proc/self/status") as status:
        sizes = dict(line.split(":", 1) for line in status)
    peak, *files = (int(sizes[name].split()[0]) * 1024 for name in ("VmHWM", "RssFile", "RssShmem"))
    return peak - sum(files)


def forget_peak() -> None:
    """Let `peak_anonymous` count from now on (Linux: clear_refs in proc(5))."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


@torch.no_grad()
def cell(out: str, directory: str) -> None:
    """Run one rank. Rank 0 writes (formula, measured), the bytes of a prefill on the rank that needs most, to `out`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.group.WORLD if dist.get_world_size() > 1 else None
    model = megatron_ssm.load(directory, group, dtype=torch.bfloat16, shared_memory=False)
    memory = Memory(model.config, dist.get_world_size())
    batch, prompt = 16, 64
    while memory.prefill(batch, prompt) < MEASURED:
        prompt += 8
    for length in (8, prompt):
        ids = torch.zeros(batch, length, dtype=torch.int64)
        forget_peak()
        before = peak_anonymous()
        model(ids, cache=model.new_cache(batch, length), logits_to_keep=1)
    grown = torch.tensor(peak_anonymous() - before)
    dist.all_reduce(grown, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        write_result(out, [memory.prefill(batch, prompt), grown.item()])
    dist.barrier()
    dist.barrier()
    dist.destroy_process_group()


def confirmed(shape: str) -> list[str]:
    """A row of the second table."""
    cells = []
    with tempfile.TemporaryDirectory() as directory:
        one_layer(shape, directory)
        for degree in DEGREES[:2]:
            formula, measured = measure_cell(__file__, degree, None, directory)
            cells.append(f"{formula / GB:.3f} / {measured / GB:.3f} GB ({formula / measured - 1:+.1%})")
    return [shape, *cells]


def main() -> None:
    """Compute, measure and publish both tables."""
    header = ["1 / 2 / 4 GPUs", "paper, 48 GB: 1 -> 4", "paper, 80 GB"]
    for budget in BUDGETS:
        header += [f"{budget} GB: longest prompt, batch {BATCH}", "with mamba-ssm's kernels"]
        header += [f"largest batch, prompts of {PROMPT}"]
    publish("prefill-memory", markdown(header, [longest(shape) for shape in PUBLISHED]))
    header = ["its layer", "1 rank: formula / measured", "2 ranks"]
    publish("prefill-measured", markdown(header, [confirmed(shape) for shape in PUBLISHED]))


if __name__ == "__main__":
    arguments = cell_arguments()
    main() if arguments is None else cell(*arguments)
