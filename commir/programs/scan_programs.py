"""The recurrence of state-space models and of linear attention, as a loop program with a scanned axis.

s_t = exp(dt_t A) s_{t-1} + dt_t x_t B_t^T and y_t = s_t C_t, for every head: s is (dim, state). Mamba-1's channels are heads
of dim 1; Mamba-2 has one A per head (the same along `state`). A block of tokens contributes its final state from zero, and
the sum of its step sizes, D: a state s that enters it leaves it as exp(D A) s (docs/concepts/passing-states.md).
"""

from collections.abc import Mapping

import torch

from commir.ir.checks import check_sizes
from commir.ir.program import SCANNED, WHOLE, Axis, Operand, Program, Result, Scan
from sparsefusion.collectives.wire_formats import at_least_fp32

Tensor = torch.Tensor
Tensors = Mapping[str, Tensor]


def selective_scan(
    batch: int = 1, seq: int = 4096, heads: int = 8, dim: int = 1, state: int = 16, dtype: str = "float32",
    order: str = "zigzag", groups: int = 1,
) -> Program:  # fmt: skip
    """x (batch, seq, heads, dim), dt (batch, seq, heads), B, C (batch, seq, state), A (heads, state) -> y, shaped like x.

    At home the ranks share the sequence, in `order`; A is whole on every rank. dt is the step size, after softplus. With
    several groups of heads, each has its own B and C, which are (batch, seq, groups, state). ValueError: the heads do not
    divide by the groups, a size is no whole number of at least 1, or an argument has another type.
    """
    check_sizes(heads=heads, groups=groups)
    if heads % groups:
        raise ValueError(f"{heads} heads do not divide into {groups} groups")
    axes = (
        Axis("batch", batch), Axis("heads", heads), Axis("seq", seq, SCANNED, order), Axis("dim", dim, WHOLE),
        Axis("state", state, WHOLE), Axis("blocks", 1, WHOLE),
    )  # fmt: skip
    x, y = (Operand(name, ("batch", "seq", "heads", "dim"), "seq") for name in "xy")
    dt = Operand("dt", ("batch", "seq", "heads"), "seq", is_wide=True)
    shared = (("batch", "seq", "heads", "state"), "seq", (("heads", heads // groups),))
    b, c = (Operand(name, *(shared if groups > 1 else (("batch", "seq", "state"), "seq"))) for name in "BC")
    rates = Operand("A", ("heads", "state"), is_wide=True)
    summary = "batch", "blocks", "heads"
    internal = (
        Operand("final_state", (*summary, "dim", "state"), is_wide=True),
        Operand("sum_of_steps", summary, is_wide=True),
        Operand("block_rates", ("heads", "state"), is_wide=True),
        Operand("entering_state", (*summary, "dim", "state"), is_wide=True),
    )
    scan = Scan("seq", "blocks", *(each.name for each in internal))
    return Program(
        "selective_scan", axes, (x, dt, b, c, rates), (y,), (Result("sum", ("y",)),), "selective_scan", (), dtype, scan,
        internal,
    )  # fmt: skip


def with_lasting_states(program: Program, inputs: Tensors) -> dict[str, Tensor]:
    """Inputs with positive step sizes and negative rates, so that states neither grow nor fade before the sequence ends.

    Every block then matters to all later ones, and outputs have about one size.
    """
    rates = inputs["A"].abs() * (-4 / program.axis("seq").size)
    return {**inputs, "dt": inputs["dt"].abs(), "A": rates}


def scan_tile(program: Program, inputs: Tensors, indices: Tensors) -> dict[str, Tensor]:
    """y of a tile: its blocks one by one, each from the state that enters it (without any: from zero)."""
    carry, (blocks, slots) = inputs.get("entering_state"), _blocks(program, inputs, indices)
    outputs = [_recurrence(block, None if carry is None else carry[:, n])[0] for n, block in enumerate(blocks)]
    y = torch.empty_like(torch.cat(outputs, 1))
    for place, output in zip(slots, outputs, strict=True):
        y[:, place] = output
    return {"y": y}


def summarize(program: Program, inputs: Tensors, indices: Tensors) -> tuple[Tensor, Tensor]:
    """(final states (batch, blocks, heads, dim, state), sums of step sizes (batch, blocks, heads)) of a tile's blocks."""
    blocks, _ = _blocks(program, inputs, indices)
    states = [_recurrence(block, None)[1] for block in blocks]
    return torch.stack(states, 1), torch.stack([block["dt"].sum(1) for block in blocks], 1)


def pass_states(program: Program, states: Tensor, sums: Tensor, rates: Tensor) -> Tensor:
    """The state that enters each block, in the order of `states`: numbered by rank, whereas states pass by position.

    In zigzag order, blocks 2r and 2r+1 of the numbering stand at positions r and 2P-1-r.
    """
    entering, state = torch.empty_like(states), torch.zeros_like(states[:, 0])
    for n in sorted(range(states.shape[1]), key=lambda number: _position(program, number)):
        entering[:, n] = state
        state = torch.exp(sums[:, n, :, None, None] * rates[:, None]) * state + states[:, n]
    return entering


def _position(program: Program, number: int) -> int:
    """The position in the sequence of a block, from its number."""
    count = program.axis("blocks").size
    if program.axis("seq").order == "contiguous" or count == 1:
        return number
    return count - 1 - number // 2 if number % 2 else number // 2


def _blocks(program: Program, inputs: Tensors, indices: Tensors) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
    """(inputs, in at least fp32; slots in the tile) of each block of a tile, in the order of their numbers."""
    count = program.axis("blocks").size
    numbers = {_position(program, number): number for number in range(count)}
    order = indices["seq"].argsort()
    slots = order.split(program.axis("seq").size // count)
    first = [int(indices["seq"][place[0]]) * count // program.axis("seq").size for place in slots]
    slots = [place for _, place in sorted(zip((numbers[position] for position in first), slots, strict=True))]
    wide = {name: x.to(at_least_fp32(x.dtype)) for name, x in inputs.items() if name != "entering_state"}
    return [{name: x if name == "A" else x[:, place] for name, x in wide.items()} for place in slots], slots


def _recurrence(block: Tensors, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """(y (batch, tokens, heads, dim), final state (batch, heads, dim, state)), token by token."""
    x, dt, rates = (block[name] for name in ("x", "dt", "A"))
    b, c = (_per_head(block[name], x.shape[2]) for name in "BC")
    decay = torch.exp(dt.unsqueeze(-1) * rates)  # (batch, tokens, heads, state)
    entry = (dt.unsqueeze(-1) * x).unsqueeze(-1) * b
    state = torch.zeros_like(entry[:, 0]) if state is None else state
    outputs = []
    for t in range(x.shape[1]):
        state = decay[:, t, :, None] * state + entry[:, t]
        outputs.append((state * c[:, t]).sum(-1))
    return torch.stack(outputs, 1), state


def _per_head(x: Tensor, heads: int) -> Tensor:
    """B or C of all heads, or of each group of heads -> (batch, tokens, heads, 1, state)."""
    x = x.unsqueeze(2) if x.ndim == 3 else x
    return x.repeat_interleave(heads // x.shape[2], 2).unsqueeze(3)
