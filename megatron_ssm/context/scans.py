"""The recurrences of Mamba-1, Mamba-2 and gated delta nets over context ranks; exact, also their gradients.

Every tensor with tokens is in blocks (`blocks.ContextRanks.to_blocks`): (batch * blocks of this rank, block length, ...).
Forward computes each block's summary, passes the states (`state_passing`), and runs the one-rank scan from them. That scan's
own backward is complete if it is given the gradient of each block's final state. `_AddFinalStateGradient` computes that
gradient. It is applied to the outputs of the scan, so its backward runs before the scan's: it takes the gradient of the
outputs, passes the adjoint states between the blocks, and gives the scan both gradients. Nothing is differentiated twice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.autograd.function import once_differentiable

from megatron_ssm.ops.gated_delta import gated_delta
from megatron_ssm.ops.scan import selective_scan, ssd

from .blocks import ContextRanks
from .state_passing import PassedStates, pass_matrix_states, pass_states
from .summaries import (
    delta_adjoint,
    delta_summary,
    selective_adjoint,
    selective_summary,
    ssd_adjoint,
    ssd_summary,
)

NO_STEP = -1e4  # a step size before dt_bias and softplus, which make it zero


class _AddFinalStateGradient(torch.autograd.Function):
    """The outputs y as they are; backward also gives the gradient of the blocks' final states, `after`.

    adjoint(dy, *tensors): the gradient of the blocks' incoming states that comes from y, like after. to_channels and
    from_channels convert between its shape and that of `state_passing`, (batch, blocks of a rank, channels, n).
    """

    @staticmethod
    def forward(ctx, y, after, passed, adjoint, to_channels, from_channels, *tensors):
        ctx.passed, ctx.adjoint, ctx.to_channels, ctx.from_channels = passed, adjoint, to_channels, from_channels
        ctx.save_for_backward(*tensors)
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        tensors = ctx.saved_tensors
        after = ctx.from_channels(ctx.passed.adjoints(ctx.to_channels(ctx.adjoint(dy, *tensors))))
        return dy, after, None, None, None, None, *(None for _ in tensors)


@dataclass(frozen=True)
class ScanInputs:
    """The inputs of `ops.scan.selective_scan`, for neighbouring channels that share B and C.

    x, dt, z: (batch * blocks of a rank, block length, channels); B, C: the same with N in place of channels; A_log:
    (channels, N); D, dt_bias: (channels,).
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
        """See `summaries.selective_summary`."""
        return selective_summary(self.x, self.dt, self.A_log, self.B, self.dt_bias)

    def first(self, n: int, kept: torch.Tensor | None) -> "ScanInputs":
        """The inputs of the first n tokens, without gate; those where `kept` (batch, n) is False change no state."""
        x, dt, B, C = (t[:, :n] for t in (self.x, self.dt, self.B, self.C))
        dt = dt if kept is None else dt.masked_fill(~kept.unsqueeze(-1), NO_STEP)
        return replace(self, x=x, dt=dt, B=B, C=C, z=None)

    def scan(
        self, state: torch.Tensor | None, overwrite: bool = False, overwrite_x: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The outputs and the final states, from the incoming states; see `selective_scan`."""
        inputs = self.x, self.dt, self.A_log, self.B, self.C, self.D, self.z, self.dt_bias, state
        return selective_scan(*inputs, overwrite=overwrite, overwrite_x=overwrite_x)


def selective_scan_over_context(
    heads: Sequence[ScanInputs], context: ContextRanks, initial: torch.Tensor | None = None
) -> tuple[torch.Tensor, PassedStates]:
    """`ops.scan.selective_scan` in blocks: (y like x, the passed states, with n = N for each channel).

    heads: channels that do not share B and C (heads of a Mamba-1 mixer) are given apart; their outputs and states stand side
    by side. initial: (batch, N, channels), the state that enters the sequence, the same on every rank (None: zeros); it gets
    no gradient. Forward sends of each block N + 1 numbers per channel and N back, backward N and N: see `state_passing`.
    """

    def to_channels(states: torch.Tensor) -> torch.Tensor:
        return states.transpose(1, 2).unflatten(0, (-1, context.blocks_per_rank))

    def from_channels(states: torch.Tensor) -> torch.Tensor:
        return states.flatten(0, 1).transpose(1, 2)

    def adjoint(dy: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        """The gradients of the states that enter blocks. tensors: dt, A_log, C, z and dt_bias of each head in turn."""
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
    y, after = (torch.cat(parts, dim=-1) for parts in zip(*scans, strict=True))
    tensors = [t for head in heads for t in (head.dt, head.A_log, head.C, head.z, head.dt_bias)]
    return _add_final_state_gradient(y, after, passed, adjoint, to_channels, from_channels, *tensors), passed


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
    """`ops.scan.ssd` in blocks: (y like x, the passed states, with n = N * head_dim for each head).

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
    y, after = ssd(x, dt, A_log, B, C, D, from_channels(passed.incoming))
    return _add_final_state_gradient(y, after, passed, ssd_adjoint, to_channels, from_channels, dt, A_log, C), passed


def gated_delta_over_context(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    context: ContextRanks,
    initial: torch.Tensor | None = None,
) -> tuple[torch.Tensor, PassedStates]:
    """`ops.gated_delta.gated_delta` in blocks: (y like v, the passed states, with n = K V for each value head).

    initial: (batch, value heads, K, V). Forward sends of each block K V + K K numbers per value head and K V back, backward
    K V and K V. Otherwise as `selective_scan_over_context`.
    """
    to_channels, from_channels = _with_heads_as_channels(context, k.shape[3], v.shape[3])

    @torch.no_grad()
    def pass_on() -> PassedStates:
        states, maps = delta_summary(k, v, g, beta)
        first = None if initial is None else initial.flatten(2)
        maps = maps.unflatten(0, (-1, context.blocks_per_rank))
        return pass_matrix_states(to_channels(states), maps, context, first)

    passed = context.recomputation.communicate_once(pass_on)
    y, after = gated_delta(q, k, v, g, beta, from_channels(passed.incoming))
    tensors = q, k, g, beta
    return _add_final_state_gradient(y, after, passed, delta_adjoint, to_channels, from_channels, *tensors), passed


def _with_heads_as_channels(context: ContextRanks, *shape: int) -> tuple[Callable, Callable]:
    """Functions that bring states (batch * blocks, heads, *shape) into the form of `state_passing`, and back."""

    def to_channels(states: torch.Tensor) -> torch.Tensor:
        return states.flatten(2).unflatten(0, (-1, context.blocks_per_rank))

    def from_channels(states: torch.Tensor) -> torch.Tensor:
        return states.flatten(0, 1).unflatten(2, shape)

    return to_channels, from_channels


def _add_final_state_gradient(
    y: torch.Tensor,
    after: torch.Tensor,
    passed: PassedStates,
    adjoint: Callable,
    to_channels: Callable,
    from_channels: Callable,
    *tensors,
) -> torch.Tensor:
    if not torch.is_grad_enabled():
        return y
    return _AddFinalStateGradient.apply(y, after, passed, adjoint, to_channels, from_channels, *tensors)
