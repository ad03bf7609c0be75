"""The selective scan and SSD by mamba-ssm's CUDA kernels, with the interface of `kernels.scan`."""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import cuda_kernels
from .implementations import CUDA_SELECTIVE_SCAN, CUDA_SELECTIVE_STEP, CUDA_SSD, CUDA_SSD_STEP

SSD_CHUNK = 256  # tokens per chunk, as in mamba-ssm's own modules (modules/mamba2.py)
SELECTIVE_CHUNK = 2048  # tokens between two states that selective_scan_fn stores (selective_scan.cpp)
RESPONSE_BUDGET = 2**26  # the most elements of a tensor (rows, tokens, N, channels) that `_response` allocates


# The selective scan


def supports_selective_scan(
    x: Tensor, dt: Tensor, A_log: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor | None, dt_bias: Tensor | None,
    state: Tensor | None,
) -> bool:  # fmt: skip
    """Return True if a kernel supports these arguments of `scan.selective_scan`.

    `selective_state_update` has no gradients. `selective_scan_fn` starts from zeros, so `selective_scan` adds the effect of
    an initial state, without gradients. The kernel has no gradient of the final state either; see
    `scan._FinalStateGradient`.
    """
    inputs = (A_log.shape[1], x, dt, A_log, B, C, D, z, dt_bias, state)
    if x.shape[1] == 1:
        rows_within = cuda_kernels.rows_within
        return CUDA_SELECTIVE_STEP.takes(*inputs) and len(x) <= rows_within(A_log.numel(), x, dt, B, C, z, state)
    if torch.is_grad_enabled() and state is not None:
        return False
    return CUDA_SELECTIVE_SCAN.takes(*inputs) and _selective_rows(x, dt, A_log, B, C, z) > 0


def _selective_rows(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, z: Tensor | None) -> int:
    """The most rows for one call of `selective_scan_fn`, which stores two values per chunk for each element of A."""
    chunks = -(-x.shape[1] // SELECTIVE_CHUNK)
    return cuda_kernels.rows_within(2 * chunks * A.numel(), x, dt, B, C, z)


def selective_scan(
    x: Tensor, dt: Tensor, A_log: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor | None, dt_bias: Tensor | None,
    state: Tensor | None, overwrite: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`scan.selective_scan` by mamba-ssm's kernels. y has gradients, the final state has none."""
    A, D, dt_bias = -torch.exp(A_log.float()), D.float(), dt_bias if dt_bias is None else dt_bias.float()
    if x.shape[1] == 1:
        return _selective_step(x, dt, A, B, C, D, z, dt_bias, state, overwrite)
    tokens = functools.partial(_selective_tokens, A, D, dt_bias)
    y, final_state = cuda_kernels.by_rows(tokens, _selective_rows(x, dt, A, B, C, z), x, dt, B, C, z)
    if state is None:
        return y, final_state
    added, remaining = _response(dt, A, C, dt_bias, state.float())
    return (y + (added if z is None else added * F.silu(z.float()))).to(x.dtype), final_state + remaining


def _selective_step(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor | None, dt_bias: Tensor | None,
    state: Tensor | None, overwrite: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output of one token and the next state (mamba_ssm/ops/triton/selective_state_update.py).

    The kernel supports any strides and overwrites its state, (batch, channels, N). It raises an error without a dt_bias.
    """
    batch, _, channels = x.shape
    state = cuda_kernels.overwritable(state, (batch, A.shape[1], channels), torch.float32, x, overwrite)
    y = cuda_kernels.load_kernel("selective_state_update").item(
        state.transpose(1, 2), x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], D, z=None if z is None else z[:, 0],
        dt_bias=torch.zeros_like(D) if dt_bias is None else dt_bias, dt_softplus=dt_bias is not None,
    )  # fmt: skip
    return y.unsqueeze(1), state


def _selective_tokens(
    A: Tensor, D: Tensor, dt_bias: Tensor | None, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, z: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The outputs of several tokens and the final state, starting from zeros.

    See mamba_ssm/ops/selective_scan_interface.py and csrc/selective_scan/selective_scan.cpp. The kernel's tensors are
    (batch, channels, seq), contiguous and of one dtype; A, D and dt_bias are float32. Its final state is (batch, channels,
    N), and "the gradient of the last state is not considered in the backward pass".
    """
    dtype = cuda_kernels.common_dtype(x, dt, B, C, z)
    inputs = (x, dt, B, C, z)
    converted: list[Any] = [t if t is None else t.to(dtype).transpose(1, 2).contiguous() for t in inputs]
    u, delta, B, C, z = converted
    y, final_state = cuda_kernels.load_kernel("selective_scan_fn").item(
        u, delta, A, B, C, D.contiguous(), z=z, delta_bias=dt_bias if dt_bias is None else dt_bias.contiguous(),
        delta_softplus=dt_bias is not None, return_last_state=True,
    )  # fmt: skip
    return y.transpose(1, 2).to(x.dtype), final_state.detach().transpose(1, 2).contiguous()


def _response(dt: Tensor, A: Tensor, C: Tensor, dt_bias: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
    """The summands of y and of the final state that come from the initial state (batch, N, channels), in float32.

    The recurrence is linear in its state, so h_t contains the summand exp(A (dt_1 + ... + dt_t)) h_0. No exponent is
    positive, so nothing overflows.
    """
    rows = max(1, RESPONSE_BUDGET // state[:1].numel())
    return cuda_kernels.by_rows(functools.partial(_response_of_rows, A, dt_bias), rows, dt, C, state)


def _response_of_rows(A: Tensor, dt_bias: Tensor | None, dt: Tensor, C: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """`_response` for some rows of the batch. RESPONSE_BUDGET limits the tokens that are computed at a time."""
    dt, C = dt.float(), C.float()
    total = (dt if dt_bias is None else F.softplus(dt + dt_bias)).cumsum(1)  # (rows, seq, channels)
    A = A.t()  # (N, channels)
    tokens = max(1, RESPONSE_BUDGET // state.numel())
    added = []
    for total_part, C_part in zip(total.split(tokens, 1), C.split(tokens, 1), strict=True):
        states = (total_part.unsqueeze(2) * A).exp_().mul_(state.unsqueeze(1))  # (rows, tokens, N, channels)
        added.append(torch.matmul(C_part.unsqueeze(2), states).squeeze(2))
    return torch.cat(added, 1), torch.exp(total[:, -1:] * A) * state


# SSD


def supports_ssd(x: Tensor, dt: Tensor, A_log: Tensor, B: Tensor, C: Tensor, D: Tensor, state: Tensor | None) -> bool:
    """Return True if a kernel supports these arguments of `scan.ssd`.

    `mamba_chunk_scan_combined` has all gradients, including those of the states, but multiplies float32 in TF32. So torch
    computes float32, unless torch itself may use TF32, or a lower precision under autocast.
    """
    inputs = (B.shape[3], x, dt, A_log, B, C, D, state)
    if x.shape[1] == 1:
        rows_within, allocated = cuda_kernels.rows_within, x.shape[2] * x.shape[3] * B.shape[3]
        return CUDA_SSD_STEP.takes(*inputs) and len(x) <= rows_within(allocated, x, dt, B, C, state)
    if not CUDA_SSD.takes(*inputs) or not _ssd_rows(x, dt, B, C, state):
        return False
    may_round = cuda_kernels.may_use_tf32() or torch.is_autocast_enabled(x.device.type)
    return may_round or cuda_kernels.common_dtype(x, B, C) is not torch.float32


def _ssd_rows(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, state: Tensor | None) -> int:
    """The most rows for one call of `mamba_chunk_scan_combined`, which allocates the states, dt and C B^T of each chunk."""
    _, seq, heads, head_dim = x.shape
    groups, size = B.shape[2:]
    chunk = max(heads * head_dim * size, heads * SSD_CHUNK, groups * SSD_CHUNK * SSD_CHUNK)
    return cuda_kernels.rows_within(-(-seq // SSD_CHUNK) * chunk, x, dt, B, C, state)


def ssd(
    x: Tensor, dt: Tensor, A_log: Tensor, B: Tensor, C: Tensor, D: Tensor, state: Tensor | None, overwrite: bool = False
) -> tuple[Tensor, Tensor]:
    """`scan.ssd` by mamba-ssm's kernels."""
    A, D, dt = -torch.exp(A_log.float()), D.float(), dt.float()
    if x.shape[1] == 1:
        return _ssd_step(x, dt, A, B, C, D, state, overwrite)
    return cuda_kernels.by_rows(functools.partial(_ssd_tokens, A, D), _ssd_rows(x, dt, B, C, state), x, dt, B, C, state)


def _ssd_step(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, state: Tensor | None, overwrite: bool
) -> tuple[Tensor, Tensor]:
    """The output of one token and the next state, by the kernel of the selective scan.

    Strides of 0 tell it that A and dt have one value per head. Its state is (batch, heads, head_dim, N).
    """
    batch, _, heads, head_dim = x.shape
    size = B.shape[3]
    state = cuda_kernels.overwritable(state, (batch, heads, size, head_dim), torch.float32, x, overwrite)
    dt, D, no_bias = (t.unsqueeze(-1).expand(*t.shape, head_dim) for t in (dt[:, 0], D, torch.zeros_like(D)))
    A = A[:, None, None].expand(heads, head_dim, size)
    y = cuda_kernels.load_kernel("selective_state_update").item(
        state.transpose(2, 3), x[:, 0], dt, A, B[:, 0], C[:, 0], D, dt_bias=no_bias
    )
    return y.unsqueeze(1), state


def _ssd_tokens(
    A: Tensor, D: Tensor, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The outputs of several tokens and the final state (mamba_ssm/ops/triton/ssd_combined.py).

    The kernel needs x, B and C of one dtype, supports any strides, and has states (batch, heads, head_dim, N). It sums in
    float32, but multiplies in the dtype of x, also the states between chunks. The final state is float32. Its backward pass
    takes the gradient of the final state and returns that of the initial one (`_state_passing_bwd`).
    """
    dtype = cuda_kernels.common_dtype(x, B, C)
    y, final_state = cuda_kernels.load_kernel("mamba_chunk_scan_combined").item(
        x.to(dtype), dt, A, B.to(dtype), C.to(dtype), SSD_CHUNK, D=D.contiguous(),
        initial_states=None if state is None else state.float().transpose(2, 3), return_final_states=True,
    )  # fmt: skip
    if y.requires_grad:  # the kernel's backward pass computes offsets from its strides
        y.register_hook(
            lambda dy: dy if cuda_kernels.last_offset(dy) <= cuda_kernels.LARGEST_OFFSET else dy.contiguous()
        )
    return y.to(x.dtype), final_state.transpose(2, 3).contiguous()
