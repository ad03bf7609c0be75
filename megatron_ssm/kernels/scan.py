"""The two state-space recurrences: Mamba-1's selective scan and Mamba-2's SSD, each with a reference implementation (*_ref).

Both compute on tensors (batch, seq, ...) of this rank's channels or heads, and send nothing. Both take the state before the
first token and return the state after the last one, and both states have gradients. So a sequence may be split anywhere
(chunked prefill, decoding, context parallelism). States and sums are at least fp32. Each has four forms:

- `*_ref`, one token after the other, differentiated by autograd;
- torch, in chunks of tokens;
- C, on the CPU;
- mamba-ssm's kernels, on CUDA. `implementations` lists the calls that they support.

The backward passes recompute the states, chunk by chunk. Only `*_ref` stores a tensor over (seq, channels, N).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from commfabric.collectives.wire_formats import at_least_fp32

from . import cuda_scans, kernels
from .arguments import are_float32
from .implementations import SELECTIVE_SCAN, SSD

SELECTIVE_CHUNK = 16  # tokens whose tensors (batch, chunk, N, channels) are in memory at once
SSD_CHUNK = 32  # tokens per chunk of the form with matrix products


def selective_scan_ref(
    x: Tensor, dt: Tensor, A_log: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor | None = None,
    dt_bias: Tensor | None = None, state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The plain form of `selective_scan`: one token after the other, differentiated by autograd."""
    wide = at_least_fp32(x.dtype)
    x_, dt, B, C = (t.to(wide) for t in (x, dt, B, C))
    dt = dt if dt_bias is None else F.softplus(dt + dt_bias)
    h = x_.new_zeros(x.shape[0], A_log.shape[1], x.shape[2]) if state is None else state  # (batch, N, channels)
    outputs = []
    for t in range(x.shape[1]):
        decay = torch.exp(-dt[:, t, None, :] * A_log.exp().t())  # (batch, N, channels)
        h = decay * h + (dt[:, t] * x_[:, t])[:, None, :] * B[:, t, :, None]
        outputs.append((h * C[:, t, :, None]).sum(1) + D * x_[:, t])
    y = torch.stack(outputs, 1)
    return (y if z is None else y * F.silu(z.to(wide))).to(x.dtype), h


def selective_scan(
    x: Tensor, dt: Tensor, A_log: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor | None = None,
    dt_bias: Tensor | None = None, state: Tensor | None = None, overwrite: bool = False, overwrite_x: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t;  y_t = (<C_t, h_t> + D x_t) silu(z_t)  (Mamba, Algorithm 2).

    Both results have gradients.

    Args:
        x: (batch, seq, channels) with seq >= 1.
        dt: The step sizes, like x. If dt_bias is not None, they are softplus(dt + dt_bias).
        A_log: (channels, N), with A = -exp(A_log).
        B, C: (batch, seq, N).
        D: (channels,).
        z: The gate, like x, or None.
        dt_bias: (channels,), or None.
        state: (batch, N, channels), at least fp32. None: zeros.
        overwrite: True if, without gradients, the final state may be written into `state`.
        overwrite_x: True if, without gradients, y may be written into x.

    Returns:
        (y, like x; the final state, like `state`).
    """
    size = A_log.shape[1]
    if not torch.is_grad_enabled() and are_float32(A_log, D, dt_bias) and SELECTIVE_SCAN.takes(size, x, dt, B, C, z):
        return kernels.selective_scan(x, dt, A_log, B, C, D, z, dt_bias, state, overwrite, overwrite_x)[:2]
    wide, inputs = at_least_fp32(x.dtype), (x, dt, A_log, B, C, D, z, dt_bias, state)
    on_cuda = cuda_scans.supports_selective_scan(*inputs)
    with torch.autocast(x.device.type, enabled=False):
        if on_cuda:
            y, state = cuda_scans.selective_scan(*inputs, overwrite)
            return y, _FinalStateGradient.apply(
                state, x, dt, A_log, B, C, dt_bias
            ) if torch.is_grad_enabled() else state
        converted: list[Any] = [t if t is None else t.to(wide) for t in inputs]
        scan = _NativeSelectiveScan.apply if SELECTIVE_SCAN.takes(size, *converted) else _selective_chunks
        y, state = scan(*converted)
        return y.to(x.dtype), state


class _FinalStateGradient(torch.autograd.Function):
    """The gradient of the final state of `cuda_scans.selective_scan`, whose kernel has none.

    The sequence starts from zeros. If the final state, (batch, N, channels), has a gradient, backward repeats the scan in
    torch and differentiates that state alone.
    """

    @staticmethod
    def forward(ctx: Any, final_state: Tensor, *inputs: Tensor | None) -> Tensor:
        ctx.save_for_backward(*inputs)
        return final_state.view_as(final_state)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, adjoint: Tensor) -> tuple[Tensor | None, ...]:
        inputs: list[Any] = [t if t is None else t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            converted: list[Any] = [t if t is None else t.to(adjoint.dtype) for t in inputs]
            x, dt, A_log, B, C, dt_bias = converted
            _, final_state = _selective_chunks(x, dt, A_log, B, C, x.new_zeros(x.shape[2]), None, dt_bias, None)
        gradients = iter(torch.autograd.grad(final_state, [t for t in inputs if t is not None], adjoint))
        return None, *(t if t is None else next(gradients) for t in inputs)


class _NativeSelectiveScan(torch.autograd.Function):
    """`selective_scan` by the C kernels. Forward stores the state before each chunk of tokens."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dt: Tensor, A_log: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor | None,
        dt_bias: Tensor | None, state: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        y, final_state, saved = kernels.selective_scan(x, dt, A_log, B, C, D, z, dt_bias, state, save=True)
        ctx.save_for_backward(x, dt, A_log, B, C, D, z, dt_bias, saved)
        ctx.from_zero = state is None
        return y, final_state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, adjoint: Tensor) -> tuple[Tensor | None, ...]:
        arguments = (*ctx.saved_tensors, dy, adjoint)
        *gradients, dstate = kernels.selective_scan_backward(*arguments)
        return *gradients, None if ctx.from_zero else dstate


def _selective_chunks(
    x: Tensor, dt: Tensor, A_log: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor | None, dt_bias: Tensor | None,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dt = dt if dt_bias is None else F.softplus(dt + dt_bias)
    if state is None:
        state = x.new_zeros(x.shape[0], A_log.shape[1], x.shape[2])
    A = -torch.exp(A_log).t()
    y, state = _SelectiveScan.apply(x, dt, A.contiguous(), B, C, state)
    y = torch.addcmul(y, D, x)
    return y if z is None else y * F.silu(z), state


def _decays_and_inputs(x: Tensor, dt: Tensor, A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """exp(dt A) and dt x B of a chunk: two tensors (batch, chunk, N, channels)."""
    return torch.exp(dt.unsqueeze(2) * A), (dt * x).unsqueeze(2) * B.unsqueeze(3)


def _states(decay: Tensor, inputs: Tensor, state: Tensor) -> Tensor:
    """The states after each token, (batch, chunk, N, channels), starting from `state`. They overwrite `inputs`."""
    for t in range(inputs.shape[1]):
        state = torch.addcmul(inputs[:, t], decay[:, t], state, out=inputs[:, t])
    return inputs


class _SelectiveScan(torch.autograd.Function):
    """The recurrence. Forward stores the state before each chunk; backward recomputes the states of one chunk at a time.

    With g_t = dLoss/dh_t:  g_t = C_t dy_t + exp(dt_{t+1} A) g_{t+1}, starting from the final state's gradient (`adjoint`).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        outputs, before_chunks = [], []
        for chunk in range(0, x.shape[1], SELECTIVE_CHUNK):
            part = slice(chunk, chunk + SELECTIVE_CHUNK)
            before_chunks.append(state)
            states = _states(*_decays_and_inputs(x[:, part], dt[:, part], A, B[:, part]), state)
            outputs.append(torch.matmul(C[:, part].unsqueeze(2), states).squeeze(2))
            state = states[:, -1].clone()
        ctx.save_for_backward(x, dt, A, B, C, *before_chunks)
        return torch.cat(outputs, 1), state

    @staticmethod
    def backward(ctx: Any, dy: Tensor, adjoint: Tensor) -> tuple[Tensor, ...]:
        x, dt, A, B, C, *before_chunks = ctx.saved_tensors
        dx, ddt, dB, dC = (torch.empty_like(t) for t in (x, dt, B, C))
        dA = torch.zeros_like(A)
        adjoint = adjoint.contiguous()
        for i in reversed(range(len(before_chunks))):
            part = slice(i * SELECTIVE_CHUNK, (i + 1) * SELECTIVE_CHUNK)
            x_, dt_, B_, C_, dy_ = (t[:, part] for t in (x, dt, B, C, dy))
            decay, inputs = _decays_and_inputs(x_, dt_, A, B_)
            states = _states(decay, inputs, before_chunks[i])
            dC[:, part] = torch.matmul(states, dy_.unsqueeze(3)).squeeze(3)
            g = C_.unsqueeze(3) * dy_.unsqueeze(2)  # (batch, chunk, N, channels)
            for t in reversed(range(g.shape[1])):
                adjoint = decay[:, t] * g[:, t].add_(adjoint)
            before = torch.cat([before_chunks[i].unsqueeze(1), states[:, :-1]], 1)
            d_dt_A = before.mul_(decay).mul_(g)  # the gradient of dt A
            dA += (d_dt_A * dt_.unsqueeze(2)).sum((0, 1))
            d_dt_x = torch.matmul(B_.unsqueeze(2), g).squeeze(2)  # the gradient of dt x
            dx[:, part] = d_dt_x * dt_
            ddt[:, part] = torch.addcmul((d_dt_A * A).sum(2), d_dt_x, x_)
            dB[:, part] = torch.matmul(g, (dt_ * x_).unsqueeze(3)).squeeze(3)
        return dx, ddt, dA, dB, dC, adjoint


def ssd_ref(
    x: Tensor, dt: Tensor, A_log: Tensor, B: Tensor, C: Tensor, D: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The plain form of `ssd`: one token after the other, differentiated by autograd."""
    wide = at_least_fp32(x.dtype)
    batch, seq, heads, head_dim = x.shape
    repeat = heads // B.shape[2]
    x_, dt = x.to(wide), dt.to(wide)
    B, C = (t.to(wide).repeat_interleave(repeat, dim=2) for t in (B, C))
    h = x_.new_zeros(batch, heads, B.shape[3], head_dim) if state is None else state  # (batch, heads, N, head_dim)
    outputs = []
    for t in range(seq):
        decay = torch.exp(-dt[:, t] * A_log.exp())[:, :, None, None]
        h = decay * h + B[:, t, :, :, None] * (dt[:, t, :, None] * x_[:, t])[:, :, None, :]
        outputs.append((h * C[:, t, :, :, None]).sum(-2) + D[:, None] * x_[:, t])
    return torch.stack(outputs, 1).to(x.dtype), h


def ssd(
    x: Tensor, dt: Tensor, A_log: Tensor, B: Tensor, C: Tensor, D: Tensor, state: Tensor | None = None,
    overwrite: bool = False, one_by_one: bool = False, may_round: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """h_t = exp(dt_t A) h_{t-1} + dt_t B_t (x) x_t;  y_t = C_t h_t + D x_t  (Mamba-2, section 6: block decomposition).

    Both results have gradients.

    Args:
        x: (batch, seq, heads, head_dim) with seq >= 1.
        dt: The step sizes after softplus, (batch, seq, heads).
        A_log: (heads,), with A = -exp(A_log).
        B, C: (batch, seq, groups, N). heads/groups consecutive heads use the same group.
        D: (heads,).
        state: (batch, heads, N, head_dim), at least fp32. None: zeros.
        overwrite: True if, without gradients, the final state may be written into `state`.
        one_by_one: True if, without gradients, the C kernels must give the same bits as one call per token.
        may_round: True if, without gradients, the C kernels may round factors to bfloat16. They never round the final state.

    Returns:
        (y, like x; the final state, like `state`).
    """
    wide, size = at_least_fp32(x.dtype), B.shape[3]
    if not torch.is_grad_enabled() and are_float32(dt, A_log, D) and SSD.takes(size, x, B, C):
        return kernels.ssd(x, dt, A_log, B, C, D, state, overwrite, one_by_one=one_by_one, may_round=may_round)[:2]
    inputs = (x, dt, A_log, B, C, D, state)
    on_cuda = cuda_scans.supports_ssd(*inputs)
    with torch.autocast(x.device.type, enabled=False):
        if on_cuda:
            return cuda_scans.ssd(*inputs, overwrite)
        converted: list[Any] = [t if t is None else t.to(wide) for t in inputs]
        scan = _NativeSsd.apply if SSD.takes(size, *converted) else _ssd_torch
        y, state = scan(*converted)
        return y.to(x.dtype), state


class _NativeSsd(torch.autograd.Function):
    """`ssd` by the C kernels. Backward repeats forward to get the states before the chunks, which need the most memory."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*inputs)
        y, final_state, _ = kernels.ssd(*inputs)
        return y, final_state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, adjoint: Tensor) -> tuple[Tensor | None, ...]:
        x, dt, A_log, B, C, D, state = ctx.saved_tensors
        _, _, saved = kernels.ssd(x, dt, A_log, B, C, D, state, save=True)
        assert saved is not None
        *gradients, dstate = kernels.ssd_backward(x, dt, A_log, B, C, D, saved, dy, adjoint)
        return *gradients, None if state is None else dstate


def _ssd_torch(
    x: Tensor, dt: Tensor, A_log: Tensor, B: Tensor, C: Tensor, D: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    inputs = (x, dt, -torch.exp(A_log), B, C)
    if state is None:
        state = x.new_zeros(x.shape[0], x.shape[2], B.shape[3], x.shape[3])
    if x.shape[1] == 1:
        y, state = _ssd_step(*inputs, state)
    elif torch.is_grad_enabled():
        y, state = checkpoint(_ssd_chunks, *inputs, state, use_reentrant=False, preserve_rng_state=False)
    else:
        y, state = _ssd_chunks(*inputs, state)
    return torch.addcmul(y, D.unsqueeze(-1), x), state


def _ssd_step(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    batch, _, heads, head_dim = x.shape
    groups, size = B.shape[2:]
    repeat = heads // groups
    decay = torch.exp(dt[:, 0] * A)[..., None, None]
    dt_x = (dt[:, 0].unsqueeze(-1) * x[:, 0]).view(batch, groups, repeat, 1, head_dim)
    B, C = (t.view(batch, groups, 1, size) for t in (B, C))  # (batch, groups, 1, N)
    state = torch.addcmul((B.unsqueeze(-1) * dt_x).view_as(state), decay, state)
    y = torch.matmul(C.unsqueeze(-2), state.view(batch, groups, repeat, size, head_dim))
    return y.view(batch, 1, heads, head_dim), state


def _ssd_chunks(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """`ssd` of several tokens, without D.

    Within a chunk, the output is one masked product (C B^T * decay) dt x. A recurrence over the chunks computes the state
    before each chunk, whose contribution is added (Mamba-2, section 6).
    """
    batch, seq, heads, head_dim = x.shape
    groups, size = B.shape[2:]
    q = min(SSD_CHUNK, seq)
    pad = -seq % q
    if pad:  # a token with dt = 0 does not change the state
        x, dt, B, C = (F.pad(t, (0, 0) * (t.ndim - 2) + (0, pad)) for t in (x, dt, B, C))
    chunks = (seq + pad) // q
    by_group = (batch, chunks, q, groups, heads // groups)
    # Letters of the shapes: batch, n = chunks, groups, r = heads per group, q, p = head_dim, N.
    exponent = (dt * A).double().view(by_group).permute(0, 1, 3, 4, 2).cumsum(-1)  # (b, n, g, r, q), summed in fp64
    lower = torch.ones(q, q, dtype=torch.bool, device=x.device).tril()
    within = (exponent.unsqueeze(-1) - exponent.unsqueeze(-2)).to(x.dtype).masked_fill(~lower, float("-inf")).exp()
    to_end = (exponent[..., -1:] - exponent).to(x.dtype).exp()  # (b, n, g, r, q)
    decay = exponent.to(x.dtype).exp()  # from the beginning of the chunk

    dt_x = (dt.unsqueeze(-1) * x).view(*by_group, head_dim).permute(0, 1, 3, 4, 2, 5)  # (b, n, g, r, q, p)
    B, C = (t.view(batch, chunks, q, groups, size).transpose(2, 3) for t in (B, C))  # (b, n, g, q, N)
    scores = torch.matmul(C, B.transpose(-1, -2)).unsqueeze(3)  # (b, n, g, 1, q, q)
    y = torch.matmul(scores * within, dt_x)  # (b, n, g, r, q, p)
    added = torch.matmul(B.transpose(-1, -2).unsqueeze(3), dt_x * to_end.unsqueeze(-1))  # (b, n, g, r, N, p)

    state = state.view(batch, groups, heads // groups, size, head_dim)
    before_chunks = []
    for n in range(chunks):
        before_chunks.append(state)
        state = torch.addcmul(added[:, n], decay[:, n, ..., -1, None, None], state)
    from_earlier_chunks = torch.matmul(C.unsqueeze(3), torch.stack(before_chunks, 1))  # (b, n, g, r, q, p)
    y = torch.addcmul(y, decay.unsqueeze(-1), from_earlier_chunks)
    y = y.permute(0, 1, 4, 2, 3, 5).reshape(batch, seq + pad, heads, head_dim)[:, :seq]
    return y, state.reshape(batch, heads, size, head_dim)
