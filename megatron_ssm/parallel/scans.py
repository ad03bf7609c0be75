"""The recurrences of Mamba-1, Mamba-2 and gated delta nets over context ranks; exact, including the gradients.

Every tensor with tokens is in blocks (`blocks.ContextRanks.to_blocks`): (batch * blocks of this rank, block length, ...).
Forward computes each block's summary, passes the states (`state_passing`), and runs the one-rank scan from these states. The
scan's own backward then needs only the gradient of each block's final state, which `_AddFinalStateGradient` computes. It is
applied to the outputs of the scan, so its backward runs before the scan's: from the gradient of the outputs it computes the
adjoint states, passes them between the blocks, and returns both gradients to the scan. Nothing is differentiated twice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.autograd.function import once_differentiable

from megatron_ssm.kernels.gated_delta import gated_delta
from megatron_ssm.kernels.scan import selective_scan, ssd

from .blocks import ContextRanks
from .state_passing import PassedStates, pass_matrix_states, pass_states
from .summaries import delta_adjoint, delta_summary, selective_adjoint, selective_summary, ssd_adjoint, ssd_summary

NO_STEP = -1e4  # a value of dt for which softplus(dt + dt_bias) is zero


class _AddFinalStateGradient(torch.autograd.Function):
    """The outputs y, unchanged; backward also returns the gradient of `final`, the final states of the blocks.

    adjoint(dy, *tensors) computes the part of the gradient of the blocks' incoming states that comes from y, in the shape of
    `final`. to_channels and from_channels convert between this shape and (batch, blocks of a rank, channels, n), that of
    `state_passing`.
    """

    @staticmethod
    def forward(ctx, y, final, passed, adjoint, to_channels, from_channels, *tensors):
        ctx.passed, ctx.adjoint, ctx.to_channels, ctx.from_channels = passed, adjoint, to_channels, from_channels
        ctx.save_for_backward(*tensors)
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        tensors = ctx.saved_tensors
        final = ctx.from_channels(ctx.passed.adjoints(ctx.to_channels(ctx.adjoint(dy, *tensors))))
        return dy, final, None, None, None, None, *(None for _ in tensors)


@dataclass(frozen=True)
class ScanInputs:
    """The inputs of `kernels.scan.selective_scan` for consecutive channels that share B and C.

    Attributes:
        x, dt, z: (batch * blocks of a rank, block length, channels).
        B, C: (batch * blocks of a rank, block length, N).
        A_log: (channels, N).
        D, dt_bias: (channels,).
    """

    x: torch.Tensor
    dt: torch.Tensor
    A_log: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    D: torch.Tensor
    z: torch.Tensor | None
    dt_bias: torch.Tensor | None

    def summary(self) -> tuple[torch.Tensor, torch.Tensor]:
        return selective_summary(self.x, self.dt, self.A_log, self.B, self.dt_bias)

    def first(self, n: int, kept: torch.Tensor | None) -> "ScanInputs":
        """The inputs of the first n tokens, without gate. Where `kept` (batch, n) is False, tokens do not change the
        state."""
        x, dt, B, C = (t[:, :n] for t in (self.x, self.dt, self.B, self.C))
        dt = dt if kept is None else dt.masked_fill(~kept.unsqueeze(-1), NO_STEP)
        return replace(self, x=x, dt=dt, B=B, C=C, z=None)

    def scan(
        self, state: torch.Tensor | None, overwrite: bool = False, overwrite_x: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = self.x, self.dt, self.A_log, self.B, self.C, self.D, self.z, self.dt_bias, state
        return selective_scan(*inputs, overwrite=overwrite, overwrite_x=overwrite_x)


def selective_scan_over_context(
    heads: Sequence[ScanInputs], context: ContextRanks, initial: torch.Tensor | None = None
) -> tuple[torch.Tensor, PassedStates]:
    """`kernels.scan.selective_scan` in blocks: (y like x, the passed states, with n = N for each channel).

    For each block, forward sends N + 1 elements per channel and returns N; backward sends N and N (see `state_passing`).

    Args:
        heads: The inputs of each head of a Mamba-1 mixer. Outputs and states of the heads are concatenated.
        initial: (batch, N, channels), the incoming state of the sequence, the same on every rank; None: zeros. It gets no
            gradient.
    """

    def to_channels(states: torch.Tensor) -> torch.Tensor:
        return states.transpose(1, 2).unflatten(0, (-1, context.blocks_per_rank))

    def from_channels(states: torch.Tensor) -> torch.Tensor:
        return states.flatten(0, 1).transpose(1, 2)

    def adjoint(dy: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        """The gradients of incoming states. tensors: dt, A_log, C, z and dt_bias of each head in turn."""
        parts = zip(dy.split(widths, dim=-1), zip(*[iter(tensors)] * 5, strict=True), strict=True)
        return torch.cat([selective_adjoint(part, *inputs) for part, inputs in parts], dim=-1)

    widths = [head.x.shape[-1] for head in heads]

    @torch.no_grad()
    def pass_on() -> PassedStates:
        states, sums = (torch.cat(parts, dim=-1) for parts in zip(*(head.summary() for head in heads), strict=True))
        rates = -torch.exp(torch.cat([head.A_log for head in heads]))
        sums = sums.unflatten(0, (-1, context.blocks_per_rank))
        first = None if initial is None else initial.transpose(1, 2)
        return pass_states(to_channels(states), sums, rates, context, first)

    passed = context.recomputation.communicate_once(pass_on)
    incoming = from_channels(passed.incoming).split(widths, dim=-1)
    scans = [head.scan(state.contiguous()) for head, state in zip(heads, incoming, strict=True)]
    y, final = (torch.cat(parts, dim=-1) for parts in zip(*scans, strict=True))
    tensors = [t for head in heads for t in (head.dt, head.A_log, head.C, head.z, head.dt_bias)]
    return _add_final_state_gradient(y, final, passed, adjoint, to_channels, from_channels, *tensors), passed


def ssd_over_context(
    x: torch.Tensor,
    dt: torch.Tensor,
    A_log: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    context: ContextRanks,
    initial: torch.Tensor | None = None,
) -> tuple[torch.Tensor, PassedStates]:
    """`kernels.scan.ssd` in blocks: (y like x, the passed states, with n = N * head_dim for each head).

    initial: (batch, heads, N, head_dim). Otherwise as `selective_scan_over_context`.
    """
    to_channels, from_channels = _with_heads_as_channels(context, B.shape[3], x.shape[3])

    @torch.no_grad()
    def pass_on() -> PassedStates:
        states, sums = ssd_summary(x, dt, A_log, B)
        sums = sums.unflatten(0, (-1, context.blocks_per_rank))
        first = None if initial is None else initial.flatten(2)
        return pass_states(to_channels(states), sums, -torch.exp(A_log).unsqueeze(1), context, first)

    passed = context.recomputation.communicate_once(pass_on)
    y, final = ssd(x, dt, A_log, B, C, D, from_channels(passed.incoming))
    return _add_final_state_gradient(y, final, passed, ssd_adjoint, to_channels, from_channels, dt, A_log, C), passed


def gated_delta_over_context(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    context: ContextRanks,
    initial: torch.Tensor | None = None,
) -> tuple[torch.Tensor, PassedStates]:
    """`kernels.gated_delta.gated_delta` in blocks: (y like v, the passed states, with n = K V for each value head).

    initial: (batch, value heads, K, V). For each block, forward sends K V + K K elements per value head and returns K V;
    backward sends K V and K V. Otherwise as `selective_scan_over_context`.
    """
    to_channels, from_channels = _with_heads_as_channels(context, k.shape[3], v.shape[3])

    @torch.no_grad()
    def pass_on() -> PassedStates:
        states, maps = delta_summary(k, v, g, beta)
        first = None if initial is None else initial.flatten(2)
        maps = maps.unflatten(0, (-1, context.blocks_per_rank))
        return pass_matrix_states(to_channels(states), maps, context, first)

    passed = context.recomputation.communicate_once(pass_on)
    y, final = gated_delta(q, k, v, g, beta, from_channels(passed.incoming))
    tensors = q, k, g, beta
    return _add_final_state_gradient(y, final, passed, delta_adjoint, to_channels, from_channels, *tensors), passed


def _with_heads_as_channels(context: ContextRanks, *shape: int) -> tuple[Callable, Callable]:
    """Functions that convert states (batch * blocks, heads, *shape) to the shape of `state_passing`, and back."""

    def to_channels(states: torch.Tensor) -> torch.Tensor:
        return states.flatten(2).unflatten(0, (-1, context.blocks_per_rank))

    def from_channels(states: torch.Tensor) -> torch.Tensor:
        return states.flatten(0, 1).unflatten(2, shape)

    return to_channels, from_channels


def _add_final_state_gradient(
    y: torch.Tensor,
    final: torch.Tensor,
    passed: PassedStates,
    adjoint: Callable,
    to_channels: Callable,
    from_channels: Callable,
    *tensors,
) -> torch.Tensor:
    if not torch.is_grad_enabled():
        return y
    return _AddFinalStateGradient.apply(y, final, passed, adjoint, to_channels, from_channels, *tensors)
