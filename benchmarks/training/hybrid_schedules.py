"""Zamba2 on eight context ranks with each attention schedule, behind links of 200 Mbit/s (about 12 min; root).

The claim: where the bytes of attention take most of a training step, the schedule that `auto` chooses is >= 1.3x as fast as
a ring; and `auto` never takes more than 1.05x the time of the best schedule. Forward and backward of models with two layers,
both with the shared block, whose width is twice the hidden size, in fp32; the ranks share two cores. All schedules take
turns. The ring runs twice: the difference of its two medians is the spread.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from attention2d import Attention2D
from attention2d.layout.attention_arguments import check_heads
from benchmarks.support.cells import cell_arguments, measured_cells, write_result
from benchmarks.support.context import VOCABULARY, random_model, training_step
from benchmarks.support.tables import markdown, print_or_publish
from commfabric.fabric.measurement import repetitions, timed
from megatron_ssm import families
from megatron_ssm.model.context import schedule_of
from megatron_ssm.train.options import Options

REPETITIONS = 5
NAMES = ("ring", "all-gather", "ulysses", "usp", "2d", "3d")


@dataclass(frozen=True)
class Cell:
    """A model and the length of its sequence."""

    heads: int
    kv_heads: int
    tokens: int
    hidden_size: int = 256
    ranks: int = 8
    rate: str = "200mbit"

    def __str__(self) -> str:
        width = 2 * self.hidden_size // self.heads
        return f"{self.heads}/{self.kv_heads} heads of {width}, {self.tokens:,} tokens"

    @property
    def options(self) -> dict:
        """Of `random_model`."""
        sizes = dict(hidden_size=self.hidden_size, num_attention_heads=self.heads, num_query_groups=self.kv_heads)
        return dict(
            model_type="zamba2", mamba_state_dim=64, mamba_head_dim=64, ffn_hidden_size=self.hidden_size, **sizes
        )


CELLS = [
    Cell(8, 8, 2048), Cell(8, 8, 8192), Cell(4, 4, 2048), Cell(2, 2, 2048), Cell(8, 1, 2048), Cell(8, 2, 2048),
]  # fmt: skip


def schedules(cell: Cell, group: dist.ProcessGroup) -> tuple[dict[str, Attention2D], Attention2D]:
    """({name: schedule} of those that have enough heads, the schedule of `auto`)."""
    config = families.from_dict(Options(**cell.options).new_config(VOCABULARY, 0))
    made = {name: schedule_of(name, group, config, 1, cell.tokens, 1) for name in (*NAMES, "auto")}
    found = {}
    for name, schedule in made.items():
        try:
            check_heads(cell.heads, cell.kv_heads, schedule.grid.ulysses)
        except ValueError:
            continue
        found[name] = schedule
    chosen = found.pop("auto")
    if all(repr(chosen) != repr(schedule) for schedule in found.values()):
        found["auto"] = chosen
    return found | {"ring again": schedule_of("ring", group, config, 1, cell.tokens, 1)}, chosen


def measure(out: str, number: str) -> None:
    """Run one rank of cell number `number`. Rank 0 writes the result to `out`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cell, group = CELLS[int(number)], dist.group.WORLD
    found, chosen = schedules(cell, group)
    models = {name: random_model(schedule, **cell.options) for name, schedule in found.items()}
    steps = [timed(lambda model=model: training_step(model, cell.tokens)) for model in models.values()]
    seconds = repetitions(steps, group, "cpu", REPETITIONS).median(0).values.tolist()
    if dist.get_rank() == 0:
        auto = next(name for name, schedule in found.items() if repr(schedule) == repr(chosen))
        write_result(out, {"seconds": dict(zip(found, seconds, strict=True)), "auto": auto, "point": repr(chosen)})
    dist.barrier()
    dist.destroy_process_group()


def row(cell: Cell, measured: dict) -> list[str]:
    """A row of the table: speed relative to the ring."""
    seconds, auto = measured["seconds"], measured["auto"]
    ring = seconds["ring"]
    best = min(each for name, each in seconds.items() if name != "ring again")
    speeds = [f"{ring / seconds[name]:.2f}x" if name in seconds else "" for name in NAMES[1:]]
    chosen = f"{auto}: {ring / seconds[auto]:.2f}x" if auto != "auto" else f"another grid: {ring / seconds[auto]:.2f}x"
    spread = abs(seconds["ring again"] / ring - 1)
    return [str(cell), f"{ring:.2f} s", *speeds, chosen, f"{seconds[auto] / best:.2f}", f"{spread:.0%}"]


def main() -> None:
    """Measure all cells and publish the table; or measure and print those whose numbers are arguments."""
    results = measured_cells(__file__, CELLS)
    header = ["Zamba2, 8 ranks", "ring", *NAMES[1:], "`auto`", "time of `auto` / best", "spread"]
    table = markdown(header, [row(cell, measured) for cell, measured in results.items()])
    print_or_publish("hybrid-schedules", table)


if __name__ == "__main__":
    arguments = cell_arguments()
    main() if arguments is None else measure(*arguments)
