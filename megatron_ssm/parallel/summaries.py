"""The effect of a block of a recurrence on other blocks: its final state from zeros, and the gradient of its incoming state.

Both are linear recurrences over the tokens of a block, without outputs. For Mamba-2 each is one matrix product, because a
head has one decay per token; for Mamba-1 they are computed token by token.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ssm.kernels import kernels
from megatron_ssm.kernels.arguments import address, c_array, check_shapes, contiguous, token_major, token_strides
from megatron_ssm.kernels.gated_delta import gated_delta
from megatron_ssm.kernels.kernels import functions
from megatron_ssm.kernels.scan import SELECTIVE_CHUNK, selective_scan


def selective_carry(
    values: Tensor, dt: Tensor, A_log: Tensor, weights: Tensor, z: Tensor | None, dt_bias: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor]:
    """The final state of a block from zeros, or the gradient of its initial state; all tensors are float32.

    Args:
        values: x, or with `reverse` the gradient of the outputs: (batch, seq, channels).
        dt: (batch, seq, channels).
        A_log: (channels, N) with N <= LARGEST_STATE.
        weights: B, or with `reverse` C: (batch, seq, N).
        z: The gate, (batch, seq, channels), with `reverse`; or None.
        dt_bias: (channels,), or None.
        reverse: True for the gradient of the initial state.

    Returns:
        (the state or the gradient (batch, N, channels); the sums of the step sizes (batch, channels)).
    """
    batch, seq, channels = values.shape
    size = A_log.shape[1]
    check_shapes(
        dt=(dt, (batch, seq, channels)), A_log=(A_log, (channels, size)), weights=(weights, (batch, seq, size)),
        z=(z, (batch, seq, channels)), dt_bias=(dt_bias, (channels,)),
    )  # fmt: skip
    values, dt, weights, z = (token_major(t) for t in (values, dt, weights, z))
    A_log, dt_bias = contiguous(A_log, dt_bias)
    state, sums = values.new_empty(batch, size, channels), values.new_empty(batch, channels)
    strides = [*token_strides(values), *token_strides(dt), *token_strides(weights), 0, 0, *token_strides(z)]
    functions().selective_carry(
        values.data_ptr(), dt.data_ptr(), A_log.data_ptr(), weights.data_ptr(), address(z), address(dt_bias),
        state.data_ptr(), sums.data_ptr(), c_array(*strides), batch, seq, channels, size, reverse, torch.get_num_threads(),
    )  # fmt: skip
    return state, sums


def step_sizes(dt: torch.Tensor, dt_bias: torch.Tensor | None) -> torch.Tensor:
    return dt if dt_bias is None else F.softplus(dt + dt_bias)


def selective_summary(
    x: torch.Tensor, dt: torch.Tensor, A_log: torch.Tensor, B: torch.Tensor, dt_bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(final state from zeros (batch, N, channels), sum of the step sizes (batch, channels)) of `selective_scan`.

    x, dt: (batch, seq, channels); A_log: (channels, N); B: (batch, seq, N); dt_bias: (channels,) or None. The results have
    the dtype of A_log, at least fp32, as in the functions below.
    """
    wide = A_log.dtype
    x, dt, B = (t.to(wide) for t in (x, dt, B))
    if _fits_kernel(A_log, x, dt, B, dt_bias):
        return selective_carry(x, dt, A_log, B, None, dt_bias, reverse=False)
    D = torch.zeros_like(A_log[:, 0])
    _, state = selective_scan(x, dt, A_log, B, B, D, None, dt_bias)  # C, here B, does not affect the state
    return state, step_sizes(dt, dt_bias).sum(1)


def _fits_kernel(A_log: torch.Tensor, *tensors: torch.Tensor | None) -> bool:
    return A_log.dtype is torch.float32 and A_log.shape[1] <= kernels.LARGEST_STATE and kernels.usable(A_log, *tensors)


def selective_adjoint(
    dy: torch.Tensor,
    dt: torch.Tensor,
    A_log: torch.Tensor,
    C: torch.Tensor,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
) -> torch.Tensor:
    """The part of the gradient of the incoming state of `selective_scan` that comes from y: (batch, N, channels).

    dy: (batch, seq, channels), the gradient of y. The result is g_1 of g_t = exp(dt_t A) (g_{t+1} + C_t dy_t silu(z_t)).
    """
    wide = A_log.dtype
    dy, dt, C = (t.to(wide) for t in (dy, dt, C))
    z = None if z is None else z.to(wide)
    if _fits_kernel(A_log, dy, dt, C, z, dt_bias):
        return selective_carry(dy, dt, A_log, C, z, dt_bias, reverse=True)[0]
    dy = dy if z is None else dy * F.silu(z)
    dt, A = step_sizes(dt, dt_bias), -torch.exp(A_log).t()
    adjoint = dy.new_zeros(dy.shape[0], A.shape[0], dy.shape[2])
    for start in reversed(range(0, dy.shape[1], SELECTIVE_CHUNK)):
        part = slice(start, start + SELECTIVE_CHUNK)
        decay = torch.exp(dt[:, part].unsqueeze(2) * A)
        entry = C[:, part].unsqueeze(3) * dy[:, part].unsqueeze(2)
        for t in reversed(range(entry.shape[1])):
            adjoint = decay[:, t] * entry[:, t].add_(adjoint)
    return adjoint


def ssd_summary(
    x: torch.Tensor, dt: torch.Tensor, A_log: torch.Tensor, B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(final state from zeros (batch, heads, N, head_dim), sum of the step sizes (batch, heads)) of `kernels.scan.ssd`.

    x: (batch, seq, heads, head_dim); dt: (batch, seq, heads); A_log: (heads,); B: (batch, seq, groups, N).
    """
    exponents = _exponents(dt, A_log)
    to_end = (exponents[:, -1:] - exponents).to(A_log.dtype).exp()
    return _weighted_products(B, x, dt * to_end, A_log.dtype), dt.sum(1)


def ssd_adjoint(dy: torch.Tensor, dt: torch.Tensor, A_log: torch.Tensor, C: torch.Tensor) -> torch.Tensor:
    """The part of the gradient of the incoming state of `kernels.scan.ssd` that comes from y: (batch, heads, N, head_dim).

    dy: like x, the gradient of y. C: (batch, seq, groups, N).
    """
    return _weighted_products(C, dy, _exponents(dt, A_log).to(A_log.dtype).exp(), A_log.dtype)


def delta_summary(
    k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(final state from zeros (batch, value heads, K, V), map (batch, value heads, K, K)) of `gated_delta`.

    The map applied to an incoming state is its contribution to the final state. Columns of a state are independent, so K
    more columns with the identity as incoming state and v = 0 end as the map.
    """
    size, width = k.shape[3], v.shape[3]
    values = torch.cat([v, v.new_zeros(*v.shape[:3], size)], dim=-1)
    first = torch.cat([g.new_zeros(size, width), torch.eye(size, dtype=g.dtype, device=g.device)], dim=-1)
    first = first.expand(v.shape[0], v.shape[2], size, width + size)
    _, last = gated_delta(k, k, values, g, beta, first.contiguous())  # q, here k, does not affect the state
    state, transition = last.split([width, size], dim=-1)
    return state, transition


def delta_adjoint(
    dy: torch.Tensor, q: torch.Tensor, k: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """The part of the gradient of the incoming state of `gated_delta` that comes from y: (batch, value heads, K, V).

    dy: like y. The outputs for v = 0 and the identity as incoming state are the rows with which outputs read that state.
    """
    size, shape = k.shape[3], (*dy.shape[:3], k.shape[3])
    first = torch.eye(size, dtype=g.dtype, device=g.device).expand(len(dy), dy.shape[2], size, size).contiguous()
    rows, _ = gated_delta(q.to(g.dtype), k.to(g.dtype), dy.new_zeros(shape, dtype=g.dtype), g, beta, first)
    with torch.autocast(dy.device.type, enabled=False):  # states are at least fp32
        return torch.einsum("bthk,bthv->bhkv", rows, dy.to(g.dtype))


def _exponents(dt, A_log):
    """The sum of dt A up to and including each token, (batch, seq, heads), in float64."""
    return (dt * -torch.exp(A_log)).double().cumsum(1)


def _weighted_products(rows, columns, weights, dtype):
    """The sum over tokens of weights x rows (outer) columns: (batch, heads, N, head_dim).

    rows: (batch, seq, groups, N); columns: (batch, seq, heads, head_dim); weights: (batch, seq, heads).
    """
    batch, seq, heads, width = columns.shape
    groups, size = rows.shape[2:]
    # The heads of a group are concatenated: (batch, seq, groups, heads of the group * width).
    weighted = (columns.to(dtype) * weights.unsqueeze(-1)).view(batch, seq, groups, heads // groups * width)
    with torch.autocast(columns.device.type, enabled=False):  # states are at least fp32
        products = torch.matmul(rows.to(dtype).permute(0, 2, 3, 1), weighted.transpose(1, 2))
    return products.view(batch, groups, size, heads // groups, width).transpose(2, 3).reshape(batch, heads, size, width)
