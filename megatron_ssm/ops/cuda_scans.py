"""The selective scan and SSD by mamba-ssm's CUDA kernels, with the interface of `ops.scan`."""

import functools

import torch
import torch.nn.functional as F

from . import cuda_kernels

LARGEST_STATE = 256  # N of selective_scan_fn (selective_scan.cpp)
SSD_CHUNK = 256  # tokens, as in state-spaces (modules/mamba2.py)
SELECTIVE_CHUNK = 2048  # tokens, after which selective_scan_fn keeps a state (selective_scan.cpp)
RESPONSE_BUDGET = 2**26  # elements of decays (rows, tokens, N, channels) that are held at once


# The selective scan


def supports_selective_scan(x, dt, A_log, B, C, D, z, dt_bias, state) -> bool:
    """Whether a kernel computes this `scan.selective_scan`.

    `selective_state_update` has no gradients. `selective_scan_fn` starts from zeros, so the effect of an initial state
    is added here, without gradients. It has no gradient of the final state either; see `scan._AfterKernel`.
    """
    one_token = x.shape[1] == 1
    if torch.is_grad_enabled() and (one_token or state is not None):
        return False
    inputs = (x, dt, A_log, B, C, D, z, dt_bias, state)
    if one_token:
        usable = cuda_kernels.is_usable("selective_state_update", *inputs)
        return usable and len(x) <= cuda_kernels.rows_within(A_log.numel(), x, dt, B, C, z, state)
    fits = A_log.shape[1] <= LARGEST_STATE and cuda_kernels.is_usable("selective_scan_fn", *inputs)
    return fits and _selective_rows(x, dt, A_log, B, C, z) > 0


def _selective_rows(x, dt, A, B, C, z) -> int:
    """How many rows `selective_scan_fn` gets at a time; it keeps two values per chunk for each element of A."""
    chunks = -(-x.shape[1] // SELECTIVE_CHUNK)
    return cuda_kernels.rows_within(2 * chunks * A.numel(), x, dt, B, C, z)


def selective_scan(x, dt, A_log, B, C, D, z, dt_bias, state, overwrite=False):
    """`scan.selective_scan` by mamba-ssm; y has a gradient, the final state has none."""
    A, D, dt_bias = -torch.exp(A_log.float()), D.float(), dt_bias if dt_bias is None else dt_bias.float()
    if x.shape[1] == 1:
        return _selective_step(x, dt, A, B, C, D, z, dt_bias, state, overwrite)
    tokens = functools.partial(_selective_tokens, A, D, dt_bias)
    y, after = cuda_kernels.by_rows(tokens, _selective_rows(x, dt, A, B, C, z), x, dt, B, C, z)
    if state is None:
        return y, after
    added, left = _response(dt, A, C, dt_bias, state.float())
    return (y + (added if z is None else added * F.silu(z.float()))).to(x.dtype), after + left


def _selective_step(x, dt, A, B, C, D, z, dt_bias, state, overwrite):
    """One token (mamba_ssm/ops/triton/selective_state_update.py), with any strides; overwrites the state.

    The kernel's state is (batch, channels, N). It always gets a dt_bias, because it raises without one.
    """
    batch, _, channels = x.shape
    state = cuda_kernels.overwritable(state, (batch, A.shape[1], channels), torch.float32, x, overwrite)
    y = cuda_kernels.load_kernel("selective_state_update").item(
        state.transpose(1, 2), x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], D, z=None if z is None else z[:, 0],
        dt_bias=torch.zeros_like(D) if dt_bias is None else dt_bias, dt_softplus=dt_bias is not None,
    )  # fmt: skip
    return y.unsqueeze(1), state


def _selective_tokens(A, D, dt_bias, x, dt, B, C, z):
    """Several tokens from zeros (mamba_ssm/ops/selective_scan_interface.py, csrc/selective_scan/selective_scan.cpp).

    Its tensors are (batch, channels, seq) without gaps and of one type; A, D and dt_bias are float32. Its final state
    is (batch, channels, N), and "the gradient of the last state is not considered in the backward pass".
    """
    dtype = cuda_kernels.common_dtype(x, dt, B, C, z)
    u, delta, B, C, z = (t if t is None else t.to(dtype).transpose(1, 2).contiguous() for t in (x, dt, B, C, z))
    y, after = cuda_kernels.load_kernel("selective_scan_fn").item(
        u, delta, A, B, C, D.contiguous(), z=z, delta_bias=dt_bias if dt_bias is None else dt_bias.contiguous(),
        delta_softplus=dt_bias is not None, return_last_state=True,
    )  # fmt: skip
    return y.transpose(1, 2).to(x.dtype), after.detach().transpose(1, 2).contiguous()


def _response(dt, A, C, dt_bias, state):
    """What the initial state (batch, N, channels) adds to each y, and to the final state.

    The recurrence is linear in its state, so h_t contains exp(A (dt_1 + ... + dt_t)) h_0. In float32; no exponent is
    positive.
    """
    rows = max(1, RESPONSE_BUDGET // state[:1].numel())
    return cuda_kernels.by_rows(functools.partial(_response_of_rows, A, dt_bias), rows, dt, C, state)


def _response_of_rows(A, dt_bias, dt, C, state):
    """`_response` of some rows, for as many tokens at a time as RESPONSE_BUDGET allows."""
    dt, C = dt.float(), C.float()
    total = (dt if dt_bias is None else F.softplus(dt + dt_bias)).cumsum(1)
    decay = A.t()  # (N, channels)
    tokens = max(1, RESPONSE_BUDGET // state.numel())
    added = []
    for piece, read in zip(total.split(tokens, 1), C.split(tokens, 1), strict=True):
        kept = (piece.unsqueeze(2) * decay).exp_().mul_(state.unsqueeze(1))  # (rows, tokens, N, channels)
        added.append(torch.matmul(read.unsqueeze(2), kept).squeeze(2))
    return torch.cat(added, 1), torch.exp(total[:, -1:] * decay) * state


# SSD


def supports_ssd(x, dt, A_log, B, C, D, state) -> bool:
    """Whether a kernel computes this `scan.ssd`.

    `mamba_chunk_scan_combined` has every gradient, those of the states included. But Triton multiplies float32 in TF32,
    so torch computes float32, unless torch may use TF32 as well, or lower precision under autocast.
    """
    inputs = (x, dt, A_log, B, C, D, state)
    if x.shape[1] == 1:
        usable = not torch.is_grad_enabled() and cuda_kernels.is_usable("selective_state_update", *inputs)
        return usable and len(x) <= cuda_kernels.rows_within(x[0].numel() * B.shape[3], x, dt, B, C, state)
    if not cuda_kernels.is_usable("mamba_chunk_scan_combined", *inputs) or not _ssd_rows(x, dt, B, C, state):
        return False
    rounded = _rounds_products() or torch.is_autocast_enabled(x.device.type)
    return rounded or cuda_kernels.common_dtype(x, B, C) is not torch.float32


def _ssd_rows(x, dt, B, C, state) -> int:
    """How many rows `mamba_chunk_scan_combined` gets at a time; it keeps states, dt and products of C and B."""
    _, seq, heads, head_dim = x.shape
    groups, size = B.shape[2:]
    chunk = max(heads * head_dim * size, heads * SSD_CHUNK, groups * SSD_CHUNK * SSD_CHUNK)
    return cuda_kernels.rows_within(-(-seq // SSD_CHUNK) * chunk, x, dt, B, C, state)


def _rounds_products() -> bool:
    """Whether torch may use TF32 for float32. The older of its two settings raises an error if the newer one was used."""
    switch = torch.backends.cuda.matmul
    return switch.fp32_precision == "tf32" if hasattr(switch, "fp32_precision") else switch.allow_tf32


def ssd(x, dt, A_log, B, C, D, state, overwrite=False):
    """`scan.ssd` by mamba-ssm."""
    A, D, dt = -torch.exp(A_log.float()), D.float(), dt.float()
    if x.shape[1] == 1:
        return _ssd_step(x, dt, A, B, C, D, state, overwrite)
    return cuda_kernels.by_rows(functools.partial(_ssd_tokens, A, D), _ssd_rows(x, dt, B, C, state), x, dt, B, C, state)


def _ssd_step(x, dt, A, B, C, D, state, overwrite):
    """One token, by the kernel of the selective scan; strides of 0 tell it that A and dt have one value per head.

    The kernel's state is (batch, heads, head_dim, N).
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


def _ssd_tokens(A, D, x, dt, B, C, state):
    """Several tokens (mamba_ssm/ops/triton/ssd_combined.py): x, B and C of one dtype, any strides; states transposed.

    The kernel sums in float32, but multiplies in the dtype of x, also the states between chunks. The final state is
    float32. Its backward takes the gradient of the final state and returns that of the initial one
    (`_state_passing_bwd`).
    """
    dtype = cuda_kernels.common_dtype(x, B, C)
    y, after = cuda_kernels.load_kernel("mamba_chunk_scan_combined").item(
        x.to(dtype), dt, A, B.to(dtype), C.to(dtype), SSD_CHUNK, D=D.contiguous(),
        initial_states=None if state is None else state.float().transpose(2, 3), return_final_states=True,
    )  # fmt: skip
    if y.requires_grad:  # backward loads it by its strides
        y.register_hook(
            lambda dy: dy if cuda_kernels.last_offset(dy) <= cuda_kernels.LARGEST_OFFSET else dy.contiguous()
        )
    return y.to(x.dtype), after.transpose(2, 3).contiguous()
