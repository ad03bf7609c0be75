"""Loop programs for the tests of commir: their inputs, and the outputs that others compute."""

from dataclasses import dataclass, replace
from itertools import product

import torch

from attention_problems import Problem, exact
from benchmarks.support.plans import random_inputs
from commir import Mesh, Schedule, programs
from commir.ir.program import WHOLE
from commir.scheduling.placements import Placement, place, streamed_axis

__all__ = ["random_inputs"]

UP_TO_TWELVE = [Mesh(g=ranks) for ranks in range(2, 13)]  # with one level, or with two
UP_TO_TWELVE += [
    Mesh(n=nodes, g=size) for nodes, size in ((2, 2), (2, 3), (3, 2), (2, 4), (4, 2), (3, 3), (2, 5), (2, 6), (3, 4))
]
HEADS = [(8, 1), (6, 2), (9, 3)]  # MQA, and GQA with three query heads for each of few key/value heads


@dataclass
class Case:
    """A program in float64, whole inputs, and the outputs that an oracle computes: torch's products, autograd."""

    program: object
    inputs: dict
    expected: dict


def attention(seq, heads=4, kv_heads=2, causal=True, batch=2, head_dim=4, seed=0):
    """Forward, against plain float64 attention."""
    problem = Problem.of(seq, heads, kv_heads, causal, batch, head_dim, seed=seed)
    program = programs.attention(batch, heads, kv_heads, seq, head_dim, causal, dtype="float64")
    inputs = dict(zip("qkv", problem.inputs[:3], strict=True))
    return Case(program, inputs, dict(zip(("out", "lse"), problem.answers[:2], strict=True)))


def attention_backward(seq, heads=4, kv_heads=2, causal=True, batch=2, head_dim=4, seed=0):
    """Backward, against autograd through plain float64 attention."""
    problem = Problem.of(seq, heads, kv_heads, causal, batch, head_dim, seed=seed)
    program = programs.attention(batch, heads, kv_heads, seq, head_dim, causal, backward=True, dtype="float64")
    out, lse, *gradients = problem.answers
    inputs = dict(zip(("q", "k", "v", "dout"), problem.inputs, strict=True)) | {"out": out, "lse": lse.contiguous()}
    return Case(program, inputs, dict(zip(("dq", "dk", "dv"), gradients, strict=True)))


def decoding(seq, heads=4, kv_heads=2, batch=2, head_dim=4, seed=0):
    """One query per sequence, against plain float64 attention."""
    program = programs.decode_attention(batch, heads, kv_heads, seq, head_dim, dtype="float64")
    inputs = random_inputs(program, seed)
    return Case(program, inputs, dict(zip(("out", "lse"), exact(*inputs.values(), causal=False), strict=True)))


def linear(make, *sizes, seed=0):
    """A matrix product or a weighted sum, against torch's product."""
    program = make(*sizes, dtype="float64")
    inputs = random_inputs(program, seed)
    return Case(program, inputs, {"c": inputs["a"] @ inputs["b"]})


def scan(seq, heads, seed=0):
    """A selective scan, against one rank's recurrence."""
    program = programs.selective_scan(2, seq, heads, 2, 3, "float64")
    inputs = random_inputs(program, seed)
    return Case(program, inputs, {"y": one_rank_scan(**inputs)})


def one_rank_scan(x, dt, B, C, A):
    """y of a selective scan: the recurrence of one rank, token by token."""
    state, outputs = torch.zeros(*x.shape[:1], *x.shape[2:], B.shape[-1], dtype=x.dtype), []
    B, C = (t.unsqueeze(2).expand(*x.shape[:3], -1) if t.ndim == 3 else t.repeat_interleave(x.shape[2] // t.shape[2], 2)
            for t in (B, C))  # fmt: skip
    for t in range(x.shape[1]):
        decay = torch.exp(dt[:, t, :, None] * A)
        state = decay[:, :, None] * state + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        outputs.append((state * C[:, t, :, None]).sum(-1))
    return torch.stack(outputs, 1)


def cases(ranks, causal=True):
    """Cases of every program in the library, whose sizes divide over `ranks` in each way.

    The heads of the last one divide over no even number of ranks, so that ranks gather all summaries of its blocks.
    """
    return [
        attention(2 * ranks * 2, 2 * ranks, ranks, causal),
        attention_backward(2 * ranks * 2, ranks, ranks, causal),
        decoding(3 * ranks, 2 * ranks, ranks),
        linear(programs.all_gather_matmul, 2 * ranks, 3 * ranks, 5 * ranks),
        linear(programs.matmul_reduce_scatter, 2 * ranks, 3 * ranks, 5 * ranks),
        linear(programs.weighted_sum, 3 * ranks, 2 * ranks),
        scan(4 * ranks, 2 * ranks),
        scan(4 * ranks, 5),
    ]


def attention_cases(ranks, heads, kv_heads, causal=True):
    """Cases of attention, forward, backward and decoding, with heads that need not divide over `ranks`."""
    return [
        attention(4 * ranks, heads, kv_heads, causal),
        attention_backward(4 * ranks, heads, kv_heads, causal),
        decoding(3 * ranks, heads, kv_heads),
    ]


def placements(program, mesh):
    """All placements of the mesh axes that fit the program, as {mesh axis: Placement}."""
    nest = Schedule(program, mesh)
    options = []
    for name in mesh.names:
        loops = [axis.name for axis in program.axes if axis.kind != WHOLE and axis.size > 1]
        options.append([Placement(axis) for axis in loops])
        options[-1] += [Placement(axis, True) for axis in loops if streamed_axis(nest, name, axis)]
    return [dict(zip(mesh.names, chosen, strict=True)) for chosen in product(*options)]


def plans(program, mesh):
    """The plans of all placements that divide."""
    found = []
    for chosen in placements(program, mesh):
        try:
            found.append(place(Schedule(program, mesh), **chosen).lower())
        except ValueError:
            continue
    return found


def mesh_of(*sizes):
    """A mesh with axes x, y, z."""
    return Mesh(**dict(zip("xyz", sizes, strict=False)))


def assert_close(found, expected, limit=1e-13):
    """Every output differs from its oracle by at most `limit`, relative to the largest element if that is above 1."""
    for name, x in expected.items():
        error = (found[name] - x).abs().max().item()
        assert error <= limit * max(1.0, x.abs().max().item()), (name, error)


def with_steps(plan, steps):
    """The plan with other steps."""
    return replace(plan, steps=tuple(steps))
