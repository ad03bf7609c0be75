"""What naive sharding sends, beside the split by channel: five families, 2 and 4 ranks; exact counts (about 3 min).

The claim: the split needs at most two collectives per mixer where naive sharding needs four (three in Zamba, if ranks hold
whole heads), and sends at most 0.34 of the bytes. Naive sharding is that of `benchmarks.support.naive`; its logits are
compared with those of the split. Shapes near 130m with random weights; one pass over TOKENS tokens, messages over gloo in
fp32. Bytes are those that a rank of a ring sends.
"""

import os
import tempfile
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1")

import torch
import torch.distributed as dist

import megatron_ssm
from benchmarks.support.cells import cell_arguments, measure_cell, write_result
from benchmarks.support.naive import shard_naively
from benchmarks.support.shapes import FIVE_FAMILIES, random_model
from benchmarks.support.tables import markdown, publish

RANKS, TOKENS = (2, 4), 16
PAPER = ["the paper's Mamba", "", "4 / 2", "", "", ""]


@torch.no_grad()
def cell(out: str, *directories: str) -> None:
    """Run one rank. Rank 0 writes what `counted` returns for the model in each directory."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = [counted(directory) for directory in directories]
    if dist.get_rank() == 0:
        write_result(out, found)
    dist.barrier()
    dist.barrier()
    dist.destroy_process_group()


def counted(directory: str) -> dict:
    """{way: (collectives of a pass, bytes that a rank sends per token)}, and the largest difference of the logits."""
    model = megatron_ssm.load(directory, dist.group.WORLD, shared_memory=False)
    ids = torch.randint(0, model.config.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    counts, logits = {}, {}
    for way in ("split", "naive"):
        if way == "naive":
            shard_naively(model)
        model.counter.reset()
        logits[way] = model.local_logits(ids)
        counts[way] = sum(model.counter.calls.values()), model.counter.sent / TOKENS
    difference = (logits["naive"] - logits["split"]).abs().max().item()
    invocations = sum(unit.side is not None for layer in model.config.layers for unit in layer)
    others = 1 + 2 * invocations  # of the embeddings, and of attention and MLP of shared blocks
    return dict(counts, others=others, mixers=len(model.layers), difference=difference)


def row(family: str, ranks: int, found: dict) -> list[str]:
    """A row of the table. found: what `counted` returned."""
    (naive, naive_bytes), (split, split_bytes) = found["naive"], found["split"]
    per_mixer = [f"{(calls - found['others']) / found['mixers']:g}" for calls in (naive, split)]
    sent = f"{naive_bytes / 1e3:.0f} / {split_bytes / 1e3:.0f} ({naive_bytes / split_bytes:.1f}x)"
    return [family, str(ranks), " / ".join(per_mixer), f"{naive} / {split}", sent, f"{found['difference']:.0e}"]


def main() -> None:
    """Count, and publish the table."""
    with tempfile.TemporaryDirectory() as folder:
        directories = {family: Path(folder, str(index)) for index, family in enumerate(FIVE_FAMILIES)}
        for family, directory in directories.items():
            random_model(family, directory)
        found = {ranks: measure_cell(__file__, ranks, None, *directories.values()) for ranks in RANKS}
    rows = [row(family, ranks, found[ranks][i]) for i, family in enumerate(FIVE_FAMILIES) for ranks in RANKS]
    header = [
        "naive / split by channel",
        "ranks",
        "collectives per mixer",
        "of a pass",
        "KB sent per token",
        "difference",
    ]
    publish("naive-sharding", markdown(header, [PAPER, *rows]))


if __name__ == "__main__":
    arguments = cell_arguments()
    main() if arguments is None else cell(*arguments)
