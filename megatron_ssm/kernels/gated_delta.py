"""The gated delta rule, with its plain twin: a recurrence that decays its state and corrects the value stored for a key.

For each value head, with the state S (K, V), the log decay g <= 0 and the rate beta of a token,

    S <- exp(g) S;  d = beta (v - S^T k);  S <- S + k d^T;  y = S^T q          (Gated Delta Networks, equation 10)

q and k are normalized first, and q is divided by sqrt(K). As in `kernels.scan`, tensors are (batch, seq, ...) of this rank's
heads, nothing is communicated, and the states before the first token and after the last one are at least fp32 and have
gradients. Four forms: `gated_delta_ref`, token by token, differentiated by autograd; torch, in chunks; C, on the CPU; and
the kernels of flash-linear-attention, on CUDA.

For a chunk of tokens (section 3.3, the UT transform), let c_i be the sum of g up to token i of the chunk, and
L_ij = exp(c_i - c_j). Then

    (I + A) [U | W] = beta [v | exp(c) k],  A_ij = beta_i (k_i . k_j) L_ij below the diagonal;  D = U - W S
    y = exp(c) q S + (q k^T * L) D up to the diagonal;  S <- exp(c_last) S + (exp(c_last - c) k)^T D
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from commfabric.collectives.wire_formats import at_least_fp32

from . import cuda_kernels, kernels
from .arguments import are_float32
from .implementations import CUDA_GATED_DELTA, CUDA_GATED_DELTA_STEP, GATED_DELTA

CHUNK = 64  # tokens of a chunk in torch
NORM_EPS = 1e-6  # added to the sum of squares of q and k


def normalized(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def gated_delta_ref(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The plain form of `gated_delta`: one token after the other, differentiated by autograd."""
    wide = at_least_fp32(q.dtype)
    repeat = v.shape[2] // k.shape[2]
    q_, k_, v_ = (t.to(wide) for t in (q, k, v))
    q_ = normalized(q_).repeat_interleave(repeat, dim=2) * q.shape[3] ** -0.5  # (batch, seq, value heads, K)
    k_ = normalized(k_).repeat_interleave(repeat, dim=2)
    S = v_.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3]) if state is None else state  # (batch, heads, K, V)
    outputs = []
    for t in range(v.shape[1]):
        S = torch.exp(g[:, t]).to(wide)[..., None, None] * S
        recalled = (k_[:, t].unsqueeze(-2) @ S).squeeze(-2)
        S = S + k_[:, t].unsqueeze(-1) * (beta[:, t].to(wide).unsqueeze(-1) * (v_[:, t] - recalled)).unsqueeze(-2)
        outputs.append((q_[:, t].unsqueeze(-2) @ S).squeeze(-2))
    return torch.stack(outputs, 1).to(v.dtype), S


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None, overwrite: bool = False,
    one_by_one: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gated delta rule; see the module for its equations. Both results have gradients.

    Args:
        q, k: (batch, seq, key heads, K) with seq >= 1, not normalized.
        v: (batch, seq, value heads, V). value heads/key heads consecutive value heads use the same q and k.
        g, beta: (batch, seq, value heads), at least fp32.
        state: (batch, value heads, K, V), at least fp32. None: zeros.
        overwrite: True if, without gradients, the final state may be written into `state`.
        one_by_one: True if, without gradients, the C and CUDA kernels must give the same bits as one call per token.

    Returns:
        (y, like v; the final state, like `state`).
    """
    size = k.shape[3]
    if not torch.is_grad_enabled() and are_float32(g, beta) and GATED_DELTA.takes(size, q, k, v):
        return kernels.gated_delta(q, k, v, g, beta, state, overwrite, one_by_one)
    if supports_gated_delta(q, k, v, g, beta, state, one_by_one):
        return _gated_delta_cuda(q, k, v, g, beta, state, one_by_one)
    wide = at_least_fp32(v.dtype)
    with torch.autocast(v.device.type, enabled=False):
        inputs: list[Any] = [t if t is None else t.to(wide) for t in (q, k, v, g, beta, state)]
        if torch.is_grad_enabled() and GATED_DELTA.takes(size, *inputs):
            y, state = _NativeForward.apply(*inputs)
        elif torch.is_grad_enabled():
            y, state = checkpoint(_chunks, *inputs, use_reentrant=False, preserve_rng_state=False)
        else:
            y, state = _chunks(*inputs)
        return y.to(v.dtype), state


class _NativeForward(torch.autograd.Function):
    """`gated_delta` by the C kernel. Backward computes it again in torch, chunk by chunk, and differentiates that."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*inputs)
        return kernels.gated_delta(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, adjoint: Tensor) -> tuple[Tensor | None, ...]:
        inputs: list[Any] = [t if t is None else t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad(), torch.autocast(dy.device.type, enabled=False):
            outputs = _chunks(*inputs)
        gradients = iter(torch.autograd.grad(outputs, [t for t in inputs if t is not None], (dy, adjoint)))
        return tuple(t if t is None else next(gradients) for t in inputs)


def _chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    (batch, seq, heads, width), (groups, size) = v.shape, k.shape[2:]
    length = min(CHUNK, seq)
    chunks = -(-seq // length)

    def in_chunks(x: Tensor, has_value_heads: bool) -> Tensor:
        """(batch, seq, heads, ...) -> (batch, chunks, key heads, value heads per key head or 1, tokens of a chunk, ...).

        Padding has g = 0 and beta = 0, so it does not change the state.
        """
        padded = torch.cat([x, x.new_zeros(batch, chunks * length - seq, *x.shape[2:])], dim=1) if seq % length else x
        chunked = padded.view(batch, chunks, length, groups, heads // groups if has_value_heads else 1, *x.shape[3:])
        return chunked.movedim(2, 4)

    # Letters of the shapes: batch, n = chunks, h = key heads, r = value heads per key head, t = tokens of a chunk, K, V.
    q, k = in_chunks(normalized(q) * size**-0.5, False), in_chunks(normalized(k), False)  # (b, n, h, 1, t, K)
    v, g, beta = in_chunks(v, True), in_chunks(g, True), in_chunks(beta, True)  # (b, n, h, r, t, V), (b, n, h, r, t)
    sums = g.double().cumsum(-1)
    lower = torch.ones(length, length, dtype=torch.bool, device=v.device).tril()
    within = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).to(v.dtype).masked_fill(~lower, float("-inf")).exp()
    decay, to_end = sums.to(v.dtype).exp(), (sums[..., -1:] - sums).to(v.dtype).exp()
    triangle = (beta.unsqueeze(-1) * (k @ k.mT) * within).tril(-1)  # A, (b, n, h, r, t, t)
    right = beta.unsqueeze(-1) * torch.cat([v, (decay.unsqueeze(-1) * k)], dim=-1)
    U, W = torch.linalg.solve_triangular(triangle, right, upper=False, unitriangular=True).split([width, size], dim=-1)
    scores, read, written = (q @ k.mT) * within, decay.unsqueeze(-1) * q, (to_end.unsqueeze(-1) * k).mT
    shape = (batch, groups, heads // groups, size, width)
    S, outputs = v.new_zeros(shape) if state is None else state.reshape(shape), []
    for n in range(chunks):
        D = U[:, n] - W[:, n] @ S  # (b, h, r, t, V)
        outputs.append(read[:, n] @ S + scores[:, n] @ D)
        S = decay[:, n, ..., -1:, None] * S + written[:, n] @ D
    y = torch.stack(outputs, 1).movedim(4, 2).reshape(batch, chunks * length, heads, width)[:, :seq]
    return y, S.reshape(batch, heads, size, width)


# flash-linear-attention's CUDA kernels


def supports_gated_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, one_by_one: bool
) -> bool:
    """Return True if a kernel supports these arguments of `gated_delta`.

    The kernel for chunks multiplies float32 in TF32. So torch computes float32, unless torch itself may use TF32, or a lower
    precision under autocast.
    """
    inputs = (q, k, v, g, beta, state)
    if _is_recurrent(v, one_by_one):
        return CUDA_GATED_DELTA_STEP.takes(k.shape[3], *inputs)
    fits = CUDA_GATED_DELTA.takes(k.shape[3], *inputs)
    may_round = cuda_kernels.may_use_tf32() or torch.is_autocast_enabled(v.device.type)
    return fits and (may_round or cuda_kernels.common_dtype(q, k, v) is not torch.float32)


def _gated_delta_cuda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, one_by_one: bool
) -> tuple[Tensor, Tensor]:
    """`gated_delta` by flash-linear-attention, which copies tensors that are not contiguous.

    `fused_recurrent_gated_delta_rule` computes one token after the other, and has no gradient of g. `chunk_gated_delta_rule`
    has all gradients, including those of the states. Both normalize q and k, and (since fla-core 0.6) support several value
    heads for each key head.
    """
    dtype = cuda_kernels.common_dtype(q, k, v)
    implementation = CUDA_GATED_DELTA_STEP if _is_recurrent(v, one_by_one) else CUDA_GATED_DELTA
    y, final_state = cuda_kernels.load_kernel(implementation.kernel).item(
        q.to(dtype), k.to(dtype), v.to(dtype), g=g, beta=beta, initial_state=state, output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    return y.to(v.dtype), final_state


def _is_recurrent(v: Tensor, one_by_one: bool) -> bool:
    return not torch.is_grad_enabled() and (one_by_one or v.shape[1] == 1)
