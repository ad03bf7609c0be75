"""The recurrences of state-space models and of linear attention, as loop programs with a scanned axis.

Selective scan: s_t = exp(dt_t A) s_{t-1} + dt_t x_t B_t^T and y_t = s_t C_t, for every head: s is (dim, state). Mamba-1's
channels are heads of dim 1; Mamba-2 has one A per head (the same along `state`). A block of tokens contributes its final
state from zero, and the sum of its step sizes, D: a state s that enters it leaves it as exp(D A) s, plus that final state
(docs/concepts/passing-states.md).

Gated delta rule: s <- exp(g_t) s, s_t = s + k_t (beta_t (v_t - s^T k_t))^T and y_t = s_t^T q_t, for every head of values: s
is (key_dim, value_dim). Here a matrix M takes the place of D: a state s that enters a block leaves it as M s, plus that.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from commfabric.collectives.wire_formats import at_least_fp32
from commir.ir.program import SCANNED, WHOLE, Axis, Operand, Program, Result, Scan

Tensor = torch.Tensor
Tensors = Mapping[str, Tensor]
NORM_EPS = 1e-6  # added to the sum of squares of q and k


def selective_scan(
    batch: int = 1, seq: int = 4096, heads: int = 8, dim: int = 1, state: int = 16, dtype: str = "float32",
    order: str = "zigzag", groups: int = 1,
) -> Program:  # fmt: skip
    """The recurrence of a state-space layer: x (batch, seq, heads, dim), dt, B, C and A -> y, shaped like x.

    At home the ranks share the sequence, and A is whole on every rank. dt (batch, seq, heads) is the step size, after
    softplus; A is (heads, state); B and C are (batch, seq, state).

    Args:
        dim, state: the sizes of a head's state.
        dtype: of the elements, by which bytes are counted.
        order: the tokens that a rank holds, "zigzag" or "contiguous".
        groups: groups of consecutive heads that have their own B and C, which are then (batch, seq, groups, state).

    Raises:
        ValueError: the heads do not divide by the groups, or a size is below 1.
    """
    b, c = _of_groups("BC", heads, groups, "state")
    axes = (
        Axis("batch", batch), Axis("heads", heads), Axis("seq", seq, SCANNED, order), Axis("dim", dim, WHOLE),
        Axis("state", state, WHOLE), Axis("blocks", 1, WHOLE),
    )  # fmt: skip
    x, y = (Operand(name, ("batch", "seq", "heads", "dim"), "seq") for name in "xy")
    dt = Operand("dt", ("batch", "seq", "heads"), "seq", is_wide=True)
    rates = Operand("A", ("heads", "state"), is_wide=True)
    summary = "batch", "blocks", "heads"
    internal = (
        Operand("final_state", (*summary, "dim", "state"), is_wide=True),
        Operand("sum_of_steps", summary, is_wide=True),
        Operand("block_rates", ("heads", "state"), is_wide=True),
        Operand("entering_state", (*summary, "dim", "state"), is_wide=True),
    )
    scan = Scan("seq", "blocks", "final_state", "sum_of_steps", "entering_state", "block_rates")
    return Program(
        "selective_scan", axes, (x, dt, b, c, rates), (y,), (Result("sum", ("y",)),), "selective_scan", (), dtype, scan,
        internal,
    )  # fmt: skip


def gated_delta(
    batch: int = 1, seq: int = 4096, heads: int = 8, key_dim: int = 128, value_dim: int = 128, groups: int = 1,
    dtype: str = "float32", order: str = "zigzag",
) -> Program:  # fmt: skip
    """The recurrence of a gated delta net: v (batch, seq, heads, value_dim), g, beta, q and k -> y, shaped like v.

    At home the ranks share the sequence. g (batch, seq, heads) is the logarithm of the decay, at most 0; beta has its shape.
    q and k (batch, seq, key_dim) are normalized first, and q is divided by sqrt(key_dim).

    Args:
        key_dim, value_dim: the sizes of a head's state.
        groups: heads of keys; each has its own q and k, which are then (batch, seq, groups, key_dim).
        dtype: of the elements, by which bytes are counted.
        order: the tokens that a rank holds, "zigzag" or "contiguous".

    Raises:
        ValueError: as in `selective_scan`.
    """
    q, k = _of_groups("qk", heads, groups, "key_dim")
    axes = (
        Axis("batch", batch), Axis("heads", heads), Axis("seq", seq, SCANNED, order), Axis("key_dim", key_dim, WHOLE),
        Axis("value_dim", value_dim, WHOLE), Axis("blocks", 1, WHOLE), Axis("entering_dim", key_dim, WHOLE),
    )  # fmt: skip
    v, y = (Operand(name, ("batch", "seq", "heads", "value_dim"), "seq") for name in "vy")
    g, beta = (Operand(name, ("batch", "seq", "heads"), "seq", is_wide=True) for name in ("g", "beta"))
    summary = "batch", "blocks", "heads", "key_dim"
    internal = (
        Operand("final_state", (*summary, "value_dim"), is_wide=True),
        Operand("map", (*summary, "entering_dim"), is_wide=True),
        Operand("entering_state", (*summary, "value_dim"), is_wide=True),
    )
    scan = Scan("seq", "blocks", *(operand.name for operand in internal))
    return Program(
        "gated_delta", axes, (v, g, beta, q, k), (y,), (Result("sum", ("y",)),), "gated_delta", (), dtype, scan,
        internal,
    )  # fmt: skip


def _of_groups(names: str, heads: int, groups: int, dim: str) -> list[Operand]:
    """Inputs that the consecutive heads of a group share. Raises ValueError if the heads do not divide by the groups."""
    if groups < 1 or heads % groups:
        raise ValueError(f"{heads} heads do not divide into {groups} groups")
    if groups == 1:
        return [Operand(name, ("batch", "seq", dim), "seq") for name in names]
    return [Operand(name, ("batch", "seq", "heads", dim), "seq", (("heads", heads // groups),)) for name in names]


def with_lasting_states(program: Program, inputs: Tensors) -> dict[str, Tensor]:
    """Change inputs so that states neither grow nor fade before the sequence ends.

    Every block then matters to all later ones, and outputs have about one size.
    """
    return {**inputs, **_RECURRENCES[program.tile].lasting(inputs, 4 / program.axis("seq").size)}


def scan_tile(program: Program, inputs: Tensors, indices: Tensors) -> dict[str, Tensor]:
    """Compute y of a tile, block by block, each from the state that enters it (without one: from zero)."""
    carry, (blocks, slots) = inputs.get("entering_state"), _blocks(program, inputs, indices)
    compute = _RECURRENCES[program.tile].compute
    outputs = [compute(block, None if carry is None else carry[:, n])[0] for n, block in enumerate(blocks)]
    y = torch.empty_like(torch.cat(outputs, 1))
    for place, output in zip(slots, outputs, strict=True):
        y[:, place] = output
    return {"y": y}


def summarize(program: Program, inputs: Tensors, indices: Tensors) -> tuple[Tensor, ...]:
    """The summaries of a tile's blocks as in `Scan`: (batch, blocks, heads, ...), and a copy of the rates, if any."""
    blocks, _ = _blocks(program, inputs, indices)
    summaries = [_RECURRENCES[program.tile].summarize(block) for block in blocks]
    rates = (inputs["A"].clone(),) if "A" in inputs else ()
    return (*(torch.stack(each, 1) for each in zip(*summaries, strict=True)), *rates)


def pass_states(program: Program, states: Tensor, decays: Tensor, *rates: Tensor) -> Tensor:
    """The state that enters each block, from the summaries of all blocks.

    Blocks are numbered by rank, whereas states pass by position: in zigzag order, blocks 2r and 2r+1 are at positions r and
    2P-1-r.
    """
    kept = _RECURRENCES[program.tile].kept
    entering, state = torch.empty_like(states), torch.zeros_like(states[:, 0])
    for n in sorted(range(states.shape[1]), key=lambda number: _position(program, number)):
        entering[:, n] = state
        state = kept(state, decays[:, n], *rates) + states[:, n]
    return entering


def _position(program: Program, number: int) -> int:
    """The position in the sequence of block `number`."""
    count = program.axis("blocks").size
    if program.axis("seq").order == "contiguous" or count == 1:
        return number
    return count - 1 - number // 2 if number % 2 else number // 2


def _blocks(program: Program, inputs: Tensors, indices: Tensors) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
    """Return (inputs, in at least fp32; slots in the tile) of each block of a tile, in the order of their numbers."""
    count = program.axis("blocks").size
    numbers = {_position(program, number): number for number in range(count)}
    order = indices["seq"].argsort()
    slots = order.split(program.axis("seq").size // count)
    first = [int(indices["seq"][place[0]]) * count // program.axis("seq").size for place in slots]
    slots = [place for _, place in sorted(zip((numbers[position] for position in first), slots, strict=True))]
    wide = {name: x.to(at_least_fp32(x.dtype)) for name, x in inputs.items() if name != "entering_state"}
    return [{name: x if name == "A" else x[:, place] for name, x in wide.items()} for place in slots], slots


def _selective_scan(block: Tensors, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Token by token: (y (batch, tokens, heads, dim), final state (batch, heads, dim, state))."""
    x, dt, rates = (block[name] for name in ("x", "dt", "A"))
    b, c = (_per_head(block[name], x.shape[2]).unsqueeze(3) for name in "BC")  # (batch, tokens, heads, 1, state)
    decay = torch.exp(dt.unsqueeze(-1) * rates)  # (batch, tokens, heads, state)
    entry = (dt.unsqueeze(-1) * x).unsqueeze(-1) * b  # (batch, tokens, heads, dim, state)
    state = torch.zeros_like(entry[:, 0]) if state is None else state
    outputs = []
    for t in range(x.shape[1]):
        state = decay[:, t, :, None] * state + entry[:, t]
        outputs.append((state * c[:, t]).sum(-1))
    return torch.stack(outputs, 1), state


def _gated_delta(block: Tensors, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Token by token: (y (batch, tokens, heads, value_dim), final state (batch, heads, key_dim, value_dim))."""
    v, beta, decay = block["v"], block["beta"].unsqueeze(-1), torch.exp(block["g"])[..., None, None]
    # q, k: (batch, tokens, heads, key_dim, 1); state: (batch, heads, key_dim, value_dim)
    q, k = (_per_head(_normalized(block[name]), v.shape[2]).unsqueeze(-1) for name in "qk")
    state = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3]) if state is None else state
    outputs = []
    for t in range(v.shape[1]):
        state = decay[:, t] * state
        change = beta[:, t] * (v[:, t] - (k[:, t] * state).sum(2))
        state = state + k[:, t] * change.unsqueeze(2)
        outputs.append((q[:, t] * state).sum(2))
    return torch.stack(outputs, 1) * q.shape[3] ** -0.5, state


def _summary_of_gated_delta(block: Tensors) -> tuple[Tensor, Tensor]:
    """(final state from zero, map). The map is the final state from the unit matrix, with values of zero."""
    v, size = block["v"], block["k"].shape[-1]
    state = torch.cat([v.new_zeros(size, v.shape[3]), torch.eye(size, dtype=v.dtype, device=v.device)], 1)
    values = torch.cat([v, v.new_zeros(*v.shape[:3], size)], 3)
    _, final = _gated_delta({**block, "v": values}, state.expand(v.shape[0], v.shape[2], -1, -1))
    return final[..., : v.shape[3]], final[..., v.shape[3] :]


def _normalized(x: Tensor) -> Tensor:
    """Divide q or k by its length."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def _per_head(x: Tensor, heads: int) -> Tensor:
    """(batch, tokens, n) or (batch, tokens, groups, n) -> (batch, tokens, heads, n)."""
    x = x.unsqueeze(2) if x.ndim == 3 else x  # (batch, tokens, groups, n)
    return x.repeat_interleave(heads // x.shape[2], 2)


class _Recurrence(NamedTuple):
    """The functions in which scanned programs differ.

    Attributes:
        compute: (block, the state that enters it, or None) -> (y, the state that leaves it).
        summarize: block -> (its final state from zero, its decay).
        kept: (state, decay, rates) -> the part of a state that a block keeps.
        lasting: (inputs, share) -> inputs in place of some of these, with which a token takes about this share of a state
            away.
    """

    compute: Callable[[Tensors, Tensor | None], tuple[Tensor, Tensor]]
    summarize: Callable[[Tensors], tuple[Tensor, Tensor]]
    kept: Callable[..., Tensor]
    lasting: Callable[[Tensors, float], dict[str, Tensor]]


_RECURRENCES = {
    "selective_scan": _Recurrence(
        _selective_scan,
        lambda block: (_selective_scan(block, None)[1], block["dt"].sum(1)),
        lambda state, steps, rates: torch.exp(steps[..., None, None] * rates[:, None]) * state,
        lambda inputs, share: {"dt": inputs["dt"].abs(), "A": inputs["A"].abs() * -share},
    ),
    "gated_delta": _Recurrence(
        _gated_delta,
        _summary_of_gated_delta,
        lambda state, matrix: matrix @ state,
        lambda inputs, share: {"g": inputs["g"].abs() * -share, "beta": inputs["beta"].abs() * share},
    ),
}
