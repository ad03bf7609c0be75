"""Memory of attention on 8 ranks against its formula, by schedule (about 3 min).

The claims: a rank holds at most 1.15 times `schedule.memory` besides its inputs, in forward and in backward; a grid holds
less than an all-gather; an overlapped grid holds less than a gathered one. The bytes of all live tensors are counted after
every operation, and the rank with the most counts. bf16, causal, 16,384 tokens, 8 heads of 64.
"""

import torch
import torch.distributed as dist

from attention2d import AllGather, Attention2D, Ring, Ulysses
from benchmarks.support.cells import cell_arguments, measure_cell, write_result
from benchmarks.support.live_memory import taken
from benchmarks.support.tables import markdown, publish

RANKS = 8
SHAPE = dict(batch=1, seq=16384, heads=8, kv_heads=8, head_dim=64)


def schedules(group: dist.ProcessGroup) -> dict[str, Attention2D]:
    """The measured schedules by their names in the table."""
    return {
        "Ulysses": Ulysses(group),
        "ring": Ring(group),
        "all-gather": AllGather(group),
        "4 x 2": Attention2D(group, 4, 2),
        "4 x 2, overlapped": Attention2D(group, 4, 2, overlap=True),
        "2 x 4": Attention2D(group, 2, 4),
        "2 x 4, overlapped": Attention2D(group, 2, 4, overlap=True),
        "2 x (2 x 2)": Attention2D(group, 2, 2, 2),
    }


def cell(out: str) -> None:
    """Run one rank. Rank 0 writes {name: [(measured, formula) bytes saved, in forward, in backward]} to `out`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for name, schedule in schedules(dist.group.WORLD).items():
        measured = torch.tensor(taken(schedule, **SHAPE, dtype=torch.bfloat16, causal=True))
        dist.all_reduce(measured, op=dist.ReduceOp.MAX)
        formula = schedule.memory(**SHAPE, itemsize=2)
        found[name] = list(zip(measured.tolist(), (formula.saved, formula.forward, formula.backward), strict=True))
    if dist.get_rank() == 0:
        write_result(out, found)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Measure and publish."""
    found = measure_cell(__file__, RANKS, None)
    rows = [
        [name, *(f"{formula / 1e6:.1f} / {ours / 1e6:.1f} MB ({ours / formula:.2f})" for ours, formula in each)]
        for name, each in found.items()
    ]
    header = [f"{RANKS} ranks: formula / counted", "kept for backward", "most in forward", "most in backward"]
    publish("attention-memory", markdown(header, rows))


if __name__ == "__main__":
    arguments = cell_arguments()
    main() if arguments is None else cell(*arguments)
