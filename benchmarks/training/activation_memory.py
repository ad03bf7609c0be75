"""Memory of a training step's activations: context ranks, sequence parallelism, recomputation, formula (about 4 min).

The claims: at 32,768 tokens, each of four context ranks needs <= 0.30x the activations of one rank; and the formula
(`megatron_ssm.TrainingMemory`) is within 10 % of what a rank needs. Measured is how much the anonymous memory of a
rank (RssAnon) grows at most during forward and backward, and of several ranks the most. Freed memory returns to the system,
as with MALLOC_MMAP_THRESHOLD_=1048576; by default, glibc would keep blocks of up to 32 MB. A Zamba2 with two layers of width
256 and 256 entries in the vocabulary, in fp32, with the C kernels; the gradients of the parameters exist before.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from attention2d import Ring
from benchmarks.support.anonymous_memory import peak_growth, return_freed_blocks
from benchmarks.support.cells import cell_arguments, measured_cells, write_result
from benchmarks.support.context import random_model, training_step
from benchmarks.support.tables import markdown, print_or_publish
from megatron_ssm.model.activations import TrainingMemory
from megatron_ssm.parallel.groups import Groups, initialize

TOKENS = 32_768
MODELS = {
    "Zamba2": dict(
        model_type="zamba2", mamba_state_dim=64, mamba_head_dim=64, hybrid_interval=2, num_attention_heads=8
    ),
}


@dataclass(frozen=True)
class Cell:
    """A model, and how it is spread: tensor-parallel times context ranks, and the options of `load` that save memory."""

    name: str
    tensor: int = 1
    context: int = 1
    sequence_parallel: bool = False
    recompute: bool = False
    rate: None = None

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.tensor * self.context

    def __str__(self) -> str:
        parts = [f"{self.tensor} tensor-parallel ranks"] * (self.tensor > 1)
        parts += [f"{self.context} context ranks"] * (self.context > 1)
        parts += ["sequence parallelism"] * self.sequence_parallel + ["recomputation"] * self.recompute
        return ", ".join(parts) or "one rank"


WAYS = [
    dict(), dict(context=2), dict(context=4), dict(recompute=True), dict(context=4, recompute=True),
    dict(tensor=2), dict(tensor=2, sequence_parallel=True), dict(tensor=2, sequence_parallel=True, recompute=True),
]  # fmt: skip
CELLS = [Cell(name, **way) for name in MODELS for way in WAYS]


def measure(out: str, number: str) -> None:
    """Run one rank of cell number `number`. Rank 0 writes (measured, formula) in bytes to `out`."""
    torch.set_num_threads(1)
    return_freed_blocks()
    cell = CELLS[int(number)]
    groups = initialize(cell.tensor, context=cell.context) if cell.ranks > 1 else Groups()
    schedule = None if groups.context is None else Ring(groups.context)
    saving = dict(sequence_parallel=cell.sequence_parallel, recompute=cell.recompute)
    sizes = dict(hidden_size=256, num_layers=2, **MODELS[cell.name])
    model = random_model(schedule, groups.tensor, saving, **sizes)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    training_step(model, 1024)  # creates what stays: threads, buffers, libraries
    with peak_growth() as growth:
        training_step(model, TOKENS)
    most = torch.tensor(growth.bytes)
    if dist.is_initialized():
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
    formula = TrainingMemory(model.config, cell.tensor, **saving).peak(1, TOKENS // cell.context)
    if groups.rank == 0:
        write_result(out, [int(most), formula])
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def row(cell: Cell, measured: int, formula: int, alone: int | None) -> list[str]:
    """A row of the table. alone: what was measured of one rank with the whole model."""
    relative = "" if alone is None else f"{measured / alone:.2f}x"
    return [cell.name, str(cell), f"{measured / 1e6:,.0f} MB", relative, f"{formula / measured:.2f}"]


def main() -> None:
    """Measure all cells and publish the table; or measure and print those whose numbers are arguments."""
    results = measured_cells(__file__, CELLS)
    header = ["model", f"{TOKENS:,} tokens on", "a rank needs", "against one rank", "formula / measured"]
    rows = [row(cell, *pair, results.get(Cell(cell.name), [None])[0]) for cell, pair in results.items()]
    print_or_publish("activation-memory", markdown(header, rows))


if __name__ == "__main__":
    arguments = cell_arguments()
    main() if arguments is None else measure(*arguments)
