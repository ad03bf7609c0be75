"""Table 1 of the paper Attention2D: what parallel forms of a transformer layer send in a training step (about 4 min).

The claim: the counted bytes are those of the formulas. A rank sends these words per layer, forward and backward, in units
of B N H D: B sequences of N tokens, H heads of D, as many key/value heads. On a grid of R rows, C columns and U ranks per
cell there are also 3 (C-1)/(P D) for the statistics of softmax. Not included are the gradients of the weights, which do
not depend on N. The form of Li et al. and that of LightSeq are formulas only, of the algorithms in their papers. Counted
on ranks of this machine: tensor and sequence parallelism in our model, without shared memory, two layers less one; the
others in calls of their schedules. fp32, one sequence of 512 tokens, 16 heads of 64.
"""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist

from attention2d import USP, AllGather, Attention2D, Ring, Ulysses
from benchmarks.support.cells import cell_arguments, measure_cell, write_result
from benchmarks.support.context import random_model, training_step
from benchmarks.support.tables import markdown, publish

RANKS = (4, 8, 16)
SEQ, HEADS, HEAD_DIM = 512, 16, 64
WORDS = SEQ * HEADS * HEAD_DIM
Formula = Callable[[int, int, int, int], float]  # of P ranks, U ranks per cell, R rows and C columns
FORMULAS: dict[str, tuple[str, Formula]] = {
    "Megatron-LM, tensor parallelism": ("8 (P-1)/P", lambda P, U, R, C: 8 * (P - 1) / P),
    "Megatron-LM-SP": ("10 (P-1)/P", lambda P, U, R, C: 10 * (P - 1) / P),
    "Sequence Parallelism (Li et al.)": ("8 (P-1)/P", lambda P, U, R, C: 8 * (P - 1) / P),
    "LightSeq": ("3", lambda P, U, R, C: 3),
    "Ring Attention": ("6 (P-1)/P", lambda P, U, R, C: 6 * (P - 1) / P),
    "all-gather of keys and values": ("6 (P-1)/P", lambda P, U, R, C: 6 * (P - 1) / P),
    "Ulysses": ("8 (P-1)/P²", lambda P, U, R, C: 8 * (P - 1) / P**2),
    "USP, U = 2": ("(8 (U-1)/U + 6 (P/U-1))/P", lambda P, U, R, C: (8 * (U - 1) / U + 6 * (P / U - 1)) / P),
    "Attention2D, as in the paper": ("(5 (C-1) + 6 (R-1) + 4)/P", lambda P, U, R, C: (_grid(R, C) + 4) / P),
    "Attention2D, zigzag order": ("(5 (C-1) + 6 (R-1))/P", lambda P, U, R, C: _grid(R, C) / P),
    "3-D, U = 2": ("(8 (U-1)/U + 5 (C-1) + 6 (R-1))/P", lambda P, U, R, C: (8 * (U - 1) / U + _grid(R, C)) / P),
}


def _grid(rows: int, cols: int) -> float:
    """The chunks that a rank of a grid sends, with the statistics of softmax."""
    return (5 + 3 / HEAD_DIM) * (cols - 1) + 6 * (rows - 1)


def square(ranks: int) -> tuple[int, int]:
    """The rows and columns of the squarest grid, with at least as many columns as rows."""
    rows = max(side for side in range(1, math.isqrt(ranks) + 1) if ranks % side == 0)
    return rows, ranks // rows


def predicted(name: str, ranks: int) -> float:
    """The formula's value, with the statistics of softmax."""
    shared = 2 if "U = 2" in name else 1
    return FORMULAS[name][1](ranks, shared, *square(ranks // shared))


def schedules(group: dist.ProcessGroup) -> dict[str, Attention2D]:
    """The schedules by their names in the table."""
    ranks = group.size()
    return {
        "Ring Attention": Ring(group),
        "all-gather of keys and values": AllGather(group),
        "Ulysses": Ulysses(group),
        "USP, U = 2": USP(group, 2),
        "Attention2D, as in the paper": Attention2D(group, *square(ranks), order="cyclic", transpose=True),
        "Attention2D, zigzag order": Attention2D(group, *square(ranks)),
        "3-D, U = 2": Attention2D(group, *square(ranks // 2), ulysses=2),
    }


def attention_bytes(schedule: Attention2D) -> int:
    """The bytes that this rank sends in forward and backward of one attention."""
    shape = 1, SEQ // schedule.ranks, HEADS, HEAD_DIM
    q, k, v = (torch.zeros(shape, requires_grad=True) for _ in range(3))
    schedule(q, k, v, causal=True).backward(torch.zeros(shape))
    return schedule.counter.sent


def layer_bytes(group: dist.ProcessGroup, sequence_parallel: bool) -> int:
    """The bytes that this rank sends for a layer of a tensor-parallel model: those of two layers less those of one."""
    sent = []
    width = HEADS * HEAD_DIM
    for layers in (1, 2):
        model = random_model(
            None, group, dict(sequence_parallel=sequence_parallel, shared_memory=False), model_type="granitemoehybrid",
            vocab_size=256, hidden_size=width, num_local_experts=0, shared_intermediate_size=2 * width,
            num_hidden_layers=layers, layers_block_type=["attention"] * layers, num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
        )  # fmt: skip
        training_step(model, SEQ)
        sent.append(model.counter.sent)
    return sent[1] - sent[0]


def cell(out: str) -> None:
    """Run one rank. Rank 0 writes {name: bytes} to `out`, of the rank that sends the most."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    found = {name: attention_bytes(schedule) for name, schedule in schedules(group).items()}
    found["Megatron-LM, tensor parallelism"] = layer_bytes(group, False)
    found["Megatron-LM-SP"] = layer_bytes(group, True)
    most = torch.tensor(list(found.values()))
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        write_result(out, dict(zip(found, most.tolist(), strict=True)))
    dist.barrier()
    dist.destroy_process_group()


def shown(name: str, ranks: int, counted: dict[str, int]) -> str:
    """A cell of the table: the formula's value, and the counted one."""
    formula = predicted(name, ranks)
    if name not in counted:
        return f"{formula:.3f}"
    return f"{formula:.3f} / {counted[name] / WORDS / 4:.3f}"


def main() -> None:
    """Count and publish."""
    counted = {ranks: measure_cell(__file__, ranks, None) for ranks in RANKS}
    rows = [[name, FORMULAS[name][0], *(shown(name, ranks, counted[ranks]) for ranks in RANKS)] for name in FORMULAS]
    header = [
        "parallelism",
        "words sent per layer / (B N H D)",
        *(f"{ranks} ranks: formula / counted" for ranks in RANKS),
    ]
    publish("attention-costs", markdown(header, rows))


if __name__ == "__main__":
    arguments = cell_arguments()
    main() if arguments is None else cell(*arguments)
