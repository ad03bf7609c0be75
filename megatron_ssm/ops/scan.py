"""The two state-space recurrences: Mamba-1's selective scan and Mamba-2's SSD, each with its plain twin.

Both run on token-major tensors, (batch, seq, ...), on this rank's channels or heads alone: nothing is communicated.
Both take the state before the first token and return the state after the last, differentiably in both directions, so
that a sequence may be cut anywhere (chunked prefill, decoding, context parallelism). States and sums are at least fp32.
Each has four forms: `*_ref`, one token after the other; the same in chunks, in torch; a C kernel, which runs where it can;
and on CUDA mamba-ssm's kernels, where they can. In backward the states are recomputed chunk by chunk; no tensor over
(seq, channels, state) is ever stored.
"""

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from megatron_ssm.native import kernels
from sparsefusion.collectives.wire_formats import at_least_fp32

from . import cuda_scans

SELECTIVE_CHUNK = 16  # tokens whose (channels, state) products are held at once
SSD_CHUNK = 32  # tokens per block of the chunked matmul form


def selective_scan_ref(x, dt, A_log, B, C, D, z=None, dt_bias=None, state=None):
    """The plain form of `selective_scan`: one token after the other, differentiated by autograd."""
    wide = at_least_fp32(x.dtype)
    x_, dt, B, C = (t.to(wide) for t in (x, dt, B, C))
    dt = dt if dt_bias is None else F.softplus(dt + dt_bias)
    h = x_.new_zeros(x.shape[0], A_log.shape[1], x.shape[2]) if state is None else state
    outputs = []
    for t in range(x.shape[1]):
        decay = torch.exp(-dt[:, t, None, :] * A_log.exp().t())
        h = decay * h + (dt[:, t] * x_[:, t])[:, None, :] * B[:, t, :, None]
        outputs.append((h * C[:, t, :, None]).sum(1) + D * x_[:, t])
    y = torch.stack(outputs, 1)
    return (y if z is None else y * F.silu(z.to(wide))).to(x.dtype), h


def selective_scan(x, dt, A_log, B, C, D, z=None, dt_bias=None, state=None, overwrite=False, overwrite_x=False):
    """h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t;  y_t = (<C_t, h_t> + D x_t) silu(z_t)  (Mamba, Algorithm 2).

    x: (batch, seq, channels); dt: the same, becomes softplus(dt + dt_bias) unless dt_bias is None; A = -exp(A_log):
    (channels, N); B, C: (batch, seq, N); D, dt_bias: (channels,); z: like x (None: no gate).
    state: (batch, N, channels), at least fp32 (None: zeros); channels stand last so that they are contiguous. overwrite:
    the final state may take its place in memory; overwrite_x: y may take that of x (both without gradients). Returns y
    like x, and the final state.
    """
    fits = A_log.shape[1] <= kernels.LARGEST_STATE
    if fits and not torch.is_grad_enabled() and kernels.usable(x, dt, B, C, z) and kernels.exact(A_log, D, dt_bias):
        return kernels.selective_scan(x, dt, A_log, B, C, D, z, dt_bias, state, overwrite, overwrite_x)[:2]
    wide, inputs = at_least_fp32(x.dtype), (x, dt, A_log, B, C, D, z, dt_bias, state)
    on_cuda = cuda_scans.supports_selective_scan(*inputs)
    with torch.autocast(x.device.type, enabled=False):
        if on_cuda:
            y, state = cuda_scans.selective_scan(*inputs, overwrite)
            return y, _AfterKernel.apply(state, x, dt, A_log, B, C, dt_bias) if torch.is_grad_enabled() else state
        inputs = [t if t is None else t.to(wide) for t in inputs]
        scan = _NativeSelectiveScan.apply if fits and kernels.usable(inputs[0]) else _selective_chunks
        y, state = scan(*inputs)
        return y.to(x.dtype), state


class _AfterKernel(torch.autograd.Function):
    """The final state of `cuda_scans.selective_scan`, which gives it no gradient: torch does, if one is asked for.

    after: (batch, N, channels), of a sequence that starts from zeros. Backward runs it again, for this gradient alone.
    """

    @staticmethod
    def forward(ctx, after, *inputs):
        ctx.save_for_backward(*inputs)
        return after.view_as(after)

    @staticmethod
    @once_differentiable
    def backward(ctx, adjoint):
        inputs = [t if t is None else t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            x, dt, A_log, B, C, dt_bias = (t if t is None else t.to(adjoint.dtype) for t in inputs)
            _, after = _selective_chunks(x, dt, A_log, B, C, x.new_zeros(x.shape[2]), None, dt_bias, None)
        gradients = iter(torch.autograd.grad(after, [t for t in inputs if t is not None], adjoint))
        return None, *(t if t is None else next(gradients) for t in inputs)


class _NativeSelectiveScan(torch.autograd.Function):
    """The C kernels; forward keeps the state before each chunk."""

    @staticmethod
    def forward(ctx, x, dt, A_log, B, C, D, z, dt_bias, state):
        y, after, saved = kernels.selective_scan(x, dt, A_log, B, C, D, z, dt_bias, state, save=True)
        ctx.save_for_backward(x, dt, A_log, B, C, D, z, dt_bias, saved)
        ctx.from_zero = state is None
        return y, after

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, adjoint):
        *gradients, dstate = kernels.selective_scan_backward(*ctx.saved_tensors, dy, adjoint)
        return *gradients, None if ctx.from_zero else dstate


def _selective_chunks(x, dt, A_log, B, C, D, z, dt_bias, state):
    """`selective_scan` in torch, chunk by chunk."""
    dt = dt if dt_bias is None else F.softplus(dt + dt_bias)
    if state is None:
        state = x.new_zeros(x.shape[0], A_log.shape[1], x.shape[2])
    A = -torch.exp(A_log).t()
    y, state = _SelectiveScan.apply(x, dt, A.contiguous(), B, C, state)
    y = torch.addcmul(y, D, x)
    return y if z is None else y * F.silu(z), state


def _decays_and_inputs(x, dt, A, B):
    """exp(dt A) and dt x B for a chunk: two (batch, chunk, N, channels) tensors."""
    return torch.exp(dt.unsqueeze(2) * A), (dt * x).unsqueeze(2) * B.unsqueeze(3)


def _advance(decay, entry, state):
    """Overwrite `entry` (batch, chunk, N, channels) with the states h_t, starting from `state`; returns `entry`."""
    for t in range(entry.shape[1]):
        state = torch.addcmul(entry[:, t], decay[:, t], state, out=entry[:, t])
    return entry


class _SelectiveScan(torch.autograd.Function):
    """Forward keeps the state before each chunk; backward recomputes a chunk's states and runs the adjoint through them.

    With g_t = dLoss/dh_t:  g_t = C_t dy_t + exp(dt_{t+1} A) g_{t+1}, starting from the final state's gradient.
    """

    @staticmethod
    def forward(ctx, x, dt, A, B, C, state):
        outputs, entering = [], []
        for chunk in range(0, x.shape[1], SELECTIVE_CHUNK):
            part = slice(chunk, chunk + SELECTIVE_CHUNK)
            entering.append(state)
            states = _advance(*_decays_and_inputs(x[:, part], dt[:, part], A, B[:, part]), state)
            outputs.append(torch.matmul(C[:, part].unsqueeze(2), states).squeeze(2))
            state = states[:, -1].clone()
        ctx.save_for_backward(x, dt, A, B, C, *entering)
        return torch.cat(outputs, 1), state

    @staticmethod
    def backward(ctx, dy, adjoint):
        x, dt, A, B, C, *entering = ctx.saved_tensors
        dx, ddt, dB, dC = (torch.empty_like(t) for t in (x, dt, B, C))
        dA = torch.zeros_like(A)
        adjoint = adjoint.contiguous()
        for i in reversed(range(len(entering))):
            part = slice(i * SELECTIVE_CHUNK, (i + 1) * SELECTIVE_CHUNK)
            x_, dt_, B_, C_, dy_ = (t[:, part] for t in (x, dt, B, C, dy))
            decay, entry = _decays_and_inputs(x_, dt_, A, B_)
            states = _advance(decay, entry, entering[i])
            dC[:, part] = torch.matmul(states, dy_.unsqueeze(3)).squeeze(3)
            g = C_.unsqueeze(3) * dy_.unsqueeze(2)
            for t in reversed(range(g.shape[1])):
                adjoint = decay[:, t] * g[:, t].add_(adjoint)
            before = torch.cat([entering[i].unsqueeze(1), states[:, :-1]], 1)
            dexponent = before.mul_(decay).mul_(g)  # gradient of dt A
            dA += (dexponent * dt_.unsqueeze(2)).sum((0, 1))
            dinput = torch.matmul(B_.unsqueeze(2), g).squeeze(2)  # gradient of dt x
            dx[:, part] = dinput * dt_
            ddt[:, part] = torch.addcmul((dexponent * A).sum(2), dinput, x_)
            dB[:, part] = torch.matmul(g, (dt_ * x_).unsqueeze(3)).squeeze(3)
        return dx, ddt, dA, dB, dC, adjoint


def ssd_ref(x, dt, A_log, B, C, D, state=None):
    """The plain form of `ssd`: one token after the other, differentiated by autograd."""
    wide = at_least_fp32(x.dtype)
    batch, seq, heads, head_dim = x.shape
    repeat = heads // B.shape[2]
    x_, dt = x.to(wide), dt.to(wide)
    B, C = (t.to(wide).repeat_interleave(repeat, dim=2) for t in (B, C))
    h = x_.new_zeros(batch, heads, B.shape[3], head_dim) if state is None else state
    outputs = []
    for t in range(seq):
        decay = torch.exp(-dt[:, t] * A_log.exp())[:, :, None, None]
        h = decay * h + B[:, t, :, :, None] * (dt[:, t, :, None] * x_[:, t])[:, :, None, :]
        outputs.append((h * C[:, t, :, :, None]).sum(-2) + D[:, None] * x_[:, t])
    return torch.stack(outputs, 1).to(x.dtype), h


def ssd(x, dt, A_log, B, C, D, state=None, overwrite=False):
    """h_t = exp(dt_t A) h_{t-1} + dt_t B_t (x) x_t;  y_t = C_t h_t + D x_t  (Mamba-2, section 6: block decomposition).

    x: (batch, seq, heads, head_dim); dt: (batch, seq, heads), after softplus; A = -exp(A_log), D: (heads,);
    B, C: (batch, seq, groups, N), each group serving heads/groups neighbouring heads.
    state: (batch, heads, N, head_dim), at least fp32 (None: zeros). overwrite: the final state may take its place in
    memory (without gradients). Returns y like x, and the final state.
    """
    wide = at_least_fp32(x.dtype)
    fits = B.shape[3] <= kernels.LARGEST_STATE
    if fits and not torch.is_grad_enabled() and kernels.usable(x, B, C) and kernels.exact(dt, A_log, D):
        return kernels.ssd(x, dt, A_log, B, C, D, state, overwrite)[:2]
    inputs = (x, dt, A_log, B, C, D, state)
    on_cuda = cuda_scans.supports_ssd(*inputs)
    with torch.autocast(x.device.type, enabled=False):
        if on_cuda:
            return cuda_scans.ssd(*inputs, overwrite)
        inputs = [t if t is None else t.to(wide) for t in inputs]
        scan = _NativeSsd.apply if fits and kernels.usable(inputs[0]) else _ssd_torch
        y, state = scan(*inputs)
        return y.to(x.dtype), state


class _NativeSsd(torch.autograd.Function):
    """The C kernels. Backward runs forward again for the state before each chunk: they are larger than all else."""

    @staticmethod
    def forward(ctx, *inputs):
        ctx.save_for_backward(*inputs)
        y, after, _ = kernels.ssd(*inputs)
        return y, after

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, adjoint):
        *inputs, state = ctx.saved_tensors
        *_, saved = kernels.ssd(*inputs, state, save=True)
        *gradients, dstate = kernels.ssd_backward(*inputs, saved, dy, adjoint)
        return *gradients, None if state is None else dstate


def _ssd_torch(x, dt, A_log, B, C, D, state):
    """`ssd` in torch: one token, or chunks."""
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


def _ssd_step(x, dt, A, B, C, state):
    """One token."""
    batch, _, heads, head_dim = x.shape
    groups, size = B.shape[2:]
    decay = torch.exp(dt[:, 0] * A)[..., None, None]
    fed = (dt[:, 0].unsqueeze(-1) * x[:, 0]).view(batch, groups, -1, 1, head_dim)
    B, C = (t.view(batch, groups, 1, size) for t in (B, C))
    state = torch.addcmul((B.unsqueeze(-1) * fed).view_as(state), decay, state)
    y = torch.matmul(C.unsqueeze(-2), state.view(batch, groups, -1, size, head_dim))
    return y.view(batch, 1, heads, head_dim), state


def _ssd_chunks(x, dt, A, B, C, state):
    """Within a chunk of q tokens as one masked product (C B^T * decay) x, between chunks by a recurrence over states."""
    batch, seq, heads, head_dim = x.shape
    groups, size = B.shape[2:]
    q = min(SSD_CHUNK, seq)
    pad = -seq % q
    if pad:  # with dt = 0 a token neither decays nor feeds the state
        x, dt, B, C = (F.pad(t, (0, 0) * (t.ndim - 2) + (0, pad)) for t in (x, dt, B, C))
    chunks = (seq + pad) // q
    by_group = (batch, chunks, q, groups, heads // groups)
    decay = (
        (dt * A).double().view(by_group).permute(0, 1, 3, 4, 2).cumsum(-1)
    )  # (b, n, g, r, q): exponents add up in fp64
    lower = torch.ones(q, q, dtype=torch.bool, device=x.device).tril()
    within = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).to(x.dtype).masked_fill(~lower, float("-inf")).exp()
    to_end = (decay[..., -1:] - decay).to(x.dtype).exp()  # (b, n, g, r, q)
    decay = decay.to(x.dtype).exp()

    fed = (dt.unsqueeze(-1) * x).view(*by_group, head_dim).permute(0, 1, 3, 4, 2, 5)  # (b, n, g, r, q, p)
    B, C = (t.view(batch, chunks, q, groups, size).transpose(2, 3) for t in (B, C))  # (b, n, g, q, N)
    scores = torch.matmul(C, B.transpose(-1, -2)).unsqueeze(3)  # (b, n, g, 1, q, q)
    y = torch.matmul(scores * within, fed)  # (b, n, g, r, q, p)
    added = torch.matmul(B.transpose(-1, -2).unsqueeze(3), fed * to_end.unsqueeze(-1))  # (b, n, g, r, N, p)

    state = state.view(batch, groups, heads // groups, size, head_dim)
    entering = []
    for n in range(chunks):
        entering.append(state)
        state = torch.addcmul(added[:, n], decay[:, n, ..., -1, None, None], state)
    carried = torch.matmul(C.unsqueeze(3), torch.stack(entering, 1))  # (b, n, g, r, q, p)
    y = torch.addcmul(y, decay.unsqueeze(-1), carried)
    y = y.permute(0, 1, 4, 2, 3, 5).reshape(batch, seq + pad, heads, head_dim)[:, :seq]
    return y, state.reshape(batch, heads, size, head_dim)
