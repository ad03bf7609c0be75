"""Passing states against exchanging tokens for channels: four context ranks, links of 200 Mbit/s (about 15 min; root).

The claim: at 8,192 tokens, a training step that passes states is >= 3x as fast as one that exchanges tokens for channels,
much as Megatron-Core does for Mamba layers; and more so than at 2,048 tokens. For a gated delta net, whose blocks also send
a matrix for each head, >= 1.8x. Forward and backward of models with two layers, in fp32: of width 256, Mamba-1 with 16
states for each channel and Mamba-2 with 128; of width 512, a gated delta net of 8 heads of 64. The ranks share two cores.
Both forms take turns. Megatron-Core sends more, because it also exchanges the gate z. Sent bytes are those of rank 0 in a
step: the formula's count, and in brackets the kernel's, of its network namespace.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from attention2d import Ring
from benchmarks.support.cells import cell_arguments, measured_cells, write_result
from benchmarks.support.context import bytes_on_wire, random_model, training_step
from benchmarks.support.tables import markdown, print_or_publish
from commfabric.fabric.measurement import repetitions, timed

REPETITIONS = 5
DELTA = "gated delta net"
MODELS = {
    "Mamba-1": dict(model_type="mamba", hidden_size=256, mamba_state_dim=16),
    "Mamba-2": dict(model_type="mamba2", hidden_size=256, mamba_state_dim=128, mamba_head_dim=64),
    DELTA: dict(
        model_type="qwen3_5_text", hidden_size=512, intermediate_size=1024, num_hidden_layers=2, vocab_size=1024,
        layer_types=["linear_attention"] * 2, linear_num_key_heads=8, linear_num_value_heads=8, linear_key_head_dim=64,
        linear_value_head_dim=64, num_attention_heads=8, num_key_value_heads=8,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """A model, the length of its sequence, and the order of its blocks."""

    name: str
    tokens: int
    order: str = "zigzag"
    ranks: int = 4
    rate: str = "200mbit"


CELLS = [Cell(name, tokens) for name in MODELS for tokens in (2048, 8192, 16384)] + [Cell(DELTA, 8192, "contiguous")]


def measure(out: str, number: str) -> None:
    """Run one rank of cell number `number`. Rank 0 writes the result to `out`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cell, group = CELLS[int(number)], dist.group.WORLD
    models = {
        name: random_model(Ring(group, cell.order), more={"exchange_channels": name == "channels"}, **MODELS[cell.name])
        for name in ("states", "channels")
    }
    steps = {name: partial(training_step, model, cell.tokens) for name, model in models.items()}
    sent = {}
    for name, step in steps.items():
        counter = models[name].counter
        step()
        dist.barrier()
        counted, on_wire = counter.sent, bytes_on_wire()
        for _ in range(REPETITIONS):
            step()
        sent[name] = [
            (after - before) / REPETITIONS
            for after, before in zip((counter.sent, bytes_on_wire()), (counted, on_wire), strict=True)
        ]
    seconds = repetitions([timed(step) for step in steps.values()], group, "cpu", REPETITIONS)
    if dist.get_rank() == 0:
        write_result(out, {"seconds": seconds.tolist(), "sent": sent})
    dist.barrier()
    dist.destroy_process_group()


def row(cell: Cell, measured: dict) -> list[str]:
    """A row of the table."""
    seconds = torch.tensor(measured["seconds"])
    states, channels = seconds.median(0).values.tolist()
    ratios = seconds[:, 1] / seconds[:, 0]
    sent = [f"{counted / 1e6:.2f} MB ({wire / 1e6:.2f})" for counted, wire in measured["sent"].values()]
    times = [f"{sent[0]}, {states:.2f} s", f"{sent[1]}, {channels:.2f} s"]
    name = cell.name if cell.order == "zigzag" else f"{cell.name}, {cell.order}"
    return [name, f"{cell.tokens:,}", *times, f"{channels / states:.2f}x ({ratios.min():.2f}-{ratios.max():.2f})"]


def main() -> None:
    """Measure all cells and publish the table; or measure and print those whose numbers are arguments."""
    results = measured_cells(__file__, CELLS)
    header = ["model", "tokens", "passing states", "exchanging channels", "speedup"]
    table = markdown(header, [row(cell, measured) for cell, measured in results.items()])
    print_or_publish("state-passing", table)


if __name__ == "__main__":
    arguments = cell_arguments()
    main() if arguments is None else measure(*arguments)
