"""Predictions with quantized sums against one rank: five families on held-out text, 4 ranks (about 10 min).

The claim: with fp16 the most likely token is that of the model on one rank at >= 98.8 % of positions. A byte-level model
of each family is trained on Python's documentation (STEPS steps with the options of mamba2-small.yaml), and then reads
whole held-out topics. At every position the five most likely tokens are compared with those of the same model on one rank,
which sums nothing: the first one, the five as a set (their mean overlap), and the five in order. "Quantized" is the share
of a forward pass's bytes that are sent in the format.

Arguments: model types ("zamba2"), to print their rows only.
"""

import os
import sys
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1")

import torch
import torch.distributed as dist

import megatron_ssm
from benchmarks.support.cells import ROOT, cell_arguments, measure_cell, torchrun, write_result
from benchmarks.support.tables import markdown, print_or_publish

sys.path.insert(0, str(ROOT / "examples"))
from corpus import write_corpus  # noqa: E402

STEPS = 300
RANKS, FORMATS, WINDOW, BATCH = 4, ("fp16", "int8"), 256, 16
PAPER = [
    ["the paper's Mamba, on GPUs", "", "fp16", "98.81 %", "99.03 %", "89.01 %", "", ""],
    ["the paper's Falcon-Mamba and Zamba, mean", "", "fp16", "97.5 %", "98.5 %", "", "", ""],
]
NAMES = {
    "mamba": "Mamba-1",
    "mamba2": "Mamba-2",
    "falcon_mamba": "Falcon-Mamba",
    "zamba": "Zamba",
    "zamba2": "Zamba2",
}
LAYERS = {
    "zamba": (4, 2),
    "zamba2": (4, 2),
}  # so many layers, and the shared block in every second one; others: those of the file


def train(directory: Path, model_type: str, text: tuple[list[Path], list[Path]]) -> Path:
    """The Hugging Face directory of a byte-level model, trained on the demo's text with the options of mamba2-small.yaml.

    text: the files to train on, and the held-out files.
    """
    training, held_out = text
    config = ROOT / "examples" / "configs" / "mamba2-small.yaml"
    options = ["--config", config, "--model-type", model_type, "--tokenizer-model", "byte"]
    options += ["--train-iters", STEPS]
    if model_type in LAYERS:
        options += ["--num-layers", LAYERS[model_type][0], "--hybrid-interval", LAYERS[model_type][1]]
    out = directory / model_type
    paths = ["--data", *training, "--valid-data-path", *held_out, "--out", out]
    torchrun(1, ROOT / "examples" / "pretrain.py", *options, *paths)
    return out


def windows_of(paths: Iterable[str | Path]) -> torch.Tensor:
    """The bytes of files, concatenated, in rows of WINDOW + 1."""
    ids = torch.tensor(list(b"".join(Path(path).read_bytes() for path in paths)))
    return ids[: len(ids) // (WINDOW + 1) * (WINDOW + 1)].view(-1, WINDOW + 1)


@torch.no_grad()
def logits(model: torch.nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """The logits at all positions of all windows: (positions, vocabulary)."""
    return torch.cat([model(windows[i : i + BATCH]).flatten(0, 1) for i in range(0, len(windows), BATCH)])


@torch.no_grad()
def quantized_share(directory: str | Path, group: dist.ProcessGroup, ids: torch.Tensor) -> float:
    """The share of the bytes of a forward pass that a format applies to; gathering logits does not count."""
    quantized = []

    def counting(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        quantized.append(tensor.nbytes)
        return tensor  # not the sum, but of the same size

    model = megatron_ssm.load(directory, group, reduce=counting, shared_memory=False)
    model.local_logits(ids)
    return sum(quantized) / (sum(quantized) + model.counter.nbytes)


def compare(exact: torch.Tensor, other: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """How often the five most likely tokens of two models agree, and the difference of their losses in nats.

    exact, other: the models' logits (positions, vocabulary). labels: (positions,).
    """
    five, theirs = exact.topk(5).indices, other.topk(5).indices
    overlap = (five.unsqueeze(-1) == theirs.unsqueeze(-2)).any(-1).double().mean().item()
    losses = [torch.nn.functional.cross_entropy(x.double(), labels).item() for x in (exact, other)]
    return {
        "first": (five[:, 0] == theirs[:, 0]).double().mean().item(),
        "set": overlap,
        "order": (five == theirs).all(-1).double().mean().item(),
        "nats": losses[1] - losses[0],
        "positions": len(five),
    }


def cell(out: str, directory: str, *held_out: str) -> None:
    """What one rank does: compute the logits in every format. Rank 0 compares them with those of the model on one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group, windows = dist.group.WORLD, windows_of(held_out)
    labels, is_first = windows[:, 1:].flatten(), dist.get_rank() == 0
    load = partial(megatron_ssm.load, directory, group, shared_memory=False)  # as on several machines
    alone = logits(megatron_ssm.load(directory), windows[:, :-1]) if is_first else None
    results = {"share": quantized_share(directory, group, windows[:BATCH, :-1])}
    for format in FORMATS:
        other = logits(load(reduce=format), windows[:, :-1])
        if alone is not None:
            results[format] = compare(alone, other, labels)
    if is_first:
        write_result(out, results)
    dist.barrier()
    dist.destroy_process_group()


def rows(name: str, results: dict) -> list[list[str]]:
    """The table's rows for one model."""
    lines = []
    for format in FORMATS:
        found = results[format]
        shares = [f"{found[part]:.2%}" for part in ("first", "set", "order")]
        lines.append([name, str(RANKS), format, *shares, f"{found['nats']:+.5f}", f"{results['share']:.0%}"])
    return lines


def main() -> None:
    """Train the models, compare, and publish the table."""
    table = [*PAPER]
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        text = write_corpus(directory / "text", extra=False)
        for model_type in sys.argv[1:] or NAMES:
            model = train(directory, model_type, text)
            table += rows(NAMES[model_type], measure_cell(__file__, RANKS, None, model, *text[1]))
    header = ["model", "ranks", "format", "first", "five as a set", "five in order", "loss, nats", "quantized bytes"]
    print_or_publish("agreement", markdown(header, table))


if __name__ == "__main__":
    arguments = cell_arguments()
    main() if arguments is None else cell(*arguments)
